"""Maps a file into memory, read-only."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ds4.errors import ModelFileError


def let_go(views: Iterable[memoryview]) -> None:
    """Takes mapped files of `views` out of this process's resident memory; what is read again is mapped again."""
    for mapped in {id(v.obj): v.obj for v in views}.values():
        if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


def map_file(path: Path) -> memoryview:
    """The file's bytes without reading them; slices of the view keep the mapping alive.

    Raises ModelFileError when the file cannot be opened, is not a regular file or is empty.
    """
    try:
        # O_NONBLOCK: opening a FIFO must fail the check below, not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ModelFileError(path, "", "not a regular file")
            if status.st_size == 0:
                raise ModelFileError(path, "", "the file is empty")
            return memoryview(mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)
    except (OSError, ValueError) as e:
        raise ModelFileError(path, "", f"cannot open: {getattr(e, 'strerror', None) or e}") from e
