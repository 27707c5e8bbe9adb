"""What a dialect brings to an answer, and a whole answer put together from its events.

How it gets to the client is the same for every dialect (`ds4.server.api.delivery`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ds4.prompt.types import Message
from ds4.server.api.errors import WireError
from ds4.server.types import (
    ContentDelta,
    Event,
    Finish,
    GenerationRequest,
    ReasoningDelta,
    SampledToken,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass(slots=True)
class CollectedCall:
    """A tool call of a whole answer; `arguments` is JSON text, `raw` the sampled block."""

    name: str
    arguments: str = ""
    raw: bytes = b""


@dataclass(slots=True)
class Collected:
    """A whole answer: the deltas of a generation put together, and how it ended."""

    finish: Finish
    content: str = ""
    reasoning: str = ""
    calls: list[CollectedCall] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)


CallFinished = Callable[[str, bytes], None]
"""Told the id that the client gets for a call, and the exact block that the call was sampled in."""

TurnFinished = Callable[[Message], None]
"""Told the whole answer, as it will stand in the history."""

TokenBytes = Callable[[int], bytes]

Again = Callable[[GenerationRequest, Finish], Awaitable[GenerationRequest | None]]
"""The request that goes on behind an answer whose call cannot be read; None: there is none (`ds4.server.api.again`)."""


class Answer(Protocol):
    """One dialect's answer to one request. What it returns for a stream are whole events, or nothing.

    Choices are numbered from 0; `finishes` and `collected` have one entry for each, in order.
    """

    @property
    def keepalive(self) -> bytes | Callable[[], bytes]:
        """What a stream sends while nothing else comes."""

    def begin(self) -> bytes:
        """What goes out with the headers, before the prompt is evaluated."""

    def events(self, batch: Sequence[Event], choice: int = 0) -> bytes: ...
    def end(self, finishes: Sequence[Finish]) -> bytes:
        """What follows when every choice has finished."""

    def error_event(self, error: WireError) -> bytes:
        """What ends a stream that failed."""

    def whole(self, collected: Sequence[Collected]) -> bytes:
        """The body of a response that is no stream."""

    def error(self, error: WireError) -> bytes:
        """The body of a response that failed."""


def as_text(finish: Finish) -> Finish:
    """A malformed call of which the client saw only text is an answer in text: its finish is `stop`.

    An unknown finish reason makes agents ask again without end.
    """
    return replace(finish, reason="stop") if finish.reason == "error" else finish


def collect(events: Sequence[Event], finish: Finish) -> Collected:
    """Puts the events of a generation together. A call that never became complete is none."""
    whole = Collected(finish)
    ended: list[int] = []
    content: list[str] = []
    reasoning: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case ContentDelta():
                content.append(event.text)
            case ReasoningDelta():
                reasoning.append(event.text)
            case ToolCallStart():
                whole.calls.append(CollectedCall(event.name))
                arguments.append([])
            case ToolCallDelta():
                arguments[event.index].append(event.arguments)
            case ToolCallEnd():
                whole.calls[event.index].raw = event.raw
                ended.append(event.index)
            case SampledToken():
                whole.tokens.append(event)
            case _:
                pass
    whole.content = "".join(content)
    whole.reasoning = "".join(reasoning)
    for call, pieces in zip(whole.calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    whole.calls = [whole.calls[index] for index in sorted(ended)]
    return whole
