"""What passes between the event loop and the engine thread: a request going in, events coming out.

`api/*` builds a `GenerationRequest` (all validation is done by then: the prompt is rendered, tokenised and fits the
context). The scheduler turns it into events; `api/*` turns events into its dialect's JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from ds4._dsml import ContentDelta as ContentDelta
from ds4._dsml import ReasoningDelta as ReasoningDelta
from ds4._dsml import ToolCallDelta as ToolCallDelta
from ds4._dsml import ToolCallEnd as ToolCallEnd
from ds4._dsml import ToolCallStart as ToolCallStart
from ds4.engine.constraint import ConstraintLike
from ds4.engine.types import SamplingParams, TokenLogprobs
from ds4.errors import RequestError
from ds4.prompt.types import Message

Dialect = Literal["chat", "completions", "responses", "messages"]

FinishReason = Literal["stop", "length", "tool_calls", "error", "cancelled"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A request that answers the calls of the response `turn`, by tier `kind` of the reuse ladder.

    `tail` is the key of what follows the calls: the end of their turn, the results, the beginning of the next turn.
    `required`: the request holds nothing but results, so that only the live state of that turn can serve it.
    """

    kind: str
    turn: str
    tail: bytes
    required: bool = False

    @property
    def gone(self) -> RequestError:
        """The answer when that state is not live any more."""
        what, where = ("Anthropic", "messages") if self.kind == "anthropic-tool-output" else ("Responses", "input")
        return RequestError(
            f"{what} continuation state is not available; retry by replaying the full {where} history",
            status=409,
            param=where,
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation, dialect-neutral.

    `prompt_tokens` is never longer than the context less one. `max_tokens` is already clamped to what fits (0 means
    evaluate the prompt only). `stop` are byte strings, matched in the raw generated text. `key` is the prompt as cache
    key bytes (decision D2: a special token is 0xFF and its id), empty: nothing may be found by its text.
    """

    id: str
    dialect: Dialect
    model: str
    prompt_tokens: Sequence[int] | npt.NDArray[np.int32]
    key: bytes
    sampling: SamplingParams
    max_tokens: int
    stop: tuple[bytes, ...] = ()
    ignore_eos: bool = False
    syntax: str = "chatml"
    """Dialect of the output parser (`_dsml`)."""
    thinking: bool = False
    """The prompt ends inside an open reasoning block."""
    tools: bool = False
    """Tool calls are looked for in the output."""
    tool_schemas: tuple[tuple[str, str], ...] = ()
    """(name, canonical schema) of the callable tools: types of GLM and Qwen arguments."""
    constraint: ConstraintLike | None = None
    """What the text behind the reasoning must match."""
    echo_text: bytes = b""
    created: float = 0.0
    """`time.monotonic()` when the request's last byte arrived."""
    visible: Callable[[Message], bytes | None] | None = None
    """The key of the conversation up to the end of this answer, as a client renders it that does not send its
    reasoning back; None: it is not known."""
    continues: Continuation | None = None


# ---- events, in the order in which one generation may produce them; deltas and calls are the parser's own ------


@dataclass(frozen=True, slots=True)
class Started:
    """The job has a slot. `cached_tokens` of the prompt need no evaluation (D11)."""

    slot: int
    reuse: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens evaluated so far, of those not cached."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Sent only when log-probabilities were asked for, before the text that the token completes."""

    token: int
    data: bytes
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """The model ended its turn with a tool call that cannot be read.

    `detail` says what is wrong with it, `tokens` are the prompt and the turn as they were evaluated, the last one drawn
    included. `reasoning_open`: the turn ended inside its reasoning.
    """

    detail: str
    tokens: tuple[int, ...]
    reasoning_open: bool


@dataclass(frozen=True, slots=True)
class Finish:
    """The normal end. `stop` is the client's stop string that matched; times are seconds.

    `drafted` tokens were guessed ahead, `accepted` of them were right; `draft_seconds` where that is measured.

    Reason "error": the output is unusable, a tool call was announced but never completed; `error` says why. `broken` is
    there for every call that the model could be asked for once more, announced or not.
    """

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    stop: bytes | None = None
    error: str | None = None
    broken: BrokenCall | None = None
    ttft: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine failed or the server shuts down; nothing follows. `status` is the HTTP status if none was sent."""

    message: str
    status: int = 500
    details: dict[str, object] = field(default_factory=dict)


Event = (
    Started
    | PrefillProgress
    | ReasoningDelta
    | ContentDelta
    | ToolCallStart
    | ToolCallDelta
    | ToolCallEnd
    | SampledToken
    | Finish
    | Failed
)
