"""Checkpoints in a directory: found by the text they begin with, written and read beside the running engine.

    engine thread   find (index in memory)   offer (a fork of the session)   restore (asks for it)
    writer thread   make room, write to a temporary file, fsync, rename; count hits; remove
    reader thread   verify the seal, load the payload into the session, hand it back

A fork shares the session's pages, so a store costs the engine thread no copy and the conversation goes on at once.
What is on disk is either complete and verified or is not there; whatever goes wrong here costs time, never an answer.
One process owns a directory (a lock file names it); others may read it.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ds4._core import sha1_hex
from ds4.errors import Cancelled, CheckpointError
from ds4.server import kvfile
from ds4.server.kvdir import Entry, create, lock_directory, make_private, scan, sync_directory, temporary_files
from ds4.server.kvfile import DamagedFile, Header, Layout
from ds4.server.kvindex import CheckpointIndex
from ds4.server.kvpolicy import Incoming, KvConfig, fits, victims
from ds4.server.tool_memory import decode_map, encode_map

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ds4.engine.types import CancelCheck, EngineLike, SessionLike
    from ds4.server.tool_memory import ToolMemory

log = logging.getLogger("ds4.kv")

MAX_PENDING = 4
"""Checkpoints that wait to be written: each keeps the pages of its fork alive."""

_MIB = float(1 << 20)


class KvStore:
    """The checkpoints of one model in one directory. `close` writes what is pending and gives the directory back."""

    def __init__(
        self,
        config: KvConfig,
        engine: EngineLike,
        *,
        tool_memory: ToolMemory | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the directory, trims it to the budget. Raises DirectoryInUseError, OSError."""
        self.config = config
        self._engine = engine
        self._tools = tool_memory
        self._clock = clock
        self._directory = config.directory
        self._model_id = model_id(engine.fingerprint)
        self._quant_bits = quant_bits(engine)
        self._lock = threading.Lock()
        self._in_place = threading.Lock()
        """A file whose tool map is being replaced looks damaged to who reads it."""
        self._index = CheckpointIndex()
        self._aside: set[str] = set()
        """Names that failed once: never chosen again by this process."""
        self._pending: set[str] = set()
        self._calls: dict[str, str] | None = None
        """Tool-call id -> name of a file whose map has it; None: not read yet."""
        self._seen: int = -1
        self._owner: BinaryIO | None = None
        if not config.read_only:
            make_private(self._directory)
            self._owner = lock_directory(self._directory)
            for path in temporary_files(self._directory):
                log.info("kv cache removed leftover file=%s", path.name)
                path.unlink(missing_ok=True)
        self._following = False
        """The directory of another server is being looked through again."""
        self._scan()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ds4-kv-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ds4-kv-read")
        if not config.read_only:
            self._make_room(0, None)

    def describe(self) -> str:
        """One line for people."""
        c = self.config
        return (
            f"KV disk cache {c.directory} (budget={c.budget_bytes >> 20} MiB, cross-quant=reject, "
            f"min={c.min_tokens}, cold_max={c.cold_max}, continued={c.continued_interval}, trim={c.boundary_trim}, "
            f"align={c.boundary_align}, hit_half_life=21600s{', read-only' if c.read_only else ''}): "
            f"{len(self)} checkpoints, {self.bytes_used / _MIB:.1f} MiB"
        )

    def __len__(self) -> int:
        return len(self._index)

    @property
    def bytes_used(self) -> int:
        return self._index.bytes_used

    @property
    def hashed_bytes(self) -> int:
        """What look-ups have hashed so far."""
        return self._index.hashed_bytes

    # ---- the index

    def _scan(self) -> None:
        with self._lock:
            known = {entry.name: entry for entry in self._index}
        entries: dict[str, Entry] = {}
        for name, path, found in scan(self._directory, known):
            if isinstance(found, DamagedFile) and not self.config.read_only:
                log.warning("kv cache removed damaged file=%s: %s", path.name, found)
                path.unlink(missing_ok=True)
            elif isinstance(found, Entry):
                entries[name] = found
            else:
                with suppress(OSError):
                    entries[name] = Entry(name, path.stat().st_size)
        index = CheckpointIndex()
        for entry in entries.values():
            index.add(entry, usable=self._usable(entry))
        with self._lock:
            index.hashed_bytes = self._index.hashed_bytes
            self._index = index
            self._calls = None

    def _usable(self, entry: Entry) -> bool:
        layout = entry.layout
        if layout is None or entry.name in self._aside or not layout.sealed:
            return False
        h = layout.header
        return h.model_id == self._model_id and self.config.min_tokens <= h.tokens < self._engine.config.ctx

    def _add(self, entry: Entry) -> None:
        self._index.add(entry, usable=self._usable(entry))

    def find(self, key: bytes, beyond: int = 0) -> Entry | None:
        """The usable checkpoint with the longest text that `key` begins with, if it has more than `beyond` tokens."""
        if self.config.read_only:
            self._follow()
        with self._lock:
            return self._index.find(key, beyond)

    def _follow(self) -> None:
        """A reader sees what the owner of the directory does: the reader thread looks it through when it changed."""
        try:
            changed = self._directory.stat().st_mtime_ns
        except OSError:
            return
        if changed != self._seen and not self._following:
            self._seen, self._following = changed, True
            with suppress(RuntimeError):
                self._reader.submit(self._look_again)

    def _look_again(self) -> None:
        try:
            self._scan()
        except OSError as error:
            log.info("kv cache directory not read: %s", error)
        finally:
            self._following = False

    def set_aside(self, entry: Entry, why: str) -> None:
        """The file stays, but this process does not choose it again."""
        log.warning("kv cache set aside file=%s.kv: %s", entry.name, why)
        with self._lock:
            self._aside.add(entry.name)
            self._index.hide(entry.name)

    # ---- storing

    def offer(self, session: SessionLike, key: bytes, reason: str, *, flags: int = 0, trimmed: int = 0) -> bool:
        """Stores the session as it is under `key`, unless it is too short, too big or there already.

        Engine thread. True when the checkpoint is on disk or on its way. The session may go on at once.
        """
        config, tokens = self.config, session.n_tokens
        if config.read_only or tokens < config.min_tokens:
            return False
        name = sha1_hex(key)
        with self._lock:
            if name in self._pending:
                return True
            existing = self._index.get(name)
            waiting = len(self._pending)
        if existing is not None and self._same(existing, key, tokens):
            self._submit(self._refresh, existing, session.tokens if self._tools is not None else None)
            return True
        if existing is not None and existing.layout is not None:
            log.info("kv cache replaces file=%s.kv: it is not what its name says, or of another state", name)
        if waiting >= MAX_PENDING:
            log.info("kv cache skipped tokens=%d reason=%s because %d wait to be written", tokens, reason, waiting)
            return False
        payload_bytes = session.payload_bytes()
        size = kvfile.file_bytes(len(key), payload_bytes)
        if not fits(config, size) or len(key) > 0xFFFFFFFF:
            log.info(
                "kv cache skipped tokens=%d reason=%s because %.2f MiB exceed the budget", tokens, reason, size / _MIB
            )
            return False
        snapshot = self._engine.new_session()
        try:
            snapshot.fork_from(session)
        except BaseException:
            snapshot.close()
            raise
        now = int(self._clock())
        header = Header(
            model_id=self._model_id,
            quant_bits=self._quant_bits,
            reason=reason,
            flags=flags,
            tokens=tokens,
            hits=0,
            ctx=self._engine.config.ctx,
            created=now,
            used=now,
            payload_bytes=payload_bytes,
        )
        with self._lock:
            self._pending.add(name)
        self._submit(self._write, name, header, key, snapshot, trimmed)
        return True

    def _same(self, entry: Entry, key: bytes, tokens: int) -> bool:
        """Is the file what would be written under its name, as far as can be seen without reading it?"""
        layout = entry.layout
        return (
            layout is not None
            and entry.name not in self._aside
            and layout.sealed
            and layout.header.model_id == self._model_id
            and layout.text_bytes == len(key)
            and key.endswith(entry.tail)
            and layout.header.tokens == tokens
        )

    def _write(self, name: str, header: Header, text: bytes, snapshot: SessionLike, trimmed: int) -> None:
        started = time.monotonic()
        path = self._path(name)
        temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
        try:
            tool_map = self._map(snapshot.tokens)
            size = kvfile.file_bytes(len(text), header.payload_bytes, len(tool_map))
            if not fits(self.config, size):
                log.info("kv cache skipped file=%s because %.2f MiB exceed the budget", path.name, size / _MIB)
                return
            self._make_room(size, Incoming(text, header.model_id, header.ctx), replaced=name)
            with create(temporary) as file:

                def pace() -> None:
                    # The flush of a whole large file at once takes the processor from the steps for many milliseconds.
                    file.flush()
                    os.fdatasync(file.fileno())

                layout = kvfile.write_file(file, header, text, snapshot.save, tool_map, pace)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_directory(self._directory)
        except Exception as error:
            with suppress(OSError):
                temporary.unlink()
            log.warning("kv cache store failed (%s): %s", header.reason, error)
            return
        finally:
            snapshot.close()
            with self._lock:
                self._pending.discard(name)
        with self._lock:
            self._aside.discard(name)
            self._add(Entry(name, layout.size, layout, text[-kvfile.TAIL_BYTES :]))
            self._know_calls(name, tool_map)
        log.info(
            "kv cache stored tokens=%d trimmed=%d reason=%s key=%s size=%.2f MiB save=%.1f ms file=%s",
            header.tokens,
            trimmed,
            header.reason,
            layout.header.key_kind,
            layout.size / _MIB,
            1e3 * (time.monotonic() - started),
            path.name,
        )

    def _make_room(self, extra: int, incoming: Incoming | None, replaced: str = "") -> None:
        """Removes what has to go for `extra` more bytes. Writer thread, or before it runs."""
        with self._lock:
            if self._index.bytes_used + extra <= self.config.budget_bytes:
                return
            entries = [entry for entry in self._index if entry.name != replaced]
        candidates = [entry.candidate() for entry in entries]
        for victim in victims(candidates, self.config.budget_bytes, extra, self._clock(), incoming):
            if not self._remove(victim.name):
                return
            log.info(
                "kv cache evicted reason=disk-cache-full tokens=%d hits=%d size=%.2f MiB file=%s.kv",
                victim.tokens,
                victim.hits,
                victim.size / _MIB,
                victim.name,
            )

    def _remove(self, name: str) -> bool:
        """Takes the file off the disk and the index; False when the disk refuses."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("kv cache cannot remove %s.kv: %s", name, error)
            return False
        self._forget(name)
        return True

    def _forget(self, name: str) -> None:
        with self._lock:
            self._index.drop(name)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.kv"

    def _refresh(self, entry: Entry, tokens: npt.NDArray[np.int32] | None) -> None:
        """The checkpoint was due again: it is used now, and its tool map may have grown."""
        try:
            with self._in_place, self._path(entry.name).open("r+b", buffering=0) as file:
                layout = kvfile.read_layout(file)
                tool_map = self._map(tokens)
                if tool_map and len(tool_map) != layout.seal_at - layout.trailer_at:
                    layout = kvfile.rewrite_trailer(file, layout, tool_map)
                layout = self._touch(file, layout, hit=False)
        except FileNotFoundError:
            self._forget(entry.name)
            return
        with self._lock:
            self._add(replace(entry, size=layout.size, layout=layout))
            self._know_calls(entry.name, tool_map)

    def _touch(self, file: BinaryIO, layout: Layout, *, hit: bool) -> Layout:
        header = replace(layout.header, hits=layout.header.hits + hit, used=int(self._clock()))
        kvfile.rewrite_header(file, header)
        return replace(layout, header=header)

    def _count_hit(self, name: str) -> None:
        with self._path(name).open("r+b", buffering=0) as file:
            layout = self._touch(file, kvfile.read_layout(file), hit=True)
        with self._lock:
            entry = self._index.get(name)
            if entry is not None:
                self._add(replace(entry, size=layout.size, layout=layout))

    # ---- loading

    def restore(
        self,
        entry: Entry,
        session: SessionLike,
        key: bytes,
        done: Callable[[Exception | None], None],
        cancel: CancelCheck | None = None,
    ) -> None:
        """Loads on the reader thread and calls `done` there. The session is the reader's until then."""

        def work() -> None:
            error: Exception | None = None
            try:
                self.load(entry, session, key, cancel)
            except Exception as failure:
                error = failure
            done(error)

        self._reader.submit(work)

    def load(self, entry: Entry, session: SessionLike, key: bytes, cancel: CancelCheck | None = None) -> None:
        """Replaces the session by a checkpoint whose text `key` begins with.

        Raises Cancelled, CheckpointError, OSError; the session is empty then. A damaged file is removed, one that
        cannot be used for another reason is not chosen again.
        """
        started = time.monotonic()
        file_name = f"{entry.name}.kv"
        try:
            layout = self._load(entry, session, key, cancel)
        except Cancelled:
            session.clear()
            raise
        except Exception as error:
            session.clear()
            log.warning(
                "kv cache load failed %s: %s load=%.1f ms", file_name, error, 1e3 * (time.monotonic() - started)
            )
            if isinstance(error, FileNotFoundError):
                self._forget(entry.name)
            elif isinstance(error, DamagedFile) and not self.config.read_only:
                log.warning("kv cache discarded damaged file=%s", file_name)
                self._remove(entry.name)
            else:
                self.set_aside(entry, str(error))
            raise
        log.info(
            "kv cache hit text tokens=%d text=%d quant=%d key=%s load=%.1f ms file=%s",
            layout.header.tokens,
            layout.text_bytes,
            layout.header.quant_bits,
            layout.header.key_kind,
            1e3 * (time.monotonic() - started),
            file_name,
        )
        if not self.config.read_only:
            self._submit(self._count_hit, entry.name)

    def _load(self, entry: Entry, session: SessionLike, key: bytes, cancel: CancelCheck | None) -> Layout:
        with self._in_place, self._path(entry.name).open("rb", buffering=0) as raw:
            file: BinaryIO = raw
            layout = kvfile.read_layout(file)
            if layout.header.model_id != self._model_id:
                raise CheckpointError("cached checkpoint was written for a different model")
            if layout.text_bytes > len(key):
                raise CheckpointError("cached text is longer than prompt")
            text = kvfile.read_text(file, layout)
            if sha1_hex(text) != entry.name:
                raise DamagedFile("cached text hash mismatch")
            if not key.startswith(text):
                raise CheckpointError("cached text prefix mismatch")
            kvfile.verify(file, layout, cancel)
            payload = io.BufferedReader(kvfile.PayloadReader(file, layout, cancel), 1 << 20)
            session.load(payload)
            if session.n_tokens != layout.header.tokens:
                raise DamagedFile(f"{session.n_tokens} tokens, the header says {layout.header.tokens}")
            if self._tools is not None:
                self._tools.restore(kvfile.read_map(file, layout))
            return layout

    # ---- tool calls

    def restore_calls(self, wanted: Collection[str]) -> int:
        """Brings exact texts of these calls from the files into the tool memory; how many were found.

        Any thread. The first call reads the maps of all files, later ones only what they need.
        """
        if self._tools is None:
            return 0
        with self._lock:
            known = self._calls
            names = [e.name for e in self._index if e.layout and e.layout.header.flags & kvfile.TOOL_MAP]
        if known is None:
            known = {}
            for name in names:
                known.update((call_id, name) for call_id, _ in self._read_map(name, None))
            with self._lock:
                self._calls = known
        found = 0
        by_name: dict[str, set[str]] = {}
        for call_id in wanted:
            if call_id in known:
                by_name.setdefault(known[call_id], set()).add(call_id)
        for name, ids in by_name.items():
            entries = self._read_map(name, ids)
            self._tools.restore(entries)
            found += len(entries)
        return found

    def _read_map(self, name: str, wanted: Collection[str] | None) -> list[tuple[str, bytes]]:
        """Blocks are replayed into prompts, so a map is believed only under its seal."""
        try:
            with self._in_place, self._path(name).open("rb", buffering=0) as raw:
                file: BinaryIO = raw
                layout = kvfile.read_layout(file)
                if layout.header.model_id != self._model_id or not layout.sealed:
                    return []
                kvfile.verify_trailer(file, layout)
                return kvfile.read_map(file, layout, wanted)
        except (CheckpointError, OSError) as error:
            log.info("kv cache tool map of %s.kv not read: %s", name, error)
            return []

    def _map(self, tokens: npt.NDArray[np.int32] | None) -> bytes:
        """The tool map of a session: calls whose exact text is part of it."""
        if self._tools is None or tokens is None:
            return b""
        return encode_map(self._tools.export(self._engine.tokenizer.decode(tokens.tolist())))

    def _know_calls(self, name: str, tool_map: bytes) -> None:
        if self._calls is not None and tool_map:
            self._calls.update((call_id, name) for call_id, _ in decode_map(tool_map))

    # ---- threads

    def _submit(self, task: Callable[..., None], *arguments: object) -> Future[None]:
        def work() -> None:
            try:
                task(*arguments)
            except Exception as error:
                log.warning("kv cache: %s failed: %s", task.__name__.strip("_"), error)

        return self._writer.submit(work)

    def flush(self) -> None:
        """Waits until everything that was offered is written or refused, and what is being read is. Harmless after
        `close`."""
        for thread in (self._reader, self._writer):
            with suppress(RuntimeError):
                thread.submit(lambda: None).result()

    def close(self) -> None:
        """Writes what is pending, ends the threads and gives the directory back. Closing twice is fine."""
        self._reader.shutdown()
        self._writer.shutdown()
        if self._owner is not None:
            self._owner.close()
            self._owner = None


def model_id(fingerprint: str) -> int:
    """1..255, derived from the weights: a quick first look; the payload names the whole fingerprint."""
    return 1 + int(sha1_hex(fingerprint.encode())[:4], 16) % 255


def quant_bits(engine: EngineLike) -> int:
    """Bits per weight, rounded: for people who look at the files."""
    info = engine.info
    return min(32, max(1, round(8 * sum(info.types.values()) / max(1, info.n_params))))
