"""What the HTTP layer and its user share: limits, requests, refusals, observers. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds.

    A request has to be complete `request_timeout` after its first byte and its head `head_timeout` after it, with no
    gap above `read_timeout`. A response of which no byte leaves for `stall_timeout` fails. `idle_timeout` is for
    connections between requests. `body_total` bounds the bodies of all connections together.
    """

    head: int = 64 << 10
    headers: int = 256
    path: int = 255
    target: int = 8 << 10
    body: int = 64 << 20
    body_total: int = 1 << 30
    pipelined: int = 1 << 20
    connections: int = 1024
    backlog: int = 128
    high_water: int = 64 << 10
    unsent: int = 16 << 20
    head_timeout: float = 20.0
    read_timeout: float = 10.0
    request_timeout: float = 120.0
    idle_timeout: float = 75.0
    stall_timeout: float = 30.0
    linger: float = 2.0
    orphan: float = 5.0
    """How long a handler may go on after its client is gone before it is cancelled."""


@dataclass(slots=True)
class Request:
    """One request, complete. `headers` have lower-case names; repeated ones are joined by ", ".

    `path` is percent-decoded, `raw_path` and `query` (without "?") are as sent. HEAD appears as GET with `head` set.
    `received` is `time.monotonic()` of the last byte; in a `gate` it is still 0 and `body` is empty.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    peer: str
    received: float
    raw_path: str
    version: str
    keep_alive: bool
    head: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that needs no handler: what a `gate` returns to refuse a request before its body is read."""

    status: int
    message: str
    headers: tuple[tuple[str, str], ...] = ()


class Observer(Protocol):
    """Is told what happens on the sockets. Called on the event loop, must not block."""

    def connections(self, open_now: int) -> None: ...
    def response(self, method: str, path: str, status: int, seconds: float, peer: str, reason: str) -> None:
        """A response ended. `seconds` since the request's last byte; `reason` says why it failed (may be empty).

        Requests that never became one have method and path "-".
        """


CORS_HEADERS = (
    ("Access-Control-Allow-Origin", "*"),
    ("Access-Control-Allow-Methods", "GET, POST, OPTIONS"),
    ("Access-Control-Allow-Headers", "*"),
)


def header_lines(headers: Iterable[tuple[str, str]]) -> bytes:
    """Header lines as bytes. Raises ValueError for a control character: one header must not become two."""
    lines = []
    for name, value in headers:
        line = f"{name}: {value}"
        if not line.isprintable():
            raise ValueError(f"header {name!r} has a control character in {value!r}")
        lines.append(line + "\r\n")
    return "".join(lines).encode("latin-1", "replace")
