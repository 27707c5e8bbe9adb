"""When to guess: what is learned from timed cycles, and one sequence decoded with it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ds4.engine.drafting import Decoder, DraftPolicy
from ds4.engine.types import SamplingParams
from ds4.testing import ScriptedEngine, hash_model
from ds4.testing.driver import Clock


def cycles(policy: DraftPolicy, count: int, plain: float, drafted: float, accepted: float, seed: int = 0) -> list[bool]:
    """Runs cycles of such costs; `accepted` guesses are right on average. Whether each guessed."""
    rng, kinds = random.Random(seed), []
    for _ in range(count):
        most = policy.wanted()
        right = min(most, int(accepted) + (rng.random() < accepted % 1))
        policy.observe(most, right, drafted if most else plain)
        kinds.append(most > 0)
    return kinds


def test_it_learns_first() -> None:
    policy = DraftPolicy(3)
    assert policy.pays is None
    kinds = cycles(policy, 10, 1.0, 1.5, 2.0)
    assert kinds[:8] == [True] * 8 and not kinds[8]
    assert policy.pays is True


@pytest.mark.parametrize(
    ("accepted", "cost", "pays"), [(0.0, 1.2, False), (0.9, 1.5, True), (0.3, 1.5, False), (2.0, 2.5, True)]
)
def test_it_guesses_where_a_token_gets_cheaper(accepted: float, cost: float, pays: bool) -> None:
    policy = DraftPolicy(3)
    kinds = cycles(policy, 2000, 1.0, cost, accepted)
    assert policy.pays is pays
    share = sum(kinds[256:]) / len(kinds[256:])
    print("share of cycles that guess", share)
    # A few cycles of the other kind remain, to notice a change.
    assert 0.9 < share < 1.0 if pays else 0.0 < share < 0.1


def test_it_notices_a_change() -> None:
    policy = DraftPolicy(2)
    cycles(policy, 500, 1.0, 1.3, 1.5)
    assert policy.pays is True
    kinds = cycles(policy, 2000, 1.0, 1.3, 0.0)
    assert policy.pays is False and sum(kinds[-320:]) <= 20
    kinds = cycles(policy, 4000, 1.0, 1.3, 1.5)
    assert policy.pays is True and sum(kinds[-256:]) >= 250


def test_nothing_to_guess_with() -> None:
    policy = DraftPolicy(0)
    assert cycles(policy, 100, 1.0, 1.0, 0.0) == [False] * 100


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_a_sequence_is_the_same_with_guesses(right: float) -> None:
    model, rng = hash_model(5, end=256), random.Random(1)
    plain, room = [ord("a")], 60

    def guess(tokens: list[int]) -> list[int]:
        out: list[int] = []
        for _ in range(4):
            token = model(np.array([*tokens, *out], np.int32))
            out.append(token if rng.random() < right else (token + 1) % 256)
        return out

    for _ in range(room):
        plain.append(model(np.array(plain, np.int32)))
    clock = Clock()
    engine = ScriptedEngine(model=model, guess=guess, step_seconds=1.0, draft_seconds=0.1, sleep=clock.sleep)
    session = engine.new_session()
    decoder = Decoder(engine, session, engine.new_sampler(SamplingParams()), clock=clock)
    made = [ord("a")]
    for i in range(room):
        token = decoder.after(made[-1], room - i - 1).token
        assert token is not None
        assert session.tokens.tolist() == made
        made.append(token)
    assert made == plain
    print("drafted", decoder.drafted, "accepted", decoder.accepted, "steps", engine.n_steps)
    assert decoder.accepted + engine.n_steps == room
    assert (decoder.accepted == decoder.drafted > 0) if right == 1.0 else decoder.drafted > decoder.accepted
