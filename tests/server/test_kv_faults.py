"""Faults under a running server: each costs time only, once, and is never tried again and again."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ds4.prompt.types import Message
from ds4.server import kvfile, kvstore
from ds4.server.kvdir import temporary_files
from tests.server.test_checkpoints import Machine, cold_answer, conversation

NOBODY = 65534


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that any user may reach, for servers that are not root."""
    made = Path(tempfile.mkdtemp(prefix="ds4-kv-"))
    made.chmod(0o755)
    yield made / "kv"
    with suppress(OSError):
        (made / "kv").chmod(0o700)
    shutil.rmtree(made, ignore_errors=True)


@contextmanager
def no_root(directory: Path) -> Iterator[None]:
    """As a user whom file permissions bind. All threads of the process are that user meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    for path in (directory.parent, directory, *directory.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def flip(offset: Callable[[kvfile.Layout], int]) -> Callable[[Path, Any], None]:
    def fault(path: Path, _: Any) -> None:
        with path.open("r+b", buffering=0) as file:
            at = offset(kvfile.read_layout(file))
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), at)

    return fault


def cut(offset: Callable[[kvfile.Layout], int]) -> Callable[[Path, Any], None]:
    def fault(path: Path, _: Any) -> None:
        with path.open("r+b", buffering=0) as file:
            os.ftruncate(file.fileno(), offset(kvfile.read_layout(file)))

    return fault


def delete(path: Path, _: Any) -> None:
    path.unlink()


def no_permission(path: Path, _: Any) -> None:
    path.chmod(0o000)


def unreadable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk reports errors from the payload on."""
    read = os.preadv

    def fails(descriptor: int, buffers: Any, offset: int) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == path.resolve():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)


FAULTS: dict[str, Callable[[Path, Any], None]] = {
    "bit of the header: tokens": flip(lambda layout: 8),
    "bit of the header: payload size": flip(lambda layout: 41),
    "bit of the text": flip(lambda layout: 52 + layout.text_bytes // 2),
    "bit of the text's end": flip(lambda layout: layout.payload_at - 2),
    "bit of the payload": flip(lambda layout: (layout.payload_at + layout.trailer_at) // 2),
    "bit of the trailer": flip(lambda layout: layout.seal_at - 3),
    "bit of the seal": flip(lambda layout: layout.size - 7),
    "cut in the header": cut(lambda layout: 30),
    "cut behind the header": cut(lambda layout: 48),
    "cut in the text": cut(lambda layout: 60),
    "cut behind the text": cut(lambda layout: layout.payload_at),
    "cut in the payload": cut(lambda layout: layout.payload_at + 50),
    "cut behind the payload": cut(lambda layout: layout.trailer_at),
    "cut behind the trailer": cut(lambda layout: layout.seal_at),
    "cut before the last byte": cut(lambda layout: layout.size - 1),
    "deleted": delete,
    "permission lost": no_permission,
    "read errors": unreadable,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_met_once(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Under a server that has the file in its index: right answers, at most one load of it, and business as usual."""
    machine = Machine(directory, cold_max=0)
    talk = conversation("Anna")
    machine.ask(talk)
    machine.store._tools.remember(["call_1"], b"<tool_call>x</tool_call>")  # type: ignore[union-attr]
    machine.stop()
    talk.append(Message("user", "And now?"))
    expected = cold_answer(talk, tmp_path)
    machine.start()
    (path,) = directory.glob("*.kv")
    if "trailer" in fault:
        with path.open("r+b", buffering=0) as file:
            kvfile.rewrite_trailer(file, kvfile.read_layout(file), b"KTM\x01" + bytes(12))
        machine.stop()
        machine.start()
    loads: list[str] = []
    load = machine.store.load

    def counted(entry: Any, *arguments: Any) -> None:
        loads.append(entry.name)
        load(entry, *arguments)

    monkeypatch.setattr(machine.store, "load", counted)
    FAULTS[fault](path, monkeypatch)
    with no_root(directory):
        for _ in range(3):
            job = machine.ask(list(talk))
            assert machine.driver.text(job) == expected
            machine.store.flush()
            for slot in machine.driver.scheduler.slots:
                slot.session.clear()
                slot.forget()
    assert loads.count(path.stem) <= 1, "tried once, not again and again"
    monkeypatch.undo()
    with suppress(OSError):
        path.chmod(0o600)
    machine.restart()
    assert machine.driver.text(machine.ask(list(talk))) == expected
    assert temporary_files(directory) == []
    machine.stop()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT])
def test_a_disk_that_takes_nothing_any_more(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Nothing is stored, nothing is lost, and when the disk recovers it is used again."""
    machine = Machine(directory)
    talks = [conversation(name) for name in ("Anna", "Bert")]
    machine.ask(talks[0])
    machine.store.flush()
    before = sorted(path.name for path in directory.glob("*.kv"))
    with monkeypatch.context() as patch:

        def fails(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        patch.setattr(kvstore, "create", fails)
        expected = cold_answer(talks[1], tmp_path)
        assert machine.driver.text(machine.ask(talks[1])) == expected
        machine.store.flush()
        assert sorted(path.name for path in directory.glob("*.kv")) == before
    machine.stop()
    assert len(list(directory.glob("*.kv"))) > len(before)


def test_a_directory_that_becomes_read_only_under_a_server(directory: Path, tmp_path: Path) -> None:
    """Without the right to write: what is there is still loaded, hits are not counted, nothing new comes."""
    machine = Machine(directory)
    first, second = conversation("Anna"), conversation("Bert", system="Another system. " * 20)
    machine.ask(first)
    machine.restart()
    before = sorted(path.name for path in directory.glob("*.kv"))
    expected = cold_answer(second, tmp_path)
    first.append(Message("user", "And now?"))
    with no_root(directory):
        directory.chmod(0o500)
        for path in directory.glob("*.kv"):
            path.chmod(0o400)
        job = machine.ask(first)
        assert machine.reuse(job)[0] == "disk-text"
        assert machine.driver.text(machine.ask(second)) == expected
        machine.store.flush()
        assert sorted(path.name for path in directory.glob("*.kv")) == before
        directory.chmod(0o700)
    machine.stop()


def test_a_directory_that_is_deleted_under_a_server(directory: Path, tmp_path: Path) -> None:
    machine = Machine(directory)
    talk = conversation("Anna")
    machine.ask(talk)
    machine.restart()
    shutil.rmtree(directory)
    talk.append(Message("user", "And now?"))
    expected = cold_answer(talk, tmp_path)
    for _ in range(2):
        assert machine.driver.text(machine.ask(list(talk))) == expected
        machine.store.flush()
    machine.stop()
