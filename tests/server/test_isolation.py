"""Nobody's answer depends on anybody else: many clients with secrets, evictions, a small disk cache, restarts."""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from ds4.prompt.chatml import ChatMLRenderer
from ds4.prompt.types import Conversation, Message
from ds4.server.http import Limits
from ds4.server.kvpolicy import KvConfig
from ds4.testing import ScriptedEngine
from ds4.testing.tokenizer import ScriptedTokenizer
from tests.support.running_server import RunningServer, Serve

N_CLIENTS = 16
PATIENT = Limits(head_timeout=300.0, read_timeout=300.0, request_timeout=600.0, stall_timeout=300.0)
"""A machine that others use may stand still for longer than a client has to send its request."""


def answer(prompt: str) -> str:
    """What the scripted model says of all that its session holds: the secret in it, and a digest of every byte."""
    secret = re.search(r"secret is (\w+)", prompt)
    digest = hashlib.blake2b(prompt.encode(), digest_size=6).hexdigest()
    return f"You said {secret[1] if secret else 'nothing'}, and {digest} is what I saw."


class Client:
    """One conversation. Knows what a model must answer that sees this conversation and nothing else."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.secret = f"word{self.rng.randrange(10**9)}"
        self.history = self.beginning()
        self.cached = 0
        self.left = 0
        """Streams that it has left in the middle."""

    def beginning(self) -> list[dict[str, str]]:
        padding = "Please keep it to yourself. " * self.rng.randrange(1, 12)
        return [
            {"role": "system", "content": "You repeat secrets. " * 8},
            {"role": "user", "content": f"My secret is {self.secret}. {padding}"},
        ]

    def turn(self, http: httpx.Client) -> None:
        if len(self.history) > 2 and self.rng.random() < 0.2:
            # Another last turn; the answer before it is what it was.
            self.history[-1] = {"role": "user", "content": f"And now, what is it? {self.rng.random()}"}
        body = {"model": "m", "messages": self.history, "temperature": 0}
        if self.rng.random() < 0.15:
            self.leave(http, body)
            return
        reply = http.post("/v1/chat/completions", json=body).json()
        said = reply["choices"][0]["message"]["content"]
        messages = tuple(Message(m["role"], m["content"]) for m in self.history)  # type: ignore[arg-type]
        assert said == answer(ChatMLRenderer().render(Conversation(messages)).text), self.secret
        assert self.secret in said
        self.cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        what = self.rng.random()
        if what < 0.15:
            self.history = self.beginning()
        elif what > 0.3:  # else the same is asked again
            question = f"And what is it? {self.rng.random()}"
            self.history += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]

    def leave(self, http: httpx.Client, body: dict[str, Any]) -> None:
        """Reads some of the answer, which must be the beginning of the right one, and is gone."""
        wanted = self.rng.randrange(1, 12)
        got = ""
        with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    got += choice["delta"].get("content") or ""
                wanted -= 1
                if not wanted:
                    break
        messages = tuple(Message(m["role"], m["content"]) for m in self.history)  # type: ignore[arg-type]
        assert answer(ChatMLRenderer().render(Conversation(messages)).text).startswith(got), self.secret
        self.left += 1


def serve_clients(server: RunningServer, clients: list[Client], *, rounds: int, seconds: float = 0.0) -> int:
    """All clients at once, each at its own pace; how many turns were had."""
    errors: list[BaseException] = []
    deadline = time.monotonic() + seconds
    turns = [0] * len(clients)

    def work(index: int) -> None:
        try:
            with httpx.Client(base_url=server.url, timeout=120) as http:
                while turns[index] < rounds or time.monotonic() < deadline:
                    clients[index].turn(http)
                    turns[index] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(turns)


def run(
    serve: Serve, directory: Path, seed: int, *, lives: int, rounds: int, seconds: float = 0.0, rings: bool = False
) -> None:
    """`rings`: sessions that can be cut back by few tokens, and keep snapshots."""
    print(f"seed {seed}")
    sessions: dict[str, Any] = {"rewinds": False, "slack": 24, "snapshots": 3} if rings else {}
    clients = [Client(seed * 1000 + i) for i in range(N_CLIENTS)]
    kv = KvConfig(directory, budget_bytes=60_000, min_tokens=64, boundary_align=0, continued_interval=200)
    turns = 0
    tokenizer = ScriptedTokenizer()
    for _ in range(lives):
        engine = ScriptedEngine(answer, ctx=16384, tokenizer=tokenizer, **sessions)
        server = serve(engine, slots=4, kv=kv, limits=PATIENT)
        turns += serve_clients(server, clients, rounds=rounds, seconds=seconds / lives)
        server.stop()
        assert sum(path.stat().st_size for path in directory.glob("*.kv")) <= kv.budget_bytes
    cached = sum(client.cached for client in clients)
    left = sum(client.left for client in clients)
    print(f"{turns} turns, {left} of them left in the middle, {cached} prompt tokens from caches, no foreign secret")
    assert cached > 0 and left > 0


@pytest.mark.parametrize("rings", [False, True])
def test_sixteen_clients_and_four_sessions(serve: Serve, tmp_path: Path, rings: bool) -> None:
    run(serve, tmp_path / "kv", 1, lives=2, rounds=6, rings=rings)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rings", [False, True])
def test_ten_minutes(serve: Serve, tmp_path: Path, rings: bool) -> None:
    run(serve, tmp_path / "kv", int(time.time()), lives=20, rounds=1, seconds=600, rings=rings)


def test_the_oracle_sees_a_foreign_byte() -> None:
    """The check can fail: any other byte in the session is another answer."""
    client: Any = Client(1)
    text = ChatMLRenderer().render(Conversation((Message("user", client.history[1]["content"]),))).text
    assert answer(text) != answer(text.replace("keep", "keeq"))
