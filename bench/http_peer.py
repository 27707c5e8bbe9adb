"""Sixteen streaming clients of ds4-server and of llama.cpp's server, in turn: the same model, fresh prompts each round.

    python -m bench.http_peer --llama-server PATH [--rounds 4] [--model FILE] [--peer-model FILE] [--neighbour]

Both serve 16 sequences of 1,024 tokens on the same number of threads and do nothing between the rounds; ds4-server
holds a context of 1,024 per session, llama.cpp's is given 16 times as much, which is what it shares out; its other
settings are its own defaults (flash attention, continuous batching and weights repacked among them). With
`--peer-model` it serves the same model in a format that it is faster with. With `--neighbour` another process keeps one
core busy while a round runs: what a shared machine does to each. A short round before the first warms both up.

Figures are of `bench.serve`: tokens per second of all clients together, TTFT and ITL as a client sees them. A stream
that is not complete is an error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench import report, serve
from bench.http_server import free_port
from bench.neighbour import neighbour
from ds4.engine.demo import demo_model_path

WIDTH, NEW_TOKENS, WORDS, CONTEXT = 16, 96, 24, 1024
WARMUP_TOKENS = 48
FIGURES = (
    ("tokens/s", ("output_tokens_per_s",)),
    ("TTFT p50, ms", ("ttft_ms", "p50")),
    ("TTFT p99, ms", ("ttft_ms", "p99")),
    ("ITL p50, ms", ("itl_ms", "p50")),
    ("ITL p99, ms", ("itl_ms", "p99")),
    ("resident, MiB", ("server_rss_mib",)),
)


@contextmanager
def serving(command: list[str], port: int) -> Iterator[tuple[str, int]]:
    """Runs a server until it answers /health; yields its address and process id."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "NO_COLOR": "1"}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended with status {process.returncode}")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=1):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        else:
            raise RuntimeError(f"{command[0]} did not start")
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(30)


def load(url: str, pid: int, seed: int, *, busy: bool = False, tokens: int = NEW_TOKENS) -> dict[str, Any]:
    options = ["--url", url, "--concurrency", str(WIDTH), "--requests", str(WIDTH), "--max-tokens", str(tokens)]
    options += ["--input-words", str(WORDS), "--exact", "--seed", str(seed), "--warmup", "0", "--pid", str(pid)]
    with neighbour() if busy else nullcontext():
        result = serve.measure(serve.parser().parse_args(options))
    if result["rejected"] or result["complete"] != WIDTH:
        raise RuntimeError(f"incomplete run: {result['rejected']}")
    return result


def figure(result: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = result
    for name in path:
        value = value[name]
    return float(value)


def main() -> int:
    p = argparse.ArgumentParser(prog="bench.http_peer", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's server program")
    p.add_argument("--model", type=Path, help="GGUF file for both (default: the demo model)")
    p.add_argument("--peer-model", type=Path, help="GGUF file for llama.cpp's server (default: the same)")
    p.add_argument("--rounds", type=int, default=4)
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--neighbour", action="store_true", help="with one core kept busy by another process")
    p.add_argument("--save", metavar="NAME", help="keep the numbers as bench/results/NAME.json")
    args = p.parse_args()
    model = str(args.model or demo_model_path())
    ports = free_port(), free_port()
    ours = [sys.executable, "-m", "ds4.cli.server", "-m", model, "--port", str(ports[0])]
    ours += ["--batched-session", str(WIDTH), "--ctx", str(CONTEXT), "--threads", str(args.threads)]
    peer = [str(args.llama_server), "-m", str(args.peer_model or model), "--port", str(ports[1]), "-np", str(WIDTH)]
    peer += ["-c", str(WIDTH * CONTEXT), "-t", str(args.threads), "-tb", str(args.threads)]
    found: dict[str, list[dict[str, Any]]] = {"ds4": [], "llama.cpp": []}
    with serving(ours, ports[0]) as ds4, serving(peer, ports[1]) as llama:
        servers = (("ds4", ds4), ("llama.cpp", llama))
        for _, (url, pid) in servers:
            load(url, pid, 1999, tokens=WARMUP_TOKENS)
        for round_ in range(args.rounds):
            for name, (url, pid) in servers:
                result = load(url, pid, 2000 + round_, busy=args.neighbour)
                print(f"  round {round_}, {name}: {result['output_tokens_per_s']:.1f} t/s", file=sys.stderr)
                found[name].append(result)
    rows = []
    for label, path in FIGURES:
        a, b = (report.median([figure(r, path) for r in found[name]]) for name in ("ds4", "llama.cpp"))
        rows.append((label, a, b, f"{a / b:.2f}"))
    machine = "one core busy" if args.neighbour else "quiet"
    print(report.table((machine, "ds4", "llama.cpp", "ratio"), rows))
    if args.save:
        models = {"ds4": Path(model).name, "llama.cpp": Path(args.peer_model or model).name}
        print(f"saved {report.save(args.save, {'models': models, 'machine_is': machine, 'runs': found})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
