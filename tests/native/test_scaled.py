"""Codes with scales beside them become plain types of exactly the same values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ds4 import _cpu
from ds4.engine.tensors import DType

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """By the format's definition: bias 7, subnormals, no infinities (OCP OFP8)."""
    exponent, fraction = (codes >> 3 & 15).astype(int), (codes & 7).astype(float)
    value = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    value = np.where(codes & 127 == 127, np.nan, value)
    return np.where(codes & 128, -value, value)


def plain(
    dtype: DType, codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]
) -> tuple[DType, npt.NDArray[np.float32]]:
    rows, cols = len(codes), codes.shape[1] * (2 if dtype is DType.F4 else 1)
    got, data = _cpu.plain_matrix(int(dtype), rows, cols, codes, scales)
    return DType(got), _cpu.dequantize(got, data).reshape(rows, cols)


@pytest.mark.parametrize(("rows", "cols"), [(128, 128), (256, 384), (130, 200), (3, 129), (127, 64)])
def test_fp8_tiles(rows: int, cols: int) -> None:
    print("seed", rows * cols)
    rng = np.random.default_rng(rows * cols)
    codes = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    codes[codes & 127 == 127] ^= 1
    scales = rng.integers(100, 140, (-(-rows // 128), -(-cols // 128)), dtype=np.uint8)
    dtype, values = plain(DType.F8_E4M3, codes, scales)
    each = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:rows, :cols].astype(int)
    assert dtype is DType.BF16
    assert np.array_equal(values.astype(np.float64), e4m3(codes) * 2.0 ** (each - 127))


def test_every_fp8_code_and_the_ends_of_the_scales() -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), (2, 1))
    for scale, expected in ((0, DType.F32), (2, DType.F32), (3, DType.BF16), (127, DType.BF16), (246, DType.BF16)):
        finite = codes.copy()
        finite[finite & 127 == 127] = 0
        dtype, values = plain(DType.F8_E4M3, finite, np.full((1, 2), scale, np.uint8))
        assert dtype is expected, scale
        assert np.array_equal(values.astype(np.float64), e4m3(finite) * 2.0 ** (scale - 127)), scale
    _, values = plain(DType.F8_E4M3, codes, np.full((1, 2), 127, np.uint8))
    assert np.array_equal(np.isnan(values), codes & 127 == 127)
    with pytest.raises(ValueError, match="beyond the range"):
        plain(DType.F8_E4M3, np.full((2, 128), 126, np.uint8), np.full((1, 1), 247, np.uint8))
    small = np.full((2, 128), 8, np.uint8)  # 2^-6 fits under the same scale
    assert plain(DType.F8_E4M3, small, np.full((1, 1), 247, np.uint8))[1][0, 0] == 2.0**114


def test_fp4_is_mxfp4_in_another_order() -> None:
    print("seed 4")
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (5, 64), dtype=np.uint8)
    scales = rng.integers(2, 250, (5, 4), dtype=np.uint8)
    dtype, values = plain(DType.F4, codes, scales)
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(5, 128)
    expected = E2M1[nibbles] * 2.0 ** (np.repeat(scales, 32, 1).astype(int) - 127)
    assert dtype is DType.MXFP4
    assert np.array_equal(values.astype(np.float64), expected)


def test_refusals() -> None:
    codes, scales = np.zeros((2, 128), np.uint8), np.full((1, 1), 255, np.uint8)
    with pytest.raises(ValueError, match="not a number"):
        plain(DType.F8_E4M3, codes, scales)
    with pytest.raises(ValueError, match="not a number"):
        plain(DType.F4, codes, np.full((2, 8), 255, np.uint8))
    with pytest.raises(ValueError, match="another shape"):
        plain(DType.F8_E4M3, codes, np.zeros((1, 2), np.uint8))
    with pytest.raises(ValueError, match="48 elements"):
        _cpu.plain_matrix(int(DType.F4), 1, 48, np.zeros(24, np.uint8), np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="Q8_0 has no scales"):
        _cpu.plain_matrix(int(DType.Q8_0), 1, 32, np.zeros(34, np.uint8), np.zeros(1, np.uint8))
    with pytest.raises(_cpu.Unsupported, match="one row"):
        plain(DType.F8_E4M3, codes[:1], np.full((1, 1), 127, np.uint8))
