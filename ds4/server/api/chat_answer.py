"""What a generation looks like in Chat Completions: one object, or a stream of chunks.

Shapes are those of OpenAI's API reference (chat completion object, chat completion chunk object), with
`reasoning_content` beside `content` as DeepSeek's API defines it and `cache_write_tokens` in the prompt details. A call
of a custom tool has its input in one piece, when its block is complete: until then it is JSON that may still break.
"""

from __future__ import annotations

from collections.abc import Collection

from ds4._json import dumps
from ds4.server.api.answer import CallFinished, Collected, TokenBytes
from ds4.server.api.choices_answer import ChoicesAnswer, Style
from ds4.server.api.custom_tools import custom_input
from ds4.server.api.ids import new_call_id
from ds4.server.api.usage import finite_logprob
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


class ChatLogprobs:
    """Implements `ds4.server.api.choices_answer.Logprobs`: `{"content": [...], "refusal": null}`."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._content: list[dict[str, object]] = []

    def add(self, token: SampledToken) -> None:
        self._content.append(token_logprobs(token, self._token_bytes))

    def take(self) -> object:
        """None without tokens."""
        if not self._content:
            return None
        content, self._content = self._content, []
        return {"content": content, "refusal": None}


class ChatAnswer(ChoicesAnswer):
    """Implements `ds4.server.api.answer.Answer`. `customs` are the names of custom tools."""

    def __init__(
        self, style: Style, token_bytes: TokenBytes, call_finished: CallFinished, customs: Collection[str] = ()
    ) -> None:
        self._customs = customs
        self._token_bytes = token_bytes
        self._call_finished = call_finished
        super().__init__(style, "chat.completion", "chat.completion.chunk")
        self._deltas = [b'{"index":%d,"delta":' % index for index in range(style.choices)]
        self._content = [self._envelope + delta + b'{"content":"' for delta in self._deltas]
        self._reasoning = [self._envelope + delta + b'{"reasoning_content":"' for delta in self._deltas]
        self._call_ids: list[list[str]] = [[] for _ in self._deltas]
        self._inputs: list[dict[int, list[str]]] = [{} for _ in self._deltas]
        """Pieces of the arguments of each custom tool's call, by its index."""

    def _behind_text(self, choice: int) -> bytes:
        return b'"}'

    def _new_logprobs(self) -> ChatLogprobs:
        return ChatLogprobs(self._token_bytes)

    def begin(self) -> bytes:
        return b"".join([self._delta(choice, {"role": "assistant"}) for choice in range(self._style.choices)])

    def _event(self, event: Event, choice: int) -> bytes:
        match event:
            case ContentDelta():
                return self._chunks[choice].text(self._content[choice], event.text)
            case ReasoningDelta():
                return self._chunks[choice].text(self._reasoning[choice], event.text)
            case ToolCallStart():
                call_id = new_call_id()
                self._call_ids[choice].append(call_id)
                if event.name in self._customs:
                    self._inputs[choice][event.index] = []
                return self._call(choice, {"index": event.index, **self._made(call_id, event.name, "", "")})
            case ToolCallDelta():
                if event.index not in self._inputs[choice]:
                    return self._call(choice, {"index": event.index, "function": {"arguments": event.arguments}})
                self._inputs[choice][event.index].append(event.arguments)
            case ToolCallEnd():
                self._call_finished(self._call_ids[choice][event.index], event.raw)
                if event.index in self._inputs[choice]:
                    text = custom_input("".join(self._inputs[choice][event.index]))
                    return self._call(choice, {"index": event.index, "custom": {"input": text}})
            case SampledToken():
                self._chunks[choice].sampled(event)
            case Finish():
                return self._delta(choice, {}, event.reason)
            case _:
                pass
        return b""

    def _made(self, call_id: str, name: str, arguments: str, text: str) -> dict[str, object]:
        """A call in the form of its tool: a function has `arguments`, a custom tool `text`."""
        if name in self._customs:
            return {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}}
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _call(self, choice: int, call: dict[str, object]) -> bytes:
        return self._delta(choice, {"tool_calls": [call]})

    def _delta(self, choice: int, delta: dict[str, object], finish_reason: str | None = None) -> bytes:
        return self._chunks[choice].members(self._deltas[choice] + dumps(delta), finish_reason)

    def _whole_choice(self, answer: Collected) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            calls = []
            for call in answer.calls:
                call_id = new_call_id()
                self._call_finished(call_id, call.raw)
                calls.append(self._made(call_id, call.name, call.arguments, custom_input(call.arguments)))
            message["tool_calls"] = calls
        return {"message": message}
