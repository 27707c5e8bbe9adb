"""What the engine takes and gives: the vocabulary shared by the engine, the scheduler and the programs.

`EngineLike` and `SessionLike` are the whole surface that anything above the engine may use; tests put a scripted
double behind the same surface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import BinaryIO

    import numpy as np
    import numpy.typing as npt

    from ds4.engine.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
"""Called with (done, total) after each durable step; the state is valid for what `done` says."""

CancelCheck = Callable[[], bool]
"""Polled at safe points; True stops the work with `ds4.errors.Cancelled`."""


AUTO_CTX = 32768
"""The longest context that nobody has to ask for, in tokens."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to open a model. `model` None means the demo model (`ds4.engine.demo`). `backend` is one of
    `ds4.engine.native.KINDS`, or "auto": the GPU where there is one.

    `ctx` tokens per session, exactly as asked (D8a), 0: what the model was trained on, at most `AUTO_CTX`; an open
    engine's configuration has the number. `slots` resident sessions, for the memory plan, and `snapshots` that a
    server's may each keep of itself (none in families whose sessions can be cut anywhere). `threads` 0 means one per
    usable core; `isa` caps the instruction set ("auto", "avx512", "avx2", "scalar"). `prefill_chunk` tokens of a prompt
    in one step, 0: 2,048 on a GPU, which reads the experts' weights once for them, 512 elsewhere; an open engine's
    configuration has the number.

    `mtp` drafts with the model's multi-token prediction head, at most `mtp_draft` tokens (1 to 16) for one step, each
    further one only behind a draft whose logit leads the second best by `mtp_margin`. `dspark` drafts with the model's
    block drafter, up to the first token that it is less sure of than `dspark_confidence` (0 to 1). `mtp_model` is a
    file with either, beside the model. `speculate` off: the layers are loaded and kept up to date, nothing is guessed.
    Drafts change the speed, never the tokens.
    """

    model: Path | None = None
    backend: str = "auto"
    ctx: int = 0
    slots: int = 1
    snapshots: int = 4
    threads: int = 0
    prefill_chunk: int = 0
    isa: str = "auto"
    warm_weights: bool = False
    check_memory: bool = True
    kv_qat: bool = True
    mtp: bool = False
    mtp_model: Path | None = None
    mtp_draft: int = 1
    mtp_margin: float = 3.0
    dspark: bool = False
    dspark_confidence: float = 0.8
    speculate: bool = True


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of an open model. `id` is what the API reports; `syntax` names the prompt syntax ("chatml", ...)."""

    id: str
    name: str
    family: str
    syntax: str
    path: Path
    ctx_train: int
    vocab_size: int
    n_layers: int
    n_params: int
    file_bytes: int
    types: dict[str, int] = field(default_factory=dict)
    """Element type name -> bytes in the file."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that a configuration needs. `state_bytes` is one full session; sessions grow into it.

    `snapshots` are how many copies a session may keep of itself, as many as were asked for and fit; one takes
    `snapshot_bytes` beside what it shares with the session.
    """

    weight_bytes: int
    state_bytes: int
    slots: int
    workspace_bytes: int
    available_bytes: int
    on_device: bool = False
    """Whether the bytes are those of a GPU's own memory."""
    snapshots: int = 0
    snapshot_bytes: int = 0

    @property
    def at_start(self) -> int:
        """What is taken before the first token: sessions are empty and cost nothing yet."""
        return self.weight_bytes + self.workspace_bytes

    @property
    def total(self) -> int:
        """What is taken when every session is full."""
        return self.weight_bytes + self.session_bytes * self.slots + self.workspace_bytes

    @property
    def session_bytes(self) -> int:
        """A full session with all its snapshots."""
        return self.state_bytes + self.snapshots * self.snapshot_bytes


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen from logits. Order: logit bias, penalties, temperature, top-k, top-p, min-p, draw.

    `temperature` <= 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 are off; `min_p` is relative to the most
    probable token. `seed` None draws a fresh one. `repetition_penalty` 1 is off and counts prompt and output;
    `presence_penalty` and `frequency_penalty` count output tokens only (OpenAI's definition). `logprobs` None: none;
    n >= 0: the chosen token's log-probability and those of the n best, of the model's own distribution (before
    temperature and truncation, after bias and penalties).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.05
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of a sampled token, and of the most probable ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SamplerLike(Protocol):
    """One sequence's sampler: parameters, RNG state, token counts. Made by `EngineLike.new_sampler`."""

    def force_greedy(self, on: bool) -> None:
        """While on, the next tokens are the argmax whatever the temperature (tool-call structure)."""

    def forbid(self, ids: Sequence[int]) -> None:
        """These ids are never chosen (`ignore_eos`). Replaces the former set."""

    def set_mask(self, mask: npt.NDArray[np.uint32] | None) -> None:
        """Allowed tokens as bits, id i at bit i % 32 of word i // 32 (llguidance's layout); None allows all."""

    def observe(self, ids: Sequence[int], *, prompt: bool) -> None:
        """Counts tokens for the penalties. `EngineLike.step` does it for what it samples."""


class SessionLike(Protocol):
    """One timeline: tokens, their state, the logits after the last one.

    After any return, normal or by exception, the state is valid for exactly `tokens`.
    """

    @property
    def n_tokens(self) -> int: ...
    @property
    def ctx(self) -> int: ...
    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens, [n_tokens] int32."""

    @property
    def last_used(self) -> float:
        """`time.monotonic()` of the last step or sync."""

    def common_prefix(self, tokens: Sequence[int] | npt.NDArray[np.int32], beyond: int = 0) -> int:
        """Length of the equal prefix of `tokens` and the session's tokens.

        With `beyond` it is 0 when it would not be more than that, and mostly found out by one comparison.
        """

    def can_rewind(self, n_tokens: int) -> bool: ...
    def rewind(self, n_tokens: int) -> None:
        """Cuts the session to its first n_tokens. Raises SessionInvalidError (and clears) where it cannot."""

    def clear(self) -> None: ...
    def fork_from(self, other: SessionLike, n_tokens: int | None = None) -> None:
        """Becomes a copy of `other`, cut to n_tokens."""

    def sync(
        self,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        *,
        progress: Progress | None = None,
        cancel: CancelCheck | None = None,
    ) -> int:
        """Brings the session to exactly `tokens`, logits included; returns how many tokens were reused.

        Raises ContextLengthError (len(tokens) > ctx), Cancelled (state = the finished prefix), EngineError.
        """

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits after the last token, [vocab] float32 copy. Raises SessionInvalidError when there are none."""

    def payload_bytes(self) -> int:
        """Bytes that `save` writes."""

    def save(self, file: BinaryIO) -> int:
        """Writes the payload, returns its bytes."""

    def load(self, file: BinaryIO) -> None:
        """Replaces this session by a payload. Raises CheckpointError and leaves the session cleared on failure."""

    def close(self) -> None: ...


@dataclass(slots=True)
class Row:
    """One session's share of a step: its next tokens (one: decode; many: a prefill chunk).

    With a `sampler` the token after the last one is drawn; `want_logits` keeps that position's logits readable by
    `session.logits()` without drawing. `drafts` of a decode row with a sampler: the most tokens to guess, or guesses;
    they are evaluated in the same pass, see `RowResult.ahead`.
    """

    session: SessionLike
    tokens: Sequence[int] | npt.NDArray[np.int32]
    sampler: SamplerLike | None = None
    want_logits: bool = False
    drafts: int | Sequence[int] = 0


class AheadLike(Protocol):
    """What a step evaluated beyond its row's tokens. Valid until the session is used in another way."""

    @property
    def drafted(self) -> int:
        """Tokens that were guessed."""

    @property
    def seconds(self) -> float:
        """What guessing took, for all rows of the step."""

    def after(self, token: int) -> RowResult | None:
        """The draw behind `token`, the last one drawn, when it was guessed: then it is part of the session, and the
        result is that of a step with it, by the sampler as it is now. None when another one was guessed or none: the
        token needs a step."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """`token` is the sampled id (None without a sampler; -1 when nothing may be chosen)."""

    token: int | None
    logprobs: TokenLogprobs | None = None
    ahead: AheadLike | None = None


class Described:
    """What an open model tells of itself: a base of engines."""

    def __init__(self, info: ModelInfo, config: EngineConfig, plan: MemoryPlan) -> None:
        self._info = info
        self._config = config
        self._plan = plan

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def config(self) -> EngineConfig:
        """What it was opened with, the context resolved."""
        return self._config

    @property
    def plan(self) -> MemoryPlan:
        """The plan it was opened with; weights as the backend really holds them."""
        return self._plan


class EngineLike(Protocol):
    """An open model that computes steps. One thread at a time may call `step`."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def plan(self) -> MemoryPlan: ...
    @property
    def backend_name(self) -> str:
        """The backend with its instruction set and threads, for people."""

    @property
    def fingerprint(self) -> str:
        """Identifies the weights: saved sessions of other weights are of no use."""

    @property
    def most_drafts(self) -> int:
        """Tokens that the engine can guess for one step; 0: it has nothing to guess with."""

    @property
    def memory_left(self) -> int | None:
        """Bytes that sessions may still take. None: nobody knows; what does not fit fails."""

    def new_session(self, ctx: int | None = None) -> SessionLike: ...
    def new_sampler(self, params: SamplingParams) -> SamplerLike: ...
    def step(self, rows: Sequence[Row], *, wake: int | None = None) -> list[RowResult]:
        """Runs one forward pass over all rows and samples where asked; the GIL is released inside.

        Logits of a row do not depend on the other rows, bit for bit. On an engine failure every session of the
        step is cleared and EngineError raised; bad arguments (ValueError, ContextLengthError) change nothing.

        `wake`: a non-blocking file descriptor that eight bytes are written to once the step is under way: when the
        device computes, where that is another one than the processor, else just before. Whoever reads them has the
        interpreter to itself meanwhile. Not written when the step fails before.
        """

    def close(self) -> None: ...
