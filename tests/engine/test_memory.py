"""The memory plan: what counts as available, and what the refusal proposes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds4.engine.memory import available_memory, check_plan
from ds4.engine.types import MemoryPlan
from ds4.errors import MemoryPlanError

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n"


def test_without_cgroups_the_kernel_decides(tmp_path: Path) -> None:
    assert available_memory(write(tmp_path, {"proc/meminfo": MEMINFO})) == 8 * GIB


def test_tightest_cgroup_v2_limit_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": str(5 * GIB),
            "sys/fs/cgroup/outer/memory.current": str(3 * GIB),
            "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max",
            "sys/fs/cgroup/outer/inner/memory.current": str(2 * GIB),
        },
    )
    assert available_memory(root) == 3 * GIB  # 5 - (3 - 1 of page cache)


def test_cgroup_v2_in_a_container(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": str(2 * GIB),
            "sys/fs/cgroup/memory.current": str(3 * GIB),
        },
    )
    assert available_memory(root) == 0


def test_cgroup_v1(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "9:name=systemd:/x\n4:cpu,memory:/box\nnonsense\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(4 * GIB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(GIB),
        },
    )
    assert available_memory(root) == 3 * GIB


def test_this_machine_has_memory() -> None:
    assert 1 << 20 < available_memory() < 1 << 50


def plan(weights: int, state: int, slots: int, available: int) -> MemoryPlan:
    return MemoryPlan(weights, state, slots, 10 << 20, available)


def test_a_plan_that_fits_passes() -> None:
    check_plan(plan(GIB, GIB, 4, 6 * GIB), 8192)


def test_the_refusal_names_what_would_fit() -> None:
    refused = plan(GIB, GIB, 8, 6 * GIB)
    with pytest.raises(MemoryPlanError, match="would fit") as e:
        check_plan(refused, 8192)
    text = str(e.value)
    assert "9.01 GiB" in text
    slots = int(re.search(r"(\d+) slots with --ctx 8192", text).group(1))  # type: ignore[union-attr]
    ctx = int(re.search(r"--ctx (\d+) with 8 slots", text).group(1))  # type: ignore[union-attr]
    # The proposals hold, and the next larger ones do not.
    check_plan(plan(GIB, GIB, slots, 6 * GIB), 8192)
    check_plan(plan(GIB, GIB * ctx // 8192, 8, 6 * GIB), ctx)
    with pytest.raises(MemoryPlanError):
        check_plan(plan(GIB, GIB, slots + 1, 6 * GIB), 8192)
    with pytest.raises(MemoryPlanError):
        check_plan(plan(GIB, GIB * (ctx + 256) // 8192, 8, 6 * GIB), ctx + 256)


def test_fixed_state_does_not_shrink_with_ctx() -> None:
    """A session of 1 GiB of which 0.9 are fixed: eight of them need 7.2 GiB whatever the context."""
    with pytest.raises(MemoryPlanError) as e:
        check_plan(plan(GIB, GIB, 8, 6 * GIB), 8192, state_fixed=GIB * 9 // 10)
    assert "4 slots with --ctx 8192" in str(e.value) and "with 8 slots" not in str(e.value)


def test_weights_alone_too_large() -> None:
    with pytest.raises(MemoryPlanError, match="weights alone"):
        check_plan(plan(9 * GIB, 1, 1, 6 * GIB), 8192)
    with pytest.raises(MemoryPlanError, match="No number of slots"):
        check_plan(plan(GIB, 100 * GIB, 1, GIB + (80 << 20)), 8192)
