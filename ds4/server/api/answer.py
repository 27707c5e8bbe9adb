"""Carries one generation to the client, as a stream or as a whole: the same steps for every dialect.

A dialect brings an `Answer`, which turns events into its own bytes; everything else is here: headers before the
prompt is evaluated, keep-alives while nothing comes, back-pressure, the disconnect that cancels, the error that is a
response before the headers and an event after them (and then never a normal end).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ds4.errors import ClientDisconnected
from ds4.server.api.errors import WireError, failed_error, wire_error
from ds4.server.bridge import Pending
from ds4.server.sse import EventStream
from ds4.server.types import (
    ContentDelta,
    Event,
    Failed,
    Finish,
    GenerationRequest,
    ReasoningDelta,
    SampledToken,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

if TYPE_CHECKING:
    from ds4.server.api.service import Service
    from ds4.server.http import Responder

log = logging.getLogger("ds4.server")


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


class Answer(Protocol):
    """One dialect's answer to one request. What it returns for a stream are whole events, or nothing."""

    @property
    def keepalive(self) -> bytes | Callable[[], bytes]:
        """What a stream sends while nothing else comes."""

    def begin(self) -> bytes:
        """What goes out with the headers, before the prompt is evaluated."""

    def events(self, batch: Sequence[Event]) -> bytes: ...
    def error_event(self, error: WireError) -> bytes:
        """What ends a stream that failed."""

    def whole(self, collected: Collected) -> bytes:
        """The body of a response that is no stream."""

    def error(self, error: WireError) -> bytes:
        """The body of a response that failed."""


async def send(
    service: Service, request: GenerationRequest, answer: Answer, responder: Responder, *, stream: bool
) -> None:
    """Runs a request and sends its answer. Raises ShuttingDown before anything is sent."""
    pending = service.bridge.submit(request)
    responder.on_disconnect(pending.cancel)
    try:
        if stream:
            await _stream(pending, answer, EventStream.start(responder, service.keepalive, keep_alive=answer.keepalive))
        else:
            await _whole(pending, answer, responder)
    except ClientDisconnected:
        return
    finally:
        pending.cancel()


async def _whole(pending: Pending, answer: Answer, responder: Responder) -> None:
    events: list[Event] = []
    async for batch in pending.batches():
        events += batch
    last = events[-1] if events else None
    if isinstance(last, Failed):
        failure = failed_error(last)
        responder.send(failure.status, answer.error(failure), reason=failure.message)
    elif isinstance(last, Finish):
        responder.send(200, answer.whole(collect(events, as_text(last))))


async def _stream(pending: Pending, answer: Answer, stream: EventStream) -> None:
    try:
        await _write_events(pending, answer, stream)
    except ClientDisconnected:
        stream.abort("the client is gone")
        raise
    except Exception as error:
        # A stream that just ends looks complete to many clients, and agents ask again without end.
        log.error("%s failed in its stream: %s", pending.request.id, error, exc_info=error)
        stream.send_many((answer.error_event(wire_error(error)),))
        stream.close()
    except BaseException:
        stream.abort("the server stops")
        raise
    else:
        stream.close()


async def _write_events(pending: Pending, answer: Answer, stream: EventStream) -> None:
    open_calls = 0
    stream.send_many((answer.begin(),))
    async for batch in pending.batches():
        for event in batch:
            if isinstance(event, ToolCallStart):
                open_calls += 1
            elif isinstance(event, ToolCallEnd):
                open_calls -= 1
        last = batch[-1]
        if isinstance(last, Failed):
            data = answer.events(batch[:-1]) + answer.error_event(failed_error(last))
        elif isinstance(last, Finish) and last.reason == "error" and open_calls:
            # The client saw the beginning of a call that must not be executed: it may not take this for an end.
            failure = failed_error(Failed(last.error or "the tool call is not complete"))
            data = answer.events(batch[:-1]) + answer.error_event(failure)
        elif isinstance(last, Finish):
            data = answer.events((*batch[:-1], as_text(last)))
        else:
            data = answer.events(batch)
        if data:
            stream.send_many((data,))
            await stream.drain()


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
