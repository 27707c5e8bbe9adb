"""Qwen's tool syntax as prompt segments: the declaration of tools, calls in the history, results of calls.

The wording is what Qwen3-Coder and its successors were trained on (the chat template in their model files). Models
without a tool syntax of their own are given it too, so that one output parser serves both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ds4.bounded import once_per_object
from ds4.prompt.arguments import argument_members
from ds4.prompt.draft import TOOLS_COST, TURNS_COST, declared_size, marked, sampled_block, size_of
from ds4.prompt.escaping import escape
from ds4.prompt.history import replayed
from ds4.prompt.schemas import offered_schemas, schemas_by_name
from ds4.prompt.types import Message, Segment, Tool, ToolCall

_BEFORE_SCHEMAS = """# Tools

You have access to the following functions:

<tools>
"""

_AFTER_SCHEMAS = """
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>"""

_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_PARAMETER_END, _RESULT_END = "</parameter>", "</tool_response>"
# The value of a parameter in a sampled block.
_PAYLOAD = re.compile(r"<parameter=[^>]*>(?P<value>.*?)(?=</parameter>|\Z)", re.DOTALL)


@once_per_object(TOOLS_COST, declared_size)
def declaration(tools: tuple[Tool, ...]) -> tuple[Segment, ...]:
    """What tells the model its tools, for the system turn, without a final newline."""
    lines = "\n".join(f'{{"type": "function", "function": {schema}}}' for schema in offered_schemas(tools))
    return _BEFORE_SCHEMAS, lines, *marked(_AFTER_SCHEMAS, _TAGS)


def calls_block(calls: Sequence[ToolCall], tools: tuple[Tool, ...], *, after_text: bool) -> list[Segment]:
    """The calls of one assistant turn; `after_text` says that the turn has content before them.

    A turn whose sampled block is known is replayed byte for byte, its leading white space included. Otherwise
    arguments stand in the order of the declared schema (`argument_members`), strings raw and all else as JSON.
    """
    if not calls:
        return []
    raw = replayed(calls)
    if raw is not None:
        return list(sampled_block(raw, _PAYLOAD, _TAGS))
    schemas = schemas_by_name(tools)
    block: list[Segment] = ["\n\n"] if after_text else []
    for i, call in enumerate(calls):
        block += marked("\n<tool_call>" if i else "<tool_call>", _TAGS)
        block += _call(call.name, call.arguments, schemas.get(call.name))
    return block


def _call(name: str, arguments: str, schema: str | None) -> tuple[Segment, ...]:
    """One call inside its tag, with the tag's end."""
    members = argument_members(arguments, schema, _PARAMETER_END)
    parameters = [f"<parameter={_name(key)}>\n{value}\n</parameter>\n" for key, value in members]
    return f"\n<function={_name(name)}>\n", *parameters, "</function>\n", *marked("</tool_call>", _TAGS)


def _name(text: str) -> str:
    """A name cannot leave its tag."""
    return text.replace(">", "&gt;")


def results_block(results: Iterable[Message]) -> list[Segment]:
    """The results of one run of tool messages, as they stand in a user turn."""
    block: list[Segment] = []
    for i, message in enumerate(results):
        block += _result(message, i == 0)
    return block


@once_per_object(TURNS_COST, size_of)
def _result(message: Message, first: bool) -> tuple[Segment, ...]:
    before = marked("<tool_response>" if first else "\n<tool_response>", _TAGS)
    return *before, "\n", escape(message.content, _RESULT_END), "\n", *marked(_RESULT_END, _TAGS)
