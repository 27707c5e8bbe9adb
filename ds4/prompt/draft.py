"""A prompt while it is being drawn: segments in order, neighbouring texts as one."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import groupby

from ds4.prompt.types import RenderedPrompt, Segment, Special

WHITE_SPACE = " \t\n\r\v\f"
"""What templates trim. Not all that Unicode calls white space: image markers begin and end with separators."""


class Draft:
    """Collects segments. The tokenizer must see no border where the template has none, so texts are joined."""

    def __init__(self, *segments: Segment) -> None:
        self._segments: list[Segment] = []
        self.add(*segments)

    def add(self, *segments: Segment) -> None:
        self._segments += segments

    def rendered(self, *, thinking: bool = False) -> RenderedPrompt:
        merged: list[Segment] = []
        for is_text, run in groupby(self._segments, key=lambda segment: isinstance(segment, str)):
            if not is_text:
                merged += run
            elif text := "".join(segment for segment in run if isinstance(segment, str)):
                merged.append(text)
        return RenderedPrompt(tuple(merged), thinking)


@lru_cache(maxsize=64)
def marked(text: str, tags: tuple[str, ...]) -> tuple[Segment, ...]:
    """Text of a template, never of a client, with every occurrence of one of `tags` as an optional special token."""
    return tuple(_split(text, tags))


def marked_outside(text: str, payload: re.Pattern[str], tags: tuple[str, ...]) -> list[Segment]:
    """A sampled block: its structure as special tokens, its values (group `value` of `payload`) as plain text."""
    segments: list[Segment] = []
    at = 0
    for match in payload.finditer(text):
        segments += _split(text[at : match.start("value")], tags)
        segments.append(match["value"])
        at = match.end("value")
    return [*segments, *_split(text[at:], tags)]


def _split(text: str, tags: tuple[str, ...]) -> list[Segment]:
    pieces = re.split("(" + "|".join(map(re.escape, tags)) + ")", text)
    return [Special(p, optional=True) if i % 2 else p for i, p in enumerate(pieces) if p]
