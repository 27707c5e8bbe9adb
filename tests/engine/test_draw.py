"""Draws by a backend (native/draw.h) against the sampler: the same tokens, whatever the logits and parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4._cpu import draw_planned
from ds4.convert.synth import DEFAULT_TYPES, synthesise
from ds4.engine.engine import Engine
from ds4.engine.sampler import new_sampler
from ds4.engine.types import EngineConfig, Row, SamplingParams

SEED = 20261130


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.2, 0.7, 1.0, 1.0, 1.5, 5.0, 1e-30])),
        top_k=int(rng.choice([0, 0, 0, 1, 5, 40, 700, 10**9])),
        top_p=float(rng.choice([1.0, 1.0, 0.0, 0.5, 0.9, 0.99, 1 - 2**-40])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 0.3, 1.0, 1e-12])),
        seed=int(rng.integers(0, 2**63)),
        logit_bias={int(i): float(rng.normal() * 4) for i in rng.integers(0, vocab, int(rng.choice([0, 3])))},
    )


def random_logits(rng: np.random.Generator, vocab: int) -> npt.NDArray[np.float32]:
    logits = (rng.normal(size=vocab) * rng.choice([0.0, 0.1, 0.5, 3.0, 10.0])).astype(np.float32)
    if rng.random() < 0.3:
        logits = np.round(logits)  # ties, both zeros
    for value, share in ((np.nan, 0.2), (-np.inf, 0.3), (np.inf, 0.03)):
        if rng.random() < 0.2:
            logits[rng.random(vocab) < share] = value
    return logits


@pytest.mark.parametrize("capacity", [1, 5, 1024])
def test_draws_equal_the_sampler(capacity: int) -> None:
    print("seed", SEED + capacity)
    rng = np.random.default_rng(SEED + capacity)
    draws = 0
    for case in range(400 if capacity == 1024 else 120):
        vocab = int(rng.choice([1, 2, 17, 63, 64, 65, 128, 300, 1000, 5000]))
        p = random_params(rng, vocab)
        plain, planned = new_sampler(p, vocab), new_sampler(p, vocab)
        for step in range(8):
            banned = [int(i) for i in rng.integers(0, vocab, int(rng.choice([0, 2])))]
            mask = None if rng.random() < 0.6 else rng.integers(0, 2**32, max(1, vocab // 32 - 1), dtype=np.uint32)
            greedy = bool(rng.random() < 0.1)
            for sampler in (plain, planned):
                sampler.forbid(banned)
                sampler.set_mask(mask)
                sampler.force_greedy(greedy)
            logits = random_logits(rng, vocab)
            expected, _ = plain.sample(logits)
            assert draw_planned(planned, logits, capacity) == expected, (case, step, vocab, p)
            draws += 1
    print(draws, "draws")


@pytest.mark.parametrize(
    "values",
    [{}, {"top_p": 0.95}, {"top_p": 0.95, "min_p": 0.01}, {"top_k": 3000, "top_p": 0.5}, {"min_p": 0.05}],
)
def test_vocabularies_of_real_size(values: dict[str, Any]) -> None:
    rng = np.random.default_rng(SEED)
    p = SamplingParams(**{"min_p": 0.0, "seed": 11, **values})
    for vocab in (129_280, 2**19):
        plain, planned = new_sampler(p, vocab), new_sampler(p, vocab)
        for spread in (0.0, 1.0, 4.0):
            logits = (rng.normal(size=vocab) * spread).astype(np.float32)
            assert draw_planned(planned, logits) == plain.sample(logits)[0], (vocab, spread)


def test_the_sampler_keeps_what_a_plan_cannot_say() -> None:
    logits = np.zeros(10, np.float32)
    for values in ({"logprobs": 0}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}):
        sampler = new_sampler(SamplingParams(seed=1, **values), 10)
        assert draw_planned(sampler, logits) is None
        assert sampler.sample(logits)[0] == new_sampler(SamplingParams(seed=1), 10).sample(logits)[0]
    with pytest.raises(ValueError, match="vocabulary"):
        draw_planned(new_sampler(SamplingParams(), 10), np.zeros(9, np.float32))


def test_a_step_draws_where_the_logits_are(tmp_path: Path) -> None:
    """The reference backend draws by plan; the same steps with the sampler on the logits give the same tokens."""
    model = tmp_path / "tiny.gguf"
    synthesise(model, "llama", "tiny", 3, DEFAULT_TYPES["tiny"])
    engine = Engine.open(EngineConfig(model=model, backend="reference", ctx=64, slots=4))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "presence_penalty": 0.7},  # the sampler's own
        {"temperature": 1.1, "logprobs": 2},
    ]
    params = [SamplingParams(seed=7 + i, **k) for i, k in enumerate(kinds)]
    drawn = [(engine.new_session(), engine.new_sampler(p)) for p in params]
    looked_at = [(engine.new_session(), engine.new_sampler(p)) for p in params]
    prompt = [5, 6, 7, 8]
    tokens = {"drawn": [prompt] * len(params), "looked at": [prompt] * len(params)}
    for step in range(12):
        found = engine.step([Row(s, t, sampler) for (s, sampler), t in zip(drawn, tokens["drawn"], strict=True)])
        # With logits asked for, the sampler has them.
        asked = engine.step(
            [
                Row(s, t, sampler, want_logits=True)
                for (s, sampler), t in zip(looked_at, tokens["looked at"], strict=True)
            ]
        )
        assert [r.token for r in found] == [r.token for r in asked], step
        assert [r.logprobs for r in found] == [r.logprobs for r in asked]
        assert all(s.has_logits for s, _ in looked_at) and not any(s.has_logits for s, _ in drawn)
        assert all(r.token is not None and not math.isnan(r.token) for r in found)
        tokens = {name: [[int(r.token or 0)] for r in found] for name in tokens}
