"""What a generation looks like in Messages: one message of blocks, or a stream of events.

Shapes are those of Anthropic's API reference (message object, streaming messages). One block is open at a time:

    message_start   content_block_start  content_block_delta*  content_block_stop   ...   message_delta  message_stop

`message_start` carries the usage, so it waits for the job's slot, which says what is cached; a client whose job waits
longer than a keep-alive's interval gets it before, with the whole prompt as not cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ds4._json import dumps, parse, sse_chunk
from ds4.prompt.types import Message, ToolCall
from ds4.server.api.answer import CallFinished, Collected, TurnFinished
from ds4.server.api.errors import WireError, anthropic_error, anthropic_object
from ds4.server.api.ids import new_call_id
from ds4.server.api.usage import messages_usage, timing_numbers
from ds4.server.sse import frame
from ds4.server.types import (
    ContentDelta,
    Event,
    Finish,
    ReasoningDelta,
    Started,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

PING = frame(b'{"type":"ping"}', "ping")

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Kind = Literal["text", "thinking", "tool_use"]


class MessagesAnswer:
    """Implements `ds4.server.api.answer.Answer`. `prompt_tokens` is the size of the whole prompt."""

    def __init__(
        self,
        id: str,
        model: str,
        prompt_tokens: int,
        timings: bool,
        call_finished: CallFinished,
        finished: TurnFinished,
    ) -> None:
        self._id = id
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._timings = timings
        self._call_finished = call_finished
        self._finished = finished
        self._started = False
        self._open: Kind | None = None
        self._index = -1
        self._answered = False
        """There is a block that is not thinking."""
        self._delta = b""
        self._delta_end = b'"}}\n\n'
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        """Id, name and pieces of the arguments."""
        self._complete = 0

    # ---- streams

    def keepalive(self) -> bytes:
        return PING if self._started else self._start(0)

    def begin(self) -> bytes:
        return b""

    def events(self, batch: Sequence[Event], choice: int = 0) -> bytes:
        return b"".join([self._event(event) for event in batch])

    def end(self, finishes: Sequence[Finish]) -> bytes:
        return b""

    def error_event(self, error: WireError) -> bytes:
        return _event("error", anthropic_object(error))

    def _event(self, event: Event) -> bytes:
        match event:
            case ContentDelta():
                self._text.append(event.text)
                return self._ensure("text") + sse_chunk(self._delta, event.text, self._delta_end)
            case ReasoningDelta():
                self._reasoning.append(event.text)
                return self._ensure("thinking") + sse_chunk(self._delta, event.text, self._delta_end)
            case ToolCallDelta():
                self._calls[event.index][2].append(event.arguments)
                return sse_chunk(self._delta, event.arguments, self._delta_end)
            case ToolCallStart():
                call_id = new_call_id("toolu")
                self._calls.append((call_id, event.name, []))
                block: dict[str, object] = {"type": "tool_use", "id": call_id, "name": event.name, "input": {}}
                return self._close() + self._block("tool_use", block, "input_json_delta", "partial_json")
            case ToolCallEnd():
                self._complete += 1
                # The block stays open until the next one, or the end: the ends of all calls come together.
                self._call_finished(self._calls[event.index][0], event.raw)
                return b""
            case Started():
                return b"" if self._started else self._start(event.cached_tokens)
            case Finish():
                return self._finish(event)
            case _:
                return b""

    def _start(self, cached: int) -> bytes:
        self._started = True
        used = messages_usage(self._prompt_tokens, cached, self._prompt_tokens - cached, 0)
        return _event("message_start", {"type": "message_start", "message": self._message([], None, None, used)})

    def _ensure(self, kind: Literal["text", "thinking"]) -> bytes:
        """Opens a block of this kind unless one is open."""
        if self._open == kind:
            return b""
        if kind == "text":
            return self._close() + self._block("text", {"type": "text", "text": ""}, "text_delta", "text")
        block: dict[str, object] = {"type": "thinking", "thinking": "", "signature": ""}
        return self._close() + self._block("thinking", block, "thinking_delta", "thinking")

    def _block(self, kind: Kind, block: dict[str, object], delta_type: str, member: str) -> bytes:
        self._open = kind
        self._index += 1
        self._answered |= kind != "thinking"
        self._delta = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":"'
            % (self._index, delta_type.encode(), member.encode())
        )
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return _event("content_block_start", start)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signature = b""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": self._id}
            signed = {"type": "content_block_delta", "index": self._index, "delta": delta}
            signature = _event("content_block_delta", signed)
        self._open = None
        return signature + _event("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _finish(self, finish: Finish) -> bytes:
        data = self._close()
        if not self._answered:
            data += self._ensure("text") + self._close()
        calls = tuple(
            ToolCall(call_id, name, "".join(pieces)) for call_id, name, pieces in self._calls[: self._complete]
        )
        self._finished(Message("assistant", "".join(self._text), "".join(self._reasoning), calls))
        reason, stop = _stop_reason(finish)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage(finish)}
        return data + _event("message_delta", last) + _event("message_stop", {"type": "message_stop"})

    # ---- whole messages

    def whole(self, collected: Sequence[Collected]) -> bytes:
        (answer,) = collected
        content: list[object] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": self._id})
        if answer.content or not answer.calls:
            content.append({"type": "text", "text": answer.content})
        calls: list[ToolCall] = []
        for call in answer.calls:
            call_id = new_call_id("toolu")
            self._call_finished(call_id, call.raw)
            calls.append(ToolCall(call_id, call.name, call.arguments))
            arguments = parse(call.arguments.encode())
            content.append({"type": "tool_use", "id": call_id, "name": call.name, "input": arguments})
        self._finished(Message("assistant", answer.content, answer.reasoning, tuple(calls)))
        reason, stop = _stop_reason(answer.finish)
        return dumps(self._message(content, reason, stop, self._usage(answer.finish))) + b"\n"

    def error(self, error: WireError) -> bytes:
        return anthropic_error(error)

    def _message(
        self, content: list[object], reason: str | None, stop: str | None, used: dict[str, object]
    ) -> dict[str, object]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": used,
        }

    def _usage(self, finish: Finish) -> dict[str, object]:
        used = messages_usage(
            finish.prompt_tokens, finish.cached_tokens, finish.cache_write_tokens, finish.completion_tokens
        )
        if self._timings:
            used["timings"] = timing_numbers(finish)
        return used


def _stop_reason(finish: Finish) -> tuple[str, str | None]:
    if finish.reason == "stop" and finish.stop is not None:
        return "stop_sequence", finish.stop.decode("utf-8", "replace")
    return _STOP_REASONS[finish.reason], None


def _event(name: str, data: Mapping[str, object]) -> bytes:
    return frame(dumps(dict(data)), name)
