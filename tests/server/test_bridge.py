"""The bridge between engine thread and event loop, with the scheduler played by the test."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ds4.engine.types import SamplingParams
from ds4.errors import ShuttingDown
from ds4.server import bridge as bridge_module
from ds4.server.bridge import Bridge, Pending
from ds4.server.generation import Job
from ds4.server.scheduler import Scheduler
from ds4.server.types import ContentDelta, Event, Failed, Finish, GenerationRequest, PrefillProgress

END = Finish("stop", 1, 0, 1, 1)


class Recorder:
    """What the bridge needs of a scheduler; `open` False refuses."""

    def __init__(self) -> None:
        self.open = True
        self.jobs: list[Job] = []
        self.cancelled: list[Job] = []

    def submit(self, request: GenerationRequest, sink: object = None) -> Job:
        if not self.open:
            raise ShuttingDown("server shutting down")
        self.jobs.append(Job(request, np.asarray(request.prompt_tokens, np.int32), 0.0, sink))
        return self.jobs[-1]

    def cancel(self, job: Job) -> None:
        self.cancelled.append(job)


def request(name: str = "r") -> GenerationRequest:
    return GenerationRequest(name, "chat", "m", (1,), b"", SamplingParams(), 5)


def run(test: Any) -> None:
    async def main() -> None:
        scheduler = Recorder()
        bridge = Bridge(asyncio.get_running_loop())
        bridge.connect(cast("Scheduler", scheduler))
        await asyncio.wait_for(test(bridge, scheduler), 30)
        bridge.close()

    asyncio.run(main())


def from_thread(bridge: Bridge, *batches: list[tuple[Job, list[Event]]]) -> None:
    def deliver() -> None:
        for batch in batches:
            bridge.deliver(batch)
        bridge.ring()

    thread = threading.Thread(target=deliver)
    thread.start()
    thread.join()


async def heard(pending: Pending) -> list[Sequence[Event]]:
    """All that comes, step by step."""
    batches: list[Sequence[Event]] = []
    pending.listen(batches.append)
    while not pending.ended:
        await asyncio.sleep(0)
    return batches


def test_events_arrive_in_order_at_their_own_request() -> None:
    async def test(bridge: Bridge, scheduler: Recorder) -> None:
        one, two = bridge.submit(request("1")), bridge.submit(request("2"))
        a, b = scheduler.jobs
        from_thread(
            bridge,
            [(a, [ContentDelta("a1")]), (b, [ContentDelta("b1")])],
            [(b, [ContentDelta("b2"), END])],
            [(a, [ContentDelta("a2")])],
            [(a, [END])],
        )
        for pending, expected in ((one, ["a1", "a2"]), (two, ["b1", "b2"])):
            events = [event for batch in await heard(pending) for event in batch]
            assert events == [*map(ContentDelta, expected), END]
            assert pending.ended
        assert scheduler.cancelled == []

    run(test)


def test_a_listener_is_told_of_each_step() -> None:
    async def test(bridge: Bridge, scheduler: Recorder) -> None:
        pending = bridge.submit(request())
        (job,) = scheduler.jobs
        sizes: list[int] = []
        pending.listen(lambda batch: sizes.append(len(batch)))
        for events in ([ContentDelta("a")], [ContentDelta("b"), ContentDelta("c")], [Failed("broken")]):
            from_thread(bridge, [(job, events)])
            for _ in range(5):
                await asyncio.sleep(0)
        assert sizes == [1, 2, 1]
        assert pending.ended

    run(test)


def test_after_a_cancel_nothing_comes_and_the_scheduler_was_told_once() -> None:
    async def test(bridge: Bridge, scheduler: Recorder) -> None:
        pending = bridge.submit(request())
        (job,) = scheduler.jobs
        batches: list[Sequence[Event]] = []
        pending.listen(batches.append)
        pending.cancel()
        pending.cancel()
        from_thread(bridge, [(job, [ContentDelta("late"), Finish("cancelled", 1, 0, 0, 0)])])
        for _ in range(5):
            await asyncio.sleep(0)
        assert batches == []
        assert scheduler.cancelled == [job]

    run(test)


def test_cancel_after_the_end_does_nothing() -> None:
    async def test(bridge: Bridge, scheduler: Recorder) -> None:
        pending = bridge.submit(request())
        from_thread(bridge, [(scheduler.jobs[0], [END])])
        assert await heard(pending) == [[END]]
        pending.cancel()
        assert scheduler.cancelled == []

    run(test)


def test_refusal_of_the_scheduler_is_passed_on() -> None:
    async def test(bridge: Bridge, scheduler: Recorder) -> None:
        scheduler.open = False
        with pytest.raises(ShuttingDown):
            bridge.submit(request())

    run(test)


def test_the_end_is_logged_even_when_the_client_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ds4.server")

    async def test(bridge: Bridge, scheduler: Recorder) -> None:
        pending = bridge.submit(request("gone"))
        pending.cancel()
        from_thread(bridge, [(scheduler.jobs[0], [Finish("cancelled", 1, 0, 0, 0)])])
        await asyncio.sleep(0.01)
        assert any("gone" in r.getMessage() and "finish=cancelled" in r.getMessage() for r in caplog.records)

    run(test)


def test_what_is_handed_over_is_heard_when_the_bell_rings_and_not_before() -> None:
    async def test(bridge: Bridge, scheduler: Recorder) -> None:
        pending = bridge.submit(request())
        (job,) = scheduler.jobs
        batches: list[Sequence[Event]] = []
        pending.listen(batches.append)
        assert bridge.due() is None
        bridge.ring()  # for nobody
        bridge.deliver([(job, [ContentDelta("a")])])
        bell = bridge.due()
        assert bell is not None
        await asyncio.sleep(0.01)
        assert batches == []
        os.write(bell, bytes(8))  # as a step does
        await asyncio.sleep(0.01)
        assert batches == [[ContentDelta("a")]] and bridge.due() is None
        for _ in range(100_000):  # more than there is room for
            bridge.deliver([])
            bridge.ring()
        bridge.deliver([(job, [END])])
        await asyncio.sleep(0.01)
        assert batches[1:] == [[END]]

    run(test)


def test_one_that_breaks_keeps_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def test(bridge: Bridge, scheduler: Recorder) -> None:
        first, second = bridge.submit(request("1")), bridge.submit(request("2"))
        a, b = scheduler.jobs
        batches: list[Sequence[Event]] = []

        def broken(batch: Sequence[Event]) -> None:
            raise ValueError("a listener that raises")

        first.listen(broken)
        second.listen(batches.append)
        from_thread(bridge, [(a, [ContentDelta("a")])], [(b, [END])])
        await asyncio.sleep(0.01)
        assert batches == [[END]]
        assert "a listener that raises" in caplog.text

    run(test)


def test_events_after_the_loop_is_closed_harm_nobody() -> None:
    loop = asyncio.new_event_loop()
    bridge = Bridge(loop)
    loop.close()
    bridge.deliver([])


def test_a_route_is_logged_when_its_events_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    monkeypatch.setattr(bridge_module, "log_route", order.append)

    async def test(bridge: Bridge, scheduler: Recorder) -> None:
        pending = bridge.submit(request())
        pending.listen(order.append)
        bridge.log_route("to slot 1")
        bridge.log_route("to slot 2")
        await asyncio.sleep(0)
        assert order == []
        from_thread(bridge, [(scheduler.jobs[0], [ContentDelta("a")])])
        while len(order) < 3:
            await asyncio.sleep(0)
        assert order == [[ContentDelta("a")], "to slot 1", "to slot 2"]

    run(test)


def test_routes_that_nothing_followed_are_logged_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(bridge_module, "log_route", lines.append)

    async def test() -> None:
        bridge = Bridge(asyncio.get_running_loop())
        bridge.log_route("to slot 1")
        bridge.close()

    asyncio.run(test())
    assert lines == ["to slot 1"]


@pytest.mark.parametrize(("cores", "wanted"), [(2, True), (1, True), (2, False)])
def test_a_first_token_leaves_before_the_next_step(cores: int, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the step would keep the loop from it, and the loop has a core. Later tokens are waited for nowhere."""
    monkeypatch.setattr(bridge_module, "usable_cores", lambda: cores)

    async def test(_: Bridge, scheduler: Recorder) -> None:
        bridge = Bridge(asyncio.get_running_loop(), first_at_once=wanted)
        bridge.connect(cast("Scheduler", scheduler))
        heard = [bridge.submit(request()), bridge.submit(request("s"))]
        made: list[object] = []
        for pending in heard:
            pending.listen(made.append)
        bell = SimpleNamespace(
            forget=lambda: made.append("forget"),
            wait_briefly=lambda: made.append("wait"),
            ring=lambda: made.append("out"),
        )
        monkeypatch.setattr(bridge, "_first_out", bell)
        ring = bridge.ring
        monkeypatch.setattr(bridge, "ring", lambda: (made.append("ring"), ring())[0])
        one, two = scheduler.jobs
        first: list[Event] = [PrefillProgress(1, 1), ContentDelta("a")]
        later: list[Event] = [ContentDelta("b")]
        bridge.deliver([(two, later), (one, first)])
        at_once = wanted and cores > 1
        assert made == ["forget", "ring", "wait"] * at_once
        ring()
        while first not in made:
            await asyncio.sleep(0)
        assert made[3 * at_once :] == [later, first, *["out"] * at_once]
        made.clear()
        bridge.deliver([(two, [ContentDelta("c")]), (one, [PrefillProgress(1, 2)])])
        assert made == []

    run(test)
