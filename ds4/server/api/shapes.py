"""What endpoints answer, as JSON Schemas for `/openapi.json`: the dialects' objects, and those of the server itself.

Members that a dialect's own reference allows and that never occur here are left out; further members are allowed, as
every client of these dialects has to expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds4.server.api.fields import ARRAY, BOOLEAN, INTEGER, NUMBER, OBJECT, STRING, Schema, array_of, one_of

NULL: Schema = {"type": "null"}
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """Schemas by content type; `streams`: server-sent events where the request asks for them. `other`: statuses with a
    body of their own instead of the error object. `live`: a request may need a state that is not there any more."""

    content: Mapping[str, Schema]
    streams: bool = False
    other: Mapping[int, Schema] = field(default_factory=dict)
    live: bool = False


def closed(**members: Schema) -> Schema:
    """An object that has all of these members."""
    return {"type": "object", "required": list(members), "properties": {k: dict(v) for k, v in members.items()}}


def optional(schema: Schema, **members: Schema) -> Schema:
    """The same object with members that it may have."""
    known = schema["properties"]
    assert isinstance(known, dict)
    return {**schema, "properties": {**known, **{k: dict(v) for k, v in members.items()}}}


def const(value: str) -> Schema:
    return {"const": value}


def enum(*values: str) -> Schema:
    return {"enum": list(values)}


def nullable(schema: Schema) -> Schema:
    return one_of(schema, NULL)


EVENT: Schema = optional(closed(data=STRING), event=STRING)
"""One server-sent event: its data is the JSON of a chunk or event of the dialect, or `[DONE]`."""

_COUNT: Schema = {"type": "integer", "minimum": 0}
_TIMINGS: Schema = {"type": "object", "additionalProperties": {"type": "number"}}
_CACHE = closed(cached_tokens=_COUNT, cache_write_tokens=_COUNT)
_REASONING = closed(reasoning_tokens=_COUNT)
_USAGE = optional(
    closed(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_CACHE,
        completion_tokens_details=_REASONING,
    ),
    timings=_TIMINGS,
)
_FINISH = enum("stop", "length", "tool_calls")

# ---- Chat and Completions

_CALL = one_of(
    closed(id=STRING, type=const("function"), function=closed(name=STRING, arguments=STRING)),
    closed(id=STRING, type=const("custom"), custom=closed(name=STRING, input=STRING)),
)
_MESSAGE = optional(
    closed(role=const("assistant"), content=STRING), reasoning_content=STRING, tool_calls=array_of(_CALL)
)
_CHAT_CHOICE = optional(closed(index=_COUNT, message=_MESSAGE, finish_reason=_FINISH), logprobs=nullable(OBJECT))
_TEXT_CHOICE = optional(closed(index=_COUNT, text=STRING, finish_reason=_FINISH), logprobs=nullable(OBJECT))


def _choices(kind: str, choice: Schema) -> Schema:
    return closed(id=STRING, object=const(kind), created=INTEGER, model=STRING, choices=array_of(choice), usage=_USAGE)


CHAT = AnswerShape({JSON: _choices("chat.completion", _CHAT_CHOICE)}, streams=True)
COMPLETIONS = AnswerShape({JSON: _choices("text_completion", _TEXT_CHOICE)}, streams=True)

# ---- Responses

_ITEM_STATUS = enum("completed", "incomplete")
_ITEMS = one_of(
    closed(id=STRING, type=const("reasoning"), status=_ITEM_STATUS, summary=ARRAY),
    closed(
        id=STRING,
        type=const("message"),
        status=_ITEM_STATUS,
        role=const("assistant"),
        content=array_of(closed(type=const("output_text"), text=STRING, annotations=ARRAY)),
    ),
    optional(
        closed(
            id=STRING, type=const("function_call"), status=_ITEM_STATUS, call_id=STRING, name=STRING, arguments=STRING
        ),
        namespace=STRING,
    ),
    closed(id=STRING, type=const("custom_tool_call"), status=_ITEM_STATUS, call_id=STRING, name=STRING, input=STRING),
    closed(id=STRING, type=const("tool_search_call"), status=_ITEM_STATUS, call_id=STRING, arguments=OBJECT),
)
_RESPONSE = closed(
    id=STRING,
    object=const("response"),
    created_at=INTEGER,
    status=enum("completed", "incomplete"),
    background=BOOLEAN,
    error=NULL,
    incomplete_details=nullable(closed(reason=const("max_output_tokens"))),
    model=STRING,
    output=array_of(_ITEMS),
    usage=optional(
        closed(
            input_tokens=_COUNT,
            input_tokens_details=_CACHE,
            output_tokens=_COUNT,
            output_tokens_details=_REASONING,
            total_tokens=_COUNT,
        ),
        timings=_TIMINGS,
    ),
    instructions=nullable(STRING),
    max_output_tokens=nullable(INTEGER),
    metadata=OBJECT,
    parallel_tool_calls=BOOLEAN,
    previous_response_id=nullable(STRING),
    reasoning=OBJECT,
    store=BOOLEAN,
    temperature=NUMBER,
    text=OBJECT,
    tool_choice=one_of(STRING, OBJECT),
    tools=ARRAY,
    top_p=NUMBER,
    truncation=const("disabled"),
)

RESPONSES = AnswerShape({JSON: _RESPONSE}, streams=True, live=True)
INPUT_TOKENS = AnswerShape({JSON: closed(object=const("response.input_tokens"), input_tokens=_COUNT)})

# ---- Messages

_BLOCKS = one_of(
    closed(type=const("thinking"), thinking=STRING, signature=STRING),
    closed(type=const("text"), text=STRING),
    closed(type=const("tool_use"), id=STRING, name=STRING, input=OBJECT),
)
MESSAGES = AnswerShape(
    {
        JSON: closed(
            id=STRING,
            type=const("message"),
            role=const("assistant"),
            model=STRING,
            content=array_of(_BLOCKS),
            stop_reason=enum("end_turn", "max_tokens", "stop_sequence", "tool_use"),
            stop_sequence=nullable(STRING),
            usage=optional(
                closed(
                    input_tokens=_COUNT,
                    output_tokens=_COUNT,
                    cache_read_input_tokens=_COUNT,
                    cache_creation_input_tokens=_COUNT,
                ),
                timings=_TIMINGS,
            ),
        )
    },
    streams=True,
    live=True,
)
COUNT_TOKENS = AnswerShape({JSON: closed(input_tokens=_COUNT)})

# ---- the server itself

_MODEL = closed(
    id=STRING,
    object=const("model"),
    created=INTEGER,
    owned_by=STRING,
    name=STRING,
    context_length=_COUNT,
    top_provider=closed(context_length=_COUNT, max_completion_tokens=_COUNT, is_moderated=BOOLEAN),
    supported_parameters=array_of(STRING),
    type=const("model"),
    display_name=STRING,
    created_at=STRING,
)
MODEL = AnswerShape({JSON: _MODEL})
MODELS = AnswerShape(
    {JSON: closed(object=const("list"), data=array_of(_MODEL), has_more=BOOLEAN, first_id=STRING, last_id=STRING)}
)
TEMPLATE = AnswerShape({JSON: closed(prompt=STRING, n_tokens=_COUNT)})
_PIECE = closed(id=_COUNT, piece=one_of(STRING, array_of(_COUNT)))
TOKENS = AnswerShape({JSON: closed(tokens=one_of(array_of(_COUNT), array_of(_PIECE)), count=_COUNT)})
TEXT = AnswerShape({JSON: closed(content=STRING)})
HEALTH = AnswerShape({JSON: closed(status=const("ok"))}, other={503: closed(status=const("error"), reason=STRING)})
METRICS = AnswerShape({"text/plain": STRING, "application/openmetrics-text": STRING})
SLOTS = AnswerShape({JSON: array_of(closed(index=_COUNT, request=nullable(STRING), phase=STRING, n_ctx=_COUNT))})
ANY_OBJECT = AnswerShape({JSON: OBJECT})

# ---- errors

OPENAI_ERROR: Schema = closed(
    error=closed(
        message=STRING,
        type=enum("invalid_request_error", "server_error"),
        param={"type": ["string", "null"], "description": "path of what is wrong"},
        code=nullable(STRING),
    )
)
ANTHROPIC_ERROR: Schema = closed(
    type=const("error"),
    error=optional(
        closed(
            type=enum(
                "invalid_request_error",
                "authentication_error",
                "permission_error",
                "not_found_error",
                "request_too_large",
                "rate_limit_error",
                "api_error",
                "overloaded_error",
            ),
            message=STRING,
        ),
        param={"type": "string", "description": "path of what is wrong"},
    ),
)
