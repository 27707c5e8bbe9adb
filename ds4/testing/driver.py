"""Drives a scheduler by hand, step by step on a clock of its own, and collects what each job got."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from ds4.engine.types import SamplingParams
from ds4.server.checkpoints import Checkpoints
from ds4.server.generation import Job
from ds4.server.observer import Observer
from ds4.server.plan import Plan
from ds4.server.scheduler import Scheduler, SchedulerConfig
from ds4.server.types import (
    ContentDelta,
    Event,
    Failed,
    Finish,
    GenerationRequest,
    ReasoningDelta,
    Started,
    ToolCallDelta,
)
from ds4.testing.engine import ScriptedEngine

GREEDY = SamplingParams(temperature=0.0)


class Clock:
    """Time that passes only when told, or when a scripted engine sleeps by it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Driver:
    """A scheduler, its engine and the events of each job; no threads, so that every interleaving is chosen.

    >>> driver = Driver(ScriptedEngine(["Hello", " world"]), slots=2)
    >>> job = driver.submit("Hi")
    >>> driver.run()
    >>> driver.text(job)
    'Hello world'
    """

    def __init__(
        self,
        engine: ScriptedEngine,
        *,
        slots: int = 1,
        clock: Clock | None = None,
        checkpoints: Checkpoints | None = None,
        observer: Observer | None = None,
        names_elsewhere: bool = False,
        expected: Callable[[], bool] = lambda: False,
        **config: Any,
    ) -> None:
        self.engine = engine
        self.clock = clock or Clock()
        self.deliveries: list[list[tuple[Job, list[Event]]]] = []
        self.scheduler = Scheduler(
            engine,
            SchedulerConfig(slots=slots, **config),
            self._deliver,
            checkpoints=checkpoints,
            observer=observer,
            names_elsewhere=names_elsewhere,
            expected=expected,
            clock=self.clock,
        )
        self._events: dict[Job, list[Event]] = {}
        self._ids = itertools.count(1)

    def request(self, prompt: str | list[int], **fields: Any) -> GenerationRequest:
        """A greedy request of at most 1000 tokens unless `fields` say otherwise; text is encoded with specials."""
        tokens = self.engine.tokenizer.encode_with_specials(prompt) if isinstance(prompt, str) else prompt
        defaults: dict[str, Any] = {
            "id": f"request-{next(self._ids)}",
            "dialect": "chat",
            "model": self.engine.info.id,
            "prompt_tokens": tuple(tokens),
            "key": self.engine.tokenizer.key_bytes_of_ids(tokens),
            "sampling": GREEDY,
            "max_tokens": 1000,
            "syntax": self.engine.info.syntax,
        }
        return GenerationRequest(**{**defaults, **fields})

    def submit(self, prompt: str | list[int], **fields: Any) -> Job:
        return self.scheduler.submit(self.request(prompt, **fields))

    def step(self) -> Plan:
        """One round of the engine thread's loop; the plan has no rows when there was nothing to do."""
        plan = self.scheduler.plan()
        if plan.rows:
            try:
                results = self.engine.step(plan.rows)
            except Exception as error:
                self.scheduler.fail(plan, error)
            else:
                self.scheduler.commit(plan, results)
        return plan

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self, limit: int = 100_000) -> int:
        """Steps until nothing is left to do; returns how many. Raises TimeoutError after `limit`."""
        for count in range(limit):
            plan = self.step()
            if plan.hold:
                self.clock.sleep(plan.hold)
            if plan.rows or plan.hold:
                continue
            if not self.scheduler.restoring:
                return count
            self.scheduler.wait()
        raise TimeoutError(f"still busy after {limit} steps")

    def ask(self, prompt: str | list[int], **fields: Any) -> Job:
        """Submits one request and runs until all is done."""
        job = self.submit(prompt, **fields)
        self.run()
        return job

    # ---- what a job got

    def events(self, job: Job) -> list[Event]:
        return self._events.get(job, [])

    def text(self, job: Job) -> str:
        return "".join(e.text for e in self.events(job) if isinstance(e, ContentDelta))

    def reasoning(self, job: Job) -> str:
        return "".join(e.text for e in self.events(job) if isinstance(e, ReasoningDelta))

    def arguments(self, job: Job) -> str:
        return "".join(e.arguments for e in self.events(job) if isinstance(e, ToolCallDelta))

    def started(self, job: Job) -> Started | None:
        return next((e for e in self.events(job) if isinstance(e, Started)), None)

    def end(self, job: Job) -> Finish | Failed | None:
        """The terminal event, if there was one. Raises AssertionError when there were two or something followed."""
        events = self.events(job)
        ends = [e for e in events if isinstance(e, (Finish, Failed))]
        if len(ends) > 1 or (ends and events[-1] is not ends[0]):
            raise AssertionError(f"events after the end: {events}")
        return ends[0] if ends else None

    def finish(self, job: Job) -> Finish:
        """The normal end. Raises AssertionError when the job failed or still runs."""
        end = self.end(job)
        if not isinstance(end, Finish):
            raise AssertionError(f"expected Finish, got {end}")
        return end

    def _deliver(self, batch: list[tuple[Job, list[Event]]]) -> None:
        self.deliveries.append(batch)
        for job, events in batch:
            self._events.setdefault(job, []).extend(events)
