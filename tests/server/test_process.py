"""What a serving process asks of the C library, the collector and the scheduler, in a process of its own."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds4.server import process
from tests.support.server_process import ServerProcess

PROGRAM = """
import ctypes, gc, platform, resource, threading
from ds4.server import heap
from ds4.server import process
asked = []
class Library(ctypes.CDLL):
    def __init__(self, name):
        super().__init__(name)
        real = self.mallopt
        self.mallopt = lambda *option: asked.append((option, real(*option)))
heap.ctypes.CDLL = Library
process.settle()
for thread in threading.enumerate():
    if thread.name == "ds4-heap":
        thread.join()
assert gc.get_freeze_count() > 1000 and gc.get_threshold() == (20000, 20, 20)
assert {option for (option, _), done in asked if done == 1} == {-1, -2, -3}, asked
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(8 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = faults()
assert heap.READY_BYTES < heap.KEPT_BYTES
if tuple(map(int, platform.release().split(".")[:2])) >= (5, 14):
    assert first < 200, first
print(faults())
"""


SLICES = """
import threading
from ds4.server import process
def show():
    print(next(line.split()[-1] for line in open("/proc/thread-self/sched") if line.startswith("se.slice")))
def other():
    thread = threading.Thread(target=show)
    thread.start()
    thread.join()
other()
process.settle()
show()
other()
"""


def scheduler_takes_slices() -> bool:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (
        sys.platform == "linux"
        and platform.machine() in ("x86_64", "aarch64")
        and found is not None
        and (int(found[1]), int(found[2])) >= (6, 12)
        and Path("/proc/thread-self/sched").exists()
    )


@pytest.mark.skipif(not scheduler_takes_slices(), reason="time slices of threads came with Linux 6.12")
def test_the_event_loop_takes_short_turns_and_no_thread_inherits_them() -> None:
    done = subprocess.run([sys.executable, "-c", SLICES], capture_output=True, text=True, check=True)
    before, loop, after = map(int, done.stdout.split())
    assert loop == process.LOOP_SLICE_NS < before
    assert after == before


@pytest.mark.skipif(not scheduler_takes_slices(), reason="time slices of threads came with Linux 6.12")
def test_what_computes_takes_long_turns_in_a_running_server() -> None:
    """So does the backend's second thread; the loop, which the process began with, takes short ones."""
    server = ServerProcess("--threads", "2", "--ctx", "64")
    try:
        slices = []
        for thread in Path(f"/proc/{server.process.pid}/task").iterdir():
            found = re.search(r"^se\.slice +: +(\d+)$", (thread / "sched").read_text(), re.MULTILINE)
            assert found is not None
            slices.append((int(thread.name) == server.process.pid, int(found[1])))
    finally:
        server.stop()
    assert [ns for first, ns in slices if first] == [process.LOOP_SLICE_NS]
    # The thread that opens the engine, the backend's, and the one that steps.
    assert [ns for first, ns in slices if not first].count(process.COMPUTE_SLICE_NS) >= 3, slices


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt(3) is glibc's")
def test_memory_is_at_hand() -> None:
    """Before it is used for the first time, and when it was freed."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    # 8 MiB have 2,048 pages.
    assert int(done.stdout) < 200
