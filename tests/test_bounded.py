"""Bounded caches: what was used stays, what was not goes, and the costs add up."""

from __future__ import annotations

import random
import threading

import pytest

from ds4.bounded import BoundedCache, once_per_object, remembered


def test_used_entries_outlive_others() -> None:
    cache: BoundedCache[int, str] = BoundedCache(100)
    cache.put(0, "kept", 10)
    for i in range(1, 50):
        cache.put(i, str(i), 10)
        assert cache.get(0) == "kept"
    assert cache.get(1) is None
    assert cache.get(49) == "49"


def test_costs_are_bounded_and_add_up() -> None:
    seed = random.SystemRandom().getrandbits(32)
    rng = random.Random(seed)
    cache: BoundedCache[int, int] = BoundedCache(1000)
    costs: dict[int, int] = {}
    for _ in range(5000):
        key = rng.randrange(60)
        if rng.random() < 0.1:
            cache.discard(key)
            assert cache.get(key) is None, f"seed {seed}"
            continue
        found = cache.get(key)
        assert found in (None, costs.get(key)), f"seed {seed}"
        if found is None or rng.random() < 0.3:
            costs[key] = rng.randrange(1, 600)
            cache.put(key, costs[key], costs[key])
            assert cache.get(key) == (costs[key] if costs[key] <= 500 else found), f"seed {seed}"
            if costs[key] > 500 and found is not None:
                costs[key] = found
        assert cache.cost <= 1000, f"seed {seed}"


def test_what_is_too_large_is_not_kept() -> None:
    cache: BoundedCache[str, int] = BoundedCache(100)
    cache.put("small", 1, 50)
    cache.put("large", 2, 51)
    assert cache.get("large") is None
    assert cache.get("small") == 1
    assert len(cache) == 1 and cache.cost == 50


def test_remembered_function_computes_once() -> None:
    calls: list[tuple[str, int]] = []

    @remembered(1000, lambda text, n: len(text))
    def repeat(text: str, n: int) -> str:
        calls.append((text, n))
        return text * n

    assert [repeat("ab", 2), repeat("ab", 2), repeat("ab", 3)] == ["abab", "abab", "ababab"]
    assert calls == [("ab", 2), ("ab", 3)]


def test_threads_find_only_right_values() -> None:
    cache: BoundedCache[int, int] = BoundedCache(64)
    wrong: list[int] = []

    def work(start: int) -> None:
        for i in range(start, start + 3000):
            key = i * 7919 % 101
            found = cache.get(key)
            if found not in (None, key * key):
                wrong.append(key)
            cache.put(key, key * key, 1)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.cost <= 64


def test_once_per_object_tells_objects_apart() -> None:
    """What is equal but another object, or a new object where an old one was, gets a result of its own."""
    calls: list[tuple[object, ...]] = []

    @once_per_object(1000, lambda first, second: 10)
    def pair(first: tuple[int, ...], second: object) -> tuple[object, object]:
        calls.append((first, second))
        return first, second

    one, same = tuple(range(2)), tuple(range(2))
    assert pair(one, None)[0] is one and pair(same, None)[0] is same and pair(one, True) == (one, True)
    assert pair(one, None) is pair(one, None) and len(calls) == 3
    for i in range(1000):
        # Freed at once where it is not kept: the next one is likely to be where it was.
        made = tuple(range(i, i + 2))
        assert pair(made, None) == ((i, i + 1), None)
    with pytest.raises(TypeError, match="positional"):
        pair(one, second=None)


def test_a_remembered_function_takes_no_keywords() -> None:
    @remembered(1000, lambda text, n: 1)
    def repeat(text: str, n: int) -> str:
        return text * n

    assert repeat("a", 2) == "aa"
    with pytest.raises(TypeError, match="positional"):
        repeat("a", n=3)
