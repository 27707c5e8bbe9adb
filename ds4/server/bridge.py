"""The way over from the engine thread to the event loop, and back for cancellations.

The scheduler hands over what one step produced in one call; one wake-up of the loop then spreads it over the
generations that wait for it. Waking a thread that sleeps takes 30 to 60 us, for which a device would wait: so handing
over is one thing, ringing the bell another, which the next step may do when the device computes. A `Pending` is one
request as its handler sees it: what each step brought, or cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ds4._core import Bell
from ds4.server.log import log_generation
from ds4.server.process import usable_cores
from ds4.server.slots import log_route
from ds4.server.types import Event, Failed, Finish, GenerationRequest, PrefillProgress, Started

if TYPE_CHECKING:
    from ds4.server.generation import Job
    from ds4.server.scheduler import Scheduler
    from ds4.server.trace import Record


log = logging.getLogger("ds4.server")

Listener = Callable[[Sequence[Event]], None]

_ONE = (1).to_bytes(8, sys.byteorder)


class Pending:
    """One submitted request. `listen` once; `cancel` may be called at any time."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.ended = False
        """Nothing will come any more."""
        self.record: Record | None = None
        """Where all its events are written to."""
        self._started: Started | None = None
        self._events: list[Event] = []
        self._listener: Listener | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._bridge: Bridge | None = None
        self._job: Job | None = None

    def submitted(self, bridge: Bridge, job: Job) -> None:
        self._bridge = bridge
        self._job = job

    def cancel(self) -> None:
        """The client is gone: the engine stops working for it, and nothing comes any more."""
        if self.ended:
            return
        self.ended = True
        self._events.clear()
        if self._bridge is not None and self._job is not None:
            self._bridge.cancel(self._job)
        self._wake()

    def put(self, events: Sequence[Event]) -> None:
        """Takes what a step produced. The end is logged here, where it is seen even when the client is gone."""
        if isinstance(events[0], Started):
            self._started = events[0]
        if self.record is not None:
            self.record.take(events)
        last = events[-1]
        if isinstance(last, Finish | Failed):
            log_generation(self.request, self._started, last)
        if self.ended:
            return
        if self._listener is not None:
            self._hand_over(events)
        else:
            self._events += events
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def first(self) -> Event | None:
        """Waits for the first event, which a listener will get too. None when there is none: it was cancelled."""
        loop = asyncio.get_running_loop()
        while not self._events and not self.ended:
            self._waiter = loop.create_future()
            await self._waiter
            self._waiter = None
        return self._events[0] if self._events else None

    def listen(self, listener: Listener) -> None:
        """Gives `listener` what has come so far, and from now on what each step brings, the last time with Finish or
        Failed at the end. It gets nothing after `cancel`. It is called on the event loop and must not raise."""
        self._listener = listener
        if self._events:
            events, self._events = self._events, []
            self._hand_over(events)

    def _hand_over(self, events: Sequence[Event]) -> None:
        if isinstance(events[-1], Finish | Failed):
            self.ended = True
        assert self._listener is not None
        self._listener(events)


class Bridge:
    """Belongs to the event loop, but for what is marked as the engine thread's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, first_at_once: bool = False) -> None:
        """Reads on `loop` from now on. `first_at_once`: a step keeps the loop from its work, as it does where the
        processor computes."""
        self._loop = loop
        self._scheduler: Scheduler | None = None
        self._handed: deque[tuple[Callable[[Any], None], object]] = deque()
        """Calls that the loop is to make."""
        self._ear, self._bell = socket.socketpair()
        for end in (self._ear, self._bell):
            end.setblocking(False)
        loop.add_reader(self._ear.fileno(), self._heard)
        self._routes: deque[str] = deque()
        """Lines for the log."""
        self._first_out = Bell()
        self._first_at_once = first_at_once and usable_cores() > 1

    def connect(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def submit(self, request: GenerationRequest) -> Pending:
        """Queues a request. Raises ShuttingDown."""
        assert self._scheduler is not None
        pending = Pending(request)
        pending.submitted(self, self._scheduler.submit(request, pending))
        return pending

    def cancel(self, job: Job) -> None:
        assert self._scheduler is not None
        self._scheduler.cancel(job)

    # ---- engine thread

    def deliver(self, batch: list[tuple[Job, list[Event]]]) -> None:
        """Once per step. The loop learns of it from the bell, but for a first token where the processor computes: it
        leaves before the next step begins, which would take the interpreter and the cores from the loop."""
        if self._loop.is_closed():
            # The process ends and nobody waits for this.
            for job, _ in batch:
                self._name(job)
        elif self._first_at_once and any(len(e) > 1 and isinstance(e[0], PrefillProgress) for _, e in batch):
            self._first_out.forget()
            self._handed.append((self._spread_first, batch))
            self.ring()
            self._first_out.wait_briefly()
        else:
            self._handed.append((self._spread, batch))

    def log_route(self, line: str) -> None:
        """The engine thread has a step to begin: the loop writes the line, once it has spread what came of the
        decision."""
        self._routes.append(line)

    def ring(self) -> None:
        """Wakes the loop if there is something for it."""
        if self._handed:
            # Without room there are enough bytes to wake it.
            with suppress(BlockingIOError):
                self._bell.send(_ONE)

    def due(self) -> int | None:
        """The file descriptor that `ring` would write to, for others to do so; None: there is nothing."""
        return self._bell.fileno() if self._handed else None

    # ---- event loop

    def close(self) -> None:
        """After the engine thread's end: nothing is heard any more."""
        self._log_routes()
        self._loop.remove_reader(self._ear.fileno())
        self._ear.close()
        self._bell.close()

    def _heard(self) -> None:
        with suppress(BlockingIOError):
            self._ear.recv(4096)
        handed = self._handed
        while handed:
            call, what = handed.popleft()
            try:
                call(what)
            except Exception as error:
                log.error("what a step produced was not passed on: %s", error, exc_info=error)

    def _name(self, job: Job) -> None:
        if job.naming is not None:
            assert self._scheduler is not None
            self._scheduler.name(job)

    def _spread_first(self, batch: list[tuple[Job, list[Event]]]) -> None:
        self._spread(batch)
        self._first_out.ring()

    def _spread(self, batch: list[tuple[Job, list[Event]]]) -> None:
        for job, events in batch:
            self._name(job)
            if isinstance(job.sink, Pending):
                job.sink.put(events)
        if self._routes:
            self._loop.call_soon(self._log_routes)

    def _log_routes(self) -> None:
        while self._routes:
            log_route(self._routes.popleft())
