"""Drafting and verifying: the draft layers against a slow oracle, and plain decode bit for bit whatever is guessed."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ds4.engine.engine import Engine
from ds4.engine.session import Session
from ds4.engine.types import EngineConfig, Row, RowResult, SamplerLike, SamplingParams
from tests.support.draft_oracle import DSparkOracle, MtpOracle
from tests.support.tiny_deepseek4 import DSPARK, dspark_weights, tiny

VARIANTS = ["flash", "pro"]
BACKENDS = ["cpu", "reference"]
# A float32 engine beside sums in float64; the model's own logits move by 2e-5 with the order of its sums.
TOLERANCE = 5e-4
Tokens = npt.NDArray[np.int32]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("drafts")
    made = {}
    for variant in VARIANTS:
        model = tiny(variant)
        made[variant, "mtp"] = model.write_hf(root / f"{variant}-mtp", {**model.weights, **model.head})
        spark = dspark_weights(model.config)
        made[variant, "dspark"] = model.write_hf(root / f"{variant}-spark", {**model.weights, **spark}, **DSPARK)
    return made


class Engines:
    """Opens each kind once. `kind`: "mtp", "dspark", or "none" for the model without its draft layers."""

    def __init__(self, directories: dict[tuple[str, str], Path]) -> None:
        @cache
        def open_once(variant: str, backend: str, kind: str, qat: bool = True) -> Engine:
            return Engine.open(
                EngineConfig(
                    model=directories[variant, "mtp" if kind == "none" else kind],
                    backend=backend,
                    ctx=320,
                    threads=2,
                    prefill_chunk=64,
                    kv_qat=qat,
                    mtp=kind == "mtp",
                    mtp_draft=5,
                    mtp_margin=0.0,
                    dspark=kind == "dspark",
                    dspark_confidence=0.0,
                )
            )

        self.open = open_once


@pytest.fixture(scope="module")
def engines(directories: dict[tuple[str, str], Path]) -> Iterator[Engines]:
    made = Engines(directories)
    yield made
    made.open.cache_clear()


def guesses(engine: Engine, session: Session, token: int, most: int) -> tuple[list[int], npt.NDArray[np.float32]]:
    return engine._model.native.draft_logits(session.native, token, most)


# ---- the drafters


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_head_gives_the_reference_logits(engines: Engines, variant: str, backend: str) -> None:
    """Of every seventh pair; the window is filled a token at a time, in chunks and by drafts that were rejected."""
    engine = engines.open(variant, backend, "mtp", False)
    tokens, want = tiny(variant).prompt(), tiny(variant).reference("mtp_logits")
    session, sampler = engine.new_session(), engine.new_sampler(SamplingParams(temperature=0.0))
    worst, wrong = 0.0, int(tokens[0])
    last = len(want) if backend == "cpu" else 8
    for row in range(last):
        at = 7 * row  # the pair (streams of `at`, the token after it)
        if row % 3 == 0:
            for token in tokens[session.n_tokens : at + 1]:
                engine.step([Row(session, [int(token)], sampler, drafts=[wrong] * 3)])
        else:
            engine.step([Row(session, tokens[session.n_tokens : at + 1])])
        found, logits = guesses(engine, session, int(tokens[at + 1]), 1)
        worst = max(worst, float(np.abs(logits[0] - want[row]).max()))
        assert found == [int(want[row].argmax())]
    print(variant, backend, "head", worst)
    assert worst < TOLERANCE


@pytest.mark.parametrize(("backend", "qat"), [("cpu", False), ("cpu", True), ("reference", True)])
def test_deep_drafts_equal_the_oracle(engines: Engines, backend: str, qat: bool) -> None:
    model, length = tiny("flash"), 24
    tokens = model.prompt()[: length + 1].tolist()
    engine = engines.open("flash", backend, "mtp", qat)
    shape = (-1, model.config["hc_mult"], model.config["hidden_size"])
    streams = engine._model.native.hidden_states(tokens[:length])[-1].reshape(shape).astype(np.float64)
    oracle = MtpOracle(model.config, {**model.weights, **model.head}, rounding=qat)
    want = oracle.drafts(streams, tokens[:length], tokens[length], 4)
    session = engine.new_session()
    session.sync(tokens[:length])
    found, logits = guesses(engine, session, tokens[length], 4)
    assert found == [int(x.argmax()) for x in want]
    worst = np.abs(logits - np.stack(want)).max(1)
    print(backend, qat, worst)
    # A rounded key that falls on the other side moves more than sums do, on both sides of the comparison.
    assert (worst < (0.05 if qat else TOLERANCE)).all()


@pytest.mark.parametrize(("variant", "backend", "qat"), [
    ("flash", "cpu", False), ("flash", "cpu", True), ("pro", "cpu", False), ("flash", "reference", False),
])  # fmt: skip
def test_dspark_blocks_equal_the_oracle(engines: Engines, variant: str, backend: str, qat: bool) -> None:
    """Before and behind the point where the window is full."""
    model = tiny(variant)
    engine = engines.open(variant, backend, "dspark", qat)
    config = {**model.config, **DSPARK}
    oracle = DSparkOracle(config, {**model.weights, **dspark_weights(model.config)}, rounding=qat)
    for length in (5, 24):
        tokens = model.prompt()[: length + 1].tolist()
        shape = (length, config["hc_mult"], config["hidden_size"])
        behind = engine._model.native.hidden_states(tokens[:length])
        targets = config["dspark_target_layer_ids"]
        heard = np.stack([behind[t + 1].reshape(shape) for t in targets], 1).astype(np.float64)
        want, sure = oracle.drafts(heard, tokens[length])
        session = engine.new_session()
        session.sync(tokens[:length])
        found, logits = guesses(engine, session, tokens[length], 16)
        assert found == [int(x.argmax()) for x in want]
        worst = np.abs(logits - np.stack(want)).max(1)
        print(variant, backend, qat, length, worst, "sure", sure)
        assert (worst < (0.05 if qat else TOLERANCE)).all()
        assert guesses(engine, session, tokens[length], 2)[0] == found[:2]


# ---- plain decode, and the same with drafts


def prompt_of(engine: Engine, length: int) -> list[int]:
    return tiny(Path(engine.info.path).name.split("-")[0]).prompt()[:length].tolist()


def saved(session: Session) -> bytes:
    file = io.BytesIO()
    session.save(file)
    return file.getvalue()


class Plain:
    """Plain decode of `count` tokens: the results and the payload behind each."""

    def __init__(self, engine: Engine, session: Session, sampler: SamplerLike, first: int, count: int) -> None:
        self.results: list[RowResult] = []
        self.payloads: dict[int, bytes] = {}
        token = first
        for _ in range(count):
            [result] = engine.step([Row(session, [token], sampler)])
            self.results.append(result)
            self.payloads[session.n_tokens] = saved(session)
            assert result.token is not None
            token = result.token

    @property
    def tokens(self) -> list[int]:
        return [r.token for r in self.results if r.token is not None]


def speculate(
    engine: Engine,
    session: Session,
    sampler: SamplerLike,
    first: int,
    plain: Plain,
    drafts: Sequence[Sequence[int] | int],
) -> list[int]:
    """Decodes as `plain` did, with the drafts given for each step; returns how many each step took."""
    taken, at, token = [], 0, first
    for tried in drafts:
        [result] = engine.step([Row(session, [token], sampler, drafts=tried)])
        ahead, accepted = result.ahead, -1
        while result is not None:
            accepted += 1
            assert (result.token, result.logprobs) == (plain.results[at].token, plain.results[at].logprobs)
            assert saved(session) == plain.payloads[session.n_tokens]
            assert result.token is not None
            token, at = result.token, at + 1
            if ahead is None or at == len(plain.results):
                break
            result = ahead.after(token)
        taken.append(max(0, accepted))
        if at == len(plain.results):
            break
    return taken


def guessed(rng: random.Random, truth: Sequence[int], vocab: int) -> list[int]:
    """The true continuation, wrong from a random place on, or nowhere."""
    out = list(truth)
    if out and rng.random() < 0.7:
        place = rng.randrange(len(out))
        out[place] = (out[place] + 1 + rng.randrange(vocab - 1)) % vocab
    return out


SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.3, top_p=0.9, seed=7, repetition_penalty=1.2, presence_penalty=0.3),
    "logprobs": SamplingParams(temperature=0.8, seed=8, min_p=0.0, logprobs=3),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(("variant", "kind"), [("flash", "mtp"), ("pro", "mtp"), ("flash", "dspark")])
def test_any_drafts_leave_plain_decode(engines: Engines, variant: str, kind: str, sampling: str, seed: int) -> None:
    """Guesses that are right to a random depth: the same tokens and log-probabilities, and after every token the same
    payload, across closing windows of 4 and 128 tokens and the turn of every ring."""
    rng = random.Random(f"{variant} {kind} {sampling} {seed}")
    engine = engines.open(variant, "cpu", kind)
    prompt = prompt_of(engine, rng.choice([3, 117, 140, 250]))
    first, count, params = prompt.pop(), 24, SAMPLING[sampling]
    a, b = engine.new_session(), engine.new_session()
    a.sync(prompt)
    b.sync(prompt)
    plain = Plain(engine, a, engine.new_sampler(params), first, count)
    sampler, drafts, done = engine.new_sampler(params), [], 0
    vocab = engine.info.vocab_size
    expected = []
    while done < count:
        # What follows the token of this step: results[done], results[done + 1], ...
        tried = guessed(rng, plain.tokens[done : done + rng.randint(0, 5)], vocab)
        right = next((i for i, t in enumerate(tried) if t != plain.tokens[done + i]), len(tried))
        right = min(right, count - done - 1)
        drafts.append(tried)
        expected.append(right)
        done += 1 + right
    taken = speculate(engine, b, sampler, first, plain, drafts)
    print("accepted", taken)
    assert taken == expected
    assert saved(b) == saved(a)


def test_every_number_of_accepted_drafts_occurs(engines: Engines) -> None:
    engine = engines.open("flash", "cpu", "mtp")
    prompt = prompt_of(engine, 130)
    first, params = prompt.pop(), SAMPLING["greedy"]
    a, b = engine.new_session(), engine.new_session()
    a.sync(prompt)
    b.sync(prompt)
    plain = Plain(engine, a, engine.new_sampler(params), first, 1 + 2 + 3 + 4 + 5 + 6)
    drafts, done = [], 0
    for right in range(6):
        tried = plain.tokens[done : done + 5]
        if right < 5:
            tried = [*tried[:right], (tried[right] + 1) % 320, *tried[right + 1 :]]
        drafts.append(tried)
        done += 1 + right
    assert speculate(engine, b, engine.new_sampler(params), first, plain, drafts) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_own_drafts_leave_plain_decode(engines: Engines, backend: str, kind: str) -> None:
    """The model's own drafter; random weights rarely guess right."""
    engine = engines.open("pro", backend, kind)
    prompt = prompt_of(engine, 125 if backend == "cpu" else 9)
    first, params = prompt.pop(), SAMPLING["greedy"]
    a, b = engine.new_session(), engine.new_session()
    a.sync(prompt)
    b.sync(prompt)
    plain = Plain(engine, a, engine.new_sampler(params), first, 20 if backend == "cpu" else 5)
    taken = speculate(engine, b, engine.new_sampler(params), first, plain, [engine.most_drafts] * 20)
    print("accepted", taken)
    assert engine.most_drafts == 5
