"""One response, for the handler: sent whole, or started and written piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from ds4._core import frame_chunk, frame_event
from ds4.server.message import Refusal, Request, header_lines

if TYPE_CHECKING:
    from ds4.server.connection import Connection

log = logging.getLogger("ds4.server.http")


class Responder:
    """The answer to one request: `send` it whole, or `start` a stream. A second answer is a RuntimeError."""

    __slots__ = ("_callbacks", "_connection", "closes", "finished", "request", "status")

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._callbacks: list[Callable[[], None]] = []
        self.request = request
        self.status = 0
        """The status sent, 0 before."""
        self.finished = False
        """The response has its end, or nobody waits for one any more."""
        self.closes = not request.keep_alive
        """The connection ends after this response."""

    @property
    def started(self) -> bool:
        """The head is sent: an error can only be told inside the stream."""
        return self.status != 0

    @property
    def disconnected(self) -> bool:
        return self._connection.gone

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Calls `callback` as soon as the client is gone, unless the response has ended; at once if it is gone."""
        if self._connection.gone:
            callback()
        else:
            self._callbacks.append(callback)

    def handed_over(self) -> None:
        """Called just before the request goes to the scheduler: it is on its way no more."""
        self._connection.handed_over()

    def send(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: Iterable[tuple[str, str]] = (),
        *,
        reason: str = "",
    ) -> None:
        """The whole response, with its length. `reason` says in the log why it is an error."""
        more = header_lines(headers) if headers else b""
        first, last = self._head(status, content_type)
        if self.finished:
            return
        sent = b"" if self.request.head else body
        data = b"%bContent-Length: %d\r\n%b%b\r\n%b" % (first, len(body), last, more, sent)
        flow = self._connection.flow
        flow.written += len(data)
        flow.put(data)
        self.end(reason)

    def refuse(self, refusal: Refusal) -> None:
        """Sends an error in the form of the server's `error_body`."""
        body = self._connection.server.error(refusal.status, refusal.message, self.request.path)
        self.send(refusal.status, body, headers=refusal.headers, reason=refusal.message)

    def start(
        self,
        status: int = 200,
        content_type: str = "text/event-stream",
        headers: Iterable[tuple[str, str]] = (("Cache-Control", "no-cache"),),
        *,
        first: bytes = b"",
    ) -> Stream:
        """Sends the head and the `first` piece of the body, if there is one; the others follow one by one: chunked, or
        for HTTP/1.0 until the connection closes."""
        chunked = self.request.version != "1.0"
        if not chunked:
            self.closes = True
        framing = b"Transfer-Encoding: chunked\r\n" if chunked else b""
        more = header_lines(headers)
        status_line, last = self._head(status, content_type)
        if not self.finished:
            begun = b""
            if first and not self.request.head:
                begun = frame_chunk(first) if chunked else first
            self._connection.flow.write(b"%b%b%b%b\r\n%b" % (status_line, framing, last, more, begun))
        return Stream(self, self._connection, chunked, self.request.head)

    def _head(self, status: int, content_type: str) -> tuple[bytes, bytes]:
        if self.status:
            raise RuntimeError(f"a second response ({status}) after {self.status}")
        server = self._connection.server
        if server.shutting_down:
            self.closes = True
        self.status = status
        first, last = server.head(status, content_type, self.closes)
        if self.request.version == "1.0" and not self.closes:
            last += b"Connection: keep-alive\r\n"
        return first, last

    # Called by the connection and the stream

    def fail(self) -> None:
        """500 if nothing was sent; else the stream breaks off without its end mark, which a client can tell."""
        if self.status:
            self.abort("internal error")
        else:
            self.refuse(Refusal(500, "internal server error"))

    def abort(self, reason: str) -> None:
        self._connection.abort(reason)

    def lose(self, reason: str) -> None:
        if self.finished:
            return
        callbacks, self._callbacks = self._callbacks, []
        self.end(reason)
        for callback in callbacks:
            try:
                callback()
            except Exception:
                log.exception("a disconnect callback failed")

    def end(self, reason: str = "") -> None:
        self.finished = True
        if self._callbacks:
            self._callbacks.clear()
        self._connection.ended(self, reason)


class Stream:
    """The body of a response, piece by piece. After a disconnect writing has no effect, and `drain` raises."""

    __slots__ = ("_chunked", "_connection", "_flow", "_mute", "_responder", "closed", "drain")

    def __init__(self, responder: Responder, connection: Connection, chunked: bool, mute: bool) -> None:
        self._responder = responder
        self._connection = connection
        self._flow = connection.flow
        self._chunked = chunked
        self._mute = mute
        self.closed = False
        self.drain: Callable[[], Awaitable[None]] = connection.flow.drain
        """Awaited, it waits while the client reads more slowly than we write. Raises ClientDisconnected."""

    @property
    def disconnected(self) -> bool:
        return self._connection.gone

    @property
    def paused(self) -> bool:
        return self._flow.paused

    def write(self, data: bytes) -> None:
        """Never blocks. Raises RuntimeError after `close`. More than `Limits.unsent` unsent cuts the connection."""
        if self.closed:
            raise RuntimeError("write after close")
        # An empty chunk would end the body.
        if not data or self._mute or self._connection.gone:
            return
        if self._chunked:
            data = frame_chunk(data)
        flow = self._flow
        flow.written += len(data)
        flow.put(data)
        if flow.paused:
            self._connection.check_unsent()

    def write_event(self, head: bytes, data: bytes) -> None:
        """`write` of a server-sent event: `head`, `data` and an empty line."""
        if self.closed:
            raise RuntimeError("write after close")
        if self._mute or self._connection.gone:
            return
        framed = frame_event(head, data, self._chunked)
        # What `write` does at its end: a call for it would be a tenth of an event's price.
        flow = self._flow
        flow.written += len(framed)
        flow.put(framed)
        if flow.paused:
            self._connection.check_unsent()

    def close(self) -> None:
        """The body is complete. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        if self._responder.finished:
            return
        if self._chunked and not self._mute:
            self._flow.write(b"0\r\n\r\n")
        self._responder.end()

    def abort(self, reason: str = "aborted") -> None:
        """Breaks off without an end mark: the client sees an incomplete body."""
        self.closed = True
        if not self._responder.finished:
            self._responder.abort(reason)
