"""The GGUF reader against the `gguf` package's writer and reader, and against damaged and hostile files."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ds4.engine.demo import demo_model_path
from ds4.engine.gguf import GGUFFile
from ds4.engine.tensors import DType
from ds4.errors import ModelFileError, UnsupportedModelError

SEED = 20261130
U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def kv(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, data: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + data


def tensor(name: bytes, dims: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(
    keys: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    magic: bytes = b"GGUF",
    align: int = 32,
) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % align) + data


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def to_file(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return to_file


def sample() -> bytes:
    """A file with every value type, nested arrays and three tensors."""
    keys = [
        kv(b"general.architecture", STR, string(b"test")),
        kv(b"general.alignment", U32, struct.pack("<I", 32)),
        kv(b"u8", U8, b"\xff"),
        kv(b"i8", I8, b"\xff"),
        kv(b"u16", U16, b"\xff\xff"),
        kv(b"i16", I16, b"\xfe\xff"),
        kv(b"i32", I32, struct.pack("<i", -7)),
        kv(b"u64", U64, struct.pack("<Q", 2**64 - 1)),
        kv(b"i64", I64, struct.pack("<q", -(2**63))),
        kv(b"f32", F32, struct.pack("<f", 0.5)),
        kv(b"f64", F64, struct.pack("<d", 0.1)),
        kv(b"yes", BOOL, b"\x01"),
        kv(b"strings", ARR, array(STR, 3, string(b"a") + string(b"") + string("\u00e9\u4e2d".encode()))),
        kv(b"ints", ARR, array(I32, 3, struct.pack("<3i", 1, -2, 3))),
        kv(b"flags", ARR, array(BOOL, 2, b"\x00\x01")),
        kv(b"empty", ARR, array(F32, 0, b"")),
        kv(b"nested", ARR, array(ARR, 2, array(U8, 2, b"\x01\x02") + array(STR, 1, string(b"x")))),
    ]
    tensors = [
        tensor(b"first", [4, 2], DType.F32, 0),
        tensor(b"second", [32], DType.Q8_0, 32),
        tensor(b"third", [3], DType.F16, 96),
    ]
    data = np.arange(8, dtype="<f4").tobytes() + bytes(range(34)) + bytes(30) + np.ones(3, "<f2").tobytes()
    return build(keys, tensors, data)


def refused(path: Path, *texts: str, error: type[ModelFileError] = ModelFileError) -> None:
    with pytest.raises(error) as info:
        GGUFFile(path)
    for text in (*texts, str(path)):
        assert text in str(info.value)


def test_every_value_type(write: Any) -> None:
    f = GGUFFile(write(sample()))
    m = f.metadata
    assert (m["u8"], m["i8"], m["u16"], m["i16"], m["i32"]) == (255, -1, 65535, -2, -7)
    assert (m["u64"], m["i64"], m["f32"], m["f64"], m["yes"]) == (2**64 - 1, -(2**63), 0.5, 0.1, True)
    assert m["strings"] == ["a", "", "\u00e9\u4e2d"]
    assert np.array_equal(m["ints"], [1, -2, 3]) and np.array_equal(m["flags"], [False, True])
    assert len(m["empty"]) == 0 and f.types["empty"] == "array of f32"  # type: ignore[arg-type]
    assert np.array_equal(m["nested"][0], [1, 2]) and m["nested"][1] == ["x"]  # type: ignore[index]
    assert f.types["nested"] == "array of array" and f.types["u64"] == "u64"
    assert f.tensors["first"].shape == (2, 4)
    assert np.frombuffer(f.tensors["first"].data, "<f4").tolist() == list(range(8))
    assert bytes(f.tensors["second"].data) == bytes(range(34))
    assert (f.tensors["third"].nbytes, f.tensors["third"].n_elements, f.version) == (6, 3, 3)
    assert list(f.tensors) == ["first", "second", "third"]


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_equals_the_gguf_package(tmp_path: Path, alignment: int) -> None:
    rng = np.random.default_rng(SEED)
    path = tmp_path / "written.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_custom_alignment(alignment)
    w.add_uint64("big", 2**63 + 5)
    w.add_array("tokens", [f"t{i} \u4e2d" for i in range(1000)])
    w.add_array("scores", [float(i) / 7 for i in range(1000)])
    w.add_array("types", list(range(1000)))
    w.add_bool("flag", False)
    arrays = {f"t{i}": rng.normal(size=rng.integers(1, 40, int(rng.integers(1, 4)))).astype("f4") for i in range(12)}
    for name, a in arrays.items():
        w.add_tensor(name, a if len(name) % 2 else a.astype("f2"))
    q = gguf.quants.quantize(rng.normal(size=(6, 64)).astype("f4"), gguf.GGMLQuantizationType.Q4_0)
    w.add_tensor("quantized", q, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {k: v for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, field in fields.items():
        value = ours.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert ours.alignment == alignment and list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        mine = ours.tensors[t.name]
        assert mine.shape == tuple(int(d) for d in t.shape[::-1])
        assert mine.dtype == int(t.tensor_type)
        assert bytes(mine.data) == t.data.tobytes()


def test_demo_model_equals_the_gguf_package() -> None:
    path = demo_model_path()
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert len(ours.tensors) == len(theirs.tensors) == 272
    for t in theirs.tensors:
        mine = ours.tensors[t.name]
        assert (mine.shape[::-1], mine.dtype, mine.nbytes) == (tuple(t.shape), int(t.tensor_type), int(t.n_bytes))
        assert bytes(mine.data[:64]) == t.data.reshape(-1).view(np.uint8)[:64].tobytes()
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert ours.metadata[key][:3000] == theirs.fields[key].contents(slice(3000))  # type: ignore[index]
        assert len(ours.metadata[key]) == len(theirs.fields[key].data)  # type: ignore[arg-type]


def test_version_2_reads_like_3(write: Any) -> None:
    data = bytearray(sample())
    data[4] = 2
    assert GGUFFile(write(bytes(data))).version == 2


def test_type_table_equals_the_gguf_package() -> None:
    for kind, (elements, size) in gguf.constants.GGML_QUANT_SIZES.items():
        if int(kind) in DType.__members__.values() and kind.name != "Q8_1":  # theirs has f32 scales, ggml's block f16
            ours = DType(int(kind))
            assert (ours.name, ours.block_elements, ours.block_bytes) == (kind.name, elements, size)


def test_string_values_that_are_not_utf8_are_repaired(write: Any) -> None:
    f = GGUFFile(write(build([kv(b"s", STR, string(b"a\xffb")), kv(b"t", ARR, array(STR, 1, string(b"\xc3")))], [])))
    assert f.metadata == {"s": "a\ufffdb", "t": ["\ufffd"]}


def test_tensors_keep_the_map_alive(write: Any) -> None:
    view = GGUFFile(write(sample())).tensors["first"].data
    assert view.readonly and np.frombuffer(view, "<f4")[7] == 7


def test_headers_that_lie(write: Any) -> None:
    huge = 2**63
    refused(write(b""), "empty")
    refused(write(b"GGUF"), "version", "needs 4 bytes", "0 left")
    refused(write(build([], [], magic=b"GGML")), "begins with b'GGML'")
    refused(write(build([], [], version=1)), "version 1", error=UnsupportedModelError)
    refused(write(b"GGUF" + struct.pack(">IQQ", 3, 0, 0)), "big-endian", error=UnsupportedModelError)
    refused(write(build([], [], n_keys=huge)), "key count", str(huge))
    refused(write(build([], [], n_tensors=huge)), "tensor count", str(huge))
    refused(write(build([], [], n_keys=1) + bytes(100)), "key 0", "name of 0 bytes")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GGUFFile(write(b"x").parent)
    with pytest.raises(ModelFileError, match="No such file"):
        GGUFFile("/nowhere/model.gguf")


def test_keys_that_lie(write: Any) -> None:
    pad = bytes(64)
    refused(write(build([kv(b"a", U8, b"\0"), kv(b"a", U8, b"\0")], [])), "a: the key occurs twice")
    refused(write(build([kv(b"a", 13, b"\0")], []) + pad), "a: unknown value type 13")
    refused(write(build([kv(b"a", BOOL, b"\x02")], [])), "a: bool of value 2")
    refused(write(build([kv(b"\xff", U8, b"\0")], [])), "not UTF-8")
    refused(write(build([kv(b"k" * 1025, U8, b"\0")], [])), "name of 1025 bytes")
    refused(write(build([struct.pack("<Q", 2**64 - 1)], []) + pad), f"name of {2**64 - 1} bytes")
    refused(write(build([kv(b"a", STR, struct.pack("<Q", 2**63))], []) + pad), "a: string 0 of", str(2**63))
    for kind in (U8, U64, STR, BOOL, ARR):
        refused(write(build([kv(b"a", ARR, array(kind, 2**61, b""))], []) + pad), "a: array of", str(2**61))
    refused(write(build([kv(b"a", ARR, array(99, 1, b""))], []) + pad), "unknown element type 99")
    refused(write(build([kv(b"a", ARR, array(BOOL, 2, b"\x01\x07"))], [])), "bool of value 7")
    short = struct.pack("<Q", 5) + b"ab"
    refused(write(build([kv(b"a", STR, short)], [], align=1)), "a: string 0 of 5 bytes", "the file ends at")
    refused(write(build([kv(b"a", ARR, array(STR, 2, string(b"") + short))], [], align=1)), "a: string 1 of 5 bytes")
    deep = b"\0"
    for _ in range(40):
        deep = array(ARR, 1, deep)
    refused(write(build([kv(b"a", ARR, deep)], []) + pad), "nested deeper than 4")
    refused(write(build([kv(b"a", ARR, array(STR, 5, string(b"xy")))], [])), "a: ")


def test_tensors_that_lie(write: Any) -> None:
    data = bytes(256)

    def one(*dims: int, kind: int = DType.F32, offset: int = 0) -> Path:
        return write(build([], [tensor(b"t", list(dims), kind, offset)], data))

    assert GGUFFile(one(64)).tensors["t"].nbytes == 256
    refused(one(65), "t: 260 bytes at offset 0, the file has 256")
    refused(one(64, offset=32), "t: 256 bytes at offset 32, the file has 256")
    refused(one(1, offset=2**63), "t: 4 bytes at offset 9223372036854775808")
    refused(one(1, offset=16), "t: offset 16 is not a multiple of the alignment 32")
    refused(one(0), "t: 0 elements")
    refused(one(2**32, 2**32), "t: 18446744073709551616 elements")
    refused(one(2**63, 2, 2), "t: ")
    refused(one(1, 1, 1, 1, 1), "t: 5 dimensions")
    refused(one(), "t: 0 dimensions")
    refused(one(33, kind=DType.Q8_0), "t: rows of 33 elements are not whole Q8_0 blocks of 32")
    refused(one(4, kind=4), "t: unknown tensor type 4", error=UnsupportedModelError)
    refused(one(4, kind=DType.U8), "t: unknown tensor type 1000", error=UnsupportedModelError)
    both = [tensor(b"a", [16], DType.F32, 0), tensor(b"b", [16], DType.F32, 32)]
    refused(write(build([], both, data)), "b: begins at offset 32, inside a, which ends at 64")
    tied = [tensor(b"a", [16], DType.F32, 0), tensor(b"b", [4, 4], DType.F32, 0), tensor(b"c", [8], DType.F32, 64)]
    found = GGUFFile(write(build([], tied, data))).tensors
    assert found["a"].data == found["b"].data and found["b"].shape == (4, 4) and list(found) == ["a", "b", "c"]
    for other in (tensor(b"b", [8], DType.F32, 0), tensor(b"b", [32], DType.F16, 0), tensor(b"b", [32], DType.F32, 0)):
        refused(write(build([], [tied[0], other], data)), "begins at offset 0, inside")
    refused(write(build([], [both[0], both[0]], data)), "a: the tensor occurs twice")
    for value in (0, 4, 33, 2**21):
        refused(write(build([kv(b"general.alignment", U32, struct.pack("<I", value))], [], data)), f"alignment {value}")
    refused(write(build([kv(b"general.alignment", STR, string(b"32"))], [], data)), "is of type string")


class Scratch:
    """One file rewritten in place many times; replacing it each time would wait for the disk."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self._file = path, path.open("wb", buffering=0)
        self.write(data)

    def write(self, data: bytes) -> Path:
        os.ftruncate(self._file.fileno(), len(data))
        os.pwrite(self._file.fileno(), data, 0)
        return self.path


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    data = sample()
    scratch = Scratch(tmp_path / "cut.gguf", data)
    for length in range(len(data)):
        with pytest.raises(ModelFileError):
            GGUFFile(scratch.write(data[:length]))


def test_hostile_fields_at_every_offset(tmp_path: Path) -> None:
    """Every 8 and 4 bytes of the header replaced by hostile numbers: an error or a sound file, little memory."""
    data = sample()
    scratch = Scratch(tmp_path / "hostile.gguf", data)
    header = data.index(b"third") + 5 + 4 + 8 + 4 + 8
    numbers = [struct.pack("<Q", n) for n in (2**64 - 1, 2**63, 2**61, 2**32)]
    numbers += [struct.pack("<I", n) for n in (2**32 - 1, 9)]
    opened = 0
    tracemalloc.start()
    for offset in range(4, header):
        for number in numbers:
            path = scratch.write(data[:offset] + number + data[offset + len(number) :])
            try:
                GGUFFile(path)
                opened += 1
            except ModelFileError:
                pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{opened} of {(header - 4) * len(numbers)} variants are still sound, peak {peak} bytes")
    assert peak < 4 << 20


def test_random_damage(tmp_path: Path) -> None:
    print("seed", SEED)
    rng = random.Random(SEED)
    data = sample()
    scratch = Scratch(tmp_path / "damaged.gguf", data)
    refusals = 0
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged) // 2)] ^= 1 << rng.randrange(8)
        try:
            f = GGUFFile(scratch.write(bytes(damaged)))
            for t in f.tensors.values():
                assert len(bytes(t.data)) == t.nbytes == t.n_elements // t.dtype.block_elements * t.dtype.block_bytes
        except ModelFileError:
            refusals += 1
    print(f"{refusals} of 3000 refused")
    assert refusals > 500


def test_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    refused(tmp_path / "fifo.gguf", "not a regular file")


def test_large_vocabulary_is_read_and_cheap(write: Any) -> None:
    """150,000 tokens and as many merges: the strings are equal, and the parser allocates little beside them."""
    tokens = [b"tok%d" % i for i in range(150_000)]
    path = write(build([kv(b"tokens", ARR, array(STR, len(tokens), b"".join(map(string, tokens))))], []))
    f = GGUFFile(path)
    assert f.metadata["tokens"] == [t.decode() for t in tokens]
