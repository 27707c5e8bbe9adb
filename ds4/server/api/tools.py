"""The `tools` of a request: which functions the model is offered, each with the one line that declares it.

Equal schemas give equal bytes however the client spelled them (`Node.canonical`), because cache reuse rests on it, and
in whatever dialect: a model was trained on `{"name", "description", "parameters"}`, and knows no other form. What Chat
and Responses have beside functions is in `chat_tools`, `responses_tools` and `custom_tools`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from ds4._json import Node, Spans, dumps, parse
from ds4.prompt.types import Tool
from ds4.server.api.common import required

SCHEMA = "input_schema"
"""What Anthropic calls a function's `parameters`."""

_Read = TypeVar("_Read")


def read_once(
    known: Spans, read: Callable[[Node, list[str]], _Read], array: Node, unused: list[str], size: Callable[[_Read], int]
) -> _Read:
    """What `read` makes of an array of tools, once for all requests that bring the same. `size` is what it keeps."""
    found: tuple[_Read, list[str]] | None = known.get(array)
    if found is None:
        left_out: list[str] = []
        found = read(array, left_out), left_out
        known.put(array, found, size(found[0]))
    unused += found[1]
    return found[0]


def schemas_size(tools: Collection[Tool]) -> int:
    return sum(2 * len(tool.schema) for tool in tools)


def tool_name(item: Node) -> str:
    """The name of a tool. Raises JSONError or RequestError with its path when there is none."""
    name = required(item, "name").as_str()
    if not name:
        raise item["name"].error("Expected a name, got an empty string")
    return name


def declaration(item: Node, marks: Collection[str]) -> str:
    """The line of a tool whose members stand beside `marks`, which are left out: in the words of a function."""
    if SCHEMA not in item or "parameters" in item:
        return item.canonical(tuple(marks))
    members = [
        f"{dumps('parameters' if name == SCHEMA else name).decode()}: {node.canonical()}"
        for name, node in item.items()
        if name not in marks
    ]
    return "{" + ", ".join(members) + "}"


def declared_tool(name: str, description: str, parameters: object) -> Tool:
    """A tool that is declared in words of ours."""
    text = parse(dumps({"name": name, "description": description, "parameters": parameters})).canonical()
    return Tool(name, text)


# ---- Messages ---------------------------------------------------------------------------------------------------

_known = Spans(16 << 20)

_MARKS = ("cache_control", "defer_loading", "eager_input_streaming", "type")
"""Members of Anthropic's tools that say nothing about the tool and change between the turns of a conversation."""


def anthropic_tools(body: Node, unused: list[str]) -> tuple[Tool, ...]:
    """Messages' `tools`: `{"name", "description", "input_schema"}`. Tools without a schema are the vendor's own."""
    array = body.get_array("tools")
    return () if array is None else read_once(_known, _anthropic_tools, array, unused, schemas_size)


def _anthropic_tools(array: Node, unused: list[str]) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for item in array:
        kind = item.get_str("type", "custom")
        if kind != "custom" and SCHEMA not in item:
            unused.append(f"tools.{kind[:40]}")
        else:
            tools.append(Tool(tool_name(item), declaration(item, _MARKS)))
    return tuple(tools)
