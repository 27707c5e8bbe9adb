"""Input items of Responses into messages of a conversation.

    message                            a turn; an assistant's takes the reasoning before it
    reasoning                          reasoning of the assistant turn that follows
    ..._call                           a call of the assistant turn before it, or of a new one
    ..._call_output, ..._output        the result of a call
    additional_tools                   declares tools
    compaction                         nothing

Every result must follow its call: in the same input, or in the turn that the request goes on with.
"""

from __future__ import annotations

from dataclasses import replace

from ds4._json import Node
from ds4.errors import RequestError
from ds4.prompt.types import Message, Role, ToolCall
from ds4.server.api import common
from ds4.server.api.content import arguments_text, result_text, text_of
from ds4.server.api.custom_tools import custom_arguments
from ds4.server.api.responses_tools import TOOL_SEARCH, ToolTable
from ds4.server.api.texts import known_message

_ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}

_HOSTED_CALLS = {
    "local_shell_call": "local_shell",
    "shell_call": "shell",
    "apply_patch_call": "apply_patch",
    "web_search_call": "web_search_call",
    "image_generation_call": "image_generation_call",
    "tool_search_call": TOOL_SEARCH,
}
"""Calls of tools with a type of their own, and what they are called in the history."""

_OUTPUTS = frozenset(
    {
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
        "web_search_call_output",
        "image_generation_call_output",
        "tool_search_output",
        "tool_search_call_output",
    }
)

_SKIPPED = frozenset({"compaction", "context_compaction"})


class InputReader:
    """Reads one `input`. `messages` is the result, `orphans` the ids of results whose calls are not in it."""

    def __init__(self, tools: ToolTable, unused: list[str]) -> None:
        self.messages: list[Message] = []
        self.orphans: dict[str, None] = {}
        self.has_calls = False
        self._tools = tools
        self._unused = unused
        self._known: set[str] = set()
        self._reasoning: list[str] = []

    def read(self, node: Node) -> None:
        """A string is a user turn. Raises JSONError or RequestError with the path of what is wrong."""
        if node.kind == "str":
            self.messages.append(Message("user", node.as_str()))
            return
        if node.kind != "array":
            raise node.error(f"Expected `str` or `array`, got `{node.kind}`")
        for item in node:
            self._item(item)
        self._flush()
        self.messages = [known_message(message) for message in self.messages]

    def require_known(self, known: set[str]) -> None:
        """Raises RequestError (400) for a result of a call that is neither in the input nor in `known`."""
        for call_id in self.orphans:
            if call_id not in known:
                raise RequestError(
                    f"Responses continuation state is not available for call_id {call_id[:80]}; "
                    "retry by replaying the full input history",
                    param="input",
                )

    def _item(self, item: Node) -> None:
        kind = item.as_object().get_str("type", "message")
        status = item.get_str("status", "completed")
        # LangChain replays reasoning as it was announced, which is with the status of its beginning.
        if status != "completed" and (kind, status) != ("reasoning", "in_progress"):
            raise item["status"].error(f"An item of an interrupted turn cannot be replayed: status {status[:40]!r}")
        if kind == "message":
            self._message(item)
        elif kind == "reasoning":
            self._add_reasoning(item)
        elif kind == "function_call":
            self._call(item, common.required(item, "name").as_str(), arguments_text(item.get("arguments")))
        elif kind == "custom_tool_call":
            text = item.get_str("input", "")
            self._call(item, common.required(item, "name").as_str(), custom_arguments(text))
        elif kind in _HOSTED_CALLS:
            sent = item.get("action") or item.get("arguments") or item.get("input")
            self._call(item, _HOSTED_CALLS[kind], arguments_text(sent))
        elif kind in _OUTPUTS:
            self._output(item, kind)
        elif kind == "additional_tools":
            self._tools.add(item.get_array("tools"), self._unused)
        elif kind not in _SKIPPED:
            raise item["type"].error(f"Items of type {kind[:40]!r} are not supported")

    def _message(self, item: Node) -> None:
        name = common.required(item, "role").as_str()
        role = _ROLES.get(name)
        if role is None:
            raise item["role"].error(f"Expected one of {', '.join(_ROLES)}, got {name[:40]!r}")
        text = text_of(item.get("content"))
        if role == "assistant":
            self.messages.append(Message(role, text, self._take_reasoning()))
        else:
            self._flush()
            self.messages.append(Message(role, text))

    def _add_reasoning(self, item: Node) -> None:
        for name in ("summary", "content"):
            node = item.get(name)
            if node is None:
                continue
            parts = [text_of(node)] if node.kind == "str" else [text_of(part.get("text")) for part in node]
            self._reasoning += [part for part in parts if part]

    def _call(self, item: Node, name: str, arguments: str) -> None:
        call_id = item.get_str("call_id") or item.get_str("id", "")
        call = ToolCall(call_id, item.get_str("namespace", "") + name, arguments)
        self.has_calls = True
        self._known.add(call_id)
        last = self.messages[-1] if self.messages else None
        reasoning = self._take_reasoning()
        if last is None or last.role != "assistant":
            self.messages.append(Message("assistant", reasoning=reasoning, calls=(call,)))
            return
        joined = "\n".join(text for text in (last.reasoning, reasoning) if text)
        self.messages[-1] = replace(last, reasoning=joined, calls=(*last.calls, call))

    def _output(self, item: Node, kind: str) -> None:
        self._flush()
        call_id = item.get_str("call_id") or item.get_str("id", "")
        if call_id not in self._known:
            self.orphans[call_id] = None
        # Found tools are data for the model to read, not parts with text.
        found = item.get_array("tools") if kind.startswith("tool_search") else None
        self._tools.add(found, self._unused)
        text = result_text(item.get("output") or item.get("result")) if found is None else found.minified()
        self.messages.append(Message("tool", text, call_id=call_id))

    def _take_reasoning(self) -> str:
        text = "\n".join(self._reasoning)
        self._reasoning.clear()
        return text

    def _flush(self) -> None:
        """Reasoning that no assistant turn followed is a turn of its own."""
        if self._reasoning:
            self.messages.append(Message("assistant", reasoning=self._take_reasoning()))
