"""A prompt while it is being drawn: its segments in order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from ds4.bounded import remembered
from ds4.prompt.types import Message, RenderedPrompt, Segment, Special, Tool

WHITE_SPACE = " \t\n\r\v\f"
"""What templates trim. Not all that Unicode calls white space: image markers begin and end with separators."""


CALLS_COST = 16 << 20
"""Bytes that each memory of drawn calls may hold: a history has the same ones in every request."""
TURNS_COST = 128 << 20
"""Bytes of messages that each memory of drawn turns may keep alive."""
TOOLS_COST = 16 << 20
"""Bytes that each memory of declared tools may hold."""


def declared_size(tools: Iterable[Tool], *context: object) -> int:
    """About what a declaration of these tools keeps in memory."""
    return sum(8 * len(tool.schema) + 512 for tool in tools)


def size_of(message: Message, *context: object) -> int:
    """About what a message keeps in memory."""
    size = 4 * (len(message.content) + len(message.reasoning)) + 512
    for call in message.calls:
        size += 4 * len(call.arguments) + len(call.raw or b"") + 512
    return size


class Draft:
    """Collects segments."""

    def __init__(self, *segments: Segment) -> None:
        self._segments: list[Segment] = list(segments)

    def add(self, *segments: Segment) -> None:
        self._segments += segments

    def rendered(self, *, thinking: bool = False) -> RenderedPrompt:
        return RenderedPrompt(tuple(filter(None, self._segments)), thinking)


@lru_cache(maxsize=64)
def marked(text: str, tags: tuple[str, ...]) -> tuple[Segment, ...]:
    """Text of a template, never of a client, with every occurrence of one of `tags` as an optional special token."""
    return tuple(_split(text, tags))


@remembered(CALLS_COST, lambda raw, payload, tags: 4 * len(raw) + 256)
def sampled_block(raw: bytes, payload: re.Pattern[str], tags: tuple[str, ...]) -> tuple[Segment, ...]:
    """A sampled block: its structure as special tokens, its values (group `value` of `payload`) as plain text."""
    text = raw.decode("utf-8", "replace")
    segments: list[Segment] = []
    at = 0
    for match in payload.finditer(text):
        segments += _split(text[at : match.start("value")], tags)
        segments.append(match["value"])
        at = match.end("value")
    return (*segments, *_split(text[at:], tags))


def _split(text: str, tags: tuple[str, ...]) -> list[Segment]:
    pieces = re.split("(" + "|".join(map(re.escape, tags)) + ")", text)
    return [_special(p) if i % 2 else p for i, p in enumerate(pieces) if p]


@lru_cache(maxsize=64)
def _special(text: str) -> Special:
    return Special(text, optional=True)
