"""`ds4 kv`: lists, shows, verifies and tidies a directory of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4.cli.kv import spelled
from ds4.cli.main import main
from ds4.server.kvpolicy import KvConfig
from ds4.server.kvstore import KvStore, sha1_hex
from ds4.server.tool_memory import ToolMemory
from ds4.testing import ScriptedEngine

BLOCK = b"<tool_call>{}</tool_call>"
KEYS = (b"\xff\x03\x01\x00\x00user\nhello \x1b[31m" + b"a" * 200 + BLOCK, b"b" * 400, b"c" * 100)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    engine = ScriptedEngine(ctx=4096)
    tools = ToolMemory()
    tools.remember(["call_1"], BLOCK)
    store = KvStore(KvConfig(tmp_path, min_tokens=16), engine, tool_memory=tools)
    for key in KEYS:
        session = engine.new_session()
        session.sync([b for b in key if b < 255])
        store.offer(session, key, "cold")
    store.close()
    return tmp_path


@pytest.fixture
def held(directory: Path) -> Iterator[Path]:
    store = KvStore(KvConfig(directory), ScriptedEngine())
    yield directory
    store.close()


def path_of(directory: Path, key: bytes) -> Path:
    return directory / f"{sha1_hex(key)}.kv"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_ls(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "ls", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[-1].startswith("3 files, ")
    assert main(["kv", "ls", "--json", str(directory)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["text_bytes"] for row in rows} == {sha1_hex(key): len(key) for key in KEYS}
    assert {row["reason"] for row in rows} == {"cold"}
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    path_of(directory, KEYS[2]).write_bytes(b"KVC")
    assert main(["kv", "ls", str(directory)]) == 1
    assert "the header alone has 48" in capsys.readouterr().out


def test_show(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "show", str(directory), sha1_hex(KEYS[0])[:12]]) == 0
    out = capsys.readouterr().out
    assert "<|#259|>user\nhello \\x1b[31maaa" in out, "special tokens spelled, control characters escaped"
    assert "call_1 (25 bytes)" in out
    assert "\x1b" not in out
    assert main(["kv", "show", str(directory), "zz"]) == 2
    assert main(["kv", "show", str(directory), ""]) == 2
    assert "3 checkpoints of that name" in capsys.readouterr().err


def test_spelled() -> None:
    assert spelled(b"\xff\x01\x00\x00\x00a\tb\nc\\n") == "<|#1|>a\\tb\nc\\n"


def test_verify(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "verify", str(directory)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 sound, 0 not, 0 leftovers"
    victim = path_of(directory, KEYS[1])
    flip(victim, 300)
    assert main(["kv", "verify", "-q", str(directory)]) == 1
    assert capsys.readouterr().out == f"{victim.name}: text or payload do not match their checksum\n"
    assert victim.exists()
    assert main(["kv", "verify", str(directory / "none")]) == 2


def test_gc(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leftover = directory / f"{'ab' * 20}.kv.tmp.123"
    leftover.write_bytes(b"x" * 100)
    cut = path_of(directory, KEYS[2])
    cut.write_bytes(cut.read_bytes()[:60])
    assert main(["kv", "gc", "--dry-run", "--budget-mb", "0", str(directory)]) == 0
    assert "would remove 4 files" in capsys.readouterr().out
    assert leftover.exists() and cut.exists()
    assert main(["kv", "gc", str(directory)]) == 0
    assert "removed 2 files" in capsys.readouterr().out
    assert not leftover.exists() and not cut.exists()
    assert main(["kv", "gc", "--budget-mb", "0", str(directory)]) == 0
    assert not list(directory.glob("*.kv"))


def test_gc_leaves_a_running_server_alone(held: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv", "gc", str(held)]) == 2
    assert "is used by another server" in capsys.readouterr().err
    assert main(["kv", "ls", str(held)]) == 0
