"""One round of the engine thread: when the event loop is woken for what a step before has produced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ds4.engine.types import Row, RowResult
from ds4.errors import EngineError
from ds4.server.engine_thread import run_once
from ds4.server.scheduler import Scheduler, SchedulerConfig
from ds4.testing import Script, ScriptedEngine
from ds4.testing.driver import Driver


class Bell:
    """Rings into `log`; something is due when the scheduler has delivered since."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.delivered = 0

    def ring(self) -> None:
        if self.delivered:
            self.log.append(f"ring {self.delivered}")
            self.delivered = 0

    def due(self) -> int | None:
        return 77 if self.delivered else None


class Machine:
    """A scheduler and its engine, whose step only tells what it was asked."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.bell = Bell(self.log)
        self.engine = ScriptedEngine(Script.text("abc").endless(), slots=2)
        self.driver = Driver(self.engine, slots=2)
        self.scheduler = Scheduler(self.engine, SchedulerConfig(slots=2), self._deliver)
        self._step = self.engine.step
        self.engine.step = self._told  # type: ignore[method-assign]

    def _deliver(self, batch: Sequence[object]) -> None:
        self.bell.delivered += 1

    def _told(self, rows: Sequence[Row], *, wake: int | None = None) -> list[RowResult]:
        self.log.append(f"step {sum(len(row.tokens) for row in rows)} wake {wake}")
        if wake is not None:
            self.bell.delivered = 0
        return self._step(rows)

    def round(self) -> list[str]:
        self.log.clear()
        run_once(self.engine, self.scheduler, self.bell)
        return list(self.log)


def test_a_step_that_decodes_rings_itself_and_one_with_prompts_does_not() -> None:
    machine = Machine()
    first = machine.scheduler.submit(machine.driver.request([65] * 40, max_tokens=30))
    assert machine.round() == ["ring 1", "step 40 wake None"], "it has started"
    assert machine.round() == ["step 1 wake 77"], "its first token"
    machine.scheduler.submit(machine.driver.request([66] * 50, max_tokens=1))
    assert machine.round() == ["ring 2", "step 51 wake None"], "a token, and the second one's start"
    machine.scheduler.cancel(first)
    machine.scheduler.shutdown(1.0)
    assert machine.round() == ["ring 2"], "both ends; then there is nothing to do"


def test_a_step_that_fails_leaves_nothing_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    machine.scheduler.submit(machine.driver.request([65] * 20, max_tokens=3))
    machine.round()

    def broken(rows: Sequence[Row], *, wake: int | None = None) -> list[RowResult]:
        raise EngineError("before the bell")

    monkeypatch.setattr(machine.engine, "step", broken)
    assert machine.round() == []
    machine.scheduler.shutdown(1.0)
    assert machine.round() == ["ring 2"], "the first token and the failure"


def test_without_a_bell_a_step_is_asked_for_nothing() -> None:
    machine = Machine()
    machine.scheduler.submit(machine.driver.request([65] * 20, max_tokens=3))
    calls: list[Any] = []
    for _ in range(2):
        machine.log.clear()
        run_once(machine.engine, machine.scheduler)
        calls += machine.log
    assert calls == ["step 20 wake None", "step 1 wake None"]
