"""What every benchmark prints and keeps: the machine, the versions, a table, and a JSON file in `bench/results/`."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """CPU model, usable cores, instruction sets that matter here, memory, kernel."""
    facts: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    try:
        text = Path("/proc/cpuinfo").read_text()
        fields = {
            k.strip(): v.strip() for k, _, v in (line.partition(":") for line in text.split("\n\n")[0].splitlines())
        }
        facts["cpu"] = fields.get("model name", "?")
        flags = set(fields.get("flags", "").split())
        facts["isa"] = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if f in flags]
        memory = Path("/proc/meminfo").read_text().split()
        facts["memory_gib"] = round(int(memory[1]) / 2**20, 1)
    except OSError:
        facts["cpu"] = platform.processor()
    return facts


def versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Versions of Python, of `packages`, and the commit of this checkout."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    found["commit"] = commit.stdout.strip() or "?"
    return found


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers are right-aligned."""
    cells = [[f"{c:,.1f}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    width = [max(len(h), *(len(r[i]) for r in cells)) if cells else len(h) for i, h in enumerate(header)]

    def line(row: Sequence[str]) -> str:
        first = row[0].ljust(width[0])
        return "| " + " | ".join([first, *(c.rjust(w) for c, w in zip(row[1:], width[1:], strict=True))]) + " |"

    rule = "|" + "|".join(["-" * (width[0] + 2), *("-" * (w + 1) + ":" for w in width[1:])]) + "|"
    return "\n".join([line(header), rule, *(line(r) for r in cells)])


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def save(name: str, result: dict[str, Any], packages: Iterable[str] = ()) -> Path:
    """Writes `bench/results/NAME.json` with the machine, versions, date and command line; returns the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    # Paths of one machine mean nothing elsewhere.
    arguments = [Path(a).name if a.startswith("/") else a for a in sys.argv[1:]]
    command = " ".join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *arguments])
    body = {
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d"),
        "command": command,
        "machine": machine(),
        "versions": versions(packages),
        **result,
    }
    path.write_text(json.dumps(body, indent=1) + "\n")
    return path
