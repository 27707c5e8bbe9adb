#!/usr/bin/env python3
"""SHA-1 of token ids, detokenising, stop strings and common prefixes beside what Python offers, in one run.

    python -m bench.core [--rounds N]

Targets: SHA-1 of 100,000 ids at most 0.35 ms from a list and 0.21 ms from a buffer; a token from its bytes to text at
most 60 ns.
"""

from __future__ import annotations

import argparse
import array
import codecs
import hashlib
import random

import numpy as np

from bench import timing
from ds4 import _core


def token_pieces(n: int) -> list[bytes]:
    """Token-like pieces of mixed text: words, code, CJK and emoji, some cut inside a character."""
    rng = random.Random(7)
    words = [
        " the",
        " token",
        "ing",
        "(",
        ")",
        " =",
        "\n",
        "    ",
        " return",
        "é",
        " été",
        "深度",
        "求",
        "🚀",
        " self",
        ".",
    ]
    weights = [9, 6, 6, 5, 5, 5, 6, 4, 3, 1, 1, 2, 2, 1, 4, 5]
    pieces: list[bytes] = []
    while len(pieces) < n:
        data = rng.choices(words, weights)[0].encode()
        if len(data) > 2 and data[0] >= 0x80 and rng.random() < 0.3:
            pieces += [data[:2], data[2:]]
        else:
            pieces.append(data)
    return pieces[:n]


def show(title: str, found: dict[str, list[float]], scale: float, unit: str, target: str = "") -> None:
    times = ", ".join(f"{name} {timing.median(t) * scale:.3g} {unit}" for name, t in found.items())
    print(f"{title}: {times}{target and f' (target {target})'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds

    print(f"CPU time, median of {rounds}; SHA-1 by {_core.SHA1_BACKEND}")
    ids = [(i * 2654435761) % 129280 for i in range(100_000)]
    buffer = np.array(ids, dtype=np.int32)
    want = hashlib.sha1(array.array("I", ids).tobytes()).digest()
    assert _core.sha1_tokens(ids) == _core.sha1_tokens(buffer) == want
    found = timing.seconds(
        {
            "ds4": lambda: _core.sha1_tokens(ids),
            "array + hashlib": lambda: hashlib.sha1(array.array("I", ids).tobytes()).digest(),
            "numpy + hashlib": lambda: hashlib.sha1(np.array(ids, dtype="<u4").tobytes()).digest(),
        },
        rounds,
    )
    show("SHA-1 of 100,000 ids in a list", found, 1e3, "ms", "0.35")
    found = timing.seconds(
        {"ds4": lambda: _core.sha1_tokens(buffer), "hashlib": lambda: hashlib.sha1(buffer).digest()}, rounds
    )
    show("SHA-1 of 100,000 ids in a buffer", found, 1e3, "ms", "0.21")
    short = b"x" * 100
    found = timing.seconds({"ds4": lambda: _core.sha1(short), "hashlib": lambda: hashlib.sha1(short).digest()}, rounds)
    show("SHA-1 of 100 bytes", found, 1e9, "ns")

    pieces = token_pieces(20_000)
    table = sorted(set(pieces))
    place = {piece: i for i, piece in enumerate(table)}
    tokens = [place[piece] for piece in pieces]

    def ours() -> None:
        feed = _core.Utf8Decoder().feed
        for token in tokens:
            feed(table[token])

    def peer() -> None:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        for token in tokens:
            decode(table[token])

    found = timing.seconds({"ds4": ours, "codecs": peer}, rounds)
    show("token to text", found, 1e9 / len(tokens), "ns", "60")

    def stops(strings: list[bytes]) -> None:
        feed = _core.StopMatcher(strings).feed
        for token in tokens:
            feed(table[token])

    found = timing.seconds(
        {
            "no stop string": lambda: stops([]),
            "four": lambda: stops([b"\n\nUser:", b"<|end|>", b"```\n", b"STOP"]),
            "a hundred": lambda: stops([b" the%03d" % i for i in range(100)]),
        },
        rounds,
    )
    show("stop strings, per token", found, 1e9 / len(tokens), "ns")

    other = buffer.copy()
    tail = list(ids)
    found = timing.seconds(
        {
            "two buffers": lambda: _core.common_prefix_tokens(buffer, other),
            "buffer and list": lambda: _core.common_prefix_tokens(buffer, ids),
            "two lists": lambda: _core.common_prefix_tokens(ids, tail),
            "numpy": lambda: int(np.argmin(np.append(buffer == other, False))),
        },
        rounds,
    )
    show("common prefix of 100,000 ids", found, 1e6, "us")


if __name__ == "__main__":
    main()
