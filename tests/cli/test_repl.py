"""The `ds4>` prompt over a pipe: commands, turns, history file."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from ds4.cli.chat import Chat
from ds4.cli.repl import HISTORY_LINES, LineHistory, Repl
from ds4.engine.types import SamplingParams
from ds4.prompt.chatml import ChatMLRenderer
from ds4.testing import ScriptedEngine


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


def run(keys: PipeInput, typed: str, *answers: str, history: Path | None = None, ctx: int = 4096) -> ScriptedEngine:
    engine = ScriptedEngine(*(answers or ("an answer",)), ctx=ctx)
    keys.send_text(typed)
    chat = Chat(engine, ChatMLRenderer(), SamplingParams(temperature=0))
    assert Repl(chat, history).run() == 0
    return engine


def test_turns_share_a_session_until_reset(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    engine = run(keys, "one\rtwo\r/reset\rthree\r/quit\r", "A1", "A2", "A3")
    out = capsys.readouterr()
    assert out.out == "A1\nA2\nA3\n"
    assert "A1" in engine.prompts[1] and "A1" not in engine.prompts[2]
    assert "Chat reset." in out.err and out.err.count("t/s") == 6


def test_commands_say_what_is_wrong(keys: PipeInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad").write_bytes(b"ab\xff")
    missing = tmp_path / "missing"
    typed = f"/nope\r/ctx x\r/ctx 99999999\r/temp hot\r/read {missing}\r/read {tmp_path / 'bad'}\r\x04"
    run(keys, typed)
    err = capsys.readouterr().err
    for part in ("unknown command /nope", "/ctx needs a number", "trained for 4096", "from 0 to 100", "No such file"):
        assert part in err
    assert "not UTF-8 text at byte 2" in err


def test_read_sends_a_file_and_ctx_makes_a_new_session(keys: PipeInput, tmp_path: Path) -> None:
    (tmp_path / "turn.txt").write_text("from a file")
    engine = run(keys, f"/ctx 512\r/temp 0.5\r/read {tmp_path / 'turn.txt'}\r/help\r/exit\r")
    assert "from a file" in engine.prompts[0]
    assert engine.sessions[-1].ctx == 512
    assert engine.samplers[-1].params.temperature == 0.5


def test_overflow_is_told_and_the_prompt_comes_back(keys: PipeInput, capsys: pytest.CaptureFixture[str]) -> None:
    run(keys, "x" * 300 + "\rhi\r/quit\r", "still here", ctx=128)
    out = capsys.readouterr()
    assert "context size is 128" in out.err and out.out.endswith("still here\n")


def test_history_is_private_bounded_and_keeps_newlines(tmp_path: Path) -> None:
    path = tmp_path / "history"
    history = LineHistory(path)
    for i in range(HISTORY_LINES + 10):
        history.store_string(f"line {i}\nsecond")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = list(history.load_history_strings())
    assert len(kept) == HISTORY_LINES and kept[0] == f"line {HISTORY_LINES + 9}\nsecond"
    assert kept[-1] == "line 10\nsecond"
