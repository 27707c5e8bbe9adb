"""Back-pressure of one connection: what is written, what is unsent, who waits, and whether anything moves at all."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections.abc import Awaitable, Generator

from ds4.errors import ClientDisconnected


class _Done:
    """An awaitable that is ready: what almost every `drain` returns, a quarter of a coroutine's price."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        return iter(())  # type: ignore[return-value]  # any iterator will do, and this one costs nothing


_NOTHING_TO_WAIT_FOR = _Done()


class FlowControl:
    """Sits between a response and its transport.

    `paused` follows the transport's high- and low-water marks. Progress is measured by what the peer has taken: a
    reader that takes one byte now and then is slow, one that takes none is stalled. What left the process says too
    little about that, for the kernel holds megabytes and asks for more only when a third of them is gone.
    """

    __slots__ = ("_lost", "_mark", "_mark_time", "_transport", "_waiters", "paused", "put", "written")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.put = transport.write
        """The transport's `write`; whoever calls it adds to `written`."""
        self._waiters: list[asyncio.Future[None]] = []
        self._lost = False
        self._mark = -1
        self._mark_time = 0.0
        self.paused = False
        self.written = 0

    def write(self, data: bytes) -> None:
        """Hands bytes to the transport, which sends what it can now or at the end of the loop's iteration."""
        self.written += len(data)
        self.put(data)

    def unsent(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size()

    def stalled(self, now: float, timeout: float) -> bool:
        """True when bytes wait and none has left for `timeout` seconds. To be asked regularly."""
        unsent = self.unsent()
        if not unsent:
            self._mark = -1
            return False
        taken = self.written - unsent - self._in_kernel()
        if taken != self._mark:
            self._mark, self._mark_time = taken, now
            return False
        return now - self._mark_time > timeout

    def _in_kernel(self) -> int:
        """Bytes in the socket's send queue that the peer has not acknowledged; 0 where the system cannot say."""
        sock = self._transport.get_extra_info("socket")
        try:
            return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4), sys.byteorder)
        except (OSError, AttributeError):
            return 0

    def drain(self) -> Awaitable[None]:
        """Waits while the unsent bytes are above the high-water mark. Raises ClientDisconnected."""
        return self._wait() if self.paused or self._lost else _NOTHING_TO_WAIT_FOR

    async def _wait(self) -> None:
        while self.paused and not self._lost:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        if self._lost:
            raise ClientDisconnected("the client is gone")

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._wake()

    def lose(self) -> None:
        """The connection is gone: whoever waits is woken with ClientDisconnected."""
        self._lost = True
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
