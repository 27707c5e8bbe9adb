"""Mapped files in this process's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4.engine.mapping import let_go, map_file

SMAPS = Path("/proc/self/smaps")


def resident_kib(path: Path) -> int:
    """Of all mappings of a file."""
    total, inside = 0, False
    for line in SMAPS.read_text().splitlines():
        if line[0] not in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(not SMAPS.exists(), reason="the kernel does not say what is resident")
def test_let_go_leaves_the_bytes_and_frees_the_memory(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    content = bytes(range(256)) * 8192
    for path in paths:
        path.write_bytes(content)
    views = [map_file(path) for path in paths]
    assert [bytes(v) for v in views] == [content, content]
    assert all(resident_kib(path) == len(content) // 1024 for path in paths)
    let_go(part for v in views for part in (v[10:90], v[100:]))
    assert all(resident_kib(path) == 0 for path in paths)
    assert [bytes(v) for v in views] == [content, content]
    let_go([memoryview(b"no file")])
