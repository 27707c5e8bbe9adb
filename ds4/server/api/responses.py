"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's Responses, as its SDKs and agents use it.

Reads a body into a conversation, sampling and limits. Input items are read by `responses_input`, tools by
`responses_tools`, and what the client gets is drawn by `responses_answer`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ds4._json import Node, dumps
from ds4.errors import RequestError
from ds4.prompt.types import Conversation, Message
from ds4.server.api import common, fields
from ds4.server.api.again import once_more
from ds4.server.api.delivery import send
from ds4.server.api.fields import FieldTable
from ds4.server.api.ids import new_id
from ds4.server.api.live import LiveTurn, LiveTurns
from ds4.server.api.prepare import Limits, Preparer
from ds4.server.api.responses_answer import ResponsesAnswer, ResponsesStyle
from ds4.server.api.responses_input import InputReader
from ds4.server.api.responses_tools import ToolTable
from ds4.server.api.structure import Structure, constrain, read_structure, read_tool_choice

if TYPE_CHECKING:
    from ds4.engine.types import SamplingParams
    from ds4.server.api.service import Service
    from ds4.server.http import Request, Responder

_SUMMARIES = ("auto", "concise", "detailed")

_PROMPT_FIELDS = (
    fields.required("input", fields.one_of(fields.STRING, fields.ARRAY), "a text, or items; see below"),
    fields.MODEL,
    fields.accepted("instructions", fields.STRING, "none", "system text in front of everything"),
    fields.accepted(
        "tools", fields.ARRAY, "none", "`function`, `custom`, `namespace`, `tool_search`; hosted ones are left out"
    ),
    fields.accepted(
        "tool_choice",
        fields.one_of(fields.STRING, fields.OBJECT),
        "`auto`",
        "`none` hides the tools; `required` or a named tool makes the answer a call; others are 400",
    ),
    fields.accepted(
        "reasoning",
        fields.OBJECT,
        "",
        "`effort` as `reasoning_effort`; `summary` (`auto`, `concise`, `detailed`) asks for reasoning items",
    ),
    *fields.THINKING,
    fields.accepted("output_config", fields.OBJECT, "", "`effort` in it counts"),
    fields.accepted(
        "text",
        fields.OBJECT,
        "text",
        f"`format`: {fields.FORMAT_NOTE}; `verbosity` has no effect",
        idle=("verbosity",),
    ),
    fields.accepted("parallel_tool_calls", fields.BOOLEAN, "true", "echoed; false holds where calls are constrained"),
    fields.accepted(
        "previous_response_id",
        fields.STRING,
        "none",
        "goes on with a response that is still remembered (`store` was not false); its instructions and tools do not "
        "carry over",
    ),
    fields.refused("conversation"),
    fields.refused("prompt"),
)

_METADATA = (
    fields.ignored("include"),
    fields.ignored("prompt_cache_key", "every prompt is looked up in the caches"),
    fields.ignored("truncation", "nothing is ever cut out of a prompt"),
    fields.ignored("service_tier"),
    fields.ignored("client_metadata"),
    fields.ignored("safety_identifier"),
    fields.ignored("stream_options"),
    fields.ignored("user"),
)

FIELDS = FieldTable(
    "responses",
    (
        *_PROMPT_FIELDS,
        fields.accepted(
            "max_output_tokens",
            fields.INTEGER,
            "`--tokens`",
            f"the later of both names in the body counts; {fields.MAX_TOKENS_NOTE}",
        ),
        fields.accepted("max_tokens", fields.INTEGER, "`--tokens`", "another name of `max_output_tokens`"),
        *fields.SAMPLING,
        fields.accepted("stop", fields.STOP_SCHEMA, "none", fields.STOP_NOTE),
        fields.STREAM,
        fields.accepted("store", fields.BOOLEAN, "true", "false: the response cannot be gone on with by its id"),
        fields.accepted("metadata", fields.OBJECT, "{}", "echoed"),
        fields.TIMINGS,
        fields.refused("background", harmless=(False,)),
        fields.refused("top_logprobs", harmless=(0,)),
        *fields.CONSTRAINTS,
        *_METADATA,
    ),
)

COUNT_FIELDS = FieldTable("input_tokens", (*_PROMPT_FIELDS, *_METADATA))


@dataclass(frozen=True, slots=True)
class ResponsesPrompt:
    """What decides the prompt. `messages` are those without the instructions; `alone`: it has outputs without their
    calls, and names no response."""

    instructions: str | None
    messages: tuple[Message, ...]
    conversation: Conversation
    tools: ToolTable
    structure: Structure
    alone: bool = False


def read_prompt(body: Node, preparer: Preparer, unused: list[str], live: LiveTurns) -> ResponsesPrompt:
    """Everything that decides the prompt. Raises RequestError or JSONError with the path of what is wrong."""
    node = body.get("input")
    if node is None:
        raise RequestError("missing input", param="input")
    tools = ToolTable()
    tools.add(body.get_array("tools"), unused)
    reader = InputReader(tools, unused)
    reader.read(node)
    instructions = body.get_str("instructions")
    before: tuple[Message, ...] = ()
    previous = body.get_str("previous_response_id")
    if previous is not None:
        before = _previous(previous, live).messages
        reader.require_known({call.id for message in before for call in message.calls})
    elif reader.orphans:
        turn = None if reader.has_calls else live.of_calls(reader.orphans)
        if turn is None:
            reader.require_known(set())
        else:
            before = turn.messages
            instructions = turn.system if instructions is None else instructions
            if not tools.tools:
                tools.restore(turn.tools, turn.forms)
    choice = read_tool_choice(body)
    if choice.name is not None:
        choice = replace(choice, name=tools.declared_name(choice.name))
    text = body.get_object("text")
    messages = (*before, *reader.messages)
    if not messages and not instructions:
        raise node.error("Expected at least one item, got an empty array")
    conversation = Conversation(
        (Message("system", instructions), *messages) if instructions else messages,
        tools.tools if choice.mode != "none" else (),
        common.thinking_effort(body, body.get_str("model", ""), preparer.syntax, preparer.n_ctx),
    )
    form = None if text is None else text.get_object("format")
    structure = read_structure(body, form, conversation, choice, tools.raw_inputs)
    alone = previous is None and bool(reader.orphans)
    return ResponsesPrompt(instructions, messages, conversation, tools, structure, alone)


def _previous(id: str, live: LiveTurns) -> LiveTurn:
    turn = live.find(id)
    if turn is None:
        raise RequestError(
            f"Previous response with id {id[:80]!r} not found; retry by replaying the full input history",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return turn


def _echo(body: Node, sampling: SamplingParams) -> dict[str, object]:
    """Members of the response that repeat the request."""
    reasoning = body.get_object("reasoning")
    text = body.get_object("text")
    return {
        "instructions": body.get_str("instructions"),
        "max_output_tokens": common.max_tokens(body, ("max_output_tokens", "max_tokens")),
        "metadata": body.get_object("metadata") or {},
        "parallel_tool_calls": body.get_bool("parallel_tool_calls", True),
        "previous_response_id": body.get_str("previous_response_id"),
        "reasoning": {
            "effort": None if reasoning is None else reasoning.get("effort"),
            "summary": None if reasoning is None else reasoning.get("summary"),
        },
        "store": body.get_bool("store", True),
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"} if text is None else text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_echoed_tool(item) for item in body.get_array("tools") or ()],
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


def _echoed_tool(item: Node) -> object:
    """A tool as sent, with the members that OpenAI's types demand of a function."""
    if item.get_str("type", "function") != "function":
        return item
    return {"type": "function", "parameters": None, "strict": None, **dict(item.items())}


def _wants_summary(body: Node) -> bool:
    reasoning = body.get_object("reasoning")
    return reasoning is not None and reasoning.get_str("summary") in _SUMMARIES


# ---- the endpoints ----------------------------------------------------------------------------------------------


async def responses(service: Service, request: Request, responder: Responder) -> None:
    """A chat answer (OpenAI Responses), whole or streamed."""
    body = service.body(request)
    unused = FIELDS.check(body)
    wanted = read_prompt(body, service.preparer, unused, service.live)
    sampling = common.sampling(body, service.config.sampling, service.preparer.vocab_size)
    echo = _echo(body, sampling)
    limits = Limits(common.max_tokens(body, ("max_output_tokens", "max_tokens")), common.stop_strings(body, "stop"))
    stream = body.get_bool("stream", False)
    style = ResponsesStyle(
        id=new_id("resp"),
        model=body.get_str("model", service.model_id),
        created=int(time.time()),
        summaries=_wants_summary(body),
        timings=body.get_bool("timings", False) or service.config.timings,
        echo=echo,
    )
    service.unknown.note(FIELDS.where, unused)
    constraint = await constrain(service.preparer, wanted.structure)
    prompt = await service.prompt(wanted.conversation)
    job = service.preparer.request(
        style.id,
        "responses",
        style.model,
        prompt,
        wanted.conversation,
        sampling,
        limits,
        param="input",
        constraint=constraint,
        received=request.received,
        continues=service.live.continuation(
            "responses-tool-output", service.preparer, wanted.conversation, required=wanted.alone
        ),
    )

    def finished(turn: Message) -> None:
        if echo["store"]:
            tools = wanted.tools
            kept = LiveTurn(wanted.instructions, (*wanted.messages, turn), tools.tools, tools.forms)
            service.live.remember(style.id, kept)

    answer = partial(ResponsesAnswer, style, wanted.tools.form, service.remember_call, finished)
    again = None if stream else once_more(service.preparer, wanted.conversation, prompt)
    await send(service, [job], answer, responder, stream=stream, again=again)


async def input_tokens(service: Service, request: Request, responder: Responder) -> None:
    """What the prompt of a Responses body costs."""
    body = service.body(request)
    unused = COUNT_FIELDS.check(body)
    wanted = read_prompt(body, service.preparer, unused, service.live)
    service.unknown.note(COUNT_FIELDS.where, unused)
    prompt = await service.prompt(wanted.conversation)
    responder.send(200, dumps({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}) + b"\n")
