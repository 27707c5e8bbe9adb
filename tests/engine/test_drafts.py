"""Drafting and verifying: the draft layers against a slow oracle, and plain decode bit for bit whatever is guessed."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4 import _cpu
from ds4.engine.drafting import Decoder
from ds4.engine.engine import Engine, build_model, find_drafts
from ds4.engine.model_file import open_model_file
from ds4.engine.sampler import new_sampler
from ds4.engine.session import Session
from ds4.engine.types import EngineConfig, Row, RowResult, SamplerLike, SamplingParams
from ds4.errors import ConfigError, ContextLengthError, EngineError, ModelFileError, UnsupportedModelError
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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_long_histories_of_guesses(engines: Engines) -> None:
    """Many random histories: prompts, depths, drafters, samplings, cuts and stored sessions between guesses."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng, steps, taken = random.Random(seed), 0, [0] * 6
    for history in range(150):
        engine = engines.open(rng.choice(VARIANTS), "cpu", rng.choice(["mtp", "dspark"]))
        prompt = prompt_of(engine, rng.randint(2, 270))
        token = prompt.pop()
        params = replace(SAMPLING[rng.choice(list(SAMPLING))], seed=rng.randrange(1 << 31))
        a, b = engine.new_session(), engine.new_session()
        a.sync(prompt)
        b.sync(prompt)
        for _ in range(rng.randint(1, 3)):
            count = rng.randint(1, 14)
            plain = Plain(engine, a, engine.new_sampler(params), token, count)
            drafts: list[Sequence[int] | int] = []
            done = 0
            while done < count:
                tried = guessed(rng, plain.tokens[done : done + rng.randint(0, 5)], 320)
                right = next((i for i, t in enumerate(tried) if t != plain.tokens[done + i]), len(tried))
                drafts.append(tried if rng.random() < 0.9 else rng.randint(1, 5))
                done += 1 + (min(right, count - done - 1) if isinstance(drafts[-1], list) else 0)
            found = speculate(engine, b, engine.new_sampler(params), token, plain, [*drafts, *[0] * count])
            steps += len(found)
            for k in found:
                taken[k] += 1
            token = plain.tokens[-1]
            if rng.random() < 0.4:
                cut = rng.randint(max(1, a.n_tokens - 100), a.n_tokens)
                assert a.can_rewind(cut) is b.can_rewind(cut)
                if a.can_rewind(cut):
                    a.rewind(cut)
                    b.rewind(cut)
            if rng.random() < 0.3:
                file = io.BytesIO(saved(b))
                b = engine.new_session()
                b.load(file)
            assert saved(a) == saved(b), history
    print("steps", steps, "accepted 0 to 5 guesses:", taken)
    assert all(taken)


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


def test_a_model_without_a_drafter_is_the_same(engines: Engines) -> None:
    """What drafts are made from has no part in the tokens; saved sessions go from one engine to the other and back."""
    plain, drafting = engines.open("flash", "cpu", "none"), engines.open("flash", "cpu", "mtp")
    assert plain.fingerprint == drafting.fingerprint
    assert (plain.most_drafts, drafting.most_drafts) == (0, 5)
    prompt = prompt_of(plain, 140)
    first, params = prompt.pop(), SAMPLING["sampled"]
    a, b = plain.new_session(), drafting.new_session()
    a.sync(prompt)
    b.sync(prompt)
    one = Plain(plain, a, plain.new_sampler(params), first, 12)
    two = Plain(drafting, b, drafting.new_sampler(params), first, 12)
    assert one.results == two.results
    # From the engine that drafts to the one that does not: the same bytes as if it had computed them.
    c = plain.new_session()
    c.load(io.BytesIO(saved(b)))
    assert saved(c) == saved(a)
    # And back: poor guesses at first, the same tokens.
    d = drafting.new_session()
    d.load(io.BytesIO(saved(a)))
    e = drafting.new_session()
    e.load(io.BytesIO(saved(b)))
    assert saved(e) == saved(b) and saved(d) != saved(b)
    token = one.tokens[-1]
    assert guesses(drafting, e, token, 1)[1].tobytes() == guesses(drafting, b, token, 1)[1].tobytes()
    for session in (d, e):
        sampler = drafting.new_sampler(SAMPLING["greedy"])
        drafting.step([Row(session, [token], sampler, drafts=5)])
        plain_sampler = plain.new_sampler(SAMPLING["greedy"])
        copy = plain.new_session()
        copy.fork_from(a)
        [want] = plain.step([Row(copy, [token], plain_sampler)])
        assert session.n_tokens == copy.n_tokens and want.token is not None
    with pytest.raises(ValueError, match="drafts, a session of this model has room for 0"):
        plain.step([Row(a, [token], plain.new_sampler(params), drafts=[1])])


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_cut_forked_and_restored_sessions_guess_on(engines: Engines, kind: str) -> None:
    """Two histories of the same operations, one with guesses and one without: the same payloads all along, also when
    a session is cut, forked or stored while it holds accepted guesses and others that were evaluated in vain."""
    rng = random.Random(11)
    engine = engines.open("flash", "cpu", kind)
    params = SAMPLING["greedy"]
    prompt = prompt_of(engine, 250)
    a, b = engine.new_session(), engine.new_session()
    a.sync(prompt[:200])
    b.sync(prompt[:200])
    token = prompt[200]
    for turn in range(8):
        plain = Plain(engine, a, engine.new_sampler(params), token, 7)
        drafts = [guessed(rng, plain.tokens[:5], 320), *[[rng.randrange(320)] * rng.randint(1, 5) for _ in range(7)]]
        speculate(engine, b, engine.new_sampler(params), token, plain, drafts)
        # Evaluated ahead and never asked for.
        sampler = engine.new_sampler(params)
        engine.step([Row(a, [plain.tokens[-1]])])
        engine.step([Row(b, [plain.tokens[-1]], sampler, drafts=[7, 8, 9, 10, 11])])
        assert saved(a) == saved(b)
        token = plain.tokens[0]
        if turn % 4 == 0:
            cut = a.n_tokens - rng.randint(1, 60)
            a.rewind(cut)
            b.rewind(cut)
        elif turn % 4 == 1:
            cut = a.n_tokens - rng.choice([0, 0, 5])
            x, y = engine.new_session(), engine.new_session()
            x.fork_from(a, cut)
            y.fork_from(b, cut)
            a, b = x, y
        elif turn % 4 == 2:
            x, y = engine.new_session(), engine.new_session()
            x.load(io.BytesIO(saved(a)))
            y.load(io.BytesIO(saved(b)))
            a, b = x, y
        else:
            other = prompt[: rng.randint(1, 250)]
            assert a.sync(other) == b.sync(other)
        print(turn, a.n_tokens)
        assert saved(a) == saved(b)
        assert guesses(engine, a, token, 5)[1].tobytes() == guesses(engine, b, token, 5)[1].tobytes()
        assert saved(a) == saved(b)


@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_a_restored_session_that_was_cut_is_the_live_one(engines: Engines, kind: str) -> None:
    """Before it has reached its former length again: what it drafts from has been made since the cut, and is stored."""
    engine = engines.open("pro", "cpu", kind)
    tokens = prompt_of(engine, 120)
    a = engine.new_session()
    a.sync(tokens[:92])
    a.rewind(76)
    engine.step([Row(a, tokens[76:82])])
    b = engine.new_session()
    b.load(io.BytesIO(saved(a)))
    for at in range(82, 86):
        assert saved(a) == saved(b)
        one, two = (guesses(engine, s, tokens[at], 5)[1].tobytes() for s in (a, b))
        assert one == two
        for session in (a, b):
            engine.step([Row(session, [tokens[at]])])


def test_drafts_are_forgotten_by_everything_else(engines: Engines) -> None:
    """What was evaluated ahead is taken in right behind its step, or never."""
    engine = engines.open("flash", "cpu", "mtp")
    prompt = prompt_of(engine, 40)
    first, params = prompt.pop(), SAMPLING["greedy"]
    a = engine.new_session()
    a.sync(prompt)
    plain = Plain(engine, a, engine.new_sampler(params), first, 4)
    for spoil in ("rewind", "step", "clear", "load", "draft", "other token"):
        session, sampler = engine.new_session(), engine.new_sampler(params)
        session.sync(prompt)
        [result] = engine.step([Row(session, [first], sampler, drafts=plain.tokens[:3])])
        assert session.native.n_ahead == 3 and result.ahead is not None and result.ahead.drafted == 3
        token = plain.tokens[0]
        if spoil == "rewind":
            session.rewind(session.n_tokens - 1)
        elif spoil == "step":
            engine.step([Row(session, [3])])
        elif spoil == "clear":
            session.clear()
        elif spoil == "load":
            session.load(io.BytesIO(plain.payloads[a.n_tokens]))
        elif spoil == "draft":
            guesses(engine, session, token, 2)
        else:
            assert result.ahead.after((token + 1) % 320) is None
        before = session.n_tokens
        assert session.native.n_ahead == 0
        assert result.ahead.after(token) is None and session.n_tokens == before


def test_a_mask_is_asked_before_each_draw(engines: Engines) -> None:
    """Guesses that a mask forbids are not drawn, as in plain decode; the mask may change with every token."""
    engine = engines.open("flash", "cpu", "mtp")
    prompt = prompt_of(engine, 60)
    first, params = prompt.pop(), SAMPLING["greedy"]

    def mask(step: int) -> npt.NDArray[np.uint32]:
        words = np.full(10, 0xFFFFFFFF, np.uint32)
        words[step % 10] = 0
        return words

    a, b = engine.new_session(), engine.new_session()
    a.sync(prompt)
    b.sync(prompt)
    sampler, want, token = engine.new_sampler(params), [], first
    for step in range(12):
        sampler.set_mask(mask(step))
        [result] = engine.step([Row(a, [token], sampler)])
        assert result.token is not None
        token = result.token
        want.append(token)
    sampler, found, token, result, steps = engine.new_sampler(params), [], first, None, 0
    ahead = None
    while len(found) < 12:
        sampler.set_mask(mask(len(found)))
        result = ahead.after(token) if ahead is not None else None
        if result is None:
            left = want[len(found) :][:4]
            [result] = engine.step([Row(b, [token], sampler, drafts=left[:3] if steps % 2 else [*left[:2], 5])])
            ahead, steps = result.ahead, steps + 1
        assert result.token is not None
        token = result.token
        found.append(token)
    print("steps", steps)
    assert found == want and steps < 10
    assert saved(a)[:100] == saved(b)[:100] and a.tokens.tolist() == b.tokens.tolist()


def test_several_sessions_guess_in_one_step(engines: Engines) -> None:
    """Beside a prefill and a plain row, each with drafts of its own."""
    engine = engines.open("pro", "cpu", "mtp")
    tokens = prompt_of(engine, 300)
    params = SAMPLING["greedy"]
    starts = [20, 131, 60]
    plains = []
    for start in starts:
        session = engine.new_session()
        session.sync(tokens[:start])
        plains.append(Plain(engine, session, engine.new_sampler(params), tokens[start], 6))
    sessions = [engine.new_session() for _ in starts]
    for session, start in zip(sessions, starts, strict=True):
        session.sync(tokens[:start])
    late = engine.new_session()
    samplers = [engine.new_sampler(params) for _ in starts]
    drafts: list[int | list[int]] = [plains[0].tokens[:4], 3, []]
    rows = [
        Row(s, [tokens[start]], sampler, drafts=d)
        for s, start, sampler, d in zip(sessions, starts, samplers, drafts, strict=True)
    ]
    rows.insert(1, Row(late, tokens[:50], None, want_logits=True))
    results = engine.step(rows)
    del results[1]
    for result, plain, session in zip(results, plains, sessions, strict=True):
        assert result.token == plain.tokens[0]
        assert saved(session) == plain.payloads[session.n_tokens]
    accepted = 0
    ahead = results[0].ahead
    assert ahead is not None and results[1].ahead is not None and results[2].ahead is None
    token = plains[0].tokens[0]
    while (result := ahead.after(token)) is not None:
        accepted += 1
        assert result.token == plains[0].tokens[accepted]
        assert saved(sessions[0]) == plains[0].payloads[sessions[0].n_tokens]
        token = result.token
    assert accepted == 4
    alone = engine.new_session()
    engine.step([Row(alone, tokens[:50], None, want_logits=True)])
    assert saved(alone) == saved(late)


def test_the_end_of_the_context(engines: Engines) -> None:
    engine = engines.open("flash", "cpu", "mtp")
    tokens = prompt_of(engine, 20)
    params = SAMPLING["greedy"]
    session, sampler = engine.new_session(22), engine.new_sampler(params)
    session.sync(tokens[:19])
    before = saved(session)
    with pytest.raises(ContextLengthError):
        engine.step([Row(session, [tokens[19]], sampler, drafts=[1, 2, 3])])
    assert saved(session) == before
    # The model's own drafter knows the room.
    [result] = engine.step([Row(session, [tokens[19]], sampler, drafts=5)])
    assert result.ahead is not None and result.ahead.drafted == 2
    full = engine.new_session(20)
    full.sync(tokens[:19])
    [result] = engine.step([Row(full, [tokens[19]], engine.new_sampler(params), drafts=5)])
    assert result.ahead is None and full.n_tokens == 20
    with pytest.raises(ValueError, match="one token and a sampler"):
        engine.step([Row(session, [1, 2], sampler, drafts=2)])
    with pytest.raises(ValueError, match="one token and a sampler"):
        engine.step([Row(session, [1], None, drafts=[2])])
    with pytest.raises(ValueError, match="has room for 5"):
        engine.step([Row(engine.new_session(), [1], engine.new_sampler(params), drafts=[1] * 6)])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.step([Row(engine.new_session(), [1], engine.new_sampler(params), drafts=[320])])


def test_generate_guesses(engines: Engines) -> None:
    """The loop of one sequence, with a drafter that is right now and then."""
    engine = engines.open("flash", "cpu", "mtp")
    prompt = prompt_of(engine, 50)
    first = prompt.pop()
    session, params = engine.new_session(), SAMPLING["sampled"]
    session.sync(prompt)
    plain = Plain(engine, session, engine.new_sampler(params), first, 30)
    b = engine.new_session()
    b.sync(prompt)
    decoder = Decoder(engine, b, engine.new_sampler(params))
    made = [first]
    for i in range(30):
        token = decoder.after(made[-1], 30 - i - 1).token
        assert token is not None
        made.append(token)
    assert made[1:] == plain.tokens and decoder.drafted > 0


# ---- files


def opened(path: Path, **config: Any) -> Engine:
    return Engine.open(EngineConfig(model=path, ctx=64, threads=2, **config))


def first_guess(engine: Engine) -> npt.NDArray[np.float32]:
    session = engine.new_session()
    session.sync([5, 6, 7, 8])
    return guesses(engine, session, 9, 16)[1]


def test_every_spelling_of_a_head(engines: Engines, directories: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """In the model's GGUF file, in one of its own, and as a further layer; the guesses are those of the directory."""
    model = tiny("flash")
    head = model.gguf_tensors(model.head)
    own = {name: w for name, w in head.items() if name.startswith("mtp.")}
    main = {name: w for name, w in head.items() if not name.startswith("mtp.")}
    want = first_guess(opened(directories["flash", "mtp"], mtp=True, mtp_draft=2, mtp_margin=0.0))
    both = model.write_gguf(tmp_path / "both.gguf", tensors=head)
    assert np.array_equal(first_guess(opened(both, mtp=True, mtp_draft=2, mtp_margin=0.0)), want)
    alone = model.write_gguf(tmp_path / "main.gguf", tensors=main)
    support = model.write_gguf(tmp_path / "head.gguf", tensors=own)
    found = opened(alone, mtp=True, mtp_model=support, mtp_draft=2, mtp_margin=0.0)
    assert np.array_equal(first_guess(found), want)
    found = opened(alone, mtp=True, mtp_model=directories["flash", "mtp"], mtp_draft=2, mtp_margin=0.0)
    assert np.array_equal(first_guess(found), want)
    assert np.array_equal(first_guess(opened(alone, mtp=True, mtp_model=both, mtp_draft=2, mtp_margin=0.0)), want)

    renamed = {
        "e_proj.weight": None,
        "h_proj.weight": None,
        "enorm.weight": "nextn.enorm.weight",
        "hnorm.weight": "nextn.hnorm.weight",
        "norm.weight": "nextn.shared_head_norm.weight",
    }
    layer = {}
    for name, w in own.items():
        rest = name.removeprefix("mtp.0.")
        if rest.startswith("hc_head_"):
            layer[f"output_hc_{rest.removeprefix('hc_head_')}"] = w
        elif (new := renamed.get(rest, rest)) is not None:
            layer[f"blk.5.{new}"] = w
    layer["blk.5.nextn.eh_proj.weight"] = np.concatenate([own["mtp.0.e_proj.weight"], own["mtp.0.h_proj.weight"]], 1)
    for name in ("token_embd.weight", "output.weight", "output_norm.weight"):
        layer[name] = main[name]
    fused = model.write_gguf(tmp_path / "fused.gguf", tensors=layer, keys={"deepseek4.block_count": 6})
    got = first_guess(opened(alone, mtp=True, mtp_model=fused, mtp_draft=2, mtp_margin=0.0))
    assert np.abs(got - want).max() < TOLERANCE


def test_every_spelling_of_a_block_drafter(directories: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    model = tiny("flash")
    tensors = model.gguf_tensors(dspark_weights(model.config))
    own = {name: w for name, w in tensors.items() if name.startswith("mtp.")}
    main = {name: w for name, w in tensors.items() if not name.startswith("mtp.")}
    on: dict[str, Any] = {"dspark": True, "dspark_confidence": 0.0}
    want = first_guess(opened(directories["flash", "dspark"], **on))
    assert len(want) == 5
    keys = {f"deepseek4.dspark.{k.removeprefix('dspark_')}": v for k, v in DSPARK.items()}
    both = model.write_gguf(tmp_path / "both.gguf", tensors=tensors, keys=keys)
    assert np.array_equal(first_guess(opened(both, **on)), want)
    alone = model.write_gguf(tmp_path / "main.gguf", tensors=main)
    support = model.write_gguf(
        tmp_path / "support.gguf",
        tensors=own,
        arch="deepseek4-dspark",
        keys={f"dspark.{k.removeprefix('dspark_')}": v for k, v in DSPARK.items()},
    )
    assert np.array_equal(first_guess(opened(alone, mtp_model=support, **on)), want)

    names = {
        "mtp.0.main_proj.weight": "fc.weight",
        "mtp.0.main_norm.weight": "enc.output_norm.weight",
        "mtp.2.norm.weight": "output_norm.weight",
        "mtp.2.markov_head.markov_w1.weight": "markov_w1.weight",
        "mtp.2.markov_head.markov_w2.weight": "markov_w2.weight",
        "mtp.2.confidence_head.proj.weight": "conf_proj.weight",
        **{f"mtp.2.hc_head_{part}.weight": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")},
    }
    flat = {names.get(n, n.replace("mtp.", "blk.", 1)): w for n, w in own.items()}
    dflash = model.write_gguf(
        tmp_path / "dflash.gguf",
        tensors=flat,
        arch="dflash",
        keys={"dflash.block_size": 5, "dflash.target_layers": [3, 4, 5], "tokenizer.ggml.mask_token_id": 319},
    )
    assert np.array_equal(first_guess(opened(alone, mtp_model=dflash, **on)), want)


def test_a_block_ends_where_it_is_unsure(engines: Engines, directories: dict[tuple[str, str], Path]) -> None:
    model = tiny("flash")
    config = {**model.config, **DSPARK}
    tokens = model.prompt()[:9].tolist()
    engine = engines.open("flash", "cpu", "dspark")
    behind = engine._model.native.hidden_states(tokens[:8])
    shape = (8, config["hc_mult"], config["hidden_size"])
    heard = np.stack([behind[t + 1].reshape(shape) for t in config["dspark_target_layer_ids"]], 1).astype(np.float64)
    oracle = DSparkOracle(config, {**model.weights, **dspark_weights(model.config)}, rounding=True)
    sure = oracle.drafts(heard, tokens[8])[1]
    print("sure", sure)
    for threshold in (*(s + d for s in sure for d in (-0.01, 0.01)), 1.0):
        strict = opened(directories["flash", "dspark"], dspark=True, dspark_confidence=min(1.0, max(0.001, threshold)))
        session = strict.new_session()
        session.sync(tokens[:8])
        want = next((i for i, s in enumerate(sure) if s < threshold), 5)
        assert len(guesses(strict, session, tokens[8], 16)[0]) == want


def test_a_margin_ends_a_chain(engines: Engines, directories: dict[tuple[str, str], Path]) -> None:
    sessions = []
    for margin in (0.0, 1e9):
        engine = opened(directories["flash", "mtp"], mtp=True, mtp_draft=4, mtp_margin=margin)
        session = engine.new_session()
        session.sync([5, 6, 7, 8])
        sessions.append(guesses(engine, session, 9, 4))
    (many, logits), (one, _) = sessions
    assert len(many) == 4 and one == many[:1]
    first = np.sort(logits[0])[::-1]
    lead = float(first[0] - first[1])
    for margin, count in ((lead * 0.99, 2), (lead * 1.01, 1)):
        engine = opened(directories["flash", "mtp"], mtp=True, mtp_draft=2, mtp_margin=margin)
        session = engine.new_session()
        session.sync([5, 6, 7, 8])
        assert len(guesses(engine, session, 9, 4)[0]) == count


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"mtp.0.enorm.weight": np.zeros(255, np.float32)}, ModelFileError, "mtp.0.enorm.weight"),
        ({"mtp.0.e_proj.weight": None}, ModelFileError, "mtp.0.e_proj.weight"),
        ({"mtp.0.attn.wq_a.weight": None}, ModelFileError, "mtp.0.attn_q_a.weight"),
        ({"mtp.0.ffn.experts.7.w2.weight": None}, ModelFileError, "mtp.0.ffn_down_exps"),
        ({"mtp.0.hc_head_fn": np.zeros((4, 8), np.float32)}, ModelFileError, "mtp.0.hc_head_fn"),
        ({"mtp.0.surprise.weight": np.zeros(8, np.float32)}, UnsupportedModelError, "mtp.0.surprise.weight"),
        ({"mtp.0.ffn.gate.bias": None}, ModelFileError, "mtp.0.exp_probs_b.bias"),
    ],
)
def test_damaged_heads_are_named(tmp_path: Path, change: dict[str, Any], error: type[Exception], text: str) -> None:
    model = tiny("flash")
    weights = {**model.weights, **model.head}
    for name, values in change.items():
        if values is None:
            del weights[name]
        else:
            weights[name] = values
    path = model.write_hf(tmp_path / "m", weights)
    with pytest.raises(error) as found:
        opened(path, mtp=True)
    print(found.value)
    assert text in str(found.value)
    opened(path).close()  # nobody asked for the head


def test_what_is_asked_for_must_be_there(directories: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    model = tiny("flash")
    bare = model.write_hf(tmp_path / "bare")
    for path, config, text in (
        (bare, {"mtp": True}, "has no draft layers; --mtp-model"),
        (directories["flash", "dspark"], {"mtp": True}, r"has a DSpark drafter \(--dspark\), not"),
        (directories["flash", "mtp"], {"dspark": True}, r"has a multi-token prediction head \(--mtp\), not"),
        (bare, {"mtp": True, "dspark": True}, "a model runs with one"),
        (bare, {"mtp_model": bare}, "neither is on"),
        (bare, {"mtp": True, "mtp_draft": 17}, "mtp_draft is 17"),
        (None, {"mtp": True}, "models of family llama have no layers that draft"),
    ):
        with pytest.raises(ConfigError, match=text):
            Engine.open(EngineConfig(model=path, ctx=64, **config))
    with pytest.raises(ModelFileError, match="no draft layers"):
        opened(bare, mtp=True, mtp_model=bare)
    for key, value, text in (
        ("dspark_block_size", None, "dspark.block_size: the key is missing"),
        ("dspark_block_size", 40, "dspark.block_size"),
        ("dspark_target_layer_ids", [2, 3, 9], "dspark.target_layer_ids"),
        ("dspark_noise_token_id", 320, "dspark.noise_token_id"),
        ("dspark_stage_count", 4, "mtp.3"),
    ):
        weights = {**model.weights, **dspark_weights(model.config)}
        path = model.write_hf(tmp_path / f"{key}{value}".replace("/", "_"), weights, **{**DSPARK, key: value})
        with pytest.raises(ModelFileError, match=text):
            opened(path, dspark=True)


def test_loaded_but_not_used(directories: dict[tuple[str, str], Path]) -> None:
    engine = opened(directories["flash", "mtp"], mtp=True, speculate=False)
    assert engine.most_drafts == 0 and engine._model.native.drafter == "mtp"
    [result] = engine.step([Row(engine.new_session(), [5], engine.new_sampler(SAMPLING["greedy"]))])
    assert result.ahead is None


def test_a_failure_while_drafting_clears_the_session(directories: dict[tuple[str, str], Path]) -> None:
    """And while verifying: as in any step, the session is empty and the engine goes on."""
    file = open_model_file(directories["flash", "mtp"])
    backend = _cpu.Backend("cpu", threads=2, faulty=True)
    config = EngineConfig(mtp=True, mtp_draft=3, mtp_margin=0.0)
    native = build_model(file, backend, drafts=find_drafts(file, config), config=config)
    native.load()
    session = _cpu.Session(native, 64)
    sampler = new_sampler(SAMPLING["greedy"], native.vocab, _cpu)
    failed = 0
    for operations in range(1, 400, 13):
        session.clear()
        native.step([(session, [5, 6, 7], None, False)])
        backend.fail_after(operations)
        try:
            [drafts] = native.draft([(session, 8, 3)])
            native.step([(session, [8], sampler, False, drafts)])
        except EngineError:
            failed += 1
            assert session.n_tokens == 0 and session.n_ahead == 0
        backend.fail_after(-1)
    print("failed", failed)
    assert failed > 20
