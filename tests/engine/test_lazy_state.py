"""Sessions pay for the tokens that they hold, not for the context that they may grow to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig, Row
from tests.support.tiny_deepseek4 import with_flash_state

MILLION = 1 << 20
MB = 1e6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_flash_state().write_hf(tmp_path_factory.mktemp("lazy") / "flash")


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    engine = Engine.open(EngineConfig(model=path, backend="cpu", ctx=MILLION, threads=2, check_memory=False))
    yield engine
    engine.close()


def tokens(n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(5).integers(0, 64, n)]


def test_memory_grows_with_the_tokens(engine: Engine) -> None:
    full = engine._model.native.state_bytes(MILLION)
    assert full > 13e9
    session = engine.new_session()
    empty = session.resident_bytes
    assert empty < 1 * MB
    ids, before = tokens(700), 0
    for n in (1, 100, 256, 700):
        engine.step([Row(session, ids[before:n])])
        held, need = session.resident_bytes, engine._model.native.state_bytes(n)
        print(f"{n} tokens: {held / MB:.1f} MB held, {need / MB:.1f} MB of rows")
        # A part of a page for every kind of row.
        assert need <= held < need * 1.02 + 8 * MB
        before = n
    assert held < full / 100
    session.rewind(600)
    assert session.resident_bytes < held
    session.clear()
    assert session.resident_bytes < 1 * MB


def test_the_oracles_sessions_begin_empty_too(path: Path) -> None:
    engine = Engine.open(EngineConfig(model=path, backend="reference", ctx=MILLION, threads=2, check_memory=False))
    session = engine.new_session()
    assert session.resident_bytes < 1 * MB
    engine.step([Row(session, tokens(9))])
    held, need = session.resident_bytes, engine._model.native.state_bytes(9)
    assert need <= held < 2 * need + 1 * MB
    session.clear()
    assert session.resident_bytes < 1 * MB
    engine.close()


def test_a_fork_holds_what_it_needs_and_goes_on_alike(engine: Engine) -> None:
    ids = tokens(300)
    parent, fork = engine.new_session(), engine.new_session()
    engine.step([Row(parent, ids[:280])])
    fork.fork_from(parent, 270)
    alone = engine.new_session()
    engine.step([Row(alone, ids[:270])])
    assert fork.resident_bytes <= alone.resident_bytes * 1.01
    for session in (fork, alone):
        engine.step([Row(session, ids[270:], want_logits=True)])
    engine.step([Row(parent, ids[280:], want_logits=True)])
    assert np.array_equal(fork.logits(), alone.logits()) and np.array_equal(parent.logits(), alone.logits())


def test_the_plan_tells_both(engine: Engine) -> None:
    plan = engine.plan
    assert plan.at_start == plan.weight_bytes + plan.workspace_bytes
    assert plan.session_bytes == plan.state_bytes + plan.snapshots * plan.snapshot_bytes
    assert plan.total == plan.at_start + plan.slots * plan.session_bytes
    assert plan.state_bytes > engine._model.native.state_bytes(MILLION)
