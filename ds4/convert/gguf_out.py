"""A GGUF file written beside its place and renamed: it is complete or not there.

Metadata and tensor headers come first, then data, a chunk at a time, of as many tensors at once as there are workers.
The metadata's form is the `gguf` package's.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType

from ds4.engine.tensors import DType
from ds4.errors import ConfigError

Chunk = bytes | memoryview
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class Key:
    """A metadata value with the type that it is stored in; `element` for arrays."""

    value: Any
    kind: GGUFValueType
    element: GGUFValueType | None = None


def u32(value: int) -> Key:
    return Key(value, GGUFValueType.UINT32)


def f32(value: float) -> Key:
    return Key(value, GGUFValueType.FLOAT32)


def text(value: str) -> Key:
    return Key(value, GGUFValueType.STRING)


def flag(value: bool) -> Key:
    return Key(value, GGUFValueType.BOOL)


def i32_array(values: Iterable[int]) -> Key:
    return Key([int(v) for v in values], GGUFValueType.ARRAY, GGUFValueType.INT32)


def texts(values: Iterable[str]) -> Key:
    return Key(list(values), GGUFValueType.ARRAY, GGUFValueType.STRING)


def key(value: Any) -> Key:
    """A Python value in the type that GGUF files usually have for it."""
    if isinstance(value, bool):
        return flag(value)
    if isinstance(value, int):
        return u32(value) if 0 <= value < 1 << 32 else Key(value, GGUFValueType.INT64)
    if isinstance(value, float):
        return f32(value)
    if isinstance(value, str):
        return text(value)
    if all(isinstance(v, int) for v in value):
        return i32_array(value)
    return Key([float(v) for v in value], GGUFValueType.ARRAY, GGUFValueType.FLOAT32)


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor to write; `chunks` gives its bytes in order, when its turn comes. `same_as` names one of the same type
    and size before it: nothing is written, both are the same bytes of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    chunks: Callable[[], Iterator[Chunk]]
    same_as: str | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.dtype.block_elements * self.dtype.block_bytes


def write_gguf(
    path: Path,
    family: str,
    keys: Mapping[str, Key],
    tensors: Iterable[OutTensor],
    *,
    force: bool = False,
    progress: Progress | None = None,
    workers: int = 1,
) -> int:
    """Writes the file and returns its bytes; with several `workers`, chunks of several tensors are asked for at a time.

    Raises ConfigError for a place that is taken (unless `force`), OSError.
    """
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; --force replaces it")
    if path.suffix != ".gguf":
        raise ConfigError(f"{path}: the name of a GGUF file ends in .gguf")
    tensors = list(tensors)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        offsets = _offsets(tensors)
        _write_headers(part, family, keys, tensors, offsets)
        size = _write_data(part, tensors, offsets, progress, workers)
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        part.unlink(missing_ok=True)
    return size


def _aligned(n: int) -> int:
    return n + -n % _ALIGNMENT


def _offsets(tensors: list[OutTensor]) -> dict[str, int]:
    """Where each tensor begins in the file's data."""
    offsets: dict[str, int] = {}
    end = 0
    for t in tensors:
        if t.same_as is not None:
            offsets[t.name] = offsets[t.same_as]
        else:
            offsets[t.name] = end
            end += _aligned(t.nbytes)
    return offsets


def _write_headers(
    part: Path, family: str, keys: Mapping[str, Key], tensors: list[OutTensor], offsets: Mapping[str, int]
) -> None:
    writer = gguf.GGUFWriter(part, family)
    for name, key in keys.items():
        writer.add_key_value(name, key.value, key.kind, key.element)
    for t in tensors:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, GGMLQuantizationType(int(t.dtype)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with part.open("ab") as out:
        for t in tensors:  # the package knows no tensors that are the same bytes
            spelled = t.name.encode()
            out.write(struct.pack("<Q", len(spelled)) + spelled + struct.pack("<I", len(t.shape)))
            out.write(struct.pack(f"<{len(t.shape)}QIQ", *reversed(t.shape), int(t.dtype), offsets[t.name]))


def _write_data(
    part: Path, tensors: list[OutTensor], offsets: Mapping[str, int], progress: Progress | None, workers: int
) -> int:
    own = [t for t in tensors if t.same_as is None]
    total = sum(t.nbytes for t in own)
    done = 0
    counting = threading.Lock()

    def write(t: OutTensor, file: int, begin: int) -> None:
        nonlocal done
        at = begin
        for chunk in t.chunks():
            rest = memoryview(chunk)
            while rest:
                written = os.pwrite(file, rest, at)
                rest, at = rest[written:], at + written
            with counting:
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
        if at - begin != t.nbytes:
            raise AssertionError(f"{t.name}: {at - begin} bytes written, {t.nbytes} announced")

    with part.open("rb+") as out, ThreadPoolExecutor(workers) as pool:
        data = _aligned(part.stat().st_size)
        size = data + max((_aligned(offsets[t.name] + t.nbytes) for t in own), default=0)
        out.truncate(size)
        # The largest first: the last ones to end are small.
        order = own if workers == 1 else sorted(own, key=lambda t: -t.nbytes)
        for job in [pool.submit(write, t, out.fileno(), data + offsets[t.name]) for t in order]:
            job.result()
        os.fsync(out.fileno())
    return size
