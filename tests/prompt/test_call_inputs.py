"""Raw inputs of calls by grammars of their own: whatever is sampled from the masks, the parser reads an input that the
grammar allows. Vocabularies have tokens that reach over every border, and the syntaxes' marks as text or as tokens."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from ds4 import _dsml
from ds4.engine.constraint import Compiler, Grammar
from ds4.engine.tokenizer import Tokenizer
from ds4.errors import EngineError
from ds4.prompt.call_grammar import SYNTAXES, CallGrammar, Function
from ds4.prompt.call_inputs import CallConstraint, CallMatcher
from tests.support.vocabularies import MARKS, byte_vocabulary

LONG = (
    "</", '">', ">\n", "\n\n", "x</", '"></', ">\n<", "\n</", "\n</parameter>", "</parameter>\n</function>", "a<", "<b",
    "line\n", '">*', ">\n*", "true\">x", "parameter>\n</", "input", "patch", "*** End",
)  # fmt: skip
INPUT: dict[str, Any] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
FREE: dict[str, Any] = {"type": "object", "properties": {"input": {"type": "string", "maxLength": 9}}}

SCHEMAS = [("patch", json.dumps({"parameters": INPUT})), ("other", json.dumps({"parameters": FREE}))]

PATCH = r"""start: begin hunk+ end
begin: "*** Begin" NL
hunk: "+" LINE NL
end: "*** End" NL?
LINE: /[^\n]{0,12}/
NL: "\n"
"""
GRAMMARS = {
    "words": (Grammar("regex", "[a-c]{1,4}( [a-c]{1,4}){0,2}"), re.compile(r"[a-c]{1,4}( [a-c]{1,4}){0,2}")),
    "greedy": (Grammar("regex", "(?s:.){1,14}"), re.compile(r"(?s:.{1,14})")),
    "lines": (Grammar("regex", r"x[^\n]{0,10}"), re.compile(r"x[^\n]{0,10}")),
    "html": (Grammar("lark", 'start: "<b>" TEXT "</b>"\nTEXT: /[^<]{0,8}/'), re.compile(r"<b>[^<]{0,8}</b>")),
    "patch": (
        Grammar("lark", PATCH),
        re.compile(r"\*\*\* Begin\n(\+[^\n]{0,12}\n)+\*\*\* End\n?"),
    ),
}


@pytest.fixture(scope="module", params=["text", "special"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return byte_vocabulary(*(MARKS if request.param == "special" else ()), longer=LONG)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, tokenizer.vocab_size)


def constraint(compiler: Compiler, syntax: str, grammar: Grammar) -> CallConstraint:
    functions = [Function("patch", INPUT, strict=True), Function("other", FREE)]
    calls = CallGrammar(SYNTAXES[syntax], functions, compiler.special_ids)
    outer = compiler.compile(Grammar("lark", calls.forced(single=False)))
    return CallConstraint(outer, {"patch": compiler.compile(grammar)}, SYNTAXES[syntax], compiler.texts())


def tokens_of(mask: Any) -> list[int]:
    return [32 * i + bit for i, word in enumerate(mask.tolist()) for bit in range(32) if word >> bit & 1]


def follow(matcher: CallMatcher, tokenizer: Tokenizer, text: str) -> None:
    """Writes a text with the tokens that the masks allow, the longest first."""
    left = text.encode()
    while left:
        allowed = [t for t in tokens_of(matcher.mask()) if left.startswith(tokenizer.token_bytes(t))]
        assert allowed, (left, text)
        token = max(allowed, key=lambda t: len(tokenizer.token_bytes(t)))
        matcher.advance((token,))
        left = left[len(tokenizer.token_bytes(token)) :]


def walk(matcher: CallMatcher, tokenizer: Tokenizer, rng: random.Random, most: int = 4000) -> bytes | None:
    """A text drawn at random from the masks; None: it did not come to an end."""
    text = b""
    for _ in range(most):
        allowed = tokens_of(matcher.mask())
        ends = [token for token in allowed if token in tokenizer.eos_ids]
        if ends and (rng.random() < 0.3 or len(allowed) == len(ends)):
            return text
        rest = [token for token in allowed if token not in tokenizer.eos_ids]
        # Long tokens and parts of tags are rare among 256 bytes, and the interesting ones.
        keen = [
            token for token in rest if len(tokenizer.token_bytes(token)) > 1 or tokenizer.token_bytes(token) in b"</"
        ]
        token = rng.choice(keen if keen and rng.random() < 0.6 else rest)
        matcher.advance((token,))
        text += tokenizer.token_bytes(token)
        if matcher.finished:
            return text
    return None


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("name", GRAMMARS)
def test_inputs_are_of_their_grammar(compiler: Compiler, tokenizer: Tokenizer, syntax: str, name: str) -> None:
    grammar, pattern = GRAMMARS[name]
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    held = constraint(compiler, syntax, grammar)
    inputs = 0
    for _ in range(3):
        text = walk(held.matcher(), tokenizer, rng)
        if text is None:
            continue
        parser = _dsml.Parser(syntax, tools=True, schemas=SCHEMAS)
        parser.feed(text)
        parser.finish("eos")
        assert parser.result.calls, text
        for call in parser.result.calls:
            if call.name == "patch":
                said = json.loads(call.arguments)["input"]
                assert pattern.fullmatch(said), (said, text)
                inputs += 1
    assert inputs > 0


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_an_input_may_hold_what_looks_like_the_end(compiler: Compiler, tokenizer: Tokenizer, syntax: str) -> None:
    shape = SYNTAXES[syntax]
    said = "x</b></</x"
    before, after, end = shape.call
    call = f"{before}patch{after}{shape.parameter[0]}input{shape.text_value}{said}{shape.parameter[1]}{end}"
    text = shape.before + shape.trigger + shape.block[0] + call + shape.block[1]
    matcher = constraint(compiler, syntax, GRAMMARS["lines"][0]).matcher()
    follow(matcher, tokenizer, text)
    assert matcher.complete


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_other_functions_and_text_are_free(compiler: Compiler, tokenizer: Tokenizer, syntax: str) -> None:
    """Also a quoted beginning of the held call, inside of another function's value."""
    shape = SYNTAXES[syntax]
    before, after, end = shape.call
    call = f"{before}other{after}{shape.parameter[0]}note{shape.text_value}any <b> é{shape.parameter[1]}{end}"
    text = "I say: " + shape.before + shape.trigger + shape.block[0] + call + shape.block[1]
    functions = [Function("patch", INPUT, strict=True), Function("other", None)]
    calls = CallGrammar(shape, functions, compiler.special_ids)
    outer = compiler.compile(Grammar("lark", calls.optional(single=False)))
    words = {"patch": compiler.compile(GRAMMARS["words"][0])}
    matcher = CallConstraint(outer, words, shape, compiler.texts()).matcher()
    follow(matcher, tokenizer, text)
    assert matcher.complete


def test_a_grammar_that_leads_nowhere_ends_this_sequence(compiler: Compiler, tokenizer: Tokenizer) -> None:
    held = constraint(compiler, "qwen", Grammar("lark", 'start: "a" | "b" start'))
    matcher = held.matcher()
    follow(matcher, tokenizer, "<tool_call>\n<function=patch>\n<parameter=input>\n")
    (c,) = tokenizer.encode("c")
    assert c not in tokens_of(matcher.mask())
    with pytest.raises(EngineError):
        matcher.advance((c,))
        matcher.mask()
