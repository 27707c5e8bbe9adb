"""Who waits for whom when an idle engine gets the first of many requests."""

from __future__ import annotations

import asyncio

import pytest

from ds4.engine.types import EngineConfig
from ds4.server.arrivals import FRESH_SECONDS, LOOK_SECONDS, Arrivals, Gathering
from ds4.server.budget import GATHER_SECONDS
from ds4.server.config import ServerConfig
from ds4.server.generation import Job
from ds4.server.http import HttpServer, Request, Responder
from ds4.server.plan import Plan
from ds4.testing import Script, ScriptedEngine
from ds4.testing.driver import Clock, Driver
from tests.support.running_server import RunningServer

ENDLESS = Script.text("x").endless()
GPU, CPU = (0.030, 0.000107), (0.002, 0.00042)
SIZES = (60, 900, 200, 1700, 400) * 4


# ---- the signs


def test_what_is_a_sign_and_for_how_long() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    assert not arrivals.expected()
    arrivals.expect("opened")
    assert arrivals.expected()
    clock.sleep(FRESH_SECONDS / 2)
    arrivals.expect("asking")
    clock.sleep(FRESH_SECONDS * 0.6)
    assert arrivals.expected(), "the one that asks began a moment ago"
    arrivals.settled("asking")
    assert not arrivals.expected(), "one that never asks is no sign for ever"
    arrivals.settled("asking")
    arrivals.expect("opened")
    assert arrivals.expected(), "its next request"


def test_a_hold_ends_when_its_time_is_over_or_nobody_comes() -> None:
    signs = [True]
    gathering = Gathering(lambda: signs[0])
    assert gathering.hold(10.0, 0.01) == LOOK_SECONDS
    assert gathering.hold(10.009, 0.01) == pytest.approx(0.001)
    assert gathering.hold(10.0101, 5.0) == 0.0, "a later one extends nothing"
    gathering.over()
    assert gathering.hold(10.02, 0.0015) == pytest.approx(0.0015)
    signs[0] = False
    assert gathering.hold(10.021, 0.0015) == 0.0
    gathering.over()
    signs[0] = True
    assert gathering.hold(11.0, 0.0) == 0.0, "nothing may be waited for"


# ---- the rule in the scheduler


class Machine:
    """A driver whose steps cost `cost` and that has learned so; requests are on their way as `due` says."""

    def __init__(self, cost: tuple[float, float], *, slots: int = 16, learned: bool = True) -> None:
        self.clock = Clock()
        self.due: list[float] = []
        self.silent = 0
        """Connections that never ask."""
        engine = ScriptedEngine(
            ENDLESS, slots=slots, cost=lambda prompt, rows: cost[0] + cost[1] * (prompt + rows), sleep=self.clock.sleep
        )
        self.driver = Driver(
            engine,
            slots=slots,
            clock=self.clock,
            prefill_quantum=2048,
            mixed_prefill_quantum=512,
            expected=lambda: bool(self.due) or self.silent > 0,
        )
        for size in SIZES if learned else ():
            self.driver.ask([50 + size % 50] * size, max_tokens=1)

    def come(self, every: float, count: int, length: int = 100) -> tuple[list[Job], list[Plan], list[float]]:
        """Requests one after the other; their jobs, the steps until all have a token, and when each began."""
        first = self.clock.now
        self.due = [first + i * every for i in range(count)]
        jobs: list[Job] = []
        plans: list[Plan] = []
        began: list[float] = []
        for _ in range(10_000):
            while self.due and self.due[0] <= self.clock.now:
                self.due.pop(0)
                jobs.append(self.driver.submit([65 + len(jobs)] * length, max_tokens=4))
            now = self.clock.now
            plan = self.driver.step()
            if plan.hold:
                self.clock.now = min([now + plan.hold, *self.due])
            elif plan.rows:
                plans.append(plan)
                began.append(now - first)
            elif not self.due:
                return jobs, plans, began
            else:
                self.clock.now = self.due[0]
        raise TimeoutError


def test_sixteen_that_trickle_in_are_one_step() -> None:
    machine = Machine(GPU)
    _, plans, began = machine.come(0.0005, 16)
    assert [len(plans[0].rows), plans[0].prefill_tokens] == [16, 1600]
    assert began[0] == pytest.approx(0.0075), "when the last one is there"
    assert sum(bool(plan.prefill_tokens) for plan in plans) == 1


def test_without_signs_nobody_is_held() -> None:
    machine = Machine(GPU)
    _, plans, began = machine.come(0.0, 1)
    assert (began[0], len(plans[0].rows)) == (0.0, 1)


def test_a_full_step_or_all_slots_taken_wait_for_nobody() -> None:
    machine = Machine(GPU)
    _, plans, began = machine.come(0.0005, 16, length=300)
    assert len(plans[0].rows) == 7 and began[0] == pytest.approx(0.003), "seven are more than a step"
    machine = Machine(GPU, slots=4)
    machine.silent = 1
    _, plans, began = machine.come(0.0005, 4)
    assert len(plans[0].rows) == 4 and began[0] == pytest.approx(0.0015)


@pytest.mark.parametrize(
    ("cost", "least", "most"), [(GPU, 0.008, 0.015), (CPU, 0.0, 0.001), ((0.5, 0.001), 0.02, GATHER_SECONDS)]
)
def test_who_never_asks_costs_a_part_of_a_step(cost: tuple[float, float], least: float, most: float) -> None:
    machine = Machine(cost)
    machine.silent = 1
    for _ in range(2):
        _, plans, began = machine.come(0.0, 1)
        assert least - 1e-9 <= began[0] <= most + 1e-9
        assert len(plans[0].rows) == 1


def test_later_ones_extend_nothing() -> None:
    machine = Machine(GPU)
    _, plans, began = machine.come(0.004, 16)
    assert began[0] <= 0.015 and 2 <= len(plans[0].rows) <= 4
    assert len(plans[1].rows) > len(plans[0].rows), "the next step has those that came during the first"


def test_of_a_machine_that_is_not_known_nothing_is_waited_for() -> None:
    machine = Machine(GPU, learned=False)
    machine.silent = 1
    assert machine.come(0.0, 1)[2][0] == 0.0


def test_who_decodes_is_not_held() -> None:
    machine = Machine(GPU)
    running = machine.driver.submit([65] * 100, max_tokens=100)
    machine.driver.steps(3)
    machine.silent = 1
    machine.driver.submit([66] * 100, max_tokens=2)
    plan = machine.driver.step()
    assert not plan.hold and plan.decode_rows == 1 and plan.prefill_tokens == 100
    assert machine.driver.end(running) is None


def test_cancelled_while_held() -> None:
    machine = Machine(GPU)
    machine.silent = 1
    driver = machine.driver
    first = driver.submit([65] * 100)
    assert driver.step().hold
    machine.clock.sleep(0.005)
    driver.scheduler.cancel(first)
    plan = driver.step()
    assert not plan.rows and not plan.hold
    assert driver.finish(first).reason == "cancelled"
    machine.clock.sleep(1.0)
    second = driver.submit([66] * 100, max_tokens=2)
    assert driver.step().hold, "the next one has a time of its own"
    driver.run()
    assert driver.finish(second).completion_tokens == 2


def test_shut_down_while_held() -> None:
    machine = Machine(GPU)
    machine.silent = 1
    driver = machine.driver
    job = driver.submit([65] * 100, max_tokens=2)
    assert driver.step().hold
    driver.scheduler.shutdown(5.0)
    assert driver.step().rows
    driver.run()
    assert driver.finish(job).completion_tokens == 2 and driver.scheduler.stopped


def test_idle_is_not_reported_while_held() -> None:
    idle: list[float] = []
    machine = Machine(GPU)
    observer = type("Idle", (), {"on_idle": lambda self: idle.append(1.0), "__getattr__": lambda self, _: len})()
    machine.driver.scheduler._observer = observer
    machine.silent = 1
    machine.driver.submit([65] * 100, max_tokens=1)
    assert machine.driver.step().hold and not idle
    machine.driver.run()
    assert idle


# ---- the signs of sockets

GET = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\n\r\n"


async def until(condition: object) -> None:
    """Lets the server read; a second is enough for any machine."""
    for _ in range(1000):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen")


def test_sockets_and_requests_are_signs_until_they_are_handed_over_answered_or_gone() -> None:
    async def run() -> None:
        seen: list[bool] = []
        held: list[Responder] = []

        async def handler(request: Request, responder: Responder) -> None:
            seen.append(arrivals.expected())
            if request.method == "POST":
                responder.handed_over()
                seen.append(arrivals.expected())
                held.append(responder)
                await asyncio.sleep(30)
            else:
                responder.send(200, b"x")

        arrivals = Arrivals(Clock())  # by which nothing grows old
        server = HttpServer(handler, arrivals=arrivals)
        await server.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await until(arrivals.expected)
        writer.write(GET)
        assert await reader.readuntil(b"\r\n\r\nx")
        assert seen == [True], "while it is prepared"
        assert not arrivals.expected(), "answered, and an idle connection is no sign"
        writer.write(POST + b"da")
        await until(arrivals.expected)
        writer.write(b"ta")
        await until(lambda: held)
        assert seen == [True, True, False], "until it is handed over"
        _, gone = await asyncio.open_connection("127.0.0.1", server.port)
        await until(arrivals.expected)
        gone.close()
        await until(lambda: not arrivals.expected())
        held[0].send(200, b"y")
        writer.close()
        server.begin_shutdown()
        assert not await server.wait_closed(0.01) or not arrivals.expected()

    asyncio.run(run())


def test_a_lone_request_over_http_is_not_held() -> None:
    """The engine has learned that a step costs 0.2 s; the request is a sign for others, but not of others."""
    engine = ScriptedEngine(ENDLESS, slots=4, cost=lambda prompt, rows: 0.2 + 1e-5 * prompt if prompt > 16 else 0.0)
    config = EngineConfig(ctx=4096, slots=4)
    running = RunningServer(engine, ServerConfig(engine=config, port=0))
    try:
        budget = running.app._scheduler._budget
        for size in (60, 900, 200, 1700, 400) * 8:
            budget.observe(size, 0, 0.2 + 1e-5 * size)
        assert budget.gather() == GATHER_SECONDS
        arrivals, seen = running.app._http.arrivals, list[bool]()
        hold = running.app._scheduler._gathering.hold

        def watched(now: float, most: float) -> float:
            seen.append(arrivals.expected())
            return hold(now, most)

        running.app._scheduler._gathering.hold = watched  # type: ignore[method-assign]
        running.http.post("/v1/completions", json={"prompt": "a" * 40, "max_tokens": 1}).raise_for_status()
        assert seen == [False], "who is alone is no sign of another"
    finally:
        running.stop()
