"""ds4-server with a disk cache is killed at random moments under load: afterwards nothing is broken, only missing."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import httpx
import pytest

from ds4.cli.main import main
from ds4.engine.demo import demo_model_path
from ds4.errors import ConfigError
from ds4.server.kvdir import temporary_files
from tests.support.server_process import ServerProcess

BUDGET_MIB = 20
QUESTIONS = [f"Question {i}: what do you know about the number {i}? " + "Be short and clear. " * 24 for i in range(3)]


def start(directory: Path) -> ServerProcess:
    """With the demo model."""
    flags = ["--ctx", "512", "--batched-session", "2", "--threads", "2"]
    flags += ["--kv-disk-dir", str(directory), "--kv-cache-min-tokens", "32"]
    flags += ["--kv-cache-boundary-align-tokens", "0", "--kv-cache-budget-mb", str(BUDGET_MIB)]
    return ServerProcess(*flags)


def ask(server: ServerProcess, question: str) -> tuple[str, int]:
    """The answer, and how many tokens of its prompt were cached."""
    sent = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 6}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=sent, timeout=120)
    body = answer.raise_for_status().json()
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def load(url: str, seed: float, over: threading.Event) -> None:
    """Asks until the server is gone."""
    rng = random.Random(seed)
    with httpx.Client(base_url=url, timeout=60) as http:
        try:
            while not over.is_set():
                messages = [{"role": "user", "content": rng.choice(QUESTIONS)}]
                http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4})
        except httpx.HTTPError:
            return


def kill_rounds(directory: Path, rounds: int, seed: int) -> int:
    print(f"seed {seed}")
    rng = random.Random(seed)
    server = start(directory)
    expected = [ask(server, question)[0] for question in QUESTIONS]
    server.stop()
    for path in directory.glob("*.kv"):
        path.unlink()
    hits = kills = 0
    server = start(directory)
    for _ in range(rounds):
        over = threading.Event()
        clients = [threading.Thread(target=load, args=(server.url, rng.random(), over)) for _ in range(3)]
        for client in clients:
            client.start()
        time.sleep(rng.random() * 4)
        server.kill()
        assert not any("damaged" in line for line in server.lines), server.lines
        over.set()
        for client in clients:
            client.join()
        kills += 1
        assert main(["kv", "verify", "-q", str(directory)]) == 0, "what has a name is whole, also before anybody tidies"
        server = start(directory)
        assert temporary_files(directory) == []
        assert sum(path.stat().st_size for path in directory.glob("*.kv")) <= BUDGET_MIB << 20
        asked = rng.randrange(len(QUESTIONS))
        said, cached = ask(server, QUESTIONS[asked])
        assert said == expected[asked]
        hits += cached > 0
        print(f"kill {kills} of {rounds}: whole, {cached} tokens from disk", flush=True)
    server.stop()
    print(f"{kills} kills, {hits} restarts answered from disk, every file whole, every answer right")
    return hits


@pytest.fixture(autouse=True)
def _demo() -> None:
    try:
        demo_model_path()
    except ConfigError as error:
        pytest.skip(str(error))


def test_killed_under_load(tmp_path: Path) -> None:
    kill_rounds(tmp_path / "kv", 1, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_two_hundred_times_under_load(tmp_path: Path) -> None:
    assert kill_rounds(tmp_path / "kv", 200, 2) > 20
