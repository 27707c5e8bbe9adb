"""The radix tree: against a dict, at its edges, under failing memory, with the garbage collector."""

from __future__ import annotations

import gc
import os
import random
import weakref
from typing import Any

import pytest

from ds4._rax import Rax
from tests.fuzz import rax as rax_fuzz


def model_prefix(model: dict[bytes, int], query: bytes) -> tuple[bytes, int] | None:
    best = max((k for k in (query[:n] for n in range(len(query) + 1)) if k in model), key=len, default=None)
    return None if best is None else (best, model[best])


def random_key(rng: random.Random) -> bytes:
    """Keys that share much: few letters, many lengths; now and then all 256 bytes, or a long run."""
    kind = rng.random()
    if kind < 0.7:
        return bytes(rng.choice(b"ab") for _ in range(rng.randrange(12)))
    if kind < 0.9:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(4)))
    return b"call_" + bytes(rng.choice(b"0123456789abcdef") for _ in range(rng.randrange(4))) * rng.randrange(1, 4)


def play(operations: int, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    tree: Rax[int] = Rax()
    model: dict[bytes, int] = {}
    growing = True
    keys: list[bytes] = []
    for n in range(operations):
        if n % 50_000 == 0:
            keys = [random_key(rng) for _ in range(20_000)]
        key = rng.choice(keys)
        op = rng.random()
        if op < (0.45 if growing else 0.15):
            assert tree.insert(key, n) is (key not in model)
            model[key] = n
        elif op < 0.6:
            assert tree.remove(key) is (model.pop(key, None) is not None)
        elif op < 0.8:
            assert tree.find(key) == model.get(key)
            assert (key in tree) is (key in model)
        elif op < 0.9995:
            assert tree.longest_prefix(key) == model_prefix(model, key)
        else:
            prefix = key[: rng.randrange(len(key) + 1)]
            below = sorted((k, v) for k, v in model.items() if k.startswith(prefix))[:50]
            assert [pair for pair, _ in zip(tree.items(prefix), range(50), strict=False)] == below
        assert len(tree) == len(model)
        if n % 20_000 == 0:
            growing = not growing
            tree.check()
            assert list(tree) == sorted(model)
    tree.check()
    assert dict(tree.items()) == model
    for key in rng.sample(sorted(model), len(model)):
        del tree[key]
    tree.check()
    assert len(tree) == 0 and list(tree) == []


def test_against_a_dict_a_million_times() -> None:
    # Under sanitizers an operation takes ten times as long.
    play(200_000 if "ASAN_OPTIONS" in os.environ else 1_000_000, random.SystemRandom().randrange(2**32))


def test_picture() -> None:
    """The tree of the module's picture, and what each insertion does to it."""
    tree: Rax[str] = Rax()
    for key in (b"call_1a", b"call_1b", b"call_2", b"cat"):
        assert tree.insert(key, key.decode())
    for key in (b"cart", b"ca", b"cold", b""):
        assert tree.insert(key, key.decode())
        tree.check()
    assert list(tree) == [b"", b"ca", b"call_1a", b"call_1b", b"call_2", b"cart", b"cat", b"cold"]
    assert tree.longest_prefix(b"call_1") == (b"ca", "ca")
    assert tree.longest_prefix(b"call_1bc") == (b"call_1b", "call_1b")
    assert tree.longest_prefix(b"x") == (b"", "")
    assert tree.longest_prefix(b"a cat", 2) == (b"cat", "cat")
    assert tree.longest_prefix(b"cat", 3) == (b"", "")
    for start in (-1, 4):
        with pytest.raises(ValueError, match="start"):
            tree.longest_prefix(b"cat", start)
    assert [k for k, _ in tree.items(b"call_1")] == [b"call_1a", b"call_1b"]
    assert [k for k, _ in tree.items(b"cal")] == [b"call_1a", b"call_1b", b"call_2"]
    assert list(tree.items(b"call_1ab")) == list(tree.items(b"dog")) == []


def test_mapping_protocol() -> None:
    tree: Rax[int] = Rax()
    tree[b"k"] = 1
    tree[b"k"] = 2
    assert tree[b"k"] == 2 and len(tree) == 1
    assert tree.find(b"x") is None and tree.find(b"x", 7) == 7
    assert tree.longest_prefix(b"x") is None
    for missing in (b"", b"x", b"kk"):
        with pytest.raises(KeyError):
            tree[missing]
        with pytest.raises(KeyError):
            del tree[missing]
        assert not tree.remove(missing)
    for wrong in ("k", None, bytearray(b"k")):
        with pytest.raises(TypeError):
            tree.find(wrong)  # type: ignore[call-overload]
        with pytest.raises(TypeError):
            tree.insert(wrong, 1)  # type: ignore[arg-type]
    tree.clear()
    assert len(tree) == 0 and b"k" not in tree
    tree.check()


def test_every_byte_as_an_edge() -> None:
    tree: Rax[int] = Rax()
    keys = [bytes([a]) for a in range(256)]
    random.Random(1).shuffle(keys)
    for key in keys:
        tree[key] = key[0]
    tree.check()
    full = tree.memory
    assert list(tree.items()) == [(bytes([a]), a) for a in range(256)]
    for key in keys[:250]:
        del tree[key]
        tree.check()
    assert sorted(tree) == sorted(keys[250:])
    assert tree.memory < full / 4, "room for children is given back"


def test_a_path_of_a_hundred_thousand_nodes() -> None:
    """No walk, removal or deallocation recurses."""
    tree: Rax[int] = Rax()
    n = 100_000
    word = b"a" * n
    for i in range(0, n, 100):
        tree[word[:i]] = i
    deep: Rax[int] = Rax()
    for i in range(20_000):
        deep[word[:i]] = i
    tree.check()
    assert tree.longest_prefix(word) == (word[: n - 100], n - 100)
    assert sum(1 for _ in deep) == 20_000
    deep.check()
    del deep


def test_memory_is_counted() -> None:
    tree: Rax[None] = Rax()
    empty = tree.memory
    for i in range(1000):
        tree[b"call_%032x" % i] = None
    assert 1000 * 16 < tree.memory < 1000 * 150
    for i in range(1000):
        del tree[b"call_%032x" % i]
    assert tree.memory <= empty + 64


def test_iterators_notice_changes() -> None:
    tree: Rax[int] = Rax()
    for i in range(10):
        tree[b"%d" % i] = i
    walk = tree.items()
    next(walk)
    tree[b"3"] = 33
    assert next(walk) == (b"1", 1), "a new value is no change of the tree"
    tree[b"x"] = 1
    with pytest.raises(RuntimeError, match="changed during iteration"):
        next(walk)


def test_values_are_released() -> None:
    class Value:
        pass

    tree: Rax[Any] = Rax()
    value = Value()
    ref = weakref.ref(value)
    tree[b"a"] = value
    del value
    assert ref() is not None
    tree[b"a"] = None
    assert ref() is None
    refs = []
    for i in range(100):
        value = Value()
        refs.append(weakref.ref(value))
        tree[b"%d" % i] = value
    del value
    for i in range(50):
        del tree[b"%d" % i]
    assert [r() is None for r in refs] == [True] * 50 + [False] * 50
    tree.clear()
    assert all(r() is None for r in refs)


def test_cycles_are_collected() -> None:
    class Node:
        def __init__(self) -> None:
            self.tree: Rax[Node] = Rax()

    node = Node()
    node.tree[b"self"] = node
    ref = weakref.ref(node)
    del node
    gc.collect()
    assert ref() is None


def test_a_finalizer_may_use_the_tree() -> None:
    tree: Rax[Any] = Rax()
    seen: list[int] = []

    class Value:
        def __del__(self) -> None:
            seen.append(len(tree))
            tree[b"from finalizer"] = 1
            tree.check()

    for operation in ("replace", "remove", "clear"):
        tree[b"key"] = Value()
        tree[b"keys"] = 0
        if operation == "replace":
            tree[b"key"] = 0
        elif operation == "remove":
            del tree[b"key"]
        else:
            tree.clear()
        tree.check()
    assert len(seen) == 3 and tree[b"from finalizer"] == 1


def test_failing_allocations_change_nothing() -> None:
    """Every allocation of an insertion and of a removal fails once; the tree stays as it was."""
    capi = pytest.importorskip("_testcapi")
    keys = [b"call_1a", b"call_1b", b"call_2", b"cat", b"cart", b"ca", b"cold", b"c" * 40, b"c" * 20, b"call_1ab"]
    failures = 0
    for grow in (True, False):
        tree: Rax[int] = Rax()
        if not grow:
            for i, key in enumerate(keys):
                tree[key] = i
        for i, key in enumerate(keys):
            before = list(tree.items())
            for attempt in range(20):
                capi.set_nomemory(attempt, attempt + 1)
                try:
                    tree.insert(key, i) if grow else tree.__delitem__(key)
                except MemoryError:
                    capi.remove_mem_hooks()
                    failures += 1
                    tree.check()
                    assert list(tree.items()) == before
                    continue
                finally:
                    capi.remove_mem_hooks()
                break
            tree.check()
            assert (key in tree) is grow
    # Nodes share slabs; each is an allocation of its own only under AddressSanitizer.
    assert failures > 2


def test_fuzz_target() -> None:
    """The target runs, on its own examples and on random bytes."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        rax_fuzz.target(rax_fuzz.example(rng))
        rax_fuzz.target(rng.randbytes(rng.randrange(200)))
