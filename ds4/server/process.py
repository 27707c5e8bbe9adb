"""What a serving process asks of its surroundings: memory at hand (`heap`), a collector that rarely looks, and turns on
the cores that fit the work: short ones at once for the event loop, long ones for what computes.
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
COMPUTE_SLICE_NS = 10_000_000
"""Several times what a thread gets that asks for nothing."""


def settle() -> None:
    """Called on the event loop's thread once the server listens: what lives now lives as long as the process."""
    keep_memory()
    # The cores are full of threads that compute; a loop that wakes for a token would wait for the end of their turns,
    # and the client with it: the longest 1 % of the times between tokens of sixteen streams were 7 % shorter so, on
    # two cores. Threads that it makes have turns as usual.
    _take_turns(LOOP_SLICE_NS, _SCHED_RESET_ON_FORK)
    # Vocabulary and tables would be walked by every full collection. Collecting first would take a tenth of the start.
    gc.freeze()
    # A streamed token makes a few short-lived objects and no cycles; the default looks after every 700 of them.
    gc.set_threshold(20_000, 20, 20)


def compute() -> None:
    """Called on a thread that computes without a pause: it asks for long turns, and so do the threads that it makes.

    That gives it no more of a core. But a thread with a shorter turn that wakes gets the core at once, where otherwise
    it waits for the end of the turn, which the system looks for every few milliseconds: a client on this machine got
    one first token of four 1.5 to 3.5 ms late.
    """
    _take_turns(COMPUTE_SLICE_NS, 0)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _take_turns(nanoseconds: int, flags: int) -> None:
    """Asks for time slices of this length for this thread; those with shorter ones go first when they wake.

    Linux 6.12 and later (sched_setattr(2): sched_runtime under SCHED_OTHER); elsewhere nothing happens.
    """
    number = _SCHED_SETATTR.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # struct sched_attr, its first version: size, policy, flags, nice, priority, runtime, deadline, period.
    attributes = struct.pack("=IIQiIQQQ", 48, 0, flags, nice, 0, nanoseconds, 0, 0)
    try:
        ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_int(0), attributes, ctypes.c_uint(0))
    except (OSError, AttributeError):
        return
