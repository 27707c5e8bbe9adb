"""One request on its way through the engine: prompt position, sampler, stop strings, output parser, usage.

The scheduler decides when a generation gets a row in a step; here is what happens with the row's result. Per token:

    id -> bytes -> stop-string matcher -> output parser -> events
     |                                        |
     +-> constraint: allowed next tokens      +-> greedy or free sampling of the next token

The last token drawn is never evaluated: after the end the session holds the prompt and all output but that token
(and never a stop token), which is what the next turn's prompt begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

from ds4 import _core, _dsml
from ds4.engine.types import Row, RowResult, SamplerLike
from ds4.errors import EngineError
from ds4.server.constrained import Constrained
from ds4.server.kvfile import THINKING_VISIBLE
from ds4.server.naming import Naming
from ds4.server.reuse import Bound, Query, Reuse
from ds4.server.types import (
    BrokenCall,
    ContentDelta,
    Event,
    Failed,
    Finish,
    FinishReason,
    GenerationRequest,
    PrefillProgress,
    SampledToken,
    Started,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ds4.engine.types import EngineLike
    from ds4.server.slots import Slot

Cause = Literal["eos", "length", "stop", "error"]
"""Why decoding ended, in the parser's words."""


class Job:
    """A submitted request. `sink` is whatever the submitter needs to find its consumer again.

    Each job gets exactly one terminal event, `Finish` or `Failed`, whatever becomes of it.
    """

    __slots__ = ("cancelled", "naming", "query", "request", "sink", "submitted")

    def __init__(
        self, request: GenerationRequest, prompt: npt.NDArray[np.int32], submitted: float, sink: object = None
    ) -> None:
        self.request = request
        self.query = Query(prompt, request.key, request.continues)
        self.submitted = submitted
        self.sink = sink
        self.cancelled = False
        self.naming: Naming | None = None
        """What is to be worked out before the end is passed on (`Scheduler.name`)."""

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        return self.query.prompt


class Restoring:
    """A load on its way. `over` is how the generation ends when it is over, None: it goes on."""

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over: Finish | Failed | None = None


class Generation:
    """The running state of one job in one slot. Only the engine thread touches it."""

    __slots__ = (
        "_constrained",
        "_created",
        "_ended",
        "_eos",
        "_evaluated",
        "_first_token",
        "_greedy",
        "_last_token",
        "_matcher",
        "_most",
        "_over",
        "_parser",
        "_reasoning_tokens",
        "_stop",
        "_token_bytes",
        "_tokenizer",
        "accepted",
        "assigned",
        "begun",
        "cold",
        "completion_tokens",
        "draft_seconds",
        "drafted",
        "frontiers",
        "job",
        "last_token_time",
        "next_token",
        "places",
        "position",
        "restoring",
        "reuse",
        "sampler",
        "slot",
        "waited",
    )  # fmt: skip

    def __init__(self, job: Job, slot: Slot, reuse: Reuse, engine: EngineLike, now: float) -> None:
        request = job.request
        tokenizer = engine.tokenizer
        self.job = job
        self.slot = slot
        self.reuse = reuse
        self.position = reuse.tokens
        """Prompt tokens that the session holds."""
        self.begun = False
        self.waited = 0
        """Tokens of a beginning that a neighbour was about to evaluate, for which it has waited a step."""
        self.restoring: Restoring | None = None
        """A checkpoint is being loaded into the session, which nobody else may touch."""
        self.cold = 0
        """Where this prompt is to be stored before anything is generated; 0: nowhere."""
        self.frontiers: list[int] = []
        """Where chunks of the prompt have to end, nearest last."""
        self.places: dict[int, bool] = {}
        """Those of them where a snapshot is taken, and whether a turn begins there."""
        self.next_token: int | None = None
        """The token drawn last, to be evaluated in the next step; None during prefill."""
        self.completion_tokens = 0
        self.drafted = 0
        """Tokens that were guessed, and how many of them were right."""
        self.accepted = 0
        self.draft_seconds = 0.0
        self.assigned = now
        self.last_token_time = now
        self.sampler: SamplerLike = engine.new_sampler(request.sampling)
        if request.ignore_eos:
            self.sampler.forbid(tuple(tokenizer.eos_ids))
        if request.sampling.repetition_penalty != 1.0:
            self.sampler.observe(job.prompt.tolist(), prompt=True)
        self._constrained: Constrained | None = None
        if request.constraint is not None:
            self._constrained = Constrained(
                request.constraint,
                self.sampler,
                thinking=request.thinking,
                eos_ids=tokenizer.eos_ids,
                encode=tokenizer.encode,
            )
        self._eos = frozenset(tokenizer.eos_ids)
        self._tokenizer = tokenizer
        self._token_bytes: Callable[[int], bytes] = tokenizer.token_bytes
        self._matcher = _core.StopMatcher(request.stop) if request.stop else None
        self._parser = _dsml.Parser(
            request.syntax, thinking=request.thinking, tools=request.tools, schemas=request.tool_schemas
        )
        self._greedy = False
        self._created = request.created or job.submitted
        self._evaluated = 0.0
        self._first_token = 0.0
        self._reasoning_tokens = 0
        self._last_token = -1
        self._most = request.max_tokens
        """Tokens at most, known in full when the prompt is evaluated."""
        self._ended = False
        """Decoding came to an end; it was not cancelled."""
        self._over = False
        """Decoding came to an end, and not inside reasoning."""
        self._stop: bytes | None = None

    # ---- prefill

    @property
    def prompt_tokens(self) -> int:
        return len(self.job.prompt)

    @property
    def prefilling(self) -> bool:
        return self.next_token is None

    @property
    def in_tool_call(self) -> bool:
        return self._parser.greedy or self._parser.calls > 0

    def settle(self, reuse: Reuse, query: Query) -> None:
        """The session holds `reuse.tokens` tokens, and `query.prompt` is what it goes on with."""
        self.reuse = reuse
        self.position = reuse.tokens
        self.job.query = query

    def start(self, reuse: Reuse) -> Started:
        """The first chunk is about to be evaluated; `reuse` is final."""
        self.reuse = reuse
        self.position = reuse.tokens
        self.begun = True
        return Started(self.slot.index, reuse.kind, self._asked, self._cached)

    @property
    def _asked(self) -> int:
        """Tokens of the prompt as the client counts them: without hidden state that goes on in its place."""
        return len(self.job.request.prompt_tokens)

    @property
    def _cached(self) -> int:
        return max(0, self._asked - (self.prompt_tokens - self.reuse.tokens))

    def naming(self, end: Finish | Failed) -> Naming | None:
        """By what texts the session can be found. None during prefill, and where prompts have no keys."""
        key, prompt = self.job.query.key, self.prompt_tokens
        live = self.slot.session.n_tokens
        if not key or self.position < prompt or live < prompt:
            return None
        entry = self.reuse.entry
        return Naming(
            request=self.job.request,
            tokenizer=self._tokenizer,
            key=key,
            live=live,
            drawn=tuple(self.slot.session.tokens[prompt:].tolist()),
            last=self._last_token,
            missing=self.completion_tokens - (live - prompt),
            result=self._parser.result if self._ended else None,
            over=self._over,
            shown=isinstance(end, Finish) and self._reasoning_tokens > 0 and self._stop is None,
            left_out=self.reuse.left_out or (entry is not None and bool(entry.flags & THINKING_VISIBLE)),
        )

    def bound(self, end: Finish) -> Bound | None:
        """Whose calls the state ends with: a turn in a dialect that binds results to their calls by ids."""
        request, session = self.job.request, self.slot.session
        if request.dialect not in ("responses", "messages") or end.reason != "tool_calls":
            return None
        missing = self.completion_tokens - (session.n_tokens - self.prompt_tokens)
        if missing not in (0, 1):
            return None
        return Bound(request.id, session.n_tokens, (self._last_token,) * missing)

    def stop_at(self, places: Iterable[int]) -> None:
        """Chunks of the prompt have to end there, too."""
        self.frontiers = sorted({*self.frontiers, *places}, reverse=True)

    def passed(self) -> None:
        """Frontiers that the session has reached are behind it."""
        while self.frontiers and self.frontiers[-1] <= self.slot.session.n_tokens:
            self.frontiers.pop()

    def chunk_end(self, end: int) -> int:
        """`end`, or a place before it where the session has to stop for a checkpoint or a snapshot."""
        return min(end, self.frontiers[-1]) if self.frontiers else end

    def prefill_row(self, end: int) -> Row:
        """The chunk from `position` to `end`; the last one draws the first token, unless none is wanted."""
        last = end == self.prompt_tokens
        wanted = last and self.job.request.max_tokens > 0
        return Row(
            self.slot.session,
            self.job.prompt[self.position : end],
            self.sampler if wanted else None,
            want_logits=last and not wanted,
        )

    def prefilled(self, end: int, result: RowResult, now: float, events: list[Event]) -> bool:
        """Takes the result of a chunk; True when the generation is over."""
        self.position = end
        cached = self.reuse.tokens
        events.append(PrefillProgress(end - cached, self.prompt_tokens - cached))
        if end < self.prompt_tokens:
            return False
        self._evaluated = now
        request = self.job.request
        if request.echo_text:
            events.append(ContentDelta(request.echo_text.decode("utf-8", "replace")))
        if request.max_tokens <= 0:
            self._end("length", now, events)
            return True
        return self.accept(result, now, events)

    # ---- decode

    def decode_row(self, drafts: int = 0) -> Row:
        """The token drawn last, with at most so many guesses of what follows."""
        assert self.next_token is not None
        session = self.slot.session
        if drafts:
            # The step draws one token anyway, and the last one drawn is never evaluated.
            left = self.job.request.max_tokens - self.completion_tokens - 1
            drafts = max(0, min(drafts, left, session.ctx - session.n_tokens - 1))
        return Row(session, (self.next_token,), self.sampler, drafts=drafts)

    def accept_all(
        self, result: RowResult, now: float, events: list[Event], reached: Callable[[], None]
    ) -> tuple[bool, int]:
        """Takes a drawn token and those guessed ahead that turn out right; (the generation is over, tokens taken).

        Each is drawn when the one before it has had its effect on the sampler, so all are those of plain decode.
        `reached` is called after each, when the session holds what it held after that token's own step.
        """
        over, count = self.accept(result, now, events), 1
        reached()
        ahead = result.ahead
        if ahead is None:
            return over, count
        self.drafted += ahead.drafted
        while not over and self.next_token is not None:
            following = ahead.after(self.next_token)
            if following is None:
                break
            self.accepted += 1
            over, count = self.accept(following, now, events), count + 1
            reached()
        return over, count

    def accept(self, result: RowResult, now: float, events: list[Event]) -> bool:
        """Takes a drawn token; True when the generation is over. Raises EngineError when none could be drawn."""
        token = result.token
        if token is None or token < 0:
            raise EngineError("no token can be chosen: all are forbidden or their logits are not numbers")
        if self.completion_tokens == 0:
            self._first_token = now
            # The last one drawn is never evaluated, so one more than the context has room for.
            self._most = min(self._most, self.slot.session.ctx - self.prompt_tokens + 1)
        self.last_token_time = now
        constrained = self._constrained
        if token in self._eos:
            if constrained is not None:
                constrained.end()
            self._end("eos", now, events)
            return True
        data = self._token_bytes(token)
        self._last_token = token
        parser = self._parser
        self.completion_tokens += 1
        if parser.reasoning_open:
            self._reasoning_tokens += 1
        if result.logprobs is not None:
            events.append(SampledToken(token, data, result.logprobs))
        complete = constrained is not None and constrained.accept(token, data)
        matcher = self._matcher
        if matcher is not None:
            data, self._stop = matcher.feed(data)
        if data:
            events += parser.feed(data)
        if self._stop is not None:
            self._end("stop", now, events)
            return True
        if complete or parser.stop_now:
            self._end("eos", now, events)
            return True
        if self.completion_tokens >= self._most:
            self._end("length", now, events)
            return True
        if parser.greedy != self._greedy:
            self._greedy = not self._greedy
            self.sampler.force_greedy(self._greedy)
        self.next_token = token
        return False

    def cancel(self, now: float) -> Finish:
        """The client is gone: what was done until now, as the terminal event."""
        return self._finish("cancelled", now)

    # ---- the end

    def _end(self, cause: Cause, now: float, events: list[Event]) -> None:
        parser = self._parser
        if self._matcher is not None and self._stop is None and not parser.stop_now:
            held = self._matcher.finish()
            if held:
                events += parser.feed(held)
        self._ended = True
        self._over = not parser.reasoning_open
        events += parser.finish(cause)
        result = parser.result
        reason: FinishReason = result.finish
        error = result.error
        if result.void_calls and reason == "stop":
            reason, error = "error", error or "a tool call was cut off"
        broken = self._broken(result.error, result.detail) if cause == "eos" and result.error else None
        events.append(self._finish(reason, now, error if reason == "error" else None, broken))

    def _broken(self, error: str, detail: str | None) -> BrokenCall:
        session = self.slot.session
        tokens: list[int] = session.tokens.tolist()
        if session.n_tokens - self.prompt_tokens < self.completion_tokens:
            tokens.append(self._last_token)
        return BrokenCall(f"{error}: {detail}" if detail else error, tuple(tokens), self._parser.reasoning_open)

    def _finish(
        self, reason: FinishReason, now: float, error: str | None = None, broken: BrokenCall | None = None
    ) -> Finish:
        cached = self._cached
        evaluated = self._evaluated or now
        decoding_since = self._first_token or now
        return Finish(
            reason,
            prompt_tokens=self._asked,
            cached_tokens=cached,
            cache_write_tokens=min(self._asked, max(0, self.position - self.reuse.tokens)),
            completion_tokens=self.completion_tokens,
            reasoning_tokens=self._reasoning_tokens,
            drafted=self.drafted,
            accepted=self.accepted,
            draft_seconds=self.draft_seconds,
            stop=self._stop,
            error=error,
            broken=broken,
            ttft=(self._first_token or evaluated) - self._created,
            prefill_seconds=evaluated - self.assigned,
            decode_seconds=now - decoding_since,
        )
