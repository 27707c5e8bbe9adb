"""Qwen's tool syntax as prompt text: the declaration of tools, calls in the history, results of calls.

The wording is what Qwen3-Coder and its successors were trained on (the chat template in their model files). Models
without a tool syntax of their own are given it too, so that one output parser serves both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds4.prompt.arguments import argument_members
from ds4.prompt.escaping import escape
from ds4.prompt.types import Tool, ToolCall

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

RESULT_END = "</tool_response>"


def tools_text(tools: Iterable[Tool]) -> str:
    """The declaration of `tools` for the system turn, without a final newline."""
    lines = "\n".join(f'{{"type": "function", "function": {tool.schema}}}' for tool in tools)
    return f"{_BEFORE_SCHEMAS}{lines}{_AFTER_SCHEMAS}"


def calls_text(calls: Sequence[ToolCall], tools: Sequence[Tool], *, after_text: bool) -> str:
    """The calls of one assistant turn; `after_text` says that the turn has content before them.

    A turn whose sampled block is known is replayed byte for byte, its leading white space included. Otherwise
    arguments stand in the order of the declared schema (`argument_members`), strings raw and all else as JSON.
    """
    if not calls:
        return ""
    raw = calls[0].raw
    if raw is not None and all(call.raw == raw for call in calls):
        return raw.decode("utf-8", "replace")
    schemas = {tool.name: tool.schema for tool in tools}
    blocks = "\n".join(_call_text(call, schemas.get(call.name)) for call in calls)
    return f"\n\n{blocks}" if after_text else blocks


def _call_text(call: ToolCall, schema: str | None) -> str:
    members = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in argument_members(call.arguments, schema)
    )
    return f"<tool_call>\n<function={call.name}>\n{members}</function>\n</tool_call>"


def results_text(results: Iterable[str]) -> str:
    """The results of one run of tool messages, as they stand in a user turn."""
    return "\n".join(f"<tool_response>\n{escape(result, RESULT_END)}\n{RESULT_END}" for result in results)
