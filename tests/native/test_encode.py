"""Encoders of block formats, read back by the `gguf` package: never worse than a plain grid, values in their places."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from ds4 import _cpu
from ds4.convert.blocks import random_rows
from ds4.convert.encode import SEARCHED
from ds4.engine.tensors import DType
from tests.support.plain_encoders import plain

F32 = npt.NDArray[np.float32]

# Largest root-mean-square error on normal values, in standard deviations; the bits say what is possible.
RMSE = {
    DType.IQ2_XXS: 0.34,
    DType.Q2_K: 0.29,
    DType.Q3_K: 0.15,
    DType.Q4_K: 0.071,
    DType.IQ4_NL: 0.077,
    DType.Q5_K: 0.036,
    DType.Q6_K: 0.018,
}
WITH_GRID = [t for t in SEARCHED if t is not DType.IQ2_XXS]


def coded(x: F32, dtype: DType, threads: int = 0) -> F32:
    """Encoded here, decoded by the gguf package."""
    blocks = _cpu.encode(int(dtype), x, threads).reshape(len(x), -1)
    return dequantize(blocks, GGMLQuantizationType(int(dtype))).reshape(x.shape)


def sample(seed: int, scale: float) -> F32:
    """Rows of several kinds: normal, shifted, of one sign, uneven, with outliers, sparse."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((24, 1024)) * scale
    x[0] += 2 * scale
    x[1] = np.abs(x[1])
    x[2] = -np.abs(x[2])
    x[3, :512] *= 0.01
    x[4, ::37] *= 12
    x[5] *= rng.random(1024) < 0.1
    x[6] = scale * rng.standard_t(2, 1024)
    return x.astype(np.float32)


@pytest.mark.parametrize("dtype", SEARCHED, ids=lambda d: d.name)
def test_error_of_normal_values(dtype: DType) -> None:
    x = sample(int(dtype), 0.02)[7:]
    rmse = float(np.sqrt(np.mean((coded(x, dtype) - x) ** 2)) / 0.02)
    print(dtype.name, "rmse", rmse)
    assert rmse < RMSE[dtype]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("dtype", WITH_GRID, ids=lambda d: d.name)
def test_no_block_is_worse_than_a_plain_grid(dtype: DType, scale: float) -> None:
    x = sample(int(dtype) + 1, scale)
    size = dtype.block_elements
    ours, theirs = (((y - x) ** 2).reshape(-1, size).sum(1) for y in (coded(x, dtype), plain(x, dtype)))
    print(dtype.name, "squared error against the plain grid's:", float(ours.sum() / theirs.sum()))
    assert (ours <= theirs * (1 + 1e-4) + 1e-12 * scale**2).all()
    assert ours.sum() < 0.97 * theirs.sum()


@pytest.mark.parametrize("dtype", SEARCHED, ids=lambda d: d.name)
def test_special_blocks(dtype: DType) -> None:
    # Two-bit magnitudes without a zero: an even block is hit, zeros among others are not.
    for value in (0.0, 1.0) if dtype is DType.IQ2_XXS else (0.0, 1.0, -1.0):
        x = np.full((1, 256), value, np.float32)
        assert np.abs(coded(x, dtype) - x).max() <= 3e-2 * abs(value), value
    tiny = np.full((1, 256), 1e-30, np.float32)
    assert np.abs(coded(tiny, dtype)).max() <= 1e-29
    assert np.isfinite(coded(np.full((1, 256), 1e-41, np.float32), dtype)).all()
    with pytest.raises(ValueError, match="beyond the range of F16"):
        _cpu.encode(int(dtype), np.full((1, 256), 1e10, np.float32))


@pytest.mark.parametrize("dtype", WITH_GRID, ids=lambda d: d.name)
def test_layout(dtype: DType) -> None:
    """Each value lands in its own place: a single large one among small ones comes back where it was."""
    for at in range(0, 256, 7):
        x = np.full((1, 256), 0.01, np.float32)
        x[0, at] = 5.0
        back = coded(x, dtype)[0]
        assert back.argmax() == at and abs(back[at] - 5) < 0.1
        back = coded(-x, dtype)[0]
        assert back.argmin() == at and abs(back[at] + 5) < 0.1


@pytest.mark.parametrize("dtype", SEARCHED, ids=lambda d: d.name)
def test_values_of_blocks_encode_to_values_close_by(dtype: DType) -> None:
    data = np.frombuffer(random_rows(np.random.default_rng(3), dtype, 4, 256, 1.0), np.uint8)
    grid = dequantize(data.reshape(4, -1), GGMLQuantizationType(int(dtype)))
    assert np.sqrt(np.mean((coded(grid, dtype) - grid) ** 2)) < RMSE[dtype]


def test_two_bit_words_are_the_nearest() -> None:
    """At the scale that a group got, no other word of the code book with an even number of signs is nearer."""
    x = sample(9, 1.0)
    blocks = _cpu.encode(int(DType.IQ2_XXS), x).reshape(-1, 66)
    back = dequantize(blocks, GGMLQuantizationType.IQ2_XXS).reshape(-1, 8)
    gguf.quants.IQ2_XXS.init_grid()
    words = gguf.quants.IQ2_XXS.grid.reshape(256, 8).astype(np.float64)
    d = blocks[:, :2].copy().view(np.float16).astype(np.float64)
    nibbles = blocks[:, 2:].reshape(-1, 8, 8)[:, :, 7] >> 4
    scale = np.repeat((d * (0.5 + nibbles) * 0.25).reshape(-1), 4)
    v = x.reshape(-1, 8).astype(np.float64)
    got = ((back - v) ** 2).sum(1)
    for first in range(0, len(v), 512):
        part, s = v[first : first + 512], scale[first : first + 512]
        terms = np.abs(part)[:, None, :] * words * s[:, None, None]
        odd = (part < 0).sum(1) % 2 == 1
        cost = (part**2).sum(1)[:, None] - 2 * terms.sum(2) + (s**2)[:, None] * (words**2).sum(1)
        cost += np.where(odd[:, None], 4 * terms.min(2), 0)
        assert (got[first : first + 512] <= cost.min(1) * (1 + 1e-5) + 1e-6).all()
    assert ((back < 0).sum(1) % 2 == 0).all()


@pytest.mark.parametrize("dtype", SEARCHED, ids=lambda d: d.name)
def test_threads_do_not_matter(dtype: DType) -> None:
    x = np.concatenate([sample(2, 0.1)] * 4)
    one = _cpu.encode(int(dtype), x, 1)
    assert all(np.array_equal(one, _cpu.encode(int(dtype), x, n)) for n in (2, 3, 7))
    bad = x.copy()
    bad[50] = 1e12  # in the part of one thread
    with pytest.raises(ValueError, match="beyond the range of F16"):
        _cpu.encode(int(dtype), bad, 3)


def test_refusals() -> None:
    assert [_cpu.can_encode(int(t)) for t in (DType.Q4_K, DType.Q8_0, DType.I32)] == [True, False, False]
    with pytest.raises(_cpu.Unsupported, match="no encoder for type Q8_0"):
        _cpu.encode(int(DType.Q8_0), np.zeros(32, np.float32))
    with pytest.raises(ValueError, match="255 elements"):
        _cpu.encode(int(DType.Q4_K), np.zeros(255, np.float32))
