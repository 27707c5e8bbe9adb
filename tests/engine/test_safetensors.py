"""The safetensors reader against the `safetensors` package, and against damaged and hostile directories."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ds4.engine.safetensors import DTYPES, SafetensorsFile, parse_json, read_directory, read_json_file
from ds4.engine.tensors import DType
from ds4.errors import ModelFileError, UnsupportedModelError

SEED = 20261130


def build(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **extra: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def to_file(data: bytes) -> Path:
        path = tmp_path / "model.safetensors"
        path.write_bytes(data)
        return path

    return to_file


def refused(path: Path, *texts: str, error: type[ModelFileError] = ModelFileError) -> None:
    with pytest.raises(error) as info:
        SafetensorsFile(path)
    for text in texts:
        assert text in str(info.value), str(info.value)


def test_equals_the_package(tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    path = tmp_path / "x.safetensors"
    arrays = {
        f"a{i}.{np.dtype(kind).name}": rng.integers(0, 2, rng.integers(1, 6, int(rng.integers(0, 4)))).astype(kind)
        for i, kind in enumerate(["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"] * 2)
    }
    arrays["empty"] = np.zeros((0, 3), "f4")
    save_file(arrays, path, metadata={"format": "pt"})
    ours, theirs = SafetensorsFile(path), load_file(path)
    assert ours.metadata == {"format": "pt"} and ours.tensors.keys() == theirs.keys()
    for name, array in theirs.items():
        t = ours.tensors[name]
        assert t.shape == array.shape and bytes(t.data) == array.tobytes() and t.data.readonly


@pytest.mark.parametrize(("code", "size"), [("BF16", 2), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F8_E8M0", 1), ("I64", 8)])
def test_raw_types(write: Any, code: str, size: int) -> None:
    f = SafetensorsFile(write(build({"t": entry(code, [3, 2], [0, 6 * size])}, bytes(range(6 * size)))))
    assert (f.tensors["t"].dtype, f.tensors["t"].nbytes) == (DTYPES[code], 6 * size)


def test_packed_four_bit_type(write: Any) -> None:
    f = SafetensorsFile(write(build({"t": entry("F4", [2, 4], [0, 4])}, b"abcd")))
    assert f.tensors["t"].dtype is DType.F4 and f.tensors["t"].n_elements == 8
    refused(write(build({"t": entry("F4", [3], [0, 1])}, b"a")), "t: rows of 3 elements")


def test_headers_that_lie(write: Any) -> None:
    refused(write(b"\0\0"), "2 bytes")
    refused(write(build(b"{}", length=2**63)), "header", str(2**63))
    refused(write(build(b"{}", length=3)), "header: 3 bytes", "2 left")
    refused(write(build(b" {}")), "begins with b' '")
    refused(write(build(b"{")), "header: not JSON")
    refused(write(build(b"{\xff}")), "header: not JSON")
    refused(write(build(b'{"a":' * 100_000)), "header: not JSON")
    refused(write(build(b'{"a":' + b"9" * 5000 + b"}")), "header: not JSON")
    refused(write(build(b'{"t":1,"t":2}')), "'t' occurs twice")
    refused(write(build({"__metadata__": {"a": 1}})), "__metadata__")
    refused(write(build({}, b"x")), "1 bytes of data, but the tensors cover 0")


def test_tensors_that_lie(write: Any) -> None:
    def one(**changes: Any) -> Path:
        return write(build({"t": entry(**changes)}, bytes(8)))

    assert SafetensorsFile(one()).tensors["t"].nbytes == 8
    refused(one(dtype="F33"), "t: unknown element type 'F33'", error=UnsupportedModelError)
    refused(one(dtype=7), "t: dtype is 7")
    for shape in ([-1], [2.0], [True], "2", [2**63], [1] * 9, None):
        refused(one(shape=shape), "t: shape")
    for offsets in ([0], [0, 8, 8], [-1, 7], [0.0, 8], None):
        refused(one(offsets=offsets), "t: data_offsets")
    refused(one(shape=[1]), "t: data_offsets span 8 bytes, F32 [1] needs 4")
    refused(one(shape=[3]), "t: data_offsets span 8 bytes, F32 [3] needs 12")
    refused(one(shape=[2**40, 2**40]), "t: data_offsets span 8 bytes")
    refused(one(shape=[4], offsets=[0, 16]), "t: ends at byte 16 of the data, the file has 8")
    refused(one(offsets=[8, 0]), "t: data_offsets span -8")
    refused(one(extra=1), "t: expected an object of dtype, shape and data_offsets")
    refused(write(build({"t": 5}, bytes(8))), "t: expected an object")
    gap = {"a": entry(), "b": entry(offsets=[16, 24])}
    refused(write(build(gap, bytes(24))), "b: begins at byte 16 of the data, but a ends at 8")
    overlap = {"a": entry(), "b": entry(offsets=[4, 12])}
    refused(write(build(overlap, bytes(12))), "b: begins at byte 4 of the data, but a ends at 8")


def test_damage_is_refused_or_sound(tmp_path: Path) -> None:
    print("seed", SEED)
    rng = random.Random(SEED)
    data = build({"a": entry(), "b": entry("F16", [2, 3], [8, 20]), "__metadata__": {"x": "y"}}, bytes(20))
    path = tmp_path / "damaged.safetensors"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    tracemalloc.start()
    variants = [data[:n] for n in range(len(data))]
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(data) - 20)] ^= 1 << rng.randrange(8)
        variants.append(bytes(damaged))
    refusals = 0
    for variant in variants:
        os.ftruncate(fd, len(variant))
        os.pwrite(fd, variant, 0)
        try:
            SafetensorsFile(path)
        except ModelFileError:
            refusals += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    os.close(fd)
    print(f"{refusals} of {len(variants)} refused, peak {peak}")
    assert refusals > len(data) + 500 and peak < 8 << 20


# ---- directories


def sharded(folder: Path, **weight_map: str) -> Path:
    save_file({"a": np.arange(4, dtype="f4")}, folder / "m-1.safetensors")
    save_file({"b": np.ones(2, "f4"), "c": np.ones(3, "f4")}, folder / "m-2.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    names = {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"} | weight_map
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def test_shards(tmp_path: Path) -> None:
    config, tensors, size = read_directory(sharded(tmp_path))
    assert config == {"model_type": "llama"} and list(tensors) == ["a", "b", "c"]
    assert bytes(tensors["a"].data) == np.arange(4, dtype="f4").tobytes()
    assert size == sum(f.stat().st_size for f in tmp_path.glob("m-*"))


def test_shards_may_be_links_into_a_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    sharded(tmp_path / "snapshot")
    (tmp_path / "snapshot/m-1.safetensors").rename(tmp_path / "blobs/0")
    (tmp_path / "snapshot/m-1.safetensors").symlink_to("../blobs/0")
    assert list(read_directory(tmp_path / "snapshot")[1]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "..", "a/b.safetensors", "a\\b.safetensors", "x.bin", "", ".x"]
)
def test_index_cannot_leave_the_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match=r"a: .*is not the plain name"):
        read_directory(sharded(tmp_path, a=name))


def test_index_that_lies(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="the index places the tensor here"):
        read_directory(sharded(tmp_path, d="m-1.safetensors"))
    with pytest.raises(ModelFileError, match=r"c: the tensor is here, but the index places it in 'm-1"):
        read_directory(sharded(tmp_path, c="m-1.safetensors"))
    with pytest.raises(ModelFileError, match="No such file"):
        read_directory(sharded(tmp_path, a="m-3.safetensors"))
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[]"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelFileError):
            read_directory(tmp_path)


def test_json_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [1, 2]}')
    assert read_json_file(path) == {"a": [1, 2]}
    with pytest.raises(ModelFileError, match="13 bytes, allowed are at most 12"):
        read_json_file(path, 12)
    with pytest.raises(ModelFileError, match="expected a JSON object, got list"):
        parse_json(path, b"[]", "x")
    with pytest.raises(ModelFileError, match="No such file"):
        read_directory(tmp_path / "nowhere")
