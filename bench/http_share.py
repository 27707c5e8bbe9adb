"""What HTTP costs: sixteen streaming clients of ds4-server against the same work through Engine.step, in turn.

    python -m bench.http_share --rounds 3

Each round serves 16 fresh prompts of the same length to 16 clients, 96 tokens each, and then lets the bare engine
evaluate prompts of that length and sample as many tokens. The server runs with the same number of threads.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from typing import Any

from bench import report, serve
from bench.peers.protocol import Worker
from ds4.engine.demo import demo_model_path

WIDTH, NEW_TOKENS, WORDS = 16, 96, 24


def start_server(threads: int) -> tuple[subprocess.Popen[str], str]:
    """A ds4-server of its own on a free port; returns it and its base URL."""
    command = [sys.executable, "-m", "ds4.cli.server", "--port", "0", "--batched-session", str(WIDTH)]
    command += ["--threads", str(threads), "--ctx", "1024"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"listening on (http://\S+)", line):
            # Keep reading, or the server blocks on a full pipe.
            subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
            return process, found[1]
    raise RuntimeError("the server did not start")


def load(url: str, pid: int, seed: int) -> dict[str, Any]:
    options = ["--url", url, "--concurrency", str(WIDTH), "--requests", str(WIDTH), "--max-tokens", str(NEW_TOKENS)]
    options += ["--input-words", str(WORDS), "--exact", "--seed", str(seed), "--warmup", "0", "--pid", str(pid)]
    result = serve.measure(serve.parser().parse_args(options))
    if result["rejected"] or result["complete"] != WIDTH:
        raise RuntimeError(f"incomplete run: {result['rejected']}")
    return result


def main() -> int:
    p = argparse.ArgumentParser(prog="bench.http_share", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--save", metavar="NAME", help="keep the numbers as bench/results/NAME.json")
    args = p.parse_args()
    server, url = start_server(args.threads)
    model = str(demo_model_path())
    engine = Worker([sys.executable, "-m", "bench.peers.ds4_worker", model, str(args.threads), "1024"])
    http: list[float] = []
    bare: list[float] = []
    cpu: list[float] = []
    try:
        for round_ in range(args.rounds + 1):
            result = load(url, server.pid, seed=1000 + round_)
            prompt = result["prompt_tokens"] // WIDTH
            rate = engine.rate("workload", width=WIDTH, prompt=prompt, n=NEW_TOKENS)
            print(f"  round {round_}: HTTP {result['output_tokens_per_s']:.1f}, engine {rate:.1f} t/s", file=sys.stderr)
            if round_:  # the first round warms both up
                http.append(result["output_tokens_per_s"])
                bare.append(rate)
                cpu.append(result["server_cpu_ms_per_token"])
    finally:
        server.terminate()
        engine.close()
    share = report.median([a / b for a, b in zip(http, bare, strict=True)])
    rows = [("HTTP, 16 streams", report.median(http)), ("Engine.step, same work", report.median(bare))]
    print(report.table(("tokens/s", "median"), rows))
    print(f"share {100 * share:.1f} %, {report.median(cpu):.2f} server CPU ms per token")
    if args.save:
        print(f"saved {report.save(args.save, {'http': http, 'engine': bare, 'share': share})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
