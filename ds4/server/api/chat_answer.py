"""What a generation looks like in Chat Completions: one object, or a stream of chunks.

Shapes are those of OpenAI's API reference (chat completion object, chat completion chunk object), with
`reasoning_content` beside `content` as DeepSeek's API defines it and `cache_write_tokens` in the prompt details.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ds4._json import dumps, sse_chunk
from ds4.server.api.answer import CallFinished, Collected, TokenBytes
from ds4.server.api.errors import WireError, openai_error
from ds4.server.api.ids import new_call_id, new_id
from ds4.server.api.usage import finite_logprob, openai_usage, total
from ds4.server.sse import COMMENT, DONE
from ds4.server.types import (
    ContentDelta,
    Event,
    Finish,
    ReasoningDelta,
    SampledToken,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """What an answer needs to know of its request."""

    id: str
    model: str
    created: int
    include_usage: bool = False
    timings: bool = False
    logprobs: bool = False


def new_style(model: str, *, include_usage: bool, timings: bool, logprobs: bool) -> ChatStyle:
    return ChatStyle(new_id("chatcmpl", "-"), model, int(time.time()), include_usage, timings, logprobs)


def token_logprobs(sampled: SampledToken, token_bytes: TokenBytes) -> dict[str, object]:
    """One element of `logprobs.content`."""

    def entry(data: bytes, logprob: float) -> dict[str, object]:
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": finite_logprob(logprob),
            "bytes": list(data),
        }

    chosen = entry(sampled.data, sampled.logprobs.logprob)
    chosen["top_logprobs"] = [entry(token_bytes(token), logprob) for token, logprob in sampled.logprobs.top]
    return chosen


class ChatAnswer:
    """Implements `ds4.server.api.answer.Answer`."""

    keepalive = COMMENT

    def __init__(
        self, style: ChatStyle, token_bytes: TokenBytes, call_finished: CallFinished, choices: int = 1
    ) -> None:
        self._style = style
        self._token_bytes = token_bytes
        self._call_finished = call_finished
        same = {"id": style.id, "object": "chat.completion.chunk", "created": style.created, "model": style.model}
        self._envelope = b"data: " + dumps(same)[:-1] + b',"choices":['
        self._choices = [
            _ChoiceStream(self._envelope, index, token_bytes if style.logprobs else None, call_finished)
            for index in range(choices)
        ]

    def begin(self) -> bytes:
        return b"".join([choice.chunk({"role": "assistant"}) for choice in self._choices])

    def events(self, batch: Sequence[Event], choice: int = 0) -> bytes:
        return b"".join([self._choices[choice].event(event) for event in batch])

    def end(self, finishes: Sequence[Finish]) -> bytes:
        if not (self._style.include_usage or self._style.timings):
            return DONE
        used = openai_usage(total(finishes, len(finishes)), timings=self._style.timings)
        return self._envelope + b'],"usage":' + dumps(used) + b"}\n\n" + DONE

    def error_event(self, error: WireError) -> bytes:
        return b"event: error\ndata: " + openai_error(error) + b"\n"

    def error(self, error: WireError) -> bytes:
        return openai_error(error)

    def whole(self, collected: Sequence[Collected]) -> bytes:
        finishes = [answer.finish for answer in collected]
        body = {
            "id": self._style.id,
            "object": "chat.completion",
            "created": self._style.created,
            "model": self._style.model,
            "choices": [self._choice(index, answer) for index, answer in enumerate(collected)],
            "usage": openai_usage(total(finishes, len(finishes)), timings=self._style.timings),
        }
        return dumps(body) + b"\n"

    def _choice(self, index: int, answer: Collected) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            calls = []
            for call in answer.calls:
                call_id = new_call_id()
                self._call_finished(call_id, call.raw)
                function = {"name": call.name, "arguments": call.arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            message["tool_calls"] = calls
        choice: dict[str, object] = {"index": index, "message": message}
        if self._style.logprobs:
            content = [token_logprobs(sampled, self._token_bytes) for sampled in answer.tokens]
            choice["logprobs"] = {"content": content, "refusal": None}
        choice["finish_reason"] = answer.finish.reason
        return choice


class _ChoiceStream:
    """The chunks of one choice: a head that is the same for the whole stream, the delta, and a tail.

    What changes per token is one string. `token_bytes` None: no log-probabilities are wanted.
    """

    def __init__(
        self, envelope: bytes, index: int, token_bytes: TokenBytes | None, call_finished: CallFinished
    ) -> None:
        self._token_bytes = token_bytes
        self._call_finished = call_finished
        self._call_ids: list[str] = []
        self._pending: list[dict[str, object]] = []
        self._delta = envelope + b'{"index":%d,"delta":' % index
        self._content = self._delta + b'{"content":"'
        self._reasoning = self._delta + b'{"reasoning_content":"'
        self._plain_end = b'"}' + self._tail()

    def event(self, event: Event) -> bytes:
        match event:
            case ContentDelta():
                return sse_chunk(self._content, event.text, self._text_end())
            case ReasoningDelta():
                return sse_chunk(self._reasoning, event.text, self._text_end())
            case ToolCallStart():
                self._call_ids.append(new_call_id())
                return self._call(
                    {
                        "index": event.index,
                        "id": self._call_ids[event.index],
                        "type": "function",
                        "function": {"name": event.name, "arguments": ""},
                    }
                )
            case ToolCallDelta():
                return self._call({"index": event.index, "function": {"arguments": event.arguments}})
            case ToolCallEnd():
                self._call_finished(self._call_ids[event.index], event.raw)
            case SampledToken() if self._token_bytes is not None:
                self._pending.append(token_logprobs(event, self._token_bytes))
            case Finish():
                return self._delta + b"{}" + self._tail(event.reason)
            case _:
                pass
        return b""

    def chunk(self, delta: dict[str, object]) -> bytes:
        return self._delta + dumps(delta) + self._tail()

    def _call(self, call: dict[str, object]) -> bytes:
        return self.chunk({"tool_calls": [call]})

    def _text_end(self) -> bytes:
        return self._plain_end if self._token_bytes is None else b'"}' + self._tail()

    def _tail(self, finish_reason: str | None = None) -> bytes:
        """The end of a chunk, with the log-probabilities of the tokens sampled since the last one."""
        logprobs = b""
        if self._token_bytes is not None:
            content = {"content": self._pending, "refusal": None} if self._pending else None
            logprobs = b',"logprobs":' + dumps(content)
            self._pending = []
        return b'%b,"finish_reason":%b}]}\n\n' % (logprobs, dumps(finish_reason))
