"""A trained DeepSeek V4 behind the server: its prompts token by token, and calls that a client can execute.

`DS4_TEST_MODELS` names the folder with `v4-nano/` (`tests/engine/test_v4_nano.py` says what is in it).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ds4._json import dumps, parse
from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig
from ds4.server.api.chat import read_conversation
from ds4.server.api.prepare import Preparer
from ds4.server.config import ServerConfig
from tests.support.running_server import RunningServer

FOLDER = Path(os.environ.get("DS4_TEST_MODELS", "")) / "v4-nano"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "reference.json").is_file(), reason="DS4_TEST_MODELS names no folder with v4-nano"
)

ASSISTANT = {"role": "system", "content": "You are a helpful assistant."}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}},
    {"id": "c2", "type": "function", "function": {"name": "bash", "arguments": '{"command": "git status"}'}},
]
CODING = "You are a coding agent. You work in the folder /home/anna/project. Use the tools to read and change files."

MESSAGES: dict[str, list[dict[str, Any]]] = {
    "chat": [{"role": "user", "content": "What is the capital of France?"}],
    "chat_long": [ASSISTANT, {"role": "user", "content": "I feel sad today."}],
    "tool_call": [{"role": "user", "content": "What is the weather in Paris for the next 3 days?"}],
    "tool_result": [
        ASSISTANT,
        {"role": "user", "content": "What is the weather in Oslo and then run `git status`"},
        {"role": "assistant", "reasoning_content": "I should call get_weather and bash for this.", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c1", "content": '{"temp": -2, "sky": "snowy"}'},
        {"role": "tool", "tool_call_id": "c2", "content": "On branch main\nnothing to commit, working tree clean"},
    ],
    "long_tools": [
        {"role": "system", "content": CODING},
        {"role": "user", "content": "Show me the content of src/core/table_mountain.py"},
    ],
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "reference.json").read_text())["cases"]
    assert set(found) == set(MESSAGES)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = EngineConfig(model=FOLDER / "v4-nano-q8_0.gguf", ctx=4096, slots=2, threads=2, kv_qat=False)
    engine = Engine.open(config)
    running = RunningServer(engine, ServerConfig(engine=config, port=0))
    yield running
    running.stop()
    engine.close()


def body(case: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The chat request whose prompt the reference has, with the tools that stand in it."""
    _, _, after = case["text"].partition("### Available Tool Schemas\n\n")
    schemas = after.partition("\n\n")[0]
    tools = [{"type": "function", "function": json.loads(line)} for line in schemas.splitlines()]
    thinking = case["text"].endswith("<think>")
    return {"messages": messages, "temperature": 0, "enable_thinking": thinking} | ({"tools": tools} if tools else {})


@pytest.mark.parametrize("name", MESSAGES)
def test_prompts_are_those_of_the_reference(server: RunningServer, cases: dict[str, Any], name: str) -> None:
    request = body(cases[name], MESSAGES[name])
    answer = server.http.post("/apply-template", json=request).json()
    assert answer["prompt"] == cases[name]["text"]
    response = server.http.post("/v1/chat/completions", json=request | {"max_tokens": 1}).json()
    assert response["usage"]["prompt_tokens"] == answer["n_tokens"] == len(cases[name]["prompt_ids"])


@pytest.mark.parametrize("name", MESSAGES)
def test_prompt_ids_are_those_of_the_reference(server: RunningServer, cases: dict[str, Any], name: str) -> None:
    preparer = Preparer(server.engine, 100)
    conversation, *_ = read_conversation(parse(dumps(body(cases[name], MESSAGES[name]))), preparer)
    rendered = preparer.renderer.render(conversation)
    assert server.engine.tokenizer.encode_segments(rendered.segments) == cases[name]["prompt_ids"]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("tool_call", ("get_weather", {"city": "Paris", "days": 3})),
        ("long_tools", ("read", {"path": "src/core/table_mountain.py"})),
    ],
)
def test_the_model_calls(server: RunningServer, cases: dict[str, Any], name: str, call: tuple[str, Any]) -> None:
    answer = server.http.post("/v1/chat/completions", json=body(cases[name], MESSAGES[name])).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (found,) = choice["message"]["tool_calls"]
    assert (found["function"]["name"], json.loads(found["function"]["arguments"])) == call
    assert not choice["message"].get("content")


def test_a_tool_loop(server: RunningServer, cases: dict[str, Any]) -> None:
    """Call, result, answer: the second prompt goes on where the first turn ended, nothing is evaluated twice."""
    request = body(cases["tool_call"], MESSAGES["tool_call"])
    first = server.http.post("/v1/chat/completions", json=request).json()
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": '{"temp": 21, "sky": "sunny"}'}
    request["messages"] = [*request["messages"], message, result]
    second = server.http.post("/v1/chat/completions", json=request).json()
    assert second["choices"][0]["finish_reason"] == "stop"
    assert "sunny" in second["choices"][0]["message"]["content"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1


def test_thinking(server: RunningServer, cases: dict[str, Any]) -> None:
    case = cases["tool_result"]
    reasoning, _, content = case["greedy_text"].removesuffix("<｜end▁of▁sentence｜>").partition("</think>")
    answer = server.http.post("/v1/chat/completions", json=body(case, MESSAGES["tool_result"])).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", ["get_weather", "bash", None])
def test_a_forced_call(server: RunningServer, cases: dict[str, Any], thinking: bool, name: str | None) -> None:
    """In the model's own syntax, whose tags hold a special token, behind the reasoning; its tail is a live prefix."""
    request = body(cases["tool_call"], MESSAGES["tool_call"]) | {"enable_thinking": thinking}
    request["tool_choice"] = {"type": "function", "function": {"name": name}} if name else "required"
    answer = server.http.post("/v1/chat/completions", json=request).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == (name or "get_weather")
    declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request["tools"]}
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.Draft202012Validator(declared[call["function"]["name"]]).validate(arguments)
    assert bool(choice["message"].get("reasoning_content")) == thinking
    assert not choice["message"].get("content")


@pytest.mark.parametrize("thinking", [True, False])
def test_a_structured_answer(server: RunningServer, cases: dict[str, Any], thinking: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    request = body(cases["chat"], MESSAGES["chat"]) | {"enable_thinking": thinking, "max_tokens": 300}
    request["response_format"] = {"type": "json_schema", "json_schema": {"schema": {**schema, "maxProperties": 1}}}
    (choice,) = server.http.post("/v1/chat/completions", json=request).json()["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.Draft202012Validator(schema).validate(json.loads(choice["message"]["content"]))
    assert bool(choice["message"].get("reasoning_content")) == thinking
