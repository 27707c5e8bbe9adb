"""Clients of the API for tests: the official SDKs, and readers of raw responses and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai

from tests.support.running_server import RunningServer


def openai_sdk(server: RunningServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", **{"api_key": "k", "max_retries": 0, **options})


def anthropic_sdk(server: RunningServer, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, **{"api_key": "k", "max_retries": 0, **options})


def openai_error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of an OpenAI dialect."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    found = response.json()["error"]
    assert set(found) >= {"message", "type", "param", "code"}
    assert found["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return found


def check_stream(response: httpx.Response) -> None:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream of chunks that ends with `[DONE]`; checks its frame."""
    check_stream(response)
    assert response.text.endswith("data: [DONE]\n\n")
    events = response.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    return [json.loads(e.removeprefix("data: ")) for e in events if not e.startswith(":")]


@dataclass(frozen=True)
class NamedEvent:
    name: str
    data: dict[str, Any]


def named_events(response: httpx.Response) -> list[NamedEvent]:
    """The events of a stream in which each event has an `event:` line and repeats its name as `type`."""
    check_stream(response)
    return parse_events(response.text)


def read_until(pieces: Iterator[bytes], wanted: bytes) -> bytes:
    """What came up to and including the piece with `wanted` in it."""
    got = b""
    while wanted not in got:
        got += next(pieces)
    return got


def parse_events(text: str) -> list[NamedEvent]:
    assert text.endswith("\n\n")
    found = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        head, _, data = block.partition("\n")
        assert head.startswith("event: ") and data.startswith("data: "), block
        event = NamedEvent(head.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        assert event.data["type"] == event.name
        found.append(event)
    return found
