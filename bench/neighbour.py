"""What is left of the engine's rate while another process keeps one core busy.

    python -m bench.neighbour [--peer ~/.cache/ds4-peer] [--rounds 5] [--save neighbour]

The neighbour is a loop pinned to core 0. Each round measures with and without it, in turn; medians. A pool that only
spins falls far below half, since every step waits for the thread that shares its core.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import report
from bench.peers.protocol import Worker
from ds4.engine.demo import demo_model_path

WORK: list[tuple[str, str, dict[str, int]]] = [
    ("prefill 512", "prefill", {"n": 512}),
    ("decode", "decode", {"depth": 0, "n": 48}),
    ("batch 16", "batch", {"width": 16, "n": 24}),
]


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that keeps one core busy."""
    process = subprocess.Popen(["taskset", "-c", "0", sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> int:
    p = argparse.ArgumentParser(prog="bench.neighbour", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--peer", type=Path, metavar="DIR", help="measure llama.cpp too (bench.cpu_llamacpp --build DIR)")
    p.add_argument("-m", "--model", type=Path, help="GGUF file (default: the demo model)")
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--save", metavar="NAME", help="keep the numbers as bench/results/NAME.json")
    args = p.parse_args()
    model, threads = str(args.model or demo_model_path()), str(args.threads)
    workers = {"ds4": Worker([sys.executable, "-m", "bench.peers.ds4_worker", model, threads])}
    if args.peer:
        script = str(Path(__file__).resolve().parent / "peers/llamacpp_worker.py")
        workers["llama.cpp"] = Worker([str(args.peer / "bin/python"), script, model, threads])
    lines = []
    for name, worker in workers.items():
        for label, op, arguments in WORK:
            worker.rate(op, **arguments)
            quiet, busy = [], []
            for _ in range(args.rounds):
                quiet.append(worker.rate(op, **arguments))
                with neighbour():
                    busy.append(worker.rate(op, **arguments))
            share = report.median(busy) / report.median(quiet)
            lines.append({"engine": name, "what": label, "quiet": quiet, "busy": busy, "share": share})
        worker.close()
    rows = [
        (
            line["engine"],
            line["what"],
            report.median(line["quiet"]),
            report.median(line["busy"]),
            f"{line['share']:.0%}",
        )
        for line in lines
    ]
    print(report.table(("engine", "tokens/s", "alone", "with a neighbour", "left"), rows))
    if args.save:
        print(f"saved {report.save(args.save, {'rates': lines})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
