"""Every accepted field of every endpoint does something, and its documented default is what its absence means.

What a body asks for is looked at twice: as the request that reaches the scheduler, and as the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ds4.server.api.fields import Field, FieldTable
from ds4.server.api.prepare import Preparer
from ds4.server.routes import ROUTES, Route
from ds4.testing import Script, ScriptedEngine
from ds4.testing.tokenizer import ScriptedTokenizer
from tests.support.running_server import RunningServer, Serve

Body = dict[str, Any]

USER = {"role": "user", "content": "x"}
SAID = {"role": "assistant", "content": "so"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CALL = '\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>'
TWO_CALLS = f"\n\n<｜DSML｜ calls>{CALL * 2}\n</｜DSML｜ calls>"
REGEX = {"type": "regex", "regex": "[a-z ]+"}


def say(prompt: str) -> Script:
    """Two calls where the prompt asks for them, else words; thinking first where the prompt is open for it."""
    answer = TWO_CALLS if "CALLS" in prompt else "word again word"
    text = ("plan</think>" if prompt.endswith("<think>") else "") + answer
    # The mark of a tag is a token of its own.
    return Script.of([piece for part in re.split("(｜DSML｜)", text) for piece in ([part] if "｜" in part else part)])


class WithBos(ScriptedTokenizer):
    """A vocabulary whose texts begin with a token of their own."""

    @property
    def bos_id(self) -> int | None:
        return self.special_id("<｜begin▁of▁sentence｜>")

    @property
    def add_bos(self) -> bool:
        return True


CHAT = {"tools": [{"type": "function", "function": FUNCTION}]}
RESPONSES = {"tools": [{"type": "function", **FUNCTION}]}
MESSAGES = {"tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]}
CALLS: dict[str, Body] = {
    "chat": {**CHAT, "messages": [{"role": "user", "content": "CALLS"}], "tool_choice": "required"},
    "responses": {**RESPONSES, "input": "CALLS", "tool_choice": "required"},
    "messages": {**MESSAGES, "messages": [{"role": "user", "content": "CALLS"}], "tool_choice": {"type": "any"}},
}
MINIMAL: dict[str, Body] = {
    "chat": {"messages": [USER]},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"messages": [USER], "max_tokens": 999},
    "tokenize": {"content": "x <|im_end|>"},
    "detokenize": {"tokens": [97]},
}
MINIMAL["input_tokens"] = MINIMAL["responses"]
MINIMAL["count_tokens"] = {"messages": [USER]}

SAMPLING: dict[str, tuple[Body, Any]] = {
    "model": ({}, "other"),
    "temperature": ({}, 0.5),
    "top_p": ({}, 0.9),
    "top_k": ({}, 40),
    "min_p": ({}, 0.1),
    "seed": ({}, 7),
    "presence_penalty": ({}, 0.1),
    "frequency_penalty": ({}, 0.1),
    "repetition_penalty": ({}, 1.1),
    "repeat_penalty": ({}, 1.1),
    "logit_bias": ({}, {"5": 1}),
    "stop": ({}, ["again"]),
    "max_tokens": ({}, 1),
    "stream": ({}, True),
    "timings": ({}, True),
}
THINKING: dict[str, tuple[Body, Any]] = {
    "thinking": ({}, False),
    "think": ({}, False),
    "enable_thinking": ({}, False),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
    "reasoning_effort": ({}, "none"),
    "reasoning": ({}, {"effort": "none"}),
    "output_config": ({}, {"effort": "none"}),
}
EFFECTS: dict[str, dict[str, tuple[Body, Any]]] = {
    "chat": {
        **SAMPLING,
        **THINKING,
        "messages": ({}, [{"role": "user", "content": "yy"}]),
        "max_completion_tokens": ({}, 1),
        "ignore_eos": ({"temperature": 0, "max_tokens": 99}, True),
        "logprobs": ({}, True),
        "top_logprobs": ({"logprobs": True}, 2),
        "n": ({}, 2),
        "stream_options": ({"stream": True}, {"include_usage": True}),
        "tools": ({}, CHAT["tools"]),
        "tool_choice": (CHAT, "none"),
        "continue_final_message": ({"messages": [USER, SAID]}, True),
        "add_generation_prompt": ({"messages": [USER, SAID]}, False),
        "response_format": ({}, REGEX),
        "modalities": ({}, ["audio"]),
        "parallel_tool_calls": (CALLS["chat"], False),
    },
    "completions": {
        **SAMPLING,
        **{name: ({"template": "chat"}, value) for name, (_, value) in THINKING.items()},
        "prompt": ({}, "yy"),
        "ignore_eos": ({"temperature": 0, "max_tokens": 99}, True),
        "logprobs": ({}, 1),
        "echo": ({}, True),
        "n": ({}, 2),
        "best_of": ({}, 2),
        "stream_options": ({"stream": True}, {"include_usage": True}),
        "template": ({}, "chat"),
        "parse_special": ({"prompt": "<|im_end|>"}, True),
        "add_special_tokens": ({}, False),
        "response_format": ({}, REGEX),
    },
    "responses": {
        **SAMPLING,
        **THINKING,
        "input": ({}, "yy"),
        "instructions": ({}, "I"),
        "tools": ({}, RESPONSES["tools"]),
        "tool_choice": (RESPONSES, "none"),
        "text": ({}, {"format": REGEX}),
        "parallel_tool_calls": (CALLS["responses"], False),
        "previous_response_id": ({}, "resp_unknown"),
        "max_output_tokens": ({}, 1),
        "store": ({}, False),
        "metadata": ({}, {"a": "b"}),
    },
    "messages": {
        **SAMPLING,
        **THINKING,
        "messages": ({}, [{"role": "user", "content": "yy"}]),
        "system": ({}, "S"),
        "tools": ({}, MESSAGES["tools"]),
        "tool_choice": (MESSAGES, {"type": "none"}),
        "parallel_tool_calls": (CALLS["messages"], False),
        "stop_sequences": ({}, ["again"]),
    },
    "tokenize": {
        "content": ({}, "yy"),
        "text": ({"content": None}, "yy"),
        "prompt": ({"content": None}, "yy"),
        "parse_special": ({}, True),
        "with_pieces": ({}, True),
    },
    "detokenize": {"tokens": ({}, [98])},
}
"""For each accepted field: what else stands in the body, and a value that makes a difference."""
# Only the prompt is counted: fields that decide how the answer is drawn are checked there, and count nothing.
NOT_COUNTED = {"input_tokens": {"text", "parallel_tool_calls"}, "count_tokens": {"parallel_tool_calls"}}
EFFECTS["input_tokens"] = {**EFFECTS["responses"], "model": ({}, "x-chat")}
EFFECTS["count_tokens"] = {**EFFECTS["messages"], "model": ({}, "x-chat")}

DEFAULTS: dict[str, Any] = {
    "1.0": 1.0,
    "1": 1,
    "0": 0,
    "0.05": 0.05,
    "false": False,
    "true": True,
    "on": True,
    "`auto`": "auto",
    "`high`": "high",
    "`raw`": "raw",
    "`n`": 1,
    "{}": {},
    "`--tokens`": 393216,
    "the loaded model": "scripted",
}
"""What a default of the table means as a value."""
TEXT = {"response_format": {"type": "text"}, "text": {"format": {"type": "text"}}, "modalities": ["text"]}
NO_VALUE = {"", "none", "random", "required"}
"""Defaults that no value stands for."""

WITH_BODY = [route for route in ROUTES if route.fields is not None and route.path != "/apply-template"]


class Seen:
    """A server, and what its requests came to."""

    def __init__(self, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self._requests: list[Any] = []
        made = Preparer.request

        def request(preparer: Preparer, *arguments: Any, **more: Any) -> Any:
            self._requests.append(made(preparer, *arguments, **more))
            return self._requests[-1]

        monkeypatch.setattr(Preparer, "request", request)

    def ask(self, route: Route, body: Body) -> object:
        """Everything that a client or the engine can tell from another body's, without what is random."""
        self._requests.clear()
        response = self.server.http.post(route.full_path, json=body)
        text = re.sub(r'"(id|item_id|call_id|signature)":"[^"]*"', "", response.text)
        text = re.sub(r'"(created|created_at|\w+_ms|\w+_per_second)":[0-9.]+', "", text)
        # A response repeats what it was asked for, null where nothing was said.
        text = re.sub(r'"max_output_tokens":(null|\d+)', "", text)
        # What earlier requests left in the caches is no part of what a body asks for.
        text = re.sub(r'"(cached_tokens|cache_\w+|input_tokens|prompt_n)":\d+', "", text)
        text = text if "count" not in route.path and "input_tokens" not in route.path else response.text
        return response.status_code, text, [self._asked(request) for request in self._requests]

    @staticmethod
    def _asked(request: Any) -> object:
        constrained = request.constraint is not None
        plain = replace(request, id="", created=0.0, visible=None, continues=None, constraint=None, prompt_tokens=())
        return plain, tuple(request.prompt_tokens), constrained


@pytest.fixture
def seen(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    engine = ScriptedEngine(say, syntax="deepseek41", tokenizer=WithBos(), ctx=1 << 20)
    yield Seen(serve(engine, slots=2), monkeypatch)


def accepted(route: Route) -> list[Field]:
    assert isinstance(route.fields, FieldTable)
    return [field for field in route.fields.fields if field.use == "accepted"]


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
def test_every_accepted_field_makes_a_difference(seen: Seen, route: Route) -> None:
    assert route.fields is not None
    where = route.fields.where
    for field in accepted(route):
        more, value = EFFECTS[where][field.name]
        body = {**MINIMAL[where], **more}
        without = {name: member for name, member in body.items() if name != field.name}
        if field.required:
            without = body
        same = seen.ask(route, without) == seen.ask(route, {**body, field.name: value})
        assert same is (field.name in NOT_COUNTED.get(where, ())), field.name


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
def test_documented_defaults_are_what_absence_means(seen: Seen, route: Route) -> None:
    assert route.fields is not None
    where = route.fields.where
    for field in accepted(route):
        if field.default in NO_VALUE or field.required:
            continue
        value = TEXT[field.name] if field.default == "text" else DEFAULTS[field.default]
        if field.name == "tool_choice" and where in ("messages", "count_tokens"):
            value = {"type": value}
        more = EFFECTS[where][field.name][0]
        body = {**MINIMAL[where], **more}
        without = {name: member for name, member in body.items() if name != field.name}
        assert seen.ask(route, without) == seen.ask(route, {**without, field.name: value}), field.name
