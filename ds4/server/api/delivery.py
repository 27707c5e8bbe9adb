"""Carries the generations of one request to the client, as a stream or as a whole: the same for every dialect.

    engine thread ── one wake-up per step ──▶ Bridge ──▶ Pending ──▶ Delivery.take ──▶ Answer.events ──▶ EventStream

A dialect brings an `Answer`, which turns events into its own bytes; everything else is here: headers before the
prompt is evaluated, keep-alives while nothing comes, back-pressure, the disconnect that cancels, the error that is a
response before the headers and an event after them (and then never a normal end). A request has one generation, or
several choices side by side: they are scheduled like any others, and the first that fails ends them all.

What a step produced is written where it arrives: a coroutine is woken for the end and for a slow reader, not for each
token. While the client reads too slowly, events are held as they are, and go out together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ds4.errors import ClientDisconnected
from ds4.server.api.answer import Answer, as_text, collect
from ds4.server.api.errors import failed_error, wire_error
from ds4.server.bridge import Pending
from ds4.server.sse import EventStream
from ds4.server.types import Event, Failed, Finish, GenerationRequest, ToolCallEnd, ToolCallStart

if TYPE_CHECKING:
    from ds4.server.api.service import Service
    from ds4.server.http import Responder

log = logging.getLogger("ds4.server")


async def send(
    service: Service, requests: Sequence[GenerationRequest], answer: Answer, responder: Responder, *, stream: bool
) -> None:
    """Runs the generations of a request and sends the answer. Raises ShuttingDown before anything is sent."""
    choices: list[Pending] = []
    delivery: _Delivery | None = None

    def cancel() -> None:
        for pending in choices:
            pending.cancel()
        if delivery is not None:
            delivery.end()

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
            opened = EventStream.start(responder, service.keepalive, keep_alive=answer.keepalive)
            delivery = _Streamed(choices, answer, opened)
        else:
            delivery = _Whole(choices, answer, responder)
        await delivery.run()
    except ClientDisconnected:
        return
    finally:
        cancel()


class _Delivery:
    """Takes the events of all choices; `run` returns when the response has its end or the client is gone."""

    def __init__(self, choices: Sequence[Pending], answer: Answer) -> None:
        self._choices = choices
        self._answer = answer
        self._over = False
        self._waiter: asyncio.Future[None] | None = None

    def _take(self, choice: int, batch: Sequence[Event]) -> None:
        raise NotImplementedError

    def _failed(self, error: Exception) -> None:
        raise NotImplementedError

    async def run(self) -> None:
        for choice, pending in enumerate(self._choices):
            pending.listen(partial(self.take, choice))
        while not self._over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            await self._catch_up()

    async def _catch_up(self) -> None:
        """After a wake-up."""

    def take(self, choice: int, batch: Sequence[Event]) -> None:
        """Called by the bridge, which serves other requests next: nothing may leave from here."""
        if self._over:
            return
        try:
            self._take(choice, batch)
        except Exception as error:
            log.error("%s failed in its answer: %s", self._choices[0].request.id, error, exc_info=error)
            self._failed(error)
            self.end()

    def end(self) -> None:
        """Nothing more is taken."""
        self._over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Whole(_Delivery):
    def __init__(self, choices: Sequence[Pending], answer: Answer, responder: Responder) -> None:
        super().__init__(choices, answer)
        self._responder = responder
        self._events: list[list[Event]] = [[] for _ in choices]
        self._finishes: dict[int, Finish] = {}

    def _take(self, choice: int, batch: Sequence[Event]) -> None:
        self._events[choice] += batch
        last = batch[-1]
        if isinstance(last, Failed):
            failure = failed_error(last)
            self._responder.send(failure.status, self._answer.error(failure), reason=failure.message)
            self.end()
        elif isinstance(last, Finish):
            self._finishes[choice] = as_text(last)
            if len(self._finishes) == len(self._choices):
                collected = [collect(events, self._finishes[i]) for i, events in enumerate(self._events)]
                self._responder.send(200, self._answer.whole(collected))
                self.end()

    def _failed(self, error: Exception) -> None:
        if not self._responder.started:
            wire = wire_error(error)
            self._responder.send(wire.status, self._answer.error(wire), reason=wire.message)


class _Streamed(_Delivery):
    def __init__(self, choices: Sequence[Pending], answer: Answer, stream: EventStream) -> None:
        super().__init__(choices, answer)
        self._stream = stream
        self._open_calls = [0] * len(choices)
        self._finishes: dict[int, Finish] = {}
        self._held: list[tuple[int, list[Event]]] = []

    async def run(self) -> None:
        try:
            first = self._answer.begin()
            if first:
                self._stream.send_framed(first)
            await super().run()
        except ClientDisconnected:
            self._stream.abort("the client is gone")
            raise
        except Exception as error:
            log.error("%s failed in its stream: %s", self._choices[0].request.id, error, exc_info=error)
            self._failed(error)
        except BaseException:
            self._stream.abort("the server stops")
            raise
        else:
            self._stream.close()

    def _take(self, choice: int, batch: Sequence[Event]) -> None:
        if self._held or self._stream.paused:
            self._hold(choice, batch)
        else:
            self._write(choice, batch)

    def _failed(self, error: Exception) -> None:
        # A stream that just ends looks complete to many clients, and agents ask again without end.
        if not self._stream.closed:
            self._stream.send_framed(self._answer.error_event(wire_error(error)))
            self._stream.close()

    # ---- a slow reader

    def _hold(self, choice: int, batch: Sequence[Event]) -> None:
        if self._held and self._held[-1][0] == choice:
            self._held[-1][1].extend(batch)
            return
        self._held.append((choice, list(batch)))
        self._wake()

    async def _catch_up(self) -> None:
        while self._held and not self._over:
            await self._stream.drain()
            held, self._held = self._held, []
            for choice, batch in held:
                self.take(choice, batch)

    # ---- writing

    def _write(self, choice: int, batch: Sequence[Event]) -> None:
        open_calls = self._open_calls
        for event in batch:
            if isinstance(event, ToolCallStart):
                open_calls[choice] += 1
            elif isinstance(event, ToolCallEnd):
                open_calls[choice] -= 1
        last = batch[-1]
        if not isinstance(last, Finish | Failed):
            data = self._answer.events(batch, choice)
            if data:
                self._stream.send_framed(data)
            return
        failure: Failed | None = last if isinstance(last, Failed) else None
        if isinstance(last, Finish) and last.reason == "error" and open_calls[choice]:
            # The client saw the beginning of a call that must not be executed: it may not take this for an end.
            failure = Failed(last.error or "the tool call is not complete")
        if failure is not None:
            data = self._answer.events(batch[:-1], choice) + self._answer.error_event(failed_error(failure))
            self._stream.send_framed(data)
            self.end()
            return
        assert isinstance(last, Finish)
        finish = self._finishes[choice] = as_text(last)
        data = self._answer.events((*batch[:-1], finish), choice)
        if len(self._finishes) == len(self._choices):
            data += self._answer.end([self._finishes[i] for i in range(len(self._choices))])
        if data:
            self._stream.send_framed(data)
        if len(self._finishes) == len(self._choices):
            self.end()
