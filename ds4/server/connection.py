"""One socket: bytes to requests, in order, and what a slow, silent or vanished peer may cost.

The syntax of heads and chunks is checked by httptools (llhttp, strict). Sources: RFC 9112, RFC 9110.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING
from urllib.parse import unquote

import httptools

from ds4.errors import ClientDisconnected
from ds4.server import coding
from ds4.server.flow import FlowControl
from ds4.server.message import Refusal, Request
from ds4.server.response import Responder

if TYPE_CHECKING:
    from ds4.server.http import HttpServer

log = logging.getLogger("ds4.server.http")

_PIECE = 64 << 10


class _Refused(Exception):
    """Leaves the parser from inside a callback; the refusal itself is in `Connection._refusal`."""


_NAMES: dict[bytes, str] = {}


def _name(raw: bytes) -> str:
    """A header name in lower case; the few that occur all the time are decoded once."""
    name = _NAMES.get(raw)
    if name is None:
        name = raw.decode("latin-1").lower()
        if len(_NAMES) < 512 and len(raw) < 64:
            _NAMES[raw] = name
    return name


class Connection(asyncio.Protocol):
    """One socket.

    Bytes are parsed only while no request is being answered; what comes in meanwhile is held (up to a limit) and not
    left in the kernel, so that the FIN behind it is seen. Beyond the limit it is dropped, and the connection ends
    after the running response.
    """

    __slots__ = (
        "_active",
        "_body",
        "_body_size",
        "_charged",
        "_closing",
        "_deadline",
        "_deaf",
        "_declined",
        "_flow",
        "_gone",
        "_head_fed",
        "_head_size",
        "_headers",
        "_held",
        "_in_head",
        "_last_read",
        "_loop",
        "_owe_continue",
        "_parser",
        "_peer",
        "_pumping",
        "_queue",
        "_refusal",
        "_replaying",
        "_request",
        "_server",
        "_started",
        "_task",
        "_transport",
        "_url",
        "idle_since",
    )

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._transport: asyncio.Transport
        self._flow: FlowControl
        self._parser = httptools.HttpRequestParser(self)
        self._peer = ""
        self._queue: deque[tuple[Request | None, Refusal | None]] = deque()
        self._held = bytearray()
        self._active: Responder | None = None
        self._task: asyncio.Task[None] | None = None
        self._pumping = False
        self._gone = False
        self._deaf = False
        self._closing = False
        self._deadline = 0.0
        self._charged = 0
        self._last_read = 0.0
        self._replaying = False
        self._reset()
        self.idle_since = 0.0
        """`time.monotonic()` since when no request is in progress; 0 while one is."""

    def _reset(self) -> None:
        """Forgets the request being read."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_size = 0
        self._head_fed = 0
        self._in_head = False
        self._request: Request | None = None
        self._refusal: Refusal | None = None
        self._declined = False
        self._body: bytes | bytearray = b""
        self._body_size = 0
        self._owe_continue = False
        self._started = 0.0

    # Protocol interface, called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self._flow = FlowControl(self._transport)
        self._transport.set_write_buffer_limits(high=self._server.limits.high_water)
        peer = transport.get_extra_info("peername")
        self._peer = f"{peer[0]}:{peer[1]}" if peer else "-"
        self.idle_since = time.monotonic()
        if not self._server.opened(self):
            self._deaf = True
            self._queue.append((None, Refusal(503, "too many connections", (("Retry-After", "1"),))))
            self._pump()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._last_read = time.monotonic()
        if self._active is None and not self._queue and not self._held:
            self._parse(data)
            self._pump()
        elif len(self._held) + len(data) <= self._server.limits.pipelined:
            self._held += data
        else:
            self._held.clear()
            self._deaf = True

    def eof_received(self) -> bool:
        self._lose()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose()
        self._server.closed(self)

    def pause_writing(self) -> None:
        self._flow.pause()

    def resume_writing(self) -> None:
        self._flow.resume()
        self._pump()

    # Parser callbacks

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        self._reset()
        self._in_head = True
        self._started = self._last_read
        self.idle_since = 0.0

    def on_url(self, url: bytes) -> None:
        if self._replaying:
            return
        self._url += url
        self._count_head(len(url))
        if len(self._url) > self._server.limits.target:
            self._refuse(414, f"the request target is longer than {self._server.limits.target} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._replaying:
            return
        self._count_head(len(name) + len(value) + 4)
        if self._in_head:
            self._headers.append((name, value))
            if len(self._headers) > self._server.limits.headers:
                self._refuse(431, f"more than {self._server.limits.headers} header fields")

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        self._in_head = False
        self._request = request = self._build_request()
        server = self._server
        headers = request.headers
        length = int(headers.get("content-length", "0"))
        chunked = "transfer-encoding" in headers
        refusal = None
        if length > server.limits.body:
            refusal = Refusal(413, f"the body of {length} bytes is larger than {server.limits.body}")
        elif chunked and (request.version == "1.0" or headers["transfer-encoding"].lower() != "chunked"):
            # RFC 9112 section 6.1: a coding that is not understood is 501; HTTP/1.0 has none.
            status = 400 if request.version == "1.0" else 501
            refusal = Refusal(status, "bad HTTP request: unsupported Transfer-Encoding")
        elif request.method == "CONNECT":
            refusal = Refusal(405, "CONNECT is not supported", (("Allow", "GET, HEAD, POST, OPTIONS"),))
        elif server.shutting_down:
            refusal = Refusal(503, "server shutting down", (("Retry-After", "5"),))
        elif headers.get("expect", "100-continue").lower() != "100-continue":
            refusal = Refusal(417, "the only supported expectation is 100-continue")
        elif request.method != "OPTIONS":
            refusal = self._check_coding(headers.get("content-encoding", ""))
            if refusal is None:
                refusal = server.ask_gate(request)
        if refusal is not None and (length or chunked or request.method == "CONNECT"):
            raise self._refused(refusal)
        self._owe_continue = bool(length or chunked) and "expect" in headers and request.version == "1.1"
        self._declined = bool(length or chunked) and bool(self._parser.should_upgrade())
        self._refusal = refusal

    def on_body(self, data: bytes) -> None:
        self._owe_continue = False
        size = self._body_size = self._body_size + len(data)
        server = self._server
        if size > server.limits.body:
            self._refuse(413, f"the body is larger than {server.limits.body} bytes")
        self._charge(len(data))
        # Pieces of a byte or two would cost a hundred times their size as a list of objects.
        if size == len(data):
            self._body = data
        elif isinstance(self._body, bytearray):
            self._body += data
        else:
            self._body = bytearray(self._body)
            self._body += data

    def on_message_complete(self) -> None:
        request = self._request
        assert request is not None
        if self._declined:
            return
        request.body = bytes(self._body)
        request.received = self._last_read
        self._queue.append((request, self._refusal))
        self._deaf = not request.keep_alive
        self._reset()

    # Called by the parser callbacks

    def _refused(self, refusal: Refusal) -> _Refused:
        self._refusal = refusal
        return _Refused(refusal.message)

    def _refuse(self, status: int, message: str) -> None:
        raise self._refused(Refusal(status, message))

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self._server.limits.head:
            self._refuse(431, f"the head is larger than {self._server.limits.head} bytes")

    def _charge(self, size: int) -> None:
        """Counts body bytes that this connection makes the process hold, until its response is finished."""
        self._charged += size
        self._server.body_bytes += size
        if self._server.body_bytes > self._server.limits.body_total:
            raise self._refused(Refusal(503, "too many large requests at once", (("Retry-After", "1"),)))

    def _build_request(self) -> Request:
        parser = self._parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._refuse(505, "only HTTP/1.1 and HTTP/1.0 are supported")
        headers: dict[str, str] = {}
        for raw_name, raw_value in self._headers:
            name = _name(raw_name)
            value = raw_value.decode("latin-1").strip(" \t")
            if name in headers:
                if name == "host":
                    self._refuse(400, "bad HTTP request: more than one Host header")
                value = f"{headers[name]}, {value}"
            headers[name] = value
        target = self._url.decode("latin-1")
        authority = ""
        if not target.startswith("/") and "://" in target:
            # Absolute form (RFC 9112 section 3.2.2): its authority takes the place of Host.
            authority, slash, rest = target.partition("://")[2].partition("/")
            target = slash + rest or "/"
        raw_path, _, query = target.partition("?")
        if len(raw_path) > self._server.limits.path:
            self._refuse(414, f"the path is longer than {self._server.limits.path} bytes")
        method = parser.get_method().decode("latin-1")
        refusal = self._server.policy.refusal(headers, version, authority, preflight=method == "OPTIONS")
        if refusal is not None:
            raise self._refused(Refusal(*refusal))
        head = method == "HEAD"
        path = unquote(raw_path) if "%" in raw_path else raw_path
        keep_alive = bool(parser.should_keep_alive()) and not self._server.shutting_down
        return Request(
            "GET" if head else method, path, query, headers, b"", self._peer, 0.0, raw_path, version, keep_alive, head
        )

    @staticmethod
    def _check_coding(header: str) -> Refusal | None:
        if header:
            try:
                coding.coding_of(header)
            except coding.CodingError as error:
                return Refusal(error.status, str(error), (("Accept-Encoding", coding.ACCEPTED),))
        return None

    # Reading

    def _parse(self, data: bytes | bytearray) -> None:
        """Feeds the parser piece by piece, and stops (holding the rest) once there is a request to answer."""
        view = memoryview(data)
        while view and not self._deaf:
            if self._queue:
                self._held += view
                return
            piece, view = view[:_PIECE], view[_PIECE:]
            body_before = self._body_size
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                # We speak no other protocol: an upgrade is declined by going on (RFC 9110 section 7.8).
                self._resume_parser()
                self._held += piece[upgrade.args[0] :]
                self._held += view
                return
            except httptools.HttpParserCallbackError:
                if self._refusal is None:
                    log.exception("a parser callback failed")
                self._fail(self._refusal or Refusal(500, "internal server error"))
                return
            except httptools.HttpParserError as error:
                if not self._deaf:
                    self._fail(Refusal(400, f"bad HTTP request: {error}"))
                return
            if self._in_head or (self._request is not None and self._body_size == body_before):
                # An unfinished header line, chunk extension or trailer is held by the parser, unseen by us.
                self._head_fed += len(piece)
                if self._head_fed > self._server.limits.head + _PIECE:
                    self._fail(Refusal(431, f"the head is larger than {self._server.limits.head} bytes"))

    def _resume_parser(self) -> None:
        """Goes on after a request that asked for another protocol.

        httptools (as of 0.9) takes such a request to have no body, even where the head announces one. A head that
        only announces the same body puts a new parser in front of it; taken as a request it would be smuggled.
        """
        self._parser = httptools.HttpRequestParser(self)
        request = self._request
        if self._declined and request is not None:
            chunked = "transfer-encoding" in request.headers
            framing = (
                "Transfer-Encoding: chunked" if chunked else f"Content-Length: {request.headers['content-length']}"
            )
            self._replaying = True
            self._parser.feed_data(f"POST / HTTP/1.1\r\n{framing}\r\n\r\n".encode())
            self._replaying = False
            self._declined = False

    def _fail(self, refusal: Refusal) -> None:
        """Ends reading: what follows in the stream cannot be told apart any more. Answered in its turn."""
        request = self._request
        if request is not None:
            request.keep_alive = False
            request.received = self._last_read
        self._reset()
        self._deaf = True
        self._queue.append((request, refusal))

    # Answering, one at a time

    def _pump(self) -> None:
        """Starts what can be started; the loop stands for the recursion of handlers that answer at once."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._active is None and not self._closing and not self._flow.paused:
                if self._queue:
                    self._begin(*self._queue.popleft())
                elif self._held and not self._deaf:
                    held, self._held = self._held, bytearray()
                    self._parse(held)
                else:
                    break
        finally:
            self._pumping = False
        if self._active is None and not self._closing and not self._queue:
            if self._owe_continue:
                self._owe_continue = False
                self._flow.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if self._deaf and not self._flow.paused:
                self._linger()
            elif self._started == 0.0 and not self.idle_since:
                self.idle_since = time.monotonic()
                if self._server.shutting_down:
                    self.close_if_idle()

    def _begin(self, request: Request | None, refusal: Refusal | None) -> None:
        self.idle_since = 0.0
        if request is None:
            request = Request("-", "-", "", {}, b"", self._peer, time.monotonic(), "-", "1.1", False)
        self._active = responder = Responder(self, request)
        if refusal is not None:
            responder.refuse(refusal)
        elif request.method == "OPTIONS":
            responder.send(204, b"", "")
        elif request.body and request.headers.get("content-encoding"):
            self._start_task(self._decode_and_handle(request, responder), responder)
        else:
            try:
                answer = self._server.handler(request, responder)
            except Exception:
                self._handler_failed(responder)
                return
            if answer is not None:
                self._start_task(self._finish(answer, responder), responder)

    def _start_task(self, work: Coroutine[object, object, None], responder: Responder) -> None:
        task = self._loop.create_task(work)
        # A handler that has answered may still run when the next request begins; only the running one is watched.
        if not responder.finished:
            self._task = task

    async def _decode_and_handle(self, request: Request, responder: Responder) -> None:
        limits = self._server.limits
        try:
            name = coding.coding_of(request.headers["content-encoding"])
            if name:
                before = len(request.body)
                # Expanding 64 MiB takes a tenth of a second and more, which nobody else shall wait for.
                decoded = await self._loop.run_in_executor(None, coding.decode, name, request.body, limits.body)
                request.body = decoded
                self._charge(len(decoded) - before)
        except coding.CodingError as error:
            responder.refuse(Refusal(error.status, str(error)))
            return
        except _Refused:
            assert self._refusal is not None
            responder.refuse(self._refusal)
            return
        if self._gone:
            return
        try:
            answer = self._server.handler(request, responder)
        except Exception:
            self._handler_failed(responder)
            return
        if answer is not None:
            await self._finish(answer, responder)

    async def _finish(self, answer: Awaitable[None], responder: Responder) -> None:
        """Awaits a handler; whatever it does, the response has an end."""
        try:
            await answer
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            if not responder.finished:
                responder.abort("cancelled")
        except Exception:
            self._handler_failed(responder)
        else:
            if not responder.finished and not self._gone:
                log.error("%s %s: the handler ended without a whole response", *_loggable(responder.request))
                responder.fail()

    def _handler_failed(self, responder: Responder) -> None:
        """An exception in a handler is ours: 500, and everybody else is served on."""
        log.exception("%s %s: the handler failed", *_loggable(responder.request))
        if not responder.finished:
            responder.fail()

    # Called by the response

    def ended(self, responder: Responder, reason: str) -> None:
        """The response's last byte is written."""
        request = responder.request
        self._active = None
        self._task = None
        self._server.body_bytes -= self._charged
        self._charged = 0
        self._server.answered(request, responder.status, reason)
        if self._gone or self._closing:
            return
        if responder.closes:
            self._deaf = True
            self._queue.clear()
        if self._started:
            # The rest of the next request waited for this response, not for its sender.
            self._started = self._last_read = time.monotonic()
        self._pump()

    def write(self, data: bytes) -> None:
        if self._gone:
            return
        self._flow.write(data)
        if self._flow.paused and self._flow.unsent() > self._server.limits.unsent:
            self.abort("the client reads too slowly")

    async def drain(self) -> None:
        await self._flow.drain()

    @property
    def gone(self) -> bool:
        return self._gone

    @property
    def server(self) -> HttpServer:
        return self._server

    # Ending

    def _linger(self) -> None:
        """Closes our half and reads on for a while: closing with unread bytes would reset, and lose the answer."""
        self._closing = True
        self._deaf = True
        self._deadline = time.monotonic() + self._server.limits.linger
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def close_if_idle(self) -> None:
        if self.idle_since and not self._closing:
            self._closing = True
            self._deaf = True
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Cuts the connection now."""
        self._lose(reason)
        self._transport.abort()

    def _lose(self, reason: str = "client disconnected") -> None:
        """The peer is gone: whoever works for it is told at once."""
        if self._gone:
            return
        self._gone = self._deaf = self._closing = True
        self._queue.clear()
        self._held.clear()
        self._flow.lose()
        responder, task = self._active, self._task
        self._server.body_bytes -= self._charged
        self._charged = 0
        if responder is not None:
            if task is not None and not task.done():
                self._server.orphaned(task)
            responder.lose(reason)

    def check_deadlines(self, now: float) -> None:
        """Called by the server's one timer."""
        limits = self._server.limits
        if self._gone:
            return
        if self._flow.stalled(now, limits.stall_timeout):
            self.abort("the client stopped reading")
        elif self._closing:
            # A response still on its way out is the stall check's business.
            if now > self._deadline and not self._flow.unsent():
                self._transport.abort()
        elif self._active is not None or self._queue:
            return
        elif self.idle_since:
            if now - self.idle_since > limits.idle_timeout and not self._flow.unsent():
                self.close_if_idle()
        elif self._started and (
            now - self._last_read > limits.read_timeout
            or now - self._started > (limits.head_timeout if self._in_head else limits.request_timeout)
        ):
            self._fail(Refusal(408, "the request did not arrive in time"))
            self._pump()


def _loggable(request: Request) -> tuple[str, str]:
    """Method and path as sent; the parser lets no control character through."""
    return request.method, request.raw_path
