"""Types of the CPU backend's extension module; one section per native room."""

from __future__ import annotations

from collections.abc import Buffer

import numpy as np
import numpy.typing as npt

# ---- native/quant: block formats. `type` is a GGUF type id (native/types.h).

class Unsupported(RuntimeError):
    """The model asks for what the backend does not implement."""

def dequantize(type: int, data: Buffer) -> npt.NDArray[np.float32]:
    """The elements of a row of whole blocks. Raises Unsupported, ValueError."""

def row_bytes(type: int, cols: int) -> int:
    """Bytes of `cols` elements. Raises ValueError when that is not a whole number of blocks."""

def dtype_name(type: int) -> str: ...
def float_to_half(value: float) -> int: ...
def half_to_float(half: int) -> float: ...
def float_to_bf16(value: float) -> int: ...
