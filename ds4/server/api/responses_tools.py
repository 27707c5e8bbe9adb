"""Tools of Responses, and the form in which a call of each must come back.

The model knows functions only: each tool is declared to it as one. Clients execute a call only in the form of its
tool, so every declared name keeps its form:

    function      {"type": "function", name, parameters}           function_call
    namespace     {"type": "namespace", name, tools: [...]}        the same, with `namespace` beside the bare name
    custom        {"type": "custom", name, format}                 custom_tool_call, whose input is raw text
    tool_search   {"type": "tool_search"}                          tool_search_call

Inside a namespace the model sees both names as one, without separator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ds4._json import Node
from ds4.prompt.types import Tool
from ds4.server.api.common import required
from ds4.server.api.custom_tools import RawInput, custom_tool
from ds4.server.api.tools import declaration, declared_tool, tool_name

Kind = Literal["function", "custom", "tool_search"]

TOOL_SEARCH = "tool_search"
_MARKS = ("type",)
"""Members of a function that say nothing about it."""

_NO_PARAMETERS: dict[str, object] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a call comes back: `name` is what the client calls the tool.

    `raw_input` is what the text of a custom tool is held to.
    """

    kind: Kind
    name: str
    namespace: str | None = None
    raw_input: RawInput | None = None


class ToolTable:
    """The tools of one request: declarations for the model, forms for the answer."""

    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}
        self._forms: dict[str, ToolForm] = {}

    @property
    def raw_inputs(self) -> Mapping[str, RawInput]:
        """Declared name -> grammar of the input, for custom tools that have one."""
        return {name: form.raw_input for name, form in self._forms.items() if form.raw_input is not None}

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(self._tools.values())

    @property
    def forms(self) -> Mapping[str, ToolForm]:
        return self._forms

    def form(self, name: str) -> ToolForm:
        """The form of a call that the model made. A bare name counts when only one namespace has it."""
        found = self._forms.get(name)
        if found is not None:
            return found
        same = [form for form in self._forms.values() if form.name == name]
        return same[0] if len(same) == 1 else ToolForm("function", name)

    def declared_name(self, name: str) -> str:
        """The name that the model knows for the client's name of a tool; the same where there is no such tool."""
        if name in self._forms:
            return name
        return next((declared for declared, form in self._forms.items() if form.name == name), name)

    def add(self, array: Node | None, unused: list[str]) -> None:
        """Takes a `tools` array. What only the vendor can run is left out and named in `unused`."""
        for item in array or ():
            kind = item.as_object().get_str("type", "function")
            if kind == "namespace":
                namespace = required(item, "name").as_str()
                for member in item.get_array("tools") or ():
                    self._add(member, member.as_object().get_str("type", "function"), namespace, unused)
            else:
                self._add(item, kind, None, unused)

    def restore(self, tools: tuple[Tool, ...], forms: Mapping[str, ToolForm]) -> None:
        """Takes the tools of a former turn that this request does not declare itself."""
        for tool in tools:
            self._put(tool, forms.get(tool.name, ToolForm("function", tool.name)))

    def _add(self, item: Node, kind: str, namespace: str | None, unused: list[str]) -> None:
        if kind == "function":
            name = tool_name(item)
            tool = Tool(name, declaration(item, _MARKS)) if namespace is None else _member(item, namespace + name)
            self._put(tool, ToolForm("function", name, namespace))
        elif kind == "custom":
            name = tool_name(item)
            tool, raw = custom_tool(item, (namespace or "") + name)
            self._put(tool, ToolForm("custom", name, namespace, raw))
        elif kind == TOOL_SEARCH and item.get_str("execution", "client") == "client":
            self._put(_tool_search(item), ToolForm("tool_search", TOOL_SEARCH))
        else:
            unused.append(f"tools.{kind[:40]}")

    def _put(self, tool: Tool, form: ToolForm) -> None:
        # The first declaration stands: what is found later must not change the beginning of the prompt.
        if tool.name not in self._tools:
            self._tools[tool.name] = tool
            self._forms[tool.name] = form


def _member(item: Node, name: str) -> Tool:
    parameters = item.get("parameters") or item.get("input_schema") or _NO_PARAMETERS
    return declared_tool(name, item.get_str("description", ""), parameters)


def _tool_search(item: Node) -> Tool:
    description = item.get_str("description", "Search available tools.")
    return declared_tool(TOOL_SEARCH, description, item.get("parameters") or _NO_PARAMETERS)
