"""What a generation looks like in Chat Completions: one object, or a stream of chunks.

Shapes are those of OpenAI's API reference (chat completion object, chat completion chunk object), with
`reasoning_content` beside `content` as DeepSeek's API defines it and `cache_write_tokens` in the prompt details.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds4._json import dumps, sse_chunk
from ds4.server.api.answer import Collected
from ds4.server.api.errors import WireError, openai_error
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

_LOWEST = -9999.0
"""JSON has no infinity: the log-probability of what cannot happen, as OpenAI writes it."""

TokenBytes = Callable[[int], bytes]
CallFinished = Callable[[str, bytes], None]
"""Told the id that the client gets for a call, and the exact block that the call was sampled in."""


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
    return ChatStyle(f"chatcmpl-{secrets.token_hex(12)}", model, int(time.time()), include_usage, timings, logprobs)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(16)}"


def usage(finish: Finish, *, timings: bool) -> dict[str, object]:
    """OpenAI's usage object. `cached_tokens` were not evaluated again, `cache_write_tokens` were stored by us."""
    used: dict[str, object] = {
        "prompt_tokens": finish.prompt_tokens,
        "completion_tokens": finish.completion_tokens,
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": finish.cached_tokens,
            "cache_write_tokens": finish.cache_write_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": finish.reasoning_tokens},
    }
    if timings:
        used["timings"] = timing_numbers(finish)
    return used


def timing_numbers(finish: Finish) -> dict[str, object]:
    """Milliseconds and tokens per second, under llama.cpp's names."""
    evaluated = finish.prompt_tokens - finish.cached_tokens
    return {
        "cache_n": finish.cached_tokens,
        "prompt_n": evaluated,
        "prompt_ms": round(finish.prefill_seconds * 1e3, 3),
        "prompt_per_second": _rate(evaluated, finish.prefill_seconds),
        "predicted_n": finish.completion_tokens,
        "predicted_ms": round(finish.decode_seconds * 1e3, 3),
        # The first token comes out of the prefill; the decode time is that of the others.
        "predicted_per_second": _rate(max(0, finish.completion_tokens - 1), finish.decode_seconds),
        "ttft_ms": round(finish.ttft * 1e3, 3),
    }


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0


def token_logprobs(sampled: SampledToken, token_bytes: TokenBytes) -> dict[str, object]:
    """One element of `logprobs.content`."""

    def entry(data: bytes, logprob: float) -> dict[str, object]:
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": logprob if logprob > _LOWEST else _LOWEST,
            "bytes": list(data),
        }

    chosen = entry(sampled.data, sampled.logprobs.logprob)
    chosen["top_logprobs"] = [entry(token_bytes(token), logprob) for token, logprob in sampled.logprobs.top]
    return chosen


class ChatAnswer:
    """Implements `ds4.server.api.answer.Answer`.

    A chunk is a head that is the same for the whole stream, the delta, and a tail: what changes per token is one
    string.
    """

    keepalive = COMMENT

    def __init__(self, style: ChatStyle, token_bytes: TokenBytes, call_finished: CallFinished) -> None:
        self._style = style
        self._token_bytes = token_bytes
        self._call_finished = call_finished
        self._call_ids: list[str] = []
        self._pending: list[dict[str, object]] = []
        same = {"id": style.id, "object": "chat.completion.chunk", "created": style.created, "model": style.model}
        self._envelope = b"data: " + dumps(same)[:-1] + b',"choices":['
        self._delta = self._envelope + b'{"index":0,"delta":'
        self._content = self._delta + b'{"content":"'
        self._reasoning = self._delta + b'{"reasoning_content":"'
        self._plain_end = b'"}' + self._tail()

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant"})

    def events(self, batch: Sequence[Event]) -> bytes:
        return b"".join([self._event(event) for event in batch])

    def error_event(self, error: WireError) -> bytes:
        return b"event: error\ndata: " + openai_error(error) + b"\n"

    def error(self, error: WireError) -> bytes:
        return openai_error(error)

    def whole(self, collected: Collected) -> bytes:
        message: dict[str, object] = {"role": "assistant", "content": collected.content}
        if collected.reasoning:
            message["reasoning_content"] = collected.reasoning
        if collected.calls:
            calls = []
            for call in collected.calls:
                call_id = new_call_id()
                self._call_finished(call_id, call.raw)
                function = {"name": call.name, "arguments": call.arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            message["tool_calls"] = calls
        choice: dict[str, object] = {"index": 0, "message": message}
        if self._style.logprobs:
            content = [token_logprobs(sampled, self._token_bytes) for sampled in collected.tokens]
            choice["logprobs"] = {"content": content, "refusal": None}
        choice["finish_reason"] = collected.finish.reason
        body = {
            "id": self._style.id,
            "object": "chat.completion",
            "created": self._style.created,
            "model": self._style.model,
            "choices": [choice],
            "usage": usage(collected.finish, timings=self._style.timings),
        }
        return dumps(body) + b"\n"

    def _event(self, event: Event) -> bytes:
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
            case SampledToken():
                self._pending.append(token_logprobs(event, self._token_bytes))
            case Finish():
                return self._finish(event)
            case _:
                pass
        return b""

    def _chunk(self, delta: dict[str, object]) -> bytes:
        return self._delta + dumps(delta) + self._tail()

    def _call(self, call: dict[str, object]) -> bytes:
        return self._chunk({"tool_calls": [call]})

    def _text_end(self) -> bytes:
        return b'"}' + self._tail() if self._style.logprobs else self._plain_end

    def _tail(self, finish_reason: str | None = None) -> bytes:
        """The end of a chunk, with the log-probabilities of the tokens sampled since the last one."""
        logprobs = b""
        if self._style.logprobs:
            content = {"content": self._pending, "refusal": None} if self._pending else None
            logprobs = b',"logprobs":' + dumps(content)
            self._pending = []
        return b'%b,"finish_reason":%b}]}\n\n' % (logprobs, dumps(finish_reason))

    def _finish(self, finish: Finish) -> bytes:
        last = self._delta + b"{}" + self._tail(finish.reason)
        if not (self._style.include_usage or self._style.timings):
            return last + DONE
        used = dumps(usage(finish, timings=self._style.timings))
        return last + self._envelope + b'],"usage":' + used + b"}\n\n" + DONE
