#!/usr/bin/env python3
"""A tool-heavy chat request of 1 MB on its way from the socket to the engine's queue.

    python -m bench.request_path [--rounds 15] [--size medium] [--model FILE] [--syntax NAME] [--json FILE]

A client in a process of its own sends the request of `bench.corpus` over loopback to the real server; in place of the
engine stands one that refuses the finished job, so that only the way to it is measured. Times run from the read that
brought the first byte:

    rendered   the prompt is drawn, as text and special tokens          (target: 4 ms for a request never seen)
    queued     it is encoded and handed to the scheduler                (target: 2 ms when only the last turn is new)

`new`: no message was seen before. `grown`: the request of before and one more turn, as every turn of an agent is.
Medians of wall time, and of CPU time of the server's process, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from bench import corpus
from ds4.engine.demo import demo_model_path
from ds4.engine.model_file import open_model_file
from ds4.engine.types import EngineConfig
from ds4.errors import ShuttingDown
from ds4.server.app import App
from ds4.server.config import ServerConfig
from ds4.server.connection import Connection
from ds4.server.process import settle
from ds4.testing import ScriptedEngine

CONTEXT = 1 << 20
_TURNS = 4
TARGETS = {("new", "rendered"): 4.0, ("grown", "queued"): 2.0}


class Stopwatch:
    """Wall and CPU milliseconds since the first byte of the request at hand."""

    def __init__(self) -> None:
        self.begun = (0.0, 0.0)
        self.laps: dict[str, tuple[float, float]] = {}

    def begin(self) -> None:
        self.begun = time.perf_counter(), time.process_time()
        self.laps = {}

    def lap(self, name: str) -> None:
        wall, cpu = self.begun
        self.laps[name] = (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3


def measured(app: App, stopwatch: Stopwatch) -> None:
    """Puts the stopwatch on the way of a request, and an end behind it."""
    service = app._service
    body, render = service.body, service.preparer.renderer.render

    def first(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if name not in stopwatch.laps:
                stopwatch.lap(name)
            return result

        return call

    def refuse(*args: object, **kwargs: object) -> None:
        stopwatch.lap("queued")
        raise ShuttingDown("measured")

    service.body = first("parsed", body)  # type: ignore[method-assign]
    service.preparer.renderer.render = first("rendered", render)  # type: ignore[method-assign]
    app._scheduler.submit = refuse  # type: ignore[assignment,method-assign]


def requests(rounds: int, size: str) -> list[tuple[str, bytes]]:
    """Conversations that nobody saw before, each followed by `_TURNS` requests that have grown by one turn."""
    whole = json.loads(corpus.body(size))
    out = []
    for i in range(rounds):
        messages = [{**m, "content": f"{i} {m['content']}"} if m.get("content") else m for m in whole["messages"]]
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            call["function"] = {**call["function"], "arguments": call["function"]["arguments"][:-1] + f', "n": {i}}}'}
        for turn in range(1 + _TURNS):
            kind = "grown" if turn else "new"
            out.append((kind, json.dumps({**whole, "messages": messages}, ensure_ascii=False).encode()))
            messages = [
                *messages,
                {"role": "assistant", "content": f"Done, {turn}."},
                {"role": "user", "content": f"And now question {turn}?"},
            ]
    return out


CLIENT = """
import socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
sock = socket.create_connection(("127.0.0.1", port))
read = sys.stdin.buffer
for _ in range(count):
    body = read.read(int(read.readline()))
    head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
    sock.sendall(head.encode() + body)
    answer = b""
    while b"measured" not in answer:
        data = sock.recv(65536)
        if not data:
            sys.exit("the server hung up: " + answer.decode())
        answer += data
        if len(answer) >= 12 and answer[9:12] != b"503":
            sys.exit("the server answered " + answer.decode(errors="replace"))
    print(flush=True)
"""


async def run(args: argparse.Namespace) -> dict[str, dict[str, list[tuple[float, float]]]]:
    file = open_model_file(args.model or demo_model_path())
    tokenizer = file.tokenizer()
    # Another syntax works where the vocabulary has the tokens of its roles.
    args.syntax = args.syntax or file.syntax
    engine = ScriptedEngine(slots=1, ctx=CONTEXT, syntax=args.syntax, tokenizer=tokenizer)
    app = App(engine, ServerConfig(engine=EngineConfig(ctx=CONTEXT, slots=1), port=0))
    await app.start()
    settle()
    stopwatch = Stopwatch()
    measured(app, stopwatch)
    begin = Connection.on_message_begin

    def on_message_begin(self: Connection) -> None:
        stopwatch.begin()
        begin(self)

    Connection.on_message_begin = on_message_begin  # type: ignore[method-assign]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {"new": {}, "grown": {}}
    sent = requests(args.rounds + 1, args.size)
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, str(app.port), str(len(sent)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdin and client.stdout
    for i, (kind, body) in enumerate(sent):
        client.stdin.write(b"%d\n" % len(body) + body)
        await client.stdin.drain()
        if not await client.stdout.readline():
            raise SystemExit("the client failed")
        if i > _TURNS:
            for name, lap in stopwatch.laps.items():
                found[kind].setdefault(name, []).append(lap)
    await client.wait()
    found["size"] = {"bytes": [(float(len(body)), 0.0) for _, body in sent[-1:]]}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", choices=corpus.RESULT_CHARS, default="medium", help="of the request (default: 1 MB)")
    parser.add_argument("--syntax", help="prompt syntax (default: the model's)")
    parser.add_argument("--model", type=Path, help="model file with the vocabulary (default: the demo model)")
    parser.add_argument("--json", type=Path, help="write all laps there")
    args = parser.parse_args()
    found = uvloop.run(run(args))
    size = found.pop("size")["bytes"][0][0]
    print(f"{size / 1e6:.2f} MB, syntax {args.syntax}, ms from the first byte, median of {args.rounds}")
    print(f"{'request':8} {'until':9} {'wall':>8} {'CPU':>8}   target")
    for kind, laps in found.items():
        for name, times in laps.items():
            wall, cpu = (statistics.median(t[i] for t in times) for i in (0, 1))
            target = TARGETS.get((kind, name))
            print(f"{kind:8} {name:9} {wall:8.2f} {cpu:8.2f}   {'' if target is None else f'{target:g}'}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
