"""Every fuzz target holds for a few hundred inputs, and the runner finds, shrinks and keeps what fails."""

from __future__ import annotations

import random

import pytest

from tests.fuzz import run

SEED = 20261130


@pytest.mark.parametrize("name", run.names())
def test_target_holds(name: str) -> None:
    print("seed", SEED)
    target, example = run.load(name)
    count, failure = run.fuzz(target, example, seed=SEED, runs=250)
    assert (count, failure) == (250, None)


def test_runner_finds_and_shrinks_a_failure() -> None:
    def target(data: bytes) -> None:
        if b"\x80" in data[3:]:
            raise ZeroDivisionError

    def example(rng: random.Random) -> bytes:
        return rng.randbytes(20).replace(b"\x80", b"")

    count, failure = run.fuzz(target, example, seed=SEED, runs=20_000)
    assert count < 20_000 and failure is not None
    assert len(failure) == 4 and failure[3:] == b"\x80"


def test_unknown_target() -> None:
    with pytest.raises(SystemExit, match="no fuzz target 'nothing'"):
        run.load("nothing")


def test_failure_is_kept_and_replayed(tmp_path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    def target(data: bytes) -> None:
        assert len(data) < 50

    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "load", lambda name: (target, lambda rng: bytes(rng.randrange(100))))
    assert not run.run("lengths", SEED, 30)
    kept = list((tmp_path / "out" / "fuzz").iterdir())
    assert len(kept) == 1 and len(kept[0].read_bytes()) == 50
    assert "--replay" in capsys.readouterr().out
