"""POST /v1/chat/completions: OpenAI's Chat Completions, as local servers and their clients use it.

Reads a body into a conversation, sampling and limits. What follows is the same for every dialect (`prepare`,
`answer`), and what the client gets is drawn by `chat_answer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ds4._json import Node, Spans, dumps
from ds4.engine.types import SamplingParams
from ds4.errors import RequestError
from ds4.prompt.types import Conversation, Message, Role, ToolCall
from ds4.server.api import common, fields
from ds4.server.api.again import once_more
from ds4.server.api.chat_answer import ChatAnswer
from ds4.server.api.chat_tools import ChatTools, chat_tools
from ds4.server.api.choices_answer import new_style
from ds4.server.api.content import arguments_text, result_text, text_of
from ds4.server.api.custom_tools import custom_arguments
from ds4.server.api.delivery import send
from ds4.server.api.fields import FieldTable
from ds4.server.api.prepare import Limits, Preparer
from ds4.server.api.structure import Structure, constrain, read_structure, read_tool_choice

if TYPE_CHECKING:
    from ds4.server.api.service import Service
    from ds4.server.http import Request, Responder

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

FIELDS = FieldTable(
    "chat",
    (
        fields.required("messages", fields.messages(*_ROLES), "at least one; see below"),
        fields.MODEL,
        fields.accepted(
            "max_tokens", fields.INTEGER, "`--tokens`", f"the later one in the body counts; {fields.MAX_TOKENS_NOTE}"
        ),
        fields.accepted("max_completion_tokens", fields.INTEGER, "`--tokens`", "another name of `max_tokens`"),
        *fields.SAMPLING,
        fields.accepted("stop", fields.STOP_SCHEMA, "none", fields.STOP_NOTE),
        fields.IGNORE_EOS,
        fields.accepted("logprobs", fields.BOOLEAN, "false"),
        fields.accepted("top_logprobs", fields.INTEGER, "0", "0 to 20; what cannot happen has -9999.0"),
        fields.N,
        fields.STREAM,
        fields.STREAM_OPTIONS,
        fields.TIMINGS,
        fields.accepted("tools", fields.ARRAY, "none", "functions and custom tools; hosted ones are left out"),
        fields.accepted(
            "tool_choice",
            fields.one_of(fields.STRING, fields.OBJECT),
            "`auto`",
            "`none` hides them; `required` or a named tool makes the answer a call; others are 400",
        ),
        *fields.THINKING,
        fields.accepted("reasoning", fields.OBJECT, "", "`effort` in it counts"),
        fields.accepted("output_config", fields.OBJECT, "", "`effort` in it counts"),
        fields.accepted(
            "continue_final_message",
            fields.BOOLEAN,
            "false",
            "goes on with the last assistant message instead of opening a turn; so does `messages[-1].prefix`",
        ),
        fields.accepted("add_generation_prompt", fields.BOOLEAN, "true", "false only beside `continue_final_message`"),
        fields.accepted("response_format", fields.OBJECT, "text", fields.FORMAT_NOTE),
        fields.accepted("modalities", fields.array_of(fields.STRING), "text", "others are 400"),
        fields.refused("audio"),
        fields.refused("functions", "use `tools`"),
        fields.refused("function_call", harmless=("none", "auto")),
        *fields.CONSTRAINTS,
        *fields.ENDS,
        fields.refused("echo", harmless=(False,)),
        fields.refused("web_search_options"),
        fields.ignored("store"),
        fields.ignored("metadata"),
        fields.ignored("user"),
        fields.accepted("parallel_tool_calls", fields.BOOLEAN, "true", "false holds where calls are constrained"),
        fields.ignored("prompt_cache_key", "every prompt is looked up in the caches"),
        fields.ignored("service_tier"),
        fields.ignored("prediction"),
    ),
)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A body that was understood. `model` is what the client called it, None when it did not."""

    model: str | None
    conversation: Conversation
    tools: ChatTools
    sampling: SamplingParams
    limits: Limits
    structure: Structure
    choices: int
    stream: bool
    include_usage: bool
    timings: bool
    unused: tuple[str, ...]
    """Names of fields without effect."""


def read_chat(body: Node, defaults: SamplingParams, preparer: Preparer, slots: int) -> ChatRequest:
    """Everything of a body. Raises RequestError or JSONError with the path of what is wrong."""
    without_effect = FIELDS.check(body)
    model = body.get_str("model")
    conversation, tools, unused = read_conversation(body, preparer)
    _check_modalities(body)
    options = body.get_object("stream_options")
    return ChatRequest(
        model=model,
        conversation=conversation,
        tools=tools,
        sampling=common.sampling(body, defaults, preparer.vocab_size, logprobs=common.top_logprobs(body)),
        limits=Limits(
            max_tokens=common.max_tokens(body, ("max_tokens", "max_completion_tokens")),
            stop=common.stop_strings(body, "stop"),
            ignore_eos=common.ignore_eos(body),
        ),
        structure=read_structure(
            body, body.get_object("response_format"), conversation, read_tool_choice(body), tools.raw_inputs
        ),
        choices=common.choices(body, slots),
        stream=body.get_bool("stream", False),
        include_usage=options is not None and options.get_bool("include_usage", False),
        timings=body.get_bool("timings", False),
        unused=(*unused, *without_effect),
    )


def read_conversation(body: Node, preparer: Preparer) -> tuple[Conversation, ChatTools, list[str]]:
    """What decides the prompt, the tools of the body, and the names of fields without effect."""
    messages_node = body.get_array("messages")
    if messages_node is None:
        raise RequestError("missing messages", param="messages")
    if len(messages_node) == 0:
        raise messages_node.error("Expected at least one message, got an empty array")
    unused: list[str] = []
    read = _messages.each(messages_node, _read_message, 4)
    messages = tuple([message for message, _ in read])
    tools = chat_tools(body, unused)
    conversation = Conversation(
        messages,
        tools.tools if read_tool_choice(body).mode != "none" else (),
        common.thinking_effort(body, body.get_str("model", ""), preparer.syntax, preparer.n_ctx),
        _continues(body, messages_node, [prefix for _, prefix in read]),
    )
    return conversation, tools, unused


def _continues(body: Node, messages: Node, prefixes: list[bool]) -> bool:
    """The final assistant message is to be gone on with (decision D8b)."""
    if True in prefixes[:-1]:
        raise messages[prefixes.index(True)]["prefix"].error("Only the last message can be a prefix")
    by_message = prefixes[-1]
    by_request = body.get_bool("continue_final_message", False)
    if by_message or by_request:
        role = messages[-1]["role"]
        if role.as_str() != "assistant":
            raise role.error("Only an assistant message can be continued")
    if not (by_message or by_request or body.get_bool("add_generation_prompt", True)):
        raise body["add_generation_prompt"].error("add_generation_prompt false needs continue_final_message true")
    return by_message or by_request


def _check_modalities(body: Node) -> None:
    modalities = body.get_array("modalities")
    for modality in modalities or ():
        if modality.as_str() != "text":
            raise modality.error(f"Expected `text`, got {modality.as_str()[:40]!r}")


# ---- messages ---------------------------------------------------------------------------------------------------


_messages = Spans(128 << 20)
"""A message of the history is read once."""


def _read_message(node: Node) -> tuple[Message, bool]:
    """With its `prefix`."""
    return _message(node), node.get_bool("prefix", False)


def _message(node: Node) -> Message:
    name = common.required(node, "role").as_str()
    role = _ROLES.get(name)
    if role is None:
        raise node["role"].error(f"Expected one of {', '.join(_ROLES)}, got {name[:40]!r}")
    content = node.get("content")
    if role == "tool":
        common.once(node, "tool_call_id")
        # Parts of a result may be of any kind, as in the other dialects.
        is_parts = content is not None and content.kind == "array"
        result = result_text(content) if is_parts else _text(content)
        return Message(role, result, call_id=node.get_str("tool_call_id"))
    text = _text(content)
    if role == "assistant":
        return Message(role, text, reasoning=_reasoning(node), calls=_calls(node))
    return Message(role, text)


def _text(content: Node | None) -> str:
    """A string is not remembered for itself: the whole message is."""
    return content.as_str() if content is not None and content.kind == "str" else text_of(content)


def _reasoning(node: Node) -> str:
    """Thinking of a former turn, under the names that clients replay it with."""
    for name in ("reasoning_content", "reasoning"):
        member = node.get(name)
        if member is not None:
            return text_of(member)
    return ""


def _calls(node: Node) -> tuple[ToolCall, ...]:
    calls = [_call(item) for item in node.get_array("tool_calls") or ()]
    legacy = node.get_object("function_call")
    if legacy is not None:
        calls.append(ToolCall("", common.required(legacy, "name").as_str(), arguments_text(legacy.get("arguments"))))
    return tuple(calls)


def _call(item: Node) -> ToolCall:
    call_id = item.get_str("id", "")
    custom = item.get_object("custom")
    if custom is not None:
        name = common.required(custom, "name").as_str()
        return ToolCall(call_id, name, custom_arguments(custom.get_str("input", "")))
    function = common.required(item, "function")
    return ToolCall(call_id, common.required(function, "name").as_str(), arguments_text(function.get("arguments")))


# ---- the endpoint -----------------------------------------------------------------------------------------------


async def chat_completions(service: Service, request: Request, responder: Responder) -> None:
    """A chat answer (OpenAI Chat Completions), whole or streamed."""
    body = service.body(request)
    chat = read_chat(body, service.config.sampling, service.preparer, service.n_slots)
    service.unknown.note(FIELDS.where, chat.unused)
    constraint = await constrain(service.preparer, chat.structure)
    prompt = await service.prompt(chat.conversation)
    model = service.model_id if chat.model is None else chat.model
    style = new_style(
        "chatcmpl",
        model,
        choices=chat.choices,
        include_usage=chat.include_usage,
        timings=chat.timings or service.config.timings,
        logprobs=chat.sampling.logprobs is not None,
    )
    jobs = [
        service.preparer.request(
            common.choice_id(style.id, choice, chat.choices),
            "chat",
            model,
            prompt,
            chat.conversation,
            common.choice_sampling(chat.sampling, choice),
            chat.limits,
            param="messages",
            constraint=constraint,
            received=request.received,
        )
        for choice in range(chat.choices)
    ]
    answer = partial(ChatAnswer, style, service.token_bytes, service.remember_call, chat.tools.customs)
    again = None if chat.stream else once_more(service.preparer, chat.conversation, prompt)
    await send(service, jobs, answer, responder, stream=chat.stream, again=again)


async def apply_template(service: Service, request: Request, responder: Responder) -> None:
    """The prompt that a chat body renders to, as text and as tokens."""
    chat = read_chat(service.body(request), service.config.sampling, service.preparer, service.n_slots)
    prompt = await service.prompt(chat.conversation)
    responder.send(200, dumps({"prompt": prompt.rendered.text, "n_tokens": len(prompt.tokens)}) + b"\n")
