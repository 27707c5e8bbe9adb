"""Writes `.safetensors` files with element types that numpy does not have."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_CODES = {"float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8"}


@dataclass(frozen=True)
class Stored:
    """A tensor by the file format's type code, its bytes row-major and little endian."""

    code: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(values: npt.NDArray[Any]) -> Stored:
        return Stored(_CODES[values.dtype.name], values.shape, np.ascontiguousarray(values).tobytes())


def bf16(values: npt.NDArray[np.float32]) -> Stored:
    """Rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    return Stored("BF16", values.shape, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes())


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[Any] | Stored]) -> Path:
    header: dict[str, Any] = {}
    chunks: list[bytes] = []
    at = 0
    for name, value in tensors.items():
        t = value if isinstance(value, Stored) else Stored.of(value)
        header[name] = {"dtype": t.code, "shape": list(t.shape), "data_offsets": [at, at + len(t.data)]}
        chunks.append(t.data)
        at += len(t.data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))
    return path
