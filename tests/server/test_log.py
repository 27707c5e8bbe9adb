"""The log: one line per event in both formats, whatever clients put into it; colour only where it is wanted."""

from __future__ import annotations

import io
import json
import logging
import re
from dataclasses import replace

import pytest

from ds4.engine.types import SamplingParams
from ds4.server.log import HttpLog, colour_wanted, escape, log_generation, setup
from ds4.server.types import Failed, Finish, GenerationRequest, Started
from tests.support.wire import get, run, serving


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


REQUEST = GenerationRequest(
    id="chatcmpl-1",
    dialect="chat",
    model="m",
    prompt_tokens=(1, 2, 3, 4),
    key=b"",
    sampling=SamplingParams(),
    max_tokens=9,
)
STARTED = Started(slot=3, reuse="memory-token", prompt_tokens=4, cached_tokens=3)
FINISH = Finish(
    "stop",
    prompt_tokens=4,
    cached_tokens=3,
    cache_write_tokens=1,
    completion_tokens=11,
    ttft=0.25,
    prefill_seconds=0.5,
    decode_seconds=2.0,
)


def test_text_line_of_a_generation():
    out = io.StringIO()
    setup(stream=out)
    log_generation(REQUEST, STARTED, FINISH)
    assert re.fullmatch(
        r"\d{4} \d\d:\d\d:\d\d ds4-server: chat chatcmpl-1 slot=3 reuse=memory-token ctx=3\.\.4:1 gen=11 ttft=0\.250s "
        r"prefill=2\.0 t/s decode=5\.0 t/s finish=stop\n",
        out.getvalue(),
    ), out.getvalue()


def test_json_line_of_a_generation():
    out = io.StringIO()
    setup("json", stream=out)
    log_generation(REQUEST, STARTED, FINISH)
    log_generation(REQUEST, None, Failed("shutdown requested", 503))
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first["level"] == "info" and first["logger"] == "ds4.server" and isinstance(first["time"], float)
    assert (first["id"], first["dialect"], first["slot"], first["reuse"]) == ("chatcmpl-1", "chat", 3, "memory-token")
    assert (first["prompt_tokens"], first["cached_tokens"]) == (4, 3)
    assert (first["completion_tokens"], first["ttft"], first["prefill_tps"], first["decode_tps"], first["finish"]) == (
        11, 0.25, 2.0, 5.0, "stop",
    )  # fmt: skip
    assert second["level"] == "warning" and second["slot"] is None and second["prompt_tokens"] == 4
    assert second["finish"] == "error" and second["error"] == "shutdown requested"


def test_rates_without_time_or_tokens():
    out = io.StringIO()
    setup(stream=out)
    log_generation(REQUEST, STARTED, replace(FINISH, completion_tokens=0, prefill_seconds=0.0, decode_seconds=0.0))
    assert "prefill=0.0 t/s decode=0.0 t/s" in out.getvalue()


NASTY = "a\nb\r\x1b[31m\x00\x7f\x9b\u2028\u202eüé\U0001f600\ud800"


def test_escape():
    assert escape("plain ü 😀 \\n") == "plain ü 😀 \\n"
    assert escape(NASTY) == r"a\nb\r\x1b[31m\x00\x7f\x9b\u2028\u202e" + "üé\U0001f600" + r"\ud800"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_clients_cannot_write_lines_of_their_own(log_format):
    out = io.TextIOWrapper(buffer := io.BytesIO(), encoding="utf-8", write_through=True)
    setup(log_format, stream=out, colour=False)
    log_generation(replace(REQUEST, id=NASTY), STARTED, Failed("why: " + NASTY))
    HttpLog().response("GET", "/" + NASTY, 400, 0.1, "peer", NASTY)
    try:
        raise ValueError(NASTY)
    except ValueError:
        logging.getLogger("ds4.server.http").exception("it failed: %s", NASTY)
    text = buffer.getvalue().decode()
    assert all(c.isprintable() or c == "\n" for c in text)
    lines = text.split("\n")[:-1]
    if log_format == "json":
        assert len(lines) == 3
        entries = [json.loads(line) for line in lines]
        assert entries[1]["reason"] == NASTY and entries[2]["traceback"].startswith("Traceback")
    else:
        assert sum(not line.startswith("    ") for line in lines) == 3


def test_refused_requests_are_logged_with_the_reason():
    out = io.StringIO()
    setup(stream=out)

    async def main():
        async with serving() as wire:
            wire.server.observers = (HttpLog(),)
            await wire.ask(get("/fine"))
            await wire.ask(get("/%0afake").replace(b"localhost", b"evil.example"))
            await wire.ask(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n")

    run(main)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "-> 403" in lines[0] and "evil.example" in lines[0]
    assert "POST /x -> 413" in lines[1] and "99999999" in lines[1]


def test_colour():
    out = Terminal()
    setup(stream=out)
    log_generation(REQUEST, STARTED, FINISH)
    logging.getLogger("ds4.server").error("bad %s", "\x1b[0m")
    plain, red = out.getvalue().splitlines()
    assert plain.startswith("\x1b[34m") and plain.endswith("\x1b[0m")
    assert red.startswith("\x1b[31m") and r"bad \x1b[0m" in red
    assert colour_wanted(Terminal(), None) and colour_wanted(Terminal(), "")
    assert not colour_wanted(Terminal(), "1") and not colour_wanted(io.StringIO(), None)
    out = Terminal()
    setup(stream=out, no_color="1")
    log_generation(REQUEST, STARTED, FINISH)
    assert "\x1b" not in out.getvalue()


def test_a_closed_stderr_does_not_stop_the_server():
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    setup(stream=Broken())
    log_generation(REQUEST, STARTED, FINISH)


def test_setup_twice_logs_once():
    first, second = io.StringIO(), io.StringIO()
    setup(stream=first)
    setup(stream=second)
    log_generation(REQUEST, STARTED, FINISH)
    assert first.getvalue() == "" and second.getvalue().count("\n") == 1
