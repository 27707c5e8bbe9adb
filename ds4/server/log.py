"""The server's log on stderr: one line per event, as text or JSON, safe against what clients put into it.

Text lines are `MMDD HH:MM:SS ds4-server: text`, in colour only on a terminal and never with NO_COLOR
(https://no-color.org). Control and other unprintable characters are escaped, so that no client can begin a line of
its own or reach the terminal.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Literal, TextIO

from ds4.server.types import Failed, Finish, GenerationRequest, Started

LogFormat = Literal["text", "json"]

Kind = Literal["default", "warning", "prefill", "generation", "tool", "kv", "ok", "error"]
"""What a line is about; decides its colour. Passed as `extra={"kind": ...}`."""

_COLOURS: dict[str, str] = {
    "warning": "33",
    "prefill": "36",
    "generation": "34",
    "tool": "35",
    "kv": "90",
    "ok": "32",
    "error": "31",
}

log = logging.getLogger("ds4.server")


def escape(text: str) -> str:
    r"""Unprintable characters as `\n`, `\x1b`, `\u202e`, ...; a backslash stays as it is."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def colour_wanted(stream: TextIO, no_color: str | None) -> bool:
    """True on a terminal, unless NO_COLOR is set to something (`no_color` is its value)."""
    return not no_color and stream.isatty()


def _kind(record: logging.LogRecord) -> str:
    if record.levelno >= logging.ERROR:
        return "error"
    if record.levelno >= logging.WARNING:
        return "warning"
    return str(getattr(record, "kind", "default"))


class TextFormatter(logging.Formatter):
    """`MMDD HH:MM:SS program: text`; a traceback follows indented, so that it cannot look like lines of ours."""

    def __init__(self, program: str, *, colour: bool) -> None:
        super().__init__()
        self._program = program
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        line = f"{stamp} {self._program}: {escape(record.getMessage())}"
        code = _COLOURS.get(_kind(record)) if self._colour else None
        if code:
            line = f"\x1b[{code}m{line}\x1b[0m"
        if record.exc_info:
            for text in self.formatException(record.exc_info).splitlines():
                line += "\n    " + escape(text)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (Unix seconds), level, logger, message, and the fields of `extra={"fields"}`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            entry.update(fields)
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        # ASCII only: a lone surrogate from a client must not make the line unencodable.
        return json.dumps(entry, default=str)


# Only type checkers know the parameter: Python 3.10's class takes none.
if TYPE_CHECKING:
    _TextHandler = logging.StreamHandler[TextIO]
else:
    _TextHandler = logging.StreamHandler


class _StderrHandler(_TextHandler):
    """Writes a line in one call. A stderr that went away (closed pipe) must not take the server with it."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handleError(record)


def setup(
    log_format: LogFormat = "text",
    *,
    stream: TextIO | None = None,
    colour: bool | None = None,
    no_color: str | None = None,
    level: int = logging.INFO,
    program: str = "ds4-server",
) -> logging.Handler:
    """Sends everything logged under `ds4` to `stream` (stderr). Replaces what an earlier call set up.

    `colour` None decides by the terminal and by `no_color`, the value of NO_COLOR.
    """
    stream = stream or sys.stderr
    handler = _StderrHandler(stream)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        wanted = colour_wanted(stream, no_color) if colour is None else colour
        handler.setFormatter(TextFormatter(program, colour=wanted))
    root = logging.getLogger("ds4")
    for old in [h for h in root.handlers if isinstance(h, _StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False
    return handler


class HttpLog:
    """Observer of the HTTP server: a line for each refused or failed request, with the reason.

    Answered requests are logged where their tokens are known (`log_generation`); they are seen here at level DEBUG.
    """

    def connections(self, open_now: int) -> None:
        pass

    def response(self, method: str, path: str, status: int, seconds: float, peer: str, reason: str) -> None:
        if status >= 500:
            level = logging.ERROR
        elif status >= 400:
            level = logging.WARNING
        elif reason:
            level = logging.INFO
        else:
            level = logging.DEBUG
        if log.isEnabledFor(level):
            why = f" {reason}" if reason else ""
            fields = {
                "method": method,
                "path": path,
                "status": status,
                "seconds": round(seconds, 6),
                "peer": peer,
                "reason": reason,
            }
            text = f"{peer} {method} {path[:200]} -> {status} in {seconds:.3f}s{why}"
            log.log(level, "%s", text, extra={"fields": fields})


def log_generation(request: GenerationRequest, started: Started | None, end: Finish | Failed) -> None:
    """The one line of a generation: who, where, what was reused, how much, how fast, how it ended.

    `started` is None when the job ended in the queue. `ctx=` is `CACHED..PROMPT:SUFFIX` in tokens.
    """
    prompt = started.prompt_tokens if started else len(request.prompt_tokens)
    cached = started.cached_tokens if started else 0
    fields: dict[str, object] = {
        "id": request.id,
        "dialect": request.dialect,
        "slot": started.slot if started else None,
        "reuse": started.reuse if started else None,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
    }
    slot = f"slot={started.slot} reuse={started.reuse}" if started else "queued"
    text = f"{request.dialect} {request.id} {slot} ctx={cached}..{prompt}:{prompt - cached}"
    kind: Kind = "generation"
    level = logging.INFO
    if isinstance(end, Finish):
        prefill_rate = (prompt - cached) / end.prefill_seconds if end.prefill_seconds > 0 else 0.0
        # The first token belongs to the prefill; the decode time is that of the others.
        decode_rate = (end.completion_tokens - 1) / end.decode_seconds if end.decode_seconds > 0 else 0.0
        fields |= {
            "completion_tokens": end.completion_tokens,
            "ttft": round(end.ttft, 6),
            "prefill_tps": round(prefill_rate, 2),
            "decode_tps": round(max(0.0, decode_rate), 2),
            "finish": end.reason,
        }
        text += (
            f" gen={end.completion_tokens} ttft={end.ttft:.3f}s prefill={prefill_rate:.1f} t/s"
            f" decode={max(0.0, decode_rate):.1f} t/s"
        )
        if end.drafted:
            fields |= {"drafted": end.drafted, "accepted": end.accepted}
            text += f" drafts={end.accepted}/{end.drafted}"
            if end.draft_seconds:
                fields |= {"draft_seconds": round(end.draft_seconds, 6)}
                text += f" in {end.draft_seconds:.3f}s"
        text += f" finish={end.reason}"
    else:
        fields |= {"finish": "error", "error": end.message, "status": end.status}
        text += f' finish=error error="{end.message}"'
        kind, level = "error", logging.ERROR if end.status == 500 else logging.WARNING
    log.log(level, "%s", text, extra={"kind": kind, "fields": fields})
