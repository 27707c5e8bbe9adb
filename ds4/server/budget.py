"""How many prompt tokens the next step may take: what a step costs, learned from the steps, against who waits for it.

    seconds of a step  =  fixed + token * prompt tokens         where nothing decodes
                       =  fixed' + token' * decode rows         where nothing else is done
                       =  between the first and the sum of both where prompts stand beside streams

The fixed part is what a step costs however small it is: on a GPU some hundred tokens need nearly all experts, so a
chunk of 170 tokens takes half as long as one of 512. A rule that knows seconds per token only takes such a chunk for a
slow machine, cuts prompts smaller, and finds its belief confirmed. So both parts are estimated (`StepCost`), and the
room for a step follows from them (`Budget`):

    `alone`         nobody decodes: `step_seconds`, or so long that the fixed part is a small share of it
    `beside`        streams decode: as long as they take themselves, or a few fixed parts
    `together`      streams that have one token only wait for the prompts that came with them, if that is soon
    `gather`        an idle engine waits for requests that are on their way, a part of what a step for them would cost
    `worth_a_step`  a prompt that begins like one of this step waits for the next, if what it can copy then would take
                    longer than a fixed part

Belongs to the engine thread; reads no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_TOKENS = 16
"""Of prompts in a step that is learned from: shorter ones are other work in the main."""
NOISE, SMALL = 0.1, 64
"""How far a step's seconds lie from what they should be, as a share; twice as far for one of so many tokens, which what
goes on beside it, requests that arrive, disturbs more."""
FIRST_GUESS = 0.25
"""Share of the first step's seconds that is taken for its fixed part until steps of another size tell."""
SAME_CHANGE, OWN_CHANGE = 0.05, 0.01
"""How much the machine's speed changes from step to step (a neighbour comes or goes), and each part of the cost by
itself (prompts become deeper)."""
BELIEVED = 3.0
"""Deviations beyond which a slow step counts as no slower."""

GRAIN = 128
"""Tokens: a multiple of it is what a step without streams takes, and of the prompt that gets the rest of a step."""
MIXED_SECONDS = 0.02
"""Of prefill beside streams in one step, at least."""
MIXED_GRAIN = 32
"""Tokens; fewer rows at once leave a matrix product's tiles half empty."""
MIXED_FIXED = 4
"""Fixed parts that a step with streams may take, so that a prompt beside them needs few of them."""
ALONE_FIXED = 16
"""Fixed parts that a step without streams may take: a sixteenth of it is lost."""
ALONE_SECONDS = 0.4
"""It takes no longer on that account: a new request waits for it."""
GATHER_SHARE, GATHER_SECONDS = 0.5, 0.02
"""Of a step's fixed part that may be waited for others on their way, and at most."""
TOGETHER_SECONDS = 0.3
"""Between the first token of a stream and its second, at most, so that prompts beside it are evaluated without it; or
two steps."""


class StepCost:
    """Seconds of a step as a straight line over its tokens, from steps as they come: `fixed` and `token`, neither below
    0.

    A Kalman filter with two states. Steps of one size tell the sum of both parts only; the estimate then moves along
    what earlier steps of other sizes left open. A machine that gets slower or faster as a whole scales both parts,
    which steps of one size do tell. A slow step is an accident more often than not and has a bounded influence; a fast
    one is proof.
    """

    def __init__(self) -> None:
        self.known = False
        self.fixed = 0.0
        self.token = 0.0
        self._ff = self._ft = self._tt = 0.0
        """Variances of the two parts and their covariance."""

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.token * tokens

    @property
    def fixed_at_least(self) -> float:
        """One deviation below the estimate: 0 as long as all steps had one size."""
        return max(0.0, self.fixed - math.sqrt(self._ff))

    @property
    def token_deviation(self) -> float:
        return math.sqrt(self._tt)

    def tokens_within(self, seconds: float, most: int) -> int:
        """How many tokens a step of so many seconds has, 0 to `most`."""
        return _tokens_within(seconds - self.fixed, self.token, most)

    def observe_between(self, tokens: int, least: float, most: float) -> None:
        """A step of so many tokens took no less than `least` and no more than `most` seconds."""
        if self.known:
            most = min(most, max(least, self.seconds(tokens)))
        self.observe(tokens, most)

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` > 0 tokens took `seconds`."""
        if not self.known:
            self._begin(tokens, seconds)
            return
        self._change()
        spread, gain_f, gain_t = self._spread(tokens, seconds)
        if seconds <= 0.0 or spread <= 0.0:
            # By this clock everything is free, or was so far.
            self._begin(tokens, seconds)
            return
        expected = self.seconds(tokens)
        if seconds < expected / 2 and expected - seconds > BELIEVED * math.sqrt(spread):
            # All that was learned is from worse times.
            self._scale(seconds / expected)
            spread, gain_f, gain_t = self._spread(tokens, seconds)
            expected = seconds
        error = min(seconds - expected, BELIEVED * math.sqrt(spread))
        gain_f, gain_t = gain_f / spread, gain_t / spread
        self.fixed += gain_f * error
        self.token += gain_t * error
        ff, ft, tt = self._ff, self._ft, self._tt
        self._ff -= gain_f * (ff + ft * tokens)
        self._ft -= gain_f * (ft + tt * tokens)
        self._tt -= gain_t * (ft + tt * tokens)
        self._bound()

    def _begin(self, tokens: int, seconds: float) -> None:
        """The first step is believed; how its seconds are to be divided is open."""
        self.known = True
        self.fixed = FIRST_GUESS * seconds
        self.token = (seconds - self.fixed) / tokens
        open_, sure = seconds / 2, _noise(tokens) * seconds
        self._ff = open_**2
        self._ft = -(open_**2) / tokens
        self._tt = (open_**2 + sure**2) / tokens**2

    def _spread(self, tokens: int, seconds: float) -> tuple[float, float, float]:
        """Variance of what such a step is expected to take, and how it goes with either part."""
        with_f, with_t = self._ff + self._ft * tokens, self._ft + self._tt * tokens
        chance = _noise(tokens) * min(seconds, self.seconds(tokens))
        return with_f + with_t * tokens + chance**2, with_f, with_t

    def _scale(self, factor: float) -> None:
        self.fixed *= factor
        self.token *= factor
        self._ff *= factor**2
        self._ft *= factor**2
        self._tt *= factor**2

    def _change(self) -> None:
        """Between two steps."""
        self._ff += (SAME_CHANGE**2 + OWN_CHANGE**2) * self.fixed**2
        self._ft += SAME_CHANGE**2 * self.fixed * self.token
        self._tt += (SAME_CHANGE**2 + OWN_CHANGE**2) * self.token**2

    def _bound(self) -> None:
        """Nothing costs less than nothing: the other part is what it is most likely to be then. Variances stay ones
        whatever rounding did to them."""
        self._ff, self._tt = max(self._ff, 0.0), max(self._tt, 0.0)
        most = math.sqrt(self._ff * self._tt)
        self._ft = max(-most, min(self._ft, most))
        if self.fixed < 0.0:
            if self._ff:
                self.token -= self._ft / self._ff * self.fixed
            self.fixed = 0.0
        if self.token < 0.0:
            if self._tt:
                self.fixed = max(0.0, self.fixed - self._ft / self._tt * self.token)
            self.token = 0.0


def _noise(tokens: int) -> float:
    return NOISE * (1 + SMALL / tokens)


def _tokens_within(seconds: float, each: float, most: int) -> int:
    if seconds <= 0.0:
        return 0
    return most if each * most <= seconds else int(seconds / each)


@dataclass(frozen=True, slots=True)
class Limits:
    """In tokens per step: `alone` and `beside` are the most that either may be. `step_seconds`: see `Budget.alone`."""

    alone: int
    beside: int
    step_seconds: float


class Budget:
    """Fed with every step, asked before the next."""

    def __init__(self, limits: Limits, first: int) -> None:
        """`first`: tokens of a step of which nothing is known yet."""
        self.cost = StepCost()
        self.streams = StepCost()
        """Its tokens are decode rows."""
        self._late: dict[int, float] = {}
        """Seconds of late steps that only decode, by their rows; not learned from yet, which is too much for each."""
        self._largest = 0
        """Prompt tokens of a step so far."""
        self._limits = limits
        self._first = min(first, limits.alone)

    def observe(self, prefill_tokens: int, decode_rows: int, seconds: float) -> None:
        """A step is done."""
        if not prefill_tokens:
            known = self._late.get(decode_rows, seconds)
            self._late[decode_rows] = (3 * known + seconds) / 4
        elif prefill_tokens >= LEAST_TOKENS and decode_rows:
            self._observe_mixed(prefill_tokens, decode_rows, seconds)
        elif prefill_tokens >= LEAST_TOKENS:
            self._largest = max(self._largest, prefill_tokens)
            self.cost.observe(prefill_tokens, seconds)

    def _observe_mixed(self, prefill_tokens: int, decode_rows: int, seconds: float) -> None:
        """What the streams would have taken by themselves may or may not be part of the seconds."""
        streams = self._decode_seconds(decode_rows)
        if self.streams.known:
            self.cost.observe_between(prefill_tokens, seconds - streams, seconds)
        else:
            self.cost.observe(prefill_tokens + decode_rows, seconds)

    def alone(self) -> int:
        """Prompt tokens of a step in which nothing decodes. Once, a step twice as large as any before may turn out
        longer than those that follow: only a larger one tells."""
        limits, cost = self._limits, self.cost
        if not cost.known:
            return self._first
        seconds, spread = self._alone_seconds(), cost.token_deviation
        fits = cost.tokens_within(seconds, limits.alone)
        hoped = _tokens_within(seconds - cost.fixed, cost.token - spread, limits.alone)
        feared = _tokens_within(ALONE_SECONDS - cost.fixed_at_least, cost.token + spread, limits.alone)
        if min(hoped, feared) >= 2 * self._largest:
            fits = max(fits, min(hoped, feared))
        if fits >= limits.alone:
            return limits.alone
        grain = min(GRAIN, limits.beside)
        return max(fits // grain * grain, min(grain, limits.alone))

    def beside(self, decode_rows: int) -> int:
        """Prompt tokens of a step in which so many streams decode. The prompts may hold them up by as long as they take
        themselves, or a little on a machine that is fast at both: where prefill is slow, more is a pause that people
        see. Where a step has a large fixed part, many small pauses are the longer wait."""
        most = self._limits.beside
        if not self.cost.known:
            return most
        seconds = max(MIXED_SECONDS, self._decode_seconds(decode_rows), MIXED_FIXED * self.cost.fixed_at_least)
        fits = self.cost.tokens_within(seconds, most)
        return min(most, max(fits // MIXED_GRAIN, 1) * MIXED_GRAIN)

    def together(self, tokens: int, waited: float) -> bool:
        """May streams that have waited `waited` seconds for their second token wait for prompts of so many tokens?
        Where little is known the best is hoped for: the question comes again with the next step."""
        cost = self.cost
        if not cost.seconds(tokens):
            return False  # nothing is known, or nothing takes any time
        step = self.alone()
        each = max(0.0, cost.token - cost.token_deviation)
        patience = max(TOGETHER_SECONDS, 2 * self._alone_seconds())
        total = math.ceil(tokens / step) * cost.fixed + tokens * each
        return waited + cost.fixed + min(tokens, step) * each <= patience and total <= 2 * patience

    def gather(self) -> float:
        """Seconds that a step may wait for prompts that are on their way: each that comes in time saves a fixed part.
        0 while no more is known than that steps of one size take some time."""
        return min(GATHER_SECONDS, GATHER_SHARE * self.cost.fixed_at_least)

    def worth_a_step(self, tokens: int) -> bool:
        """Does it take longer to evaluate so many prompt tokens than to make one more step?"""
        return not self.cost.known or tokens * self.cost.token >= self.cost.fixed

    def _decode_seconds(self, rows: int) -> float:
        for known, seconds in self._late.items():
            self.streams.observe(known, seconds)
        self._late.clear()
        return self.streams.seconds(rows)

    def _alone_seconds(self) -> float:
        return max(self._limits.step_seconds, min(ALONE_FIXED * self.cost.fixed_at_least, ALONE_SECONDS))
