"""`--template` and the efforts of DeepSeek's models, from the request to the prompt."""

from __future__ import annotations

import pytest

from ds4.errors import ConfigError
from ds4.prompt.deepseek4 import ABSOLUTE_MAXIMUM, BEYOND_MAXIMUM
from ds4.prompt.registry import MAX_EFFORT_CONTEXT
from ds4.server.api.prepare import Preparer
from ds4.testing.engine import ScriptedEngine
from tests.support.running_server import RunningServer, Serve


def prompt(server: RunningServer, **fields: object) -> str:
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], **fields}
    text: str = server.http.post("/apply-template", json=body).json()["prompt"]
    return text


def test_templates(serve: Serve) -> None:
    own = serve(ScriptedEngine(syntax="deepseek4"))
    official = serve(ScriptedEngine(syntax="deepseek4"), template="official")
    head, end = "<｜begin▁of▁sentence｜>", "<｜Assistant｜><think>"
    assert prompt(own) == f"{head}<｜User｜>a<｜User｜>b{end}"
    assert prompt(official) == f"{head}{ABSOLUTE_MAXIMUM}<｜User｜>a\n\nb{end}"


@pytest.mark.parametrize("ctx", [MAX_EFFORT_CONTEXT - 1, MAX_EFFORT_CONTEXT])
def test_effort_max_needs_room(serve: Serve, ctx: int) -> None:
    own = serve(ScriptedEngine(syntax="deepseek4", ctx=ctx))
    assert (ABSOLUTE_MAXIMUM in prompt(own, reasoning_effort="max")) is (ctx == MAX_EFFORT_CONTEXT)
    official = serve(ScriptedEngine(syntax="deepseek4", ctx=ctx), template="official")
    assert BEYOND_MAXIMUM in prompt(official, reasoning_effort="max")


def test_levels_are_for_models_that_were_trained_on_them(serve: Serve) -> None:
    v41 = serve(ScriptedEngine(syntax="deepseek41"))
    assert "Reasoning Effort: 42 (range" in prompt(v41, reasoning_effort=42)
    assert prompt(v41, reasoning_effort=0).endswith("<｜Assistant｜></think>")
    for syntax in ("deepseek4", "glm", "qwen"):
        body = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": 42}
        answer = serve(ScriptedEngine(syntax=syntax)).http.post("/apply-template", json=body)
        assert answer.status_code == 400
        assert "takes no numeric effort: expected one of max, xhigh, high" in answer.json()["error"]["message"]


def test_no_official_template() -> None:
    with pytest.raises(ConfigError, match="prompt syntax glm has no template 'official'"):
        Preparer(ScriptedEngine(syntax="glm"), 100, template="official")


def test_results_and_text_of_one_message(serve: Serve) -> None:
    """Blocks of one Anthropic message are one user turn for V4."""
    server = serve(ScriptedEngine("Done.", syntax="deepseek4"))
    blocks = [
        {"type": "tool_result", "tool_use_id": "t", "content": "R"},
        {"type": "text", "text": "and?"},
    ]
    use = [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": use},
        {"role": "user", "content": blocks},
    ]
    body = {"model": "m", "max_tokens": 5, "messages": messages, "thinking": {"type": "disabled"}}
    assert server.http.post("/v1/messages", json=body).status_code == 200
    engine = server.engine
    assert isinstance(engine, ScriptedEngine)
    assert engine.prompts[-1].endswith("<｜User｜><tool_result>R</tool_result>and?<｜Assistant｜></think>")
