"""The whole server with the demo model: real tokens, real batching, real clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig, SamplingParams
from ds4.server.config import ServerConfig
from tests.support.engines import opened
from tests.support.running_server import RunningServer

QUESTIONS = (
    "What is the capital of France?",
    "Count from one to ten.",
    "Write a haiku about the sea.",
    "Name three colours.",
    "What is 2 + 2?",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "List two animals that can fly.",
)
N_CLIENTS = 16
N_TOKENS = 24


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = EngineConfig(ctx=1024, slots=N_CLIENTS, threads=2)
    with opened(config) as engine:
        running = RunningServer(engine, ServerConfig(engine=config, port=0))
        yield running
        running.stop()


def streamed(url: str, question: str, **fields: object) -> str:
    body = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": N_TOKENS,
        "stream": True,
        **fields,
    }
    text = ""
    with (
        httpx.Client(timeout=240) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                text += choices[0]["delta"].get("content", "") if choices else ""
    return text


def test_sdk_gets_what_the_engine_says(server: RunningServer) -> None:
    """Greedy text as a bare session gives it, the reference's prompt, and log-probabilities."""
    data = json.loads((Path(__file__).parent.parent / "data/smollm2/reference.json").read_text())
    case = data["cases"]["code_chat"]
    question = case["text"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    n_tokens = len(case["greedy_ids"])
    bare = Engine.open(EngineConfig(ctx=256, slots=1, threads=2))
    text = "".join(bare.generate(case["prompt_ids"], SamplingParams(temperature=0), max_tokens=n_tokens))
    bare.close()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=n_tokens,
            logprobs=True,
            top_logprobs=3,
        )
    choice = answer.choices[0]
    assert choice.message.content == text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(case["prompt_ids"])
    assert answer.usage.completion_tokens == n_tokens
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert "".join(t.token for t in tokens) == text
    for token in tokens:
        assert token.logprob <= 0
        assert token.logprob == max(top.logprob for top in token.top_logprobs)


def test_sixteen_streams_equal_single_runs(server: RunningServer) -> None:
    """Greedy texts do not depend on who else is served: the same 16 requests, one by one and all at once."""
    requests = [f"{QUESTIONS[i % len(QUESTIONS)]} (client {i})" for i in range(N_CLIENTS)]
    alone = [streamed(server.url, request) for request in requests]
    together: dict[int, str] = {}

    def ask(i: int) -> None:
        together[i] = streamed(server.url, requests[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(N_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together.get(i) for i in range(N_CLIENTS)] == alone
    assert all(alone)
    metrics = dict(line.rsplit(" ", 1) for line in server.http.get("/metrics").text.splitlines() if line[0] != "#")
    narrow, steps = float(metrics['ds4_step_rows_bucket{le="8.0"}']), float(metrics["ds4_step_rows_count"])
    assert narrow < steps, "no step had more than eight rows: nothing was batched"


def test_same_seed_same_text(server: RunningServer) -> None:
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    first = streamed(server.url, "Tell me something.", **fields)
    assert streamed(server.url, "Tell me something.", **fields) == first
    assert any(streamed(server.url, "Tell me something.", **{**fields, "seed": s}) != first for s in (6, 7))


def test_second_turn_reuses_the_first(server: RunningServer) -> None:
    history = [{"role": "user", "content": "Say hello."}]
    body = {"messages": history, "temperature": 0, "max_tokens": 8}
    first = server.http.post("/v1/chat/completions", json=body).json()
    history += [first["choices"][0]["message"], {"role": "user", "content": "Again."}]
    second = server.http.post("/v1/chat/completions", json=body).json()["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    assert second["prompt_tokens"] > first["usage"]["prompt_tokens"]


def test_text_completion_is_what_the_engine_says(server: RunningServer) -> None:
    """A raw prompt, as text and as the reference's tokens: the same ids in, the greedy text of a bare session out."""
    data = json.loads((Path(__file__).parent.parent / "data/smollm2/reference.json").read_text())
    case = data["cases"]["plain_completion"]
    n_tokens = len(case["greedy_ids"])
    bare = Engine.open(EngineConfig(ctx=256, slots=1, threads=2))
    text = "".join(bare.generate(case["prompt_ids"], SamplingParams(temperature=0), max_tokens=n_tokens))
    bare.close()
    for prompt in (case["text"], case["prompt_ids"]):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": n_tokens, "logprobs": 2}
        answer = server.http.post("/v1/completions", json=body).json()
        choice = answer["choices"][0]
        assert choice["text"] == text
        assert "".join(choice["logprobs"]["tokens"]) == text
        assert answer["usage"]["prompt_tokens"] == len(case["prompt_ids"])


def test_every_dialect_gives_the_same_answer(server: RunningServer) -> None:
    question = {"role": "user", "content": QUESTIONS[0]}
    expected = streamed(server.url, QUESTIONS[0])
    with anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client:
        asked = {"model": "m", "max_tokens": N_TOKENS, "messages": [question], "extra_body": {"temperature": 0}}
        message = client.messages.create(**asked)
        with client.messages.stream(**asked) as events:
            assert "".join(events.text_stream) == expected
    assert [block.text for block in message.content if block.type == "text"] == [expected]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        request = {"model": "m", "input": QUESTIONS[0], "temperature": 0, "max_output_tokens": N_TOKENS}
        response = client.responses.create(**request)
        deltas = [
            event.delta for event in client.responses.create(**request, stream=True) if "text.delta" in event.type
        ]
    assert "".join(deltas) == expected
    assert response.output_text == expected
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens > 0
    assert response.usage.input_tokens == message.usage.input_tokens + sum(
        count or 0 for count in (message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens)
    )


def test_choices_of_one_prompt(server: RunningServer) -> None:
    """Greedy choices are equal, seeded ones are those of their seeds alone."""
    body = {"messages": [{"role": "user", "content": QUESTIONS[3]}], "max_tokens": 12, "temperature": 0, "n": 3}
    texts = [c["message"]["content"] for c in server.http.post("/v1/chat/completions", json=body).json()["choices"]]
    assert texts[0] and len(set(texts)) == 1
    sampled = server.http.post("/v1/chat/completions", json={**body, "temperature": 1, "seed": 5}).json()["choices"]
    for index, choice in enumerate(sampled):
        alone = streamed(server.url, QUESTIONS[3], temperature=1, seed=5 + index, max_tokens=12)
        assert choice["message"]["content"] == alone
