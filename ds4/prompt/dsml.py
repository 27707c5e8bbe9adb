"""DSML, the tool syntax of DeepSeek V4 and V4.1, as prompt text: declaration, calls in the history, results.

The wording of the declaration is what the models were trained on; `deepseek-recipe` (PyPI, DeepSeek's own encoder)
prints the same. The bar word of a tag, `<think>` and `</think>` are special tokens wherever the template writes them,
and plain text wherever data holds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ds4._json import JSONError, Node, dumps, parse
from ds4.bounded import once_per_object
from ds4.prompt.draft import TOOLS_COST, TURNS_COST, declared_size, marked, sampled_block, size_of
from ds4.prompt.escaping import escape
from ds4.prompt.history import replayed
from ds4.prompt.types import Message, Segment, Special, Tool, ToolCall

BOS = Special("<｜begin▁of▁sentence｜>")
EOS = Special("<｜end▁of▁sentence｜>")
USER = Special("<｜User｜>")
ASSISTANT = Special("<｜Assistant｜>")
SYSTEM = Special("<｜System｜>")
THINK = Special("<think>", optional=True)
END_THINK = Special("</think>", optional=True)

_TAGS = ("｜DSML｜", THINK.text, END_THINK.text)
_RESULT_END = "</tool_result>"
# The value of a parameter in a sampled block, in either spelling of the tags.
_PAYLOAD = re.compile(
    r'<｜DSML｜ ?parameter\b(?:"[^"]*"|[^">])*>(?P<value>.*?)(?=</｜DSML｜ ?parameter ?>|\Z)', re.DOTALL
)

_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜{calls}>" block like the following:

<｜DSML｜{calls}>
<｜DSML｜{invoke} name="$TOOL_NAME">
<｜DSML｜{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜{parameter}>
...
</｜DSML｜{invoke}>
<｜DSML｜{invoke} name="$TOOL_NAME2">
...
</｜DSML｜{invoke}>
</｜DSML｜{calls}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""

_AFTER_SCHEMAS = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


@dataclass(frozen=True, slots=True)
class Dsml:
    """One spelling of DSML: the words behind the bar.

    `official`: details as DeepSeek's encoder for that model prints them, which are the members of a declaration,
    spacing and numbers of JSON values, blank arguments, and for V4.1 the empty line of a call without parameters.
    """

    calls: str
    invoke: str
    parameter: str
    official: Literal["V4", "V4.1"] | None = None

    def declaration(self, tools: tuple[Tool, ...]) -> tuple[Segment, ...]:
        """What tells the model its tools; ends with a newline."""
        return _declaration(tools, self)

    def block(self, calls: Sequence[ToolCall]) -> list[Segment]:
        """The calls of one assistant turn with the blank line before them; nothing without calls.

        A turn whose sampled block is known is replayed byte for byte, its leading white space included.
        """
        if not calls:
            return []
        raw = replayed(calls)
        if raw is not None:
            return list(sampled_block(raw, _PAYLOAD, _TAGS))
        block = [*self._own(f"\n\n<｜DSML｜{self.calls}>\n")]
        for call in calls:
            block += self.call(call.name, call.arguments)
        return [*block, *self._own(f"</｜DSML｜{self.calls}>")]

    def _own(self, text: str) -> tuple[Segment, ...]:
        return marked(text, _TAGS)

    def call(self, name: str, arguments: str) -> list[Segment]:
        """One call of a block."""
        begin, before, behind, end = _tags_of_a_call(self)
        call = [*begin, f'"{_attribute(name)}">\n']
        parameters = self._parameters(arguments)
        for parameter, value, is_string in parameters:
            string = "true" if is_string else "false"
            call += (*before, f'"{_attribute(parameter)}" string="{string}">', value, *behind)
        if self.official == "V4.1" and not parameters:
            call.append("\n")
        return [*call, *end]

    def _parameters(self, arguments: str) -> list[tuple[str, str, bool]]:
        """(name, text, is a string) of each parameter, in the order of the arguments.

        Text that is not a JSON object is one string parameter named `arguments`.
        """
        end = f"</｜DSML｜{self.parameter}>"
        if not arguments.strip() and not self.official:
            return []
        try:
            node = parse(arguments.encode("utf-8", "replace"))
        except JSONError:
            node = None
        if node is None or node.kind != "object":
            return [("arguments", escape(arguments, end), True)]
        parameters: list[tuple[str, str, bool]] = []
        for name, kind, text in node.texts():
            if kind == "str":
                parameters.append((name, escape(text, end), True))
                continue
            if self.official:
                text = _spaced(node[name], _NUMBERS[self.official])
            parameters.append((name, text.replace(end, "\\u003c" + end[1:]), False))
        return parameters

    def body(self, message: Message) -> tuple[Segment, ...]:
        """What stands behind the mark of a turn: a user's text, one result of a call, or an answer with its end."""
        return _body(message, self)


@once_per_object(TOOLS_COST, declared_size)
def _declaration(tools: tuple[Tool, ...], dsml: Dsml) -> tuple[Segment, ...]:
    head = _TOOLS.format(calls=dsml.calls, invoke=dsml.invoke, parameter=dsml.parameter)
    lines = [_official_schema(tool.schema) if dsml.official else tool.schema for tool in tools]
    return *marked(head, _TAGS), "\n".join(lines), _AFTER_SCHEMAS


@once_per_object(1 << 16, lambda dsml: 1)
def _tags_of_a_call(dsml: Dsml) -> tuple[tuple[Segment, ...], ...]:
    """What begins a call and a parameter, up to the name, and what ends a parameter and a call."""
    tags = (f"<｜DSML｜{dsml.invoke} name=", f"<｜DSML｜{dsml.parameter} name=")
    return tuple(marked(tag, _TAGS) for tag in (*tags, f"</｜DSML｜{dsml.parameter}>\n", f"</｜DSML｜{dsml.invoke}>\n"))


@once_per_object(TURNS_COST, size_of)
def _body(message: Message, dsml: Dsml) -> tuple[Segment, ...]:
    if message.role == "tool":
        return "<tool_result>", escape(message.content, _RESULT_END), _RESULT_END
    if message.role == "assistant":
        return message.content, *dsml.block(message.calls), EOS
    return (message.content,)


def _official_schema(schema: str) -> str:
    """A declaration with exactly the members that DeepSeek's encoder prints, in its order."""
    try:
        tool = parse(schema.encode("utf-8", "replace")).as_object()
    except JSONError:
        return schema
    description, parameters = tool.get("description"), tool.get("parameters")
    return (
        f'{{"name": {"null" if (name := tool.get("name")) is None else name.canonical()}, '
        f'"description": {_text("") if description is None else description.canonical()}, '
        f'"parameters": {"{}" if parameters is None else parameters.canonical()}}}'
    )


def _attribute(text: str) -> str:
    if text.isidentifier():
        return text
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _spaced(node: Node, number: Callable[[Node], str]) -> str:
    """JSON with ", " and ": "."""
    match node.kind:
        case "object":
            return "{" + ", ".join(f"{_text(name)}: {_spaced(value, number)}" for name, value in node.items()) + "}"
        case "array":
            return "[" + ", ".join(_spaced(value, number) for value in node) + "]"
        case "str":
            return _text(node.as_str())
        case "int" | "float":
            return number(node)
        case _:
            return node.minified()


def _text(text: str) -> str:
    return dumps(text).decode()


def _shortest(node: Node) -> str:
    """An integer of 64 bits as it is, everything else as a double in Python's spelling."""
    source = node.minified()
    if node.kind == "int" and source != "-0" and len(source) <= 20 and -(2**63) <= int(source) < 2**64:
        return source
    try:
        return repr(node.as_float())
    except JSONError:  # not finite: only the source text is exact
        return source


def _shortest_v4(node: Node) -> str:
    """As `_shortest`, but 0.00001 is written out and an exponent has no leading zero."""
    number = _shortest(node)
    mantissa, _, exponent = number.partition("e-0")
    if exponent == "5":
        sign, digits = ("-", mantissa[1:]) if mantissa[0] == "-" else ("", mantissa)
        return f"{sign}0.0000{digits.replace('.', '')}"
    return f"{mantissa}e-{exponent}" if exponent else number


_NUMBERS = {"V4": _shortest_v4, "V4.1": _shortest}
