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
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ds4.errors import ClientDisconnected, ShuttingDown
from ds4.server.api.answer import Again, Answer, as_text, collect
from ds4.server.api.errors import WireError, failed_error, headers_of, wire_error
from ds4.server.api.usage import together
from ds4.server.bridge import Pending
from ds4.server.sse import EventStream
from ds4.server.types import Event, Failed, Finish, GenerationRequest, ToolCallEnd, ToolCallStart

if TYPE_CHECKING:
    from ds4.server.api.service import Service
    from ds4.server.http import Responder

log = logging.getLogger("ds4.server")


async def send(
    service: Service,
    requests: Sequence[GenerationRequest],
    new_answer: Callable[[], Answer],
    responder: Responder,
    *,
    stream: bool,
    again: Again | None = None,
) -> None:
    """Runs the generations of a request and sends the answer, which is made when they are on their way. Raises
    ShuttingDown before anything is sent.

    `again`: a whole answer with a call that cannot be read is not sent, the model is asked once more. In a stream the
    client has seen the first answer by then.
    """
    choices: list[Pending] = []
    delivery: _Delivery | None = None

    def cancel() -> None:
        for pending in choices:
            pending.cancel()
        if delivery is not None:
            delivery.end()

    responder.handed_over()
    try:
        for request in requests:
            choices.append(service.submit(request, responder.request.body, stream=stream))
        responder.on_disconnect(cancel)
        answer = new_answer()
        if stream and any(request.continues is not None and request.continues.required for request in requests):
            # Whether its state is still live shows when it gets a slot; until then a refusal is a status.
            first = await choices[0].first()
            if isinstance(first, Failed):
                _refuse(responder, answer, failed_error(first))
                return
        if stream:
            opened = EventStream.start(responder, service.keepalive, keep_alive=answer.keepalive, first=answer.begin())
            delivery = _Streamed(choices, answer, opened)
        else:
            delivery = _Whole(service, choices, answer, responder, again)
        await delivery.run()
    except ClientDisconnected:
        return
    finally:
        cancel()


class _Delivery(ABC):
    """Takes the events of all choices; `run` returns when the response has its end or the client is gone."""

    def __init__(self, choices: Sequence[Pending], answer: Answer) -> None:
        self._choices = choices
        self._answer = answer
        self._over = False
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None

    @abstractmethod
    def _take(self, choice: int, batch: Sequence[Event]) -> None:
        """What a step brought for one choice."""

    @abstractmethod
    def _failed(self, error: Exception) -> None:
        """Tells the client that its answer could not be written."""

    async def run(self) -> None:
        for choice, pending in enumerate(self._choices):
            pending.listen(partial(self.take, choice))
        while not self._over:
            if not self._woken:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            self._woken = False
            await self._catch_up()

    @abstractmethod
    async def _catch_up(self) -> None:
        """After a wake-up: sends what had to wait."""

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
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Whole(_Delivery):
    def __init__(
        self, service: Service, choices: list[Pending], answer: Answer, responder: Responder, again: Again | None
    ) -> None:
        """`choices` is changed where the model is asked again."""
        super().__init__(choices, answer)
        self._service = service
        self._choices: list[Pending] = choices
        self._responder = responder
        self._again = again
        self._events: list[list[Event]] = [[] for _ in choices]
        self._finishes: dict[int, Finish] = {}
        self._first: dict[int, Finish] = {}
        """How the answers ended that were not sent."""

    def _take(self, choice: int, batch: Sequence[Event]) -> None:
        self._events[choice] += batch
        last = batch[-1]
        if isinstance(last, Failed):
            failure = failed_error(last)
            _refuse(self._responder, self._answer, failure)
            self.end()
        elif isinstance(last, Finish):
            self._finishes[choice] = last
            if len(self._finishes) < len(self._choices):
                return
            if self._again is not None and not self._first and any(f.broken for f in self._finishes.values()):
                self._wake()
            else:
                self._send()

    async def _catch_up(self) -> None:
        """Every choice has ended, and one has a call that cannot be read."""
        asked: dict[int, Pending] = {}
        for choice, finish in self._finishes.items():
            request = None
            if self._again is not None and finish.broken is not None:
                request = await self._again(self._choices[choice].request, finish)
            if self._over:
                return
            if request is None or finish.broken is None:
                continue
            try:
                asked[choice] = self._choices[choice] = self._service.submit(
                    request, self._responder.request.body, stream=False, again=True
                )
            except ShuttingDown:
                continue
            log.info("%s: %s: the model is told and answers once more", request.id, finish.broken.detail)
        self._again = None
        for choice in asked:
            self._first[choice] = self._finishes.pop(choice)
            self._events[choice] = []
        for choice, pending in asked.items():
            pending.listen(partial(self.take, choice))
        if not asked and not self._over:
            self._send()

    def _send(self) -> None:
        collected = []
        for choice, events in enumerate(self._events):
            finish = self._finishes[choice]
            first = self._first.get(choice)
            collected.append(collect(events, as_text(finish if first is None else together(first, finish))))
        self._responder.send(200, self._answer.whole(collected))
        self.end()

    def _failed(self, error: Exception) -> None:
        if not self._responder.started:
            _refuse(self._responder, self._answer, wire_error(error))


def _refuse(responder: Responder, answer: Answer, error: WireError) -> None:
    responder.send(error.status, answer.error(error), headers=headers_of(error), reason=error.message)


class _Streamed(_Delivery):
    def __init__(self, choices: Sequence[Pending], answer: Answer, stream: EventStream) -> None:
        super().__init__(choices, answer)
        self._stream = stream
        self._open_calls = [0] * len(choices)
        self._finishes: dict[int, Finish] = {}
        self._held: list[tuple[int, list[Event]]] = []

    async def run(self) -> None:
        try:
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
