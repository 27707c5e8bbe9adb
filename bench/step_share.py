"""Where the time of a serving process goes: the engine's steps, what lies between them, the event loop, the client.

    python -m bench.step_share [--streams 16] [--tokens 96] [--rounds 3] [--trace FILE]

The real server with a real model in this process, `bench.serve` in another. Every step is timed where the engine thread
calls it, so a gap is what scheduling, hand-over and waiting for the interpreter take between two steps that follow each
other. CPU times are the threads' own; the client's are of its process, whichever server it talks to. `--trace` writes
one line a step.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench import report
from bench.serve import percentile
from bench.stream_cost import thread_seconds
from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig, Row, RowResult
from ds4.server.app import App
from ds4.server.config import ServerConfig
from ds4.server.engine_thread import EngineThread
from ds4.server.process import settle


@dataclass(frozen=True)
class Step:
    """Seconds on one clock; rows that decode, tokens of prompts."""

    start: float
    end: float
    decode: int
    prompt: int

    @property
    def ms(self) -> float:
        return 1e3 * (self.end - self.start)


class Timed:
    """An engine whose steps are written down."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: list[tuple[float, float, Sequence[Row]]] = []

    def step(self, rows: Sequence[Row], *, wake: int | None = None) -> list[RowResult]:
        start = time.perf_counter()
        results = self._engine.step(rows, wake=wake)
        self._seen.append((start, time.perf_counter(), rows))
        return results

    @property
    def steps(self) -> list[Step]:
        """Counted when asked for: the next step waits for whatever is done here."""
        found = []
        for start, end, rows in self._seen:
            decode = sum(len(row.tokens) == 1 for row in rows)
            found.append(Step(start, end, decode, sum(len(row.tokens) for row in rows) - decode))
        return found

    def forget(self) -> None:
        self._seen.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


async def load(args: argparse.Namespace, port: int, seed: int) -> dict[str, Any]:
    """One round of the client; its figures, and the CPU seconds of its process as `client_cpu_s`."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, "-m", "bench.serve", "--url", f"http://127.0.0.1:{port}", "--exact", "--warmup", "0"]
        command += ["--concurrency", str(args.streams), "--requests", str(args.streams), "--seed", str(seed)]
        command += ["--max-tokens", str(args.tokens), "--input-words", str(args.words), "--json", out.name]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        if await process.wait():
            raise SystemExit("the client's run was not complete")
        found: dict[str, Any] = json.loads(Path(out.name).read_text())
        return found


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    config = EngineConfig(model=args.model, ctx=1024, slots=args.streams, threads=args.threads)
    engine = Engine.open(config)
    app = App(engine, ServerConfig(engine=config, port=0))
    await app.start()
    settle()
    timed = Timed(engine)
    thread: EngineThread = app._thread
    thread._engine = timed
    loop_id, engine_id = threading.get_native_id(), thread.native_id
    assert engine_id is not None
    rounds = []
    for i in range(args.rounds + 1):
        timed.forget()
        before = thread_seconds()
        client = await load(args, app.port, 3000 + i)
        after = thread_seconds()
        if i:  # the first round warms up
            cpu = {
                "loop": after[loop_id] - before[loop_id],
                "engine": after[engine_id] - before[engine_id],
                "all": sum(after.values()) - sum(before.get(t, 0.0) for t in after),
            }
            rounds.append({"client": client, "cpu": cpu, "steps": timed.steps})
    app.request_stop()
    await app.serve()
    return rounds


def figures(one: dict[str, Any], tokens: int) -> list[tuple[str, float]]:
    steps: list[Step] = one["steps"]
    wall = steps[-1].end - steps[0].start
    gaps = [1e3 * (b.start - a.end) for a, b in itertools.pairwise(steps)]
    widest = max(s.decode for s in steps)
    plain = [s.ms for s in steps if not s.prompt and s.decode == widest]
    mixed = [s.ms for s in steps if s.prompt and s.decode]
    client, cpu = one["client"], one["cpu"]
    return [
        ("tokens/s, seen by the client", client["output_tokens_per_s"]),
        ("engine busy, %", 100 * sum(s.end - s.start for s in steps) / wall),
        ("between two steps, ms, median", report.median(gaps)),
        ("between two steps, ms, p99", percentile(sorted(gaps), 99)),
        (f"step of {widest} rows, ms, median", report.median(plain)),
        (f"step of {widest} rows, ms, p99", percentile(sorted(plain), 99)),
        ("step with prompts beside streams, ms, median", report.median(mixed) if mixed else 0.0),
        ("step with prompts beside streams, ms, most", max(mixed, default=0.0)),
        ("TTFT p99, ms", client["ttft_ms"]["p99"]),
        ("ITL p50, ms", client["itl_ms"]["p50"]),
        ("ITL p99, ms", client["itl_ms"]["p99"]),
        ("event loop, CPU us a token", 1e6 * cpu["loop"] / tokens),
        ("engine thread, CPU us a token", 1e6 * cpu["engine"] / tokens),
        ("whole server, CPU us a token", 1e6 * cpu["all"] / tokens),
        ("client, CPU us a token", 1e6 * client["client_cpu_s"] / tokens),
    ]


def trace(steps: Sequence[Step]) -> str:
    """One line a step."""
    return "".join(
        f"{1e3 * (s.start - steps[0].start):9.2f} ms  {s.ms:7.2f} ms  {s.decode:3d} decode  {s.prompt:4d} prompt\n"
        for s in steps
    )


def main() -> int:
    p = argparse.ArgumentParser(prog="bench.step_share", description=(__doc__ or "").splitlines()[0])
    p.add_argument("-m", "--model", type=Path, help="GGUF file (default: the demo model)")
    p.add_argument("--streams", type=int, default=16)
    p.add_argument("--tokens", type=int, default=96)
    p.add_argument("--words", type=int, default=24)
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--trace", type=Path, help="write the last round's steps there, one line each")
    p.add_argument("--save", metavar="NAME", help="keep the numbers as bench/results/NAME.json")
    args = p.parse_args()
    rounds = uvloop.run(run(args))
    found = [dict(figures(one, args.streams * args.tokens)) for one in rounds]
    rows = [(name, report.median([one[name] for one in found])) for name in found[0]]
    print(report.table((f"{args.streams} streams of {args.tokens} tokens", "median"), rows))
    if args.trace:
        args.trace.write_text(trace(rounds[-1]["steps"]))
    if args.save:
        print(f"saved {report.save(args.save, {'rounds': found})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
