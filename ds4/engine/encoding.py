"""Rendered prompts to ids and cache keys, remembered, so that a conversation that grows is not encoded twice.

    segments   <s> | "user\n" "a long text" | <e> | "\n" | <s> | "assistant\n"
    runs           `-----------.-----------'        the texts between two special tokens are encoded as one
    marks          |                       |      | places behind a special token: behind a text more text may come

Two memories, both by content. A run of texts is encoded once. And of each prompt its segments are kept with the ids
and key bytes at every mark: the next prompt of the same conversation begins with the same segments up to one of the
last marks, and only what follows is looked at; its ids are written behind those of the other where nobody else went on
there. Strings that are the same object compare at once and hash once, so whoever keeps messages and what was drawn of
them between requests makes both cheap.
"""

from __future__ import annotations

import struct
import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ds4._core import common_prefix_tokens, join_roomy, roomy
from ds4.bounded import BoundedCache

SPECIAL_KEY_BYTE = 0xFF
"""Begins a special token in a cache key: it never occurs in UTF-8."""

_RUNS_COST = 64 << 20
_PROMPTS_COST = 64 << 20
_ENTRY_COST = 256
_MARKS_TRIED = 4
"""A prompt ends in the header of the turn to generate, a few marks that the next one may not have."""

Ids = npt.NDArray[np.int32]
_Mark = tuple[int, int, int]
"""Segments, ids and key bytes up to behind a special token."""


class SpecialSegment(Protocol):
    """A special token in a rendered prompt, by its text (`ds4.prompt.types.Special`).

    One with a true attribute `optional` is text for a vocabulary that lacks it.
    """

    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """`ids` [n] int32, read-only, and the same prompt as a cache key (see `special_key`)."""

    ids: Ids
    key: bytes


def special_key(token: int) -> bytes:
    """A special token in a cache key: 0xFF and its id in 4 bytes, little-endian."""
    return struct.pack("<BI", SPECIAL_KEY_BYTE, token)


def key_parts(key: bytes) -> Iterator[tuple[int, int | bytes]]:
    """What a key is made of, with the place of each part: special tokens, and the texts between them."""
    size, at = len(special_key(0)), 0
    while at < len(key):
        if key[at] == SPECIAL_KEY_BYTE:
            yield at, int.from_bytes(key[at + 1 : at + size], "little")
            at += size
            continue
        end = key.find(SPECIAL_KEY_BYTE, at)
        end = len(key) if end < 0 else end
        yield at, key[at:end]
        at = end


@dataclass(slots=True)
class _Room:
    """Memory for ids, of which the first `used` are taken. They never change: prompts are views of them."""

    ids: Ids
    used: int

    @classmethod
    def of(cls, parts: list[Ids]) -> _Room:
        """The parts one behind the other, and some room behind them."""
        n = sum(map(len, parts))
        room = cls(np.empty(roomy(4 * n + 256) // 4, np.int32), n)
        if parts:
            np.concatenate(parts, out=room.ids[:n])
        return room

    def goes_on(self, known: Ids, n: int, tail: Ids) -> bool:
        """Whether the first `n` of `known` and then `tail` can be had by writing behind `known`, and are there now."""
        old, end = len(known), n + len(tail)
        if self.used != old or not old <= end <= len(self.ids):
            return False
        if common_prefix_tokens(known[n:].data, tail[: old - n].data) < old - n:
            return False
        self.ids[old:end] = tail[old - n :]
        self.used = end
        return True

    @property
    def prompt(self) -> Ids:
        """What is taken, read-only."""
        ids = self.ids[: self.used]
        ids.setflags(write=False)
        return ids


@dataclass(frozen=True, slots=True)
class _Known:
    """A prompt encoded before, with its marks in order; there is at least one."""

    segments: tuple[str | SpecialSegment, ...]
    prompt: EncodedPrompt
    marks: list[_Mark]
    room: _Room

    @property
    def cost(self) -> int:
        return self.room.ids.nbytes + 2 * len(self.prompt.key) + 64 * len(self.segments) + _ENTRY_COST

    def continued_by(self, segments: tuple[str | SpecialSegment, ...]) -> _Mark | None:
        """The mark up to which `segments` begin like these, among the last few; None when they do not."""
        own = self.segments
        for mark in self.marks[: -_MARKS_TRIED - 1 : -1]:
            n = mark[0]
            # Other conversations differ in their last segment already.
            if 0 < n <= len(segments) and own[n - 1] == segments[n - 1] and own[:n] == segments[:n]:
                return mark
        return None


class PromptEncoder:
    """Encodes with one vocabulary. Thread-safe.

    `encode` gives the ids of one text without special tokens, `special_id` the id of a special token by its text or
    None; `where` names the vocabulary in errors.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], special_id: Callable[[str], int | None], where: object
    ) -> None:
        self._encode = encode
        self._special_id = special_id
        self._where = where
        self._runs: BoundedCache[str | tuple[str, ...], EncodedPrompt] = BoundedCache(_RUNS_COST)
        self._specials: dict[str, EncodedPrompt] = {}
        self._prompts: OrderedDict[int, _Known] = OrderedDict()
        """Latest last; the keys are only numbers."""
        self._prompts_cost = 0
        self._count = 0
        self._lock = Lock()

    def __call__(self, segments: Iterable[str | SpecialSegment]) -> EncodedPrompt:
        """Ids and key of a rendered prompt. Raises ValueError for a special token that the vocabulary does not have."""
        prompt = self.within(segments, sys.maxsize)
        assert prompt is not None
        return prompt

    def within(self, segments: Iterable[str | SpecialSegment], characters: int) -> EncodedPrompt | None:
        """As a call, when at most about so many characters have to be encoded. None: there are more."""
        segments = tuple(segments)
        number, known, mark = self._continued(segments)
        if number is not None and known is not None and known.segments == segments:
            with self._lock:
                if number in self._prompts:
                    self._prompts.move_to_end(number)
            return known.prompt
        marks: list[_Mark] = []
        ids: list[Ids] = []
        key: list[bytes | memoryview] = []
        at, n_ids, n_key = mark
        if known is not None:
            marks = known.marks[: bisect_right(known.marks, mark)]
            key.append(memoryview(known.prompt.key)[:n_key])
        for run, special, i in self._runs_of(segments, at):
            if run:
                part = self._known_run(run)
                if part is None:
                    characters -= sum(map(len, run))
                    if characters < 0:
                        return None
                    part = self._new_run(run)
                n_ids += len(part.ids)
                n_key += len(part.key)
                ids.append(part.ids)
                key.append(part.key)
            if special is not None:
                n_ids += 1
                n_key += len(special.key)
                ids.append(special.ids)
                key.append(special.key)
                marks.append((i, n_ids, n_key))
        own, room = self._put_behind(known, mark[1], ids)
        prompt = EncodedPrompt(own, join_roomy(key))
        gives_way = known is not None and len(known.segments) - mark[0] < mark[0]
        self._remember(_Known(segments, prompt, marks, room), number if gives_way else None)
        return prompt

    def _put_behind(self, known: _Known | None, n: int, parts: list[Ids]) -> tuple[Ids, _Room]:
        """The first `n` ids of a known prompt and the parts: where the known one lies, if nobody else went on there."""
        if known is not None:
            before = known.prompt.ids
            if len(parts) != 1:
                parts = [np.concatenate(parts)] if parts else [before[:0]]
            with self._lock:
                if known.room.goes_on(before, n, parts[0]):
                    return known.room.prompt, known.room
            parts = [before[:n], *parts]
        room = _Room.of(parts)
        return room.prompt, room

    # ---- runs and special tokens

    def _special(self, segment: SpecialSegment) -> EncodedPrompt | None:
        """None: it is text here."""
        text = segment.text
        found = self._specials.get(text)
        if found is not None:
            return found
        token = self._special_id(text)
        if token is None:
            if getattr(segment, "optional", False):
                return None
            raise ValueError(f"the vocabulary of {self._where} has no special token {text!r}")
        found = self._specials[text] = EncodedPrompt(_frozen([token]), special_key(token))
        return found

    def _runs_of(
        self, segments: tuple[str | SpecialSegment, ...], at: int
    ) -> Iterator[tuple[list[str], EncodedPrompt | None, int]]:
        """From segment `at`: the texts before a special token, the token (None at the end), the place behind it."""
        run: list[str] = []
        for i, segment in enumerate(segments[at:], at + 1):
            if isinstance(segment, str):
                run.append(segment)
                continue
            special = self._special(segment)
            if special is None:
                run.append(segment.text)
                continue
            yield run, special, i
            run = []
        yield run, None, len(segments)

    def _known_run(self, run: list[str]) -> EncodedPrompt | None:
        return self._runs.get(_name(run))

    def _new_run(self, run: list[str]) -> EncodedPrompt:
        text = well_formed("".join(run))
        made = EncodedPrompt(_frozen(self._encode(text)), text.encode())
        self._runs.put(_name(run), made, made.ids.nbytes + 2 * len(made.key) + _ENTRY_COST)
        return made

    # ---- whole prompts

    def _continued(self, segments: tuple[str | SpecialSegment, ...]) -> tuple[int | None, _Known | None, _Mark]:
        """The prompt that this one goes on with, its number, and from where."""
        with self._lock:
            prompts = list(self._prompts.items())
        best: tuple[int | None, _Known | None, _Mark] = (None, None, (0, 0, 0))
        for number, known in reversed(prompts):
            if known.marks[-1] > best[2]:
                mark = known.continued_by(segments)
                if mark is not None and mark > best[2]:
                    best = number, known, mark
        return best

    def _remember(self, known: _Known, continued: int | None) -> None:
        """Takes the place of the prompt `continued`, of which it holds the most part."""
        if known.cost > _PROMPTS_COST // 4 or not known.marks:
            return
        with self._lock:
            before = self._prompts.pop(continued, None) if continued is not None else None
            self._prompts_cost += known.cost - (0 if before is None else before.cost)
            self._count += 1
            self._prompts[self._count] = known
            while self._prompts_cost > _PROMPTS_COST:
                self._prompts_cost -= self._prompts.popitem(last=False)[1].cost


def _name(run: list[str]) -> str | tuple[str, ...]:
    return run[0] if len(run) == 1 else tuple(run)


def _frozen(ids: list[int]) -> Ids:
    array = np.array(ids, np.int32)
    array.setflags(write=False)
    return array


def well_formed(text: str) -> str:
    """The text with surrogate pairs joined and unpaired surrogates replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
