"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages, as its SDKs and agents use it.

Reads a body into a conversation, sampling and limits. What follows is the same for every dialect (`prepare`,
`answer`), and what the client gets is drawn by `messages_answer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ds4._json import Node, Spans, dumps
from ds4.engine.types import SamplingParams
from ds4.errors import RequestError
from ds4.prompt.types import Conversation, Message, ToolCall
from ds4.server.api import common, fields
from ds4.server.api.again import once_more
from ds4.server.api.content import NO_IMAGES, arguments_text, part_text, result_text, text_of
from ds4.server.api.delivery import send
from ds4.server.api.fields import FieldTable
from ds4.server.api.ids import new_id
from ds4.server.api.live import LiveTurn, LiveTurns
from ds4.server.api.messages_answer import MessagesAnswer
from ds4.server.api.prepare import Limits, Preparer
from ds4.server.api.structure import Structure, constrain, read_structure, read_tool_choice
from ds4.server.api.tools import anthropic_tools

if TYPE_CHECKING:
    from ds4.server.api.service import Service
    from ds4.server.http import Request, Responder

_ROLES = ("user", "assistant", "system")

_VOLATILE = "x-anthropic-"
"""Beginning of system parts that are headers of a client: they differ between its conversations."""

_PROMPT_FIELDS = (
    fields.required("messages", fields.messages(*_ROLES), "at least one; see below"),
    fields.MODEL,
    fields.accepted("system", fields.one_of(fields.STRING, fields.ARRAY), "none", "a text, or parts with `text`"),
    fields.accepted("tools", fields.ARRAY, "none", "tools with `input_schema`; the vendor's own are left out"),
    fields.accepted(
        "tool_choice",
        fields.one_of(fields.STRING, fields.OBJECT),
        "`auto`",
        "`none` hides the tools; `any` or a named `tool` makes the answer a call",
    ),
    fields.accepted("parallel_tool_calls", fields.BOOLEAN, "true", "false holds where calls are constrained"),
    *fields.THINKING,
    fields.accepted("output_config", fields.OBJECT, "", f"`effort` in it counts; `format`: {fields.FORMAT_NOTE}"),
    fields.accepted("reasoning", fields.OBJECT, "", "`effort` in it counts"),
)

_METADATA = (
    fields.ignored("metadata"),
    fields.ignored("cache_control", "every prompt is looked up in the caches"),
    fields.ignored("context_management"),
    fields.ignored("container"),
    fields.ignored("mcp_servers"),
    fields.ignored("betas"),
    fields.ignored("service_tier"),
)

FIELDS = FieldTable(
    "messages",
    (
        *_PROMPT_FIELDS,
        fields.accepted("max_tokens", fields.INTEGER, "`--tokens`", fields.MAX_TOKENS_NOTE),
        *fields.SAMPLING,
        fields.accepted("stop_sequences", fields.STOP_SCHEMA, "none", fields.STOP_NOTE),
        fields.STREAM,
        fields.TIMINGS,
        *fields.CONSTRAINTS,
        *_METADATA,
    ),
)

COUNT_FIELDS = FieldTable("count_tokens", (*_PROMPT_FIELDS, *_METADATA))


@dataclass(frozen=True, slots=True)
class MessagesPrompt:
    """What decides the prompt. `system` is the request's own system text; `alone`: results came without their calls."""

    system: str | None
    messages: tuple[Message, ...]
    conversation: Conversation
    structure: Structure
    alone: bool = False


def read_prompt(body: Node, preparer: Preparer, unused: list[str], live: LiveTurns | None = None) -> MessagesPrompt:
    """Everything that decides the prompt. `live` None: results of calls are taken as they are.

    Raises RequestError or JSONError with the path of what is wrong.
    """
    nodes = body.get_array("messages")
    if nodes is None:
        raise RequestError("missing messages", param="messages")
    if len(nodes) == 0:
        raise nodes.error("Expected at least one message, got an empty array")
    system = _system(body.get("system"))
    read = _known.each(nodes, _read_message, 4)
    messages = tuple([message for turns, _ in read for message in turns])
    for _, without_effect in read:
        unused += without_effect
    tools = anthropic_tools(body, unused)
    turn = None
    if live is not None:
        turn = _continued(messages, live)
        if turn is not None:
            system = turn.system if system is None else system
            messages = (*turn.messages, *messages)
            tools = tools or turn.tools
    choice = read_tool_choice(body)
    output = body.get_object("output_config")
    last = messages[-1] if messages else None
    conversation = Conversation(
        messages if system is None else (Message("system", system), *messages),
        tools if choice.mode != "none" else (),
        common.thinking_effort(body, body.get_str("model", ""), preparer.syntax, preparer.n_ctx),
        continue_final=last is not None and last.role == "assistant" and not last.calls,
    )
    structure = read_structure(body, None if output is None else output.get_object("format"), conversation, choice)
    return MessagesPrompt(system, messages, conversation, structure, turn is not None)


def _continued(messages: Iterable[Message], live: LiveTurns) -> LiveTurn | None:
    """The turn that results without their calls belong to.

    Raises RequestError (400) when it is not known: a result without its call means nothing to the model.
    """
    known: set[str] = set()
    orphans: dict[str, None] = {}
    for message in messages:
        known.update(call.id for call in message.calls)
        if message.role == "tool" and message.call_id not in known:
            orphans[message.call_id or ""] = None
    if not orphans:
        return None
    turn = live.of_calls(orphans) if not known else None
    if turn is None:
        raise RequestError(
            f"Anthropic continuation state is not available for tool_use_id {next(iter(orphans))[:80]}; "
            "retry by replaying the full messages history",
            param="messages",
        )
    return turn


def _system(node: Node | None) -> str | None:
    """System text: parts stand on lines of their own; headers of a client and empty parts are left out."""
    if node is None:
        return None
    parts = [part_text(part) for part in node] if node.kind == "array" else [text_of(node)]
    text = ""
    for part in parts:
        if part and not part.startswith(_VOLATILE):
            text += part if not text or text.endswith("\n") else f"\n{part}"
    return text or None


# ---- messages ---------------------------------------------------------------------------------------------------


_known = Spans(128 << 20)
"""A message of the history is read once."""


def _read_message(node: Node) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The turns of a message, and what of it has no effect."""
    unused: list[str] = []
    return tuple(_messages(node, unused)), tuple(unused)


def _messages(node: Node, unused: list[str]) -> list[Message]:
    role = common.required(node, "role").as_str()
    common.once(node, "content")
    content = node.get("content")
    if role not in _ROLES:
        raise node["role"].error(f"Expected a role of 'user' or 'assistant' (or 'system'), got {role[:40]!r}")
    if role == "system":
        return [Message("system", text_of(content))]
    if content is None or content.kind == "str":
        return [Message("assistant" if role == "assistant" else "user", text_of(content))]
    blocks = list(content.as_array())
    return [_assistant(blocks, unused)] if role == "assistant" else _user(blocks)


def _assistant(blocks: list[Node], unused: list[str]) -> Message:
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        kind = "text" if block.kind == "str" else block.as_object().get_str("type", "text")
        if kind == "tool_use":
            name = common.required(block, "name").as_str()
            calls.append(ToolCall(block.get_str("id", ""), name, arguments_text(block.get("input"))))
        elif kind == "thinking":
            reasoning.append(block.get_str("thinking", ""))
        elif kind == "text" or "text" in block:
            text.append(part_text(block))
        else:
            # Blocks of the vendor's own tools and encrypted thinking: the model was never shown their like.
            unused.append(f"messages.content.{kind[:40]}")
    return Message("assistant", "".join(text), "".join(reasoning), tuple(calls))


def _user(blocks: list[Node]) -> list[Message]:
    """Results of calls become messages of their own, texts between them user turns, all in order and joined."""
    messages: list[Message] = []
    text: list[str] = []

    def flush() -> None:
        if text:
            messages.append(Message("user", "".join(text), joined=bool(messages)))
            text.clear()

    for block in blocks:
        kind = "text" if block.kind == "str" else block.as_object().get_str("type", "text")
        if kind == "tool_result":
            flush()
            call_id = common.required(block, "tool_use_id").as_str()
            result = result_text(block.get("content"))
            messages.append(Message("tool", result, call_id=call_id, joined=bool(messages)))
        elif kind == "image":
            raise block["type"].error(NO_IMAGES)
        else:
            text.append(part_text(block))
    flush()
    return messages or [Message("user")]


# ---- the endpoints ----------------------------------------------------------------------------------------------


async def messages(service: Service, request: Request, responder: Responder) -> None:
    """A chat answer (Anthropic Messages), whole or streamed."""
    body = service.body(request)
    unused = FIELDS.check(body)
    wanted = read_prompt(body, service.preparer, unused, service.live)
    sampling: SamplingParams = common.sampling(body, service.config.sampling, service.preparer.vocab_size)
    limits = Limits(common.max_tokens(body, ("max_tokens",)), common.stop_strings(body, "stop_sequences"))
    stream = body.get_bool("stream", False)
    timings = body.get_bool("timings", False) or service.config.timings
    service.unknown.note(FIELDS.where, unused)
    constraint = await constrain(service.preparer, wanted.structure)
    prompt = await service.prompt(wanted.conversation)
    id = new_id("msg")
    model = body.get_str("model", service.model_id)
    job = service.preparer.request(
        id,
        "messages",
        model,
        prompt,
        wanted.conversation,
        sampling,
        limits,
        param=None,
        constraint=constraint,
        received=request.received,
        continues=service.live.continuation(
            "anthropic-tool-output", service.preparer, wanted.conversation, required=wanted.alone
        ),
    )

    def finished(turn: Message) -> None:
        if turn.calls:
            tools = wanted.conversation.tools
            service.live.remember(id, LiveTurn(wanted.system, (*wanted.messages, turn), tools))

    answer = partial(MessagesAnswer, id, model, len(prompt.tokens), timings, service.remember_call, finished)
    again = None if stream else once_more(service.preparer, wanted.conversation, prompt)
    await send(service, [job], answer, responder, stream=stream, again=again)


async def count_tokens(service: Service, request: Request, responder: Responder) -> None:
    """What the prompt of a Messages body costs: `{"input_tokens": N}`."""
    body = service.body(request)
    unused = COUNT_FIELDS.check(body)
    wanted = read_prompt(body, service.preparer, unused)
    service.unknown.note(COUNT_FIELDS.where, unused)
    prompt = await service.prompt(wanted.conversation)
    responder.send(200, dumps({"input_tokens": len(prompt.tokens)}) + b"\n")
