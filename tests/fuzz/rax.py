"""Fuzz target of the radix tree: the input is a program of insertions, removals and questions, a dict the oracle."""

from __future__ import annotations

import random

from ds4._rax import Rax


def target(data: bytes) -> None:
    """Instructions of one byte of operation and key length, then the key."""
    tree: Rax[int] = Rax()
    model: dict[bytes, int] = {}
    at = 0
    while at < len(data):
        op, length = data[at] & 7, data[at] >> 3
        key = data[at + 1 : at + 1 + length]
        at += 1 + length
        if op < 3:
            assert tree.insert(key, at) is (key not in model)
            model[key] = at
        elif op == 3:
            assert tree.remove(key) is (model.pop(key, None) is not None)
        elif op == 4:
            assert tree.find(key) == model.get(key)
        elif op == 5:
            want = max((k for k in model if key.startswith(k)), key=len, default=None)
            assert tree.longest_prefix(key) == (None if want is None else (want, model[want]))
        elif op == 6:
            assert list(tree.items(key)) == sorted((k, v) for k, v in model.items() if k.startswith(key))
        else:
            walk = iter(tree)
            assert [k for k, _ in zip(walk, range(length), strict=False)] == sorted(model)[:length]
    tree.check()
    assert dict(tree.items()) == model


def example(rng: random.Random) -> bytes:
    """A program over few letters, so that keys share much."""
    out = bytearray()
    for _ in range(rng.randrange(60)):
        length = rng.randrange(10)
        out.append(rng.randrange(8) | length << 3)
        out += bytes(rng.choice(b"ab\x00\xff") for _ in range(length))
    return bytes(out)
