"""CPU time of small functions beside each other, on a machine that others use too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def seconds(work: Mapping[str, Callable[[], object]], rounds: int = 9, each: float = 0.05) -> dict[str, list[float]]:
    """CPU seconds of one call, by name, one number for each round.

    In every round each function runs in turn for about `each` seconds, so that a slow phase of the machine meets all
    of them. Thread CPU time leaves out what other processes took, though not what they did to the caches.
    """
    calls: dict[str, int] = {}
    for name, function in work.items():
        function()
        n = 1
        while True:
            start = time.thread_time()
            for _ in range(n):
                function()
            took = time.thread_time() - start
            if took >= each / 4:
                break
            n *= 2
        calls[name] = max(1, round(n * each / max(took, 1e-9)))
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, function in work.items():
            n = calls[name]
            start = time.thread_time()
            for _ in range(n):
                function()
            found[name].append((time.thread_time() - start) / n)
    return found


def median(values: list[float]) -> float:
    return statistics.median(values)


def ratio(slow: list[float], fast: list[float]) -> float:
    """How many times faster: the median over the rounds, each compared within itself."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))
