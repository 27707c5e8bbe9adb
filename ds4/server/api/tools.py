"""The `tools` of a request: which functions the model is offered, each with the one line that declares it.

Equal schemas give equal bytes however the client spelled them (`Node.canonical`), because cache reuse rests on it, and
in whatever dialect: a model was trained on `{"name", "description", "parameters"}`, and knows no other form.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ds4._json import Node, Spans, dumps
from ds4.prompt.types import Tool
from ds4.server.api.common import required

_HOSTED = frozenset(
    {
        "web_search",
        "web_search_preview",
        "file_search",
        "code_interpreter",
        "computer_use_preview",
        "image_generation",
        "local_shell",
        "mcp",
    }
)
"""Tool types that the vendor's own server runs; nobody can execute them here, so the model is not offered them."""


_known_functions, _known_anthropic = Spans(16 << 20), Spans(16 << 20)


def function_tools(body: Node, unused: list[str]) -> tuple[Tool, ...]:
    """Chat's `tools`: `{"type": "function", "function": {...}}`, or the function's members at the top level.

    Hosted tools are left out and named in `unused`. Raises JSONError with the path of what is wrong.
    """
    return _remembered(_known_functions, _function_tools, body.get_array("tools"), unused)


def _remembered(
    known: Spans, read: Callable[[Node, list[str]], tuple[Tool, ...]], node: Node | None, unused: list[str]
) -> tuple[Tool, ...]:
    """What `read` makes of an array of tools, once for all requests that bring the same."""
    if node is None:
        return ()
    found: tuple[tuple[Tool, ...], list[str]] | None = known.get(node)
    if found is None:
        left_out: list[str] = []
        found = read(node, left_out), left_out
        known.put(node, found, sum(2 * len(tool.schema) for tool in found[0]))
    unused += found[1]
    return found[0]


def _function_tools(array: Node, unused: list[str]) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for item in array:
        kind = item.get_str("type", "function")
        function = item.get_object("function")
        if function is None and kind in _HOSTED:
            unused.append(f"tools.{kind}")
            continue
        if function is None and kind != "function":
            raise item["type"].error(f"Tools of type {kind[:40]!r} are not supported")
        declaration = item if function is None else function
        name = required(declaration, "name").as_str()
        if not name:
            raise declaration["name"].error("Expected a name, got an empty string")
        tools.append(Tool(name, declaration.canonical()))
    return tuple(tools)


_MARKS = ("cache_control", "defer_loading", "eager_input_streaming", "type")
"""Members of Anthropic's tools that say nothing about the tool and change between the turns of a conversation."""


def anthropic_tools(body: Node, unused: list[str]) -> tuple[Tool, ...]:
    """Messages' `tools`: `{"name", "description", "input_schema"}`. Tools without a schema are the vendor's own."""
    return _remembered(_known_anthropic, _anthropic_tools, body.get_array("tools"), unused)


def _anthropic_tools(array: Node, unused: list[str]) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for item in array:
        kind = item.get_str("type", "custom")
        if kind != "custom" and SCHEMA not in item:
            unused.append(f"tools.{kind}")
            continue
        name = required(item, "name").as_str()
        if not name:
            raise item["name"].error("Expected a name, got an empty string")
        tools.append(Tool(name, declaration(item, _MARKS)))
    return tuple(tools)


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


SCHEMA = "input_schema"
"""What Anthropic calls a function's `parameters`."""
