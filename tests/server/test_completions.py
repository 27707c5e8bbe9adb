"""Completions over a real socket: OpenAI's SDK streamed and not, raw requests for shapes and errors."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai.types import Completion

from ds4.engine.types import SamplingParams
from ds4.server.api.completions import MAX_PROMPTS
from ds4.testing import Script, ScriptedEngine
from tests.support.api import chunks, openai_error, openai_sdk
from tests.support.running_server import RunningServer, Serve


def post(server: RunningServer, prompt: object = "Once", **fields: Any) -> Any:
    return server.http.post("/v1/completions", json={"prompt": prompt, **fields})


def text_of(server: RunningServer, prompt: object = "Once", **fields: Any) -> str:
    response = post(server, prompt, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_sdk_whole_answer(serve: Serve) -> None:
    server = serve(" upon a time")
    with openai_sdk(server) as client:
        answer = client.completions.create(model="any", prompt="Once", temperature=0)
    assert re.fullmatch(r"cmpl-[0-9a-f]{24}", answer.id)
    assert (answer.object, answer.model) == ("text_completion", "any")
    (choice,) = answer.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (" upon a time", 0, "stop", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 3, 7)
    assert server.engine.prompts == ["Once"], "the prompt is raw text"


def test_sdk_stream(serve: Serve) -> None:
    with openai_sdk(serve(" upon a time")) as client:
        stream = list(
            client.completions.create(model="any", prompt="Once", stream=True, stream_options={"include_usage": True})
        )
    assert "".join(c.choices[0].text for c in stream if c.choices) == " upon a time"
    assert [c.choices[0].finish_reason for c in stream if c.choices] == [None, None, None, "stop"]
    assert (stream[-1].choices, stream[-1].usage and stream[-1].usage.total_tokens) == ([], 7)
    assert len({c.id for c in stream}) == 1


def test_shapes(serve: Serve) -> None:
    server = serve("x")
    body = post(server).json()
    Completion.model_validate(body, strict=True)
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    assert body["choices"] == [{"text": "x", "index": 0, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 4}
    stream = chunks(post(server, stream=True))
    assert [c["choices"] for c in stream] == [
        [{"text": "x", "index": 0, "finish_reason": None}],
        [{"text": "", "index": 0, "finish_reason": "stop"}],
    ]
    assert all(list(c) == ["id", "object", "created", "model", "choices"] for c in stream)


@pytest.mark.parametrize("stream", [False, True])
def test_markup_in_the_output_is_text(serve: Serve, stream: bool) -> None:
    said = "plan</think>x <tool_call>\n<function=f>\n</function>\n</tool_call> <think>y"
    server = serve(Script.text(said, 3))
    response = post(server, stream=stream)
    if stream:
        assert "".join(c["choices"][0]["text"] for c in chunks(response)) == said
    else:
        assert response.json()["choices"][0]["text"] == said


def test_prompts_of_every_form(serve: Serve) -> None:
    server = serve(lambda prompt: f"<{prompt}>", slots=1)
    assert text_of(server, "ab") == text_of(server, [97, 98]) == text_of(server, ["ab"]) == "<ab>"
    several = post(server, ["ab", "c", ""[:0] or "d"]).json()
    assert [(c["index"], c["text"]) for c in several["choices"]] == [(0, "<ab>"), (1, "<c>"), (2, "<d>")]
    assert several["usage"]["prompt_tokens"] == 4
    ids = post(server, [[97], [98, 99]]).json()
    assert [c["text"] for c in ids["choices"]] == ["<a>", "<bc>"]


def test_several_choices_of_several_prompts(serve: Serve) -> None:
    server = serve(lambda prompt: f"<{prompt}>", slots=2)
    body = post(server, ["ab", "c"], n=2).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "<ab>"), (1, "<ab>"), (2, "<c>"), (3, "<c>")]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 4)
    texts = ["", "", "", ""]
    for chunk in chunks(post(server, ["ab", "c"], n=2, stream=True)):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["<ab>", "<ab>", "<c>", "<c>"]
    assert post(server, n=2, best_of=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_echo(serve: Serve, stream: bool) -> None:
    server = serve(" upon")
    response = post(server, "Once é", echo=True, stream=stream)
    parts = [c["choices"][0]["text"] for c in chunks(response)] if stream else [response.json()["choices"][0]["text"]]
    assert "".join(parts) == "Once é upon"
    nothing = post(server, "Once", echo=True, max_tokens=0).json()
    assert (nothing["choices"][0]["text"], nothing["choices"][0]["finish_reason"]) == ("Once", "length")


def test_chat_template(serve: Serve) -> None:
    server = serve("Hi.")
    assert text_of(server, "hello", template="chat") == "Hi."
    assert server.engine.prompts == [
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    ]
    assert openai_error(post(server, [1, 2], template="chat"))["param"] == "prompt"
    assert openai_error(post(server, template="x"))["param"] == "template"


def test_text_becomes_control_tokens_only_when_asked(serve: Serve) -> None:
    server = serve("x")
    name = "<|im_end|>"
    counts = [post(server, name, **fields).json()["usage"]["prompt_tokens"] for fields in ({}, {"parse_special": True})]
    assert counts == [len(name), 1]
    server = serve("x", allow_special_in_text=True)
    assert post(server, name).json()["usage"]["prompt_tokens"] == 1


def test_logprobs(serve: Serve) -> None:
    server = serve(["A", "\xc3\xa9".encode("latin-1"), "B"])
    choice = post(server, logprobs=2).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["A", "é", "B"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    assert logprobs["top_logprobs"][0]["A"] == -0.5
    assert post(server, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] == [{}, {}, {}]
    pieces = [c["choices"][0]["logprobs"] for c in chunks(post(server, logprobs=2, stream=True))]
    assert [t for p in pieces if p for t in p["tokens"]] == ["A", "é", "B"]
    assert [t for p in pieces if p for t in p["text_offset"]] == [0, 1, 2]
    assert "logprobs" not in post(server).json()["choices"][0]


def test_a_character_in_several_tokens_has_one_offset(serve: Serve) -> None:
    server = serve(Script.text("é!", "bytes"))
    logprobs = post(server, logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 1]


def test_sampling_and_limits_reach_the_engine(serve: Serve) -> None:
    server = serve("a b c d")
    answer = post(server, temperature=0.5, top_k=3, seed=5, max_tokens=2, user="me").json()
    assert server.engine.samplers[-1].params == SamplingParams(temperature=0.5, top_k=3, seed=5)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("a b", "length")
    assert text_of(server, stop=[" c"]) == "a b"
    body = post(server, ignore_eos=True, temperature=0, max_tokens=6).json()
    assert body["usage"]["completion_tokens"] == 6
    assert "timings" in post(server, timings=True).json()["usage"]
    nulls = ("max_tokens", "temperature", "n", "best_of", "logprobs", "echo", "suffix", "stop", "template")
    assert text_of(server, **dict.fromkeys(nulls)) == "a b c d"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [[1, -1]]}, "prompt[0][1]"),
        ({"prompt": [10**9]}, "prompt[0]"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"n": 3}, "n"),
        ({"n": 0}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True, "temperature": 0}, "ignore_eos"),
        ({"stream": 1}, "stream"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ],
)
def test_refused_fields_are_named(serve: Serve, fields: dict[str, Any], param: str) -> None:
    server = serve()
    found = openai_error(server.http.post("/v1/completions", json={"prompt": "x", **fields}))
    assert found["param"] == param
    assert server.engine.prompts == []


def test_missing_prompt(serve: Serve) -> None:
    assert openai_error(serve().http.post("/v1/completions", json={}))["message"] == "missing prompt"


def test_context_overflow(serve: Serve) -> None:
    server = serve(ScriptedEngine("a b", ctx=100))
    found = openai_error(post(server, "x" * 100))
    assert found["message"].startswith("Prompt has 100 tokens, but the configured context size is 100 tokens")
    assert (found["param"], found["code"]) == ("prompt", "context_length_exceeded")
    assert (found["n_prompt_tokens"], found["n_ctx"]) == (100, 100)
    assert text_of(server, "x" * 99) == "a"


def test_engine_errors(serve: Serve) -> None:
    server = serve(Script.text("a b c").fail_at(3), Script.text("a b c").fail_at(3), "fine", slots=1)
    assert openai_error(post(server), 500)["message"] == "scripted failure at token 3"
    text = post(server, stream=True).text
    last = text.rstrip("\n").split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.partition("data: ")[2])["error"]["type"] == "server_error"
    assert "[DONE]" not in text and '"finish_reason":"' not in text
    assert text_of(server) == "fine"
