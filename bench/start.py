"""From starting a process to its first token, with the model file in the page cache.

    python -m bench.start [--rounds 7] [--save start]

Two ways: `ds4 -p` until the first byte of its answer, and `ds4-server` until the first streamed token of a request that
was sent as soon as it listened. Medians; the CPU seconds of both threads say what a disturbed machine adds. Modules'
bytecode is kept, as an installed package's is, whatever PYTHONDONTWRITEBYTECODE says.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import report

PROMPT = "Name three rivers."
ENVIRONMENT = {**os.environ, "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": ""}


def spent(process: subprocess.Popen[bytes]) -> float:
    """CPU seconds of a running process and its threads."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))


def one_shot(threads: int) -> dict[str, float]:
    command = [sys.executable, "-m", "ds4.cli.main", "-p", PROMPT, "-n", "32", "--temp", "0", "--threads", str(threads)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    assert process.stdout is not None
    if not os.read(process.stdout.fileno(), 1):
        raise RuntimeError(f"ds4 ended with status {process.wait()} before its first token")
    result = {"seconds": time.perf_counter() - start, "cpu": spent(process)}
    process.communicate()
    return result


def served(threads: int, slots: int, ctx: int) -> dict[str, float]:
    command = [sys.executable, "-m", "ds4.cli.server", "--port", "0", "--batched-session", str(slots)]
    command += ["--ctx", str(ctx), "--threads", str(threads)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert process.stderr is not None
    try:
        url = next(m[1] for line in process.stderr if (m := re.search(rb"listening on (http://\S+)", line)))
        listening = time.perf_counter() - start
        place = urlsplit(url.decode())
        connection = http.client.HTTPConnection(place.hostname or "", place.port)
        body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 4, "stream": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        for line in answer:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return {"seconds": time.perf_counter() - start, "cpu": spent(process), "listening": listening}
        raise RuntimeError(f"status {answer.status} without a token")
    finally:
        process.terminate()
        process.communicate()


def main() -> int:
    p = argparse.ArgumentParser(prog="bench.start", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--slots", type=int, default=16)
    p.add_argument("--ctx", type=int, default=4096)
    p.add_argument("--save", metavar="NAME", help="keep the numbers as bench/results/NAME.json")
    args = p.parse_args()
    shot, server = [], []
    # The model file and the modules are in the page cache from here on.
    one_shot(args.threads)
    served(args.threads, args.slots, args.ctx)
    for _ in range(args.rounds):
        shot.append(one_shot(args.threads))
        server.append(served(args.threads, args.slots, args.ctx))

    def middle(runs: list[dict[str, float]], key: str) -> float:
        return report.median([run[key] for run in runs])

    rows: list[tuple[Any, ...]] = [
        ("ds4 -p, first byte", 1e3 * middle(shot, "seconds"), 1e3 * middle(shot, "cpu")),
        (f"ds4-server, {args.slots} slots, first token", 1e3 * middle(server, "seconds"), 1e3 * middle(server, "cpu")),
    ]
    print(report.table(("milliseconds from process start", "time", "of CPU"), rows))
    print(f"the server listened after {1e3 * middle(server, 'listening'):.0f} ms")
    if args.save:
        print(f"saved {report.save(args.save, {'one_shot': shot, 'server': server})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
