"""What a serving process asks of its surroundings: memory at hand (`heap`), a collector that rarely looks, and an event
loop that gets its turn at once.
"""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import sys

from ds4.server.heap import keep_memory

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Numbers of a system call that the C library has no function for."""
_SCHED_RESET_ON_FORK = 1
LOOP_SLICE_NS = 100_000
"""The shortest that Linux takes."""


def settle() -> None:
    """Called on the event loop's thread once the server listens: what lives now lives as long as the process."""
    keep_memory()
    _take_short_turns()
    # Vocabulary and tables would be walked by every full collection. Collecting first would take a tenth of the start.
    gc.freeze()
    # A streamed token makes a few short-lived objects and no cycles; the default looks after every 700 of them.
    gc.set_threshold(20_000, 20, 20)


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
