"""A trained DeepSeek V4 behind Responses and Messages: tool loops with the vendors' SDKs, nothing evaluated twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig
from ds4.server.config import ServerConfig
from tests.server.test_v4_nano_chat import FOLDER
from tests.support.api import anthropic_sdk, openai_sdk
from tests.support.running_server import RunningServer

pytestmark = pytest.mark.skipif(
    not (FOLDER / "reference.json").is_file(), reason="DS4_TEST_MODELS names no folder with v4-nano"
)

QUESTION = "What is the weather in Paris for the next 3 days?"
RESULT = '{"temp": 21, "sky": "sunny"}'
CALL = {"city": "Paris", "days": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = EngineConfig(model=FOLDER / "v4-nano-q8_0.gguf", ctx=4096, slots=2, threads=2, kv_qat=False)
    engine = Engine.open(config)
    running = RunningServer(engine, ServerConfig(engine=config, port=0))
    yield running
    running.stop()
    engine.close()


@pytest.fixture(scope="module")
def tools() -> list[dict[str, Any]]:
    """The functions that stand in the reference's prompt."""
    text = json.loads((FOLDER / "reference.json").read_text())["cases"]["tool_call"]["text"]
    schemas = text.partition("### Available Tool Schemas\n\n")[2].partition("\n\n")[0]
    return [json.loads(line) for line in schemas.splitlines()]


@pytest.mark.parametrize("stream", [False, True])
def test_messages(server: RunningServer, tools: list[dict[str, Any]], stream: bool) -> None:
    declared = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in tools]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with anthropic_sdk(server) as client:

        def ask() -> Any:
            request = {
                "model": "m",
                "max_tokens": 200,
                "messages": messages,
                "tools": declared,
                "thinking": {"type": "disabled"},
                "extra_body": {"temperature": 0},
            }
            if not stream:
                return client.messages.create(**request)
            with client.messages.stream(**request) as events:
                return events.get_final_message()

        first = ask()
        (call,) = [block for block in first.content if block.type == "tool_use"]
        assert (first.stop_reason, call.name, call.input) == ("tool_use", "get_weather", CALL)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = ask()
    assert second.stop_reason == "end_turn"
    assert "sunny" in second.content[0].text
    prompt = first.usage.cache_read_input_tokens + first.usage.cache_creation_input_tokens + first.usage.input_tokens
    assert second.usage.cache_read_input_tokens >= prompt + first.usage.output_tokens - 1


@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_responses(server: RunningServer, tools: list[dict[str, Any]], stream: bool, previous: bool) -> None:
    declared = [{"type": "function", "strict": False, **tool} for tool in tools]
    with openai_sdk(server) as client:

        def ask(items: list[Any], **fields: Any) -> Any:
            request = {
                "model": "m",
                "input": items,
                "tools": declared,
                "temperature": 0,
                "reasoning": {"effort": "none"},
                **fields,
            }
            if not stream:
                return client.responses.create(**request)
            with client.responses.stream(**request) as events:
                return events.get_final_response()

        question = {"role": "user", "content": QUESTION}
        first = ask([question])
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("get_weather", CALL)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
        replayed = [question, *(item.to_dict() for item in first.output), result]
        second = ask([result], previous_response_id=first.id) if previous else ask(replayed)
    assert "sunny" in second.output_text
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens + first.usage.output_tokens - 1
