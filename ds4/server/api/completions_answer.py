"""What a generation looks like in Completions: one object, or a stream of chunks.

Shapes are those of OpenAI's API reference (completion object). Log-probabilities have the form that this endpoint has
always had: parallel lists, the best tokens as an object, offsets in characters of the choice's text.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ds4._json import dumps, sse_chunk
from ds4.server.api.answer import Collected, TokenBytes
from ds4.server.api.errors import WireError, openai_error
from ds4.server.api.ids import new_id
from ds4.server.api.usage import finite_logprob, openai_usage, total
from ds4.server.sse import COMMENT, DONE
from ds4.server.types import ContentDelta, Event, Finish, SampledToken


@dataclass(frozen=True, slots=True)
class CompletionsStyle:
    """What an answer needs to know of its request. `per_prompt` choices in a row share a prompt."""

    id: str
    model: str
    created: int
    include_usage: bool = False
    timings: bool = False
    logprobs: bool = False
    per_prompt: int = 1


def new_style(model: str, *, include_usage: bool, timings: bool, logprobs: bool, per_prompt: int) -> CompletionsStyle:
    return CompletionsStyle(new_id("cmpl", "-"), model, int(time.time()), include_usage, timings, logprobs, per_prompt)


class Logprobs:
    """The log-probabilities of one choice, in pieces. Offsets go on from piece to piece."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._tokens: list[SampledToken] = []

    def add(self, token: SampledToken) -> None:
        self._tokens.append(token)

    def take(self) -> dict[str, object] | None:
        """The object for the tokens since the last call, None without any."""
        if not self._tokens:
            return None
        offsets: list[int] = []
        for sampled in self._tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(sampled.data))
        taken, self._tokens = self._tokens, []
        return {
            "tokens": [_text(sampled.data) for sampled in taken],
            "token_logprobs": [finite_logprob(sampled.logprobs.logprob) for sampled in taken],
            "top_logprobs": [
                {_text(self._token_bytes(token)): finite_logprob(value) for token, value in sampled.logprobs.top}
                for sampled in taken
            ],
            "text_offset": offsets,
        }


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


class CompletionsAnswer:
    """Implements `ds4.server.api.answer.Answer`."""

    keepalive = COMMENT

    def __init__(self, style: CompletionsStyle, token_bytes: TokenBytes, choices: int = 1) -> None:
        self._style = style
        self._token_bytes = token_bytes
        same = {"id": style.id, "object": "text_completion", "created": style.created, "model": style.model}
        self._envelope = b"data: " + dumps(same)[:-1] + b',"choices":['
        self._logprobs = [Logprobs(token_bytes) for _ in range(choices)] if style.logprobs else None
        self._head = self._envelope + b'{"text":"'
        self._ends = [b'","index":%d,"finish_reason":null}]}\n\n' % choice for choice in range(choices)]

    def begin(self) -> bytes:
        return b""

    def events(self, batch: Sequence[Event], choice: int = 0) -> bytes:
        return b"".join([self._event(event, choice) for event in batch])

    def end(self, finishes: Sequence[Finish]) -> bytes:
        if not (self._style.include_usage or self._style.timings):
            return DONE
        used = openai_usage(total(finishes, self._style.per_prompt), timings=self._style.timings)
        return self._envelope + b'],"usage":' + dumps(used) + b"}\n\n" + DONE

    def error_event(self, error: WireError) -> bytes:
        return b"event: error\ndata: " + openai_error(error) + b"\n"

    def error(self, error: WireError) -> bytes:
        return openai_error(error)

    def whole(self, collected: Sequence[Collected]) -> bytes:
        finishes = [answer.finish for answer in collected]
        body = {
            "id": self._style.id,
            "object": "text_completion",
            "created": self._style.created,
            "model": self._style.model,
            "choices": [self._choice(index, answer) for index, answer in enumerate(collected)],
            "usage": openai_usage(total(finishes, self._style.per_prompt), timings=self._style.timings),
        }
        return dumps(body) + b"\n"

    def _choice(self, index: int, answer: Collected) -> dict[str, object]:
        choice: dict[str, object] = {"text": answer.content, "index": index}
        if self._style.logprobs:
            logprobs = Logprobs(self._token_bytes)
            for token in answer.tokens:
                logprobs.add(token)
            choice["logprobs"] = logprobs.take()
        choice["finish_reason"] = answer.finish.reason
        return choice

    def _event(self, event: Event, choice: int) -> bytes:
        match event:
            case ContentDelta() if self._logprobs is None:
                return sse_chunk(self._head, event.text, self._ends[choice])
            case ContentDelta():
                return self._chunk(event.text, choice, None)
            case SampledToken() if self._logprobs is not None:
                self._logprobs[choice].add(event)
            case Finish():
                return self._chunk("", choice, event.reason)
            case _:
                pass
        return b""

    def _chunk(self, text: str, choice: int, finish_reason: str | None) -> bytes:
        body: dict[str, object] = {"text": text, "index": choice}
        if self._logprobs is not None:
            body["logprobs"] = self._logprobs[choice].take()
        body["finish_reason"] = finish_reason
        return self._envelope + dumps(body) + b"]}\n\n"
