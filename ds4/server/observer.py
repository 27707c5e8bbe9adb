"""What can be seen of the scheduler from outside: its steps, its jobs' starts and ends, its slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ds4.server.generation import Job
    from ds4.server.reuse import Reuse
    from ds4.server.slots import Slot
    from ds4.server.types import Failed, Finish


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step in numbers: seconds, rows and tokens; seconds of first tokens (TTFT) and between tokens (ITL); tokens
    that were guessed and that were right, and what guessing took."""

    seconds: float
    decode_rows: int
    prefill_rows: int
    prefill_tokens: int
    queued: int
    busy: int
    ttft: Sequence[float]
    itl: Sequence[float]
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot as `/slots` shows it. `tokens` is what the session held when its last generation ended."""

    index: int
    request: str | None
    phase: str
    prompt_tokens: int
    prompt_done: int
    completion_tokens: int
    tokens: int
    idle_seconds: float


class Observer(Protocol):
    """Metrics. Called on the engine thread."""

    def on_start(self, job: Job, reuse: Reuse, queue_seconds: float) -> None: ...
    def on_step(self, report: StepReport) -> None: ...
    def on_end(self, job: Job, event: Finish | Failed) -> None: ...
    def on_idle(self) -> None:
        """Nothing runs and nothing waits; the last step's report may have said otherwise."""


def slot_state(slot: Slot, now: float) -> SlotState:
    """Read beside the running step, so it may be one token old."""
    generation = slot.generation
    if generation is None:
        return SlotState(slot.index, None, "idle", slot.prompt_tokens, 0, 0, slot.tokens, now - slot.last_used)
    return SlotState(
        slot.index,
        generation.job.request.id,
        "restore" if generation.restoring else "prefill" if generation.prefilling else "decode",
        generation.prompt_tokens,
        generation.position,
        generation.completion_tokens,
        slot.tokens,
        0.0,
    )
