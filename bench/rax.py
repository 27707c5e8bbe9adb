#!/usr/bin/env python3
"""Radix tree against dict, in one run: 100,000 tool-call ids of 37 bytes, CPU time per operation.

    python -m bench.rax

A dict cannot answer the longest-prefix question; its insert and find are the floor of what Python can do: a dict that
meets the very object it holds as a key need not look at its bytes. Keys of requests are other objects: "equal keys" are
copies, as they come. "hot" asks for 200 keys that stay in the caches: what is left there is the work without waiting.
`pygtrie` and `datrie` are measured too where they are installed. Targets: insert 300, find 350, longest prefix 450 ns.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

from bench import timing
from ds4._rax import Rax

N = 100_000
TARGETS = {"insert": 300, "find": 350, "longest prefix": 450}


def each(call: Callable[[Any], object], arguments: list[Any]) -> Callable[[], None]:
    def work() -> None:
        for argument in arguments:
            call(argument)

    return work


def main() -> None:
    rng = random.Random(3)
    keys = [b"call_%032x" % rng.getrandbits(128) for _ in range(N)]
    shuffled = rng.sample(keys, N)
    longer = [key + b"x" for key in shuffled]
    copies = [bytes(bytearray(key)) for key in shuffled]
    hot = shuffled[:200] * (N // 200)
    missing = [b"call_%032x" % rng.getrandbits(128) for _ in range(N)]

    def build(factory: Callable[[], Any], method: str) -> Callable[[], Any]:
        def work() -> Any:
            tree = factory()
            put = getattr(tree, method)
            for i, key in enumerate(keys):
                put(key, i)
            return tree

        return work

    tree = build(Rax, "insert")()
    table = build(dict, "__setitem__")()
    work: dict[str, dict[str, Callable[[], object]]] = {
        "insert": {"ds4._rax": build(Rax, "insert"), "dict": build(dict, "__setitem__")},
        "find": {"ds4._rax": each(tree.find, shuffled), "dict": each(table.get, shuffled)},
        "find equal keys": {"ds4._rax": each(tree.find, copies), "dict": each(table.get, copies)},
        "find hot": {"ds4._rax": each(tree.find, hot), "dict": each(table.get, hot)},
        "miss": {"ds4._rax": each(tree.find, missing), "dict": each(table.get, missing)},
        "longest prefix": {"ds4._rax": each(tree.longest_prefix, longer)},
        "empty loop": {"ds4._rax": each(lambda key: None, shuffled)},
    }
    for module, name, prefix in (("pygtrie", "CharTrie", "longest_prefix"), ("datrie", "Trie", "longest_prefix_item")):
        try:
            factory = getattr(importlib.import_module(module), name)
        except ImportError:
            continue
        peer = factory("call_0123456789abcdefx") if module == "datrie" else factory()
        for i, key in enumerate(keys):
            peer[key.decode()] = i
        work["longest prefix"][module] = each(getattr(peer, prefix), [key.decode() for key in longer])

    print(f"{N} keys of {len(keys[0])} bytes in random order, ns per operation, loop included: median [best]")
    for title, sides in work.items():
        line = f"{title:16s}"
        for name, values in timing.seconds(sides, rounds=7).items():
            line += f"{name:>12s} {timing.median(values) / N * 1e9:5.0f} [{min(values) / N * 1e9:4.0f}]"
        print(line + (f"    target {TARGETS[title]}" if title in TARGETS else ""))
    print(f"nodes: {tree.memory / N:.1f} bytes per key")


if __name__ == "__main__":
    main()
