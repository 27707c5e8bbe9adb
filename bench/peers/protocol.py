"""The worker protocol: one JSON command per line on stdin, one JSON answer per line on stdout.

    {"op": "prefill", "n": 512}                    evaluate n tokens from empty, logits of the last
    {"op": "decode", "depth": 2048, "n": 32}       n single-token steps after `depth` tokens
    {"op": "batch", "width": 16, "n": 32}          n steps of `width` sequences, each 64 tokens deep at the start
    {"op": "facts"}                                what runs: version, system, resident MiB

The answer is {"seconds": s, "tokens": t}: only the named work is timed. This file needs nothing but Python, since
the peer's worker runs in the peer's own environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH_DEPTH = 64


def token(i: int, vocab: int) -> int:
    """A fixed pseudo-random token sequence, the same for every engine; never one of the first 100 (specials)."""
    return 100 + (i * 7919 + 104729) % (vocab - 100)


def serve(handlers: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Answers commands until stdin ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(handlers[command.pop("op")](**command)), flush=True)


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


class Worker:
    """A worker process, driven from outside."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"worker ended with status {self._process.wait()}: {self._process.args!r}")

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def rate(self, op: str, **arguments: Any) -> float:
        """Tokens per second of one command."""
        answer = self.ask(op, **arguments)
        return float(answer["tokens"] / answer["seconds"])

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait(timeout=30)
