"""Block formats: the scalar conversion equals the `gguf` package's, bit for bit, on random blocks of every type."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ds4 import _cpu

TYPES = [
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "MXFP4",
    "IQ2_XXS",
]


def random_blocks(qtype: GGMLQuantizationType, n: int, seed: int) -> npt.NDArray[np.uint8]:
    """Any bytes are a sound block, save that a NaN or infinite scale makes the comparison void."""
    rng = np.random.default_rng(seed)
    _, size = GGML_QUANT_SIZES[qtype]
    blocks = rng.integers(0, 256, (8 * n, size), dtype=np.uint8)
    if qtype == GGMLQuantizationType.F32:
        return np.ascontiguousarray(rng.standard_normal(n).astype(np.float32)).view(np.uint8).reshape(n, 4)
    with np.errstate(all="ignore"):
        finite = np.isfinite(dequantize(blocks, qtype).reshape(8 * n, -1)).all(axis=1)
    assert finite.sum() >= n
    return np.ascontiguousarray(blocks[finite][:n])


@pytest.mark.parametrize("name", TYPES)
def test_dequantize_equals_gguf_package(name: str) -> None:
    qtype = GGMLQuantizationType[name]
    seed = 20261130
    print("seed", seed)
    blocks = random_blocks(qtype, 400, seed)
    expected = dequantize(blocks, qtype).reshape(-1)
    got = _cpu.dequantize(int(qtype), blocks.reshape(-1))
    assert got.dtype == np.float32 and len(np.unique(got)) > 10
    # Zero times a negative code may have either sign; everything else is equal in every bit.
    assert np.array_equal((got + 0.0).view(np.uint32), (expected + np.float32(0.0)).view(np.uint32))


@pytest.mark.parametrize("name", [*TYPES, "I32"])
def test_sizes(name: str) -> None:
    qtype = GGMLQuantizationType[name]
    elements, size = GGML_QUANT_SIZES[qtype]
    assert _cpu.dtype_name(int(qtype)) == name
    assert _cpu.row_bytes(int(qtype), 3 * elements) == 3 * size
    if elements > 1:
        with pytest.raises(ValueError, match=rf"{elements + 1} elements.*{name} blocks of {elements}"):
            _cpu.row_bytes(int(qtype), elements + 1)


def test_unknown_type_is_refused() -> None:
    assert _cpu.dtype_name(17) == "unknown"
    with pytest.raises(_cpu.Unsupported, match="17"):
        _cpu.row_bytes(17, 256)
    with pytest.raises(_cpu.Unsupported, match="I32"):
        _cpu.dequantize(26, bytes(8))
    with pytest.raises(ValueError, match="35 bytes"):
        _cpu.dequantize(int(gguf.GGMLQuantizationType.Q8_0), bytes(35))


def test_every_half_widens_exactly() -> None:
    every = np.arange(65536, dtype=np.uint16)
    expected = every.view(np.float16).astype(np.float32)
    got = _cpu.dequantize(int(GGMLQuantizationType.F16), every.view(np.uint8))
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def test_rounding_to_half_and_bfloat16() -> None:
    seed = 7
    print("seed", seed)
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, 20000, dtype=np.uint32)
    halves = rng.integers(0, 0x7C00, 4000, dtype=np.uint16)
    # Random floats, plus the exact midpoints between neighbouring halves and their neighbours in f32.
    middle = (
        (halves.view(np.float16).astype(np.float64) + (halves + 1).view(np.float16).astype(np.float64)) / 2
    ).astype(np.float32)
    values = np.concatenate([bits.view(np.float32), middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)])
    values = values[~np.isnan(values)].astype(np.float32)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).view(np.uint16)
    got = np.array([_cpu.float_to_half(float(v)) for v in values], dtype=np.uint16)
    assert np.array_equal(got, expected)
    # bfloat16: nearest of the two neighbours by exact comparison, ties to the even code.
    for v in values[:4000]:
        code = _cpu.float_to_bf16(float(v))
        low = int(np.float32(v).view(np.uint32)) >> 16
        tail = int(np.float32(v).view(np.uint32)) & 0xFFFF
        up = tail > 0x8000 or (tail == 0x8000 and low % 2 == 1)
        assert code == low + up
