"""K-quant encoders: values on a block's grid survive, all others move by at most about half a step."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from ds4.convert.blocks import random_rows
from ds4.convert.encode import K_QUANTS, encode
from ds4.engine.tensors import DType

# Largest root-mean-square error on normal values, in standard deviations; the bits say what is possible.
RMSE = {DType.Q2_K: 0.33, DType.Q4_K: 0.075, DType.Q5_K: 0.037, DType.Q6_K: 0.021}


@pytest.mark.parametrize("dtype", K_QUANTS, ids=lambda d: d.name)
@pytest.mark.parametrize("scale", [0.02, 1.0, 300.0])
def test_error(dtype: DType, scale: float) -> None:
    print("seed", int(dtype))
    x = (np.random.default_rng(int(dtype)).standard_normal((16, 1024)) * scale).astype(np.float32)
    x[0] += 2 * scale  # all but positive
    x[1] = np.abs(x[1])
    x[2] = -np.abs(x[2])
    x[3, :512] *= 0.01  # groups of different size in one row
    back = dequantize(encode(x, dtype), GGMLQuantizationType(int(dtype))).reshape(x.shape)
    rmse = float(np.sqrt(np.mean((back - x) ** 2)) / scale)
    print(dtype.name, "rmse", rmse)
    assert rmse < RMSE[dtype]
    codes = {DType.Q2_K: 3, DType.Q4_K: 15, DType.Q5_K: 31, DType.Q6_K: 63}[dtype]
    width = 32 if dtype in (DType.Q4_K, DType.Q5_K) else 16
    g, b = x.reshape(-1, width), back.reshape(-1, width)
    reach = np.maximum(g.max(1), 0) - np.minimum(g.min(1), 0)
    if dtype is DType.Q6_K:
        reach = 4 * np.abs(g).max(1)  # codes reach 32 down and 31 up: a whole step at the other end
    block = np.repeat(np.abs(x.reshape(-1, 256)).max(1), 256 // width)
    # Half a step, and the rounding of the group's own scale and minimum, which are whole parts of the block's.
    parts = {DType.Q2_K: 15, DType.Q4_K: 63, DType.Q5_K: 63, DType.Q6_K: 127}[dtype]
    assert (np.abs(g - b).max(1) <= 0.5 * reach / codes + 1.2 * block / parts).all()


@pytest.mark.parametrize("dtype", K_QUANTS, ids=lambda d: d.name)
def test_special_blocks(dtype: DType) -> None:
    qtype = GGMLQuantizationType(int(dtype))
    for value in (0.0, 1.0, -1.0):
        x = np.full((1, 256), value, np.float32)
        assert np.abs(dequantize(encode(x, dtype), qtype) - x).max() <= 2e-2 * abs(value), value
    tiny = np.full((1, 256), 1e-30, np.float32)
    assert np.abs(dequantize(encode(tiny, dtype), qtype)).max() <= 1e-29
    with pytest.raises(ValueError, match="beyond the range of F16"):
        encode(np.full((1, 256), 1e10, np.float32), dtype)


@pytest.mark.parametrize("dtype", K_QUANTS, ids=lambda d: d.name)
def test_layout(dtype: DType) -> None:
    """Each value lands in its own place: a single large one among small ones comes back where it was."""
    qtype = GGMLQuantizationType(int(dtype))
    for at in range(0, 256, 7):
        x = np.full((1, 256), 0.01, np.float32)
        x[0, at] = 5.0
        back = dequantize(encode(x, dtype), qtype)[0]
        assert back.argmax() == at and abs(back[at] - 5) < 0.1
    # Blocks decode to values that encode to values close by, on every kind of grid.
    grid = dequantize(
        np.frombuffer(random_rows(np.random.default_rng(3), dtype, 4, 256, 1.0), np.uint8).reshape(4, -1), qtype
    )
    again = dequantize(encode(grid, dtype), qtype)
    assert np.sqrt(np.mean((again - grid) ** 2)) < RMSE[dtype]
