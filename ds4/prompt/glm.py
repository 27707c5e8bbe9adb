"""The GLM 5 renderer.

    prompt    = [gMASK]<sop> [<|system|> effort] [<|system|> tools] (<|system|> text)* turns header
    user      = <|user|> content
    results   = <|observation|> once per run, then <tool_response>...</tool_response> each
    assistant = <|assistant|> (<think> reasoning </think> | <think></think>) content calls
    header    = <|assistant|> (<think> | <think></think>)

Turns have no end mark: the next role token ends them. System texts are hoisted, assistant text is trimmed. Reasoning
of former turns is kept where tools are or were used. The wording is that of the chat template in the model files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ds4.bounded import once_per_object
from ds4.prompt.arguments import argument_members
from ds4.prompt.draft import (
    TOOLS_COST,
    TURNS_COST,
    WHITE_SPACE,
    Draft,
    declared_size,
    marked,
    sampled_block,
    size_of,
)
from ds4.prompt.effort import effort_name
from ds4.prompt.escaping import escape
from ds4.prompt.history import has_tool_context, is_user_like, last_user_like, replayed, results_first, split_prefix
from ds4.prompt.schemas import offered_schemas, schemas_by_name
from ds4.prompt.types import Conversation, Message, RenderedPrompt, Segment, Special, Tool, ToolCall

_MASK = Special("[gMASK]")
_START = Special("<sop>")
_SYSTEM = Special("<|system|>")
_USER = Special("<|user|>")
_ASSISTANT = Special("<|assistant|>")
_OBSERVATION = Special("<|observation|>")
_THINK = Special("<think>", optional=True)
_END_THINK = Special("</think>", optional=True)

_TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
)
_KEY_END, _VALUE_END, _RESULT_END = "</arg_key>", "</arg_value>", "</tool_response>"
# A name or value in a sampled block.
_PAYLOAD = re.compile(r"<arg_(key|value)>(?P<value>.*?)(?=</arg_\1>|\Z)", re.DOTALL)

_BEFORE_SCHEMAS = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>

"""

_AFTER_SCHEMAS = """</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}\
</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"""


class GlmRenderer:
    """Implements `ds4.prompt.types.Renderer`."""

    syntax = "glm"

    def render(self, conversation: Conversation) -> RenderedPrompt:
        draft = Draft(_MASK, _START)
        effort = effort_name(conversation.effort)
        if effort != "none":
            draft.add(_SYSTEM, f"Reasoning Effort: {'Max' if effort == 'max' else 'High'}")
        if conversation.tools:
            draft.add(_SYSTEM, *declaration(conversation.tools))
        for message in conversation.messages:
            if message.role == "system":
                draft.add(_SYSTEM, message.content)
        return _turns(draft, conversation, conversation.messages)

    def render_tail(self, messages: Sequence[Message], conversation: Conversation) -> RenderedPrompt:
        return _turns(Draft(), conversation, messages)


@once_per_object(TOOLS_COST, declared_size)
def declaration(tools: tuple[Tool, ...]) -> tuple[Segment, ...]:
    """What tells the model its tools."""
    schemas = "".join(f"{schema}\n\n\n" for schema in offered_schemas(tools)) or "\n"
    return _BEFORE_SCHEMAS, schemas, *marked(_AFTER_SCHEMAS, _TAGS)


def _turns(draft: Draft, conversation: Conversation, messages: Sequence[Message]) -> RenderedPrompt:
    thinking = effort_name(conversation.effort) != "none"
    turns = results_first([message for message in messages if message.role != "system"])
    turns, prefix = split_prefix(turns, conversation)
    first_kept = 0 if has_tool_context(conversation, turns) else last_user_like(turns) + 1
    before = ""
    for i, message in enumerate(turns):
        if message.role == "tool":
            if before != "tool":
                draft.add(_OBSERVATION)
            draft.add(*_result(message))
        elif is_user_like(message):
            draft.add(_USER, message.content)
        else:
            draft.add(*_answer(message, thinking and i >= first_kept, conversation.tools))
        before = message.role
    return _header(draft, conversation, prefix, thinking=thinking)


@once_per_object(TURNS_COST, size_of)
def _result(message: Message) -> tuple[Segment, ...]:
    tags = marked("<tool_response>", _TAGS), marked(_RESULT_END, _TAGS)
    return *tags[0], escape(message.content, _RESULT_END), *tags[1]


@once_per_object(TURNS_COST, size_of)
def _answer(message: Message, with_reasoning: bool, tools: tuple[Tool, ...]) -> tuple[Segment, ...]:
    content = message.content.strip(WHITE_SPACE)
    thought: tuple[Segment, ...] = ()
    if not content.startswith((_THINK.text, _END_THINK.text)):
        thought = _THINK, message.reasoning if with_reasoning else "", _END_THINK
    return _ASSISTANT, *thought, content, *calls_block(message.calls, tools)


def _header(draft: Draft, conversation: Conversation, prefix: Message | None, *, thinking: bool) -> RenderedPrompt:
    """Opens the assistant turn to generate, or the one to go on with, whose reasoning is open until content follows."""
    draft.add(_ASSISTANT, _THINK)
    if prefix is None:
        draft.add("" if thinking else _END_THINK)
        return draft.rendered(thinking=thinking)
    content = prefix.content.lstrip(WHITE_SPACE)
    answering = bool(content or prefix.calls)
    draft.add(prefix.reasoning if thinking else "")
    if answering or not thinking:
        draft.add(_END_THINK)
    draft.add(content, *calls_block(prefix.calls, conversation.tools))
    return draft.rendered(thinking=thinking and not answering)


def calls_block(calls: Sequence[ToolCall], tools: tuple[Tool, ...]) -> list[Segment]:
    """The calls of one assistant turn, one behind the other; nothing without calls.

    A turn whose sampled block is known is replayed byte for byte. Otherwise arguments stand in the order of the
    declared schema (`argument_members`), strings raw and all else as JSON.
    """
    if not calls:
        return []
    raw = replayed(calls)
    if raw is not None:
        return list(sampled_block(raw, _PAYLOAD, _TAGS))
    schemas = schemas_by_name(tools)
    block: list[Segment] = []
    for call in calls:
        block += _call(call.name, call.arguments, schemas.get(call.name))
    return block


def _call(name: str, arguments: str, schema: str | None) -> tuple[Segment, ...]:
    call: list[Segment] = [*marked("<tool_call>", _TAGS), name.replace("<", "&lt;")]
    for key, value in argument_members(arguments, schema, _VALUE_END):
        call += [*marked("<arg_key>", _TAGS), escape(key, _KEY_END), *marked("</arg_key><arg_value>", _TAGS)]
        call += [value, *marked(_VALUE_END, _TAGS)]
    return *call, *marked("</tool_call>", _TAGS)
