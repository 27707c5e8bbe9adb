#!/usr/bin/env python3
"""HTTP and event-stream cost of the server layer, beside uvicorn and Starlette on the same loop and parser.

    python bench/http_server.py [--runs 5] [--seconds 2] [--connections 16] [--json FILE] [--check]

Each server runs in a process of its own on one core, the client on another; runs alternate between the servers.
The figure to compare is requests (events) per CPU-second of the server, from the scheduler's clock: it holds on a
machine that others use too. The wall-clock figure stands beside it.

Cases: POST of a 1 KiB JSON body, answered with its length; event streams of 258-byte events to 16 and to 256
clients at once, one event per stream and turn of the loop, as a batch decoder makes them. Every server runs one
coroutine per request. In `ds4` it waits for the end while the producer writes to all streams, as `ds4-server` does
(`ds4.server.api.delivery`) and ASGI has no way to; in `ds4 (awaiting)` it writes each event itself, as under ASGI.
`uvicorn` is a bare ASGI callable under uvicorn, `starlette` the same routes in Starlette under uvicorn. `--check`
exits with 1 when a target (against Starlette) is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop

KINDS = ("ds4", "ds4 (awaiting)", "uvicorn", "starlette")
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 1024}]}).encode()[:1024]
ANSWER = b'{"n":%d}' % len(BODY)
EVENT = json.dumps(
    {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk", "created": 1790000000,
        "model": "deepseek-v4-flash", "system_fingerprint": "fp_0",
        "choices": [{"index": 0, "delta": {"content": " token"}, "finish_reason": None, "logprobs": None}],
    },
    separators=(",", ":"),
).encode()  # fmt: skip
EVENT_END = EVENT[-18:] + b"\n\n"
TARGETS = {"POST 1 KiB": 2.5, "SSE x16": 1.4, "SSE x256": 1.4}


class Gate:
    """Opens when as many streams wait as the client opens, so that all are pushed at the same time."""

    def __init__(self) -> None:
        self._waiting = 0
        self._event = asyncio.Event()

    async def wait(self, wanted: int) -> None:
        self._waiting += 1
        event = self._event
        if self._waiting >= wanted:
            self._waiting, self._event = 0, asyncio.Event()
            event.set()
        await event.wait()


def numbers(query: str) -> tuple[int, int]:
    """`events=N&streams=C`"""
    fields = dict(part.split("=") for part in query.split("&"))
    return int(fields["events"]), int(fields["streams"])


# ---- the servers


def serve_ds4(port: int, awaiting: bool) -> None:
    from ds4.server.http import HttpServer, Request, Responder
    from ds4.server.sse import EventStream

    gate: Gate

    waiting: list[tuple[EventStream, asyncio.Future[None]]] = []
    pushing: list[asyncio.Task[None]] = []

    async def push(streams: list[tuple[EventStream, asyncio.Future[None]]], count: int) -> None:
        for _ in range(count):
            for events, _ in streams:
                events.send(EVENT)
                # Else it would run ahead of the client, and what the socket does not take is cheaper.
                if events.paused:
                    await events.drain()
            await asyncio.sleep(0)
        for _, end in streams:
            end.set_result(None)

    async def handler(request: Request, responder: Responder) -> None:
        if request.path == "/len":
            responder.send(200, b'{"n":%d}' % len(request.body))
            return
        count, wanted = numbers(request.query)
        if awaiting:
            await gate.wait(wanted)
            events = EventStream.start(responder)
            for _ in range(count):
                events.send(EVENT)
                await events.drain()
                await asyncio.sleep(0)
        else:
            events = EventStream.start(responder)
            end = asyncio.get_running_loop().create_future()
            waiting.append((events, end))
            if len(waiting) == wanted:
                streams, waiting[:] = list(waiting), []
                pushing.append(asyncio.get_running_loop().create_task(push(streams, count)))
            await end
        events.done()

    async def main() -> None:
        nonlocal gate
        gate = Gate()
        await HttpServer(handler).start("127.0.0.1", port)
        await asyncio.Event().wait()

    uvloop.run(main())


def bare_asgi() -> Any:
    gates: list[Gate] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/len":
            body = b""
            while True:
                message = await receive()
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            answer = b'{"n":%d}' % len(body)
            length = (b"content-length", b"%d" % len(answer))
            headers = [(b"content-type", b"application/json"), length]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": answer})
            return
        count, streams = numbers(scope["query_string"].decode())
        if not gates:
            gates.append(Gate())
        await gates[0].wait(streams)
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(count):
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % EVENT, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return application


def starlette_routes() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    gates: list[Gate] = []

    async def length(request: Request) -> Response:
        return Response(b'{"n":%d}' % len(await request.body()), media_type="application/json")

    async def stream(request: Request) -> StreamingResponse:
        count, streams = numbers(request.url.query)
        if not gates:
            gates.append(Gate())

        async def events() -> AsyncIterator[bytes]:
            await gates[0].wait(streams)
            for _ in range(count):
                yield b"data: %b\n\n" % EVENT
                await asyncio.sleep(0)
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    return Starlette(routes=[Route("/len", length, methods=["POST"]), Route("/sse", stream)])


def serve_asgi(port: int, application: Any) -> None:
    import uvicorn

    uvicorn.run(
        application, host="127.0.0.1", port=port, loop="uvloop", http="httptools", lifespan="off", access_log=False,
        log_level="critical", server_header=False, date_header=False, backlog=2048,
    )  # fmt: skip


def serve(kind: str, port: int) -> None:
    if kind.startswith("ds4"):
        serve_ds4(port, kind != "ds4")
    else:
        serve_asgi(port, bare_asgi() if kind == "uvicorn" else starlette_routes())


# ---- the client


class Poster(asyncio.Protocol):
    """A closed loop of requests on one connection."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.answers = 0
        self.bad = 0
        self.stop = False
        self.tail = b""
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.tail += data
        if not self.tail.endswith(ANSWER):
            return
        self.bad += not self.tail.startswith(b"HTTP/1.1 200 ")
        self.tail = b""
        self.answers += 1
        if not self.stop:
            self.transport.write(self.request)


def request_head(first: str, length: int | None = None) -> bytes:
    lines = [first + " HTTP/1.1", "Host: 127.0.0.1", "User-Agent: bench", "Accept: */*"]
    if length is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def run_posts(port: int, connections: int, seconds: float) -> tuple[int, float]:
    """(answers, seconds)"""
    loop = asyncio.get_running_loop()
    request = request_head("POST /len", len(BODY)) + BODY
    started = time.perf_counter()
    posters = [
        (await loop.create_connection(lambda: Poster(request), "127.0.0.1", port))[1] for _ in range(connections)
    ]
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - started
    answers = sum(p.answers for p in posters)
    assert not any(p.bad for p in posters) and answers, "bad answers"
    for poster in posters:
        poster.stop = True
        poster.transport.close()
    return answers, elapsed


def run_streams(port: int, streams: int, events: int) -> tuple[int, float]:
    """(events, seconds)

    Reads in gulps, a millisecond apart: the client is never what a server waits for, so that each server is measured
    in the same state, with room in every socket.
    """
    request = request_head(f"GET /sse?events={events}&streams={streams}")
    poller = select.epoll()
    socks: dict[int, socket.socket] = {}
    tails: dict[int, bytes] = {}
    started = time.perf_counter()
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request)
        sock.setblocking(False)
        poller.register(sock, select.EPOLLIN)
        socks[sock.fileno()] = sock
        tails[sock.fileno()] = b""
    got = 0
    while socks:
        for fd, _ in poller.poll(10):
            data = socks[fd].recv(1 << 20)
            # A read may end within the mark; a tail shorter than the mark counts nothing twice.
            text = tails[fd] + data
            got += text.count(EVENT_END)
            tails[fd] = text[1 - len(EVENT_END) :]
            if not data or text.endswith(b"0\r\n\r\n"):
                poller.unregister(fd)
                socks.pop(fd).close()
        time.sleep(0.001)
    elapsed = time.perf_counter() - started
    poller.close()
    assert got == streams * events, f"lost {streams * events - got} events"
    return got, elapsed


# ---- measuring


def cpu_seconds(pid: int) -> float:
    """CPU time of a process with all its threads, in nanosecond resolution."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue
    return total / 1e9


def pin(pid: int, core: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(pid, {cores[core % len(cores)]})


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start(kind: str) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    process = subprocess.Popen([sys.executable, __file__, "--serve", kind, "--port", str(port)])
    pin(process.pid, 0)
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return process, port
        except OSError:
            time.sleep(0.05)
    process.kill()
    raise RuntimeError(f"{kind} did not start")


def measure(case: str, port: int, pid: int, args: argparse.Namespace) -> dict[str, float]:
    before = cpu_seconds(pid)
    if case.startswith("POST"):
        count, elapsed = uvloop.run(run_posts(port, args.connections, args.seconds))
    else:
        streams = int(case.split("x")[1])
        count, elapsed = run_streams(port, streams, args.events // streams)
    used = cpu_seconds(pid) - before
    return {"wall": count / elapsed, "cpu": count / used}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a POST run")
    parser.add_argument("--events", type=int, default=100_000, help="events of an SSE run, all streams together")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write all runs there")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.port)
        return 0

    servers = {kind: start(kind) for kind in KINDS}
    pin(0, 1)
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    try:
        for case in TARGETS:
            rows = results[case] = {kind: [] for kind in KINDS}
            for run in range(args.runs + 1):
                for kind, (process, port) in servers.items():
                    row = measure(case, port, process.pid, args)
                    # The first round warms up.
                    if run:
                        rows[kind].append(row)
    finally:
        for process, _ in servers.values():
            process.terminate()
        for process, _ in servers.values():
            process.wait(10)

    missed = False
    print(
        f"{'case':12} {'server':16} {'per CPU-second':>24} {'per second':>12} {'vs starlette':>13} {'vs uvicorn':>11}"
    )
    for case, target in TARGETS.items():
        cpu = {kind: statistics.median(r["cpu"] for r in results[case][kind]) for kind in KINDS}
        for kind in KINDS:
            rows = results[case][kind]
            low, high = min(r["cpu"] for r in rows), max(r["cpu"] for r in rows)
            wall = statistics.median(r["wall"] for r in rows)
            ratio = cpu[kind] / cpu["starlette"]
            verdict = ""
            if kind == "ds4":
                missed |= ratio < target
                verdict = f"  target {target}: {'met' if ratio >= target else 'MISSED'}"
            spread = f"{cpu[kind]:.0f} [{low:.0f}-{high:.0f}]"
            peers = f"{ratio:11.2f}x {cpu[kind] / cpu['uvicorn']:9.2f}x"
            print(f"{case:12} {kind:16} {spread:>24} {wall:12.0f} {peers}{verdict}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if missed and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
