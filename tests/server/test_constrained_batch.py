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
from dataclasses import dataclass
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
        self._awaited = 0
        self._together = threading.Event()
        self._together.set()
        step = server.engine.step
        submit = server.app._scheduler.submit

        def counted(rows: Any, *, wake: int | None = None) -> list[RowResult]:
            assert self._together.wait(120)
            self.width = max(self.width, len(rows))
            return step(rows, wake=wake)

        def arrived(*arguments: Any) -> Any:
            job = submit(*arguments)
            self._awaited -= 1
            if self._awaited == 0:
                self._together.set()
            return job

        server.engine.step = counted  # type: ignore[method-assign]
        server.app._scheduler.submit = arrived  # type: ignore[method-assign]

    def gather(self, requests: int) -> None:
        """Nothing is evaluated until so many requests have come."""
        self.width = 0
        self._awaited = requests
        self._together.clear()


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    config = EngineConfig(ctx=1024, slots=SLOTS, threads=2)
    with opened(config) as engine:
        running = RunningServer(engine, ServerConfig(engine=config, port=0))
        yield Watched(running)
        running.stop()


@dataclass(frozen=True)
class Wanted:
    """A request, how its answer is read, and what must hold of it."""

    path: str
    body: dict[str, Any]
    read: Callable[[Any], Any]
    holds: Callable[[Any], object] = lambda found: True

    def ask(self, server: RunningServer, **fields: Any) -> Any:
        with httpx.Client(base_url=server.url, timeout=240) as http:
            response = http.post(self.path, json={**self.body, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def evaluate(self, server: RunningServer) -> None:
        """The prompt alone, so that the answers of many requests begin together."""
        self.ask(server, max_tokens=0)


def matches(pattern: str) -> Callable[[Any], object]:
    return lambda text: re.fullmatch(pattern, text)


def responses_tool(seed: int, syntax: str, definition: str, language: str, choice: Any) -> Wanted:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    body = {
        "input": "Write it.",
        "tools": [{"type": "custom", "name": "write", "description": "writes", "format": form}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 1,
        "seed": seed,
    }

    def read(answer: Any) -> str:
        (item,) = answer["output"]
        assert (answer["status"], item["type"], item["name"]) == ("completed", "custom_tool_call", "write")
        return str(item["input"])

    return Wanted("/v1/responses", body, read, matches(language))


def chat_tool(seed: int, syntax: str, definition: str, language: str, choice: Any) -> Wanted:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    body = {
        "messages": [{"role": "user", "content": "Write it."}],
        "tools": [{"type": "custom", "custom": {"name": "write", "description": "writes", "format": form}}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 1.2,
        "seed": seed,
    }

    def read(answer: Any) -> str:
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], call["type"], call["custom"]["name"]) == ("tool_calls", "custom", "write")
        return str(call["custom"]["input"])

    return Wanted("/v1/chat/completions", body, read, matches(language))


def person(seed: int) -> Wanted:
    body = {
        "messages": [{"role": "user", "content": f"Describe a person, number {seed}."}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}},
        "temperature": 1,
        "seed": seed,
    }

    def read(answer: Any) -> Any:
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        return json.loads(choice["message"]["content"])

    return Wanted("/v1/chat/completions", body, read, jsonschema.Draft202012Validator(PERSON).is_valid)


def free(seed: int, never: tuple[int, ...]) -> Wanted:
    """Text and log-probabilities: every float as it was printed. It does not end before its limit."""
    body = {
        "messages": [{"role": "user", "content": f"Tell me about the number {seed}."}],
        "temperature": 0.9,
        "seed": seed,
        "max_tokens": 24,
        "logprobs": True,
        "top_logprobs": 3,
        "logit_bias": {str(token): -100 for token in never},
    }
    return Wanted("/v1/chat/completions", body, lambda answer: answer["choices"])


def check(watched: Watched, rounds: int) -> None:
    server = watched.server
    named, named_in_chat = ({"type": "custom", **name} for name in ({"name": "write"}, {"custom": {"name": "write"}}))
    for first in range(0, 100 * rounds, 100):
        held = [
            responses_tool(first, "lark", QUERY, QUERY_AS_REGEX, named),
            responses_tool(first + 1, "regex", PATCH, PATCH, "required"),
            chat_tool(first + 2, "lark", QUERY, QUERY_AS_REGEX, "required"),
            chat_tool(first + 3, "regex", PATCH, PATCH, named_in_chat),
            chat_tool(first + 4, "regex", PATCH, PATCH, named_in_chat),
            *(person(seed) for seed in range(first, first + 5)),
        ]
        unheld = [free(seed, server.engine.tokenizer.eos_ids) for seed in range(first, first + 6)]
        alone = [wanted.read(wanted.ask(server)) for wanted in unheld]
        for wanted in held:
            wanted.evaluate(server)
        watched.gather(SLOTS)
        with ThreadPoolExecutor(SLOTS) as pool:
            answers = list(pool.map(lambda wanted: wanted.ask(server), [*held, *unheld]))
        for wanted, answer in zip(held, answers[: len(held)], strict=True):
            found = wanted.read(answer)
            assert wanted.holds(found), (first, wanted.body, found)
        assert [wanted.read(answer) for wanted, answer in zip(unheld, answers[len(held) :], strict=True)] == alone, (
            first
        )
        assert watched.width == SLOTS, "the sessions did not meet"


def test_sixteen_sampling_sessions(watched: Watched) -> None:
    check(watched, 1)


COMMAND = r"git (status|log|diff)( -[a-z]{1,3}){0,2}"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_calls_that_a_model_chooses_to_make() -> None:
    """DeepSeek's syntax, whose marks are tokens: nothing forces a call, the input of every call that comes is held, and
    what the model says to others is what it says alone."""
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": COMMAND}}
    git = {"name": "git", "description": "Run a git command.", "format": form}
    weather = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": WEATHER}
    common = {"thinking": False, "temperature": 0.7, "max_tokens": 60}
    tools = [{"type": "custom", "custom": git}, {"type": "function", "function": weather}]

    def wanted(text: str, seed: int, tools: list[dict[str, Any]]) -> Wanted:
        body = {"messages": [{"role": "user", "content": text}], "tools": tools, "seed": seed, **common}
        return Wanted("/v1/chat/completions", body, lambda answer: answer["choices"][0]["message"])

    # The second one is not in the language: without the grammar the model writes it.
    asked = ("Run `git status` please.", "Run `git push origin main` please.")
    held = [wanted(asked[seed % 2], seed, tools) for seed in range(8)]
    unheld = [wanted("What is the weather in Paris?", seed, tools[1:]) for seed in range(8)]
    config = EngineConfig(ctx=2048, slots=SLOTS, threads=2)
    with opened(config, "v4-nano") as engine:
        server = RunningServer(engine, ServerConfig(engine=config, port=0))
        watched = Watched(server)
        alone = [w.read(w.ask(server)) for w in unheld]
        for w in held:
            w.evaluate(server)
        watched.gather(SLOTS)
        with ThreadPoolExecutor(SLOTS) as pool:
            found = list(pool.map(lambda w: w.ask(server), [*held, *unheld]))
        answers = [w.read(answer) for w, answer in zip([*held, *unheld], found, strict=True)]
        server.stop()
    made = [call for message in answers[:8] for call in message.get("tool_calls", ())]
    commands = [call["custom"]["input"] for call in made if call["type"] == "custom"]
    print(f"{len(made)} calls, commands {commands}")
    assert len(commands) >= 4 and all(re.fullmatch(COMMAND, command) for command in commands)
    assert [without_ids(message) for message in answers[8:]] == [without_ids(message) for message in alone]
    assert any("tool_calls" in message for message in alone)
    assert watched.width == SLOTS, "the sessions did not meet"


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sixteen_sampling_sessions_again_and_again(watched: Watched) -> None:
    check(watched, 20)
