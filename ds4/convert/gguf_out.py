"""A GGUF file written front to back: metadata and tensor headers first, then data as it comes, one chunk at a time.

Headers are the `gguf` package's. The file is complete or not there: it is written beside its place and renamed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """A tensor to write; `chunks` gives its bytes in order, when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    chunks: Callable[[], Iterator[Chunk]]

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
) -> int:
    """Writes the file and returns its bytes. Raises ConfigError for a place that is taken (unless `force`), OSError."""
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; --force replaces it")
    if path.suffix != ".gguf":
        raise ConfigError(f"{path}: the name of a GGUF file ends in .gguf")
    tensors = list(tensors)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        _write_headers(part, family, keys, tensors)
        size = _append_data(part, tensors, progress)
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        part.unlink(missing_ok=True)
    return size


def _write_headers(part: Path, family: str, keys: Mapping[str, Key], tensors: list[OutTensor]) -> None:
    writer = gguf.GGUFWriter(part, family)
    for name, key in keys.items():
        writer.add_key_value(name, key.value, key.kind, key.element)
    for t in tensors:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, GGMLQuantizationType(int(t.dtype)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _append_data(part: Path, tensors: list[OutTensor], progress: Progress | None) -> int:
    total = sum(t.nbytes for t in tensors)
    done = 0
    with part.open("ab") as out:
        for t in tensors:
            out.write(bytes(-out.tell() % _ALIGNMENT))
            begin = out.tell()
            for chunk in t.chunks():
                out.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
            if out.tell() - begin != t.nbytes:
                raise AssertionError(f"{t.name}: {out.tell() - begin} bytes written, {t.nbytes} announced")
        out.write(bytes(-out.tell() % _ALIGNMENT))
        out.flush()
        os.fsync(out.fileno())
        return out.tell()
