"""HTTP/1.1 on a socket: requests in, responses and streams out, with limits, deadlines and back-pressure.

It knows no JSON and no route. From the outside in: `HttpServer` (here) binds, counts connections, sweeps all
deadlines with one timer and shuts down; `connection.Connection` is one socket; `response.Responder` and
`response.Stream` are one response; `flow.FlowControl` is back-pressure.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from ds4.server.arrivals import Arrivals
from ds4.server.connection import Connection
from ds4.server.hosts import HostPolicy
from ds4.server.message import CORS_HEADERS, Limits, Observer, Refusal, Request, header_lines
from ds4.server.response import Responder, Stream

__all__ = [
    "ErrorBody",
    "Gate",
    "Handler",
    "HttpServer",
    "Limits",
    "Observer",
    "Refusal",
    "Request",
    "Responder",
    "Stream",
    "default_error_body",
]

log = logging.getLogger("ds4.server.http")

Handler = Callable[["Request", "Responder"], "Awaitable[None] | None"]
"""Answers a request. A plain function answers at once, or keeps the Responder for later; a coroutine gets a task."""

Gate = Callable[[Request], "Refusal | None"]
ErrorBody = Callable[[int, str, str], bytes]
"""(status, message, path) -> JSON body: the server's own errors in the dialect that the path belongs to."""


def default_error_body(status: int, message: str, path: str) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return json.dumps({"error": error}, ensure_ascii=False).encode() + b"\n"


class HttpServer:
    """Listens and serves. All methods belong to the event loop's thread.

    `gate` is asked when a request's head is complete, before its body is read and before `100 Continue`.
    `allowed_hosts` are the names beside the bound one that a loopback server answers to.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        limits: Limits | None = None,
        cors: bool = False,
        allowed_hosts: Sequence[str] = (),
        gate: Gate | None = None,
        error_body: ErrorBody = default_error_body,
        observers: Sequence[Observer] = (),
        arrivals: Arrivals | None = None,
    ) -> None:
        self.handler = handler
        self.limits = limits or Limits()
        self.gate = gate
        self.error_body = error_body
        self.observers = tuple(observers)
        self.arrivals = arrivals or Arrivals()
        """Is told of connections and requests that have not come to their handler's work."""
        self.cors = cors
        self.host = ""
        self.port = 0
        self.shutting_down = False
        self.body_bytes = 0
        """Bytes of bodies held by all connections, see `Limits.body_total`."""
        self.policy = HostPolicy("127.0.0.1", allowed_hosts, cors=cors)
        self._allowed_hosts = tuple(allowed_hosts)
        self._connections: set[Connection] = set()
        self._max_connections = self.limits.connections
        self._server: asyncio.AbstractServer | None = None
        self._loop: asyncio.AbstractEventLoop
        self._sweeper: asyncio.TimerHandle | None = None
        self._orphans: dict[asyncio.Task[None], float] = {}
        self._empty: asyncio.Future[None] | None = None
        self._heads: dict[tuple[int, str, bool], tuple[bytes, bytes]] = {}
        timeouts = (
            self.limits.head_timeout,
            self.limits.read_timeout,
            self.limits.idle_timeout,
            self.limits.stall_timeout,
            self.limits.linger,
        )
        self._sweep_interval = min(1.0, max(0.01, min(timeouts) / 4))

    async def start(self, host: str = "127.0.0.1", port: int = 8000) -> None:
        """Binds and accepts; `host` and `port` then hold the bound address. Raises OSError (in use, no such host)."""
        self._loop = asyncio.get_running_loop()
        sock = await self._bind(host, port)
        self.host, self.port = sock.getsockname()[:2]
        self.policy = HostPolicy(self.host, (host, *self._allowed_hosts), cors=self.cors)
        self._max_connections = _connection_limit(self.limits.connections)
        self._server = await self._loop.create_server(
            lambda: Connection(self, self._loop), sock=sock, backlog=self.limits.backlog
        )

    async def _bind(self, host: str, port: int) -> socket.socket:
        # `localhost` may resolve to ::1 first, which clients that were told 127.0.0.1 do not try.
        name = "127.0.0.1" if host == "localhost" else host.strip("[]")
        found = await self._loop.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted sockets inherit these: a peer that vanished without a FIN is found by the kernel.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if name == "::" else 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
        return sock

    def begin_shutdown(self) -> None:
        """Accepts nothing more and closes idle connections. Running requests go on; each response is the last one."""
        self.shutting_down = True
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.close_if_idle()

    async def wait_closed(self, timeout: float | None = None) -> bool:
        """After `begin_shutdown`: waits until all connections have ended; those that have not in time are cut."""
        clean = True
        if self._connections:
            self._empty = self._loop.create_future()
            try:
                await asyncio.wait_for(self._empty, timeout)
            except asyncio.TimeoutError:
                clean = False
                for connection in tuple(self._connections):
                    connection.abort("the server stops")
        for task in tuple(self._orphans):
            task.cancel()
        if self._orphans:
            await asyncio.wait(tuple(self._orphans), timeout=1.0)
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        return clean

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    # Called by the connections

    def opened(self, connection: Connection) -> bool:
        """Registers a connection. At the limit an idle one makes room; False when all are busy."""
        if len(self._connections) >= self._max_connections:
            idle = [c for c in self._connections if c.idle_since]
            if not idle:
                return False
            min(idle, key=lambda c: c.idle_since).close_if_idle()
        self._connections.add(connection)
        self.arrivals.expect(connection)
        self._count()
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._sweep_interval, self._sweep)
        return True

    def closed(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self.arrivals.settled(connection)
        self._count()
        if not self._connections and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    def _count(self) -> None:
        for observer in self.observers:
            try:
                observer.connections(len(self._connections))
            except Exception:
                log.exception("an observer failed")

    def answered(self, request: Request, status: int, reason: str) -> None:
        """Tells the observers of a response. They are not in its way: what they raise is logged."""
        if not self.observers:
            return
        method = "HEAD" if request.head else request.method
        seconds = time.monotonic() - request.received
        for observer in self.observers:
            try:
                observer.response(method, request.raw_path, status, seconds, request.peer, reason)
            except Exception:
                log.exception("an observer failed")

    def ask_gate(self, request: Request) -> Refusal | None:
        if self.gate is None:
            return None
        try:
            return self.gate(request)
        except Exception:
            # A broken gate is a closed one.
            log.exception("the gate failed")
            return Refusal(500, "internal server error")

    def error(self, status: int, message: str, path: str) -> bytes:
        """The body of an error that the HTTP layer itself reports."""
        try:
            return self.error_body(status, message, path)
        except Exception:
            log.exception("the error body failed")
            return default_error_body(status, message, path)

    def orphaned(self, task: asyncio.Task[None]) -> None:
        """The client of this handler is gone: it may clean up, but not for ever."""
        self._orphans[task] = time.monotonic() + self.limits.orphan
        task.add_done_callback(lambda done: self._orphans.pop(done, None))
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._sweep_interval, self._sweep)

    def head(self, status: int, content_type: str, close: bool) -> tuple[bytes, bytes]:
        """The constant parts of a sized response's head, around the content length."""
        key = (status, content_type, close)
        found = self._heads.get(key)
        if found is None:
            try:
                phrase = HTTPStatus(status).phrase
            except ValueError:
                phrase = ""
            headers = [("Content-Type", content_type)] if content_type else []
            tail = header_lines([*headers, *(CORS_HEADERS if self.cors else ())])
            tail += b"Connection: close\r\n" if close else b""
            found = f"HTTP/1.1 {status} {phrase}\r\n".encode(), tail
            if len(self._heads) < 256:
                self._heads[key] = found
        return found

    def _sweep(self) -> None:
        now = time.monotonic()
        for connection in tuple(self._connections):
            connection.check_deadlines(now)
        for task, deadline in tuple(self._orphans.items()):
            if now > deadline:
                task.cancel()
        # Without connections there is nothing to watch and no timer.
        again = self._connections or self._orphans
        self._sweeper = self._loop.call_later(self._sweep_interval, self._sweep) if again else None


def _connection_limit(wanted: int) -> int:
    """As many connections as the process may have descriptors for, after asking the system for enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reserve = 128
    needed = wanted + reserve
    if soft != resource.RLIM_INFINITY and soft < needed:
        more = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
        except (OSError, ValueError):
            log.warning("the limit of %d open files leaves room for %d connections", soft, soft - reserve)
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - reserve))
