"""Custom tools, whose input is raw text, in Chat and in Responses.

    {"name": "apply_patch", "description": ..., "format": {"type": "grammar", ...}}

A model knows functions only, so each is declared to it as a function of one text. The grammar of the text, if there is
one, stands in the declaration and holds while an input is sampled (`ds4.prompt.call_inputs`). The client gets the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4._json import JSONError, Node, dumps, parse
from ds4.engine.constraint import Grammar
from ds4.prompt.call_inputs import INPUT
from ds4.prompt.types import Tool
from ds4.server.api.common import required
from ds4.server.api.tools import declared_tool


@dataclass(frozen=True, slots=True)
class RawInput:
    """The grammar of a custom tool's input, and its path in the body."""

    grammar: Grammar
    param: str


def custom_tool(item: Node, name: str) -> tuple[Tool, RawInput | None]:
    """A custom tool as a function of one text, and the grammar of the text, which the model is shown, too.

    `name` is what the model is to call it. Raises JSONError or RequestError with the path of what is wrong.
    """
    parameter: dict[str, object] = {"type": "string"}
    form = item.get_object("format")
    raw = None if form is None else _raw_input(form)
    if raw is not None:
        syntax = "lark" if raw.grammar.kind == "lark" else "regex"
        parameter["description"] = f"Text by this {syntax} grammar:\n{raw.grammar.text}"
    parameters = {"type": "object", "properties": {INPUT: parameter}, "required": [INPUT]}
    return declared_tool(name, item.get_str("description", ""), parameters), raw


def _raw_input(form: Node) -> RawInput | None:
    """`format` of a custom tool: `{type: text}`, or `{type: grammar, syntax, definition}`, whose last two members stand
    in a member `grammar` in Chat."""
    kind = required(form, "type")
    if kind.as_str() == "text":
        return None
    if kind.as_str() != "grammar":
        raise kind.error(f"Expected `text` or `grammar`, got {kind.as_str()[:40]!r}")
    holder = form.get_object("grammar") or form
    syntax, definition = required(holder, "syntax"), required(holder, "definition")
    if syntax.as_str() not in ("lark", "regex"):
        raise syntax.error(f"Expected `lark` or `regex`, got {syntax.as_str()[:40]!r}")
    grammar = Grammar("lark" if syntax.as_str() == "lark" else "regex", definition.as_str())
    return RawInput(grammar, definition.path.removeprefix("$."))


def custom_arguments(text: str) -> str:
    """The arguments that stand for a custom tool's input."""
    return dumps({INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """The input in the arguments of a custom tool's call: the parameter's text, or all there is."""
    try:
        members = parse(arguments.encode()).as_object().items()
    except JSONError:
        return arguments
    chosen = [value for name, value in members if name == INPUT] or [value for _, value in members]
    if len(chosen) == 1 and chosen[0].kind == "str":
        return chosen[0].as_str()
    return arguments
