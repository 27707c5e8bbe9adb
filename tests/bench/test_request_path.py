"""The benchmark of a request's way to the queue runs as its docstring says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "bench.request_path", "--rounds", "1", "--size", "small", *flags]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120)


def test_the_default_model_and_its_own_syntax(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "laps.json"))
    assert done.returncode == 0, done.stderr
    assert "syntax chatml" in done.stdout
    laps = json.loads((tmp_path / "laps.json").read_text())
    for kind, count in (("new", 1), ("grown", 4)):
        for name in ("parsed", "rendered", "queued"):
            assert len(laps[kind][name]) == count, (kind, name)


def test_a_request_that_goes_wrong_is_no_measurement() -> None:
    """The demo vocabulary has none of the tokens of these roles."""
    done = run("--syntax", "deepseek4")
    assert done.returncode == 1
    assert "the server answered HTTP/1.1 500" in done.stderr
