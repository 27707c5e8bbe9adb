"""The one thread that computes: plan, step, commit, until the scheduler has stopped."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Protocol

from ds4.server.process import compute

if TYPE_CHECKING:
    from ds4.engine.types import EngineLike
    from ds4.server.scheduler import Scheduler

SWITCH_SECONDS = 0.001


class Bell(Protocol):
    """Tells another thread that the scheduler has delivered something; see `ds4.server.bridge.Bridge`."""

    def ring(self) -> None: ...
    def due(self) -> int | None: ...


class EngineThread:
    """Runs a scheduler on its own thread. Nothing that happens in a step ends it; `Scheduler.shutdown` does."""

    def __init__(self, engine: EngineLike, scheduler: Scheduler, bell: Bell | None = None) -> None:
        """`bell`: what is delivered is only taken when it rings."""
        self._engine = engine
        self._scheduler = scheduler
        self._bell = bell
        self._thread = threading.Thread(target=self._run, name="ds4-engine", daemon=True)

    def start(self) -> None:
        share_interpreter()
        self._thread.start()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the end; False when `timeout` seconds were not enough."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def native_id(self) -> int | None:
        """The thread's id in the system, None before `start`."""
        return self._thread.native_id

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        compute()
        scheduler = self._scheduler
        while not scheduler.stopped:
            try:
                run_once(self._engine, scheduler, self._bell)
            except Exception as error:
                scheduler.abort(error)
        scheduler.close()
        if self._bell is not None:
            self._bell.ring()


def share_interpreter() -> None:
    """Lets a thread that waits for the interpreter have it after a millisecond instead of five.

    The engine thread takes it back after every native call; beside a thread that computes in Python (a request that is
    rendered, a checkpoint that is written) each time may cost one interval, and every stream waits for it.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))


def run_once(engine: EngineLike, scheduler: Scheduler, bell: Bell | None = None) -> bool:
    """One round of the loop; False when there was nothing to compute yet and it waited for a message instead.

    The bell rings inside the step, when the device has its work. Prompts may keep this thread busy with launches for
    the longer part of a step, for which no token shall wait: then it rings before.
    """
    plan = scheduler.plan()
    wake = None
    if bell is not None:
        if plan.rows and not plan.prefill_tokens:
            wake = bell.due()
        else:
            bell.ring()
    if not plan.rows:
        if not scheduler.stopped:
            scheduler.wait(plan.hold or None)
        return False
    try:
        results = engine.step(plan.rows, wake=wake)
    except Exception as error:
        scheduler.fail(plan, error)
    else:
        scheduler.commit(plan, results)
    return True
