"""Reads a Hugging Face model directory: `config.json` with one or several `.safetensors` files.

The directory is untrusted; `docs/formats/safetensors.md` lists the refusals. Source: the safetensors format
(huggingface/safetensors, README) and the sharded index of transformers.
"""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from ds4.engine.mapping import map_file
from ds4.engine.tensors import DType, Tensor
from ds4.errors import ModelFileError, UnsupportedModelError

MAX_HEADER_BYTES = 1 << 26
MAX_JSON_BYTES = 1 << 26
MAX_DIMS = 8
MAX_SHARDS = 4096

DTYPES = {
    "F64": DType.F64,
    "F32": DType.F32,
    "F16": DType.F16,
    "BF16": DType.BF16,
    "I64": DType.I64,
    "I32": DType.I32,
    "I16": DType.I16,
    "I8": DType.I8,
    "U64": DType.U64,
    "U32": DType.U32,
    "U16": DType.U16,
    "U8": DType.U8,
    "BOOL": DType.BOOL,
    "F8_E4M3": DType.F8_E4M3,
    "F8_E5M2": DType.F8_E5M2,
    "F8_E8M0": DType.F8_E8M0,
    "F4": DType.F4,
}


def parse_json(path: Path, data: bytes, where: str) -> dict[str, Any]:
    """The object in `data`. Raises ModelFileError for anything else, for duplicate members and deep nesting."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise ModelFileError(path, where, f"the member {twice!r} occurs twice")
        return result

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=members)
    except (ValueError, RecursionError) as e:
        raise ModelFileError(path, where, f"not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelFileError(path, where, f"expected a JSON object, got {type(value).__name__}")
    return value


def read_json_file(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes. Raises ModelFileError."""
    view = map_file(path)
    if len(view) > limit:
        raise ModelFileError(path, "", f"{len(view)} bytes, allowed are at most {limit}")
    return parse_json(path, bytes(view), "")


class SafetensorsFile:
    """One `.safetensors` file: `tensors` as views into the map, `metadata` of the header.

    Raises ModelFileError, naming the tensor, for a file that is damaged or lies about itself, and UnsupportedModelError
    for an unknown element type.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tensors: dict[str, Tensor] = {}
        self.metadata: dict[str, str] = {}
        view = map_file(self.path)
        self.size = len(view)
        if self.size < 8:
            self._fail("header", f"the file has {self.size} bytes, the header length alone needs 8")
        (length,) = struct.unpack_from("<Q", view)
        if length > min(MAX_HEADER_BYTES, self.size - 8):
            self._fail(
                "header",
                f"{length} bytes, allowed are at most {MAX_HEADER_BYTES}, and the file has {self.size - 8} left",
            )
        raw = bytes(view[8 : 8 + length])
        if raw[:1] != b"{":
            self._fail("header", f"begins with {raw[:1]!r}, expected b'{{'")
        header = parse_json(self.path, raw, "header")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            self._fail("__metadata__", "expected an object of strings")
        self.metadata = metadata
        self._read_tensors(view[8 + length :], header)

    def _fail(self, where: str, message: str) -> NoReturn:
        raise ModelFileError(self.path, where, message)

    def _read_tensors(self, data: memoryview, header: dict[str, Any]) -> None:
        entries = [self._entry(name, entry) for name, entry in header.items()]
        end, previous = 0, "the header"
        for name, dtype, shape, first, last in sorted(entries, key=lambda e: e[3:]):
            if last > len(data):
                self._fail(name, f"ends at byte {last} of the data, the file has {len(data)}")
            if first != end:
                self._fail(name, f"begins at byte {first} of the data, but {previous} ends at {end}")
            end, previous = last, name
            self.tensors[name] = Tensor(name, shape, dtype, data[first:last])
        if end != len(data):
            self._fail("", f"{len(data)} bytes of data, but the tensors cover {end}")

    def _entry(self, name: str, entry: Any) -> tuple[str, DType, tuple[int, ...], int, int]:
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            self._fail(name, "expected an object of dtype, shape and data_offsets")
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(code, str):
            self._fail(name, f"dtype is {code!r}, expected a string")
        if code not in DTYPES:
            raise UnsupportedModelError(self.path, name, f"unknown element type {code!r}")
        if not _sizes(shape) or len(shape) > MAX_DIMS:
            self._fail(name, f"shape is not a list of at most {MAX_DIMS} sizes")
        if not _sizes(offsets) or len(offsets) != 2:
            self._fail(name, "data_offsets are not two sizes")
        dtype, n, (first, last) = DTYPES[code], prod(shape), offsets
        if shape and shape[-1] % dtype.block_elements:
            self._fail(name, f"rows of {shape[-1]} elements are not whole {code} blocks of {dtype.block_elements}")
        expected = n // dtype.block_elements * dtype.block_bytes
        if last - first != expected:
            self._fail(name, f"data_offsets span {last - first} bytes, {code} {shape} needs {expected}")
        return name, dtype, tuple(shape), first, last


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in value)


def read_directory(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    """(config.json, all tensors by their names in the files, bytes of the tensor files) of a model directory.

    Raises ModelFileError and UnsupportedModelError; a shard must lie in the directory itself.
    """
    config = read_json_file(path / "config.json")
    index_path = path / "model.safetensors.index.json"
    if not index_path.exists():
        file = SafetensorsFile(path / "model.safetensors")
        return config, file.tensors, file.size
    weight_map = read_json_file(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(index_path, "weight_map", "missing, empty or not an object")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _plain_name(shard):
            raise ModelFileError(
                index_path, name, f"{shard!r} is not the plain name of a .safetensors file in this directory"
            )
    shards = sorted(set(weight_map.values()))
    if len(shards) > MAX_SHARDS:
        raise ModelFileError(index_path, "weight_map", f"{len(shards)} files, allowed are at most {MAX_SHARDS}")
    tensors: dict[str, Tensor] = {}
    size = 0
    files = {shard: SafetensorsFile(path / shard) for shard in shards}
    for shard, file in files.items():
        size += file.size
        for name in file.tensors:
            if weight_map.get(name) != shard:
                raise ModelFileError(
                    file.path, name, f"the tensor is here, but the index places it in {weight_map.get(name)!r}"
                )
    for name, shard in weight_map.items():
        if name not in files[shard].tensors:
            raise ModelFileError(files[shard].path, name, "the index places the tensor here, but it is not in the file")
        tensors[name] = files[shard].tensors[name]
    return config, tensors, size


def _plain_name(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith(".") and not set(name) & set("/\\\0:")
