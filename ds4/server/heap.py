"""Memory of a serving process: what is freed stays at hand, and some is there before it is needed.

Every turn of an agent brings a megabyte of JSON, the same again as text, ids and key, and frees as much. Given back to
the system and fetched anew it costs a page fault for each 4 KiB, which took half of the way of such a request; and the
first use of memory costs as much. So freed memory is kept, and some is fetched in advance by a thread.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from threading import Thread

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # madvise(2), Linux

KEPT_BYTES = 64 << 20
"""Free memory at the end of the heap that is not given back."""
READY_BYTES = 48 << 20
"""So much of it is there from the beginning."""
_PIECE, _STEP = 8 << 20, 2 << 20
_HEAP_BYTES = 32 << 20
"""Larger pieces have pages of their own, which go back at once: the largest that mallopt(3) takes."""


def keep_memory() -> None:
    """Called once the server listens. Does nothing where the C library is not glibc."""
    try:
        library = ctypes.CDLL(None)
        mallopt, malloc, free = library.mallopt, library.malloc, library.free
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    # A piece that the heap has no room for makes it grow by so much more, which is free memory when the piece is freed.
    mallopt(_M_TOP_PAD, READY_BYTES)
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    piece = malloc(_PIECE)
    mallopt(_M_TOP_PAD, 1 << 20)
    if piece is not None:
        free(piece)
        Thread(target=_fetch, args=(library, piece), name="ds4-heap", daemon=True).start()


def _fetch(library: ctypes.CDLL, start: int) -> None:
    """Makes the system give the memory from `start` on now. What is in it stays as it is."""
    if sys.platform != "linux":
        return
    madvise = library.madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = start + READY_BYTES
    madvise(first, end - first, _MADV_HUGEPAGE)
    # Piece by piece: nobody waits for the lock of the address space for long.
    for at in range(first, end, _STEP):
        if madvise(at, min(_STEP, end - at), _MADV_POPULATE_WRITE) != 0:
            # An old system, or the heap has shrunk.
            return
