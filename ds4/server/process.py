"""What a serving process asks of its surroundings: freed memory kept at hand, a collector that rarely looks, and an
event loop that gets its turn at once.

Every turn of an agent brings a megabyte of JSON, the same again as text, ids and key, and frees as much. Given back to
the system and fetched anew it costs a page fault for each 4 KiB, which took half of the way of such a request.
"""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)

KEPT_BYTES = 64 << 20
"""Free memory at the end of the heap that is not given back."""
_HEAP_BYTES = 32 << 20
"""Larger pieces have pages of their own, which go back at once: the largest that mallopt(3) takes."""


_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Numbers of a system call that the C library has no function for."""
_SCHED_RESET_ON_FORK = 1
LOOP_SLICE_NS = 100_000
"""The shortest that Linux takes."""


def settle() -> None:
    """Called on the event loop's thread once the server listens: what lives now lives as long as the process."""
    _keep_freed_memory()
    _take_short_turns()
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


def _take_short_turns() -> None:
    """Asks for short time slices for this thread, which lets it run before threads with long ones when it wakes.

    The cores are full of threads that compute; a loop that wakes for a token would wait for the end of their slices,
    and the client with it: the longest 1 % of the times between tokens of sixteen streams were 7 % shorter so, on two
    cores. Linux 6.12 and later (sched_setattr(2): sched_runtime under SCHED_OTHER); elsewhere nothing happens.
    """
    number = _SCHED_SETATTR.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # struct sched_attr, its first version: size, policy, flags, nice, priority, runtime, deadline, period.
    attributes = struct.pack("=IIQiIQQQ", 48, 0, _SCHED_RESET_ON_FORK, nice, 0, LOOP_SLICE_NS, 0, 0)
    try:
        ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_int(0), attributes, ctypes.c_uint(0))
    except (OSError, AttributeError):
        return
