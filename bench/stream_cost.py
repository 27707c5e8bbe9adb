#!/usr/bin/env python3
"""What a streamed token costs beside the model: CPU time of the event loop and of the engine thread.

    python -m bench.stream_cost [--streams 16] [--tokens 2000] [--rounds 7] [--profile FILE]

The real server with an engine that computes nothing and 16 streaming chat clients in another process. CPU times are the
threads' own, so other processes do not count; the engine thread's part is scheduling, sampling by script, stop strings,
the parser and the events, the event loop's part JSON, framing, system calls. Target: 25 us a token for both together.

With `--profile` one more round writes both threads' profiles (the profiler itself costs about as much again).

`--idle N` then opens so many keep-alive connections that ask nothing: what the server spends on them in ten seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import json
import pstats
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvloop

from ds4.engine.types import EngineConfig
from ds4.server.app import App
from ds4.server.config import ServerConfig
from ds4.server.process import settle
from ds4.testing import ScriptedEngine

TARGET = 25.0

CLIENT = """
import json, selectors, socket, sys
port, streams, tokens = map(int, sys.argv[1:])
for line in sys.stdin:
    body = json.dumps({"stream": True, "max_tokens": tokens, "temperature": 0,
                       "messages": [{"role": "user", "content": "Tell me."}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
    poll = selectors.DefaultSelector()
    tails = {}
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(head.encode() + body)
        poll.register(sock, selectors.EVENT_READ)
        tails[sock] = b""
    got = 0
    while tails:
        for key, _ in poll.select():
            sock = key.fileobj
            data = sock.recv(1 << 16)
            text = tails[sock] + data
            got += text.count(b'"content":"')
            tails[sock] = text[-10:]
            if not data or text.endswith(b"0\\r\\n\\r\\n"):
                poll.unregister(sock)
                tails.pop(sock)
                sock.close()
    print(got, flush=True)
"""

IDLE = """
import socket, sys, time
port, count = map(int, sys.argv[1:])
request = b"GET /health HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n"
socks = []
for _ in range(count):
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(request)
    sock.recv(65536)
    socks.append(sock)
print(len(socks), flush=True)
sys.stdin.read()
"""


def thread_seconds() -> dict[int, float]:
    """CPU seconds of each thread of this process, by its id, in nanosecond resolution."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            continue
    return found


def engine_with_pieces(slots: int) -> ScriptedEngine:
    words = ["The ", "quick ", "brown ", "fox ", "jumps", " over ", "the ", "lazy", " dog", ".\n"]
    # One list of pieces is one answer; a piece is a token.
    return ScriptedEngine(lambda prompt: words * 1000, slots=slots, ctx=16384)


class Profiles:
    """cProfile on the event loop and on the engine thread."""

    def __init__(self, app: App) -> None:
        self.loop = cProfile.Profile()
        self.engine = cProfile.Profile()
        self._app = app

    def start(self) -> None:
        step = self._app._scheduler.plan
        begun = threading.Event()

        def plan(*args: Any, **kwargs: Any) -> Any:
            if not begun.is_set():
                begun.set()
                self.engine.enable()
            return step(*args, **kwargs)

        self._app._scheduler.plan = plan  # type: ignore[method-assign]
        self.loop.enable()

    def text(self) -> str:
        self.loop.disable()
        out = io.StringIO()
        for name, profile in (("event loop", self.loop), ("engine thread", self.engine)):
            out.write(f"==== {name}\n")
            pstats.Stats(profile, stream=out).strip_dirs().sort_stats("tottime").print_stats(25)
        return out.getvalue()


async def run(args: argparse.Namespace) -> dict[str, Any]:
    engine = engine_with_pieces(args.streams)
    app = App(engine, ServerConfig(engine=EngineConfig(ctx=16384, slots=args.streams), port=0, max_output_tokens=8192))
    await app.start()
    settle()
    loop_thread, engine_thread = threading.get_native_id(), app._thread.native_id
    assert engine_thread is not None
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, str(app.port), str(args.streams), str(args.tokens),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert client.stdin and client.stdout
    rows: list[dict[str, float]] = []
    profiles = None
    for i in range(args.rounds + 1 + bool(args.profile)):
        if i > args.rounds:
            profiles = Profiles(app)
            profiles.start()
        before, began = thread_seconds(), time.perf_counter()
        client.stdin.write(b"go\n")
        got = int(await client.stdout.readline() or 0)
        seconds, after = time.perf_counter() - began, thread_seconds()
        if got != args.streams * args.tokens:
            raise SystemExit(f"{got} tokens arrived, expected {args.streams * args.tokens}")
        if 0 < i <= args.rounds:
            rows.append(
                {
                    "loop": (after[loop_thread] - before[loop_thread]) / got * 1e6,
                    "engine": (after[engine_thread] - before[engine_thread]) / got * 1e6,
                    "tokens_per_second": got / seconds,
                }
            )
    client.stdin.close()
    await client.wait()
    result: dict[str, Any] = {"streams": args.streams, "tokens": args.tokens, "rounds": rows}
    if profiles is not None:
        args.profile.write_text(profiles.text())
    if args.idle:
        result["idle"] = await idle_cost(app.port, args.idle)
    return result


async def idle_cost(port: int, count: int) -> dict[str, float]:
    """CPU milliseconds per second of the whole process, without and with `count` idle connections."""

    async def spent(seconds: float = 10.0) -> float:
        before = time.process_time()
        await asyncio.sleep(seconds)
        return (time.process_time() - before) / seconds * 1e3

    without = await spent()
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", IDLE, str(port), str(count), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdin and client.stdout
    await client.stdout.readline()
    with_them = await spent()
    client.stdin.close()
    await client.wait()
    return {"connections": count, "without": without, "with": with_them}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", type=Path, help="write the profiles of one more round there")
    parser.add_argument("--idle", type=int, default=0, help="idle connections to measure afterwards")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = uvloop.run(run(args))
    loop, engine, rate = (
        statistics.median(row[name] for row in result["rounds"]) for name in ("loop", "engine", "tokens_per_second")
    )
    print(f"{args.streams} streams of {args.tokens} tokens, median of {args.rounds} rounds: {rate:.0f} tokens/s in all")
    print(f"CPU us a token: event loop {loop:.1f}, engine thread {engine:.1f}, together {loop + engine:.1f}", end="")
    print(f" (target {TARGET:g})")
    if idle := result.get("idle"):
        print(
            f"CPU ms a second: {idle['without']:.2f} without, {idle['with']:.2f} with {idle['connections']} idle"
            " connections"
        )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
