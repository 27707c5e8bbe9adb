"""A whole answer whose call cannot be read: the model is told once, and answers again."""

from __future__ import annotations

from typing import Any

import pytest

from ds4.testing import Script, ScriptedEngine
from tests.support.api import chunks, openai_error
from tests.support.running_server import RunningServer, Serve

D = "｜DSML｜"
FUNCTION = {"name": "ls", "parameters": {"type": "object", "properties": {"p": {"type": "string"}}}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "responses": [{"type": "function", **FUNCTION}],
    "messages": [{"name": "ls", "input_schema": FUNCTION["parameters"]}],
}
OPEN = f'\n\n<{D}tool_calls>\n<{D}invoke name="ls">\n<{D}parameter name="p" string="true">/'
GOOD = f"{OPEN}</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>"
UNTERMINATED = f"plan</think>I look.{OPEN}"
MALFORMED = f"plan</think>I look.\n\n<{D}tool_calls>\n<{D}invoke>\n</{D}invoke>\n</{D}tool_calls>"
FIXED = f"oh</think>Again.{GOOD}"


def serve_turns(serve: Serve, *turns: str, **options: Any) -> RunningServer:
    return serve(ScriptedEngine(*(Script.text(turn, 7) for turn in turns), syntax="deepseek4", **options), slots=1)


def ask(server: RunningServer, dialect: str, **fields: Any) -> Any:
    said: dict[str, Any] = {"tools": TOOLS[dialect], **fields}
    path = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}[dialect]
    said["input" if dialect == "responses" else "messages"] = [{"role": "user", "content": "go"}]
    response = server.http.post(path, json=said)
    assert response.status_code == 200, response.text
    return response if fields.get("stream") else response.json()


def parts(body: dict[str, Any]) -> tuple[str, list[tuple[str, Any]]]:
    """(text, calls) of a whole answer in any dialect."""
    if "choices" in body:
        message = body["choices"][0]["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        return message["content"], calls
    if body.get("type") == "message":
        text = "".join(b["text"] for b in body["content"] if b["type"] == "text")
        return text, [
            (b["name"], '{"p":"' + b["input"]["p"] + '"}') for b in body["content"] if b["type"] == "tool_use"
        ]
    text = "".join(i["content"][0]["text"] for i in body["output"] if i["type"] == "message")
    return text, [(i["name"], i["arguments"]) for i in body["output"] if i["type"] == "function_call"]


@pytest.mark.parametrize("dialect", TOOLS)
@pytest.mark.parametrize(
    ("broken", "detail"),
    [(UNTERMINATED, "unterminated tool call"), (MALFORMED, "invalid tool call: invoke without name")],
)
def test_the_model_is_told_and_answers_again(serve: Serve, dialect: str, broken: str, detail: str) -> None:
    server = serve_turns(serve, broken, FIXED, "unused")
    body = ask(server, dialect)
    assert parts(body) == ("Again.", [("ls", '{"p":"/"}')])
    first, second = server.engine.prompts
    assert second.startswith(first + broken + "<｜end▁of▁sentence｜><｜User｜><tool_result>Tool error: ")
    assert f"invalid DSML tool call: {detail}\nThe previous assistant output was not executed" in second
    assert second.endswith("</tool_result><｜Assistant｜><think>")


def test_usage_is_that_of_both_and_only_the_feedback_is_evaluated(serve: Serve) -> None:
    server = serve_turns(serve, UNTERMINATED, FIXED)
    used = ask(server, "chat")["usage"]
    plain = ask(serve_turns(serve, FIXED), "chat")["usage"]
    assert used["prompt_tokens"] == plain["prompt_tokens"]
    assert used["prompt_tokens_details"] == plain["prompt_tokens_details"]
    assert used["completion_tokens"] == plain["completion_tokens"] + -(-len(UNTERMINATED.encode()) // 7)
    assert used["completion_tokens_details"]["reasoning_tokens"] > 0
    told = server.engine.prompts[1].removeprefix(server.engine.prompts[0] + UNTERMINATED)
    evaluated = sum(step.n_tokens for step in server.engine.steps)
    assert evaluated <= used["prompt_tokens"] + used["completion_tokens"] + len(told.encode())


@pytest.mark.parametrize("broken", [UNTERMINATED, MALFORMED])
def test_the_second_broken_call_is_text(serve: Serve, broken: str) -> None:
    server = serve_turns(serve, broken, broken, FIXED)
    choice = ask(server, "chat")["choices"][0]
    assert choice["message"]["content"] == broken.removeprefix("plan</think>")
    assert choice["message"]["reasoning_content"] == "plan"
    assert choice["finish_reason"] == "stop"
    assert len(server.engine.prompts) == 2


def test_an_answer_in_text_is_an_answer(serve: Serve) -> None:
    server = serve_turns(serve, UNTERMINATED, "no</think>I cannot.")
    choice = ask(server, "chat")["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I cannot.", "stop")
    assert choice["message"]["reasoning_content"] == "no"


def test_a_turn_that_ends_in_its_reasoning(serve: Serve) -> None:
    """A block that breaks off inside the reasoning is a thought, and nothing to tell; thinking may be off."""
    server = serve_turns(serve, f"let me{OPEN}", FIXED)
    assert ask(server, "chat")["choices"][0]["finish_reason"] == "stop"
    assert len(server.engine.prompts) == 1
    server = serve_turns(serve, f"I look.{OPEN}", f"Again.{GOOD}")
    assert parts(ask(server, "chat", reasoning_effort="none")) == ("Again.", [("ls", '{"p":"/"}')])
    assert server.engine.prompts[1].endswith("</tool_result><｜Assistant｜></think>")


def test_streams_are_as_they_were_sampled(serve: Serve) -> None:
    server = serve_turns(serve, MALFORMED, FIXED)
    found = chunks(ask(server, "chat", stream=True))
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in found)
    assert text == MALFORMED.removeprefix("plan</think>")
    assert len(server.engine.prompts) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 10},  # cut, which is no mistake of the model
        {"stop": ["invoke name"]},
        {"tools": []},  # nothing is a call
        {"max_tokens": -(-len(UNTERMINATED.encode()) // 7)},  # no budget is left
    ],
)
def test_where_nobody_is_told(serve: Serve, fields: dict[str, Any]) -> None:
    server = serve_turns(serve, UNTERMINATED, FIXED)
    assert ask(server, "chat", **fields)["choices"][0]["finish_reason"] in ("stop", "length")
    assert len(server.engine.prompts) == 1


def test_the_budget_is_one(serve: Serve) -> None:
    server = serve_turns(serve, UNTERMINATED, FIXED)
    n = -(-len(UNTERMINATED.encode()) // 7)
    body = ask(server, "chat", max_tokens=n + 1)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == n + 1


def test_no_room_in_the_context(serve: Serve) -> None:
    server = serve_turns(serve, UNTERMINATED, FIXED, ctx=1600)
    assert parts(ask(server, "chat"))[1] == []
    assert len(server.engine.prompts) == 1


def test_only_the_broken_choice_is_asked_again(serve: Serve) -> None:
    turns = {0: UNTERMINATED, 1: f"t</think>Fine.{GOOD}", 2: FIXED}
    asked: list[str] = []

    def say(prompt: str) -> Script:
        asked.append(prompt)
        return Script.text(turns[2 if "Tool error" in prompt else len(asked) - 1], 7)

    server = serve(ScriptedEngine(say, syntax="deepseek4"), slots=2)
    body = ask(server, "chat", n=2)
    assert [c["message"]["content"] for c in body["choices"]] in (["Again.", "Fine."], ["Fine.", "Again."])
    assert all(len(c["message"]["tool_calls"]) == 1 for c in body["choices"])
    assert len(asked) == 3


def test_log_probabilities_are_those_of_the_answer(serve: Serve) -> None:
    server = serve_turns(serve, UNTERMINATED, "no</think>I cannot.")
    content = ask(server, "chat", logprobs=True)["choices"][0]["logprobs"]["content"]
    assert "".join(t["token"] for t in content) == "no</think>I cannot."


def test_a_failure_of_the_second_answer_is_ours(serve: Serve) -> None:
    engine = ScriptedEngine(Script.text(UNTERMINATED, 7), Script.text(FIXED, 7).fail_at(2), "fine", syntax="deepseek4")
    server = serve(engine, slots=1)
    body = {"messages": [{"role": "user", "content": "go"}], "tools": TOOLS["chat"]}
    found = openai_error(server.http.post("/v1/chat/completions", json=body), 500)
    assert found["message"] == "scripted failure at token 2"
    assert ask(server, "chat")["choices"][0]["finish_reason"] == "stop"
