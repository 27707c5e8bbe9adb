"""Encoders of the K-quants: 256 values in groups, each with a small scale (and minimum) in units of the block's own.

Nearest codes on a grid from each group's range, without a search for a better grid. Layouts: native/quant/quant.cpp.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4.engine.tensors import DType

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_SUPER = 256


def encode_k(values: F32, dtype: DType) -> U8:
    """Rows [n, cols] as blocks [n * cols / 256, bytes]. Raises ValueError for a scale beyond F16."""
    x = values.reshape(-1, _SUPER)
    if dtype is DType.Q6_K:
        return _q6_k(x)
    if dtype is DType.Q2_K:
        return _q2_k(x)
    return _q45_k(x, 4 if dtype is DType.Q4_K else 5)


def _half(values: F32) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise ValueError("the scale of a block is beyond the range of F16")
    return half


def _bytes(half: npt.NDArray[np.float16]) -> U8:
    return half.reshape(-1, 1).view(np.uint8)


def _ratio(a: F32, b: F32) -> F32:
    """a / b, 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def _with_minimums(
    x: F32, groups: int, largest_code: int, largest_scale: int
) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16], U8, U8, U8]:
    """(d, dmin [n], scales, minimums [n, groups], codes [n, 256]) with x near d * scale * code - dmin * minimum."""
    g = x.reshape(len(x), groups, -1)
    low = np.minimum(g.min(2), 0)
    step = (np.maximum(g.max(2), 0) - low) / np.float32(largest_code)
    d, dmin = _half(step.max(1) / largest_scale), _half(-low.min(1) / largest_scale)
    wide, wide_min = d.astype(np.float32)[:, None], dmin.astype(np.float32)[:, None]
    scales = np.clip(np.rint(_ratio(step, wide)), 0, largest_scale)
    minimums = np.clip(np.rint(_ratio(-low, wide_min)), 0, largest_scale)
    codes = np.rint(_ratio(g + (wide_min * minimums)[:, :, None], (wide * scales)[:, :, None]))
    codes = np.clip(codes, 0, largest_code).astype(np.uint8).reshape(x.shape)
    return d, dmin, scales.astype(np.uint8), minimums.astype(np.uint8), codes


def _q2_k(x: F32) -> U8:
    d, dmin, scales, minimums, codes = _with_minimums(x, 16, 3, 15)
    # Bits 2s of byte 32 h + i: element 128 h + 32 s + i.
    q = codes.reshape(-1, 2, 4, 32)
    packed = q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6
    return np.concatenate([scales | minimums << 4, packed.reshape(-1, 64), _bytes(d), _bytes(dmin)], 1)


def _q45_k(x: F32, bits: int) -> U8:
    d, dmin, scales, minimums, codes = _with_minimums(x, 8, (1 << bits) - 1, 63)
    twelve = np.concatenate(
        [
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            minimums[:, :4] | minimums[:, 4:] >> 4 << 6,
            (scales[:, 4:] & 15) | (minimums[:, 4:] & 15) << 4,
        ],
        1,
    )
    # Nibbles of 64 neighbours in 32 bytes, the first half low; fifth bits of group j in bit j.
    q = (codes & 15).reshape(-1, 4, 2, 32)
    low = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)
    parts = [_bytes(d), _bytes(dmin), twelve]
    if bits == 5:
        fifth = (codes >> 4).reshape(-1, 8, 32)
        parts.append(np.bitwise_or.reduce(fifth << np.arange(8, dtype=np.uint8)[:, None], 1))
    return np.concatenate([*parts, low], 1)


def _q6_k(x: F32) -> U8:
    g = x.reshape(len(x), 16, 16)
    # The value of largest magnitude of a group gets code -32, so its scale has the other sign.
    at = np.abs(g).argmax(2)
    step = np.take_along_axis(g, at[:, :, None], 2)[:, :, 0] / np.float32(-32)
    d = _half(np.abs(step).max(1) / 127)
    wide = d.astype(np.float32)[:, None]
    scales = np.clip(np.rint(_ratio(step, wide)), -127, 127)
    codes = np.clip(np.rint(_ratio(g, (wide * scales)[:, :, None])), -32, 31) + 32
    q = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = (q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6).reshape(-1, 64)
    return np.concatenate([low, high, scales.astype(np.int8).view(np.uint8), _bytes(d)], 1)
