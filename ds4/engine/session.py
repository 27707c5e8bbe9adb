"""Session: one timeline of an open model, brought to a prompt by `sync`, advanced by `Engine.step`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ds4 import _cpu
from ds4.engine import payload
from ds4.errors import Cancelled, ContextLengthError, SessionInvalidError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

    import numpy.typing as npt

    from ds4.engine.native import NativeModule
    from ds4.engine.types import CancelCheck, Progress, SessionLike


@dataclass(frozen=True, slots=True)
class ModelHandle:
    """What sessions need of their model. `fingerprint` identifies the weights in saved sessions.

    `module` is the extension module that `native` is a class of.
    """

    native: _cpu.Model
    family: str
    fingerprint: str
    prefill_chunk: int
    module: NativeModule = _cpu


class Session:
    """Tokens, their state, and the logits after the last one; see `ds4.engine.types.SessionLike`.

    After any return, normal or by exception, the state is valid for exactly `tokens`.
    """

    def __init__(self, model: ModelHandle, ctx: int) -> None:
        self._model = model
        self._native: _cpu.Session | None = model.module.Session(model.native, ctx)
        self._ctx = ctx
        self.last_used = time.monotonic()

    @property
    def native(self) -> _cpu.Session:
        """The session as the extension module knows it. Raises SessionInvalidError after `close`."""
        if self._native is None:
            raise SessionInvalidError("the session is closed")
        return self._native

    @property
    def ctx(self) -> int:
        return self._ctx

    @property
    def n_tokens(self) -> int:
        return self.native.n_tokens

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        return self.native.tokens

    @property
    def resident_bytes(self) -> int:
        """Memory that the session holds now; it grows with its tokens."""
        return self.native.resident_bytes

    def common_prefix(self, tokens: Sequence[int] | npt.NDArray[np.int32], beyond: int = 0) -> int:
        return self.native.common_prefix(tokens, beyond)

    def can_rewind(self, n_tokens: int) -> bool:
        return self.native.can_rewind(n_tokens)

    def rewind(self, n_tokens: int) -> None:
        self.native.rewind(n_tokens)

    def clear(self) -> None:
        self.native.clear()

    def fork_from(self, other: SessionLike, n_tokens: int | None = None) -> None:
        """Becomes a copy of `other`, cut to n_tokens. The copy's logits are valid when nothing was cut.

        Raises ValueError (another model, n_tokens out of range), ContextLengthError, SessionInvalidError.
        """
        if not isinstance(other, Session):
            raise ValueError(f"cannot fork from a {type(other).__name__}")
        self.native.fork_from(other.native, other.n_tokens if n_tokens is None else n_tokens)
        self.last_used = time.monotonic()

    def sync(
        self,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        *,
        progress: Progress | None = None,
        cancel: CancelCheck | None = None,
    ) -> int:
        """Brings the session to exactly `tokens`, logits included; returns how many tokens were reused.

        The longest common prefix stays where the family can cut there; the rest is prefilled in chunks that end at
        absolute multiples of the configured chunk, so that resuming and starting over run the same chunks. `progress`
        is called with (tokens done, len(tokens)) after each chunk and `cancel` polled before each.

        Raises ValueError (no tokens, an id outside the vocabulary), ContextLengthError, Cancelled (the finished chunks
        stay), EngineError (the session is cleared).
        """
        native = self.native
        total = len(tokens)
        if total == 0:
            raise ValueError("sync to no tokens: there are no logits before the first token")
        if total > self.ctx:
            raise ContextLengthError(total, self.ctx)
        vocab = self._model.native.vocab
        try:
            ids = np.asarray(tokens, dtype=np.int64)
        except OverflowError:
            raise ValueError(f"a token id is outside the vocabulary of {vocab}") from None
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
        if len(wrong):
            raise ValueError(f"token {ids[wrong[0]]} at index {wrong[0]} is outside the vocabulary of {vocab}")
        if cancel is not None and cancel():
            raise Cancelled("cancelled before the prefill")
        wanted = ids.astype(np.int32)

        reused = native.common_prefix(wanted)
        if reused == total and not (native.n_tokens == total and native.has_logits):
            reused = total - 1  # the last token is evaluated again for its logits
        if reused < native.n_tokens:
            if native.can_rewind(reused):
                native.rewind(reused)
            else:
                native.clear()
                reused = 0
        chunk = self._model.prefill_chunk
        done = reused
        while done < total:
            if done > reused and cancel is not None and cancel():
                raise Cancelled(f"cancelled after {done} of {total} tokens")
            end = min(total, (done // chunk + 1) * chunk)
            self._model.native.step([(native, wanted[done:end], None, end == total)])
            done = end
            self.last_used = time.monotonic()
            if progress is not None:
                progress(done, total)
        return reused

    def logits(self) -> npt.NDArray[np.float32]:
        return self.native.logits()

    @property
    def has_logits(self) -> bool:
        """Whether `logits` has something to return."""
        return self.native.has_logits

    def payload_bytes(self) -> int:
        """Bytes that `save` will write."""
        m = self._model
        return payload.payload_bytes(m.native, self.native, m.family, m.fingerprint)

    def save(self, file: BinaryIO) -> int:
        return payload.write_payload(self._model.native, self.native, self._model.family, self._model.fingerprint, file)

    def load(self, file: BinaryIO) -> None:
        payload.read_payload(self._model.native, self.native, self._model.family, self._model.fingerprint, file)
        self.last_used = time.monotonic()

    def close(self) -> None:
        """Frees the state. The session is unusable afterwards; closing twice is fine."""
        self._native = None
