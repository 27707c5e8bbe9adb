"""What a snapshot costs: time to take one, to go back to it and to give it up, and the memory it has for itself.

    python -m bench.snapshots MODEL [--tokens 1000 10000]
    python -m bench.snapshots --flash      # all that a session's state depends on as in Flash, the rest tiny

`going on` is what the session's next 16 tokens take more when a snapshot shares its pages, which are copied before they
are written. `own` is what a snapshot has for itself when nothing of the rings is shared any more, as the plan counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench import report
from ds4.engine.engine import Engine
from ds4.engine.session import Session
from ds4.engine.types import EngineConfig, Row
from tests.support.tiny_deepseek4 import with_flash_state

ROUNDS = 15


def filled(engine: Engine, tokens: int) -> Session:
    """A session of so many tokens, all its pages there; what they hold does not matter."""
    session = engine.new_session()
    session.native.begin_import(np.full(tokens, 5, np.int32), tokens)
    session.native.finish_import(None)
    return session


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(engine: Engine, tokens: int) -> list[object]:
    session, copy = filled(engine, tokens), engine.new_session()
    took: dict[str, list[float]] = {name: [] for name in ("take", "back", "drop", "shared", "alone")}
    step = np.full(16, 5, np.int32)
    for _ in range(ROUNDS):
        took["take"].append(timed(lambda: copy.fork_from(session)))
        took["shared"].append(timed(lambda: engine.step([Row(session, step)])))
        took["back"].append(timed(lambda: session.fork_from(copy)))
        took["drop"].append(timed(copy.clear))
        took["alone"].append(timed(lambda: engine.step([Row(session, step)])))
    best = {name: min(values) for name, values in took.items()}
    copying = statistics.median(a - b for a, b in zip(took["shared"], took["alone"], strict=True))
    row: list[object] = [tokens, *(f"{1000 * best[name]:.3f}" for name in ("take", "back", "drop"))]
    return [*row, f"{1000 * copying:.2f}", f"{1000 * best['alone']:.1f}", f"{engine.plan.snapshot_bytes / 1e6:.1f}"]


def main() -> int:
    p = argparse.ArgumentParser(prog="bench.snapshots", description=(__doc__ or "").splitlines()[0])
    p.add_argument("model", type=Path, nargs="?", help="a model whose sessions cannot be cut back freely")
    p.add_argument("--flash", action="store_true", help="sessions of the size of DeepSeek V4 Flash's")
    p.add_argument("--tokens", type=int, nargs="+", default=[1000, 10000, 30000])
    p.add_argument("-t", "--threads", type=int, default=2)
    args = p.parse_args()
    if not args.flash and args.model is None:
        p.error("a model, or --flash")
    with tempfile.TemporaryDirectory() as directory:
        path = with_flash_state().write_hf(Path(directory) / "flash") if args.flash else args.model
        ctx = max(args.tokens) + 8192
        engine = Engine.open(EngineConfig(model=path, backend="cpu", ctx=ctx, threads=args.threads))
        rows = [measure(engine, tokens) for tokens in args.tokens]
        engine.close()
    head = ("tokens", "take, ms", "go back, ms", "drop, ms", "going on, ms", "16 tokens, ms", "own, MB")
    print(report.table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
