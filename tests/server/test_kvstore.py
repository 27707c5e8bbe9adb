"""The directory of checkpoints: what is found, what is refused, what survives faults."""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4.errors import Cancelled, CheckpointError
from ds4.server import kvfile, kvstore
from ds4.server.kvdir import DirectoryInUseError, temporary_files
from ds4.server.kvpolicy import KvConfig
from ds4.server.kvstore import KvStore
from ds4.server.tool_memory import ToolMemory
from ds4.testing import ScriptedEngine

MIN = 16


class Opener:
    """Opens stores of one directory; closes them at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engine = ScriptedEngine(ctx=4096)
        self.now = 1_000_000.0
        self._stores: list[KvStore] = []

    def __call__(
        self, *, engine: ScriptedEngine | None = None, tools: ToolMemory | None = None, **fields: Any
    ) -> KvStore:
        config = KvConfig(self.directory, **{"min_tokens": MIN, "boundary_align": 0, **fields})
        store = KvStore(config, engine or self.engine, tool_memory=tools, clock=lambda: self.now)
        self._stores.append(store)
        return store

    def close(self) -> None:
        for store in self._stores:
            store.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(tmp_path / "kv")
    yield opener
    opener.close()


def put(store: KvStore, text: bytes, reason: str = "cold", engine: ScriptedEngine | None = None) -> bool:
    """Stores a session that holds `text`, one token per byte."""
    session = (engine or store._engine).new_session()  # type: ignore[union-attr]
    session.sync(list(text))
    done = store.offer(session, text, reason)
    store.flush()
    return done


def get(store: KvStore, key: bytes) -> bytes | None:
    """The tokens of what a prompt finds, loaded."""
    entry = store.find(key)
    if entry is None:
        return None
    session = store._engine.new_session()
    store.load(entry, session, key)
    store.flush()
    return bytes(session.tokens.tolist())


def files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.suffix == ".kv")


def text(n: int, seed: int = 0) -> bytes:
    return bytes(random.Random(seed).choices(range(97, 123), k=n))


def test_what_was_stored_is_found_after_a_restart(opened: Opener) -> None:
    store = opened()
    a, b = text(100), text(60)
    assert put(store, a) and put(store, b)
    assert get(store, a + b"more") == a, "the longest text wins"
    assert get(store, a[:80]) == b
    assert get(store, text(200, 9)) is None
    store.close()
    again = opened()
    assert len(again) == 2
    assert get(again, a + b"more") == a
    assert oct(opened.directory.stat().st_mode & 0o777) == "0o700"
    assert all(oct((opened.directory / name).stat().st_mode & 0o777) == "0o600" for name in files(opened.directory))


def test_what_is_not_stored(opened: Opener) -> None:
    store = opened(budget_bytes=2000)
    assert not put(store, text(MIN - 1))
    assert not put(store, text(2000)), "larger than the budget"
    assert files(opened.directory) == []
    assert put(store, text(MIN))


def test_hits_are_counted_and_survive(opened: Opener) -> None:
    store = opened()
    put(store, text(100))
    opened.now += 50
    get(store, text(100) + b"x")
    get(store, text(100) + b"y")
    store.close()
    (path,) = opened.directory.glob("*.kv")
    with path.open("rb", buffering=0) as file:
        h = kvfile.read_layout(file).header
    assert (h.hits, h.created, h.used) == (2, 1_000_000, 1_000_050)
    assert get(opened(), text(100) + b"z") is not None, "a hit does not break the seal"


def test_the_same_checkpoint_is_written_once(opened: Opener) -> None:
    store = opened()
    put(store, text(100))
    (path,) = opened.directory.glob("*.kv")
    inode = path.stat().st_ino
    opened.now += 9
    assert put(store, text(100), "shutdown")
    assert path.stat().st_ino == inode
    with path.open("rb", buffering=0) as file:
        h = kvfile.read_layout(file).header
    assert (h.reason, h.used) == ("cold", 1_000_009)


def test_budget_holds_at_every_moment(opened: Opener) -> None:
    store = opened(budget_bytes=3 * 800)
    seen: list[int] = []
    for i in range(12):
        put(store, text(100, i))
        seen.append(sum((opened.directory / name).stat().st_size for name in files(opened.directory)))
        opened.now += 1
    assert max(seen) <= 3 * 800
    assert len(store) == 3
    assert get(store, text(100, 11)) is not None, "the newest is there"
    assert get(store, text(100, 0)) is None
    store.close()
    assert len(opened(budget_bytes=1000)) == 1, "a smaller budget holds from the start"


def test_files_of_nobody_count_and_go_first(opened: Opener) -> None:
    store = opened()
    put(store, text(100))
    store.close()
    foreign = opened.directory / ("ab" * 20 + ".kv")
    foreign.write_bytes(b"KVC\x01" + bytes(16) + b"\x02" + bytes(900))
    (opened.directory / "sysprompt.kv").write_bytes(b"not ours")
    store = opened(budget_bytes=1900)
    assert foreign.exists() and len(store) == 2
    put(store, text(100, 1))
    assert not foreign.exists()
    assert len(store) == 2
    assert (opened.directory / "sysprompt.kv").exists()


def test_other_weights_are_never_used(opened: Opener) -> None:
    store = opened()
    put(store, text(100))
    store.close()
    other = opened(engine=ScriptedEngine(ctx=4096, model_id="other weights"))
    assert other.find(text(100) + b"x") is None
    put(other, text(100))
    assert len(other) == 1, "the same text: replaced"
    assert get(other, text(100) + b"x") is not None


def test_a_context_that_is_too_small_does_not_see_it(opened: Opener) -> None:
    store = opened()
    put(store, text(1000))
    put(store, text(100))
    store.close()
    small = opened(engine=ScriptedEngine(ctx=512))
    assert get(small, text(1000) + b"x") == text(100)


# ---- faults


def damage(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("place", ["header", "text", "payload", "end"])
def test_one_flipped_bit(opened: Opener, place: str, caplog: pytest.LogCaptureFixture) -> None:
    """A miss, the file is gone, a line names it, and the next store works."""
    store = opened()
    put(store, text(400))
    (path,) = opened.directory.glob("*.kv")
    size = path.stat().st_size
    damage(path, {"header": 8, "text": 52 + 200, "payload": 52 + 400 + 900, "end": size - 2}[place])
    entry = store.find(text(400) + b"x")
    assert entry is not None
    session = opened.engine.new_session()
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError):
        store.load(entry, session, text(400) + b"x")
    assert session.n_tokens == 0
    assert not path.exists()
    assert path.name in caplog.text
    assert store.find(text(400) + b"x") is None
    assert put(store, text(400))
    assert get(store, text(400) + b"x") == text(400)


def borders(path: Path) -> list[int]:
    with path.open("rb", buffering=0) as file:
        layout = kvfile.read_layout(file)
    marks = [0, 48, 52, layout.payload_at, layout.trailer_at, layout.seal_at, layout.size]
    return sorted({m + d for m in marks for d in (-1, 0, 1) if 0 <= m + d < layout.size} | {layout.payload_at + 40})


def test_truncation_at_every_border(opened: Opener) -> None:
    tools = ToolMemory()
    tools.remember(["call_1"], b"<tool_call>abc</tool_call>")
    store = opened(tools=tools)
    key = text(100) + b"<tool_call>abc</tool_call>" + text(20)
    put(store, key)
    (path,) = opened.directory.glob("*.kv")
    whole = path.read_bytes()
    cuts = borders(path)
    assert len(cuts) > 15
    for cut in cuts:
        path.write_bytes(whole[:cut])
        entry = store.find(key + b"x")
        assert entry is not None, cut
        with pytest.raises(CheckpointError):
            store.load(entry, opened.engine.new_session(), key + b"x")
        assert not path.exists(), f"cut at {cut}"
        path.write_bytes(whole)
        store.close()
        store = opened(tools=tools)
    path.write_bytes(whole[:200])
    store.close()
    store = opened(tools=tools)
    assert files(opened.directory) == [], "seen at the start too"


class Failing(io.RawIOBase):
    """A file on a disk that becomes full after `room` bytes."""

    def __init__(self, path: Path, room: int, code: int) -> None:
        self._file = path.open("wb", buffering=0)
        self._room = room
        self._code = code

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: Any) -> int:
        data = memoryview(data)
        if data.nbytes > self._room:
            self._file.write(data[: self._room])
            raise OSError(self._code, os.strerror(self._code))
        self._room -= data.nbytes
        return self._file.write(data)

    def close(self) -> None:
        super().close()
        self._file.close()


def test_a_full_disk_at_every_place(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()
    put(store, text(60))
    size = next(opened.directory.glob("*.kv")).stat().st_size + 5 * 40
    rng = random.Random(3)
    rooms = [0, 1, 47, 48, 51, 52, 152, *(rng.randrange(size) for _ in range(20)), size - 1]
    for room in rooms:
        code = rng.choice([errno.ENOSPC, errno.EIO, errno.EDQUOT])

        def fails(path: Path, room: int = room, code: int = code) -> Failing:
            return Failing(path, room, code)

        monkeypatch.setattr(kvstore, "create", fails)
        put(store, text(100))
        assert len(files(opened.directory)) == 1
        assert temporary_files(opened.directory) == []
        assert get(store, text(60) + b"x") == text(60), "what was there is still good"
    monkeypatch.undo()
    put(store, text(100))
    assert get(store, text(100) + b"x") == text(100)


def test_a_small_tmpfs(opened: Opener, tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mount], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no permission to mount a tmpfs")
    try:
        opened.directory = mount / "kv"
        store = opened()
        for i in range(40):
            put(store, text(900, i))
        assert temporary_files(opened.directory) == []
        assert len(store) == len(files(opened.directory)) > 2
        found = sum(get(store, text(900, i) + b"x") == text(900, i) for i in range(40))
        assert found == len(store)
        store.close()
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_failing_rename_and_fsync(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened()

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    for target, name in ((Path, "replace"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, fails)
            put(store, text(100))
        assert temporary_files(opened.directory) == [] and len(store) == 0
    put(store, text(100))
    assert len(store) == 1


def test_a_directory_that_becomes_read_only(opened: Opener) -> None:
    store = opened()
    put(store, text(60))
    opened.directory.chmod(0o500)
    try:
        if os.access(opened.directory, os.W_OK):
            pytest.skip("this user may write anywhere")
        put(store, text(100))
        assert len(store) == 1
        assert get(store, text(100)) == text(60)
    finally:
        opened.directory.chmod(0o700)
    put(store, text(100))
    assert get(store, text(100) + b"x") == text(100)


def test_deletion_under_it(opened: Opener) -> None:
    store = opened()
    put(store, text(60))
    put(store, text(100))
    next(p for p in opened.directory.glob("*.kv") if p.stat().st_size > 500).unlink()
    entry = store.find(text(100) + b"x")
    assert entry is not None
    with pytest.raises(FileNotFoundError):
        store.load(entry, opened.engine.new_session(), text(100) + b"x")
    assert get(store, text(100) + b"x") == text(60), "the next best"
    shutil.rmtree(opened.directory)
    put(store, text(200))
    entry = store.find(text(100))
    assert entry is not None
    with pytest.raises(OSError):
        store.load(entry, opened.engine.new_session(), text(100))
    assert len(store) == 0


def test_a_payload_that_the_engine_refuses_is_not_chosen_again(opened: Opener) -> None:
    """Sealed and sound, but of no use here: the file stays, this process does not try it twice."""
    store = opened()
    session = opened.engine.new_session()
    session.sync(list(text(100)))
    session.save = lambda out: out.write(b"SCRIPTEX" + bytes(409))  # type: ignore[method-assign]
    opened.engine.new_session = lambda ctx=None: session  # type: ignore[method-assign,assignment]
    session.fork_from = lambda *_: None  # type: ignore[method-assign]
    assert store.offer(session, text(100), "cold")
    store.flush()
    del opened.engine.new_session
    entry = store.find(text(100) + b"x")
    assert entry is not None
    target = opened.engine.new_session()
    with pytest.raises(CheckpointError, match="not a scripted session"):
        store.load(entry, target, text(100) + b"x")
    assert target.n_tokens == 0
    assert len(files(opened.directory)) == 1
    assert store.find(text(100) + b"x") is None


def test_cancelled_load_keeps_the_file(opened: Opener) -> None:
    store = opened()
    put(store, text(100))
    entry = store.find(text(100) + b"x")
    assert entry is not None
    session = opened.engine.new_session()
    with pytest.raises(Cancelled):
        store.load(entry, session, text(100) + b"x", lambda: True)
    assert session.n_tokens == 0
    assert get(store, text(100) + b"x") == text(100)


# ---- who owns a directory


def test_one_writer_per_directory(opened: Opener) -> None:
    store = opened()
    put(store, text(100))
    with pytest.raises(DirectoryInUseError, match=f"used by another server \\(pid {os.getpid()}\\)"):
        opened()
    reader = opened(read_only=True)
    assert get(reader, text(100) + b"x") == text(100)
    assert not put(reader, text(200))
    put(store, text(300))
    os.utime(opened.directory)
    reader.find(b"any prompt makes it look")
    reader.flush()
    assert get(reader, text(300) + b"x") == text(300), "a reader follows the owner"
    store.close()
    opened().close()


def test_leftovers_of_a_killed_writer(opened: Opener) -> None:
    store = opened()
    put(store, text(100))
    store.close()
    leftovers = [opened.directory / f"{'cd' * 20}.kv.tmp.{pid}" for pid in (1, 99999)]
    for path in leftovers:
        path.write_bytes(b"half")
    other = opened.directory / "notes.tmp.1"
    other.write_bytes(b"somebody's")
    opened(read_only=True)
    assert all(path.exists() for path in leftovers), "a reader touches nothing"
    store = opened()
    assert not any(path.exists() for path in leftovers)
    assert other.exists()
    assert get(store, text(100)) is not None


def test_ten_thousand_files_are_read_from_their_headers(opened: Opener) -> None:
    """Work is bounded by what is read per file: one open, one stat, 52 bytes."""
    opened().close()
    made = 2000
    session = opened.engine.new_session()
    session.sync(list(text(20)))
    header = kvfile.Header(
        model_id=kvstore.model_id(opened.engine.fingerprint),
        quant_bits=8,
        reason="cold",
        flags=0,
        tokens=20,
        hits=0,
        ctx=4096,
        created=1,
        used=1,
        payload_bytes=session.payload_bytes(),
    )
    keys = [b"%020d" % i + b"x" * (i % 500) for i in range(made)]
    for key in keys:
        with (opened.directory / f"{kvstore.sha1_hex(key)}.kv").open("wb") as file:
            kvfile.write_file(file, header, key, session.save)
    started = time.process_time()
    store = opened()
    print(f"{made} files: {time.process_time() - started:.3f} s of CPU to open")
    assert len(store) == made
    started = time.process_time()
    for key in keys[::97]:
        found = store.find(key + b"y" * 1000)
        assert found is not None and found.name == kvstore.sha1_hex(key)
    print(f"{(time.process_time() - started) / len(keys[::97]) * 1e3:.2f} ms per look-up among 500 lengths")


# ---- threads


def test_stores_and_loads_side_by_side(opened: Opener) -> None:
    store = opened(budget_bytes=40_000)
    errors: list[BaseException] = []
    over = threading.Event()
    found = 0

    def reader(seed: int) -> None:
        nonlocal found
        rng = random.Random(seed)
        session = opened.engine.new_session()
        try:
            while not over.is_set():
                key = text(100 + rng.randrange(60), rng.randrange(30)) + b"!"
                entry = store.find(key)
                if entry is None:
                    continue
                try:
                    store.load(entry, session, key)
                except FileNotFoundError:
                    continue  # evicted meanwhile
                assert bytes(session.tokens.tolist()) == key[: session.n_tokens]
                found += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for i in range(60):
        put(store, text(100, i % 30))
    over.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert found


def test_a_slow_disk_holds_nobody_up(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers return at once; beyond a few the newest are skipped; what the session does later is not stored."""
    gate = threading.Event()
    create: Callable[[Path], Any] = kvstore.create

    def slow(path: Path) -> Any:
        gate.wait(30)
        return create(path)

    monkeypatch.setattr(kvstore, "create", slow)
    store = opened()
    session = opened.engine.new_session()
    taken = []
    for i in range(kvstore.MAX_PENDING + 3):
        session.clear()
        session.sync(list(text(100, i)))
        taken.append(store.offer(session, text(100, i), "evict"))
        assert store.offer(session, text(100, i), "evict") == taken[-1], "not twice"
    session.clear()
    gate.set()
    store.flush()
    assert taken == [True] * kvstore.MAX_PENDING + [False] * 3
    assert [get(store, text(100, i) + b"x") == text(100, i) for i in range(7)] == taken


# ---- tool calls


def test_tool_calls_come_back_after_a_restart(opened: Opener) -> None:
    tools = ToolMemory()
    block = b"<tool_call>{1}</tool_call>"
    tools.remember(["call_a", "call_b"], block)
    tools.remember(["call_c"], b"<tool_call>{2}</tool_call>")
    store = opened(tools=tools)
    put(store, text(50) + block + text(20))
    store.close()
    fresh = ToolMemory()
    store = opened(tools=fresh)
    assert store.restore_calls({"call_b", "call_c", "call_x"}) == 1
    assert fresh.block("call_b") == block
    assert "call_a" not in fresh, "only what is asked for"
    assert store.restore_calls({"call_a"}) == 1
    get(store, text(50) + block + text(20) + b"x")
    assert "call_a" in fresh


def test_a_damaged_map_is_not_believed(opened: Opener) -> None:
    tools = ToolMemory()
    tools.remember(["call_a"], b"<tool_call>{1}</tool_call>")
    store = opened(tools=tools)
    put(store, text(50) + b"<tool_call>{1}</tool_call>")
    store.close()
    (path,) = opened.directory.glob("*.kv")
    damage(path, path.stat().st_size - kvfile.SEAL_BYTES - 14)
    fresh = ToolMemory()
    assert opened(tools=fresh).restore_calls({"call_a"}) == 0
    assert len(fresh) == 0


def test_a_map_that_grew_is_written_again(opened: Opener) -> None:
    tools = ToolMemory()
    store = opened(tools=tools)
    key = text(50) + b"<tool_call>{1}</tool_call>"
    put(store, key)
    tools.remember(["call_late"], b"<tool_call>{1}</tool_call>")
    put(store, key, "shutdown")
    store.close()
    fresh = ToolMemory()
    store = opened(tools=fresh)
    assert store.restore_calls({"call_late"}) == 1
    assert get(store, key + b"x") == key


# ---- killed


KILLED = """
import sys
sys.path[:0] = {path!r}
from tests.server.test_kvstore import Opener, put, text
from pathlib import Path
opener = Opener(Path({directory!r}))
store = opener(budget_bytes=200_000)
print("ready", flush=True)
i = 0
while True:
    put(store, text(4000, i), "continued")
    i += 1
"""


def kill_rounds(opened: Opener, rounds: int, seed: int) -> None:
    """Kills a busy writer at random moments; whatever it leaves is whole or goes."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    loaded = 0
    for _ in range(rounds):
        code = KILLED.format(path=sys.path, directory=str(opened.directory))
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.wait()
        process.stdout.close()
        store = opened(budget_bytes=200_000)
        assert temporary_files(opened.directory) == []
        assert store.bytes_used == sum(p.stat().st_size for p in opened.directory.glob("*.kv")) <= 200_000
        for i in range(6):
            found = get(store, text(4000, i) + b"x")
            assert found in (None, text(4000, i))
            loaded += found is not None
        store.close()
    assert loaded


def test_killed_while_writing(opened: Opener) -> None:
    kill_rounds(opened, 3, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_two_hundred_times(opened: Opener) -> None:
    kill_rounds(opened, 200, 2)
