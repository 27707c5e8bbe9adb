"""Element types of model files, and tensors as views into a mapped file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import prod


class DType(IntEnum):
    """Element types by GGUF's type ids (as in native/types.h); types that GGUF does not know start at 1000."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    U8 = 1000
    U16 = 1001
    U32 = 1002
    U64 = 1003
    BOOL = 1004
    F8_E4M3 = 1005
    F8_E5M2 = 1006
    F8_E8M0 = 1007
    F4 = 1008

    @property
    def block_elements(self) -> int:
        """Elements per block; a row is whole blocks."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        return _BLOCKS[self][1]


_BLOCKS: dict[DType, tuple[int, int]] = {
    DType.F32: (1, 4),
    DType.F16: (1, 2),
    DType.Q4_0: (32, 18),
    DType.Q4_1: (32, 20),
    DType.Q5_0: (32, 22),
    DType.Q5_1: (32, 24),
    DType.Q8_0: (32, 34),
    DType.Q8_1: (32, 36),
    DType.Q2_K: (256, 84),
    DType.Q3_K: (256, 110),
    DType.Q4_K: (256, 144),
    DType.Q5_K: (256, 176),
    DType.Q6_K: (256, 210),
    DType.Q8_K: (256, 292),
    DType.IQ2_XXS: (256, 66),
    DType.IQ2_XS: (256, 74),
    DType.IQ3_XXS: (256, 98),
    DType.IQ1_S: (256, 50),
    DType.IQ4_NL: (32, 18),
    DType.IQ3_S: (256, 110),
    DType.IQ2_S: (256, 82),
    DType.IQ4_XS: (256, 136),
    DType.I8: (1, 1),
    DType.I16: (1, 2),
    DType.I32: (1, 4),
    DType.I64: (1, 8),
    DType.F64: (1, 8),
    DType.IQ1_M: (256, 56),
    DType.BF16: (1, 2),
    DType.TQ1_0: (256, 54),
    DType.TQ2_0: (256, 66),
    DType.MXFP4: (32, 17),
    DType.NVFP4: (64, 36),
    DType.U8: (1, 1),
    DType.U16: (1, 2),
    DType.U32: (1, 4),
    DType.U64: (1, 8),
    DType.BOOL: (1, 1),
    DType.F8_E4M3: (1, 1),
    DType.F8_E5M2: (1, 1),
    DType.F8_E8M0: (1, 1),
    DType.F4: (2, 1),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a mapped file: not copied, read-only.

    `shape` is row-major, outermost axis first (the reverse of GGUF's order); the last axis is contiguous. `data` holds
    exactly the tensor's bytes and keeps the mapping alive. `scales` are E8M0 bytes that belong to the codes of a matrix
    of type F8_E4M3 (one per tile of 128 x 128) or F4 (one per 32 columns), row-major.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    data: memoryview
    scales: memoryview | None = None

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file, scales included."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def exact_nbytes(self) -> int:
        """Bytes of the smallest plain type that holds the values exactly (quant/scaled.h), but for rare scales."""
        return 2 * self.data.nbytes if self.dtype is DType.F8_E4M3 else self.nbytes
