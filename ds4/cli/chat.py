"""One conversation on a local model: the turn loop that the one-shot prompt and the REPL share.

A turn is: render, sync (prefill what the session does not hold yet), then one engine step per token. The session
keeps what was sampled, so the next turn prefills only its new text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ds4._dsml import ContentDelta, Parser, ReasoningDelta
from ds4.engine.drafting import Decoder, DraftPolicy
from ds4.engine.types import EngineLike, Row, SamplerLike, SamplingParams, SessionLike
from ds4.errors import Cancelled, ContextLengthError
from ds4.prompt.types import Conversation, Message, Renderer, Segment


@dataclass(frozen=True, slots=True)
class TurnStats:
    """What one turn did. Seconds are wall time; `prefilled` counts tokens evaluated, without the reused ones."""

    finish: str
    prompt_tokens: int
    reused: int
    prefilled: int
    prefill_seconds: float
    generated: int
    decode_seconds: float
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    draft_timing: bool = False

    def line(self) -> str:
        """`prefill: X t/s, generation: Y t/s`, the closing line of a turn."""
        prefill = self.prefilled / self.prefill_seconds if self.prefill_seconds > 0 else 0.0
        decode = self.generated / self.decode_seconds if self.decode_seconds > 0 else 0.0
        line = f"prefill: {prefill:.2f} t/s, generation: {decode:.2f} t/s"
        if self.draft_timing:
            line += f", drafts: {self.accepted} of {self.drafted} accepted in {1000 * self.draft_seconds:.1f} ms"
        return line


class Output(Protocol):
    """Where a turn's text goes."""

    def reasoning(self, text: str) -> None: ...
    def content(self, text: str) -> None: ...
    def prefill(self, done: int, total: int) -> None: ...


@dataclass
class Chat:
    """A session and the conversation it holds.

    `raw` sends the text as it is: no chat markers, generation goes on from the last byte. `draft_timing`: the closing
    line tells what guessing took and gained.
    """

    engine: EngineLike
    renderer: Renderer
    sampling: SamplingParams
    max_tokens: int = 50_000
    system: str = ""
    effort: str | int = "high"
    raw: bool = False
    draft_timing: bool = False

    def __post_init__(self) -> None:
        self._policy = DraftPolicy(self.engine.most_drafts)
        self.reset()

    def reset(self, ctx: int | None = None) -> None:
        """Forgets the conversation; with `ctx` the new session has that context size."""
        if ctx is not None or not hasattr(self, "session"):
            if hasattr(self, "session"):
                self.session.close()
            self.session: SessionLike = self.engine.new_session(ctx)
        self.session.clear()
        self._started = False

    def _segments(self, text: str) -> tuple[list[Segment], bool]:
        """The new part of the prompt for this turn, and whether generation starts inside reasoning."""
        if self.raw:
            return [text], False
        user = Message("user", text)
        system = (Message("system", self.system),) if self.system else ()
        conversation = Conversation((*system, user), effort=self.effort)
        if self._started:
            rendered = self.renderer.render_tail([user], conversation)
        else:
            rendered = self.renderer.render(conversation)
        return list(rendered.segments), rendered.thinking

    def turn(self, text: str, out: Output, cancelled: Callable[[], bool] = lambda: False) -> TurnStats:
        """Answers `text` on `out`; returns what it cost.

        Raises ContextLengthError before anything changes when the prompt does not fit. Stopped by `cancelled`, the
        session stays valid and the conversation goes on from the part that was said.
        """
        segments, thinking = self._segments(text)
        live = [int(t) for t in self.session.tokens] if self._started else []
        prompt = live + self.engine.tokenizer.encode_segments(segments)
        if not prompt:
            raise ContextLengthError(0, self.session.ctx)
        if len(prompt) >= self.session.ctx:
            raise ContextLengthError(len(prompt), self.session.ctx)

        start = time.perf_counter()
        reused = self.session.common_prefix(prompt[:-1])

        def progress(done: int, total: int) -> None:
            out.prefill(done - reused, total - reused)

        try:
            self.session.sync(prompt[:-1], progress=progress, cancel=cancelled)
        except Cancelled:
            seconds = time.perf_counter() - start
            evaluated = max(0, self.session.n_tokens - reused)
            self._withdraw(live)
            return TurnStats("cancelled", len(prompt), reused, evaluated, seconds, 0, 0.0)
        self._started = True
        sampler = self.engine.new_sampler(self.sampling)
        sampler.observe(prompt, prompt=True)
        first = self.engine.step([Row(self.session, prompt[-1:], sampler=sampler)])[0].token
        prefilled = time.perf_counter()
        out.prefill(len(prompt) - reused, len(prompt) - reused)
        decoder = Decoder(self.engine, self.session, sampler, self._policy)
        finish, generated = self._decode(first, sampler, decoder, thinking, out, cancelled)
        return TurnStats(
            finish,
            len(prompt),
            reused,
            len(prompt) - reused,
            prefilled - start,
            generated,
            time.perf_counter() - prefilled,
            decoder.drafted,
            decoder.accepted,
            decoder.draft_seconds,
            self.draft_timing,
        )

    def _withdraw(self, live: list[int]) -> None:
        """Takes back a turn that was cancelled in its prefill."""
        if not live:
            self.reset()
        elif self.session.can_rewind(len(live)):
            self.session.rewind(len(live))
        else:
            self.session.sync(live)

    def _decode(
        self,
        token: int | None,
        sampler: SamplerLike,
        decoder: Decoder,
        thinking: bool,
        out: Output,
        cancelled: Callable[[], bool],
    ) -> tuple[str, int]:
        tokenizer = self.engine.tokenizer
        parser = Parser("raw" if self.raw else self.renderer.syntax, thinking=thinking, tools=False)
        stops = frozenset(tokenizer.eos_ids)
        finish, generated = "length", 0
        while generated < self.max_tokens:
            if token is None or token < 0:
                finish = "error"
                break
            if token in stops:
                finish = "stop"
                break
            generated += 1
            self._emit(parser.feed(tokenizer.token_bytes(token)), out)
            if cancelled():
                finish = "cancelled"
            if finish == "cancelled" or self.session.n_tokens + 1 >= self.session.ctx:
                # The token was shown, so it belongs to the conversation: evaluate it before stopping.
                self.engine.step([Row(self.session, [token])])
                break
            sampler.force_greedy(parser.greedy)
            token = decoder.after(token, self.max_tokens - generated - 1).token
        self._emit(parser.finish("eos" if finish == "stop" else "length"), out)
        return finish, generated

    @staticmethod
    def _emit(events: Sequence[object], out: Output) -> None:
        for event in events:
            if isinstance(event, ContentDelta):
                out.content(event.text)
            elif isinstance(event, ReasoningDelta):
                out.reasoning(event.text)

    def set_sampling(self, **changes: float | int | None) -> None:
        """Changes sampling parameters for the turns that follow."""
        self.sampling = replace(self.sampling, **changes)  # type: ignore[arg-type]
