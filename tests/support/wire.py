"""Real sockets for tests: a server on a free port, and a client that speaks bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvloop

from ds4.server.http import HttpServer, Limits, Request, Responder

T = TypeVar("T")

FAST = Limits(
    body=1 << 20,
    head_timeout=0.4,
    read_timeout=0.2,
    request_timeout=0.8,
    idle_timeout=5.0,
    stall_timeout=0.3,
    linger=0.3,
    orphan=0.3,
)
"""Deadlines short enough for tests, long enough for a busy machine."""


def run(main: Callable[[], Awaitable[T]], timeout: float = 30.0) -> T:
    """Runs a test's coroutine on uvloop, which is what the server runs on."""

    async def limited() -> T:
        return await asyncio.wait_for(main(), timeout)

    return uvloop.run(limited())


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    trailing_eof: bool = False


@dataclass
class Seen:
    """An observer that remembers."""

    responses: list[tuple[str, str, int, str]] = field(default_factory=list)
    open_now: int = 0
    seconds: list[float] = field(default_factory=list)

    def connections(self, open_now: int) -> None:
        self.open_now = open_now

    def response(self, method: str, path: str, status: int, seconds: float, peer: str, reason: str) -> None:
        self.responses.append((method, path, status, reason))
        self.seconds.append(seconds)


class Client:
    """One connection. `send` writes bytes, `reply` reads one response by its own framing (independent of ours)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes | str) -> None:
        self.writer.write(data.encode("latin-1") if isinstance(data, str) else data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        lines = raw.decode("latin-1").split("\r\n")
        match = re.fullmatch(r"HTTP/1\.1 (\d{3}) [\w \-']*", lines[0])
        assert match, lines[0]
        headers: dict[str, str] = {}
        for line in lines[1:-2]:
            name, _, value = line.partition(": ")
            assert name.lower() not in headers, f"{name} twice"
            headers[name.lower()] = value
        return int(match[1]), headers

    async def chunk(self) -> bytes:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def reply(self, method: str = "GET") -> Reply:
        status, headers = await self.head()
        while status == 100:
            status, headers = await self.head()
        body = b""
        if method == "HEAD" or status == 204:
            pass
        elif headers.get("transfer-encoding") == "chunked":
            while chunk := await self.chunk():
                body += chunk
        elif "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = await self.reader.read()
        return Reply(status, headers, body)

    async def ask(self, data: bytes | str, method: str = "GET") -> Reply:
        await self.send(data)
        return await self.reply(method)

    async def at_eof(self, timeout: float = 5.0) -> bool:
        """True when the server closes (cleanly or by reset) within `timeout` and sends nothing more."""
        try:
            return await asyncio.wait_for(self.reader.read(1), timeout) == b""
        except asyncio.TimeoutError:
            return False
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()


class Wire:
    """A running server and ways to reach it."""

    def __init__(self, server: HttpServer, seen: Seen) -> None:
        self.server = server
        self.seen = seen
        self.clients: list[Client] = []

    async def connect(self, limit: int = 1 << 20) -> Client:
        reader, writer = await asyncio.open_connection(self.server.host, self.server.port, limit=limit)
        client = Client(reader, writer)
        self.clients.append(client)
        return client

    async def ask(self, data: bytes | str, method: str = "GET") -> Reply:
        """One request on a connection of its own."""
        client = await self.connect()
        reply = await client.ask(data, method)
        await client.close()
        return reply


def get(path: str = "/", *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def post(body: bytes, path: str = "/echo", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


async def echo(request: Request, responder: Responder) -> None:
    """Answers with what the server understood."""
    text = f"{request.method} {request.path} ?{request.query} {len(request.body)} ".encode() + request.body[:64]
    responder.send(200, text, "text/plain")


@asynccontextmanager
async def serving(
    handler: Any = echo, *, limits: Limits = FAST, host: str = "127.0.0.1", **options: Any
) -> AsyncIterator[Wire]:
    seen = Seen()
    server = HttpServer(handler, limits=limits, observers=(seen,), **options)
    await server.start(host, 0)
    wire = Wire(server, seen)
    try:
        yield wire
    finally:
        for client in wire.clients:
            client.writer.close()
        server.begin_shutdown()
        await server.wait_closed(1.0)
        assert server.body_bytes == 0, "a body is still accounted for"
        assert server.open_connections == 0


async def eventually(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    """Waits until `condition` holds; fails after `timeout`."""
    deadline = asyncio.get_running_loop().time() + timeout
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition never came true"
        await asyncio.sleep(0.005)
