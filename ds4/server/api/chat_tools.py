"""Chat's `tools`: functions, custom tools, and the vendor's own, which nobody can run here.

    {"type": "function", "function": {name, description, parameters}}
    {"type": "custom", "custom": {name, description, format}}

A call comes back in the form of its tool. The members of either may stand at the top level, as in Responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds4._json import Node, Spans
from ds4.prompt.types import Tool
from ds4.server.api.custom_tools import RawInput, custom_tool
from ds4.server.api.tools import declaration, read_once, schemas_size, tool_name

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


@dataclass(frozen=True, slots=True)
class ChatTools:
    """`customs`: name of a custom tool -> the grammar of its input, if it has one."""

    tools: tuple[Tool, ...] = ()
    customs: Mapping[str, RawInput | None] = field(default_factory=dict)

    @property
    def raw_inputs(self) -> Mapping[str, RawInput]:
        return {name: raw for name, raw in self.customs.items() if raw is not None}


_known = Spans(16 << 20)


def chat_tools(body: Node, unused: list[str]) -> ChatTools:
    """The tools of a body. Hosted ones are left out and named in `unused`.

    Raises JSONError or RequestError with the path of what is wrong.
    """
    array = body.get_array("tools")
    if array is None:
        return ChatTools()
    return read_once(_known, _read, array, unused, lambda found: schemas_size(found.tools))


def _read(array: Node, unused: list[str]) -> ChatTools:
    tools: list[Tool] = []
    customs: dict[str, RawInput | None] = {}
    for item in array:
        kind = item.get_str("type", "function")
        function = item.get_object("function")
        if function is None and kind == "custom":
            custom = item.get_object("custom") or item
            name = tool_name(custom)
            tool, customs[name] = custom_tool(custom, name)
            tools.append(tool)
        elif function is None and kind in _HOSTED:
            unused.append(f"tools.{kind}")
        elif function is None and kind != "function":
            raise item["type"].error(f"Tools of type {kind[:40]!r} are not supported")
        else:
            inside = item if function is None else function
            tools.append(Tool(tool_name(inside), declaration(inside, ("type",) if function is None else ())))
    return ChatTools(tuple(tools), customs)
