"""Values to blocks. Types whose blocks need a search are native/quant's, the plain ones the `gguf` package's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from ds4 import _cpu
from ds4.engine.tensors import DType

SEARCHED = (DType.Q6_K, DType.Q5_K, DType.Q4_K, DType.Q3_K, DType.Q2_K, DType.IQ4_NL, DType.IQ2_XXS)
"""Types that `ds4._cpu.encode` writes, on all cores."""
ENCODABLE = (
    DType.F32,
    DType.F16,
    DType.BF16,
    DType.Q8_0,
    DType.Q5_1,
    DType.Q5_0,
    DType.Q4_1,
    DType.Q4_0,
    DType.MXFP4,
    *SEARCHED,
)
"""Types that `encode` writes."""

_LARGEST_HALF = 65504.0


def encode(values: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[np.uint8]:
    """Rows [n, cols] as blocks, [n, bytes of a row]. Raises ValueError for values that the type cannot hold."""
    if not np.isfinite(values).all():
        raise ValueError("a value is infinite or not a number")
    if dtype is DType.F16 and float(np.abs(values).max(initial=0)) > _LARGEST_HALF:
        raise ValueError(f"the value {float(np.abs(values).max())} is beyond the range of F16")
    values = np.ascontiguousarray(values, np.float32)
    if dtype in SEARCHED:
        return _cpu.encode(int(dtype), values).reshape(len(values), -1)
    blocks = quantize(values, GGMLQuantizationType(int(dtype)))
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(len(values), -1)
