"""Structured output and forced calls in Completions, Responses and Messages, with the demo model.

What a constraint holds is tested with Chat (`test_structure.py`); here, that each dialect asks for the same one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from ds4.engine.types import EngineConfig
from ds4.server.config import ServerConfig
from tests.support.api import openai_error, openai_sdk
from tests.support.engines import opened
from tests.support.running_server import RunningServer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
QUESTION = "Describe a person."


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = EngineConfig(ctx=1024, slots=2, threads=2)
    with opened(config) as engine:
        running = RunningServer(engine, ServerConfig(engine=config, port=0))
        running.http.timeout = 240
        yield running
        running.stop()


def ask(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def responses(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = ask(server, "/v1/responses", input=QUESTION, max_output_tokens=64, **body)["output"]
    return output


def messages(server: RunningServer, **body: Any) -> dict[str, Any]:
    asked = [{"role": "user", "content": QUESTION}]
    return ask(server, "/v1/messages", messages=asked, max_tokens=64, **body)


def valid(text: str, schema: dict[str, Any]) -> Any:
    value = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(value)
    return value


def test_the_same_schema_gives_the_same_answer(server: RunningServer) -> None:
    form = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    chat_form = {"type": "json_schema", "json_schema": {"schema": PERSON}}
    chat = ask(
        server,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=64,
        response_format=chat_form,
    )
    expected = chat["choices"][0]["message"]["content"]
    valid(expected, PERSON)
    (item,) = responses(server, text={"format": form})
    assert item["content"][0]["text"] == expected
    message = messages(server, output_config={"format": {"type": "json_schema", "schema": PERSON}})
    assert message["content"] == [{"type": "text", "text": expected}]
    assert message["stop_reason"] == "end_turn"
    raw = ask(server, "/v1/completions", prompt="A person:", max_tokens=64, response_format=chat_form)
    valid(raw["choices"][0]["text"], PERSON)
    assert raw["choices"][0]["finish_reason"] == "stop"


def test_the_sdk_parses_a_structured_response(server: RunningServer) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=12)
        age: int

    with openai_sdk(server) as client:
        answer = client.responses.parse(
            model="m", input=QUESTION, text_format=Person, temperature=0, max_output_tokens=64
        )
        assert isinstance(answer.output_parsed, Person)
        assert answer.text and answer.text.format and answer.text.format.type == "json_schema"
        with pytest.raises(openai.BadRequestError):
            client.responses.create(
                model="m", input="x", text={"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}
            )


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "paint"}]
)
def test_forced_calls_of_messages(server: RunningServer, choice: Any) -> None:
    tools = [{"name": "paint", "description": "paints", "input_schema": COLOUR}]
    message = messages(server, tools=tools, tool_choice=choice)
    assert message["stop_reason"] == "tool_use"
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert calls and calls[0]["name"] == "paint"
    jsonschema.Draft202012Validator(COLOUR).validate(calls[0]["input"])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "paint"}])
def test_forced_calls_of_responses(server: RunningServer, choice: Any) -> None:
    tools = [{"type": "function", "name": "paint", "description": "paints", "parameters": COLOUR}]
    output = responses(server, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    (call,) = [item for item in output if item["type"] == "function_call"]
    valid(call["arguments"], COLOUR)


def test_forced_calls_come_back_in_the_form_of_their_tool(server: RunningServer) -> None:
    namespace = {
        "type": "namespace",
        "name": "art",
        "tools": [{"type": "function", "name": "paint", "description": "paints", "parameters": COLOUR}],
    }
    call = responses(server, tools=[namespace], tool_choice={"type": "function", "name": "paint"})[-1]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "art", "paint")
    valid(call["arguments"], COLOUR)


def test_a_schema_that_cannot_be_held_is_named(server: RunningServer) -> None:
    bad = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    found = openai_error(
        server.http.post(
            "/v1/responses", json={"input": "x", "text": {"format": {"type": "json_schema", "schema": bad}}}
        )
    )
    assert found["param"] == "text.format.schema.properties.a.not"
    response = server.http.post(
        "/v1/messages",
        json={
            "messages": [{"role": "user", "content": "x"}],
            "output_config": {"format": {"type": "json_schema", "schema": bad}},
        },
    )
    assert response.json()["error"]["param"] == "output_config.format.schema.properties.a.not"
