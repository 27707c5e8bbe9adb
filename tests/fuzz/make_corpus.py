#!/usr/bin/env python3
"""Writes the seed corpora, the same bytes on every machine: `python -m tests.fuzz.make_corpus`.

Seeds are the worked and reported cases of `tests/data` in the form of the targets' inputs, hand-written inputs for each
branch that a mutator finds late, and a few examples of each target.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz import core, dsml, json_text, rax
from tests.fuzz.run import CORPUS
from tests.support.turns import SYNTAXES, written

DATA = Path(__file__).resolve().parents[1] / "data"
THINKING, TOOLS, SCHEMAS, LENGTH, BARE = 1, 2, 4, 8, 32


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def turns() -> Iterator[bytes]:
    """Every worked turn in its syntax; every syntax with a call, a thought, a cut call and a damaged one."""

    def turn(syntax: str, flags: int, text: str, cut: int = 128) -> bytes:
        return bytes([dsml.ALL.index(syntax), flags, cut]) + text.encode()

    for case in lines("parser_cases.jsonl"):
        syntax, thinking = case.get("syntax") or "deepseek4", THINKING if case.get("thinking") else 0
        if case["kind"] == "final":
            yield turn(syntax, TOOLS | thinking | (LENGTH if case["cause"] == "length" else 0), case["raw"])
        elif case["kind"] == "stream":
            yield turn(syntax, TOOLS | THINKING, "".join(piece or "" for piece, _ in case["steps"]))
    calls = [("f", {"a": "1 < 2 && </x>", "b": [1, {"k": "é\n\U0001f600"}], "c": None})]
    for syntax in SYNTAXES:
        block = written(calls, syntax)[0]
        for flags in (TOOLS, TOOLS | SCHEMAS, TOOLS | LENGTH, TOOLS | BARE, 0):
            yield turn(syntax, flags, f"Sure.{block}")
            yield turn(syntax, flags | THINKING, f"plan</think>Sure.{block}")
        yield turn(syntax, TOOLS | THINKING, f"plan {block}")
        yield turn(syntax, TOOLS | THINKING, f"plan {block} and more</think>done")
        yield turn(syntax, TOOLS, block[: len(block) * 2 // 3])
        yield turn(syntax, TOOLS, block.replace("</", "<", 1))
    yield turn("raw", 0, "<think>x</think>\n\n<tool_call>")


def bodies() -> Iterator[bytes]:
    """What RFC 8259 allows and what it does not, each in one small body."""
    for text in (
        "null", "true", "false", "0", "-0", "1.5e+3", "-1E-7", "123456789012345678901234567890", "1e308", "1e309", '""',
        '"a\\"\\\\\\/\\b\\f\\n\\r\\t"', '"\\u0000\\u00e9\\ud83d\\ude80"', '"\\ud83d"', '"\\ude80\\ud83d\\n"', '"é深🚀"',
        "[]", "{}", " [ 1 , 2 ] ", '{"a":1,"a":2}', '{"a":{"b":[{"c":null}]},"d":"\\u2028"}', '{"":"","\\u0000":0}',
        "", " ", "nul", "01", "+1", "1.", ".5", "1e", "0x10", "NaN", "-Infinity", "'a'", "[1,]", '{"a":1,}', '{"a" 1}',
        '{a:1}', "[1 2]", "1 2", '"\\x"', '"\\u12"', '"\t"', "[", '{"a":', '"', "\ufeff1", "// c", "[1]]",
    ):  # fmt: skip
        yield text.encode()
    yield from (b"\xff", b'"\x80"', b'"\xc0\xaf"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xe2\x80', b"\x00")
    for depth in (255, 256, 257):
        yield b"[" * depth + b"]" * depth
    yield b'{"a":' * 256 + b"1" + b"}" * 256
    # Longer than every vector width, with something to find at its end.
    yield b'"' + b"x" * 127 + b'\\n"'
    yield b'{"k' + b"k" * 64 + b'":' + b" " * 65 + b"[" + b"1," * 40 + b"1]}"
    tool = {"type": "object", "properties": {"path": {"type": "string", "enum": ["a", "b"]}}, "required": ["path"]}
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"path": "a\\n"}'}}
    yield json.dumps({
        "model": "m", "stream": True, "tools": [{"type": "function", "function": {"name": "f", "parameters": tool}}],
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
    }).encode()  # fmt: skip


def programs() -> Iterator[bytes]:
    """Programs for the tree: splits, merges, a node that grows to 256 children and shrinks, a deep path."""

    def step(op: int, key: bytes) -> bytes:
        return bytes([op | len(key) << 3]) + key

    words = [b"call_1a", b"call_1b", b"call_2", b"cat", b"cart", b"ca", b"cold", b""]
    put = b"".join(step(0, w) for w in words)
    yield put
    yield put + b"".join(step(3, w) for w in words)
    yield put + b"".join(step(5, w + b"x") + step(6, w) + step(4, w) + step(7, w) for w in words)
    wide = [bytes([c]) for c in range(256)]
    yield b"".join(step(0, w) for w in wide) + b"".join(step(3, w) for w in wide)
    yield b"".join(step(0, b"k" + w) for w in reversed(wide)) + step(6, b"k") + step(5, b"k\x80z")
    deep = [b"a" * n for n in range(32)]
    yield b"".join(step(0, w) for w in deep) + step(5, b"a" * 31) + b"".join(step(3, w) for w in deep[::2])
    yield step(0, b"x" * 31) + step(0, b"x" * 15 + b"y" * 16) + step(3, b"x" * 31) + step(4, b"x" * 15 + b"y" * 16)


def mixtures() -> Iterator[bytes]:
    """Stop strings that overlap and nest, text of every width and every kind of broken UTF-8."""

    def mixture(stops: list[bytes], step: int, text: bytes) -> bytes:
        return bytes([len(stops), step]) + b"".join(bytes([len(s)]) + s for s in stops) + text

    yield mixture([b"ab", b"abc", b"bcd"], 0, b"xxabxabcxbcdx")
    yield mixture([b"aab", b"aaab"], 1, b"aaaaaaab")
    yield mixture([b"abab", b"ba", b"", b"b"], 2, b"aabababb")
    yield mixture([], 0, "aé深🚀\u0000\u2028".encode())
    for broken in (b"\x80", b"\xc3", b"\xc0\xaf", b"\xe2\x80", b"\xed\xa0\xbd", b"\xf0\x9f\x9a", b"\xf4\x90\x80\x80"):
        for width in (0, 2):
            yield mixture([], width, b"a" + broken + b"b" + broken)
    for size in (55, 56, 63, 64, 65, 127, 128, 256):
        yield mixture([], 6, bytes(range(256))[:size])


def corpora() -> dict[str, list[bytes]]:
    """Target -> its seeds."""
    made = {"core": [*mixtures()], "dsml": [*turns()], "json_text": [*bodies()], "rax": [*programs()]}
    for module, name in ((core, "core"), (dsml, "dsml"), (json_text, "json_text"), (rax, "rax")):
        rng = random.Random(name)
        made[name] += [module.example(rng) for _ in range(16)]
    return made


def main() -> None:
    shutil.rmtree(CORPUS, ignore_errors=True)
    for name, inputs in corpora().items():
        folder = CORPUS / name
        folder.mkdir(parents=True)
        for data in inputs:
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        print(f"{name}: {len(set(inputs))} seeds, {sum(map(len, set(inputs)))} bytes")


if __name__ == "__main__":
    main()
