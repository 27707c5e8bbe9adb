"""Reads GGUF files, versions 2 and 3, little endian: metadata and tensors as views into the mapped file.

The file is untrusted. Every count, length and offset is checked against what is left of the file before anything of
that size is allocated; `docs/formats/gguf.md` lists the refusals. Source: the GGUF specification
(ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ds4._core import prefixed_strings
from ds4.engine.mapping import map_file
from ds4.engine.tensors import DType, Tensor
from ds4.errors import ModelFileError, UnsupportedModelError

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_DIMS = 4
MAX_NAME_BYTES = 1 << 10
MAX_ARRAY_DEPTH = 4
MAX_NESTED_ARRAYS = 1 << 20
MAX_ALIGNMENT = 1 << 20
MAX_ELEMENTS = 1 << 62

Array = npt.NDArray[Any]
Value = int | float | bool | str | list[Any] | Array
"""A metadata value. Arrays of numbers are read-only numpy views of the file, other arrays are lists."""

_SCALARS = {
    0: ("u8", struct.Struct("<B")),
    1: ("i8", struct.Struct("<b")),
    2: ("u16", struct.Struct("<H")),
    3: ("i16", struct.Struct("<h")),
    4: ("u32", struct.Struct("<I")),
    5: ("i32", struct.Struct("<i")),
    6: ("f32", struct.Struct("<f")),
    10: ("u64", struct.Struct("<Q")),
    11: ("i64", struct.Struct("<q")),
    12: ("f64", struct.Struct("<d")),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMPY = {kind: np.dtype(f"<{name[0]}{int(name[1:]) // 8}") for kind, (name, _) in _SCALARS.items()}
_TYPE_NAMES = {kind: name for kind, (name, _) in _SCALARS.items()} | {_BOOL: "bool", _STRING: "string", _ARRAY: "array"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GGUFFile:
    """An open GGUF file.

    Raises ModelFileError, naming the key or tensor, for a file that is damaged or lies about itself, and
    UnsupportedModelError for a sound file of a version, byte order or tensor type that is not implemented.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Value] = {}
        self.types: dict[str, str] = {}
        """Stored type of each key: "u32", "string", "array of string", ..."""
        self.tensors: dict[str, Tensor] = {}
        self._view = map_file(self.path)
        self.size = len(self._view)
        self._pos = 0
        self._arrays = 0
        self._read_header()
        self._read_tensors()

    # ---- the cursor

    def _fail(self, where: str, message: str) -> NoReturn:
        raise ModelFileError(self.path, where, message)

    def _take(self, n: int, where: str) -> int:
        """Moves over n bytes and returns where they begin."""
        start, left = self._pos, self.size - self._pos
        if n > left:
            self._fail(where, f"needs {n} bytes at offset {start}, the file has {left} left")
        self._pos = start + n
        return start

    def _number(self, form: struct.Struct, where: str) -> Any:
        return form.unpack_from(self._view, self._take(form.size, where))[0]

    def _name(self, where: str) -> str:
        length = self._number(_U64, where)
        if not 0 < length <= MAX_NAME_BYTES:
            self._fail(where, f"name of {length} bytes, allowed are 1 to {MAX_NAME_BYTES}")
        start = self._take(length, where)
        try:
            return str(self._view[start : start + length], "utf-8")
        except UnicodeDecodeError as e:
            self._fail(where, f"name is not UTF-8 at byte {e.start}")

    # ---- header and metadata

    def _read_header(self) -> None:
        start = self._take(4, "magic")
        if (magic := bytes(self._view[start : start + 4])) != b"GGUF":
            self._fail("", f"not a GGUF file: begins with {magic!r}, expected b'GGUF'")
        self.version: int = self._number(_U32, "version")
        if self.version & 0xFFFF == 0 and self.version:
            raise UnsupportedModelError(
                self.path,
                "version",
                f"big-endian file (version field 0x{self.version:08x}); only little endian is read",
            )
        if self.version not in (2, 3):
            raise UnsupportedModelError(self.path, "version", f"GGUF version {self.version}, supported are 2 and 3")
        n_tensors = self._number(_U64, "tensor count")
        n_keys = self._number(_U64, "key count")
        # The smallest entries: a key of one byte with a one-byte value; a tensor name of one byte, one dimension.
        left = self.size - self._pos
        for what, n, limit, smallest in (("key", n_keys, MAX_KEYS, 14), ("tensor", n_tensors, MAX_TENSORS, 33)):
            if n > min(limit, left // smallest):
                self._fail(
                    f"{what} count", f"{n}, allowed are at most {limit}, and {left // smallest} fit into the file"
                )
        self._n_tensors: int = n_tensors
        for i in range(n_keys):
            key = self._name(f"key {i}")
            if key in self.metadata:
                self._fail(key, "the key occurs twice")
            kind = self._number(_U32, key)
            if kind not in _TYPE_NAMES:
                self._fail(key, f"unknown value type {kind}")
            self.metadata[key], self.types[key] = self._value(kind, key, 0)

    def _value(self, kind: int, key: str, depth: int) -> tuple[Value, str]:
        if kind in _SCALARS:
            name, form = _SCALARS[kind]
            return self._number(form, key), name
        if kind == _BOOL:
            byte = self._view[self._take(1, key)]
            if byte > 1:
                self._fail(key, f"bool of value {byte}, allowed are 0 and 1")
            return byte == 1, "bool"
        if kind == _STRING:
            return self._strings(1, key)[0], "string"
        return self._array(key, depth + 1)

    def _array(self, key: str, depth: int) -> tuple[Value, str]:
        if depth > MAX_ARRAY_DEPTH:
            self._fail(key, f"arrays nested deeper than {MAX_ARRAY_DEPTH}")
        self._arrays += 1
        if self._arrays > MAX_NESTED_ARRAYS:
            self._fail(key, f"more than {MAX_NESTED_ARRAYS} arrays in the file")
        kind = self._number(_U32, key)
        if kind not in _TYPE_NAMES:
            self._fail(key, f"array of unknown element type {kind}")
        count = self._number(_U64, key)
        smallest = {_BOOL: 1, _STRING: 8, _ARRAY: 12}.get(kind) or _NUMPY[kind].itemsize
        if count * smallest > self.size - self._pos:
            self._fail(
                key,
                f"array of {count} elements needs at least {count * smallest} bytes at offset {self._pos}, "
                f"the file has {self.size - self._pos} left",
            )
        name = f"array of {_TYPE_NAMES[kind]}"
        if kind == _STRING:
            return self._strings(count, key), name
        if kind == _ARRAY:
            return [self._array(key, depth + 1)[0] for _ in range(count)], name
        start = self._take(count * smallest, key)
        if kind != _BOOL:
            return np.frombuffer(self._view, _NUMPY[kind], count, start), name
        flags = np.frombuffer(self._view, np.uint8, count, start)
        if count and flags.max() > 1:
            self._fail(key, f"bool of value {int(flags.max())}, allowed are 0 and 1")
        return flags.view(np.bool_), name

    def _strings(self, count: int, key: str) -> list[str]:
        """A vocabulary has 10^5 of them. Bytes that are not UTF-8 become U+FFFD."""
        strings, pos = prefixed_strings(self._view, self._pos, count)
        if len(strings) < count:
            where = f"string {len(strings)} at offset {pos}"
            if self.size - pos >= 8:
                where = f"string {len(strings)} of {_U64.unpack_from(self._view, pos)[0]} bytes at offset {pos + 8}"
            self._fail(key, f"{where}, the file ends at {self.size}")
        self._pos = pos
        return strings

    # ---- tensors

    def _read_tensors(self) -> None:
        headers: list[tuple[str, tuple[int, ...], DType, int, int]] = []
        seen: set[str] = set()
        for i in range(self._n_tensors):
            name = self._name(f"tensor {i}")
            if name in seen:
                self._fail(name, "the tensor occurs twice")
            seen.add(name)
            n_dims = self._number(_U32, name)
            if not 1 <= n_dims <= MAX_DIMS:
                self._fail(name, f"{n_dims} dimensions, allowed are 1 to {MAX_DIMS}")
            dims = struct.unpack_from(f"<{n_dims}Q", self._view, self._take(8 * n_dims, name))
            type_id = self._number(_U32, name)
            offset = self._number(_U64, name)
            headers.append((name, dims, self._dtype(name, type_id), offset, self._tensor_bytes(name, dims, type_id)))
        self.alignment = self._alignment()
        self.data_offset = -(-self._pos // self.alignment) * self.alignment
        data_bytes = max(self.size - self.data_offset, 0)
        end, previous, same = 0, "", (0, 0, DType.F32)
        for name, dims, dtype, offset, nbytes in sorted(headers, key=lambda h: (h[3], h[4])):
            if offset % self.alignment:
                self._fail(name, f"offset {offset} is not a multiple of the alignment {self.alignment}")
            if offset + nbytes > data_bytes:
                self._fail(name, f"{nbytes} bytes at offset {offset}, the file has {data_bytes} bytes of tensor data")
            if offset < end and (offset, nbytes, dtype) != same:
                self._fail(name, f"begins at offset {offset}, inside {previous}, which ends at {end}")
            end, previous, same = offset + nbytes, name, (offset, nbytes, dtype)
            first = self.data_offset + offset
            self.tensors[name] = Tensor(name, dims[::-1], dtype, self._view[first : first + nbytes])
        self.tensors = {name: self.tensors[name] for name, *_ in headers}

    def _dtype(self, name: str, type_id: int) -> DType:
        try:
            if type_id >= 1000:
                raise ValueError
            return DType(type_id)
        except ValueError:
            raise UnsupportedModelError(self.path, name, f"unknown tensor type {type_id}") from None

    def _tensor_bytes(self, name: str, dims: tuple[int, ...], type_id: int) -> int:
        dtype, elements = DType(type_id), prod(dims)
        if not 0 < elements <= MAX_ELEMENTS:
            self._fail(name, f"{elements} elements in dimensions {list(dims)}, allowed are 1 to {MAX_ELEMENTS}")
        if dims[0] % dtype.block_elements:
            self._fail(name, f"rows of {dims[0]} elements are not whole {dtype.name} blocks of {dtype.block_elements}")
        return elements // dtype.block_elements * dtype.block_bytes

    def _alignment(self) -> int:
        key = "general.alignment"
        value = self.metadata.get(key, 32)
        if self.types.get(key, "u32") not in ("u32", "u64") or not isinstance(value, int):
            self._fail(key, f"is of type {self.types[key]}, expected u32")
        if not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            self._fail(key, f"alignment {value}, allowed are powers of two from 8 to {MAX_ALIGNMENT}")
        return value
