"""What a serving process asks of its surroundings: freed memory kept at hand, and a collector that rarely looks.

Every turn of an agent brings a megabyte of JSON, the same again as text, ids and key, and frees as much. Given back to
the system and fetched anew it costs a page fault for each 4 KiB, which took half of the way of such a request.
"""

from __future__ import annotations

import ctypes
import gc

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)

KEPT_BYTES = 64 << 20
"""Free memory at the end of the heap that is not given back."""
_HEAP_BYTES = 32 << 20
"""Larger pieces have pages of their own, which go back at once: the largest that mallopt(3) takes."""


def settle() -> None:
    """Called once the server listens: what lives now lives as long as the process."""
    _keep_freed_memory()
    # Vocabulary and tables would be walked by every full collection. Collecting first would take a tenth of the start.
    gc.freeze()
    # A streamed token makes a few short-lived objects and no cycles; the default looks after every 700 of them.
    gc.set_threshold(20_000, 20, 20)


def _keep_freed_memory() -> None:
    """Does nothing where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in ((_M_MMAP_THRESHOLD, _HEAP_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_TOP_PAD, 1 << 20)):
        mallopt(option, value)
