"""Effort of thinking: the names and levels of a `Conversation` as one of the names that every syntax knows."""

from __future__ import annotations

from typing import Literal

Effort = Literal["none", "low", "medium", "high", "max"]


def effort_name(effort: str | int) -> Effort:
    """The name of an effort. A level stands for the tier that it falls into; an unknown name is the default, high.

    0 is none, 1 to 49 low, 50 to 74 medium, 75 to 99 high, 100 and more max.
    """
    if isinstance(effort, int):
        if effort <= 0:
            return "none"
        return "low" if effort < 50 else "medium" if effort < 75 else "high" if effort < 100 else "max"
    match effort:
        case "none" | "low" | "medium" | "max":
            return effort
        case "minimal":
            return "low"
        case _:
            return "high"
