"""Greedy texts of a busy server with every cache are those of a server with one session and none, on real models."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig
from ds4.server.config import ServerConfig
from ds4.server.kvpolicy import KvConfig
from tests.support.engines import MODELS, opened
from tests.support.running_server import RunningServer

ENGINE = EngineConfig(ctx=1024, slots=3, threads=2)
SYSTEM = "You are the clerk of a small library. " + "Books are lent for four weeks. " * 10


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with opened(ENGINE, request.param) as engine:
        yield engine


def serve(engine: Engine, directory: Path | None, slots: int) -> RunningServer:
    config = replace(engine.config, slots=slots)
    kv = None
    if directory is not None:
        kv = KvConfig(directory, budget_bytes=60 << 20, min_tokens=64, boundary_align=0, continued_interval=300)
    return RunningServer(engine, ServerConfig(engine=config, port=0, kv=kv))


def ask(http: httpx.Client, messages: list[dict[str, str]], seed: int) -> tuple[str, int]:
    """The greedy answer and how much of its prompt was cached."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 8 + seed % 12, "reasoning_effort": "none"}
    answer = http.post("/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
    content: str = answer["choices"][0]["message"]["content"]
    return content, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


class Client(threading.Thread):
    """Conversations of its own, some begun anew, some asked again, some with an earlier turn edited."""

    def __init__(self, server: RunningServer, seed: int, turns: int) -> None:
        super().__init__()
        self.asked: list[tuple[list[dict[str, str]], int, str]] = []
        self.cached = 0
        self.error: BaseException | None = None
        self._server, self._seed, self._turns = server, seed, turns

    def run(self) -> None:
        try:
            self._talk()
        except BaseException as error:
            self.error = error

    def _talk(self) -> None:
        rng = random.Random(self._seed)
        history: list[dict[str, str]] = []
        with httpx.Client(base_url=self._server.url) as http:
            for turn in range(self._turns):
                what = rng.random()
                if not history or len(history) > 7 or what < 0.2:
                    name = f"I am reader {self._seed}.{turn}. " * rng.randrange(1, 6)
                    history = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": name}]
                elif what < 0.35:
                    history = [*history[:-1], {"role": "user", "content": f"No: {rng.random()}?"}]
                elif what < 0.5:
                    history = [dict(m) for m in history]
                else:
                    said = self.asked[-1][2] or "."
                    question = {"role": "user", "content": f"And {rng.randrange(100)}?"}
                    history = [*history, {"role": "assistant", "content": said}, question]
                seed = rng.randrange(100)
                said, cached = ask(http, history, seed)
                self.asked.append((history, seed, said))
                self.cached += cached


def compare(engine: Engine, directory: Path, clients: int, turns: int, lives: int, seed: int) -> None:
    print(f"seed {seed}")
    asked: list[tuple[list[dict[str, str]], int, str]] = []
    cached = 0
    for life in range(lives):
        server = serve(engine, directory, 3)
        running = [Client(server, seed + 100 * life + i, turns) for i in range(clients)]
        for client in running:
            client.start()
        for client in running:
            client.join()
            if client.error is not None:
                raise client.error
            asked += client.asked
            cached += client.cached
        server.stop()
    plain = serve(engine, None, 1)
    try:
        for history, number, said in asked:
            plain.app._scheduler.slots[0].clear()
            plain.app._scheduler.slots[0].forget()
            assert ask(plain.http, history, number) == (said, 0), history
    finally:
        plain.stop()
    print(f"{len(asked)} answers equal, {cached} prompt tokens from caches")
    assert cached > 0


def test_answers_equal_those_without_any_cache(engine: Engine, tmp_path: Path) -> None:
    compare(engine, tmp_path / "kv", clients=3, turns=2, lives=1, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_answers_equal_those_without_any_cache(engine: Engine, tmp_path: Path) -> None:
    compare(engine, tmp_path / "kv", clients=16, turns=8, lives=3, seed=int.from_bytes(os.urandom(2), "big"))
