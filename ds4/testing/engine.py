"""An engine that says what a script tells it: real sessions of tokens, no arithmetic, failures on demand."""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from ds4.engine.types import (
    CancelCheck,
    Described,
    EngineConfig,
    MemoryPlan,
    ModelInfo,
    Progress,
    Row,
    RowResult,
    SamplingParams,
    SessionLike,
    TokenLogprobs,
)
from ds4.errors import Cancelled, CheckpointError, ContextLengthError, EngineError, SessionInvalidError
from ds4.testing.script import Model, Script, ScriptLike
from ds4.testing.tokenizer import ScriptedTokenizer

if TYPE_CHECKING:
    from ds4.engine.tokenizer import Tokenizer

_PAYLOAD_MAGIC = b"SCRIPTED"

ScriptSource = ScriptLike | Callable[[str], ScriptLike]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did: per row the session's index, the tokens evaluated and the token drawn (None: no sampler)."""

    rows: tuple[tuple[int, int, int | None], ...]

    @property
    def n_tokens(self) -> int:
        return sum(count for _, count, _ in self.rows)


class ScriptedSampler:
    """Follows one script (or the engine's model); remembers what it was told, for assertions."""

    def __init__(self, engine: ScriptedEngine, params: SamplingParams) -> None:
        self.params = params
        self.greedy = False
        self.greedy_trace: list[bool] = []
        """For each token drawn, whether greedy was forced."""
        self.forbidden: frozenset[int] = frozenset()
        self.mask: npt.NDArray[np.uint32] | None = None
        self.observed_prompt: list[int] = []
        self.observed_output: list[int] = []
        self.script: Script | None = None
        self.drawn = 0
        self._engine = engine

    def force_greedy(self, on: bool) -> None:
        self.greedy = on

    def forbid(self, ids: Sequence[int]) -> None:
        self.forbidden = frozenset(ids)

    def set_mask(self, mask: npt.NDArray[np.uint32] | None) -> None:
        self.mask = mask

    def observe(self, ids: Sequence[int], *, prompt: bool) -> None:
        (self.observed_prompt if prompt else self.observed_output).extend(int(i) for i in ids)

    def begin(self, session: ScriptedSession) -> None:
        """Chooses the script, once, when the prompt is complete."""
        if self.script is None and self._engine.model is None:
            self.script = self._engine.choose_script(session)

    def draw(self, session: ScriptedSession) -> RowResult:
        token = self._next(session)
        self.drawn += 1
        self.greedy_trace.append(self.greedy)
        if token >= 0:
            self.observe((token,), prompt=False)
        if self.params.logprobs is None or token < 0:
            return RowResult(token)
        others = (i for i in range(256) if i != token)
        ranked = [token, *(next(others) for _ in range(self.params.logprobs))]
        top = tuple((i, -0.5 - rank) for rank, i in enumerate(ranked))[: self.params.logprobs]
        return RowResult(token, TokenLogprobs(-0.5, top))

    def _next(self, session: ScriptedSession) -> int:
        if self._engine.model is not None:
            return self._allowed(self._engine.model(session.tokens))
        assert self.script is not None
        pieces = self.script.pieces
        ends: Iterable[int] = self._engine.tokenizer.eos_ids
        eos = next((i for i in ends if i not in self.forbidden), None)
        over = self.drawn >= len(pieces)
        if over and self.script.ends and eos is not None:
            return self._allowed(eos)
        if not pieces:
            return -1
        return self._allowed(self._engine.piece_id(pieces[self.drawn % len(pieces)]))

    def _allowed(self, token: int) -> int:
        """A script has no second choice: a token that may not come leaves none."""
        masked = self.mask is not None and not self.mask[token // 32] >> (token % 32) & 1
        return -1 if masked or token in self.forbidden else token


class ScriptedAhead:
    """Tokens that were guessed; taken in as far as they are what the script says."""

    def __init__(self, session: ScriptedSession, sampler: ScriptedSampler, drafts: list[int], seconds: float) -> None:
        self.drafted = len(drafts)
        self.seconds = seconds
        self._session = session
        self._sampler = sampler
        self._left = drafts

    def after(self, token: int) -> RowResult | None:
        if not self._left or self._left[0] != token:
            self._left = []
            return None
        del self._left[0]
        self._session.append([token])
        return self._sampler.draw(self._session)


class ScriptedSession:
    """A timeline of tokens. `rewinds` False makes it a family whose state cannot be cut (recurrent), or by no more than
    `slack` tokens (rings)."""

    def __init__(self, index: int, ctx: int, *, rewinds: bool, chunk: int, slack: int = 0) -> None:
        self.index = index
        self.closed = False
        self.last_used = time.monotonic()
        self._ctx = ctx
        self._rewinds = rewinds
        self._slack = slack
        self._longest = 0
        self._chunk = chunk
        self._tokens = np.empty(64, np.int32)
        self._n = 0
        self._has_logits = False

    @property
    def n_tokens(self) -> int:
        return self._n

    @property
    def ctx(self) -> int:
        return self._ctx

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        return self._tokens[: self._n].copy()

    def common_prefix(self, tokens: Sequence[int] | npt.NDArray[np.int32], beyond: int = 0) -> int:
        other = np.asarray(tokens, np.int32)[: self._n]
        if beyond >= len(other) or (beyond and self._tokens[beyond] != other[beyond]):
            return 0
        differs = np.flatnonzero(self._tokens[: len(other)] != other)
        same = int(differs[0]) if len(differs) else len(other)
        return same if same > beyond else 0

    def can_rewind(self, n_tokens: int) -> bool:
        if not 0 <= n_tokens <= self._n:
            return False
        return self._rewinds or n_tokens in (0, self._n) or self._longest - self._slack <= n_tokens

    def rewind(self, n_tokens: int) -> None:
        if not self.can_rewind(n_tokens):
            self.clear()
            raise SessionInvalidError(f"session {self.index} cannot go back to {n_tokens} tokens")
        if n_tokens < self._n:
            self._n = n_tokens
            self._has_logits = False

    def clear(self) -> None:
        self._n = self._longest = 0
        self._has_logits = False

    def fork_from(self, other: SessionLike, n_tokens: int | None = None) -> None:
        if not isinstance(other, ScriptedSession):
            raise TypeError(f"Expected `ScriptedSession`, got `{type(other).__name__}`")
        count = other.n_tokens if n_tokens is None else n_tokens
        if not other.can_rewind(count):
            self.clear()
            raise SessionInvalidError(f"session {other.index} cannot be forked at {count} tokens")
        self.clear()
        self.append(other.tokens[:count])
        self._longest = other._longest
        self._has_logits = other._has_logits and count == other.n_tokens

    def append(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> None:
        total = self._n + len(tokens)
        if total > self._ctx:
            raise ContextLengthError(total, self._ctx)
        if total > len(self._tokens):
            grown = np.empty(min(self._ctx, 2 * total), np.int32)
            grown[: self._n] = self._tokens[: self._n]
            self._tokens = grown
        self._tokens[self._n : total] = tokens
        self._n = total
        self._longest = max(self._longest, total)
        self._has_logits = True
        self.last_used = time.monotonic()

    def sync(
        self,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        *,
        progress: Progress | None = None,
        cancel: CancelCheck | None = None,
    ) -> int:
        target = np.asarray(tokens, np.int32)
        if len(target) > self._ctx:
            raise ContextLengthError(len(target), self._ctx)
        common = self.common_prefix(target)
        if common < self._n or (common == len(target) and not self._has_logits):
            common = max(0, min(common, len(target) - 1))
            self.rewind(common) if self.can_rewind(common) else self.clear()
        reused = self._n
        while self._n < len(target):
            if cancel is not None and cancel():
                raise Cancelled(f"stopped at {self._n} of {len(target)} tokens")
            self.append(target[self._n : (self._n // self._chunk + 1) * self._chunk])
            if progress is not None:
                progress(self._n, len(target))
        return reused

    def logits(self) -> npt.NDArray[np.float32]:
        """One-hot of the last token: enough to tell two states apart."""
        if not self._has_logits:
            raise SessionInvalidError(f"session {self.index} has no logits")
        logits = np.zeros(ScriptedTokenizer().vocab_size, np.float32)
        logits[self._tokens[self._n - 1]] = 1.0
        return logits

    def payload_bytes(self) -> int:
        return len(_PAYLOAD_MAGIC) + 9 + 4 * self._n

    def save(self, file: BinaryIO) -> int:
        body = self.tokens.astype("<i4").tobytes()
        return file.write(_PAYLOAD_MAGIC + struct.pack("<q?", self._n, self._has_logits) + body)

    def load(self, file: BinaryIO) -> None:
        self.clear()
        data = file.read()
        head = len(_PAYLOAD_MAGIC) + 9
        if len(data) < head or not data.startswith(_PAYLOAD_MAGIC):
            raise CheckpointError("not a scripted session")
        count, has_logits = struct.unpack_from("<q?", data, len(_PAYLOAD_MAGIC))
        if len(data) != head + 4 * count or count > self._ctx:
            raise CheckpointError(f"{count} tokens announced, {len(data) - head} bytes found, context {self._ctx}")
        self.append(np.frombuffer(data, "<i4", count, head))
        self._has_logits = has_logits

    def close(self) -> None:
        self.closed = True


class ScriptedEngine(Described):
    """`EngineLike` that answers from scripts.

    >>> ScriptedEngine(["Hello", " world"])                    # every request: two tokens, then end of text
    >>> ScriptedEngine(Script.text("a b c"), "second answer")  # in the order in which prompts are complete; the
    ...                                                        # last one answers all further requests
    >>> ScriptedEngine(lambda prompt: "yes" if "?" in prompt else "no")   # chosen by the prompt's text
    >>> ScriptedEngine(model=hash_model(1, end=256))           # next token as a function of all tokens

    `step_seconds` per step and `prefill_token_seconds` per prompt token are slept (by `sleep`), so that a real
    thread sees plausible timing, and what `cost` says of a step of so many prompt tokens and decode rows. `guess`
    makes it an engine that drafts: the tokens that may follow those of a session; a step with drafts takes
    `draft_seconds` more. `rewinds` False: sessions that can only grow, or be cut by no more than `slack` tokens, of
    which the plan has room for `snapshots` copies each. `tokenizer` may be a real one: then whole texts are encoded by
    it, and a list of pieces piece by piece.
    """

    def __init__(
        self,
        *scripts: ScriptSource,
        model: Model | None = None,
        tokenizer: ScriptedTokenizer | Tokenizer | None = None,
        ctx: int = 32768,
        slots: int = 1,
        syntax: str = "chatml",
        model_id: str = "scripted",
        rewinds: bool = True,
        slack: int = 0,
        snapshots: int = 0,
        step_seconds: float = 0.0,
        prefill_token_seconds: float = 0.0,
        cost: Callable[[int, int], float] | None = None,
        draft_seconds: float = 0.0,
        guess: Callable[[list[int]], Sequence[int]] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if model is not None and scripts:
            raise ValueError("give scripts or a model, not both")
        self.model = model
        self.steps: list[StepRecord] = []
        """One record per finished step."""
        self.prompts: list[str] = []
        """The text of each prompt for which a script was chosen, in order."""
        self.samplers: list[ScriptedSampler] = []
        self.sessions: list[ScriptedSession] = []
        self._scripts = list(scripts) or ["Hello world"]
        self._tokenizer: ScriptedTokenizer | Tokenizer = ScriptedTokenizer() if tokenizer is None else tokenizer
        config = EngineConfig(model=Path("scripted"), ctx=ctx, slots=slots, prefill_chunk=2048)
        plan = MemoryPlan(1, 4 * ctx, slots, 0, 1 << 40, snapshots=snapshots, snapshot_bytes=4 * ctx)
        info = ModelInfo(
            id=model_id,
            name=model_id,
            family="scripted",
            syntax=syntax,
            path=Path("scripted"),
            ctx_train=ctx,
            vocab_size=self._tokenizer.vocab_size,
            n_layers=1,
            n_params=1,
            file_bytes=1,
        )
        super().__init__(info, config, plan)
        self._rewinds = rewinds
        self._slack = slack
        self.memory_left: int | None = None
        self._step_seconds = step_seconds
        self._prefill_token_seconds = prefill_token_seconds
        self.cost = cost
        self._draft_seconds = draft_seconds
        self._guess = guess
        self.sleep = sleep
        self._failures: dict[int, Exception] = {}
        self._prefill_failure: Exception | None = None
        self._running = threading.Lock()
        self._open_gate = threading.Event()
        self._open_gate.set()
        self._changed = threading.Condition()
        self._started = 0
        self._closed = False

    # ---- the surface of an engine

    @property
    def tokenizer(self) -> Tokenizer:
        return cast("Tokenizer", self._tokenizer)

    @property
    def backend_name(self) -> str:
        return "scripted"

    @property
    def fingerprint(self) -> str:
        return f"scripted {self._info.id}"

    @property
    def most_drafts(self) -> int:
        return 16 if self._guess is not None else 0

    def new_session(self, ctx: int | None = None) -> ScriptedSession:
        session = ScriptedSession(
            len(self.sessions),
            ctx or self._config.ctx,
            rewinds=self._rewinds,
            chunk=self._config.prefill_chunk,
            slack=self._slack,
        )
        self.sessions.append(session)
        return session

    def new_sampler(self, params: SamplingParams) -> ScriptedSampler:
        sampler = ScriptedSampler(self, params)
        self.samplers.append(sampler)
        return sampler

    def step(self, rows: Sequence[Row], *, wake: int | None = None) -> list[RowResult]:
        if wake is not None:
            with suppress(BlockingIOError):  # full: whoever reads there is awake already
                os.write(wake, (1).to_bytes(8, sys.byteorder))
        if not self._running.acquire(blocking=False):
            raise RuntimeError("two threads in `step` at once")
        try:
            return self._step(rows)
        finally:
            self._running.release()

    def close(self) -> None:
        self._closed = True

    # ---- what a test tells it and asks it

    @property
    def n_steps(self) -> int:
        """Steps entered so far, failed ones included."""
        return self._started

    def fail_at(self, step: int, error: Exception | None = None) -> None:
        """The `step`-th step (1-based, counted from the start of the engine) fails."""
        self._failures[step] = error or EngineError(f"scripted failure in step {step}")

    def fail_in_prefill(self, error: Exception | None = None) -> None:
        """The next step with a row that is a prefill chunk fails."""
        self._prefill_failure = error or EngineError("scripted failure in prefill")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No step begins while inside: requests can pile up and be cancelled at a known place."""
        self._open_gate.clear()
        try:
            yield
        finally:
            self._open_gate.set()

    def wait_for_steps(self, count: int, timeout: float = 30.0) -> None:
        """Blocks until `count` steps were entered in all. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._started >= count, timeout):
                raise TimeoutError(f"{self._started} steps after {timeout} s, expected {count}")

    def choose_script(self, session: ScriptedSession) -> Script:
        prompt = self._tokenizer.decode(session.tokens.tolist()).decode("utf-8", "replace")
        self.prompts.append(prompt)
        source = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        said = source(prompt) if callable(source) else source
        if isinstance(said, (str, bytes)) and not isinstance(self._tokenizer, ScriptedTokenizer):
            text = said if isinstance(said, str) else said.decode()
            return Script(tuple(self._tokenizer.encode(text)))
        return Script.of(said)

    def piece_id(self, piece: bytes | int) -> int:
        if isinstance(piece, int):
            return piece
        if isinstance(self._tokenizer, ScriptedTokenizer):
            return self._tokenizer.piece_id(piece)
        special = self._tokenizer.special_id(piece.decode("utf-8", "replace"))
        ids: list[int] = [special] if special is not None else self._tokenizer.encode(piece.decode())
        if len(ids) != 1:
            raise ValueError(f"piece {piece!r} is {len(ids)} tokens of this tokenizer")
        return ids[0]

    # ---- inside a step

    def _step(self, rows: Sequence[Row]) -> list[RowResult]:
        with self._changed:
            self._started += 1
            self._changed.notify_all()
        self._open_gate.wait()
        sessions = self._check(rows)
        prefill = sum(len(row.tokens) for row in rows if len(row.tokens) > 1)
        error = self._failures.pop(self._started, None)
        if error is None and prefill and self._prefill_failure is not None:
            error, self._prefill_failure = self._prefill_failure, None
        samplers = [cast("ScriptedSampler | None", row.sampler) for row in rows]
        delay = 0.0
        if error is None:
            for row, session, sampler in zip(rows, sessions, samplers, strict=True):
                session.append(row.tokens)
                if sampler is None:
                    continue
                sampler.begin(session)
                if sampler.script is not None:
                    delay = max(delay, sampler.script.delay)
                    if sampler.script.failure == sampler.drawn + 1:
                        error = EngineError(f"scripted failure at token {sampler.script.failure}")
        drafts = [self._drafts(row, session) for row, session in zip(rows, sessions, strict=True)]
        delay += self._draft_seconds if any(drafts) else 0.0
        seconds = self._step_seconds + delay + prefill * self._prefill_token_seconds
        if self.cost is not None:
            seconds += self.cost(prefill, sum(len(row.tokens) == 1 for row in rows))
        if seconds > 0:
            self.sleep(seconds)
        if error is not None:
            for session in sessions:
                session.clear()
            raise error
        results = []
        for session, sampler, guesses in zip(sessions, samplers, drafts, strict=True):
            result = RowResult(None) if sampler is None else sampler.draw(session)
            if sampler is not None and guesses:
                ahead = ScriptedAhead(session, sampler, guesses, self._draft_seconds)
                result = RowResult(result.token, result.logprobs, ahead)
            results.append(result)
        self.steps.append(
            StepRecord(
                tuple(
                    (session.index, len(row.tokens), result.token)
                    for session, row, result in zip(sessions, rows, results, strict=True)
                )
            )
        )
        return results

    def _drafts(self, row: Row, session: ScriptedSession) -> list[int]:
        """What the row tries; its own token is part of the session by now."""
        if not isinstance(row.drafts, int):
            return list(row.drafts)
        return list(self._guess(session.tokens.tolist()))[: row.drafts] if self._guess and row.drafts else []

    def _check(self, rows: Sequence[Row]) -> list[ScriptedSession]:
        """Everything that the real engine refuses before it changes anything."""
        if self._closed:
            raise EngineError("the engine is closed")
        sessions: list[ScriptedSession] = []
        for row in rows:
            session = row.session
            if not isinstance(session, ScriptedSession) or session.closed:
                raise ValueError("a row needs an open session of this engine")
            if any(session is other for other in sessions):
                raise ValueError(f"session {session.index} has two rows in one step")
            if len(row.tokens) == 0:
                raise ValueError(f"session {session.index} has a row without tokens")
            if min(row.tokens) < 0 or max(row.tokens) >= self._info.vocab_size:
                raise ValueError(f"session {session.index} has a token outside 0..{self._info.vocab_size - 1}")
            if row.drafts and (len(row.tokens) != 1 or row.sampler is None):
                raise ValueError(f"session {session.index} has drafts behind something else than one token")
            room = row.drafts if isinstance(row.drafts, int) else len(row.drafts)
            if session.n_tokens + len(row.tokens) + room > session.ctx:
                raise ContextLengthError(session.n_tokens + len(row.tokens) + room, session.ctx)
            sessions.append(session)
        return sessions
