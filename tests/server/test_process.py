"""What a serving process asks of the C library and the collector, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, gc, resource
from ds4.server import process
asked = []
real = ctypes.CDLL
class Library:
    def __init__(self, name): self.mallopt = lambda *o: asked.append((o, real(None).mallopt(*o)))
process.ctypes.CDLL = Library
process.settle()
assert gc.get_freeze_count() > 1000 and gc.get_threshold() == (20000, 20, 20)
assert len(asked) == 3 and all(done == 1 for _, done in asked), asked
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(8 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt(3) is glibc's")
def test_freed_memory_stays_at_hand() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    # 8 MiB have 2,048 pages.
    assert int(done.stdout) < 200
