"""DeepSeek V4 through the engine: logits and streams of transformers, and one state however it was reached."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ds4.engine.engine import Engine, fingerprint
from ds4.engine.model_file import open_model_file
from ds4.engine.session import Session
from ds4.engine.types import EngineConfig, Row
from ds4.errors import CheckpointError, SessionInvalidError
from tests.support.deepseek4_oracle import F64, ModelOracle
from tests.support.tiny_deepseek4 import TinyDeepSeek4, tiny

BACKENDS = ["cpu", "reference"]
VARIANTS = ["flash", "pro"]
Logits = npt.NDArray[np.float32]

# Acceptance for f32 arithmetic: sums of the same numbers in another order (transformers moves as much between its own
# cached and uncached passes, 1.7e-5).
LOGIT_TOLERANCE, STREAM_TOLERANCE = 2e-4, 5e-4


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("deepseek4")
    return {v: tiny(v).write_hf(root / v) for v in VARIANTS}


@pytest.fixture(scope="module")
def engines(directories: dict[str, Path]) -> Iterator[Engines]:
    made = Engines(directories)
    yield made
    made.open.cache_clear()


class Engines:
    """Opens each (variant, backend, qat) once."""

    def __init__(self, directories: dict[str, Path]) -> None:
        @cache
        def open_once(variant: str, backend: str, qat: bool) -> Engine:
            config = EngineConfig(
                model=directories[variant], backend=backend, ctx=512, threads=2, prefill_chunk=128, kv_qat=qat
            )
            return Engine.open(config)

        self.open = open_once


def stepwise(engine: Engine, tokens: npt.NDArray[np.int32]) -> Logits:
    """Logits after every token, one step each. [T, vocab]"""
    session = engine.new_session()
    out = []
    for token in tokens:
        engine.step([Row(session, [int(token)], want_logits=True)])
        out.append(session.logits())
    session.close()
    return np.stack(out)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_reference(engines: Engines, variant: str) -> None:
    got = stepwise(engines.open(variant, "cpu", False), tiny(variant).prompt())
    want = tiny(variant).reference("logits")
    worst = float(np.abs(got - want).max())
    print("logits", worst)
    assert worst < LOGIT_TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_rounded_rows_give_the_reference_argmax(engines: Engines, variant: str) -> None:
    got = stepwise(engines.open(variant, "cpu", True), tiny(variant).prompt())
    want = tiny(variant).reference("logits_qat")
    assert np.array_equal(got.argmax(1), want.argmax(1))
    plain = tiny(variant).reference("logits")
    assert not np.array_equal(want.argmax(1), plain.argmax(1))  # the switch is seen in the argmax
    near = np.abs(got - want).max(1) < 0.01
    print("rows within 0.01:", int(near.sum()), "of", len(near))
    assert near.mean() > 0.5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_streams_equal_the_reference(engines: Engines, variant: str, backend: str) -> None:
    """After each layer, at the last of 300 tokens, whose rows depend on all before."""
    model: TinyDeepSeek4 = tiny(variant)
    native = engines.open(variant, backend, False)._model.native
    got = native.hidden_states(model.prompt())[:, -1]
    want = model.reference("streams")
    worst = np.abs(got.reshape(want.shape) - want).max((1, 2))
    print(backend, worst)
    assert (worst < STREAM_TOLERANCE).all()
    assert np.abs(want).max() > 1


@cache
def oracle_streams(variant: str, rounding: bool) -> F64:
    """[layers + 1, T, n, H] of the whole prompt, in float64."""
    model = tiny(variant)
    return ModelOracle(model.config, model.weights, rounding=rounding).streams(model.prompt())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_oracle_gives_the_reference_logits(variant: str) -> None:
    """Of transformers without rounding, and of a separate implementation in float64 with it."""
    model = tiny(variant)
    for rounding, name in ((False, "logits"), (True, "logits_qat")):
        got = ModelOracle(model.config, model.weights, rounding=rounding).all_logits(
            oracle_streams(variant, rounding)[-1]
        )
        worst = np.abs(got - model.reference(name)).max(1)
        print(variant, name, worst.max(), "rows above 1e-3:", int((worst > 1e-3).sum()))
        # That implementation does not round angles to float32; a key close to the middle of two codes then may fall to
        # the other one, which all tokens after it see.
        assert (worst < 1e-3).mean() > (0.9 if rounding else 0.999)
        assert np.array_equal(got.argmax(1), model.reference(name).argmax(1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_layer_from_the_oracles_streams(engines: Engines, variant: str, backend: str) -> None:
    """Keys rounded, at every position: a flipped code does not spread to the layers behind."""
    want = oracle_streams(variant, True).reshape(6, 300, -1)
    inputs = want[:-1].astype(np.float32)

    def errors(qat: bool) -> npt.NDArray[np.float64]:
        native = engines.open(variant, backend, qat)._model.native
        worst: npt.NDArray[np.float64] = np.abs(native.hidden_states(tiny(variant).prompt(), inputs)[1:] - want[1:])
        return worst.max(2)

    found = errors(True)
    print(backend, found.max(1), "rows beyond:", (found > STREAM_TOLERANCE).sum(1))
    if backend == "reference":  # sums in float64
        assert found.max() < 2e-5
    else:  # a sum in float32 may round a key to the neighbouring code, which its window sees
        assert (found > STREAM_TOLERANCE).mean(1).max() < 0.05 and found.max() < 5e-3
    assert (errors(False).max(1) > 0.02).all()  # the check sees the rounding in every layer


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_gives_the_reference_logits(engines: Engines, backend: str) -> None:
    engine = engines.open("flash", backend, False)
    session = engine.new_session()
    session.sync(tiny("flash").prompt())
    assert np.abs(session.logits() - tiny("flash").reference("logits")[-1]).max() < LOGIT_TOLERANCE


# ---- one state, however it was reached: bit for bit


@pytest.fixture(params=[(v, b) for v in VARIANTS for b in BACKENDS], ids="-".join)
def engine(request: pytest.FixtureRequest, engines: Engines) -> Engine:
    variant, backend = request.param
    return engines.open(variant, backend, True)


def prompt_of(engine: Engine) -> npt.NDArray[np.int32]:
    """On the slow oracle a shorter one, that still closes a window of 128."""
    tokens = tiny(str(engine.info.name)).prompt()
    return tokens if engine.config.backend == "cpu" else tokens[:150]


def feed(engine: Engine, session: Session, tokens: npt.NDArray[np.int32], chunk: int) -> Logits:
    for at in range(0, len(tokens), chunk):
        engine.step([Row(session, tokens[at : at + chunk], want_logits=True)])
    return session.logits()


def after(engine: Engine, tokens: npt.NDArray[np.int32]) -> Logits:
    """Logits after the tokens, uninterrupted, in one step; computed once."""
    key = engine.fingerprint, engine.config.backend, tokens.tobytes()
    if key not in _after:
        session = engine.new_session()
        _after[key] = feed(engine, session, tokens, len(tokens))
        session.close()
    return _after[key]


_after: dict[tuple[str, str, bytes], Logits] = {}


def same(a: Logits, b: Logits) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_do_not_matter(engine: Engine, chunk: int) -> None:
    tokens = prompt_of(engine)
    assert same(feed(engine, engine.new_session(), tokens, chunk), after(engine, tokens))


@pytest.mark.parametrize("n", [2, 5, 16])
def test_neighbours_do_not_matter(engine: Engine, n: int) -> None:
    """Sessions of different lengths, decoding in one step beside a prefill, as if each were alone."""
    tokens = prompt_of(engine)[:100]
    if n == 16 and engine.config.backend == "reference":
        pytest.skip("slow, and the oracle computes each row by itself")
    starts = [3 + 5 * i for i in range(n)]
    sessions = [engine.new_session() for _ in starts]
    for session, start in zip(sessions, starts, strict=True):
        feed(engine, session, tokens[:start], 32)
    late = engine.new_session()
    for i in range(6):
        rows = [Row(s, [tokens[at + i]], want_logits=True) for s, at in zip(sessions, starts, strict=True)]
        rows.insert(n // 2, Row(late, tokens[9 * i : 9 * i + 9], want_logits=True))
        engine.step(rows)
    for session, start in zip(sessions, starts, strict=True):
        assert same(session.logits(), after(engine, tokens[: start + 6])), start
    assert same(late.logits(), after(engine, tokens[:54]))


@pytest.mark.parametrize("position", [1, 3, 4, 17, 126, 127, 128, 130, 149])
def test_saved_sessions_continue(engine: Engine, position: int) -> None:
    """Also in the middle of open windows of 4 and 128."""
    tokens = prompt_of(engine)
    session = engine.new_session()
    feed(engine, session, tokens[:position], 50)
    file = io.BytesIO()
    session.save(file)
    file.seek(0)
    restored = engine.new_session()
    restored.load(file)
    assert same(restored.logits(), session.logits())
    assert same(feed(engine, restored, tokens[position:], 64), after(engine, tokens))


def test_a_saved_session_goes_on_elsewhere(engines: Engines) -> None:
    """One payload for all backends, byte for byte, in the middle of open windows."""
    cpu, oracle = (engines.open("flash", backend, False) for backend in BACKENDS)
    tokens = tiny("flash").prompt()[:140]
    session, other = cpu.new_session(), oracle.new_session()
    feed(cpu, session, tokens[:130], 64)
    file, again = io.BytesIO(), io.BytesIO()
    session.save(file)
    file.seek(0)
    other.load(file)
    other.save(again)
    assert again.getvalue() == file.getvalue()
    there, here = feed(oracle, other, tokens[130:], 10), feed(cpu, session, tokens[130:], 10)
    assert np.abs(there - here).max() < LOGIT_TOLERANCE


def test_rewound_sessions_continue(engine: Engine) -> None:
    tokens = prompt_of(engine)
    total = len(tokens)
    for back in [1, 2, 3, 4, 16, 17, 100, 128] if engine.config.backend == "cpu" else [1, 6, 128]:
        session = engine.new_session()
        feed(engine, session, tokens, 64)
        assert session.can_rewind(total - back), back
        session.rewind(total - back)
        assert session.n_tokens == total - back and not session.has_logits
        assert same(feed(engine, session, tokens[total - back :], 7), after(engine, tokens)), back


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_position_is_saved_and_every_rewind_continues(engines: Engines, variant: str) -> None:
    """All positions of the whole prompt, and cuts by every number of tokens that a window holds."""
    engine = engines.open(variant, "cpu", True)
    tokens = prompt_of(engine)
    session, restored = engine.new_session(), engine.new_session()
    for position in range(1, len(tokens)):
        engine.step([Row(session, [tokens[position - 1]], want_logits=True)])
        file = io.BytesIO()
        session.save(file)
        file.seek(0)
        restored.load(file)
        assert same(restored.logits(), session.logits()), position
        assert same(feed(engine, restored, tokens[position:], 64), after(engine, tokens)), position
    for back in range(1, 129):
        restored.clear()
        feed(engine, restored, tokens, 64)
        restored.rewind(len(tokens) - back)
        assert same(feed(engine, restored, tokens[len(tokens) - back :], 7), after(engine, tokens)), back


def test_a_rewind_too_far_is_refused(engines: Engines) -> None:
    engine = engines.open("flash", "cpu", True)
    tokens = tiny("flash").prompt()
    session = engine.new_session()
    feed(engine, session, tokens, 64)
    reach = min(n for n in range(1, len(tokens)) if session.can_rewind(n))
    assert len(tokens) - reach == 128
    with pytest.raises(SessionInvalidError):
        session.rewind(reach - 1)
    assert session.n_tokens == 0 and session.can_rewind(0)
    # A cut is a cut of what was ever there: rewinding twice reaches no further.
    feed(engine, session, tokens, 64)
    session.rewind(len(tokens) - 100)
    assert session.can_rewind(reach) and not session.can_rewind(reach - 1)
    # `sync` starts over where it cannot cut.
    other = np.concatenate([tokens[:50], tokens[100:150]])
    assert session.sync(other) == 0
    assert same(session.logits(), after(engine, other))


def test_forks_continue(engine: Engine) -> None:
    tokens = prompt_of(engine)
    whole = after(engine, tokens)
    parent = engine.new_session()
    feed(engine, parent, tokens[:130], 64)
    for cut in (130, 129, 126, 100):
        fork = engine.new_session()
        fork.fork_from(parent, cut)
        feed(engine, fork, tokens[cut + 1 :], 10)  # another future first, in a sibling
        again = engine.new_session()
        again.fork_from(parent, cut)
        assert same(feed(engine, again, tokens[cut:], 11), whole), cut
    assert same(feed(engine, parent, tokens[130:], 200), whole)


# ---- the switch


def test_rounding_is_part_of_a_saved_session(engines: Engines) -> None:
    file = io.BytesIO()
    session = engines.open("flash", "cpu", True).new_session()
    session.sync([5, 6, 7])
    session.save(file)
    file.seek(0)
    with pytest.raises(CheckpointError):
        engines.open("flash", "cpu", False).new_session().load(file)


def test_fingerprint_knows_the_switch(directories: dict[str, Path]) -> None:
    file = open_model_file(directories["flash"])
    assert fingerprint(file, True) != fingerprint(file, False)
    assert fingerprint(file) == fingerprint(open_model_file(directories["flash"]))
