"""What Chat and Completions share: an object with `choices` and `usage`, or a stream of chunks that ends with `[DONE]`.

    data: {id, object, created, model, "choices":[   HEAD text BEHIND [,"logprobs":...],"finish_reason":null}]}
    ------------------- envelope -----------------

A dialect says what stands before and behind the text of a choice, and how it writes log-probabilities. All but the text
is the same for every chunk of a choice, so a token costs one escaped string.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ds4._json import dumps, sse_chunk
from ds4.server.api.answer import Collected
from ds4.server.api.errors import WireError, openai_error
from ds4.server.api.ids import new_id
from ds4.server.api.usage import openai_usage, total
from ds4.server.sse import COMMENT, DONE
from ds4.server.types import Event, Finish, PrefillProgress, SampledToken


@dataclass(frozen=True, slots=True)
class Style:
    """What an answer needs to know of its request: `choices` in all, of which `per_prompt` in a row share a prompt."""

    id: str
    model: str
    created: int
    choices: int
    per_prompt: int
    include_usage: bool
    timings: bool
    logprobs: bool


def new_style(
    prefix: str,
    model: str,
    *,
    choices: int,
    per_prompt: int | None = None,
    include_usage: bool,
    timings: bool,
    logprobs: bool,
) -> Style:
    """A style with a new id; all choices share one prompt unless `per_prompt` says otherwise."""
    shared = choices if per_prompt is None else per_prompt
    return Style(new_id(prefix, "-"), model, int(time.time()), choices, shared, include_usage, timings, logprobs)


class Logprobs(Protocol):
    """A dialect's form of the log-probabilities of one choice, piece by piece."""

    def add(self, token: SampledToken) -> None: ...
    def take(self) -> object:
        """What is said of the tokens since the last call."""


_PLAIN_TAIL = b',"finish_reason":null}]}\n\n'


class Chunks:
    """The chunks of one choice. `behind` closes the string of a text; `logprobs` None: the client wants none."""

    def __init__(self, envelope: bytes, behind: bytes, logprobs: Logprobs | None) -> None:
        self._envelope = envelope
        self._behind = behind
        self._plain_end = behind + _PLAIN_TAIL
        self._logprobs = logprobs

    def sampled(self, token: SampledToken) -> None:
        if self._logprobs is not None:
            self._logprobs.add(token)

    def text(self, head: bytes, text: str) -> bytes:
        """A piece of text behind `head`, which is the envelope and all members up to the string's quote."""
        return sse_chunk(head, text, self._plain_end if self._logprobs is None else self._behind + self._tail(None))

    def members(self, members: bytes, finish_reason: str | None = None) -> bytes:
        """A chunk of these members of the choice."""
        return self._envelope + members + self._tail(finish_reason)

    def _tail(self, finish_reason: str | None) -> bytes:
        """The end of a chunk, with the log-probabilities of the tokens sampled since the last one."""
        logprobs = b"" if self._logprobs is None else b',"logprobs":' + dumps(self._logprobs.take())
        return b'%b,"finish_reason":%b}]}\n\n' % (logprobs, dumps(finish_reason))


class ChoicesAnswer(ABC):
    """Most of `ds4.server.api.answer.Answer`; a dialect adds how it writes a choice, whole and in events."""

    def __init__(self, style: Style, whole_object: str, chunk_object: str) -> None:
        """The values of `object` in a whole answer and in a chunk."""
        self._style = style
        self._progress: PrefillProgress | None = None
        self._object = whole_object
        same = {"id": style.id, "object": chunk_object, "created": style.created, "model": style.model}
        self._envelope = b"data: " + dumps(same)[:-1] + b',"choices":['
        self._chunks = [
            Chunks(self._envelope, self._behind_text(choice), self._new_logprobs() if style.logprobs else None)
            for choice in range(style.choices)
        ]

    @abstractmethod
    def _behind_text(self, choice: int) -> bytes:
        """What closes the text of a choice and its object: from the string's quote to the next member."""

    @abstractmethod
    def _new_logprobs(self) -> Logprobs:
        """The writer of one choice's log-probabilities."""

    @abstractmethod
    def _event(self, event: Event, choice: int) -> bytes:
        """The chunks of an event, or nothing."""

    @abstractmethod
    def _whole_choice(self, answer: Collected) -> dict[str, object]:
        """The members of a whole choice but for its log-probabilities and finish reason."""

    def keepalive(self) -> bytes:
        """A comment; while a prompt is evaluated it says how much, of what was not cached."""
        progress = self._progress
        return COMMENT if progress is None else b": prefill %d/%d\n\n" % (progress.done, progress.total)

    def begin(self) -> bytes:
        return b""

    def events(self, batch: Sequence[Event], choice: int = 0) -> bytes:
        last = batch[-1] if batch else None
        self._progress = last if isinstance(last, PrefillProgress) else None
        return b"".join([self._event(event, choice) for event in batch])

    def end(self, finishes: Sequence[Finish]) -> bytes:
        if not (self._style.include_usage or self._style.timings):
            return DONE
        return self._envelope + b'],"usage":' + dumps(self._usage(finishes)) + b"}\n\n" + DONE

    def error_event(self, error: WireError) -> bytes:
        return b"event: error\ndata: " + openai_error(error) + b"\n"

    def error(self, error: WireError) -> bytes:
        return openai_error(error)

    def whole(self, collected: Sequence[Collected]) -> bytes:
        body = {
            "id": self._style.id,
            "object": self._object,
            "created": self._style.created,
            "model": self._style.model,
            "choices": [self._choice(index, answer) for index, answer in enumerate(collected)],
            "usage": self._usage([answer.finish for answer in collected]),
        }
        return dumps(body) + b"\n"

    def _choice(self, index: int, answer: Collected) -> dict[str, object]:
        choice = {"index": index, **self._whole_choice(answer)}
        if self._style.logprobs:
            logprobs = self._new_logprobs()
            for token in answer.tokens:
                logprobs.add(token)
            choice["logprobs"] = logprobs.take()
        choice["finish_reason"] = answer.finish.reason
        return choice

    def _usage(self, finishes: Sequence[Finish]) -> dict[str, object]:
        return openai_usage(total(finishes, self._style.per_prompt), timings=self._style.timings)
