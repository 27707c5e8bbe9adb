"""Types of the CUDA backend's extension module: those of `ds4._cpu`, which is built from the same sources.

The classes of the two modules are nevertheless different classes: `isinstance` asks the module that computes.
"""

from ds4._cpu import Backend as Backend
from ds4._cpu import Model as Model
from ds4._cpu import Sampler as Sampler
from ds4._cpu import Session as Session
from ds4._cpu import Unsupported as Unsupported
from ds4._cpu import can_encode as can_encode
from ds4._cpu import dequantize as dequantize
from ds4._cpu import dtype_name as dtype_name
from ds4._cpu import encode as encode
from ds4._cpu import float_to_bf16 as float_to_bf16
from ds4._cpu import float_to_half as float_to_half
from ds4._cpu import half_to_float as half_to_float
from ds4._cpu import plain_matrix as plain_matrix
from ds4._cpu import row_bytes as row_bytes
from ds4._cpu import sampler_sums as sampler_sums
from ds4._cpu import sampler_uniform as sampler_uniform

def devices() -> tuple[list[tuple[str, int, str]], str]:
    """([(name, bytes, why it cannot be used or "")], why there are none). Raises nothing without a driver."""

def runtime_versions() -> tuple[str, str]:
    """The newest CUDA that the driver speaks ("" without a driver) and the one of this build: ("13.0", "13.0")."""
