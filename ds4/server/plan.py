"""What one step computes, and whose row each of it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds4.engine.types import Row
    from ds4.server.generation import Generation


@dataclass(eq=False, slots=True)
class Work:
    """Whose row it is; `end` is the prompt position after a prefill chunk, None for a decode row."""

    generation: Generation
    end: int | None = None


@dataclass(slots=True)
class Plan:
    """The rows of one step, decode first, and beside each row whose it is."""

    rows: list[Row] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    prefill_tokens: int = 0
    started: float = 0.0
    hold: float = 0.0
    """Without rows: there is work, but more is on its way; seconds after which to plan again at the latest."""

    def add(self, row: Row, work: Work) -> None:
        self.rows.append(row)
        self.work.append(work)

    @property
    def alone(self) -> bool:
        """One generation decodes, and nothing else is done."""
        return len(self.work) == 1 and self.work[0].end is None

    @property
    def decode_rows(self) -> int:
        return sum(work.end is None for work in self.work)
