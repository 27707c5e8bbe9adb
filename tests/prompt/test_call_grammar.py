"""Grammars of tool syntaxes against the output parser: what a grammar lets through is a call to its schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds4 import _dsml
from ds4.engine.constraint import Compiler, Grammar
from ds4.engine.tokenizer import Tokenizer
from ds4.errors import EngineError
from ds4.prompt.call_grammar import SYNTAXES, CallGrammar, CallSyntax, Function, SchemaError
from tests.support.vocabularies import MARKS, byte_vocabulary

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F", None]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        "size": {"$ref": "#/$defs/size"},
        "options": {"type": "object", "properties": {"q": {"type": "array", "items": {"type": "number"}}}},
    },
    "required": ["city"],
    "$defs": {"size": {"type": "object", "properties": {"w": {"type": "integer"}}, "required": ["w"]}},
}
NOW: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTIONS = (Function("get_weather", WEATHER, strict=True), Function("now", NOW))


@pytest.fixture(scope="module", params=["text", "special"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """The marks of the syntaxes as text, and as tokens of their own."""
    return byte_vocabulary(*(MARKS if request.param == "special" else ()))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, tokenizer.vocab_size)


def call(syntax: CallSyntax, name: str, **arguments: object) -> str:
    before, after, end = syntax.call
    text = before + name + after
    for key, value in arguments.items():
        middle = syntax.text_value if isinstance(value, str) else syntax.json_value
        body = value if isinstance(value, str) else json.dumps(value)
        text += syntax.parameter[0] + key + middle + body + syntax.parameter[1]
    return text + end


def block(syntax: CallSyntax, *calls: str) -> str:
    return syntax.before + syntax.trigger + syntax.block[0] + syntax.between.join(calls) + syntax.block[1]


def obeys(compiler: Compiler, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Does a grammar let a text through, to its end?"""
    matcher = compiler.compile(Grammar("lark", grammar)).matcher()
    try:
        for token in tokenizer.encode_with_specials(text):
            if not matcher.mask()[token // 32] >> (token % 32) & 1:
                return False
            matcher.advance((token,))
    except EngineError:
        return False
    return matcher.complete


def parsed(name: str, text: str) -> list[tuple[str, Any]]:
    schemas = [(f.name, json.dumps(f.parameters)) for f in FUNCTIONS]
    parser = _dsml.Parser(name, tools=True, schemas=schemas)
    parser.feed(text.encode())
    parser.finish("eos")
    assert parser.result.finish == "tool_calls"
    return [(c.name, json.loads(c.arguments)) for c in parser.result.calls]


GOOD: list[list[tuple[str, dict[str, Any]]]] = [
    [("get_weather", {"city": "Rome"})],
    [("now", {})],
    [("get_weather", {"city": "a <b> & \n\n </x> ü", "days": 3, "unit": "C", "code": "IT", "note": None})],
    [("get_weather", {"city": "", "unit": None, "note": "12345", "size": {"w": 1}, "options": {"q": [1, 2.5]}})],
    [("now", {}), ("get_weather", {"city": "x", "days": 9})],
]
BAD: list[list[tuple[str, dict[str, Any]]]] = [
    [("get_weather", {})],
    [("get_weather", {"city": 5.5, "days": 0})],
    [("get_weather", {"city": "x", "days": 10})],
    [("get_weather", {"city": "x", "days": "many"})],
    [("get_weather", {"city": "x", "unit": "K"})],
    [("get_weather", {"city": "x", "code": "ITA"})],
    [("get_weather", {"city": "x", "note": "123456"})],
    [("get_weather", {"city": "x", "size": {}})],
    [("get_weather", {"city": "x", "more": 1})],
    [("get_wether", {"city": "x"})],
    [("now", {"city": "x"})],
]


@pytest.mark.parametrize("name", sorted(SYNTAXES))
def test_forced_calls(compiler: Compiler, tokenizer: Tokenizer, name: str) -> None:
    syntax = SYNTAXES[name]
    grammar = CallGrammar(syntax, FUNCTIONS, compiler.special_ids).forced(single=False)
    for calls in GOOD:
        text = block(syntax, *(call(syntax, f, **arguments) for f, arguments in calls))
        assert obeys(compiler, tokenizer, grammar, text), text
        assert parsed(name, text) == calls
    for calls in BAD:
        text = block(syntax, *(call(syntax, f, **arguments) for f, arguments in calls))
        assert not obeys(compiler, tokenizer, grammar, text), text
    assert not obeys(compiler, tokenizer, grammar, "It is sunny.")
    assert not obeys(compiler, tokenizer, grammar, "")


@pytest.mark.parametrize("name", sorted(SYNTAXES))
def test_one_call_only(compiler: Compiler, tokenizer: Tokenizer, name: str) -> None:
    syntax = SYNTAXES[name]
    grammar = CallGrammar(syntax, FUNCTIONS, compiler.special_ids).forced(single=True)
    assert obeys(compiler, tokenizer, grammar, block(syntax, call(syntax, "now")))
    assert not obeys(compiler, tokenizer, grammar, block(syntax, call(syntax, "now"), call(syntax, "now")))


@pytest.mark.parametrize("name", sorted(SYNTAXES))
def test_calls_after_free_text(compiler: Compiler, tokenizer: Tokenizer, name: str) -> None:
    """Text is free; a call of a strict function follows its schema, one of another function has the form of a call."""
    syntax = SYNTAXES[name]
    functions = (FUNCTIONS[0], Function("any", None))
    grammar = CallGrammar(syntax, functions, compiler.special_ids).optional(single=False)
    for text in ("", "It is < sunny. <tool", "a\n\n"):
        assert obeys(compiler, tokenizer, grammar, text)
        assert obeys(compiler, tokenizer, grammar, text + block(syntax, call(syntax, "get_weather", city="x", days=2)))
        assert not obeys(compiler, tokenizer, grammar, text + block(syntax, call(syntax, "get_weather", days=2)))
        assert obeys(compiler, tokenizer, grammar, text + block(syntax, call(syntax, "any", a="x", b=[1, {"c": None}])))
        assert not obeys(compiler, tokenizer, grammar, text + block(syntax, call(syntax, "other")))


@pytest.mark.parametrize("name", sorted(SYNTAXES))
def test_an_answer_or_calls(compiler: Compiler, tokenizer: Tokenizer, name: str) -> None:
    syntax = SYNTAXES[name]
    answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    grammar = CallGrammar(syntax, FUNCTIONS, compiler.special_ids).beside(answer, single=False)
    assert obeys(compiler, tokenizer, grammar, '{"ok": true}')
    assert obeys(compiler, tokenizer, grammar, block(syntax, call(syntax, "now")))
    assert not obeys(compiler, tokenizer, grammar, '{"ok": 1}')
    assert not obeys(compiler, tokenizer, grammar, "Yes.")


@pytest.mark.parametrize(
    ("function", "path"),
    [
        (Function("f", {"anyOf": [{}, {}]}, strict=True), ("anyOf",)),
        (Function("f", {"properties": {"a": {}}, "required": ["b"]}), ("required",)),
        (Function("f", {"properties": []}), ("properties",)),
        (Function("f", {"properties": {"a": False}}), ("properties", "a")),
        (Function("f", {"properties": {"a": 5}}), ("properties", "a")),
        (Function("f", {"properties": {"a>b": {}}}), ("properties", "a>b")),
        (Function("f", {"properties": {"a": {"type": "string", "maxLength": -1}}}), ("properties", "a", "maxLength")),
        (Function("f", {"properties": {"a": {"type": "string", "minLength": 1e9}}}), ("properties", "a", "minLength")),
        (Function("f", {"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}), ("properties", "a", "pattern")),
        (
            Function("f", {"properties": {"a": {"type": "string", "format": "date"}}}, strict=True),
            ("properties", "a", "format"),
        ),
        (Function('a"b', {}), ()),
        (Function("", {}), ()),
    ],
)
def test_schemas_that_cannot_be_obeyed(function: Function, path: tuple[str, ...]) -> None:
    with pytest.raises(SchemaError) as caught:
        CallGrammar(SYNTAXES["chatml"], [function], {}).forced(single=True)
    assert (caught.value.function, caught.value.path) == (function.name, path)


def test_a_pattern_may_match_anywhere(compiler: Compiler, tokenizer: Tokenizer) -> None:
    syntax = SYNTAXES["chatml"]

    def takes(pattern: str, text: str) -> bool:
        function = Function("f", {"properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]})
        grammar = CallGrammar(syntax, [function], compiler.special_ids).forced(single=True)
        return obeys(compiler, tokenizer, grammar, block(syntax, call(syntax, "f", a=text)))

    assert takes("b+", "abba")
    assert takes("b+/", "b/</x>")
    assert not takes("b+", "aa")
    assert takes("^(b|c)", "cx")
    assert not takes("^(b|c)", "xc")
    assert takes("[|$]$", "a$")
    assert not takes("a$", "ab")
