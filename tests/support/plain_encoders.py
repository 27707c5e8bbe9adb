"""What a plain encoder makes of values: the grid that spans each group's range, no search. Block formats: GGUF."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds4.engine.tensors import DType

F32 = npt.NDArray[np.float32]
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def plain(values: F32, dtype: DType) -> F32:
    """The values that come back, in the shape of `values`."""
    if dtype is DType.IQ4_NL:
        return _iq4_nl(values.reshape(-1, 32)).reshape(values.shape)
    x = values.reshape(-1, 256)
    if dtype in (DType.Q3_K, DType.Q6_K):
        return _signed(x, *((4, 32) if dtype is DType.Q3_K else (32, 128))).reshape(values.shape)
    groups, codes, scales = {DType.Q2_K: (16, 3, 15), DType.Q4_K: (8, 15, 63), DType.Q5_K: (8, 31, 63)}[dtype]
    return _with_minimums(x, groups, codes, scales).reshape(values.shape)


def _half(values: F32) -> F32:
    return values.astype(np.float16).astype(np.float32)


def _ratio(a: F32, b: F32) -> F32:
    """a / b, 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def _with_minimums(x: F32, groups: int, codes: int, scales: int) -> F32:
    g = x.reshape(len(x), groups, -1)
    low = np.minimum(g.min(2), 0)
    step = (np.maximum(g.max(2), 0) - low) / np.float32(codes)
    d, dmin = _half(step.max(1) / scales)[:, None], _half(-low.min(1) / scales)[:, None]
    scale = d * np.clip(np.rint(_ratio(step, d)), 0, scales)
    minimum = dmin * np.clip(np.rint(_ratio(-low, dmin)), 0, scales)
    code = np.clip(np.rint(_ratio(g + minimum[:, :, None], scale[:, :, None])), 0, codes)
    return code * scale[:, :, None] - minimum[:, :, None]


def _top(g: F32) -> F32:
    """The value of largest magnitude of each group."""
    at = np.abs(g).argmax(-1)
    return np.take_along_axis(g, at[..., None], -1)[..., 0]


def _signed(x: F32, down: int, scales: int) -> F32:
    g = x.reshape(len(x), 16, 16)
    step = _top(g) / np.float32(-down)
    d = _half(_top(step) / np.float32(-scales))[:, None]
    scale = (d * np.clip(np.rint(_ratio(step, d)), -scales, scales - 1))[:, :, None]
    return np.clip(np.rint(_ratio(g, scale)), -down, down - 1) * scale


def _iq4_nl(x: F32) -> F32:
    scale = _half(_top(x) / IQ4[0])[:, None]
    code = np.abs(_ratio(x, scale)[:, :, None] - IQ4).argmin(2)
    return IQ4[code] * scale
