"""What a generation looks like in Responses: one response object of items, or a stream of numbered events.

Shapes are those of OpenAI's API reference (response object, streaming events). The stream of one text item:

    response.created  response.in_progress
        output_item.added  content_part.added  output_text.delta*  output_text.done  content_part.done  output_item.done
    response.completed | response.incomplete | response.failed

A call is announced when its name is known, and done only when its whole block is complete: agents execute a call as
soon as its item is done. Calls of one block therefore overlap; events name their item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ds4._json import dumps, parse, sse_chunk
from ds4.prompt.types import Message, ToolCall
from ds4.server.api.answer import CallFinished, Collected, TurnFinished
from ds4.server.api.custom_tools import custom_input
from ds4.server.api.errors import WireError, openai_error
from ds4.server.api.ids import new_call_id, new_id
from ds4.server.api.responses_tools import ToolForm
from ds4.server.api.usage import responses_usage
from ds4.server.sse import frame
from ds4.server.types import (
    ContentDelta,
    Event,
    Finish,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]

_PREFIXES = {"function": "fc", "custom": "ctc", "tool_search": "tsc"}


@dataclass(frozen=True, slots=True)
class ResponsesStyle:
    """What an answer needs to know of its request. `echo` are members of the response that repeat the request."""

    id: str
    model: str
    created: int
    summaries: bool
    timings: bool = False
    echo: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class _TextItem:
    """An open item of text: the message, or a summary of reasoning."""

    kind: Literal["message", "reasoning"]
    id: str
    index: int
    text: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _CallItem:
    """A call, open until its block is complete. `name` is the model's own name of the tool."""

    form: ToolForm
    name: str
    id: str
    call_id: str
    index: int
    arguments: list[str] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> str:
        return "".join(self.arguments)

    @property
    def call(self) -> ToolCall:
        return ToolCall(self.call_id, self.name, self.text)


class ResponsesAnswer:
    """Implements `ds4.server.api.answer.Answer`."""

    def __init__(
        self,
        style: ResponsesStyle,
        form: Callable[[str], ToolForm],
        call_finished: CallFinished,
        finished: TurnFinished,
    ) -> None:
        self._style = style
        self._form = form
        self._call_finished = call_finished
        self._finished = finished
        self._number = 0
        self._open: _TextItem | None = None
        self._delta = b""
        self._calls: list[_CallItem] = []
        self._items = 0
        self._output: dict[int, dict[str, object]] = {}
        """Items that are done, by their place."""
        self._text: list[str] = []
        self._reasoning: list[str] = []

    # ---- streams

    def keepalive(self) -> bytes:
        return self._event("response.in_progress", response=self._response("in_progress"))

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def events(self, batch: Sequence[Event], choice: int = 0) -> bytes:
        return b"".join([self._one(event) for event in batch])

    def end(self, finishes: Sequence[Finish]) -> bytes:
        return b""

    def error_event(self, error: WireError) -> bytes:
        failure = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._response("failed", error=failure))

    def _one(self, event: Event) -> bytes:
        match event:
            case ContentDelta():
                self._text.append(event.text)
                return self._write("message", event.text)
            case ReasoningDelta():
                self._reasoning.append(event.text)
                return self._write("reasoning", event.text) if self._style.summaries else b""
            case ToolCallStart():
                return self._close("completed") + self._announce(event.name)
            case ToolCallDelta():
                return self._argument(self._calls[event.index], event.arguments)
            case ToolCallEnd():
                return self._complete(self._calls[event.index], event.raw)
            case Finish():
                return self._finish(event)
            case _:
                return b""

    def _event(self, kind: str, /, **members: object) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **members}
        self._number += 1
        return frame(dumps(data), kind)

    def _next_index(self) -> int:
        self._items += 1
        return self._items - 1

    def _write(self, kind: Literal["message", "reasoning"], text: str) -> bytes:
        """A piece of text, in an item that is opened if need be."""
        opened = b""
        if self._open is None or self._open.kind != kind:
            opened = self._close("completed") + self._open_item(kind)
        assert self._open is not None
        self._open.text.append(text)
        head = self._delta % self._number
        self._number += 1
        return opened + sse_chunk(head, text, b'"}\n\n')

    def _open_item(self, kind: Literal["message", "reasoning"]) -> bytes:
        item = _TextItem(kind, new_id("msg" if kind == "message" else "rs"), self._next_index())
        self._open = item
        place: dict[str, object] = {"item_id": item.id, "output_index": item.index}
        if kind == "message":
            shown = _message_item(item.id, None, "in_progress")
            name, place = "response.output_text.delta", {**place, "content_index": 0, "logprobs": []}
            part = {"item_id": item.id, "output_index": item.index, "content_index": 0, "part": _text_part("")}
            added = ("response.content_part.added", part)
        else:
            shown = _reasoning_item(item.id, None, "in_progress")
            name, place = "response.reasoning_summary_text.delta", {**place, "summary_index": 0}
            added = ("response.reasoning_summary_part.added", {**place, "part": _summary_part("")})
        rest = dumps(place)[1:-1]
        self._delta = b'event: %b\ndata: {"type":"%b","sequence_number":%%d,%b,"delta":"' % (
            name.encode(),
            name.encode(),
            rest,
        )
        return self._event("response.output_item.added", output_index=item.index, item=shown) + self._event(
            added[0], **added[1]
        )

    def _close(self, status: ItemStatus) -> bytes:
        """Ends the open text item."""
        item = self._open
        if item is None:
            return b""
        self._open = None
        text = "".join(item.text)
        place: dict[str, object] = {"item_id": item.id, "output_index": item.index}
        if item.kind == "message":
            place["content_index"] = 0
            done = _message_item(item.id, text, status)
            data = self._event("response.output_text.done", **place, text=text, logprobs=[])
            data += self._event("response.content_part.done", **place, part=_text_part(text))
        else:
            place["summary_index"] = 0
            done = _reasoning_item(item.id, text, status)
            data = self._event("response.reasoning_summary_text.done", **place, text=text)
            data += self._event("response.reasoning_summary_part.done", **place, part=_summary_part(text))
        self._output[item.index] = done
        return data + self._event("response.output_item.done", output_index=item.index, item=done)

    def _announce(self, name: str) -> bytes:
        form = self._form(name)
        item = _CallItem(form, name, new_id(_PREFIXES[form.kind]), new_call_id(), self._next_index())
        self._calls.append(item)
        shown = _call_item(item, "in_progress")
        return self._event("response.output_item.added", output_index=item.index, item=shown)

    def _argument(self, item: _CallItem, piece: str) -> bytes:
        item.arguments.append(piece)
        if item.form.kind != "function":
            return b""
        return self._event(
            "response.function_call_arguments.delta", item_id=item.id, output_index=item.index, delta=piece
        )

    def _complete(self, item: _CallItem, raw: bytes) -> bytes:
        item.done = True
        self._call_finished(item.call_id, raw)
        place: dict[str, object] = {"item_id": item.id, "output_index": item.index}
        data = b""
        if item.form.kind == "function":
            named = {} if item.form.namespace is None else {"namespace": item.form.namespace}
            members = {"name": item.form.name, **named, "arguments": item.text}
            data = self._event("response.function_call_arguments.done", **place, **members)
        elif item.form.kind == "custom":
            text = custom_input(item.text)
            data = self._event("response.custom_tool_call_input.delta", **place, delta=text)
            data += self._event("response.custom_tool_call_input.done", **place, input=text)
        done = _call_item(item, "completed")
        self._output[item.index] = done
        return data + self._event("response.output_item.done", output_index=item.index, item=done)

    def _finish(self, finish: Finish) -> bytes:
        data = self._close(_item_status(finish))
        calls = tuple(item.call for item in self._calls if item.done)
        self._finished(Message("assistant", "".join(self._text), "".join(self._reasoning), calls))
        status = _item_status(finish)
        return data + self._event(f"response.{status}", response=self._ended(finish, self._done_items()))

    def _done_items(self) -> list[dict[str, object]]:
        return [self._output[index] for index in sorted(self._output)]

    # ---- whole responses

    def whole(self, collected: Sequence[Collected]) -> bytes:
        (answer,) = collected
        last = _item_status(answer.finish)
        output: list[dict[str, object]] = []
        if self._style.summaries and answer.reasoning:
            cut = not answer.content and not answer.calls
            output.append(_reasoning_item(new_id("rs"), answer.reasoning, last if cut else "completed"))
        if answer.content:
            status = "completed" if answer.calls else last
            output.append(_message_item(new_id("msg"), answer.content, status))
        calls: list[ToolCall] = []
        for call in answer.calls:
            form = self._form(call.name)
            item = _CallItem(form, call.name, new_id(_PREFIXES[form.kind]), new_call_id(), 0, [call.arguments])
            self._call_finished(item.call_id, call.raw)
            calls.append(item.call)
            output.append(_call_item(item, "completed"))
        self._finished(Message("assistant", answer.content, answer.reasoning, tuple(calls)))
        return dumps(self._ended(answer.finish, output)) + b"\n"

    def error(self, error: WireError) -> bytes:
        return openai_error(error)

    def _ended(self, finish: Finish, output: list[dict[str, object]]) -> dict[str, object]:
        status = _item_status(finish)
        return self._response(
            status,
            incomplete={"reason": "max_output_tokens"} if status == "incomplete" else None,
            output=output,
            used=responses_usage(finish, timings=self._style.timings),
        )

    def _response(
        self,
        status: str,
        *,
        error: dict[str, str] | None = None,
        incomplete: dict[str, str] | None = None,
        output: list[dict[str, object]] | None = None,
        used: dict[str, object] | None = None,
    ) -> dict[str, object]:
        return {
            "id": self._style.id,
            "object": "response",
            "created_at": self._style.created,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": incomplete,
            "model": self._style.model,
            "output": self._done_items() if output is None else output,
            "usage": used,
            **self._style.echo,
        }


def _item_status(finish: Finish) -> Literal["completed", "incomplete"]:
    return "incomplete" if finish.reason == "length" else "completed"


def _text_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _summary_part(text: str) -> dict[str, object]:
    return {"type": "summary_text", "text": text}


def _message_item(id: str, text: str | None, status: ItemStatus) -> dict[str, object]:
    content = [] if text is None else [_text_part(text)]
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}


def _reasoning_item(id: str, text: str | None, status: ItemStatus) -> dict[str, object]:
    return {"id": id, "type": "reasoning", "status": status, "summary": [] if text is None else [_summary_part(text)]}


def _call_item(item: _CallItem, status: ItemStatus) -> dict[str, object]:
    """A call in the form of its tool; empty while in progress."""
    form, is_done = item.form, status == "completed"
    head: dict[str, object] = {"id": item.id, "status": status, "call_id": item.call_id}
    if form.kind == "tool_search":
        arguments: object = parse(item.text.encode()) if is_done else {}
        return {**head, "type": "tool_search_call", "execution": "client", "arguments": arguments}
    head["name"] = form.name
    if form.namespace is not None:
        head["namespace"] = form.namespace
    if form.kind == "custom":
        return {**head, "type": "custom_tool_call", "input": custom_input(item.text) if is_done else ""}
    return {**head, "type": "function_call", "arguments": item.text if is_done else ""}
