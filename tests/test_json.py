"""`ds4._json`: strictness, views and their errors, canonical text, output; every instruction set that the CPU has."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from ds4 import _json
from ds4._json import JSONError, Node, parse

SEED = 20261130


def usable_isas() -> list[str]:
    found = []
    for name in ("scalar", "sse2", "avx2", "avx512"):
        try:
            before = _json.use_isa(name)
        except ValueError:
            continue
        _json.use_isa(before)
        found.append(name)
    return found


@pytest.fixture(params=usable_isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _json.use_isa(request.param)
    yield request.param
    _json.use_isa(before)


# ---- strictness ------------------------------------------------------------------------------------------------

REFUSED = {
    b"": ("the text is empty", 0, "$"),
    b" \n": ("the text is empty", 0, "$"),
    b"\xef\xbb\xbf{}": ("byte order mark before the value", 0, "$"),
    b"{": ("the text ends inside a value", 1, "$"),
    b'{"a"': ("the text ends inside a value", 4, "$.a"),
    b'{"a":': ("the text ends inside a value", 5, "$.a"),
    b'{"a":1': ("the text ends inside a value", 6, "$.a"),
    b"[[1]": ("the text ends inside a value", 4, "$[1]"),
    b'{"a":1,}': ("expected a member name in double quotes", 7, "$.a"),
    b"{a:1}": ("expected a member name in double quotes", 1, "$"),
    b'{"a" 1}': ("expected `:` after a member name", 5, "$.a"),
    b'{"a":1 "b":2}': ("expected `,` or `}` after a member", 7, "$.a"),
    b"[1 2]": ("expected `,` or `]` after an element", 3, "$[1]"),
    b"[1}": ("expected `,` or `]` after an element", 2, "$[1]"),
    b"[1,]": ("expected a value", 3, "$[1]"),
    b"[,1]": ("expected a value", 1, "$[0]"),
    b"{} x": ("unexpected text after the value", 3, "$"),
    b"1 2": ("unexpected text after the value", 2, "$"),
    b"1\x00": ("unexpected text after the value", 1, "$"),
    b"[\x00]": ("expected a value", 1, "$[0]"),
    b"NaN": ("expected a value", 0, "$"),
    b"nan": ("invalid literal (only true, false and null exist)", 0, "$"),
    b"Infinity": ("expected a value", 0, "$"),
    b"-Infinity": ("invalid number", 0, "$"),
    b"+1": ("expected a value", 0, "$"),
    b"01": ("unexpected text after the value", 1, "$"),
    b"-": ("invalid number", 0, "$"),
    b"1.": ("invalid number", 0, "$"),
    b".5": ("expected a value", 0, "$"),
    b"1e": ("invalid number", 0, "$"),
    b"1e+": ("invalid number", 0, "$"),
    b"0x1": ("unexpected text after the value", 1, "$"),
    b"tru": ("invalid literal (only true, false and null exist)", 0, "$"),
    b"truE": ("invalid literal (only true, false and null exist)", 0, "$"),
    b"'a'": ("expected a value", 0, "$"),
    b"[1]//": ("unexpected text after the value", 3, "$"),
    b'"a': ("string without closing quote", 0, "$"),
    b'["a\\"]': ("string without closing quote", 1, "$[0]"),
    b'"\\': ("string without closing quote", 0, "$"),
    b'{"m":[1,{"c":"\\q"}]}': ("invalid escape in a string", 14, "$.m[1].c"),
    b'"\\u12"': ("invalid \\u escape in a string", 1, "$"),
    b'"\\u00g0"': ("invalid \\u escape in a string", 1, "$"),
    b'"a\nb"': ("raw control character in a string", 2, "$"),
    b'"\x00"': ("raw control character in a string", 1, "$"),
    b'"\xff"': ("invalid UTF-8 in a string", 1, "$"),
}


@pytest.mark.parametrize("body", REFUSED, ids=repr)
def test_refused(body: bytes) -> None:
    message, offset, path = REFUSED[body]
    with pytest.raises(JSONError) as e:
        parse(body)
    assert (e.value.message, e.value.offset, e.value.path) == (message, offset, path)
    assert e.value.syntax
    assert str(e.value).startswith(f"JSON is malformed: {message}, at byte {offset}")


def random_value(r: random.Random, depth: int = 0) -> Any:
    kind = r.randrange(9 if depth < 5 else 6)
    if kind == 0:
        return r.choice([None, True, False])
    if kind == 1:
        return r.randrange(-(10 ** r.randrange(1, 25)), 10 ** r.randrange(1, 25))
    if kind == 2:
        return r.uniform(-1, 1) * 10.0 ** r.randrange(-300, 300)
    if kind < 6:
        odd = ['"', "\\", "\n", "\b", "é", "ÿ", "Ā", "深", "\ud7ff", "\ufffd", "🚀", "\u2028", "\x00", "\x1b", "\x7f"]
        return "".join(r.choice([r.choice(odd), "x" * r.randrange(80)]) for _ in range(r.randrange(12)))
    if kind == 6:
        return [random_value(r, depth + 1) for _ in range(r.randrange(6))]
    names = ["a", 'b"', "é🚀", "k" * 70, "\n\x01"]
    return {r.choice(names) + str(r.randrange(4)): random_value(r, depth + 1) for _ in range(r.randrange(6))}


def test_agrees_with_the_standard_library() -> None:
    print("seed", SEED)
    r = random.Random(SEED)
    for _ in range(800):
        value = random_value(r)
        line = json.dumps(value, ensure_ascii=False)
        for ascii_only in (True, False):
            tight = json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":"))
            for indent in (None, 2, "\t\r\n "):
                root = parse(json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode())
                assert root.loads() == value
                assert root.canonical() == line
                assert root.minified() == tight
        assert _json.canonical(line) == line
        assert json.loads(_json.dumps(value)) == value


def test_error_names_the_path() -> None:
    root = parse(b'{"messages":[{},{},{"role":5}],"x y":{"a.b":[null]}}')
    with pytest.raises(JSONError) as e:
        root["messages"][2]["role"].as_str()
    assert str(e.value) == "Expected `str`, got `int` - at `$.messages[2].role`"
    assert e.value.param == "messages[2].role"
    with pytest.raises(JSONError) as e:
        root["x y"]["a.b"][0].as_int()
    assert e.value.path == '$["x y"]["a.b"][0]'
    assert isinstance(root, Node)
