"""Tables of request fields: what an endpoint takes, refuses and passes over. One table serves three readers.

The endpoint checks bodies by it (`FieldTable.check`), `/openapi.json` is generated from it, and so are the tables of
`docs/api.md`. A field that would change the answer and is not implemented is 400 (`refused`); every field that is in
no table is accepted and logged once per name, because real clients send metadata that no server knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ds4._json import Node

Schema = Mapping[str, object]
Use = Literal["accepted", "refused", "ignored"]

INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
ARRAY: Schema = {"type": "array", "items": {}}
ANY: Schema = {}


def one_of(*schemas: Schema) -> Schema:
    """Any of several schemas."""
    return {"anyOf": [dict(schema) for schema in schemas]}


def array_of(schema: Schema) -> Schema:
    return {"type": "array", "items": dict(schema)}


def messages(*roles: str) -> Schema:
    """Messages of these roles. Assistant messages and results of calls have more members."""
    part = {"type": "object", "properties": {"type": dict(STRING), "text": dict(STRING)}, "required": ["text"]}
    content = one_of(STRING, array_of(one_of(STRING, part, OBJECT)), {"type": "null"})
    properties = {"role": {"enum": list(roles)}, "content": dict(content)}
    item = {"type": "object", "properties": properties, "required": ["role"]}
    return {"type": "array", "items": item, "minItems": 1}


@dataclass(frozen=True, slots=True)
class Field:
    """One member of a request body. `schema` is JSON Schema; `default` and `note` are for people.

    `harmless` are the values of a refused field that ask for nothing (so do null and empty containers). `idle` are
    members of an object that are accepted without effect.
    """

    name: str
    schema: Schema
    default: str = ""
    note: str = ""
    use: Use = "accepted"
    required: bool = False
    harmless: tuple[object, ...] = ()
    idle: tuple[str, ...] = ()


def required(name: str, schema: Schema, note: str = "") -> Field:
    return Field(name, schema, "required", note, required=True)


def accepted(name: str, schema: Schema, default: str = "", note: str = "", *, idle: Iterable[str] = ()) -> Field:
    return Field(name, schema, default, note, idle=tuple(idle))


def refused(name: str, note: str = "", *, harmless: Iterable[object] = ()) -> Field:
    return Field(name, ANY, "", note, "refused", harmless=tuple(harmless))


def ignored(name: str, note: str = "") -> Field:
    return Field(name, ANY, "", note, "ignored")


@dataclass(frozen=True)
class FieldTable:
    """The fields of one endpoint. `where` names it in the log."""

    where: str
    fields: tuple[Field, ...]

    @cached_property
    def _refused(self) -> tuple[Field, ...]:
        return tuple(field for field in self.fields if field.use == "refused")

    @cached_property
    def _with_effect(self) -> frozenset[str]:
        return frozenset(field.name for field in self.fields if field.use != "ignored")

    @cached_property
    def _idle(self) -> tuple[tuple[str, str], ...]:
        return tuple((field.name, member) for field in self.fields for member in field.idle)

    @cached_property
    def _plain(self) -> frozenset[str]:
        return frozenset(field.name for field in self.fields if field.use == "accepted" and not field.idle)

    def check(self, body: Node) -> list[str]:
        """Names of the fields without effect, and of members of fields. Raises JSONError for the first refused one that
        asks for something."""
        if self._plain.issuperset(body.keys()):
            return []
        for field in self._refused:
            node = body.get(field.name)
            if node is not None and _asks(node, field.harmless):
                raise node.error(f"{field.name} is not supported by this server")
        unused = [name for name, node in body.items() if name not in self._with_effect and not node.is_null]
        for name, member in self._idle:
            node = body.get(name)
            if node is not None and node.kind == "object" and node.get(member) is not None:
                unused.append(f"{name}.{member}")
        return unused


def _asks(node: Node, harmless: tuple[object, ...]) -> bool:
    if node.kind in ("array", "object"):
        return len(node) > 0
    return node.loads() not in harmless


# ---- fields that mean the same in every dialect -----------------------------------------------------------------

MODEL = accepted(
    "model",
    STRING,
    "the loaded model",
    "any string; echoed. It never chooses weights. A name that ends in `-chat`, `-no-think`, `-nothink` turns "
    "thinking off, `-reasoner` on, when no other field says so",
)

STREAM = accepted("stream", BOOLEAN, "false", "server-sent events")

SAMPLING = (
    accepted("temperature", NUMBER, "1.0", "0 or less is greedy"),
    accepted("top_p", NUMBER, "1.0"),
    accepted("top_k", INTEGER, "0", "0 or less is off"),
    accepted("min_p", NUMBER, "0.05", "relative to the best token"),
    accepted("seed", INTEGER, "random", "0 is a seed like any other; negative is random"),
    accepted("presence_penalty", NUMBER, "0", "over the output, as OpenAI defines it"),
    accepted("frequency_penalty", NUMBER, "0", "over the output, as OpenAI defines it"),
    accepted("repetition_penalty", NUMBER, "1", "over prompt and output"),
    accepted("repeat_penalty", NUMBER, "1", "another name of `repetition_penalty`"),
    accepted("logit_bias", {"type": "object", "additionalProperties": {"type": "number"}}, "none", "id → -100..100"),
)

THINKING = (
    accepted(
        "thinking",
        one_of(BOOLEAN, OBJECT),
        "on",
        "a switch, or `{type: enabled, disabled or adaptive}`; `budget_tokens` and `display` in it have no effect",
        idle=("budget_tokens", "display"),
    ),
    accepted("think", BOOLEAN, "on", "the same switch"),
    accepted("enable_thinking", BOOLEAN, "on", "the same switch"),
    accepted("chat_template_kwargs", OBJECT, "", "`enable_thinking` and `reasoning_effort` in it count"),
    accepted(
        "reasoning_effort",
        one_of(STRING, INTEGER),
        "`high`",
        "`none`, `minimal`, `low`, `medium`, `high`, `xhigh`, `max`; 0 to 100 only where the model was trained on it. "
        "Of all thinking fields later ones override earlier ones",
    ),
)

STOP_SCHEMA = one_of(STRING, array_of(STRING))
STOP_NOTE = "a string or an array; matched in the raw generated text, never part of the answer"
MAX_TOKENS_NOTE = "clamped to what fits; 0 evaluates the prompt only (finish `length`); -1 is no limit"
FORMAT_NOTE = "`json_schema`, `json_object`, `regex`, `lark`: see structured output"
IGNORE_EOS = accepted("ignore_eos", BOOLEAN, "false", "needs an explicit `temperature` of 0")
STREAM_OPTIONS = accepted(
    "stream_options", OBJECT, "", "`include_usage`: one chunk with `choices: []` and `usage` before `[DONE]`"
)
TIMINGS = accepted("timings", BOOLEAN, "false", "milliseconds and tokens per second inside `usage`")
N = accepted("n", INTEGER, "1", "choices, at most the number of slots; with a `seed` choice i has seed + i")

CONSTRAINTS = (
    refused("guided_json"),
    refused("guided_regex"),
    refused("guided_choice"),
    refused("guided_grammar"),
    refused("structured_outputs"),
    refused("grammar", harmless=("",)),
    refused("json_schema"),
)
"""Constrained decoding under the names of other servers."""

ENDS = (
    refused("min_tokens", harmless=(0,)),
    refused("stop_token_ids"),
    refused("include_stop_str_in_output", harmless=(False,)),
)
"""Other servers' ways to end a generation."""
