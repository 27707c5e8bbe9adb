"""Sixteen sessions that sample at once on the demo model: grammars of custom tools, schemas, free text, side by side.

What each constrained answer must be is said once more here, in Python's own regular expressions and by a validator of
schemas. What is free is compared, bit for bit, with the same request on the same server without neighbours.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from ds4.engine.types import EngineConfig, RowResult
from ds4.server.config import ServerConfig
from tests.support.engines import opened
from tests.support.running_server import RunningServer

SLOTS = 16

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUERY = """start: "SELECT " columns " FROM " NAME where?
columns: NAME (", " NAME)~0..2
where: " WHERE " NAME " = " /[0-9]{1,4}/
NAME: /[a-z]{1,8}/
"""
QUERY_AS_REGEX = r"SELECT [a-z]{1,8}(, [a-z]{1,8}){0,2} FROM [a-z]{1,8}( WHERE [a-z]{1,8} = [0-9]{1,4})?"
PATCH = r"\*\*\* (add|delete) [a-z]{1,6}\.py(\n[+-][a-z <>/&]{0,12}){1,3}"
"""May hold what looks like tags and escapes."""


class Watched:
    """A server, and how many rows its steps had."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.width = 0
        step: Callable[[Any], list[RowResult]] = server.engine.step

        def counted(rows: Any) -> list[RowResult]:
            self.width = max(self.width, len(rows))
            return step(rows)

        server.engine.step = counted  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    config = EngineConfig(ctx=1024, slots=SLOTS, threads=2)
    with opened(config) as engine:
        running = RunningServer(engine, ServerConfig(engine=config, port=0))
        yield Watched(running)
        running.stop()


def ask(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    with httpx.Client(base_url=server.url, timeout=240) as http:
        response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def custom(name: str, syntax: str, definition: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": "writes",
        "format": {"type": "grammar", "syntax": syntax, "definition": definition},
    }


def responses_tool(server: RunningServer, seed: int, syntax: str, definition: str, choice: Any) -> str:
    tools = [{"type": "custom", **custom("write", syntax, definition)}]
    body = {"input": "Write it.", "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    (item,) = ask(server, "/v1/responses", {**body, "temperature": 1, "seed": seed, "max_output_tokens": 200})["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "write")
    return str(item["input"])


def chat_tool(server: RunningServer, seed: int, syntax: str, definition: str, choice: Any) -> str:
    tool = custom("write", syntax, definition)
    tool["format"] = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    body = {
        "messages": [{"role": "user", "content": "Write it."}],
        "tools": [{"type": "custom", "custom": tool}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 1.2,
        "seed": seed,
        "max_tokens": 200,
    }
    (found,) = ask(server, "/v1/chat/completions", body)["choices"]
    assert found["finish_reason"] == "tool_calls"
    (call,) = found["message"]["tool_calls"]
    assert (call["type"], call["custom"]["name"]) == ("custom", "write")
    return str(call["custom"]["input"])


def person(server: RunningServer, seed: int) -> Any:
    body = {
        "messages": [{"role": "user", "content": f"Describe a person, number {seed}."}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}},
        "temperature": 1,
        "seed": seed,
        "max_tokens": 200,
    }
    (found,) = ask(server, "/v1/chat/completions", body)["choices"]
    assert found["finish_reason"] == "stop"
    return json.loads(found["message"]["content"])


def free(server: RunningServer, seed: int) -> Any:
    """Text and log-probabilities: every float as it was printed."""
    body = {
        "messages": [{"role": "user", "content": f"Tell me about the number {seed}."}],
        "temperature": 0.9,
        "seed": seed,
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 3,
        "logit_bias": {str(token): -100 for token in server.engine.tokenizer.eos_ids},
    }
    return ask(server, "/v1/chat/completions", body)["choices"]


def check(server: RunningServer, watched: Watched, rounds: int) -> None:
    named = {"type": "custom", "name": "write"}
    named_in_chat = {"type": "custom", "custom": {"name": "write"}}
    for first in range(0, 100 * rounds, 100):
        seeds = [first + i for i in range(6)]
        alone = [free(server, seed) for seed in seeds]
        watched.width = 0
        gate = threading.Barrier(SLOTS)

        def at_once(work: Callable[[], Any], gate: threading.Barrier = gate) -> Any:
            gate.wait(60)
            return work()

        tools: list[tuple[str, Callable[[], str]]] = [
            (QUERY_AS_REGEX, lambda s=first: responses_tool(server, s, "lark", QUERY, named)),
            (PATCH, lambda s=first: responses_tool(server, s + 1, "regex", PATCH, "required")),
            (QUERY_AS_REGEX, lambda s=first: chat_tool(server, s + 2, "lark", QUERY, "required")),
            (PATCH, lambda s=first: chat_tool(server, s + 3, "regex", PATCH, named_in_chat)),
            (PATCH, lambda s=first: chat_tool(server, s + 4, "regex", PATCH, named_in_chat)),
        ]
        people = [lambda s=seed: person(server, s) for seed in range(first, first + 5)]
        texts = [lambda s=seed: free(server, s) for seed in seeds]
        work: list[Callable[[], Any]] = [*(ask_tool for _, ask_tool in tools), *people, *texts]
        assert len(work) == SLOTS
        with ThreadPoolExecutor(SLOTS) as pool:
            answers = list(pool.map(at_once, work))
        for (language, _), written in zip(tools, answers[:5], strict=True):
            assert re.fullmatch(language, written), (first, language, written)
        for found in answers[5:10]:
            jsonschema.Draft202012Validator(PERSON).validate(found)
        assert answers[10:] == alone, first
        assert watched.width >= 12, "the sessions did not meet"


def test_sixteen_sampling_sessions(watched: Watched) -> None:
    check(watched.server, watched, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sixteen_sampling_sessions_again_and_again(watched: Watched) -> None:
    check(watched.server, watched, 20)
