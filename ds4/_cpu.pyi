"""Types of the CPU backend's extension module, and of `ds4._cuda` (see there); one section per native room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Buffer = bytes | memoryview | npt.NDArray[Any]

# ---- native/quant: block formats. `type` is a GGUF type id (native/types.h).

class Unsupported(RuntimeError):
    """The model asks for what the backend does not implement."""

def dequantize(type: int, data: bytes | memoryview | npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The elements of a row of whole blocks. Raises Unsupported, ValueError."""

def encode(type: int, values: npt.NDArray[np.float32], threads: int = 0) -> npt.NDArray[np.uint8]:
    """Finite values, whole blocks, as the bytes of their blocks; the same on any number of threads (0: all cores).

    Raises ValueError for a scale beyond the range of F16, Unsupported for a type that `can_encode` denies. The GIL is
    released.
    """

def can_encode(type: int) -> bool:
    """Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ2_XXS: the types that need a search."""

def row_bytes(type: int, cols: int) -> int:
    """Bytes of `cols` elements. Raises ValueError when that is not a whole number of blocks."""

def dtype_name(type: int) -> str: ...
def plain_matrix(type: int, rows: int, cols: int, data: Buffer, scales: Buffer) -> tuple[int, bytes]:
    """(type id, bytes) of a plain type that holds exactly the values of a matrix of type F8_E4M3 or F4.

    Raises ValueError for a scale that is not a number, a value beyond F32, and sizes that do not fit.
    """

def float_to_half(value: float) -> int: ...
def half_to_float(half: int) -> float: ...
def float_to_bf16(value: float) -> int: ...

# ---- native/model, native/session: backends, models, sessions, the step

Tokens = Sequence[int] | npt.NDArray[np.int32]
StateSpec = tuple[str, str, int, int, int, int, int]
"""(name, kind, type id, heads, width, ratio, capacity) of one state buffer; kinds as in native/ops.h."""
KeptSpec = tuple[str, str, int, int, int, int, int, bool]
"""The same of a model's buffer, and whether only drafts are made from it. Rings: `capacity` rows are the session's."""

NativeTensor = tuple[memoryview, tuple[int, ...], int] | tuple[memoryview, tuple[int, ...], int, memoryview]
"""(bytes, shape, type id), or with the E8M0 scales of a matrix of type F8_E4M3 or F4 as the fourth item."""

class Backend:
    """A device with its operations: "cpu" (kernels for this machine), in `ds4._cuda` "cuda" (the first GPU), in both
    "reference" (slow scalar oracle).

    `threads` 0 is one per usable core; `isa` caps the instruction set. With `faulty` the backend fails on demand.
    Raises Unsupported.
    """

    def __init__(self, kind: str, *, threads: int = 0, isa: str = "auto", faulty: bool = False) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def free_device_memory(self) -> int | None:
        """Bytes that can still be allocated on the device; None where the backend computes in host memory."""

    def fail_after(self, operations: int) -> None:
        """The operation after so many more fails, once; negative: never. Raises ValueError without `faulty`."""

class Model:
    """A model family on a backend. The tensors' buffers stay exported.

    Raises Unsupported (family, key or tensor not implemented) and ValueError (missing or contradictory); the message
    begins with the key or tensor.
    """

    def __init__(
        self,
        backend: Backend,
        family: str,
        params: Mapping[str, bool | int | float | str | list[Any]],
        tensors: Mapping[str, NativeTensor],
        *,
        kv_type: int = 1,
    ) -> None: ...
    def load(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Hands the weights to the backend; once. Raises Unsupported for a type without a kernel."""

    @property
    def vocab(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def state_specs(self) -> list[KeptSpec]: ...
    @property
    def host_memory(self) -> bool:
        """Whether states are in host memory."""

    def buffer_rows(self, index: int, tokens: int) -> int:
        """Rows of a buffer that a payload of so many tokens holds."""

    def state_bytes(self, tokens: int) -> int: ...
    def workspace_bytes(self, rows: int, wanted: int) -> int: ...
    def hidden_states(self, tokens: Tokens, inputs: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """[layers + 1, T, width]: the residual stream before each layer, and the final norm's output.

        With `inputs` [layers, T, width] each layer starts from its own of those, whatever the layer before gave.
        """

    def step(
        self,
        rows: Sequence[
            tuple[Session, Tokens, Sampler | None, bool] | tuple[Session, Tokens, Sampler | None, bool, Tokens]
        ],
        wake: int = -1,
    ) -> list[tuple[int | None, tuple[float, list[tuple[int, float]]] | None]]:
        """One forward pass over rows (session, tokens, sampler, want_logits, drafts); see `EngineLike.step`.

        Drafts are evaluated behind the tokens and taken in by `Session.advance`; at most `most_ahead`.
        """

    @property
    def drafter(self) -> str | None:
        """What drafts: "mtp", "dspark", or nothing."""

    @property
    def most_ahead(self) -> int:
        """Tokens that one step may evaluate beyond those that a session keeps."""

    @property
    def spare_bytes(self) -> int:
        """What a session holds beside `state_bytes`, for tokens that it may not keep."""

    def draft(self, rows: Sequence[tuple[Session, int, int]]) -> list[list[int]]:
        """Rows (session, token, most): the drafter's guesses of what follows the token. Raises ValueError without a
        drafter, else as `step`."""

    def draft_logits(self, session: Session, token: int, most: int) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Guesses for one session and the logits that each was chosen by, [guesses, vocab]. Raises as `draft`."""

    def all_logits(self, session: Session, tokens: Tokens) -> npt.NDArray[np.float32]:
        """Appends the tokens and returns the logits of each of their positions, [tokens, vocab]. Raises as `step`."""

class Session:
    """One timeline. Raises ValueError, SessionInvalidError and ContextLengthError as `SessionLike` says."""

    def __init__(self, model: Model, ctx: int) -> None: ...
    @property
    def ctx(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def longest(self) -> int:
        """The most tokens that the state has held since it was cleared."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...
    @property
    def has_logits(self) -> bool: ...
    @property
    def resident_bytes(self) -> int: ...
    def logits(self) -> npt.NDArray[np.float32]: ...
    @property
    def n_ahead(self) -> int:
        """Tokens evaluated ahead that may still be taken in."""

    def advance(
        self, token: int, sampler: Sampler
    ) -> tuple[int | None, tuple[float, list[tuple[int, float]]] | None] | None:
        """Takes in `token`, drawn after the last one, and draws the next, as `Model.step` would; None, and what was
        evaluated ahead is forgotten, when it is not the next of those."""

    def common_prefix(self, tokens: Tokens, beyond: int = 0) -> int: ...
    def can_rewind(self, n_tokens: int) -> bool: ...
    def rewind(self, n_tokens: int) -> None: ...
    def clear(self) -> None: ...
    def fork_from(self, other: Session, n_tokens: int) -> None: ...
    def export_rows(self, which: Sequence[tuple[int, int, int]], out: bytearray | memoryview) -> None:
        """Rows [first, first + count) of a buffer for each (index, first, count), one behind the other. Steps of other
        sessions come between."""

    def begin_import(self, tokens: Tokens, longest: int) -> None: ...
    def import_rows(self, which: Sequence[tuple[int, int, int]], data: bytes | memoryview) -> None: ...
    def finish_import(self, logits: npt.NDArray[np.float32] | None) -> None: ...

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

def draw_planned(sampler: Sampler, logits: npt.NDArray[np.float32], capacity: int = 1024) -> int | None:
    """What a backend draws from logits [vocab] by the sampler's plan, as `Sampler.sample` would; -1: nothing.

    None, and nothing has happened, when the sampler draws by itself: for log-probabilities and penalties. `capacity`
    is the room in the first of two lists of candidates, of no effect on the result. Raises ValueError.
    """

def sampler_sums(logits: npt.NDArray[np.float32], temperature: float) -> list[tuple[str, float]]:
    """(variant, sum of the row's weights) for each variant of the vocabulary passes that this CPU can run."""

# ---- native/cpu, native/reference: single operations on numpy arrays (tests, benchmarks)

FileMatrix = tuple[npt.NDArray[np.uint8], int, int, int]
"""(bytes as a file stores them, type id, rows, cols). The bytes must outlive the weight and stay unchanged."""
StateRow = tuple["OpsState", int]
"""(state, position) of one token row."""
F32 = npt.NDArray[np.float32]

def cpu_isas() -> list[str]:
    """Instruction sets that this build has and this machine runs, best first; "scalar" is always the last."""

class OpsWeight:
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...

class OpsState:
    """Buffers of one session. Raises ValueError for rows, sizes and capacities that do not fit."""

    @property
    def capacity(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    def reserve(self, tokens: int) -> None: ...
    def truncate(self, tokens: int) -> None: ...
    def fork_from(self, other: OpsState, tokens: int) -> None: ...
    def export_rows(self, index: int, first: int, count: int, out: npt.NDArray[np.uint8]) -> None: ...
    def import_rows(self, index: int, first: int, count: int, data: npt.NDArray[np.uint8]) -> None: ...

class Ops:
    """The operations of native/ops.h on C-contiguous float32 matrices, written in place.

    Where `times` is given the operation runs that often without the GIL and the shortest run is returned, in seconds.
    Raises ValueError (shapes, ids, positions) and Unsupported (a type without a kernel).
    """

    @property
    def name(self) -> str: ...
    def load(self, parts: Sequence[FileMatrix], use: str = "linear") -> OpsWeight:
        """`use`: "linear", "precise", "swiglu" (gate, up), "embedding" or "tied"."""

    def new_state(self, specs: Sequence[StateSpec], capacity: int) -> OpsState: ...
    def reset_scratch(self) -> None:
        """What the next step does first."""

    def embed(self, table: OpsWeight, ids: Sequence[int], out: F32) -> None: ...
    def rms_norm(self, x: F32, gain: OpsWeight, eps: float, y: F32) -> None: ...
    def linear(
        self,
        w: OpsWeight,
        x: F32,
        y: F32,
        gain: OpsWeight | None = None,
        eps: float = 1e-5,
        bias: OpsWeight | None = None,
        times: int = 1,
    ) -> float: ...
    def linear_add(self, w: OpsWeight, x: F32, y: F32, times: int = 1) -> float: ...
    def linear_swiglu(
        self, w: OpsWeight, x: F32, y: F32, gain: OpsWeight | None = None, eps: float = 1e-5, times: int = 1
    ) -> float: ...
    def rope_table(self, rows: Sequence[StateRow], freq: Sequence[float], out: F32) -> None: ...
    def rope_store(
        self,
        qkv: F32,
        table: F32,
        interleaved: bool,
        rows: Sequence[StateRow],
        k: int,
        v: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        times: int = 1,
    ) -> float: ...
    def attention(
        self,
        q: F32,
        rows: Sequence[StateRow],
        k: int,
        v: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        out: F32,
        times: int = 1,
    ) -> float: ...
    def rope_table_f32(self, rows: Sequence[StateRow], freq: Sequence[float], out: F32) -> None: ...
    def hc_in(self, fn: OpsWeight, base: OpsWeight, scale: OpsWeight, streams: F32, y: F32, mix: F32) -> None: ...
    def select(
        self, q: F32, weight: F32, rows: Sequence[StateRow], index_rows: int, ratio: int, k: int
    ) -> list[npt.NDArray[np.int32] | None]:
        """The k best rows of each token row by the indexer's score, ascending; None where there are at most k."""

    def gather(self, x: F32, index: Sequence[int], out: F32) -> None: ...

def cpu_ops(threads: int = 0, isa: str = "auto") -> Ops:
    """The CPU backend. Raises ValueError (threads, unknown set), Unsupported (a set that this machine lacks)."""

def reference_ops() -> Ops:
    """The scalar oracle."""
