"""The memory plan: whether weights, sessions and workspace fit the machine, and what would fit instead."""

from __future__ import annotations

import os
from pathlib import Path

from ds4.engine.types import MemoryPlan
from ds4.errors import MemoryPlanError

_UNLIMITED = 1 << 62
HEADROOM = 64 << 20
"""Left for the interpreter, the tokenizer and the requests."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still allocate without swapping: the kernel's estimate, capped by cgroup limits.

    `root` is where /proc and /sys are looked for. On a system without /proc half of the physical memory counts.
    """
    return min(_system_available(root), _cgroup_available(root))


def _system_available(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError):
        return _UNLIMITED


def _cgroup_available(root: Path) -> int:
    """The tightest of all memory limits from this process's cgroup up to the root, less what is in use there."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return _UNLIMITED
    best = _UNLIMITED
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        parts = [p for p in path.split("/") if p not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            allowed = _number(folder / limit)
            if allowed is None or allowed >= _UNLIMITED:
                continue
            used = (_number(folder / usage) or 0) - _stat(folder / "memory.stat", cache)
            best = min(best, max(0, allowed - max(0, used)))
    return best


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, key: str) -> int:
    """Page cache that the kernel gives back under pressure."""
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key and value.strip().isdigit():
                return int(value)
    except OSError:
        pass
    return 0


def check_plan(plan: MemoryPlan, ctx: int, state_fixed: int = 0) -> None:
    """Raises MemoryPlanError when the plan needs more than is available, naming a ctx and a slot count that fit.

    `state_fixed` is the part of one session's state that does not grow with ctx.
    """
    room = plan.available_bytes - HEADROOM
    if plan.total <= room:
        return
    message = (
        f"The configuration needs {_gib(plan.total)}: weights {_gib(plan.weight_bytes)}, {plan.slots} sessions of "
        f"{ctx} tokens {_gib(plan.state_bytes * plan.slots)}, workspace {_gib(plan.workspace_bytes)}; available are "
        f"{_gib(max(0, room))}{' of device memory' if plan.on_device else ''}."
    )
    left = room - plan.weight_bytes - plan.workspace_bytes
    slots = left // plan.state_bytes if plan.state_bytes else 0
    per_token = (plan.state_bytes - state_fixed) / ctx
    tokens = int((left / plan.slots - state_fixed) / per_token) if per_token > 0 else 0
    tokens = min(ctx, tokens // 256 * 256)
    fits = []
    if slots >= 1:
        fits.append(f"{slots} slots with --ctx {ctx}")
    if tokens >= 256:
        fits.append(f"--ctx {tokens} with {plan.slots} slots")
    if fits:
        message += f" These would fit: {' or '.join(fits)}."
    elif left <= 0:
        message += " The weights alone do not fit: a smaller or more strongly quantised model is needed."
    else:
        message += " No number of slots with a context of 256 tokens or more would fit."
    if plan.on_device:
        message += " --backend cpu computes in this machine's memory."
    raise MemoryPlanError(message)


def _gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB"
