"""One socket: bytes to requests, in order, and what a slow, silent or vanished peer may cost.

The syntax of heads and chunks is checked by httptools (llhttp, strict). Sources: RFC 9112, RFC 9110.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Coroutine, Generator
from typing import TYPE_CHECKING
from urllib.parse import unquote

import httptools

from ds4._core import join_roomy
from ds4.errors import ClientDisconnected
from ds4.server import coding
from ds4.server.flow import FlowControl
from ds4.server.message import Refusal, Request
from ds4.server.response import Responder

if TYPE_CHECKING:
    from ds4.server.http import HttpServer

log = logging.getLogger("ds4.server.http")

_PIECE = 64 << 10
_SMALL = 4 << 10
_BLANKS = " \t"


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


class _GoingOn:
    """Awaits what a coroutine that was begun outside a task waits for, and goes on with it (PEP 492)."""

    __slots__ = ("_awaited", "_work")

    def __init__(self, work: Coroutine[object, object, None], awaited: object) -> None:
        self._work = work
        self._awaited = awaited

    def __await__(self) -> Generator[object, object, None]:
        work, awaited = self._work, self._awaited
        while True:
            thrown: BaseException | None = None
            value: object = None
            try:
                value = yield awaited
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:
                thrown = error
            try:
                awaited = work.send(value) if thrown is None else work.throw(thrown)
            except StopIteration:
                return


async def _going_on(work: Coroutine[object, object, None], awaited: object) -> None:
    await _GoingOn(work, awaited)


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
        "_head_fed",
        "_head_size",
        "_headers",
        "_held",
        "_in_head",
        "_last_read",
        "_limits",
        "_loop",
        "_owe_continue",
        "_parser",
        "_peer",
        "_pumping",
        "_queue",
        "_refusal",
        "_replaying",
        "_request",
        "_started",
        "_task",
        "_transport",
        "_url",
        "flow",
        "gone",
        "idle_since",
        "server",
    )

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self._limits = server.limits
        self._loop = loop
        self._transport: asyncio.Transport
        self.flow: FlowControl
        self._parser = httptools.HttpRequestParser(self)
        self._peer = ""
        self._queue: deque[tuple[Request | None, Refusal | None]] = deque()
        self._held = bytearray()
        self._active: Responder | None = None
        self._task: asyncio.Task[None] | None = None
        self._pumping = False
        self.gone = False
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
        self._headers: dict[str, str] = {}
        self._head_size = 0
        self._head_fed = 0
        self._in_head = False
        self._request: Request | None = None
        self._refusal: Refusal | None = None
        self._declined = False
        self._body: list[bytes | bytearray] = []
        self._body_size = 0
        self._owe_continue = False
        self._started = 0.0

    # Protocol interface, called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self.flow = FlowControl(self._transport)
        self._transport.set_write_buffer_limits(high=self._limits.high_water)
        peer = transport.get_extra_info("peername")
        self._peer = f"{peer[0]}:{peer[1]}" if peer else "-"
        self.idle_since = time.monotonic()
        if not self.server.opened(self):
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
        elif len(self._held) + len(data) <= self._limits.pipelined:
            self._held += data
        else:
            self._held.clear()
            self._deaf = True

    def eof_received(self) -> bool:
        self._lose()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose()
        self.server.closed(self)

    def pause_writing(self) -> None:
        self.flow.pause()

    def resume_writing(self) -> None:
        self.flow.resume()
        self._pump()

    # Parser callbacks

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        self._in_head = True
        self._started = self._last_read
        self.idle_since = 0.0
        self.server.arrivals.expect(self)

    def on_url(self, url: bytes) -> None:
        if self._replaying:
            return
        self._url += url
        self._head_size += len(url)
        if len(self._url) > self._limits.target:
            self._refuse(414, f"the request target is longer than {self._limits.target} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._replaying:
            return
        size = self._head_size = self._head_size + len(name) + len(value) + 4
        if size > self._limits.head:
            self._refuse(431, f"the head is larger than {self._limits.head} bytes")
        if not self._in_head:
            return
        key = _NAMES.get(name) or _name(name)
        headers = self._headers
        if key in headers:
            if key == "host":
                self._refuse(400, "bad HTTP request: more than one Host header")
            headers[key] = f"{headers[key]}, {value.decode('latin-1').strip(_BLANKS)}"
        else:
            headers[key] = value.decode("latin-1").strip(_BLANKS)

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        self._in_head = False
        self._request = request = self._build_request()
        headers = request.headers
        length = headers.get("content-length")
        has_body = (length is not None and length != "0") or "transfer-encoding" in headers
        refusal = self._check_head(request, int(length) if length else 0)
        if refusal is not None:
            if has_body or request.method == "CONNECT":
                raise self._refused(refusal)
            self._refusal = refusal
        elif has_body:
            self._owe_continue = "expect" in headers and request.version == "1.1"
            self._declined = "upgrade" in headers and bool(self._parser.should_upgrade())

    def on_body(self, data: bytes) -> None:
        self._owe_continue = False
        piece = len(data)
        size = self._body_size = self._body_size + piece
        if size > self._limits.body:
            self._refuse(413, f"the body is larger than {self._limits.body} bytes")
        self._charge(piece)
        # Pieces of a byte or two would cost a hundred times their size as a list of objects.
        if piece >= _SMALL or not self._body:
            self._body.append(data)
        else:
            last = self._body[-1]
            if not isinstance(last, bytearray):
                self._body.append(bytearray(data))
            else:
                last += data

    def on_message_complete(self) -> None:
        request = self._request
        assert request is not None
        if self._declined:
            return
        body = self._body
        request.body = body[0] if len(body) == 1 and isinstance(body[0], bytes) else join_roomy(body)
        request.received = self._last_read
        self._queue.append((request, self._refusal))
        self.server.arrivals.expect(self)
        self._deaf = not request.keep_alive
        self._reset()

    # Called by the parser callbacks

    def _refused(self, refusal: Refusal) -> _Refused:
        self._refusal = refusal
        return _Refused(refusal.message)

    def _refuse(self, status: int, message: str) -> None:
        raise self._refused(Refusal(status, message))

    def _charge(self, size: int) -> None:
        """Counts body bytes that this connection makes the process hold, until its response is finished."""
        self._charged += size
        self.server.body_bytes += size
        if self.server.body_bytes > self._limits.body_total:
            raise self._refused(Refusal(503, "too many large requests at once", (("Retry-After", "1"),)))

    def _build_request(self) -> Request:
        parser = self._parser
        limits = self._limits
        headers = self._headers
        version = parser.get_http_version()
        if version != "1.1" and version != "1.0":
            self._refuse(505, "only HTTP/1.1 and HTTP/1.0 are supported")
        if len(headers) > limits.headers:
            self._refuse(431, f"more than {limits.headers} header fields")
        target = self._url.decode("latin-1")
        authority = ""
        if target[0] != "/" and "://" in target:
            # Absolute form (RFC 9112 section 3.2.2): its authority takes the place of Host.
            authority, slash, rest = target.partition("://")[2].partition("/")
            target = slash + rest or "/"
        path, _, query = target.partition("?")
        if len(path) > limits.path:
            self._refuse(414, f"the path is longer than {limits.path} bytes")
        method = parser.get_method().decode("latin-1")
        refusal = self.server.policy.refusal(headers, version, authority, method)
        if refusal is not None:
            self._refuse(*refusal)
        head = method == "HEAD"
        return Request(
            "GET" if head else method,
            unquote(path) if "%" in path else path,
            query,
            headers,
            b"",
            self._peer,
            0.0,
            path,
            version,
            parser.should_keep_alive() and not self.server.shutting_down,
            head,
        )

    def _check_head(self, request: Request, length: int) -> Refusal | None:
        """What can be refused before the body is read: its size, what it asks of us, and what the gate says."""
        server = self.server
        headers = request.headers
        if length > self._limits.body:
            return Refusal(413, f"the body of {length} bytes is larger than {self._limits.body}")
        if "transfer-encoding" in headers:
            # RFC 9112 section 6.1: a coding that is not understood is 501; HTTP/1.0 has none.
            if request.version == "1.0":
                return Refusal(400, "bad HTTP request: HTTP/1.0 has no Transfer-Encoding")
            if headers["transfer-encoding"].lower() != "chunked":
                return Refusal(501, "the only supported Transfer-Encoding is chunked")
        if request.method == "CONNECT":
            return Refusal(405, "CONNECT is not supported", (("Allow", "GET, HEAD, POST, OPTIONS"),))
        if server.shutting_down:
            return Refusal(503, "server shutting down", (("Retry-After", "5"),))
        if "expect" in headers and headers["expect"].lower() != "100-continue":
            return Refusal(417, "the only supported expectation is 100-continue")
        if request.method == "OPTIONS":
            return None
        if "content-encoding" in headers:
            try:
                coding.coding_of(headers["content-encoding"])
            except coding.CodingError as error:
                return Refusal(error.status, str(error), (("Accept-Encoding", coding.ACCEPTED),))
        return server.ask_gate(request) if server.gate is not None else None

    # Reading

    def _parse(self, data: bytes | bytearray) -> None:
        """Feeds the parser piece by piece, and stops (holding the rest) once there is a request to answer."""
        if len(data) <= _PIECE:
            rest = self._feed(data)
            if rest:
                self._held += rest
            return
        view = memoryview(data)
        while view and not self._deaf:
            if self._queue:
                self._held += view
                return
            piece, view = view[:_PIECE], view[_PIECE:]
            rest = self._feed(piece)
            if rest:
                self._held += rest
                self._held += view
                return

    def _feed(self, piece: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
        """Gives one piece to the parser; returns what a new parser has to begin with."""
        body_before = self._body_size
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            # We speak no other protocol: an upgrade is declined by going on (RFC 9110 section 7.8).
            self._resume_parser()
            return piece[upgrade.args[0] :]
        except httptools.HttpParserCallbackError:
            if self._refusal is None:
                log.exception("a parser callback failed")
            self._fail(self._refusal or Refusal(500, "internal server error"))
        except httptools.HttpParserError as error:
            if not self._deaf:
                self._fail(Refusal(400, f"bad HTTP request: {error}"))
        else:
            if self._in_head or (self._request is not None and self._body_size == body_before):
                # An unfinished header line, chunk extension or trailer is held by the parser, unseen by us.
                self._head_fed += len(piece)
                if self._head_fed > self._limits.head + _PIECE:
                    self._fail(Refusal(431, f"the head is larger than {self._limits.head} bytes"))
        return b""

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
            while self._active is None and not self._closing and not self.flow.paused:
                if self._queue:
                    self._begin(*self._queue.popleft())
                elif self._held and not self._deaf:
                    held, self._held = self._held, bytearray()
                    self._parse(held)
                else:
                    self._rest()
                    break
        finally:
            self._pumping = False

    def _rest(self) -> None:
        """Everything that came is answered."""
        if self._deaf:
            self._linger()
        elif self._owe_continue:
            self._owe_continue = False
            self.flow.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self._started == 0.0 and not self.idle_since:
            self.idle_since = time.monotonic()
            if self.server.shutting_down:
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
                answer = self.server.handler(request, responder)
            except Exception:
                self._handler_failed(responder)
                return
            if answer is not None:
                self._run(self._finish(answer, responder), responder)

    def _run(self, work: Coroutine[object, object, None], responder: Responder) -> None:
        """Begins a handler at once: one that answers without waiting for anything needs no task."""
        try:
            awaited = work.send(None)
        except StopIteration:
            return
        self._start_task(_going_on(work, awaited), responder)

    def _start_task(self, work: Coroutine[object, object, None], responder: Responder) -> None:
        task = self._loop.create_task(work)
        # A handler that has answered may still run when the next request begins; only the running one is watched.
        if not responder.finished:
            self._task = task

    async def _decode_and_handle(self, request: Request, responder: Responder) -> None:
        try:
            name = coding.coding_of(request.headers["content-encoding"])
            if name:
                before = len(request.body)
                # Expanding 64 MiB takes a tenth of a second and more, which nobody else shall wait for.
                decoded = await self._loop.run_in_executor(None, coding.decode, name, request.body, self._limits.body)
                request.body = decoded
                self._charge(len(decoded) - before)
        except coding.CodingError as error:
            responder.refuse(Refusal(error.status, str(error)))
            return
        except _Refused:
            assert self._refusal is not None
            responder.refuse(self._refusal)
            return
        if self.gone:
            return
        try:
            answer = self.server.handler(request, responder)
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
            if not responder.finished and not self.gone:
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
        self.server.body_bytes -= self._charged
        self._charged = 0
        self.server.arrivals.settled(self)
        self.server.answered(request, responder.status, reason)
        if self.gone or self._closing:
            return
        if responder.closes:
            self._deaf = True
            self._queue.clear()
        if self._started:
            # The rest of the next request waited for this response, not for its sender.
            self._started = self._last_read = time.monotonic()
        self._pump()

    def handed_over(self) -> None:
        """What the running request asks for is about to wait for others than the event loop."""
        self.server.arrivals.settled(self)

    def check_unsent(self) -> None:
        """Called after a write above the high-water mark: bounds what a writer that never drains can pile up."""
        if self.flow.unsent() > self._limits.unsent:
            self.abort("the client reads too slowly")

    # Ending

    def _linger(self) -> None:
        """Closes our half and reads on for a while: closing with unread bytes would reset, and lose the answer."""
        self._closing = True
        self._deaf = True
        self._deadline = time.monotonic() + self._limits.linger
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
        if self.gone:
            return
        self.gone = self._deaf = self._closing = True
        self._queue.clear()
        self._held.clear()
        self.flow.lose()
        responder, task = self._active, self._task
        self.server.body_bytes -= self._charged
        self._charged = 0
        if responder is not None:
            if task is not None and not task.done():
                self.server.orphaned(task)
            responder.lose(reason)

    def check_deadlines(self, now: float) -> None:
        """Called by the server's one timer."""
        limits = self._limits
        if self.gone:
            return
        if self.flow.stalled(now, limits.stall_timeout):
            self.abort("the client stopped reading")
        elif self._closing:
            # A response still on its way out is the stall check's business.
            if now > self._deadline and not self.flow.unsent():
                self._transport.abort()
        elif self._active is not None or self._queue:
            return
        elif self.idle_since:
            if now - self.idle_since > limits.idle_timeout and not self.flow.unsent():
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
