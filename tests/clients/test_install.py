"""How the client scripts install: once; only a package index that does not answer is a reason to skip."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

COMMON = Path(__file__).parent / "common.sh"
SKIPPED = 77


def install(folder: Path, npm: str) -> subprocess.CompletedProcess[str]:
    """Runs `need_npm` with an npm of which this is the script."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, script in (("npm", npm), ("node", "")):
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    settings = dict.fromkeys(("BASE_URL", "MODEL", "API_KEY", "WORKDIR", "RUN_HOME"), "x")
    path = f"{programs}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", f". {COMMON}; need_npm tool tool@1.0; echo ready", "client", "a prompt"],
        env={**settings, "PATH": path, "CLIENTS_DIR": str(folder / "clients")},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("npm error code ENOTFOUND", SKIPPED),
        ("npm error code ECONNREFUSED", SKIPPED),
        ("npm error code E503", SKIPPED),
        ("npm error code ETARGET: no matching version", 1),
        ("npm error code ENOSPC", 1),
    ],
)
def test_what_is_a_reason_to_skip(tmp_path: Path, said: str, status: int) -> None:
    done = install(tmp_path, f"echo '{said}'; exit 1")
    assert done.returncode == status, done
    assert said in done.stderr
    assert "ready" not in done.stdout
    if status == SKIPPED:
        assert done.stderr.splitlines()[-1] == "tool@1.0 cannot be installed: the package index does not answer"
    assert install(tmp_path, "exit 0").returncode == 0, "a failed installation is tried again"


def test_what_is_installed_is_not_installed_again(tmp_path: Path) -> None:
    assert install(tmp_path, "exit 0").stdout == "ready\n"
    assert install(tmp_path, "echo again; exit 1").stdout == "ready\n"
