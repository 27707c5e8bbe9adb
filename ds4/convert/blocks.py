"""Random blocks of every element type, straight in the file's form: what a checkpoint of random weights is made of.

Codes are random bytes; the half-precision scales in front of, between or behind them are set so that values have about
the wanted spread and no offset. So weights of any size can be drawn without an encoder, 2-bit ones too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ds4 import _cpu
from ds4.engine.tensors import DType

_PLAIN = (DType.F32, DType.F16, DType.BF16)
_MXFP4_MIDDLE = 127


@dataclass(frozen=True, slots=True)
class _Scales:
    """Byte offsets of the half-precision scale and minimum in a block, and how many scales one minimum makes."""

    scale: int
    minimum: int | None = None
    ratio: float = 0.0


# A minimum of `ratio` scales moves the mean of uniformly random codes to zero: half of the largest code, times the
# mean of a group's own scale over that of its own minimum (which are alike).
_BLOCKS: dict[DType, _Scales] = {
    DType.Q4_0: _Scales(0),
    DType.Q4_1: _Scales(0, 2, -7.5),
    DType.Q5_0: _Scales(0),
    DType.Q5_1: _Scales(0, 2, -15.5),
    DType.Q8_0: _Scales(0),
    DType.Q2_K: _Scales(80, 82, 1.5),
    DType.Q3_K: _Scales(108),
    DType.Q4_K: _Scales(0, 2, 7.5),
    DType.Q5_K: _Scales(0, 2, 15.5),
    DType.Q6_K: _Scales(208),
    DType.IQ4_NL: _Scales(0),
    DType.IQ2_XXS: _Scales(0),
}
DRAWABLE = (*_PLAIN, DType.MXFP4, *_BLOCKS)
"""Types that `random_rows` draws."""


def random_rows(rng: np.random.Generator, dtype: DType, rows: int, cols: int, spread: float) -> bytes:
    """Rows of random values with mean near 0 and standard deviation near `spread`."""
    if dtype in _PLAIN:
        return _plain(rng.standard_normal((rows, cols), np.float32) * np.float32(spread), dtype)
    blocks = np.frombuffer(rng.bytes(rows * cols // dtype.block_elements * dtype.block_bytes), np.uint8)
    blocks = blocks.reshape(-1, dtype.block_bytes).copy()
    if dtype is DType.MXFP4:
        # The spread of the codes at scale 1 is known; powers of two come no nearer than a factor of the root of two.
        blocks[:, 0] = _MXFP4_MIDDLE + round(math.log2(spread / _unit_spread(dtype)))
    else:
        _set_scales(blocks, dtype, spread / _unit_spread(dtype))
    return blocks.tobytes()


def _plain(values: npt.NDArray[np.float32], dtype: DType) -> bytes:
    if dtype is DType.F32:
        return values.tobytes()
    if dtype is DType.F16:
        return values.astype(np.float16).tobytes()
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).tobytes()


def _set_scales(blocks: npt.NDArray[np.uint8], dtype: DType, scale: float) -> None:
    at = _BLOCKS[dtype]
    half = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    blocks[:, at.scale : at.scale + 2] = half
    if at.minimum is None:  # codes reach further down than up: every other block is turned round
        blocks[1::2, at.scale + 1] |= 0x80
    if at.minimum is not None:
        least = np.float16(np.float16(scale) * at.ratio).tobytes()
        blocks[:, at.minimum : at.minimum + 2] = np.frombuffer(least, np.uint8)


@cache
def _unit_spread(dtype: DType) -> float:
    """Standard deviation of random codes at scale 1, measured."""
    blocks = np.random.default_rng(0).integers(0, 256, (4096, dtype.block_bytes), dtype=np.uint8)
    if dtype is DType.MXFP4:
        blocks[:, 0] = _MXFP4_MIDDLE
    else:
        _set_scales(blocks, dtype, 1.0)
    return float(_cpu.dequantize(int(dtype), blocks.reshape(-1)).std())
