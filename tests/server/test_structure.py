"""Structured output over sockets: random schemas with the demo model, judged by an independent validator."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from ds4.engine.types import EngineConfig
from ds4.prompt.call_grammar import MAX_CALLS
from ds4.server.config import ServerConfig
from ds4.testing import Script, ScriptedEngine
from tests.support.api import chunks, openai_error
from tests.support.engines import opened
from tests.support.running_server import RunningServer, Serve
from tests.support.schemas import random_parameters, random_schema

SLOTS = 6
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def json_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def function(name: str, parameters: object, **members: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **members}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = EngineConfig(ctx=2048, slots=SLOTS, threads=2)
    with opened(config) as engine:
        running = RunningServer(engine, ServerConfig(engine=config, port=0))
        running.http.timeout = 240
        yield running
        running.stop()


def ask(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Describe a person."}], "max_tokens": 64, **fields}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def check_random_schemas(server: RunningServer, n: int) -> None:
    """Half of the schemas as a format, half as the parameters of a function that must be called: every answer ends by
    itself and is valid. Everything in the schemas is bounded, and no answer comes near the limit."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    formats = [random_schema(rng) for _ in range(n - n // 2)]
    parameters = [random_parameters(rng) for _ in range(n // 2)]

    def answer(task: tuple[int, bool, dict[str, Any]]) -> str:
        index, is_call, schema = task
        fields: dict[str, Any] = {"temperature": index % 3 / 2, "seed": index, "max_tokens": 1500}
        if is_call:
            fields |= {"tools": [function("save", schema, strict=True)], "tool_choice": "required"}
            fields["parallel_tool_calls"] = False
        else:
            fields["response_format"] = json_format(schema)
        choice = ask(server, **fields)
        finish = str(choice["finish_reason"])
        assert finish == ("tool_calls" if is_call else "stop"), (seed, index, schema, choice)
        if is_call:
            (call,) = choice["message"]["tool_calls"]
            text = call["function"]["arguments"]
        else:
            text = choice["message"]["content"]
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        return finish

    tasks = [(i, False, s) for i, s in enumerate(formats)] + [(i, True, s) for i, s in enumerate(parameters)]
    print(f"seed {seed}")
    with ThreadPoolExecutor(SLOTS) as pool:
        finishes = list(pool.map(answer, tasks))
    counts = {reason: finishes.count(reason) for reason in ("stop", "tool_calls")}
    print(f"{n} schemas, {sum(counts.values())} valid answers: {counts}")
    assert counts == {"stop": len(formats), "tool_calls": len(parameters)}


def test_random_schemas(server: RunningServer) -> None:
    check_random_schemas(server, 8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_random_schemas(server: RunningServer) -> None:
    check_random_schemas(server, 200)


def test_the_sdk_parses_a_structured_answer(server: RunningServer) -> None:
    import pydantic

    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=12)
        age: int

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model="m",
            messages=[{"role": "user", "content": "Describe a person."}],
            response_format=Person,
            temperature=0,
            max_tokens=64,
        )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_free_answers_are_the_same_beside_constrained_ones(server: RunningServer) -> None:
    free = {"temperature": 0.8, "seed": 5, "max_tokens": 16, "logprobs": True, "top_logprobs": 3}
    alone = ask(server, **free)
    stop = threading.Event()

    def constrained() -> None:
        while not stop.is_set():
            ask(server, response_format=json_format(PERSON), max_tokens=32, temperature=1)

    threads = [threading.Thread(target=constrained) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        beside = [ask(server, **free) for _ in range(3)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert beside == [alone] * 3


def test_logprobs_bias_and_stop_with_a_constraint(server: RunningServer) -> None:
    choice = ask(server, response_format=json_format(PERSON), temperature=0, logprobs=True, top_logprobs=2)
    tokens = choice["logprobs"]["content"]
    assert "".join(t["token"] for t in tokens) == choice["message"]["content"]
    assert all(t["logprob"] <= 0 for t in tokens)
    cut = ask(server, response_format=json_format(PERSON), temperature=0, stop=['"age"'])
    assert cut["finish_reason"] == "stop"
    assert choice["message"]["content"].split('"age"')[0] == cut["message"]["content"]
    short = ask(server, response_format=json_format(PERSON), temperature=0, max_tokens=3)
    assert short["finish_reason"] == "length"
    assert choice["message"]["content"].startswith(short["message"]["content"])


@pytest.mark.parametrize(
    ("format", "texts"),
    [
        ({"type": "regex", "regex": "(yes|no)[.]"}, ("yes.", "no.")),
        ({"type": "lark", "lark": 'start: "It is " ("blue" | "green")'}, ("It is blue", "It is green")),
        ({"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"const": 7}}}, ("7",)),
        ({"type": "json_schema", "schema": {"enum": ["a"]}}, ('"a"',)),
    ],
)
def test_other_formats(server: RunningServer, format: dict[str, Any], texts: tuple[str, ...]) -> None:
    choice = ask(server, response_format=format)
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] in texts


def test_any_json_object(server: RunningServer) -> None:
    choice = ask(server, response_format={"type": "json_object"}, temperature=0)
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_a_named_function_is_called_once(server: RunningServer) -> None:
    tools = [function("look", {"type": "object", "properties": {}}), function("rest", {})]
    for name in ("look", "rest"):
        choice = ask(server, tools=tools, tool_choice={"type": "function", "function": {"name": name}})
        assert choice["finish_reason"] == "tool_calls"
        assert [c["function"] for c in choice["message"]["tool_calls"]] == [{"name": name, "arguments": "{}"}]
    one = ask(server, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert len(one["message"]["tool_calls"]) == 1


def test_forced_calls_come_to_an_end(serve: Serve) -> None:
    """A model that must call and never stops to gets so many calls, and no more."""
    call = "<tool_call>\n<function=look>\n</function>\n</tool_call>"
    server = serve(ScriptedEngine(Script.text("\n".join([call] * (MAX_CALLS + 8)), "bytes")))
    tools = [function("look", {"type": "object", "properties": {}})]
    (choice,) = server.chat(tools=tools, tool_choice="required").json()["choices"]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", MAX_CALLS)


def test_a_bias_is_no_ban(server: RunningServer) -> None:
    """The only token that is left is drawn."""
    body = {
        "messages": [{"role": "user", "content": "Go."}],
        "response_format": {"type": "regex", "regex": "A"},
        "logit_bias": {str(server.engine.tokenizer.encode("A")[0]): -100},
        "max_tokens": 4,
    }
    assert server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "A"


# ---- scripted: what a real model cannot be made to do ------------------------------------------------------------


def scripted(text: str, syntax: str = "chatml") -> ScriptedEngine:
    return ScriptedEngine(Script.text(text, "bytes"), syntax=syntax)


def test_reasoning_is_free(serve: Serve) -> None:
    server = serve(scripted('not {json}\n</think>{"name": "A", "age": 3} and more', "deepseek4"))
    message = server.chat(response_format=json_format(PERSON)).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "not {json}\n"
    assert json.loads(message["content"]) == {"name": "A", "age": 3}


def test_the_turn_cannot_end_inside_the_reasoning(serve: Serve) -> None:
    server = serve(scripted("hm", "deepseek4"))
    (choice,) = server.chat(response_format=json_format(PERSON), max_tokens=7).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"] == "hmhmhmh"
    (choice,) = server.chat(max_tokens=7).json()["choices"]
    assert choice["finish_reason"] == "stop"


def test_a_token_that_is_not_allowed_fails_this_request_only(serve: Serve) -> None:
    server = serve(scripted('{"name": "A", "height": 3}'))
    found = openai_error(server.chat(response_format=json_format(PERSON)), 500)
    assert "no token" in found["message"]
    stream = server.chat(response_format=json_format(PERSON), stream=True)
    assert "event: error" in stream.text
    assert "[DONE]" not in stream.text
    assert server.chat().json()["choices"][0]["finish_reason"] == "stop"


def test_a_stream_ends_with_the_last_token_of_the_answer(serve: Serve) -> None:
    server = serve(scripted('{"name": "A", "age": 3}'))
    found = chunks(server.chat(response_format=json_format(PERSON), stream=True))
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in found)
    assert json.loads(text) == {"name": "A", "age": 3}


def test_an_answer_or_a_call(serve: Serve) -> None:
    tools = [function("look", {"type": "object", "properties": {"at": {"type": "string"}}})]
    call = "<tool_call>\n<function=look>\n<parameter=at>\nthe sky\n</parameter>\n</function>\n</tool_call>"
    fields = {"tools": tools, "response_format": json_format(PERSON)}
    (choice,) = serve(scripted(call)).chat(**fields).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at":"the sky"}'}
    (choice,) = serve(scripted('{"name": "A", "age": 3}')).chat(**fields).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert openai_error(serve(scripted("Hello.")).chat(**fields), 500)


def test_strict_functions_hold_when_they_are_called(serve: Serve) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    def answer(argument: str, **members: Any) -> Any:
        call = f"<tool_call>\n<function=f>\n<parameter=n>\n{argument}\n</parameter>\n</function>\n</tool_call>"
        return serve(scripted(f"Well. {call}")).chat(tools=[function("f", parameters, **members)])

    assert answer("5", strict=True).json()["choices"][0]["finish_reason"] == "tool_calls"
    assert openai_error(answer("five", strict=True), 500)
    assert answer("five", strict=False).json()["choices"][0]["finish_reason"] == "tool_calls"
    assert serve(scripted("No call.")).chat(tools=[function("f", parameters, strict=True)]).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": json_format({"properties": {"a b": {"items": {"not": {}}}}})},
            'response_format.json_schema.schema.properties["a b"].items.not',
        ),
        ({"response_format": json_format([])}, "response_format.json_schema.schema"),
        (
            {"response_format": json_format({"type": "object", "properties": {"a": False}, "required": ["a"]})},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {"if": {}}}},
            "response_format.schema.if",
        ),
        ({"response_format": {"type": "regex", "regex": "(?=a)"}}, "response_format.regex"),
        ({"response_format": {"type": "lark", "lark": "start: x"}}, "response_format.lark"),
        ({"response_format": {"type": "regex", "regex": "a"}, "tools": [function("f", {})]}, "response_format.regex"),
        (
            {"tools": [function("f", {"properties": {"a": {"contains": {}}}}, strict=True)]},
            "tools[0].function.parameters.properties.a.contains",
        ),
        (
            {"tools": [function("f", {"allOf": [{}]}, strict=True)], "tool_choice": "required"},
            "tools[0].function.parameters.allOf",
        ),
        (
            {"tools": [function("f", {"properties": {"<": {}}})], "tool_choice": "required"},
            'tools[0].function.parameters.properties["<"]',
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [function("f", {})], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [function("f", {})], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": True, "temperature": 0},
            "ignore_eos",
        ),
        (
            {
                "response_format": {"type": "json_object"},
                "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{", "prefix": True}],
            },
            "response_format",
        ),
    ],
)
def test_what_cannot_be_obeyed_is_named(serve: Serve, fields: dict[str, Any], param: str) -> None:
    server = serve()
    assert openai_error(server.chat(**fields))["param"] == param
    assert server.engine.prompts == []


def test_keywords_of_functions_that_are_not_strict_are_annotations(serve: Serve) -> None:
    tools = [function("f", {"properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]})]
    call = "<tool_call>\n<function=f>\n<parameter=a>\n[1, 1]\n</parameter>\n</function>\n</tool_call>"
    (choice,) = serve(scripted(call)).chat(tools=tools, tool_choice="required").json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a":[1,1]}'
