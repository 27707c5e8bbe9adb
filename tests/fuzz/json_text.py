"""Fuzz target of the JSON room: any bytes. The standard library is the oracle, for every instruction set."""

from __future__ import annotations

import json
import random

from ds4 import _json
from tests.support.json_text import check, random_value, respelled, usable_isas

_ISAS = usable_isas()


def verdict(body: bytes) -> tuple[object, ...]:
    """Everything that must not depend on the instruction set."""
    try:
        root = _json.parse(body)
    except _json.JSONError as e:
        return e.message, e.offset, e.path
    try:
        value = json.dumps(root.loads())
    except _json.JSONError as e:
        value = str(e)
    return value, root.canonical(), root.minified(), _json.escape(root.minified())


_NAMES = ("a", "b", "role", "content", "tools")
_FIELDS = _json.Fields(**dict.fromkeys(_NAMES, "any"))


def check_members(body: bytes) -> None:
    """Fields and getters find the same members, the last of duplicates, and what is written reads back."""
    try:
        root = _json.parse(body)
        value = root.loads()
    except _json.JSONError:
        return
    text = _json.escape(root.minified())
    assert _json.sse_chunk(b'data: "', root.minified(), b'"\n\n') == b'data: "' + text + b'"\n\n'
    assert json.loads(b'"' + text + b'"') == root.minified()
    # A table so small that it forgets, and one text in it whose spelling differs.
    texts = _json.Texts(1 << 10, 4)
    for node in (_json.parse(b'"\\u0061bcd"'), root, *(root if root.kind == "array" else ()), root):
        if node.kind == "str":
            assert texts.read(node) == texts.read(node) == node.as_str()
    if root.kind != "object":
        return
    assert isinstance(value, dict)
    for name, found in zip(_NAMES, _FIELDS.read(root), strict=True):
        want = value.get(name)
        got = found.loads() if isinstance(found, _json.Node) else found
        assert json.dumps(got) == json.dumps(want) and (name in root) == (name in value)
        node = root.get(name)
        assert (node is None) == (want is None) and (node is None or json.dumps(node.loads()) == json.dumps(want))
    assert root.keys() == list(value) and [k for k, _ in root.items()] == list(value)


def check_beginnings(body: bytes) -> None:
    """A former body that begins alike changes nothing, whatever its own end."""
    cut = body[0] * len(body) // 256 if body else 0
    for former in (
        body[:cut] + b"]",
        body[:cut] + b"}",
        body[:cut] + b'"]}',
        body[cut:],
        b"[" + body + b"," + body + b"]",
    ):
        bodies = _json.Bodies(1 << 20, 1)
        for text in (former, body, b"[" + body + b"]"):
            try:
                found = bodies.parse(text).canonical()
            except _json.JSONError as e:
                found = str(e)
            try:
                assert found == _json.parse(text).canonical()
            except _json.JSONError as e:
                assert found == str(e)


def target(data: bytes) -> None:
    """The input is the body."""
    before = _json.use_isa("auto")
    try:
        check(data)
        check_members(data)
        check_beginnings(data)
        verdicts = []
        for isa in _ISAS:
            _json.use_isa(isa)
            verdicts.append(verdict(data))
        assert all(v == verdicts[0] for v in verdicts)
    finally:
        _json.use_isa(before)


def example(rng: random.Random) -> bytes:
    """A value in a random spelling, sometimes deep, long or with pieces that break it."""
    kind = rng.randrange(8)
    if kind == 0:
        n = rng.choice([3, 200, 255, 256, 257, 300])
        return b"[" * n + b"1" + b"]" * (n - rng.randrange(2))
    body = respelled(rng, random_value(rng)).encode()
    if kind < 4:
        pieces = [
            b'"',
            b"\\",
            b"\\u",
            b"\\ud83d",
            b"\\ude00",
            b"\xf0\x9f",
            b"\x80",
            b"\xed\xa0\x80",
            b"1e999",
            b"-0",
            b",",
        ]
        at = rng.randrange(len(body) + 1)
        body = body[:at] + rng.choice(pieces) + body[at:]
    return body
