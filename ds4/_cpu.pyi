"""Types of the CPU backend's extension module; one section per native room."""

from __future__ import annotations

from collections.abc import Buffer, Sequence

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

# ---- native/session/sampler

class Sampler:
    """One sequence's sampler. Every method raises ValueError for an id outside the vocabulary."""

    def __init__(
        self,
        *,
        vocab: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        presence_penalty: float,
        frequency_penalty: float,
        repetition_penalty: float,
        logit_bias: Sequence[tuple[int, float]],
        logprobs: int | None,
    ) -> None: ...
    @property
    def vocab(self) -> int: ...
    @property
    def seed(self) -> int: ...
    def force_greedy(self, on: bool) -> None: ...
    def forbid(self, ids: Sequence[int]) -> None: ...
    def set_mask(self, mask: npt.NDArray[np.uint32] | None) -> None: ...
    def observe(self, ids: Sequence[int] | npt.NDArray[np.int32], *, prompt: bool) -> None: ...
    def sample(self, logits: npt.NDArray[np.float32]) -> tuple[int, tuple[float, list[tuple[int, float]]] | None]:
        """(token or -1, None or (logprob, best tokens)) after `logits` [vocab]; counts the token as output."""

def sampler_uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of token `index` of a sequence."""

def sampler_sums(logits: npt.NDArray[np.float32], temperature: float) -> list[tuple[str, float]]:
    """(variant, sum of the row's weights) for each variant of the vocabulary passes that this CPU can run."""
