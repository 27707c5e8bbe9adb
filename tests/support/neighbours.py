"""Streams that run beside something else and must not notice it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from ds4.testing import Script
from tests.support.running_server import RunningServer

N_WORDS = 150
DELAY = 0.004
"""Seconds of work per token."""


def words(name: str) -> str:
    return " ".join(f"{name}.{i}" for i in range(N_WORDS))


def say(prompt: str) -> Script | None:
    """What the model answers to a neighbour; None for others."""
    found = re.search(r"neighbour (\d+)", prompt)
    return Script.text(words(f"n{found[1]}")).slow(DELAY) if found else None


class Neighbour(threading.Thread):
    """One streamed chat answer. `began` is set with its first word; `text` is all of it at the end."""

    def __init__(self, server: RunningServer, number: int) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.number = number
        self.began = threading.Event()
        self.text = ""

    def run(self) -> None:
        body = {"messages": [{"role": "user", "content": f"neighbour {self.number}"}], "stream": True}
        with (
            httpx.Client(base_url=self.server.url, timeout=120) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                    if self.text:
                        self.began.set()

    def check(self) -> None:
        """Waits for the end; the answer must be whole."""
        self.join(120)
        assert self.text == words(f"n{self.number}")


@contextmanager
def neighbours(server: RunningServer, count: int = 3) -> Iterator[list[Neighbour]]:
    """Streams that are running when the block begins, of a model that answers by `say`; at its end they are checked."""
    streams = [Neighbour(server, number) for number in range(count)]
    for stream in streams:
        stream.start()
    for stream in streams:
        assert stream.began.wait(60)
    assert all(stream.is_alive() for stream in streams), "over before anything happened"
    yield streams
    for stream in streams:
        stream.check()
