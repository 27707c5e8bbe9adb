"""Constrained decoding: grammars of what may be generated, and which tokens may come next (library `llguidance`).

    compiler = Compiler(engine.tokenizer, engine.info.vocab_size)     # once per model
    constraint = compiler.compile(Grammar("json_schema", text))       # any thread; equal grammars are compiled once
    matcher = constraint.matcher()                                    # one per sequence
    sampler.set_mask(matcher.mask()); ...; matcher.advance((token,))

A JSON schema is obeyed as written (JSON Schema 2020-12, the keywords that the library knows); white space between the
tokens of JSON is bounded, because weak models never stop to write it. Special tokens are no text: no string of a
grammar matches them. The library is imported by the first grammar: most servers start without one.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ds4.errors import Ds4Error, EngineError

if TYPE_CHECKING:
    import llguidance
    import numpy.typing as npt

    from ds4.engine.tokenizer import Tokenizer

JSON_OPTIONS: Mapping[str, object] = {
    "whitespace_pattern": r"[\x20\x09]?(\x0D?\x0A[\x20\x09]{0,32})?",
    "coerce_one_of": False,
    "lenient": False,
}
"""How schemas become grammars (`x-guidance` in the library's terms). A request cannot change it."""

FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""Values of `format` that are enforced. Any other is an annotation, as JSON Schema has it by default."""

_VALUES = frozenset({"const", "enum", "default", "examples", "example"})
"""Members of a schema that hold values, not schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Members of a schema whose own members are schemas under names that mean nothing."""

_EXACT = 1e6
"""Exclusive bounds below this magnitude have room for a fraction of a billionth."""
_MAX_MULTIPLE = 100_000
"""A larger `multipleOf` would take minutes to compile: its automaton has a state for each remainder."""
_REMEMBERED = 64
_MAX_MESSAGE = 400


def _one_line(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "..."


class GrammarError(Ds4Error):
    """A grammar that cannot be obeyed. `keywords` are the members of a schema that are not implemented."""

    def __init__(self, message: str, keywords: frozenset[str] = frozenset()) -> None:
        self.keywords = keywords
        super().__init__(_one_line(message))


@dataclass(frozen=True, slots=True)
class Grammar:
    """What may be generated: a JSON schema, a regular expression (Rust's `regex` syntax), or a Lark grammar in the
    library's dialect. The whole text must match."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class Compiler:
    """Compiles grammars for one vocabulary. Thread-safe; the vocabulary's table is built on first use (half a second
    for 49k tokens)."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is the length of the model's logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._table: llguidance.LLTokenizer | None = None
        self._texts: TokenTexts | None = None
        self._table_lock = Lock()
        self._known: OrderedDict[Grammar, Constraint] = OrderedDict()
        self._lock = Lock()

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Text of every special token -> id: a grammar names such a token as `<[id]>`."""
        return self._tokenizer.special_ids

    def compile(self, grammar: Grammar) -> Constraint:
        """The constraint of a grammar, remembered by its text. Raises GrammarError.

        Takes from under a millisecond to some hundred: not for an event loop.
        """
        with self._lock:
            if (known := self._known.get(grammar)) is not None:
                self._known.move_to_end(grammar)
                return known
        constraint = self._compile(grammar)
        with self._lock:
            self._known[grammar] = constraint
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return constraint

    def _compile(self, grammar: Grammar) -> Constraint:
        import llguidance

        text = _library_grammar(grammar)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._vocabulary(), text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _grammar_error(matcher.get_error())
        constraint = Constraint(matcher, self._vocab_size)
        try:
            constraint.matcher().mask()
        except EngineError as error:
            raise GrammarError(f"no text matches the grammar: {error}") from None
        return constraint

    def texts(self) -> TokenTexts:
        """The vocabulary's texts. Takes about 100 ms for 129k tokens, once."""
        with self._table_lock:
            if self._texts is None:
                self._texts = TokenTexts(self._tokenizer, self._vocab_size)
            return self._texts

    def _vocabulary(self) -> llguidance.LLTokenizer:
        with self._table_lock:
            if self._table is None:
                self._table = _token_table(self._tokenizer, self._vocab_size)
            return self._table


class MatcherLike(Protocol):
    """Where one sequence stands in what it must match (`Matcher`)."""

    @property
    def complete(self) -> bool: ...
    @property
    def finished(self) -> bool: ...
    def mask(self) -> npt.NDArray[np.uint32]: ...
    def advance(self, tokens: Sequence[int]) -> None: ...


class ConstraintLike(Protocol):
    """What every sequence takes a matcher of its own from."""

    def matcher(self) -> MatcherLike: ...


class TokenTexts:
    """The bytes of a vocabulary's tokens, and which tokens begin like a text. Immutable."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.n_words = (vocab_size + 31) // 32
        """Words of a mask."""
        self.eos_ids = tuple(tokenizer.eos_ids)
        specials = set(tokenizer.special_ids.values())
        self._by_text: dict[bytes, list[int]] = {}
        for token in range(vocab_size):
            text = _text_of_token(tokenizer, token)
            if text and token not in specials:
                self._by_text.setdefault(text, []).append(token)
        self._sorted = sorted(self._by_text)

    def bytes_of(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)

    def encode(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"))

    def first_special(self, text: str) -> tuple[str | None, int | None]:
        """(text, id) of the first special token in a text of a template."""
        found = [(text.index(name), name) for name in self._tokenizer.special_ids if name and name in text]
        if not found:
            return None, None
        name = min(found)[1]
        return name, self._tokenizer.special_ids[name]

    def spelled(self, text: bytes) -> list[int]:
        """Tokens that are exactly a text."""
        return self._by_text.get(text, [])

    def beginnings_of(self, text: bytes) -> list[int]:
        """Tokens that are the beginning of a text, or all of it."""
        return [token for size in range(1, len(text) + 1) for token in self._by_text.get(text[:size], ())]

    def containing(self, text: bytes) -> list[int]:
        """Tokens in which a text stands as a whole."""
        return [token for known in self._sorted if text in known for token in self._by_text[known]]

    def longer_than(self, text: bytes) -> list[int]:
        """Tokens that begin with a text and go on."""
        tokens: list[int] = []
        for place in range(bisect_right(self._sorted, text), len(self._sorted)):
            if not self._sorted[place].startswith(text):
                break
            tokens += self._by_text[self._sorted[place]]
        return tokens


class Constraint:
    """A compiled grammar. Immutable: every sequence takes a matcher of its own."""

    def __init__(self, compiled: llguidance.LLMatcher, vocab_size: int) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size

    def matcher(self) -> Matcher:
        return Matcher(self._compiled.deep_copy(), self._vocab_size)


class Matcher:
    """Where one sequence stands in its grammar. For one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words: npt.NDArray[np.uint32] = np.zeros((vocab_size + 31) // 32, np.uint32)

    def copy(self) -> Matcher:
        """Another sequence that stands where this one does."""
        return Matcher(self._matcher.deep_copy(), 32 * len(self._words))

    def mask(self) -> npt.NDArray[np.uint32]:
        """Tokens that may come next, [(vocab + 31) / 32] words, id i at bit i % 32 of word i // 32.

        The array is overwritten by the next call. Raises EngineError when no token may come, or when the grammar
        turned out to be too complex.
        """
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        # In a state that leads nowhere the library allows the end tokens all the same.
        if not self._words.any() or (self._matcher.is_stopped() and not self._matcher.is_accepting()):
            raise EngineError("the constraint allows no token")
        return self._words

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes tokens that were generated. Raises EngineError for one that the grammar does not allow."""
        if not self._matcher.consume_tokens(list(tokens)):
            self._check()

    @property
    def complete(self) -> bool:
        """What was generated matches the grammar; more may be allowed."""
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        """What was generated matches the grammar and nothing may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"the constraint cannot go on: {_one_line(self._matcher.get_error())}")


# ---- grammars in the library's form


def _library_grammar(grammar: Grammar) -> str:
    import llguidance

    if grammar.kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return str(llguidance.LLMatcher.grammar_from_lark(grammar.text))
    try:
        schema = json.loads(grammar.text)
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarError(f"expected an object as the schema, got {grammar.text[:40]}")
    return json.dumps({"grammars": [{"json_schema": library_schema(schema)}]})


def library_schema(schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """A schema as the library takes it: with our options, and without formats that are annotations.

    `lenient`: keywords that are not implemented are annotations too.
    """
    cleaned: dict[str, Any] = _without_annotations(schema)
    return {**cleaned, "x-guidance": {**JSON_OPTIONS, "lenient": lenient, "coerce_one_of": lenient}}


def _without_annotations(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    cleaned: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "x-guidance" or (name == "format" and isinstance(value, str) and value not in FORMATS):
            continue
        if name == "multipleOf" and isinstance(value, int | float) and value > _MAX_MULTIPLE:
            raise GrammarError(f"multipleOf is implemented up to {_MAX_MULTIPLE}", frozenset({"multipleOf"}))
        if name in _VALUES:
            cleaned[name] = value
        elif name in _NAMED and isinstance(value, dict):
            cleaned[name] = {key: _without_annotations(item) for key, item in value.items()}
        else:
            cleaned[name] = _without_annotations(value)
    _open_bounds(cleaned)
    _end_fractions(cleaned)
    return cleaned


_NEAR = 1e-9


def _end_fractions(schema: dict[str, Any]) -> None:
    """Gives the fraction of a number between two bounds an end: weak models repeat a digit until the token limit.

    The library writes such numbers without an exponent. Nine digits are enough for any range but the narrowest.
    """
    kinds = schema.get("type")
    if "number" not in (kinds if isinstance(kinds, list) else [kinds]) or "multipleOf" in schema:
        return
    if "enum" in schema or "const" in schema:
        return
    low = schema.get("exclusiveMinimum", schema.get("minimum"))
    high = schema.get("exclusiveMaximum", schema.get("maximum"))
    if isinstance(low, int | float) and isinstance(high, int | float) and high - low >= 1000 * _NEAR:
        schema["multipleOf"] = _NEAR


def _open_bounds(schema: dict[str, Any]) -> None:
    """Makes exclusive bounds inclusive ones a billionth further in.

    Digits without end behind an exclusive bound are a number that a double, which is what clients read, rounds to the
    bound itself; and between a bound and a fraction less than one away the library lets the bound through.
    """
    inner: dict[str, float] = {}
    for exclusive, inclusive, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        bound = schema.get(exclusive)
        if (
            isinstance(bound, int | float)
            and not isinstance(bound, bool)
            and abs(bound) < _EXACT
            and inclusive not in schema
        ):
            inner[exclusive] = round(bound + sign * _NEAR * max(1, abs(bound)), 12)
    low = inner.get("exclusiveMinimum", schema.get("minimum"))
    high = inner.get("exclusiveMaximum", schema.get("maximum"))
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        return
    for exclusive, bound in inner.items():
        del schema[exclusive]
        schema["minimum" if exclusive == "exclusiveMinimum" else "maximum"] = bound


def keyword_path(schema: Any, keywords: Iterable[str]) -> tuple[str | int, ...] | None:
    """The place of the first of `keywords` in a schema: members and indexes from the root."""
    wanted = frozenset(keywords)

    def find(value: Any, *, named: bool) -> tuple[str | int, ...] | None:
        members: Iterable[tuple[str | int, Any]]
        if isinstance(value, dict):
            if not named and (hit := next((name for name in value if name in wanted), None)) is not None:
                return (hit,)
            members = [(name, item) for name, item in value.items() if named or name not in _VALUES]
        elif isinstance(value, list):
            members = list(enumerate(value))
        else:
            return None
        for name, item in members:
            below = find(item, named=not named and name in _NAMED and isinstance(item, dict))
            if below is not None:
                return (name, *below)
        return None

    return find(schema, named=False)


_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[[^\]]*\])")


def _grammar_error(message: str) -> GrammarError:
    found = _UNIMPLEMENTED.search(message)
    if found is not None:
        keywords = frozenset(map(str, json.loads(found.group(1))))
        return GrammarError(f"not implemented: {', '.join(sorted(keywords))}", keywords)
    if "oneOf constraints are not supported" in message:
        return GrammarError(
            "oneOf is implemented only for schemas that exclude each other; use anyOf", frozenset({"oneOf"})
        )
    return GrammarError(message)


# ---- the vocabulary in the library's form


def _text_of_token(tokenizer: Tokenizer, token: int) -> bytes:
    try:
        return tokenizer.token_bytes(token)
    except KeyError:
        return b""


class _Vocabulary:
    """What the library asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(set(tokenizer.special_ids.values()))
        self.tokens = [_text_of_token(tokenizer, token) for token in range(vocab_size)]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"))


def _token_table(tokenizer: Tokenizer, vocab_size: int) -> llguidance.LLTokenizer:
    import llguidance

    if not tokenizer.eos_ids:
        raise GrammarError("the model has no token that ends a text")
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
    return llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids))
