"""What holds across the dialects: no body is an error of ours, and usage counts a prompt once."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from ds4.server.api.usage import total
from ds4.server.types import Finish
from ds4.testing import Script, ScriptedEngine
from tests.support.api import parse_events
from tests.support.running_server import Serve

# ---- bodies that nobody meant -----------------------------------------------------------------------------------

TOOL = {"type": "object", "properties": {"a": {"type": "string"}}}
SEEDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
            {"role": "assistant", "tool_calls": [{"id": "d", "type": "custom", "custom": {"name": "p", "input": "z"}}]},
            {"role": "tool", "tool_call_id": "d", "content": [{"type": "text", "text": "r"}]},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": TOOL}},
            {
                "type": "custom",
                "custom": {
                    "name": "p",
                    "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]*"}},
                },
            },
        ],
        "n": 1,
        "stream_options": {"include_usage": True},
        "logit_bias": {"1": 1},
    },
    "/v1/completions": {"prompt": ["x", [1, 2]], "n": 1, "logprobs": 1, "template": "raw", "stop": ["y"]},
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "y"}]},
            {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "z"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
            {"type": "tool_search_call", "call_id": "t", "arguments": {"q": "x"}},
            {"type": "tool_search_output", "call_id": "t", "tools": [{"type": "function", "name": "h"}]},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": TOOL},
            {
                "type": "custom",
                "name": "p",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: /[a-z]*/"},
            },
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
        ],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}},
        "previous_response_id": None,
        "metadata": {},
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}]},
        ],
        "tools": [{"name": "f", "input_schema": TOOL}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled"},
        "output_config": {"effort": "high"},
    },
}
VALUES: tuple[Any, ...] = (None, True, 0, -1, 1.5, 2**63, "", "x", "type", [], {}, [[]], [None], {"type": "x"}, [{}])


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += places(inner)
    return found


@pytest.mark.parametrize("path", SEEDS)
def test_no_body_is_an_error_of_ours(serve: Serve, path: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    server = serve(ScriptedEngine(Script.text("x</think>ok", "bytes"), syntax="deepseek41", ctx=4096))
    answered = 0
    for _ in range(300):
        body = copy.deepcopy(SEEDS[path])
        body["stream"] = rng.random() < 0.2
        for _ in range(rng.randint(1, 3)):
            container, key = rng.choice(places(body))
            action = rng.random()
            if action < 0.2:
                del container[key]
            elif action < 0.3 and isinstance(container, dict):
                container[rng.choice(("type", "role", "content", "id"))] = container[key]
            else:
                container[key] = copy.deepcopy(rng.choice(VALUES))
        response = server.http.post(path, json=body)
        assert response.status_code in (200, 400), (seed, body, response.text)
        answered += response.status_code == 200
        if response.headers["content-type"] == "text/event-stream":
            assert "internal error" not in response.text, (seed, body)
            if path in ("/v1/responses", "/v1/messages"):
                assert parse_events(response.text)[-1].name not in ("error", "response.failed"), (seed, body)
        elif response.status_code == 400:
            assert response.json()["error"]["message"]
    assert 30 < answered < 300, "a test whose bodies are all good or all bad tests nothing"


# ---- usage ------------------------------------------------------------------------------------------------------


def test_choices_of_a_prompt_count_it_once() -> None:
    evaluated = Finish("stop", 100, 10, 90, 5, 1, ttft=2.0, prefill_seconds=1.0, decode_seconds=3.0)
    forked = Finish("stop", 100, 99, 1, 7, 2, ttft=1.0, prefill_seconds=0.5, decode_seconds=4.0)
    both = total([evaluated, forked], 2)
    assert (both.prompt_tokens, both.cached_tokens, both.cache_write_tokens) == (100, 10, 90)
    assert (both.completion_tokens, both.reasoning_tokens) == (12, 3)
    assert (both.ttft, both.prefill_seconds, both.decode_seconds) == (1.0, 1.0, 4.0)
    two_prompts = total([evaluated, forked, evaluated, evaluated], 2)
    assert (two_prompts.prompt_tokens, two_prompts.cached_tokens, two_prompts.cache_write_tokens) == (200, 20, 180)
    assert total([evaluated]) is evaluated
