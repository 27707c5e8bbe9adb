"""`--trace`: a file with everything about each generation, which costs the streams nothing and never the server."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ds4.engine.types import SamplingParams
from ds4.errors import ConfigError
from ds4.server.trace import Tracer, check_file
from ds4.server.types import ContentDelta, Failed, Finish, GenerationRequest, Started
from ds4.testing import Script, ScriptedEngine
from tests.support.api import read_until
from tests.support.running_server import Serve

D = "｜DSML｜"
CALL = (
    f'\n\n<{D}tool_calls>\n<{D}invoke name="ls">\n<{D}parameter name="p" string="true">/</{D}parameter>\n'
    f"</{D}invoke>\n</{D}tool_calls>"
)
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
REQUEST = GenerationRequest(
    id="chatcmpl-1\n--- end --- request 1",
    dialect="chat",
    model="m\n===== request 9 =====",
    prompt_tokens=(72, 105),
    key=b"",
    sampling=SamplingParams(),
    max_tokens=9,
)
FINISH = Finish("stop", 2, 0, 2, 1)


@dataclass
class Traced:
    """What a file says of one request. `parts` are the counted sections: title, what it is, data."""

    fields: dict[str, str] = field(default_factory=dict)
    parts: list[tuple[str, str, bytes]] = field(default_factory=list)
    ended: bool = False

    def part(self, title: str, kind: str = "") -> bytes:
        (data,) = (data for t, k, data in self.parts if (t, k) == (title, kind))
        return data


def read(path: Path) -> dict[int, Traced]:
    """Reads a trace as its reader should: by the counts."""
    found: dict[int, Traced] = {}
    current = Traced()
    data = path.read_bytes()
    while data:
        line, _, data = data.partition(b"\n")
        text = line.decode()
        if begun := re.fullmatch(r"===== request (\d+) \d{4}-\d\d-\d\d \d\d:\d\d:\d\d =====", text):
            current = found[int(begun[1])] = Traced()
        elif counted := re.fullmatch(r"--- ([\w ]+) --- request (\d+),(?: (.*),)? (\d+) bytes", text):
            size = int(counted[4])
            assert data[size : size + 1] == b"\n"
            found[int(counted[2])].parts.append((counted[1], counted[3] or "", data[:size]))
            data = data[size + 1 :]
        elif section := re.fullmatch(r"--- [\w ]+ --- request (\d+)", text):
            current = found[int(section[1])]
        elif end := re.fullmatch(r"===== end of request (\d+) =====", text):
            found[int(end[1])].ended = True
        else:
            name, colon, value = text.partition(": ")
            assert colon, text
            current.fields[name] = value
    return found


def test_every_request_has_its_record(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    engine = ScriptedEngine(
        Script.text("why</think>Whole."),
        Script.text("hm</think>Streamed."),
        Script.text(f"go</think>I look.{CALL}"),
        Script.text("</think>" + "on and on " * 20_000, 10),
        syntax="deepseek4",
        step_seconds=0.001,
    )
    server = serve(engine, slots=1, trace=path, api_keys=("sk-secret",))
    server.http.headers["Authorization"] = "Bearer sk-secret"
    assert server.chat("one", seed=7, temperature=0.5).status_code == 200
    assert server.chat("two", stream=True).text.endswith("data: [DONE]\n\n")
    assert server.chat("three", tools=TOOLS).json()["choices"][0]["finish_reason"] == "tool_calls"
    body = {"messages": [{"role": "user", "content": "four"}], "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        read_until(response.iter_bytes(), b" and on")
    server.stop()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"sk-secret" not in path.read_bytes()
    found = read(path)
    assert sorted(found) == [1, 2, 3, 4] and all(record.ended for record in found.values())
    whole, streamed, called, cancelled = (found[i] for i in (1, 2, 3, 4))
    for record, prompt in zip(found.values(), engine.prompts, strict=True):
        assert record.part("rendered prompt").decode() == prompt
        assert int(record.fields["cached_tokens"]) + int(record.fields["effective_prompt_tokens"]) == len(
            engine.tokenizer.encode_with_specials(prompt)
        )
    assert json.loads(whole.part("request json"))["messages"] == [{"role": "user", "content": "one"}]
    assert (whole.fields["kind"], whole.fields["stream"], whole.fields["seed"]) == ("chat", "false", "7")
    assert (whole.fields["temperature"], whole.fields["think_mode"], whole.fields["tools"]) == ("0.5", "true", "false")
    assert whole.part("generated", "reasoning") == b"why" and whole.part("generated", "content") == b"Whole."
    assert whole.fields["finish"] == "stop"
    assert streamed.fields["stream"] == "true" and streamed.part("generated", "content") == b"Streamed."
    assert streamed.fields["cache_source"] != "none" and int(streamed.fields["cached_tokens"]) > 0
    assert called.fields["tools"] == "true" and called.fields["finish"] == "tool_calls"
    assert json.loads(called.part("generated", "call ls")) == {"p": "/"}
    assert called.part("generated", "sampled call").decode().strip() == CALL.strip()
    assert cancelled.fields["finish"] == "cancelled"
    assert b"".join(data for t, k, data in cancelled.parts if k == "content").startswith(b"on and on on")


def test_a_call_that_cannot_be_read_and_the_second_attempt(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    broken = CALL.removesuffix(f"</{D}invoke>\n</{D}tool_calls>")
    server = serve(
        ScriptedEngine(
            Script.text(f"x</think>A.{broken}", 7), Script.text(f"y</think>B.{CALL}", 7), syntax="deepseek4"
        ),
        slots=1,
        trace=path,
    )
    assert server.chat("go", tools=TOOLS).status_code == 200
    server.stop()
    first, second = read(path).values()
    assert (first.fields["again"], second.fields["again"]) == ("false", "true")
    assert first.fields["broken_call"] and second.fields["finish"] == "tool_calls"


def test_the_start_up_lines_name_the_file_and_an_old_one_is_emptied(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text("old")
    path.chmod(0o644)
    check_file(path)
    assert path.read_text() == "old"
    server = serve("x", trace=path)
    lines = server.app.startup_lines()
    assert lines.index(f"tracing session to {path}") < lines.index(f"listening on {server.url}")
    server.stop()
    assert path.read_bytes() == b"" and stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("name", "why"),
    [("no/such/file", "No such file or directory"), (".", "Is a directory"), ("pipe", "No such device or address")],
)
def test_a_file_that_cannot_be_opened(tmp_path: Path, name: str, why: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    for opens in (check_file, lambda path: Tracer(path, Letters())):
        with pytest.raises(ConfigError) as raised:
            opens(tmp_path / name)
        assert str(raised.value) == f"--trace {tmp_path / name}: {why}"


def test_a_device_is_no_trace_file() -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        check_file(Path("/dev/null"))


class Letters:
    """A tokenizer that decodes when `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def decode(self, ids: Iterable[int], /) -> bytes:
        self.entered.set()
        assert self.gate.wait(30)
        return bytes(ids)


def test_texts_of_clients_begin_no_line_and_counts_skip_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    tracer = Tracer(path, Letters())
    record = tracer.begin(REQUEST, b"{}\n===== request 8 2026-01-01 00:00:00 =====", stream=False)
    record.take([Started(0, "none", 2, 0), ContentDelta("--- end --- request 1\n\ud800"), FINISH])
    tracer.begin(REQUEST, b"", stream=True).take([Failed("shutdown\nrequested", 503)])
    tracer.close()
    first, second = read(path).values()
    assert first.part("rendered prompt") == b"Hi"
    assert first.fields["model"] == "m\\n===== request 9 ====="
    assert first.part("generated", "content") == b"--- end --- request 1\n\\ud800"
    assert (second.fields["status"], second.fields["error"]) == ("503", "shutdown\\nrequested")
    assert first.ended and second.ended


def test_sections_of_requests_side_by_side_find_their_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    tracer = Tracer(path, Letters())
    records = [tracer.begin(REQUEST, b"", stream=True) for _ in range(3)]
    for _ in range(5000):
        for record in records:
            record.take([ContentDelta(f"{record.number} says ")])
    for record in reversed(records):
        record.take([FINISH])
    tracer.close()
    found = read(path)
    for record in records:
        parts = [data for _, kind, data in found[record.number].parts if kind == "content"]
        assert b"".join(parts) == b"%d says " % record.number * 5000
        assert len(parts) > 1, "long output is written as it comes"


def test_a_slow_file_costs_sections_and_nobody_waits(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    letters = Letters()
    letters.gate.clear()
    tracer = Tracer(path, letters, backlog=1000)
    first = tracer.begin(REQUEST, b"", stream=True)
    assert letters.entered.wait(30)
    for _ in range(50):
        tracer.begin(REQUEST, b"x" * 600, stream=True)
    assert tracer._waiting <= 1000
    letters.gate.set()
    first.take([FINISH])
    tracer.close()
    text = path.read_text()
    assert re.findall(r"^===== request (\d+)", text, re.M) == ["1", "2"]
    assert sum(map(int, re.findall(r"--- (\d+) sections are missing: the file is too slow ---", text))) >= 49


def test_a_write_that_fails_ends_the_trace_and_not_the_server(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("ds4"), "propagate", True)
    path = tmp_path / "trace.txt"
    server = serve("one", "two", trace=path)
    real = os.write

    def full(fd: int, data: Any) -> int:
        if threading.current_thread().name == "ds4-trace":
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr("ds4.server.trace.os.write", full)
    assert server.chat().status_code == 200
    assert server.chat().status_code == 200
    server.stop()
    ends = [r.getMessage() for r in caplog.records if "trace" in r.getMessage()]
    assert ends == [f"the trace ends here: {path}: No space left on device"]
    assert path.read_bytes() == b""
