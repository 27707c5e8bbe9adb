"""When to guess: drafts cost time, and pay only where enough of them turn out right.

A cycle is one decode step, plain or with drafts. Both kinds are timed as they come, and the share of right guesses is
followed; the kind that is faster per token is used, with a few cycles of the other now and then to notice a change.
The tokens are the same either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ds4.engine.types import Row

if TYPE_CHECKING:
    from ds4.engine.types import AheadLike, EngineLike, RowResult, SamplerLike, SessionLike

_LEARNING, _LEARNING_DRAFTS = 32, 8
_PAYS, _PLAIN_PROBES = 128, 2
_COSTS, _DRAFT_PROBES = 32, 2
_MEMORY = 16


class DraftPolicy:
    """Decides for each cycle how many tokens to guess: `most`, or none."""

    __slots__ = ("_accepted", "_cycle", "_drafted_cycles", "_plain_seconds", "_seconds", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._cycle = 0
        self._drafted_cycles = 0
        self._accepted = 0.0
        self._plain_seconds = 0.0
        self._seconds = 0.0

    @property
    def pays(self) -> bool | None:
        """Whether drafts are worth their time, as far as is known."""
        if not self._plain_seconds or not self._seconds:
            return None
        return (1.0 + self._accepted) * self._plain_seconds > self._seconds

    def wanted(self) -> int:
        """Tokens to guess in the coming cycle."""
        return self.most if self._drafts(self._cycle) else 0

    def _drafts(self, cycle: int) -> bool:
        if self.most < 1:
            return False
        pays = self.pays
        if pays is None:
            return cycle % _LEARNING < _LEARNING_DRAFTS
        if pays:
            return cycle % _PAYS >= _PLAIN_PROBES
        return cycle % _COSTS < _DRAFT_PROBES

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """A cycle is over: tokens guessed and how many were right; its time counts where the next one is its kind."""
        if self.most < 1:
            return
        if drafted:
            self._accepted = _moved(self._accepted, float(accepted), self._drafted_cycles)
            self._drafted_cycles += 1
        self._cycle += 1
        if (drafted > 0) != self._drafts(self._cycle):
            return
        if drafted:
            self._seconds = _moved(self._seconds, seconds, _MEMORY) if self._seconds else seconds
        else:
            self._plain_seconds = _moved(self._plain_seconds, seconds, _MEMORY) if self._plain_seconds else seconds


def _moved(average: float, value: float, count: int) -> float:
    """A running mean of the first values, then one that forgets."""
    return average + (value - average) / min(count + 1, _MEMORY)


class Decoder:
    """The tokens of one sequence, one after the other, guessed ahead where that pays."""

    def __init__(
        self,
        engine: EngineLike,
        session: SessionLike,
        sampler: SamplerLike,
        policy: DraftPolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafted = 0
        self.accepted = 0
        self.draft_seconds = 0.0
        self._engine = engine
        self._session = session
        self._sampler = sampler
        self._policy = policy or DraftPolicy(engine.most_drafts)
        self._clock = clock
        self._ahead: AheadLike | None = None
        self._taken = 0
        self._seconds = 0.0

    def after(self, token: int, room: int) -> RowResult:
        """The draw behind `token`, by the sampler as it is now. At most `room` more tokens are wanted behind that draw.

        Raises as `EngineLike.step`.
        """
        if self._ahead is not None:
            result = self._ahead.after(token)
            if result is not None:
                self._taken += 1
                self.accepted += 1
                return result
            self._policy.observe(self._ahead.drafted, self._taken, self._seconds)
        session = self._session
        drafts = min(self._policy.wanted(), room, session.ctx - session.n_tokens - 1)
        started = self._clock()
        [result] = self._engine.step([Row(session, [token], self._sampler, drafts=max(0, drafts))])
        self._seconds = self._clock() - started
        self._ahead, self._taken = result.ahead, 0
        if self._ahead is None:
            self._policy.observe(0, 0, self._seconds)
        else:
            self.drafted += self._ahead.drafted
            self.draft_seconds += self._ahead.seconds
        return result
