"""POST /v1/chat/completions: OpenAI's Chat Completions, as local servers and their clients use it.

Reads a body into a conversation, sampling and limits. What follows is the same for every dialect (`prepare`,
`answer`), and what the client gets is drawn by `chat_answer`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ds4._json import Node, dumps
from ds4.engine.types import SamplingParams
from ds4.errors import RequestError
from ds4.prompt.types import Conversation, Message, Role, ToolCall
from ds4.server.api import common
from ds4.server.api.answer import send
from ds4.server.api.chat_answer import ChatAnswer, new_style
from ds4.server.api.prepare import Limits, Preparer
from ds4.server.api.tools import function_tools, tools_offered

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

_IMAGES = frozenset({"image_url", "input_image", "image"})

_KNOWN = (
    common.SAMPLING_FIELDS
    | common.THINKING_FIELDS
    | {
        "messages",
        "model",
        "tools",
        "tool_choice",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "stream",
        "stream_options",
        "ignore_eos",
        "logprobs",
        "top_logprobs",
        "n",
        "response_format",
        "continue_final_message",
        "add_generation_prompt",
        "timings",
    }
)

_UNSUPPORTED: dict[str, common.Harmless] = {
    "audio": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": ("",),
    "json_schema": (),
    "min_tokens": (0,),
    "stop_token_ids": (),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "web_search_options": (),
}
"""Fields that would change the answer and are not implemented, with the values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A body that was understood. `model` is what the client called it, None when it did not."""

    model: str | None
    conversation: Conversation
    sampling: SamplingParams
    limits: Limits
    stream: bool
    include_usage: bool
    timings: bool
    unused: tuple[str, ...]
    """Names of fields without effect."""


def read_chat(body: Node, defaults: SamplingParams, preparer: Preparer) -> ChatRequest:
    """Everything of a body. Raises RequestError or JSONError with the path of what is wrong."""
    model = body.get_str("model")
    conversation, unused = read_conversation(body, preparer)
    _check_choices(body)
    _check_format(body)
    common.refuse(body, _UNSUPPORTED)
    options = body.get_object("stream_options")
    return ChatRequest(
        model=model,
        conversation=conversation,
        sampling=replace(common.sampling(body, defaults, preparer.vocab_size), logprobs=common.top_logprobs(body)),
        limits=Limits(
            max_tokens=common.max_tokens(body, ("max_tokens", "max_completion_tokens")),
            stop=common.stop_strings(body, "stop"),
            ignore_eos=common.ignore_eos(body),
        ),
        stream=body.get_bool("stream", False),
        include_usage=options is not None and options.get_bool("include_usage", False),
        timings=body.get_bool("timings", False),
        unused=(*unused, *(name for name, _ in common.given(body) if name not in _KNOWN and name not in _UNSUPPORTED)),
    )


def read_conversation(body: Node, preparer: Preparer) -> tuple[Conversation, list[str]]:
    """What decides the prompt, and the names of fields without effect."""
    messages_node = body.get_array("messages")
    if messages_node is None:
        raise RequestError("missing messages", param="messages")
    nodes = list(messages_node)
    if not nodes:
        raise messages_node.error("Expected at least one message, got an empty array")
    unused: list[str] = []
    messages = tuple(_message(node) for node in nodes)
    tools = function_tools(body, unused)
    conversation = Conversation(
        messages,
        tools if tools_offered(body) else (),
        common.thinking_effort(body, body.get_str("model", ""), preparer.syntax, preparer.n_ctx),
        _continues(body, nodes),
    )
    return conversation, unused


def _continues(body: Node, nodes: list[Node]) -> bool:
    """The final assistant message is to be gone on with (decision D8b)."""
    for node in nodes[:-1]:
        if node.get_bool("prefix", False):
            raise node["prefix"].error("Only the last message can be a prefix")
    last = nodes[-1]
    by_message = last.get_bool("prefix", False)
    by_request = body.get_bool("continue_final_message", False)
    if (by_message or by_request) and last["role"].as_str() != "assistant":
        raise last["role"].error("Only an assistant message can be continued")
    if not (by_message or by_request or body.get_bool("add_generation_prompt", True)):
        raise body["add_generation_prompt"].error("add_generation_prompt false needs continue_final_message true")
    return by_message or by_request


def _check_choices(body: Node) -> None:
    if body.get_int("n", 1) != 1:
        raise RequestError(f"n={body.get_int('n')} is not supported: expected 1", param="n")
    modalities = body.get_array("modalities")
    for modality in modalities or ():
        if modality.as_str() != "text":
            raise modality.error(f"Expected `text`, got {modality.as_str()[:40]!r}")


def _check_format(body: Node) -> None:
    node = body.get_object("response_format")
    if node is None:
        return
    kind = common.required(node, "type").as_str()
    if kind != "text":
        raise node["type"].error(f"response_format {kind[:40]!r} is not supported: expected 'text'")


# ---- messages ---------------------------------------------------------------------------------------------------


def _message(node: Node) -> Message:
    name = common.required(node, "role").as_str()
    role = _ROLES.get(name)
    if role is None:
        raise node["role"].error(f"Expected one of {', '.join(_ROLES)}, got {name[:40]!r}")
    content = node.get("content")
    text = "" if content is None else _text(content)
    if role == "assistant":
        return Message(role, text, reasoning=_reasoning(node), calls=_calls(node))
    call_id = node.get_str("tool_call_id") if role == "tool" else None
    return Message(role, text, call_id=call_id)


def _text(node: Node) -> str:
    """Content: a string, or parts put together without separator; a list and a string with equal text are equal."""
    if node.kind == "str":
        return node.as_str()
    if node.kind != "array":
        raise node.error(f"Expected `str` or `array`, got `{node.kind}`")
    return "".join([_part(part) for part in node])


def _part(part: Node) -> str:
    if part.kind == "str":
        return part.as_str()
    kind = part.as_object().get_str("type", "text")
    if kind in _IMAGES:
        raise part["type"].error("image input is not supported by this model")
    if kind == "refusal":
        return part.get_str("refusal", "")
    text = part.get("text")
    if text is not None:
        return _text(text)
    if "text" in part:
        return ""
    raise part.error(f"Content of type {kind[:40]!r} is not supported: expected `text`")


def _reasoning(node: Node) -> str:
    """Thinking of a former turn, under the names that clients replay it with."""
    for name in ("reasoning_content", "reasoning"):
        member = node.get(name)
        if member is not None:
            return _text(member)
    return ""


def _calls(node: Node) -> tuple[ToolCall, ...]:
    calls = [_call(item) for item in node.get_array("tool_calls") or ()]
    legacy = node.get_object("function_call")
    if legacy is not None:
        calls.append(ToolCall("", common.required(legacy, "name").as_str(), _arguments(legacy, "arguments")))
    return tuple(calls)


def _call(item: Node) -> ToolCall:
    call_id = item.get_str("id", "")
    custom = item.get_object("custom")
    if custom is not None:
        return ToolCall(call_id, common.required(custom, "name").as_str(), _arguments(custom, "input"))
    function = common.required(item, "function")
    return ToolCall(call_id, common.required(function, "name").as_str(), _arguments(function, "arguments"))


def _arguments(node: Node, name: str) -> str:
    """Arguments as the client sent them, whatever they are: a string need not be JSON, a value need not be a string."""
    value = node.get(name)
    if value is None:
        return "{}"
    return value.as_str() if value.kind == "str" else value.minified()


# ---- the endpoint -----------------------------------------------------------------------------------------------


async def chat_completions(service: Service, request: Request, responder: Responder) -> None:
    """Answers one request. Errors before the headers are raised; the router draws them."""
    body = service.body(request)
    chat = read_chat(body, service.config.sampling, service.preparer)
    service.unknown.note("chat", chat.unused)
    prompt = await service.prompt(chat.conversation)
    model = service.model_id if chat.model is None else chat.model
    style = new_style(
        model,
        include_usage=chat.include_usage,
        timings=chat.timings or service.config.timings,
        logprobs=chat.sampling.logprobs is not None,
    )
    job = service.preparer.request(
        style.id,
        "chat",
        model,
        prompt,
        chat.conversation,
        chat.sampling,
        chat.limits,
        param="messages",
        received=request.received,
    )
    answer = ChatAnswer(style, service.token_bytes, service.remember_call)
    await send(service, job, answer, responder, stream=chat.stream)


async def apply_template(service: Service, request: Request, responder: Responder) -> None:
    """POST /apply-template: the prompt that a chat body renders to, as text and as tokens."""
    conversation, _ = read_conversation(service.body(request), service.preparer)
    prompt = await service.prompt(conversation)
    responder.send(200, dumps({"prompt": prompt.rendered.text, "n_tokens": len(prompt.tokens)}) + b"\n")
