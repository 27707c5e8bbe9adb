"""`ds4._json`: strictness, views and their errors, canonical text, output; every instruction set that the CPU has."""

from __future__ import annotations

import enum
import json
import math
import pickle
import random
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ds4 import _json
from ds4._json import JSONError, Node, parse
from tests.support.json_text import check, random_value, respelled, usable_isas

SEED = 20261130


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
    b'{"a":1,}': ("expected a member name in double quotes", 7, "$"),
    b'{"a":1,"b': ("string without closing quote", 7, "$"),
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


# ---- views -----------------------------------------------------------------------------------------------------

REQUEST = parse(
    b'{"model":"m","n":3,"f":3.0,"half":2.5,"e":2e2,"on":true,"off":false,"none":null,"list":[1,"a",null],"o":{},'
    b'"big":9223372036854775807,"bigger":9223372036854775808,"huge":1e999,"caf\\u00e9":"x","empty":""}'
)


def test_getters_and_null_as_absent() -> None:
    r = REQUEST
    assert r.get_str("model") == "m" and r.get_str("none") is None and r.get_str("nothing", "d") == "d"
    assert r.get_str("none", "d") == "d" and r.get_str("empty", "d") == ""
    assert r.get_bool("on") is True and r.get_bool("off", True) is False and r.get_bool("none", True) is True
    assert r.get_int("n") == 3 and r.get_int("f") == 3 and r.get_int("e") == 200 and r.get_int("none", 7) == 7
    assert r.get_float("half") == 2.5 and r.get_float("n") == 3.0 and type(r.get_float("n")) is float
    assert r.get_int("big") == 2**63 - 1 and r.get_float("bigger") == 2.0**63
    assert r.get("none") is None and r["none"].is_null and "none" in r and "nothing" not in r
    assert r.get_array("list") is not None and r.get_object("none") is None
    assert r.get_str("caf\u00e9") == "x" and "caf\ud800" not in r
    assert [n.kind for n in r["list"]] == ["int", "str", "null"] and len(r["list"]) == 3
    assert r["list"][-2].as_str() == "a" and bool(r["o"]) and len(r["o"]) == 0
    assert r["list"].raw == b'[1,"a",null]' and r["list"][1].start + 3 == r["list"][1].end
    assert [k for k, _ in r.items()] == r.keys() and r.keys()[:3] == ["model", "n", "f"]
    with pytest.raises(IndexError):
        r["list"][3]
    with pytest.raises(TypeError):
        r["list"][1.5]  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        Node()


@pytest.mark.parametrize(
    ("call", "message", "path"),
    [
        (lambda r: r["nothing"], "Object missing required field `nothing`", "$"),
        (lambda r: r.get_str("n"), "Expected `str`, got `int`", "$.n"),
        (lambda r: r.get_bool("n"), "Expected `bool`, got `int`", "$.n"),
        (lambda r: r.get_int("on"), "Expected `int`, got `bool`", "$.on"),
        (lambda r: r.get_int("half"), "Expected `int`, got `float`", "$.half"),
        (lambda r: r.get_int("model"), "Expected `int`, got `str`", "$.model"),
        (lambda r: r.get_int("bigger"), "Number out of range", "$.bigger"),
        (lambda r: r.get_int("huge"), "Number out of range", "$.huge"),
        (lambda r: r.get_float("huge"), "Number out of range", "$.huge"),
        (lambda r: r.get_float("model"), "Expected `float`, got `str`", "$.model"),
        (lambda r: r.get_int("n", lo=4), "Expected `int` >= 4, got 3", "$.n"),
        (lambda r: r.get_int("n", lo=0, hi=2), "Expected `int` <= 2, got 3", "$.n"),
        (lambda r: r.get_float("half", hi=2), "Expected `float` <= 2, got 2.5", "$.half"),
        (lambda r: r.get_object("list"), "Expected `object`, got `array`", "$.list"),
        (lambda r: r.get_array("o"), "Expected `array`, got `object`", "$.o"),
        (lambda r: r["list"].get_str("x"), "Expected `object`, got `array`", "$.list"),
        (lambda r: r["list"].keys(), "Expected `object`, got `array`", "$.list"),
        (lambda r: r["o"][0], "Expected `array`, got `object`", "$.o"),
        (lambda r: list(r["o"]), "Expected `array`, got `object`", "$.o"),
        (lambda r: len(r["n"]), "Expected `array`, got `int`", "$.n"),
        (lambda r: r["list"].ints(), "Expected `int`, got `str`", "$.list[1]"),
        (lambda r: r.loads(), "Number out of range", "$.huge"),
    ],
)
def test_view_errors(call: Any, message: str, path: str) -> None:
    with pytest.raises(JSONError) as e:
        call(REQUEST)
    assert (e.value.message, e.value.path, e.value.syntax) == (message, path, False)


def test_error_of_the_caller() -> None:
    e = REQUEST["list"][1].error("Unknown role")
    assert isinstance(e, ValueError) and str(e) == "Unknown role - at `$.list[1]`" and e.param == "list[1]"
    assert pickle.loads(pickle.dumps(e)).args == e.args and parse(b"1").error("x").param is None
    assert JSONError("m", '$["a b"].c').param == '["a b"].c'


def test_last_of_duplicate_members_counts() -> None:
    for filler in (0, 40):  # few members are searched, many indexed
        members = ",".join(f'"k{i}":{i}' for i in range(filler))
        root = parse(f'{{"a":1,"b":5,"\\u0061":[2]{(filler and ",") or ""}{members},"a":{{"c":3}}}}'.encode())
        assert root["a"].canonical() == '{"c": 3}' and root["a"].path == "$.a"
        assert root.keys()[:2] == ["a", "b"] and dict(root.items())["a"].kind == "object"
        assert root.loads()["a"] == {"c": 3}  # type: ignore[index]
        assert root.canonical().startswith('{"a": 1, "b": 5, "a": [2], ')
        assert _json.Fields(b="int", a="object").read(root)[0] == 5
    with pytest.raises(JSONError):
        parse(b'{"a":1,"a":nul}')


def test_fields() -> None:
    fields = _json.Fields(role="str", content="any", calls="array", n="int", t="float", on="bool", o="object")
    body = b"""{"m":[
        {"role":"user","x":[{"role":1}],"content":"caf\\u00e9","n":1,"t":2,"on":true,"o":{}},
        {"content":[1],"calls":[2],"role":"tool"},
        {"\\u0072ole":"a","content":4},
        {"role":null}, {}, {"role":"x","role":"y","content":null}
    ]}"""
    rows = fields.read_all(parse(body)["m"])
    assert rows[0][:6] == ("user", "café", None, 1, 2.0, True) and rows[0][6].path == "$.m[0].o"
    assert rows[1][0] == "tool" and rows[1][1].path == "$.m[1].content" and rows[1][2].loads() == [2]
    assert rows[2][:2] == ("a", 4) and rows[3] == rows[4] == (None,) * 7 and rows[5][:2] == ("y", None)
    assert fields.read(parse(body)["m"][1])[0] == "tool"
    for bad, message, path in [
        (b'{"m":[{},{"role":5}]}', "Expected `str`, got `int`", "$.m[1].role"),
        (b'{"m":[{},{"calls":{}}]}', "Expected `array`, got `object`", "$.m[1].calls"),
        (b'{"m":[{},[]]}', "Expected `object`, got `array`", "$.m[1]"),
        (b'{"m":{}}', "Expected `array`, got `object`", "$.m"),
    ]:
        with pytest.raises(JSONError) as e:
            fields.read_all(parse(bad)["m"])
        assert (e.value.message, e.value.path) == (message, path)
    call = _json.Fields(id="str", function=_json.Fields(name="str"))
    nested = _json.Fields(calls=[call], first=call)
    row = nested.read(parse(b'{"calls":[{"id":"1","function":{"name":"f"}},{}],"first":{"function":null}}'))
    assert row == ([("1", ("f",)), (None, None)], (None, None))
    for bad, message, path in [
        (b'{"calls":[{},{"function":{"name":1}}]}', "Expected `str`, got `int`", "$.calls[1].function.name"),
        (b'{"calls":{}}', "Expected `array`, got `object`", "$.calls"),
        (b'{"first":[]}', "Expected `object`, got `array`", "$.first"),
    ]:
        with pytest.raises(JSONError) as e:
            nested.read(parse(bad))
        assert (e.value.message, e.value.path) == (message, path)
    for kinds in ({}, {"a": "text"}, {"a": [call, call]}, {"a": ["str"]}, {f"f{i}": "any" for i in range(65)}):
        with pytest.raises(ValueError):
            _json.Fields(**kinds)  # type: ignore[arg-type]


def test_token_arrays() -> None:
    ids = list(range(0, 130_000, 7))
    assert parse(json.dumps(ids).encode()).ints() == ids
    assert parse(b"[1, 2.0, -3e0]").ints() == [1, 2, -3]
    with pytest.raises(JSONError, match=r"Expected `int` <= 9, got 10 - at `\$\[2\]`"):
        parse(b"[1,2,10]").ints(0, 9)
    with pytest.raises(JSONError, match="Number out of range"):
        parse(b"[99999999999999999999]").ints()


# ---- strings and numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        (rb'"x \ud83d"', "x \ufffd"),
        (rb'"\ude00 y"', "\ufffd y"),
        (rb'"\ud83d\u0041"', "\ufffdA"),
        (rb'"\ud83d\n"', "\ufffd\n"),
        (rb'"\ud83dX"', "\ufffdX"),
        (rb'"\ude00\ud83d"', "\ufffd\ufffd"),
        (rb'"\ud83d\ud83d\ude00"', "\ufffd😀"),
        (rb'"\ud83d\ude00"', "😀"),
        (rb'"\uD83D\uDE00\u00E9"', "😀é"),
        (rb'"\ud800\udc00 \udbff\udfff"', "\U00010000 \U0010ffff"),
        (
            rb'"\ud83d\udbff \ud83d\ue000 \ud7ff\udc00 \udc00\udc00"',
            "\ufffd\ufffd \ufffd\ue000 \ud7ff\ufffd \ufffd\ufffd",
        ),
        (rb'"\ud83d\\ude00"', "\ufffd\\ude00"),
        (rb'"a\u0000b"', "a\x00b"),
        (rb'"\"\\\/\b\f\n\r\t"', '"\\/\b\f\n\r\t'),
        (b'"\x7f\xc2\x80\xe2\x80\xa8"', "\x7f\x80\u2028"),
        (b'""', ""),
    ],
)
def test_strings(literal: bytes, text: str) -> None:
    # Alone, at every place of a block, across block borders, and with the string's end at every place.
    for before in range(140):
        body = b'["' + b"p" * before + literal[1:-1] + b"q" * (before % 67) + b'","tail"]'
        assert parse(body)[0].as_str() == "p" * before + text + "q" * (before % 67)
        assert json.loads(parse(body).canonical())[0] == "p" * before + text + "q" * (before % 67)
    assert _json.loads(literal) == text


BROKEN_UTF8 = [
    *(bytes([b]) for b in range(0x80, 0x100)),
    *(b"\xc3", b"\xe2\x80", b"\xf0\x9f\x98", b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf"),
    *(b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xf0\x80\x80\x80", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80"),
    *(b"\xf5\x80\x80\x80", b"\xc3\xc3\xa9", b"\xc3\xa9\xa9", b"\xe2\xc3\xa9", b"\xf0\x9f\x98\x80\x80"),
]


def test_broken_utf8_is_refused_wherever_it_stands() -> None:
    whole = "é€😀\ud7ff\ue000\U0010ffff".encode()
    for before in (0, 1, 2, 3, 31, 58, 59, 60, 61, 62, 63, 64, 65, 127):
        for wrapped in (b"", whole):
            assert parse(b'"' + b"a" * before + wrapped + b'"').as_str() == "a" * before + wrapped.decode()
            for bad in BROKEN_UTF8:
                for after in (b"", b"z", b"\\n", b"z" * 70):
                    with pytest.raises(JSONError, match="invalid UTF-8"):
                        parse(b'["' + wrapped + b"a" * before + bad + after + b'"]')


def test_control_characters_and_escapes_at_every_place_of_a_block() -> None:
    for at in range(140):
        for byte in (0, 9, 10, 31):
            with pytest.raises(JSONError) as e:
                parse(b'"' + b"a" * at + bytes([byte]) + b'b"')
            assert e.value.offset == at + 1 and "control" in e.value.message
        with pytest.raises(JSONError) as e:
            parse(b'"' + b"a" * at + b'\\x"')
        assert e.value.offset == at + 1 and e.value.message == "invalid escape in a string"
        for run in range(1, 6):
            body = b'"' + b"a" * at + b"\\" * run + b'"'
            if run % 2 == 0:
                assert parse(body).as_str() == "a" * at + "\\" * (run // 2)
            else:
                with pytest.raises(JSONError, match="without closing quote"):
                    parse(body)
                assert parse(body + b'"').as_str() == "a" * at + "\\" * (run // 2) + '"'


def test_numbers() -> None:
    for text in ("0", "-0", "1", "-1", "123456789012345678", "1234567890123456789", "9" * 40, "-" + "9" * 4000):
        assert _json.loads(text) == int(text) and type(_json.loads(text)) is int
    for text in ("0.0", "-0.0", "1e5", "1E+5", "1e-5", "2.5", "1.7976931348623157e308", "5e-324", "1e-9999", "0e99999"):
        got = _json.loads(text)
        assert got == float(text) and type(got) is float and str(got) == str(float(text))
    r = random.Random(SEED)
    for _ in range(3000):
        value = struct.unpack("<d", r.randbytes(8))[0]
        if math.isfinite(value):
            assert _json.loads(repr(value)) == value
    for text in ("1e309", "-1e309", "1" * 400 + ".0", "1e99999999999999999999", "9" * 5000):
        with pytest.raises(JSONError, match="Number out of range"):
            _json.loads(text)
        assert parse(b'{"skipped":' + text.encode() + b"}").get_str("other") is None


# ---- canonical text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            '{"name":"f","parameters":{"type":"object","properties":{"é":{"type":"string"}}}}',
            '{"name": "f", "parameters": {"type": "object", "properties": {"é": {"type": "string"}}}}',
        ),
        (
            r'{ "description" : "caf\u00e9 \ud83d\ude00 \u0000 \/ tab\t", "n":[1.50,1e3,-0,true,null,{}] , "a":[] }',
            r'{"description": "café 😀 \u0000 / tab\t", "n": [1.50, 1e3, -0, true, null, {}], "a": []}',
        ),
        (r'{"b":1,"a":{"z":[ ] , "y":"\ud83dX"}}', '{"b": 1, "a": {"z": [], "y": "\ufffdX"}}'),
        (r'["\u0008\u000c\u000A\u001F\u007f\u2028\u003c\u0022\u005c"]', '["\\b\\f\\n\\u001f\x7f\u2028<\\"\\\\"]'),
        ('{"a":1,"a":2}', '{"a": 1, "a": 2}'),
        ("[1e999 ]", "[1e999 ]"),  # not finite: unchanged
        ("[1e-999 ]", "[1e-999]"),
        (" 5 ", "5"),
    ],
)
def test_canonical(text: str, want: str) -> None:
    assert _json.canonical(text) == want
    assert _json.canonical(text.encode()) == want
    assert _json.canonical(want) == want


def test_canonical_is_equal_however_it_was_spelled() -> None:
    print("seed", SEED)
    r = random.Random(SEED)
    for _ in range(500):
        value = random_value(r)
        first, second = respelled(r, value), respelled(r, value)
        assert _json.canonical(first) == _json.canonical(second) == json.dumps(value, ensure_ascii=False)
        small = _json.minify(first)
        assert json.loads(small) == value and _json.minify(small) == small
        assert len(small.encode()) <= len(first.encode())


def test_canonical_can_drop_members() -> None:
    root = parse(rb'{"strict":true,"name":"f","defer\u005floading":false,"p":{"strict":1}}')
    assert root.canonical(("strict", "defer_loading")) == '{"name": "f", "p": {"strict": 1}}'
    assert root.canonical(["name", "p", "strict", "defer_loading"]) == "{}"
    assert parse(b"[1]").canonical(("strict",)) == "[1]"


def test_minified_keeps_the_source() -> None:
    assert _json.minify(rb' { "a" : [ 1.50 , "\u00e9 \/ b" ] } ') == r'{"a":[1.50,"\u00e9 \/ b"]}'
    for bad in ("", "{", "[1,]", "nope"):
        with pytest.raises(JSONError):
            _json.minify(bad)
        with pytest.raises(JSONError):
            _json.canonical(bad)


# ---- output ----------------------------------------------------------------------------------------------------


def test_escape() -> None:
    every = "".join(map(chr, range(0x20))) + '"\\/\x7f\x80é\u2028\uffff😀'
    want = "".join(f"\\u{i:04x}" for i in range(9)) + "\\t\\n\\u000b\\u000c\\r"
    want += "".join(f"\\u{i:04x}" for i in range(14, 32)) + '\\"\\\\/\x7f\x80é\u2028\uffff😀'
    assert _json.escape(every) == want.encode()
    assert _json.escape("") == b"" and _json.escape("a" * 200) == b"a" * 200
    assert _json.escape("\ud83d\ude00 \ud83d \ude00") == "😀 \ufffd \ufffd".encode()
    with pytest.raises(TypeError):
        _json.escape(b"x")  # type: ignore[arg-type]


def test_stream_chunk() -> None:
    r = random.Random(SEED)
    head, tail = b'data: {"delta":"', b'"}\n\n'
    alphabet = ['"', "\\", "\n", "\x00", "a", "xyz", "é", "深", "😀", "\ud800"]
    for _ in range(3000):
        delta = "".join(r.choices(alphabet, k=r.choice([0, 1, 3, 10, 63, 64, 65, 200])))
        chunk = _json.sse_chunk(head, delta, tail)
        assert chunk == head + _json.escape(delta) + tail
        whole = delta.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        assert json.loads(chunk[6:-2]) == {"delta": whole}
        assert b"\n" not in chunk[:-2]
    with pytest.raises(TypeError):
        _json.sse_chunk(None, "x", tail)  # type: ignore[arg-type]


class Colour(str, enum.Enum):
    RED = "red"


def test_dumps() -> None:
    value = {"a": [1, -2, 2.5, True, False, None, "é\n", (), {}], "b": {"c": 10**30, "d": 1e16, "e": -0.0}}
    assert _json.dumps(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    assert _json.dumps(Colour.RED) == b'"red"' and _json.dumps({Colour.RED: enum.IntEnum("N", "A").A}) == b'{"red":1}'
    assert _json.dumps({"n": REQUEST["list"], "o": parse(b"[ 1 , 2 ]")}) == b'{"n":[1,"a",null],"o":[1,2]}'
    deep: Any = []
    for _ in range(255):
        deep = [deep]
    assert _json.loads(_json.dumps(deep)) == deep
    loop: list[Any] = []
    loop.append(loop)
    for bad, message, path in [
        ({"a": [1, {2}]}, "Expected a JSON value, got `set`", "$.a[1]"),
        ({"a": {1: 2}}, "Expected `str` as a member name, got `int`", "$.a"),
        ([math.nan], "Expected a finite number, got `nan`", "$[0]"),
        ({"x": -math.inf}, "Expected a finite number, got `-inf`", "$.x"),
        (b"x", "Expected a JSON value, got `bytes`", "$"),
        ([deep], "More than 256 nested containers", None),
        (loop, "More than 256 nested containers", None),
    ]:
        with pytest.raises(JSONError) as e:
            _json.dumps(bad)
        assert e.value.message == message and path in (None, e.value.path)


# ---- size and depth --------------------------------------------------------------------------------------------


def test_nesting_limit() -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        inside = b"" if opening == b"[" else b"1"
        assert parse(opening * 256 + inside + closing * 256).canonical()
        with pytest.raises(JSONError, match="more than 256 nested containers") as e:
            parse(opening * 257 + inside + closing * 257)
        assert len(str(e.value)) < 300
        with pytest.raises(JSONError):
            parse(opening * 1_000_000)
    assert _json.MAX_DEPTH == 256


BIG = {
    "members": lambda n: b"{" + b",".join(b'"k%d":%d' % (i, i) for i in range(n // 12)) + b"}",
    "elements": lambda n: b"[" + b"1," * (n // 2 - 1) + b"1]",
    "empty containers": lambda n: b"[" + b"{}," * (n // 3 - 1) + b"{}]",
    "space": lambda n: b"[" + b" " * n + b"]",
    "text": lambda n: b'"' + b"a" * n + b'"',
    "escapes": lambda n: b'"' + b"\\n" * (n // 2) + b'"',
    "backslashes": lambda n: b'"' + b"\\\\" * (n // 2) + b'"',
    "units": lambda n: b'"' + b"\\ud83d" * (n // 6) + b'"',
    "characters": lambda n: b'"' + "深".encode() * (n // 3) + b'"',
    "nesting": lambda n: b"[" + b",".join([b"[" * 255 + b"]" * 255] * (n // 511)) + b"]",
    "digits": lambda n: b"[" + b"1" * n + b"]",
}


@pytest.mark.parametrize("shape", BIG)
def test_work_is_linear(shape: str, isa: str) -> None:
    """Counted in tokens and string blocks: four times the body, four times the steps, and at most one a byte."""
    n = 150_000
    one, four = parse(BIG[shape](n)), parse(BIG[shape](4 * n))
    assert four.steps <= 4.05 * one.steps + 100
    assert one.steps <= n + 10


@pytest.mark.parametrize("what", ["64 MiB of text", "10^6 members", "10^5 calls"])
def test_work_is_linear_at_full_size(what: str, isa: str) -> None:
    """The same where it is large: a quarter of it against all of it."""
    if isa != usable_isas()[-1]:
        pytest.skip("once, with the best instruction set")

    def body(n: int) -> bytes:
        if what == "64 MiB of text":
            return b'{"content":"' + b"line\\n" * (n // 6) + b'"}'
        if what == "10^6 members":
            return b"{" + b",".join(b'"member%d":%d' % (i, i) for i in range(n)) + b"}"
        call = b'{"id":"call_%d","type":"function","function":{"name":"f","arguments":"{\\"a\\":1}"}}'
        turn = b'{"role":"assistant","content":null,"tool_calls":[' + call + b"]}"
        return b'{"messages":[' + b",".join(turn % i for i in range(n)) + b"]}"

    full = {"64 MiB of text": 64 << 20, "10^6 members": 10**6, "10^5 calls": 10**5}[what]
    one, four = parse(body(full // 4)), parse(body(full))
    assert 3.9 * one.steps <= four.steps <= 4 * one.steps + 100
    if what == "10^5 calls":
        calls = _json.Fields(tool_calls=[_json.Fields(id="str")]).read_all(four["messages"])
        assert len(calls) == full and calls[-1] == ([("call_99999",)],)


def test_million_members_and_large_strings(isa: str) -> None:
    if isa != usable_isas()[-1]:
        pytest.skip("once, with the best instruction set")
    body = b"{" + b",".join(b'"member%d":%d' % (i, i) for i in range(1_000_000)) + b"}"
    root = parse(body)
    assert len(root) == 1_000_000 and root.get_int("member999999") == 999_999 and root.get_int("member0") == 0
    assert root.minified().encode() == body
    text = "ab\n" * (1 << 20) + "é" * (16 << 20)  # 38 MB of body, latin-1
    literal = json.dumps(text, ensure_ascii=False).encode()
    assert parse(literal).as_str() == text
    with pytest.raises(JSONError, match="without closing quote"):
        parse(literal[:-1])


def test_every_prefix_and_every_byte_changed(isa: str) -> None:
    """Whatever happens to a body, the answer is a value that the standard library agrees with, or a JSONError."""
    body = '{"a":["x\\u00e9\\ud83d\\ude00",-1.5e3,true,null,{}],"深":"\\"\\\\"}'.encode()
    for n in range(len(body)):
        with pytest.raises(JSONError):
            parse(body[:n])
    for i in range(len(body)):
        for byte in range(256):
            check(body[:i] + bytes([byte]) + body[i + 1 :])


def test_other_buffers() -> None:
    for body in (bytearray(b'{"a":1}'), memoryview(b'{"a":1}'), memoryview(b'x{"a":1}')[1:]):
        assert parse(body).get_int("a") == 1
    data = bytearray(b'{"a":1}')
    root = parse(data)
    data[5:6] = b"9"
    assert root.get_int("a") == 1
    assert _json.loads('"\ud83d\ude00 \ud83d"') == "😀 \ufffd"
    for bad in (None, 5, ["x"]):
        with pytest.raises(TypeError):
            parse(bad)  # type: ignore[arg-type]


def test_one_document_in_many_threads() -> None:
    members = ",".join(f'"k{i}":"v{i}"' for i in range(500))

    def read(root: Node) -> list[str | None]:
        return [root.get_str(f"k{i}") for i in range(500)]

    for _ in range(20):
        root = parse(f"{{{members}}}".encode())
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(read, root) for _ in range(4)]
            assert all(job.result() == [f"v{i}" for i in range(500)] for job in jobs)


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="instruction set"):
        _json.use_isa("mmx")
