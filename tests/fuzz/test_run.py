"""Every fuzz target holds for a few hundred inputs, and the runner finds, shrinks and keeps what fails."""

from __future__ import annotations

import importlib.util
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import dsml, make_corpus, run

SEED = 20261130


@pytest.mark.parametrize("name", run.names())
def test_target_holds(name: str) -> None:
    print("seed", SEED)
    target, example = run.load(name)
    count, failure = run.fuzz(target, example, seed=SEED, runs=250)
    assert (count, failure) == (250, None)


@pytest.mark.parametrize("name", run.names())
def test_target_holds_for_its_seeds(name: str) -> None:
    target, _ = run.load(name)
    assert len(run.seeds(name)) > 16
    for data in run.seeds(name):
        target(data)


def test_seeds_are_what_the_script_writes() -> None:
    for name, inputs in make_corpus.corpora().items():
        assert sorted(set(inputs)) == sorted(run.seeds(name)), f"python -m tests.fuzz.make_corpus writes {name} anew"


def test_every_syntax_has_seeds() -> None:
    assert {data[0] % len(dsml.ALL) for data in run.seeds("dsml")} == set(range(len(dsml.ALL)))


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_atheris_finds_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The whole way: process, guide, log, kept input."""
    folder = tmp_path / "tests" / "fuzz"
    shutil.copytree(run.HERE, folder)
    shutil.copytree(run.ROOT / "tests" / "support", tmp_path / "tests" / "support")
    (folder / "planted.py").write_text(
        "\n\ndef target(data):\n    if data[:1] == b'\\x07':\n        raise ZeroDivisionError\n\n\n"
        "def example(rng):\n    return rng.randbytes(4)\n"
    )
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "CORPUS", folder / "corpus")
    (folder / "corpus" / "planted").mkdir()
    assert not run.run_guided(["planted"], SEED, 60, 1, None)
    out = capsys.readouterr().out
    (kept,) = (tmp_path / "out" / "fuzz").glob("planted-crash-*")
    assert "FAILURE" in out and "ZeroDivisionError" in out and f"--replay {kept} planted" in out
    assert kept.read_bytes()[:1] == b"\x07"


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
