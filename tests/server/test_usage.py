"""Usage with cache figures is the same streamed and not, in all four APIs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds4.server.api.usage import messages_usage, openai_usage, responses_usage
from ds4.server.types import Finish
from ds4.testing import Script, ScriptedEngine
from tests.support.running_server import RunningServer, Serve

SAID = "p</think>one two three"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"stream_options": {"include_usage": True}},
    "/v1/completions": {"stream_options": {"include_usage": True}},
    "/v1/responses": {},
    "/v1/messages": {"max_tokens": 50},
}


def usage(server: RunningServer, path: str, text: str, *, stream: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if path.endswith("responses"):
        said = {"input": text}
    elif path == "/v1/completions":
        said = {"prompt": text}
    response = server.http.post(path, json={**said, **BODIES[path], "stream": stream})
    assert response.status_code == 200
    if not stream:
        found: dict[str, Any] = response.json()["usage"]
        return found
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    data = [json.loads(event) for event in events]
    last = [d.get("response", d).get("usage") for d in data]
    return next(u for u in reversed(last) if u)


def test_one_prompt_in_every_dialects_members() -> None:
    """25,000 tokens of which 24,000 were cached and 600 were stored; 400 are lost when the session goes."""
    finish = Finish("stop", 25_000, 24_000, 600, 50, 20)
    cached = {"cached_tokens": 24_000, "cache_write_tokens": 600}
    assert openai_usage(finish, timings=False) == {
        "prompt_tokens": 25_000,
        "completion_tokens": 50,
        "total_tokens": 25_050,
        "prompt_tokens_details": cached,
        "completion_tokens_details": {"reasoning_tokens": 20},
    }
    assert responses_usage(finish) == {
        "input_tokens": 25_000,
        "input_tokens_details": cached,
        "output_tokens": 50,
        "output_tokens_details": {"reasoning_tokens": 20},
        "total_tokens": 25_050,
    }
    assert messages_usage(25_000, 24_000, 600, 50) == {
        "input_tokens": 400,
        "output_tokens": 50,
        "cache_read_input_tokens": 24_000,
        "cache_creation_input_tokens": 600,
    }


@pytest.mark.parametrize("path", BODIES)
def test_usage_is_the_same_streamed_and_not(serve: Serve, path: str) -> None:
    """Of a new prompt, of the same one again, and of one that goes on with it."""
    texts = ("Tell me.", "Tell me.", "Tell me. More of it, please.")
    seen = []
    for stream in (False, True):
        server = serve(ScriptedEngine(Script.text(SAID, 5), syntax="deepseek4"), slots=1)
        seen.append([usage(server, path, text, stream=stream) for text in texts])
    assert seen[0] == seen[1]
    flat = [json.dumps(u) for u in seen[0]]
    assert flat[0] != flat[1], "the second time the prompt was in the cache"
