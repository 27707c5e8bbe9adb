"""A directory of checkpoint files: names, the lock of its owner, what lies there.

    0123…89.kv              a checkpoint, named by the SHA-1 of its text
    0123…89.kv.tmp.PID      one that is being written, or was when its writer was killed
    lock                    locked by the owner, with its process id

Any other name is nobody's business here.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ds4.errors import CheckpointError, ConfigError
from ds4.server import kvfile
from ds4.server.kvfile import Layout
from ds4.server.kvpolicy import Candidate

LOCK_NAME = "lock"

_NAME = re.compile(r"([0-9a-fA-F]{40})\.kv")
_TEMPORARY = re.compile(r"[0-9a-fA-F]{40}\.kv\.tmp\.\d+")


class DirectoryInUseError(ConfigError):
    """Another server owns the directory."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint file as its header shows it. `layout` None: no file of ours, and only its size is known.

    `tail` is the end of its text (`kvfile.TAIL_BYTES`).
    """

    name: str
    size: int
    layout: Layout | None = None
    tail: bytes = b""

    @property
    def tokens(self) -> int:
        return self.layout.header.tokens if self.layout else 0

    @property
    def text_bytes(self) -> int:
        return self.layout.text_bytes if self.layout else 0

    @property
    def flags(self) -> int:
        return self.layout.header.flags if self.layout else 0

    def candidate(self) -> Candidate:
        layout = self.layout
        if layout is None:
            return Candidate(self.name, self.size)
        h = layout.header
        return Candidate(
            self.name, self.size, h.tokens, h.hits, h.used or h.created, h.reason, h.model_id, h.ctx, layout.text_bytes
        )


def scan(directory: Path, known: Mapping[str, Entry] | None = None) -> Iterator[tuple[str, Path, Entry | Exception]]:
    """(name, path, entry or why it is none) of every checkpoint name in a directory, from headers and text ends alone.

    A file of the size of its `known` entry is not opened again.
    """
    with os.scandir(directory) as found:
        names = sorted(item.name for item in found)
    for file_name in names:
        match = _NAME.fullmatch(file_name)
        if match is None:
            continue
        name, path = match[1].lower(), directory / file_name
        try:
            old = known.get(name) if known else None
            if old is not None and old.layout is not None and path.stat().st_size == old.size:
                yield name, path, old
                continue
            with path.open("rb", buffering=0) as file:
                layout = kvfile.read_layout(file)
                tail = kvfile.read_tail(file, layout)
            yield name, path, Entry(name, layout.size, layout, tail)
        except (CheckpointError, OSError) as error:
            yield name, path, error


def temporary_files(directory: Path) -> list[Path]:
    """What writers that were killed have left."""
    return sorted(path for path in directory.iterdir() if _TEMPORARY.fullmatch(path.name))


def lock_directory(directory: Path) -> BinaryIO:
    """Takes the directory for this process until the file is closed. Raises DirectoryInUseError, OSError."""
    path = directory / LOCK_NAME
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = file.read(32).decode("ascii", "replace").strip() or "unknown"
        file.close()
        raise DirectoryInUseError(
            f"{directory} is used by another server (pid {owner}); give each its own --kv-disk-dir, "
            "or --kv-disk-read-only"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    file.flush()
    return file


def sync_directory(directory: Path) -> None:
    """Makes renames and removals in it last."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create(path: Path) -> BinaryIO:
    """A new private file to write."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb", 1 << 20)


def make_private(directory: Path) -> None:
    """Creates the directory and what is missing above it, for this user alone."""
    for path in (*reversed(directory.parents), directory):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
