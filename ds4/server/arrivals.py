"""Requests on their way, and whether the first of many waits for the others.

Clients that begin together open their connections within a millisecond or two; one request after the other is read,
rendered and tokenised, and the first is ready while most are not. On a GPU a step costs 30 ms however little it
computes, so a step for that one alone is a step more for all of them.

`Arrivals` is what can be known of the others: connections that were accepted and have not asked anything, requests
that are being read or prepared. `Gathering` is the rule: the step waits as long as there is such a sign, and never
longer than it was told when the first prompt came. Who is alone waits for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FRESH_SECONDS = 0.05
"""So long a connection or a request that began is a sign: one that has not come by then may never come."""
LOOK_SECONDS = 0.002
"""A sign may go without a request: it is looked for again after so long."""


class Arrivals:
    """Who has begun to ask and is not done. Written by the event loop, read by the engine thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[object, float] = {}

    def expect(self, who: object) -> None:
        """A connection is open, or its next request begins."""
        self._since[who] = self._clock()

    def settled(self, who: object) -> None:
        """The request is with the scheduler, or answered, or its client is gone. Harmless when it was not expected."""
        self._since.pop(who, None)

    def expected(self) -> bool:
        """Is anybody on the way who began a moment ago?"""
        if not self._since:
            return False
        oldest = self._clock() - FRESH_SECONDS
        # One call that runs no Python: the other thread cannot change the dictionary meanwhile.
        return any(since >= oldest for since in tuple(self._since.values()))


class Gathering:
    """Holds a step back for requests on their way; `expected` says whether there are any. Engine thread."""

    def __init__(self, expected: Callable[[], bool]) -> None:
        self._expected = expected
        self._until: float | None = None

    def hold(self, now: float, most: float) -> float:
        """Seconds after which to ask again, or when a request has come; 0: the step begins. `most` counts from the
        first call after `over`: later ones extend nothing."""
        if self._until is None:
            self._until = now + most
        left = self._until - now
        return min(left, LOOK_SECONDS) if left > 0.0 and self._expected() else 0.0

    def over(self) -> None:
        """A step began, or nobody waits any more: the next prompt that finds the engine idle has its own time."""
        self._until = None
