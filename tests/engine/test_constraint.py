"""Constraints against texts that a grammar allows or not, and against an independent JSON Schema validator."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from ds4.engine.constraint import Compiler, Grammar, GrammarError, Matcher, keyword_path
from ds4.engine.demo import demo_model_path
from ds4.engine.engine import Engine
from ds4.engine.model_file import open_model_file
from ds4.engine.tokenizer import Tokenizer
from ds4.engine.types import EngineConfig, Row, RowResult, SamplingParams
from ds4.errors import EngineError
from tests.support.schemas import random_schema

VOCAB = 49152


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_model_file(demo_model_path()).tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, VOCAB)


def allowed(matcher: Matcher, token: int) -> bool:
    return bool(matcher.mask()[token // 32] >> (token % 32) & 1)


def follow(compiler: Compiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> Matcher | None:
    """The matcher behind a text, None when the mask of some step does not allow its next token."""
    matcher = compiler.compile(grammar).matcher()
    for token in tokenizer.encode(text):
        if not allowed(matcher, token):
            return None
        matcher.advance((token,))
    return matcher


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (schema(PERSON), '{"name": "Ada", "age": 36}'),
        (schema(PERSON), '{\n  "name": "Zoë"\n}'),
        (schema({"enum": ["a", 1, None]}), "null"),
        (schema({}), '[1, {"x": false}]'),
        (schema({"type": "string", "format": "date"}), '"2026-11-30"'),
        (schema({"type": "string", "format": "int64"}), '"anything"'),
        (schema({"type": "object", "x-order": 1, "title": "T"}), "{}"),
        (schema({"const": {"format": "int64"}}), '{"format": "int64"}'),
        (schema({"type": "number", "minimum": -3, "maximum": 2}), "-2.123456789"),
        (schema({"type": ["number", "null"], "minimum": 1, "maximum": 1}), "1"),
        (schema({"type": "number"}), "6.02214076e23"),
        (Grammar("regex", "(yes|no)[.!]"), "yes!"),
        (Grammar("lark", 'start: "a" b\nb: /[0-9]+/'), "a42"),
    ],
)
def test_texts_that_match(compiler: Compiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> None:
    matcher = follow(compiler, tokenizer, grammar, text)
    assert matcher is not None
    assert matcher.complete
    assert all(allowed(matcher, eos) for eos in tokenizer.eos_ids)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (schema(PERSON), '{"age": 36}'),
        (schema(PERSON), '{"name": "Ada", "age": -1}'),
        (schema(PERSON), '{"name": "Ada", "x": 1}'),
        (schema(PERSON), '{"name": "Ada Lovelace"}'),
        (schema(PERSON), "Sure! {"),
        (schema({"type": "string", "format": "date"}), '"30 November"'),
        (schema({"type": "object"}), "{" + "\n" * 40),
        (schema({"type": "number", "minimum": -3, "maximum": 2}), "-2.6" + "3" * 40),
        (Grammar("regex", "(yes|no)[.!]"), "maybe"),
    ],
)
def test_texts_that_do_not_match(compiler: Compiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> None:
    assert follow(compiler, tokenizer, grammar, text) is None


def test_the_text_cannot_end_early_and_not_go_on(compiler: Compiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(schema(PERSON)).matcher()
    eos = tokenizer.eos_ids[0]
    for token in tokenizer.encode('{"name": "Ada"'):
        assert not allowed(matcher, eos)
        assert not matcher.complete
        matcher.advance((token,))
    matcher.advance(tokenizer.encode("}"))
    assert matcher.complete
    assert matcher.finished
    ids = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
    assert tuple(ids) == tokenizer.eos_ids


def test_a_special_token_is_no_text(compiler: Compiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(schema({"type": "string"})).matcher()
    matcher.advance(tokenizer.encode('"'))
    assert not any(allowed(matcher, token) for token in tokenizer.special_ids.values())


def test_a_token_that_is_not_allowed_is_an_error_of_this_sequence_only(
    compiler: Compiler, tokenizer: Tokenizer
) -> None:
    constraint = compiler.compile(schema(PERSON))
    broken, whole = constraint.matcher(), constraint.matcher()
    with pytest.raises(EngineError, match="constraint"):
        broken.advance(tokenizer.encode("Hello"))
    with pytest.raises(EngineError):
        broken.mask()
    assert not broken.finished
    whole.advance(tokenizer.encode('{"name": "x"}'))
    assert whole.finished


def test_equal_grammars_are_compiled_once(compiler: Compiler) -> None:
    assert compiler.compile(schema(PERSON)) is compiler.compile(schema(PERSON))
    assert compiler.compile(schema(PERSON)) is not compiler.compile(schema({"type": "object"}))


@pytest.mark.parametrize(
    ("grammar", "keywords"),
    [
        (schema({"properties": {"a": {"not": {}}}}), {"not"}),
        (schema({"type": "array", "uniqueItems": True}), {"uniqueItems"}),
        (schema({"oneOf": [{"type": "string"}, {"maxLength": 3}]}), {"oneOf"}),
        (schema({"x-guidance": {"lenient": True}, "not": {}}), {"not"}),
        (schema({"items": {"type": "integer", "multipleOf": 1000003}}), {"multipleOf"}),
        (schema({"type": "string", "minLength": 5, "maxLength": 2}), set()),
        (schema({"properties": {"a": False}, "required": ["a"], "type": "object"}), set()),
        (schema({"$ref": "http://example.com/schema"}), set()),
        (schema({"type": "string", "pattern": "a(?=b)"}), set()),
        (schema([]), set()),
        (Grammar("json_schema", "{"), set()),
        (Grammar("regex", "a(?=b)"), set()),
        (Grammar("lark", "start: nothing"), set()),
        (Grammar("lark", "start: A\nA: /x/ & /y/"), set()),
    ],
)
def test_grammars_that_cannot_be_obeyed(compiler: Compiler, grammar: Grammar, keywords: set[str]) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(grammar)
    assert caught.value.keywords == keywords
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_keyword_path() -> None:
    nested: dict[str, Any] = {
        "const": {"not": 1},
        "properties": {"not": {"type": "string"}, "b": {"anyOf": [{}, {"not": {}}]}},
    }
    assert keyword_path(nested, ("not",)) == ("properties", "b", "anyOf", 1, "not")
    assert keyword_path(nested, ("if",)) is None


def test_values_of_random_schemas(compiler: Compiler, tokenizer: Tokenizer) -> None:
    """The validator and the constraint agree on values that are right for one schema and wrong for others."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(12)]
    agreed = {True: 0, False: 0}
    for value in ({}, *(sample(rng, s) for s in schemas for _ in range(3))):
        for candidate in schemas:
            expected = jsonschema.Draft202012Validator(candidate).is_valid(value)
            ordered = in_order(value, candidate)
            matcher = follow(compiler, tokenizer, schema(candidate), json.dumps(ordered, ensure_ascii=False))
            assert (matcher is not None and matcher.complete) == expected, (candidate, ordered)
            agreed[expected] += 1
    assert agreed[False] > 100
    assert agreed[True] > 10


def sample(rng: random.Random, s: dict[str, Any]) -> Any:
    """A value, mostly one that the schema allows."""
    if "anyOf" in s:
        return sample(rng, rng.choice(s["anyOf"]))
    if "enum" in s:
        return rng.choice(s["enum"])
    if "const" in s:
        return s["const"]
    match s["type"]:
        case "object":
            wanted = [n for n in s["properties"] if n in s["required"] or rng.random() < 0.5]
            return {name: sample(rng, s["properties"][name]) for name in wanted}
        case "array":
            return [sample(rng, s["items"]) for _ in range(rng.randint(s["minItems"], s["maxItems"]))]
        case "integer":
            return rng.randint(s["minimum"], s["maximum"])
        case "number":
            low = s.get("minimum", s.get("exclusiveMinimum"))
            return low + rng.choice((0, 0.5, 0.25))
        case "string" if "pattern" in s:
            return rng.choice(("abc", "B12", "cats", "dog", "2026-11", "x y"))
        case "string":
            return "abcdefghijklmnop"[: rng.randint(s["minLength"], s["maxLength"])]
        case "boolean":
            return rng.random() < 0.5
        case _:
            return None


def in_order(value: Any, s: dict[str, Any]) -> Any:
    """The value with the members of objects in the order of the schema, in which alone they may be generated."""
    for option in s.get("anyOf", ()):
        if jsonschema.Draft202012Validator(option).is_valid(value):
            return in_order(value, option)
    if isinstance(value, dict) and "properties" in s:
        known = {n: in_order(value[n], p) for n, p in s["properties"].items() if n in value}
        return {**known, **{n: v for n, v in value.items() if n not in known}}
    if isinstance(value, list) and "items" in s:
        return [in_order(item, s["items"]) for item in value]
    return value


def test_a_constrained_row_leaves_its_neighbours_alone() -> None:
    """Tokens and log-probabilities of a free row are the same bits beside constrained rows and alone."""
    engine = Engine.open(EngineConfig(ctx=256, slots=3, threads=2))
    try:
        tokenizer = engine.tokenizer
        constraint = Compiler(tokenizer, engine.info.vocab_size).compile(schema(PERSON))
        prompt = tokenizer.encode("Describe a person:")

        def run(constrained: int) -> list[list[RowResult]]:
            rows = [Row(engine.new_session(), prompt, None) for _ in range(1 + constrained)]
            matchers = [constraint.matcher() for _ in range(constrained)]
            for index, row in enumerate(rows):
                row.sampler = engine.new_sampler(SamplingParams(seed=index, logprobs=3, min_p=0.0))
                if index:
                    row.sampler.set_mask(matchers[index - 1].mask())
            results: list[list[RowResult]] = [[] for _ in rows]
            for _ in range(8):
                for index, (row, result) in enumerate(zip(rows, engine.step(rows), strict=True)):
                    assert result.token is not None
                    results[index].append(result)
                    row.tokens = (result.token,)
                    if index and not matchers[index - 1].finished:
                        assert row.sampler is not None
                        matchers[index - 1].advance(row.tokens)
                        row.sampler.set_mask(matchers[index - 1].mask())
            for row in rows:
                row.session.close()
            return results

        alone, beside = run(0), run(2)
        assert beside[0] == alone[0]
        for results in beside[1:]:
            assert tokenizer.decode(r.token or 0 for r in results).lstrip().startswith(b"{")
    finally:
        engine.close()


INTEGERS = ("0", "-0", "1", "-1", "3", "4", "5", "-3", "-4", "-5", "6", "12")
FRACTIONS = ("", ".0", ".5", ".25", ".05", ".001", ".75", ".00000000000000000001")


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize(
    "low", [{}, {"minimum": -4.5}, {"exclusiveMinimum": -5}, {"exclusiveMinimum": 0}, {"minimum": 3}]
)
@pytest.mark.parametrize(
    "high", [{}, {"exclusiveMaximum": -4}, {"maximum": 0.25}, {"exclusiveMaximum": 4.5}, {"exclusiveMaximum": 6}]
)
def test_bounds(
    compiler: Compiler, tokenizer: Tokenizer, kind: str, low: dict[str, float], high: dict[str, float]
) -> None:
    """No spelling of a number beyond its bounds gets through, read as the double that clients read."""
    bounded = {"type": kind, **low, **high}
    validator = jsonschema.Draft202012Validator(bounded)
    right = [t for t in (i + f for i in INTEGERS for f in FRACTIONS) if validator.is_valid(json.loads(t))]
    whole = [t for t in right if t in INTEGERS and t != "-0"]
    try:
        compiler.compile(schema(bounded))
    except GrammarError:
        assert not whole
        return
    for text in (i + f for i in INTEGERS for f in FRACTIONS):
        matcher = follow(compiler, tokenizer, schema(bounded), text)
        if matcher is not None and matcher.complete:
            assert text in right
        else:
            assert text not in whole
