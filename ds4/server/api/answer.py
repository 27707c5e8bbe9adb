"""Carries the generations of one request to the client, as a stream or as a whole: the same for every dialect.

A dialect brings an `Answer`, which turns events into its own bytes; everything else is here: headers before the
prompt is evaluated, keep-alives while nothing comes, back-pressure, the disconnect that cancels, the error that is a
response before the headers and an event after them (and then never a normal end). A request has one generation, or
several choices side by side: they are scheduled like any others, and the first that fails ends them all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ds4.errors import ClientDisconnected
from ds4.prompt.types import Message
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


CallFinished = Callable[[str, bytes], None]
"""Told the id that the client gets for a call, and the exact block that the call was sampled in."""

TurnFinished = Callable[[Message], None]
"""Told the whole answer, as it will stand in the history."""

TokenBytes = Callable[[int], bytes]


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


async def send(
    service: Service, requests: Sequence[GenerationRequest], answer: Answer, responder: Responder, *, stream: bool
) -> None:
    """Runs the generations of a request and sends the answer. Raises ShuttingDown before anything is sent."""
    choices: list[Pending] = []

    def cancel() -> None:
        for pending in choices:
            pending.cancel()

    try:
        for request in requests:
            choices.append(service.bridge.submit(request))
        responder.on_disconnect(cancel)
        if stream and any(request.continues is not None and request.continues.required for request in requests):
            # Whether its state is still live shows when it gets a slot; until then a refusal is a status.
            first = await choices[0].first()
            if isinstance(first, Failed):
                failure = failed_error(first)
                responder.send(failure.status, answer.error(failure), reason=failure.message)
                return
        if stream:
            await _stream(choices, answer, EventStream.start(responder, service.keepalive, keep_alive=answer.keepalive))
        else:
            await _whole(choices, answer, responder)
    except ClientDisconnected:
        return
    finally:
        cancel()


async def _batches(choices: Sequence[Pending]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """(choice, events) as they come, until every choice has ended."""
    if len(choices) == 1:
        async for batch in choices[0].batches():
            yield 0, batch
        return
    queue: asyncio.Queue[tuple[int, list[Event]] | None] = asyncio.Queue()

    async def forward(choice: int, pending: Pending) -> None:
        async for batch in pending.batches():
            queue.put_nowait((choice, batch))
        queue.put_nowait(None)

    tasks = [asyncio.ensure_future(forward(choice, pending)) for choice, pending in enumerate(choices)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def _whole(choices: Sequence[Pending], answer: Answer, responder: Responder) -> None:
    events: list[list[Event]] = [[] for _ in choices]
    async with aclosing(_batches(choices)) as batches:
        async for choice, batch in batches:
            events[choice] += batch
            last = batch[-1]
            if isinstance(last, Failed):
                failure = failed_error(last)
                responder.send(failure.status, answer.error(failure), reason=failure.message)
                return
    collected = [collect(e, as_text(e[-1])) for e in events if e and isinstance(e[-1], Finish)]
    if len(collected) == len(choices):
        responder.send(200, answer.whole(collected))


async def _stream(choices: Sequence[Pending], answer: Answer, stream: EventStream) -> None:
    try:
        await _write_events(choices, answer, stream)
    except ClientDisconnected:
        stream.abort("the client is gone")
        raise
    except Exception as error:
        # A stream that just ends looks complete to many clients, and agents ask again without end.
        log.error("%s failed in its stream: %s", choices[0].request.id, error, exc_info=error)
        stream.send_many((answer.error_event(wire_error(error)),))
        stream.close()
    except BaseException:
        stream.abort("the server stops")
        raise
    else:
        stream.close()


async def _write_events(choices: Sequence[Pending], answer: Answer, stream: EventStream) -> None:
    open_calls = [0] * len(choices)
    finishes: dict[int, Finish] = {}
    first = answer.begin()
    if first:
        stream.send_many((first,))
    async with aclosing(_batches(choices)) as batches:
        async for choice, batch in batches:
            for event in batch:
                if isinstance(event, ToolCallStart):
                    open_calls[choice] += 1
                elif isinstance(event, ToolCallEnd):
                    open_calls[choice] -= 1
            last = batch[-1]
            failure: Failed | None = None
            if isinstance(last, Failed):
                failure = last
            elif isinstance(last, Finish) and last.reason == "error" and open_calls[choice]:
                # The client saw the beginning of a call that must not be executed: it may not take this for an end.
                failure = Failed(last.error or "the tool call is not complete")
            if failure is not None:
                data = answer.events(batch[:-1], choice) + answer.error_event(failed_error(failure))
                stream.send_many((data,))
                return
            if isinstance(last, Finish):
                finishes[choice] = as_text(last)
                data = answer.events((*batch[:-1], finishes[choice]), choice)
                if len(finishes) == len(choices):
                    data += answer.end([finishes[i] for i in range(len(choices))])
            else:
                data = answer.events(batch, choice)
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
