"""Server-sent events (WHATWG HTML, section 9.2): framing, and keep-alives by one timer for all streams.

An event is handed to the connection in one piece, or not at all: a failure never leaves half an event before the
error event. A write is a system call as long as the socket has room, so what is ready together goes out together:
`send_framed` takes several events, in one chunk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from ds4._core import frame_event
from ds4.server.http import Responder, Stream

log = logging.getLogger("ds4.server.sse")

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"

_DATA = b"data: "
_HEADS: dict[str, bytes] = {}


def _head(event: str) -> bytes:
    head = _HEADS.get(event)
    if head is None:
        if not event or not event.isprintable():
            raise ValueError(f"not an event name: {event!r}")
        head = f"event: {event}\ndata: ".encode()
        # Names come from our dialects, a few dozen; the bound is for a caller that makes them up.
        if len(_HEADS) < 256:
            _HEADS[event] = head
    return head


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event as bytes. `data` is usually JSON on one line; line breaks in it become further `data:` lines."""
    return frame_event(_DATA if event is None else _head(event), data)


class EventStream:
    """An event stream on a response. `start` sends the head at once, so that clients stop counting their timeout.

    `keep_alive` is what the shared timer sends when nothing else was sent for its interval: constant bytes (framed
    already), or a function for dialects whose keep-alive is an event with a number in it.
    """

    __slots__ = ("_stream", "_timer", "_write", "_write_event", "drain", "keep_alive", "quiet")

    def __init__(self, stream: Stream, timer: KeepAlive | None, keep_alive: bytes | Callable[[], bytes]) -> None:
        self._stream = stream
        self._write, self._write_event = stream.write, stream.write_event
        self._timer = timer
        self.drain: Callable[[], Awaitable[None]] = stream.drain
        """Awaited, it waits while the client reads more slowly than we write. Raises ClientDisconnected."""
        self.keep_alive = keep_alive
        self.quiet = 0
        """Ticks of the timer since the last event."""
        if timer is not None:
            timer.add(self)

    @classmethod
    def start(
        cls,
        responder: Responder,
        timer: KeepAlive | None = None,
        *,
        keep_alive: bytes | Callable[[], bytes] = COMMENT,
        headers: Iterable[tuple[str, str]] = (),
        first: bytes = b"",
    ) -> EventStream:
        """`first`: events, framed already, that go out with the head."""
        stream = responder.start(200, "text/event-stream", (("Cache-Control", "no-cache"), *headers), first=first)
        return cls(stream, timer, keep_alive)

    @property
    def disconnected(self) -> bool:
        return self._stream.disconnected

    @property
    def closed(self) -> bool:
        return self._stream.closed

    @property
    def paused(self) -> bool:
        """The client reads more slowly than we write: `drain` would wait."""
        return self._stream.paused

    def send(self, data: bytes, event: str | None = None) -> None:
        """One event. Never blocks; see `drain`."""
        self.quiet = 0
        self._write_event(_DATA if event is None else _HEADS.get(event) or _head(event), data)

    def send_framed(self, events: bytes) -> None:
        """One event or several, framed already (`frame`), in one chunk."""
        self.quiet = 0
        self._write(events)

    def done(self) -> None:
        """`[DONE]`, and the end of the stream."""
        if not self._stream.closed:
            self._stream.write(DONE)
        self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.discard(self)
        self._stream.close()

    def abort(self, reason: str = "aborted") -> None:
        """Breaks off between two events, without the stream's end mark."""
        if self._timer is not None:
            self._timer.discard(self)
        self._stream.abort(reason)

    def beat(self) -> None:
        """Sends the keep-alive. Called by the timer."""
        self._stream.write(self.keep_alive if isinstance(self.keep_alive, bytes) else self.keep_alive())


class KeepAlive:
    """One timer for all quiet streams: each gets its keep-alive `interval` seconds after its last event.

    It ticks `_TICKS` times per interval, and only while there are streams: sending costs no clock reading.
    """

    _TICKS = 4

    def __init__(self, interval: float = 5.0) -> None:
        self.interval = interval
        self._streams: dict[EventStream, None] = {}
        self._handle: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: EventStream) -> None:
        self._streams[stream] = None
        if self._handle is None:
            self._schedule()

    def discard(self, stream: EventStream) -> None:
        self._streams.pop(stream, None)

    def stop(self) -> None:
        self._streams.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _schedule(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(self.interval / self._TICKS, self._tick)

    def _tick(self) -> None:
        for stream in tuple(self._streams):
            if stream.closed or stream.disconnected:
                self.discard(stream)
                continue
            stream.quiet += 1
            if stream.quiet >= self._TICKS:
                stream.quiet = 0
                try:
                    stream.beat()
                except Exception:
                    log.exception("a keep-alive failed")
                    stream.abort("internal error")
        self._handle = None
        if self._streams:
            self._schedule()
