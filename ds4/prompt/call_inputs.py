"""Grammars for the raw text input of a call: a second matcher holds it while the grammar of the calls holds the rest.

    ...<parameter name="input" string="true">  text by the tool's own grammar  </parameter>...
    outer: form of the calls ------------------------------------------------------------->
                                               inner: the tool's grammar ----->
                                               closings:                        end tag ->

Both could be one grammar, but a terminal is as long as it can be: `/.+/` would swallow the end tag and never end. Here
the end tag may begin wherever the inner grammar accepts, also inside of a token; text that only looks like it goes on
as text. The parser ends a value at its first end tag, so no input holds one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ds4.engine.constraint import Constraint, Matcher, TokenTexts
from ds4.errors import EngineError
from ds4.prompt.call_grammar import CallSyntax

INPUT = "input"
"""The one parameter that a tool with a raw input is declared with."""

_KEPT = 1024
"""Bytes of text outside of values that are looked back on: longer than any beginning of a call."""

Words = npt.NDArray[np.uint32]


class CallConstraint:
    """Calls by an outer grammar whose raw inputs follow grammars of their own. Immutable."""

    def __init__(
        self, outer: Constraint, inputs: Mapping[str, Constraint], syntax: CallSyntax, texts: TokenTexts
    ) -> None:
        """`inputs`: function name -> grammar of its parameter `input`. `outer` allows calls in `syntax` only."""
        self.outer = outer
        self.inputs = dict(inputs)
        self.texts = texts
        start = syntax.call[0] or syntax.trigger
        self.pattern = re.compile(
            rb'%b(?P<name>[^<>"\n]+)(?=[<>"\n])|%b(?P<key>[^<>"\n]+)(?:%b|%b)'
            % tuple(
                re.escape(part.encode()) for part in (start, syntax.parameter[0], syntax.text_value, syntax.json_value)
            )
        )
        self.openers = {
            name: f"{start}{name}{syntax.call[1]}{syntax.parameter[0]}{INPUT}{syntax.text_value}".encode()
            for name in inputs
        }
        end = syntax.parameter[1]
        special, self.end_token = texts.first_special(end)
        self.end = (end if special is None else end[: end.index(special)]).encode()
        """Text of the end tag, up to its first special token where it has one."""
        self.close = syntax.close.encode()
        """What no value can hold."""
        self.closing = texts.containing(self.close)

    def matcher(self) -> CallMatcher:
        return CallMatcher(self)


class CallMatcher:
    """As `ds4.engine.constraint.Matcher`. For one thread at a time."""

    def __init__(self, constraint: CallConstraint) -> None:
        self._constraint = constraint
        self._outer = constraint.outer.matcher()
        self._text = b""
        self._at = 0
        """Where the search goes on in `_text`."""
        self._name = ""
        """The function that is being called."""
        self._in_value = False
        """In a value that has no grammar of its own."""
        self._inner: Matcher | None = None
        self._allowed: Words | None = None
        """Mask of `_inner` for the token to come."""
        self._tail = b""
        """The last bytes of a raw input."""
        self._ends: frozenset[int] | None = None
        """In a raw input: how many bytes of the end tag may have been written; None outside."""

    @property
    def complete(self) -> bool:
        return self._outer.complete

    @property
    def finished(self) -> bool:
        return self._outer.finished

    def mask(self) -> Words:
        """As `Matcher.mask`.

        In a raw input the outer grammar allows all text up to the end tag, so only what follows the tag is asked of it:
        a mask of "any text" looks at every token of the vocabulary.
        """
        if self._ends is None:
            mask = self._outer.mask()
            self._keep_border(mask)
            return mask
        mask = self._input_mask()
        if not mask.any():
            raise EngineError("the constraint allows no token in the input of the call")
        return mask

    def advance(self, tokens: Sequence[int]) -> None:
        """As `Matcher.advance`."""
        for token in tokens:
            self._outer.advance((token,))
            data = self._constraint.texts.bytes_of(token)
            if self._ends is None:
                self._read(data)
            else:
                self._take_input(token, data)

    # ---- outside of raw inputs

    def _read(self, data: bytes) -> None:
        """Finds out whether a raw input begins; what of `data` follows its beginning is its first text."""
        known = self._constraint
        self._text += data
        while True:
            if self._in_value:
                end = self._text.find(known.close, self._at)
                if end < 0:
                    self._text = self._text[-len(known.close) :]
                    self._at = 0
                    return
                self._in_value = False
                self._at = end + len(known.close)
            found = known.pattern.search(self._text, self._at)
            if found is None:
                cut = max(0, len(self._text) - _KEPT)
                self._text = self._text[cut:]
                self._at = max(0, self._at - cut)
                return
            self._at = found.end()
            if found["name"] is not None:
                self._name = found["name"].decode("utf-8", "replace")
                # Its beginning stays in the text: it is a part of the opener.
                self._text, self._at = self._text[found.start() :], found.end() - found.start()
            elif self._name in known.inputs and found["key"] == INPUT.encode():
                self._enter(self._text[found.end() :])
                return
            else:
                self._in_value = True

    def _keep_border(self, mask: Words) -> None:
        """Forbids tokens in which the text of a raw input would begin: the grammar has no say in their first half."""
        opener = self._constraint.openers.get(self._name)
        if opener is None or not opener.startswith(self._text) or not self._text or self._text == opener:
            return
        _clear(mask, self._constraint.texts.longer_than(opener[len(self._text) :]))

    # ---- in a raw input

    def _enter(self, rest: bytes) -> None:
        self._text, self._at, self._tail = b"", 0, rest
        self._inner = self._constraint.inputs[self._name].matcher()
        self._ends = frozenset()
        if rest:
            self._inner.advance(self._constraint.texts.encode(rest))
        if self._inner.complete:
            self._ends = frozenset((0,))

    def _leave(self, rest: bytes) -> None:
        self._inner = self._allowed = self._ends = None
        self._name = ""
        self._read(rest)

    def _input_mask(self) -> Words:
        """Tokens by which the input goes on, and those that write more of the end tag."""
        known, ends = self._constraint, self._ends or ()
        words = np.zeros(known.texts.n_words, np.uint32)
        self._allowed = None
        if self._inner is not None and not self._inner.finished:
            try:
                self._allowed = self._inner.mask().copy()
            except EngineError:
                self._inner = None
            else:
                _clear(self._allowed, (*self._closed_by(), *known.texts.eos_ids))
                words |= self._allowed
        for matched in ends:
            if matched == len(known.end) and known.end_token is not None:
                words[known.end_token // 32] |= np.uint32(1 << (known.end_token % 32))
            else:
                left = known.end[matched:]
                further = () if known.end_token is not None else filter(self._goes_on, known.texts.longer_than(left))
                for token in (*known.texts.beginnings_of(left), *further):
                    words[token // 32] |= np.uint32(1 << (token % 32))
        return words

    def _goes_on(self, token: int) -> bool:
        """The outer grammar allows what a token has behind the end tag."""
        outer = self._outer.copy()
        try:
            outer.advance((token,))
        except EngineError:
            return False
        return True

    def _closed_by(self) -> list[int]:
        """Tokens with which the input would hold its own end tag."""
        known = self._constraint
        tokens = list(known.closing)
        for size in range(1, len(known.close)):
            if self._tail.endswith(known.close[:size]):
                rest = known.close[size:]
                tokens += (*known.texts.spelled(rest), *known.texts.longer_than(rest))
        return tokens

    def _take_input(self, token: int, data: bytes) -> None:
        known = self._constraint
        if token == known.end_token:
            self._leave(b"")
            return
        ends: set[int] = set()
        for matched in self._ends or ():
            left = known.end[matched:]
            if left.startswith(data):
                ends.add(matched + len(data))
            elif known.end_token is None and data.startswith(left):
                self._leave(data[len(left) :])
                return
        if known.end_token is None and len(known.end) in ends:
            self._leave(b"")
            return
        inner = self._inner
        self._tail = self._tail[-len(known.close) :] + data
        if inner is not None and self._allows(token):
            ends |= self._begun_inside(inner, data)
            inner.advance((token,))
            if inner.complete:
                ends.add(0)
        else:
            self._inner = None
        self._ends = frozenset(ends)

    def _allows(self, token: int) -> bool:
        return self._allowed is not None and bool(self._allowed[token // 32] >> (token % 32) & 1)

    def _begun_inside(self, inner: Matcher, data: bytes) -> set[int]:
        """Bytes of the end tag with which a token of text ends, where the text before them is a whole input."""
        end = self._constraint.end
        begun: set[int] = set()
        for size in range(1, min(len(data), len(end) + 1)):
            if data.endswith(end[:size]):
                before = inner.copy()
                try:
                    before.advance(self._constraint.texts.encode(data[:-size]))
                except EngineError:
                    continue
                if before.complete:
                    begun.add(size)
        return begun


def _clear(words: Words, tokens: Iterable[int]) -> None:
    for token in tokens:
        words[token // 32] &= ~np.uint32(1 << (token % 32))
