"""A file that tells everything about each generation: what was asked, what the model read, what it wrote.

    ===== request 3 2026-11-30 21:04:11 =====       the settings, one `name: value` a line
    --- request json --- request 3, 812 bytes       the body as the client sent it
    --- rendered prompt --- request 3, 1840 bytes   what the model reads, special tokens by their names
    --- cache decision --- request 3                the session and what it holds already
    --- generated --- request 3, reasoning, 96 bytes      in the order of the output, as often as its kind changes
    --- generated --- request 3, call ls, 14 bytes        the arguments as the client gets them
    --- generated --- request 3, sampled call, 120 bytes  the call as the model spelled it
    --- end --- request 3                           the finish reason, counts, seconds
    ===== end of request 3 =====

Requests that run side by side have their sections between each other's: each names its request. Where bytes are
counted, as many follow and a line feed: a reader that skips them is not misled by text that looks like a section.

A thread of its own draws the sections and writes each one at once, so the event loop only hands over what it has. A
disk that is slower than the output costs sections, never memory or a stream: the file says how many are missing. The
first write that fails ends the trace, not the server. Headers, and with them keys, are never written; everything that
was said is, so the file is its owner's alone.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ds4.errors import ConfigError
from ds4.server.bind import reason
from ds4.server.log import escape
from ds4.server.types import (
    ContentDelta,
    Event,
    Failed,
    Finish,
    GenerationRequest,
    ReasoningDelta,
    Started,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

log = logging.getLogger("ds4.server")

BACKLOG = 64 << 20
"""Bytes that may wait to be written."""
_FLUSH = 16 << 10
"""Characters of output that are collected before they are written."""
_DECODED = 4096
"""Tokens that are decoded at a time: the interpreter belongs to the other threads in between."""
_PATIENCE = 10.0
"""Seconds that what waits gets to be written at the end."""

Draw = Callable[[], Iterable[bytes]]


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Iterable[int], /) -> bytes: ...


def check_file(path: Path) -> None:
    """Raises ConfigError when no trace can be written there: better told before a model is loaded than after. Changes
    nothing in a file that exists."""
    os.close(_open(path))


def _open(path: Path) -> int:
    try:
        # A pipe without a reader must not hang the start.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise ConfigError(f"--trace {path}: {reason(error)}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"--trace {path}: not a regular file")
    return fd


class Tracer:
    """Writes one file, emptied when it is opened. Belongs to the event loop; `close` waits for the writer.

    Raises ConfigError when the file cannot be opened or made its owner's alone.
    """

    def __init__(self, path: Path, tokenizer: Decoder, *, backlog: int = BACKLOG) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._backlog = backlog
        self._fd = _open(path)
        try:
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, 0)
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(f"--trace {path}: {reason(error)}") from None
        self._numbers = count(1)
        self._sections: SimpleQueue[tuple[int, Draw] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._missing = 0
        self._over = False
        self._thread = threading.Thread(target=self._write_all, name="ds4-trace", daemon=True)
        self._thread.start()

    def describe(self) -> str:
        return f"tracing session to {self._path}"

    def begin(self, request: GenerationRequest, body: bytes, *, stream: bool, again: bool = False) -> Record:
        """The record of a generation that was just submitted. `again`: it goes on behind a call that cannot be read."""
        record = Record(self, next(self._numbers))
        number, started = record.number, time.time()

        def draw() -> Iterable[bytes]:
            yield _settings(number, started, request, stream=stream, again=again)
            yield from _counted(number, "request json", "", body)
            yield from _counted(number, "rendered prompt", "", self._decoded(request.prompt_tokens))

        # A token is about as long as its number.
        self.add(len(body) + 4 * len(request.prompt_tokens), draw)
        return record

    def add(self, size: int, draw: Draw) -> None:
        """Hands over a section of about `size` bytes, which `draw` makes on the writer's thread."""
        with self._lock:
            if self._over:
                return
            if self._waiting and self._waiting + size > self._backlog:
                self._missing += 1
                return
            self._waiting += size
        self._sections.put((size, draw))

    def close(self) -> None:
        """Writes what waits, for as long as that may take, and closes the file."""
        with self._lock:
            self._over = True
        self._sections.put(None)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            log.warning("%s: the trace is not written to its end", self._path)

    # ---- the writer's thread

    def _write_all(self) -> None:
        broken = False
        while (section := self._sections.get()) is not None:
            size, draw = section
            if not broken:
                try:
                    self._write_missing()
                    for data in draw():
                        self._write(data)
                except Exception as error:
                    # Whatever it was: the requests go on.
                    broken = True
                    why = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                    log.warning("the trace ends here: %s: %s", self._path, why)
            with self._lock:
                self._waiting -= size
                self._over = self._over or broken
        try:
            if not broken:
                self._write_missing()
            os.close(self._fd)
        except OSError as error:
            log.warning("%s: %s", self._path, reason(error))

    def _write_missing(self) -> None:
        with self._lock:
            missing, self._missing = self._missing, 0
        if missing:
            self._write(f"--- {missing} sections are missing: the file is too slow ---\n".encode())

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def _decoded(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
        parts = []
        for first in range(0, len(tokens), _DECODED):
            parts.append(self._tokenizer.decode(map(int, tokens[first : first + _DECODED])))
            # Lets a thread that waits for the interpreter have it.
            time.sleep(0)
        return b"".join(parts)


class Record:
    """What is written about one generation: hand it all events, in their order."""

    def __init__(self, tracer: Tracer, number: int) -> None:
        self.number = number
        self._tracer = tracer
        self._begun = time.monotonic()
        self._kind = ""
        self._texts: list[str] = []
        self._size = 0

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, ContentDelta):
                self._text("content", event.text)
            elif isinstance(event, ReasoningDelta):
                self._text("reasoning", event.text)
            elif isinstance(event, ToolCallStart):
                self._text(f"call {escape(event.name)}", "")
            elif isinstance(event, ToolCallDelta):
                self._text(self._kind, event.arguments)
            elif isinstance(event, ToolCallEnd):
                self._flush()
                self._counted("sampled call", event.raw)
            elif isinstance(event, Started):
                self._section("cache decision", _decision(event))
            elif isinstance(event, Finish | Failed):
                self._flush()
                self._end(event)

    def _text(self, kind: str, text: str) -> None:
        if kind != self._kind or self._size > _FLUSH:
            self._flush()
            self._kind = kind
        self._texts.append(text)
        self._size += len(text)

    def _flush(self) -> None:
        texts, self._texts, self._size = self._texts, [], 0
        if texts:
            self._counted(self._kind, "".join(texts).encode("utf-8", "backslashreplace"))

    def _counted(self, kind: str, data: bytes) -> None:
        self._tracer.add(len(data), lambda: _counted(self.number, "generated", f" {kind},", data))

    def _section(self, title: str, fields: dict[str, object], end: str = "") -> None:
        text = f"--- {title} --- request {self.number}\n{_lines(fields)}{end}"
        self._tracer.add(len(text), lambda: [text.encode()])

    def _end(self, event: Finish | Failed) -> None:
        seconds: dict[str, object] = {"elapsed": f"{time.monotonic() - self._begun:.3f}"}
        fields: dict[str, object]
        if isinstance(event, Finish):
            fields = {
                "finish": event.reason,
                "prompt_tokens": event.prompt_tokens,
                "cached_tokens": event.cached_tokens,
                "completion_tokens": event.completion_tokens,
                "reasoning_tokens": event.reasoning_tokens,
            }
            if event.error is not None:
                fields["error"] = event.error
            if event.broken is not None:
                fields["broken_call"] = event.broken.detail
        else:
            fields = {"finish": "error", "status": event.status, "error": event.message}
        self._section("end", fields | seconds, f"===== end of request {self.number} =====\n")


def _settings(number: int, started: float, request: GenerationRequest, *, stream: bool, again: bool) -> bytes:
    sampling = request.sampling
    fields: dict[str, object] = {
        "id": request.id,
        "kind": request.dialect,
        "model": request.model,
        "stream": stream,
        "tools": request.tools,
        "think_mode": request.thinking,
        "prompt_tokens": len(request.prompt_tokens),
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "ignore_eos": request.ignore_eos,
        "seed": sampling.seed,
        "constrained": request.constraint is not None,
        "continues": None if request.continues is None else request.continues.turn,
        "again": again,
    }
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))
    return f"===== request {number} {stamp} =====\n{_lines(fields)}".encode("utf-8", "backslashreplace")


def _decision(event: Started) -> dict[str, object]:
    return {
        "slot": event.slot,
        "cache_source": event.reuse,
        "prompt_tokens": event.prompt_tokens,
        "cached_tokens": event.cached_tokens,
        "effective_prompt_tokens": event.prompt_tokens - event.cached_tokens,
    }


def _lines(fields: dict[str, object]) -> str:
    """`name: value` lines; a value of a client's cannot begin a line."""
    return "".join(f"{name}: {_shown(value)}\n" for name, value in fields.items())


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else escape(str(value))


def _counted(number: int, title: str, kind: str, data: bytes) -> Iterable[bytes]:
    # The whole section in one call for the file, where it is not too large to be copied for it.
    head = f"--- {title} --- request {number},{kind} {len(data)} bytes\n".encode("utf-8", "backslashreplace")
    return (head + data + b"\n",) if len(data) < _FLUSH else (head, data, b"\n")
