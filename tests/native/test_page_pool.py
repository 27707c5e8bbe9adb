"""Memory of session state: there before a step needs it, kept for the next session, never more than sessions hold."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ds4 import _cpu

ROLLUP = Path("/proc/self/smaps_rollup")
pytestmark = pytest.mark.skipif(not ROLLUP.exists(), reason="the kernel does not say what is resident")

MB = 1 << 20
F16 = 1
HEADS, WIDTH = 16, 64
LAYERS = 16
PAGE_ROWS = 64
PAGE = 2 * LAYERS * HEADS * WIDTH * 2 * PAGE_ROWS  # bytes: 4 MiB
SPECS = [(f"{kind}.{i}", "append", F16, HEADS, WIDTH, 1, 0) for i in range(LAYERS) for kind in "kv"]


def memory(what: str) -> int:
    """Bytes of this process that `what` counts in smaps."""
    gc.collect()
    line = next(line for line in ROLLUP.read_text().splitlines() if line.startswith(f"{what}:"))
    return int(line.split()[1]) * 1024


ROW = HEADS * WIDTH * 2
MOST_PAGES = 8
ROWS = np.full(MOST_PAGES * PAGE_ROWS * HEADS * WIDTH, 0x3C00, np.uint16).view(np.uint8)
"""Made once: an array for each call counts in what is resident, all the more where a sanitizer keeps freed ones."""


def fill(state: _cpu.OpsState, first: int, count: int) -> None:
    for i in range(2 * LAYERS):
        state.import_rows(i, first, count, ROWS[: count * ROW])


@pytest.fixture
def ops() -> Iterator[_cpu.Ops]:
    yield _cpu.cpu_ops(1, "auto")


def steps(ops: _cpu.Ops, n: int) -> None:
    for _ in range(n):
        ops.reset_scratch()


def test_the_next_page_of_every_session_is_in_memory_before_it_is_taken(ops: _cpu.Ops) -> None:
    states = [ops.new_state(SPECS, 4 * PAGE_ROWS) for _ in range(3)]
    for state in states:
        fill(state, 0, PAGE_ROWS)
    held = memory("Rss")
    steps(ops, 2)
    few = memory("Rss")
    assert 2 * MB < few - held < 5 * MB, "a step brings one huge page"
    steps(ops, 20)
    ready = memory("Rss")
    assert 2.5 * PAGE < ready - held < 4.5 * PAGE, "one page a session, and what a huge page holds more"
    for state in states:
        fill(state, PAGE_ROWS, PAGE_ROWS)
    assert memory("Rss") - ready < 1 * MB


def test_no_more_than_sessions_may_come_to_hold(ops: _cpu.Ops) -> None:
    states = [ops.new_state(SPECS, 2 * PAGE_ROWS) for _ in range(2)]
    for state in states:
        fill(state, 0, PAGE_ROWS)
    fill(states[0], PAGE_ROWS, PAGE_ROWS)
    held = memory("Rss")
    steps(ops, 20)
    assert 0.5 * PAGE < memory("Rss") - held < 1.75 * PAGE, "one page can still be asked for"
    fill(states[1], PAGE_ROWS, PAGE_ROWS)
    full = memory("Rss")
    steps(ops, 20)
    assert memory("Rss") - full < 1 * MB


def test_sessions_without_a_token_have_no_memory(ops: _cpu.Ops) -> None:
    states = [ops.new_state(SPECS, 100 * PAGE_ROWS) for _ in range(16)]
    held = memory("Rss")
    steps(ops, 20)
    assert memory("Rss") - held < 1 * MB
    fill(states[0], 0, 1)
    states[0].truncate(0)
    held = memory("Rss")
    steps(ops, 20)
    assert memory("Rss") - held < 1 * MB, "nobody holds a page any more"


def test_memory_of_former_sessions_may_be_taken_back_and_is_used_again(ops: _cpu.Ops) -> None:
    pages = MOST_PAGES
    first = ops.new_state(SPECS, pages * PAGE_ROWS)
    fill(first, 0, pages * PAGE_ROWS)
    lazy, held = memory("LazyFree"), memory("Rss")
    del first
    assert memory("LazyFree") - lazy > 0.9 * pages * PAGE
    second = ops.new_state(SPECS, pages * PAGE_ROWS)
    fill(second, 0, pages * PAGE_ROWS)
    assert memory("Rss") - held < PAGE / 2
    out = np.empty(ROW, np.uint8)
    second.export_rows(2 * LAYERS - 1, pages * PAGE_ROWS - 1, 1, out)
    assert np.all(out.view(np.uint16) == 0x3C00)
