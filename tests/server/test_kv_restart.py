"""Checkpoints of real models behind the whole server: a restart costs no prefill and changes no answer.

The demo model, and a small DeepSeek V4 where `DS4_TEST_MODELS` names the folder with `v4-nano/`: its state has rings,
which cannot be cut far back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig
from ds4.server.config import ServerConfig
from ds4.server.kvpolicy import KvConfig
from tests.support.engines import MODELS, opened
from tests.support.running_server import RunningServer

ENGINE = EngineConfig(ctx=1024, slots=1, threads=2)
SYSTEM = "You are a helpful assistant for a small library. " + "Books are lent for four weeks. " * 12


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with opened(ENGINE, request.param) as engine:
        yield engine


class Server(RunningServer):
    def ask(self, messages: list[dict[str, Any]]) -> tuple[str, dict[str, int]]:
        """The greedy answer and how much of the prompt was cached."""
        body = {"messages": messages, "temperature": 0, "max_tokens": 24, "reasoning_effort": "none"}
        answer = self.http.post("/v1/chat/completions", json=body, timeout=120).json()
        usage = answer["usage"]
        return answer["choices"][0]["message"]["content"], {
            "prompt": usage["prompt_tokens"],
            "cached": usage["prompt_tokens_details"]["cached_tokens"],
        }


def serve(engine: Engine, directory: Path | None) -> Server:
    kv = None if directory is None else KvConfig(directory, min_tokens=64)
    return Server(engine, ServerConfig(engine=engine.config, port=0, kv=kv))


def talk(*turns: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": "system", "content": SYSTEM}] + [
        {"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)
    ]


def test_two_conversations_survive_a_restart(engine: Engine, tmp_path: Path) -> None:
    facts = "I live in the old town, I like long novels, and I read in the evening. " * 8
    questions = (f"Which books do you have? {facts}", f"Who are you? {facts}")
    plain = serve(engine, None)
    expected = []
    for question in questions:
        first, _ = plain.ask(talk(question))
        plain.ask(talk("something else"))
        second, _ = plain.ask(talk(question, first, "Tell me more."))
        expected.append((first, second))
    plain.stop()

    server = serve(engine, tmp_path / "kv")
    firsts = [server.ask(talk(question))[0] for question in questions]
    assert firsts == [first for first, _ in expected]
    server.stop()
    server = serve(engine, tmp_path / "kv")
    try:
        for question, (first, second) in zip(questions, expected, strict=True):
            text, usage = server.ask(talk(question, first, "Tell me more."))
            assert text == second
            history = usage["prompt"] - 20
            assert usage["cached"] >= 0.9 * history, usage
    finally:
        server.stop()
