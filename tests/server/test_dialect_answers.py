"""One text of a model is one answer in three dialects, streamed and not: same reasoning, content, calls and end.

Texts are well-formed turns of every syntax, damaged ones, and soups of tags. Where a whole answer had a broken call the
model was asked again; then the stream, which nobody can take back, must not have completed a call.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from ds4.testing import Script, ScriptedEngine
from tests.support.api import named_events
from tests.support.running_server import RunningServer, Serve
from tests.support.turns import SYNTAXES, damaged, random_calls, soup, written

GAVE_UP = "I give up."
NAMES = ("f", "get_weather", "mcp.read-file")


@dataclass(frozen=True)
class Said:
    """What a client got. `end` is stop, length, tool_calls or error."""

    reasoning: str
    content: str
    calls: list[tuple[str, Any]]
    end: str


@dataclass(frozen=True)
class Turn:
    text: bytes
    schemas: dict[str, Any]
    thinking: bool
    split: int


def random_turn(rng: random.Random, syntax: str) -> Turn:
    thinking = syntax != "chatml" and rng.random() < 0.5
    block, declared = written(random_calls(rng), syntax)
    schemas = {name: json.loads(schema)["parameters"] for name, schema in declared}
    text = (("plan</think>" if thinking else "") + "Sure." + block).encode()
    kind = rng.random()
    if kind > 0.4:
        text = damaged(rng, text)
    if kind > 0.9:
        text = soup(rng)
    return Turn(text, schemas, thinking, rng.choice((1, 3, 8, 40)))


# ---- asking ------------------------------------------------------------------------------------------------------


def post(server: RunningServer, dialect: str, number: int, turn: Turn, *, stream: bool) -> httpx.Response:
    functions = [{"name": name, "parameters": turn.schemas.get(name, {"type": "object"})} for name in NAMES]
    said = [{"role": "user", "content": f"#{number}#"}]
    if dialect == "chat":
        effort: dict[str, Any] = {} if turn.thinking else {"reasoning_effort": "none"}
        body = {"messages": said, "tools": [{"type": "function", "function": f} for f in functions], **effort}
        return server.http.post("/v1/chat/completions", json={**body, "stream": stream})
    if dialect == "responses":
        reasoning = {"summary": "auto"} if turn.thinking else {"effort": "none"}
        tools = [{"type": "function", **f} for f in functions]
        body = {"input": said, "tools": tools, "reasoning": reasoning, "store": False}
        return server.http.post("/v1/responses", json={**body, "stream": stream})
    tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
    effort = {} if turn.thinking else {"thinking": {"type": "disabled"}}
    body = {"messages": said, "tools": tools, "max_tokens": 10_000, **effort}
    return server.http.post("/v1/messages", json={**body, "stream": stream})


def of_chat(body: dict[str, Any]) -> Said:
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]
    return Said(message.get("reasoning_content", ""), message["content"], calls, choice["finish_reason"])


def of_responses(body: dict[str, Any]) -> Said:
    reasoning = content = ""
    calls = []
    for item in body["output"]:
        if item["type"] == "reasoning":
            reasoning += "".join(part["text"] for part in item["summary"])
        elif item["type"] == "message":
            content += "".join(part["text"] for part in item["content"])
        else:
            calls.append((item["name"], json.loads(item["arguments"])))
    return Said(reasoning, content, calls, "tool_calls" if calls else "stop")


def of_messages(body: dict[str, Any]) -> Said:
    kinds: dict[str, list[Any]] = {"thinking": [], "text": [], "tool_use": []}
    for block in body["content"]:
        kinds[block["type"]].append(block)
    calls = [(block["name"], block["input"]) for block in kinds["tool_use"]]
    end = {"end_turn": "stop", "tool_use": "tool_calls"}[body["stop_reason"]]
    reasoning, content = (
        b"".join(b[k].encode("utf-8", "surrogatepass") for b in kinds[k]) for k in ("thinking", "text")
    )
    return Said(reasoning.decode(), content.decode(), calls, end)


def of_chat_stream(response: httpx.Response) -> Said:
    reasoning = content = ""
    calls: dict[int, list[str]] = {}
    end = "none"
    for event in response.text.split("\n\n")[:-1]:
        if event.startswith("event: error"):
            return Said(reasoning, content, [], "error")
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            continue
        (choice,) = json.loads(data)["choices"]
        delta = choice["delta"]
        reasoning += delta.get("reasoning_content", "")
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            name, arguments = call["function"].get("name", ""), call["function"]["arguments"]
            known = calls.setdefault(call["index"], ["", ""])
            known[0] += name
            known[1] += arguments
        end = choice["finish_reason"] or end
    return Said(reasoning, content, [(name, json.loads(text)) for name, text in calls.values()], end)


def of_responses_stream(response: httpx.Response) -> Said:
    events = named_events(response)
    last = events[-1]
    said = of_responses(last.data["response"])
    done = [e.data["item"] for e in events if e.name == "response.output_item.done"]
    if last.name == "response.failed":
        written = "".join(e.data["delta"] for e in events if e.name == "response.output_text.delta")
        thought = "".join(e.data["delta"] for e in events if e.name == "response.reasoning_summary_text.delta")
        return Said(thought, written, [], "error")
    assert last.name == "response.completed" and done == last.data["response"]["output"]
    return said


def of_messages_stream(response: httpx.Response) -> Said:
    text = {"thinking": "", "text": ""}
    calls: list[list[str]] = []
    end = "none"
    for event in named_events(response):
        data = event.data
        if event.name == "error":
            return Said(text["thinking"], text["text"], [], "error")
        if event.name == "content_block_start" and data["content_block"]["type"] == "tool_use":
            calls.append([data["content_block"]["name"], ""])
        elif event.name == "content_block_delta":
            delta = data["delta"]
            if delta["type"] == "input_json_delta":
                calls[-1][1] += delta["partial_json"]
            elif delta["type"] != "signature_delta":
                text[delta["type"].removesuffix("_delta")] += next(v for k, v in delta.items() if k != "type")
        elif event.name == "message_delta":
            end = {"end_turn": "stop", "tool_use": "tool_calls"}[data["delta"]["stop_reason"]]
    return Said(text["thinking"], text["text"], [(name, json.loads(got)) for name, got in calls], end)


READ = {
    "chat": (of_chat, of_chat_stream),
    "responses": (of_responses, of_responses_stream),
    "messages": (of_messages, of_messages_stream),
}


# ---- comparing ---------------------------------------------------------------------------------------------------


def hold_equal(serve: Serve, syntax: str, count: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    turns = [random_turn(rng, syntax) for _ in range(count)]

    def say(prompt: str) -> Script:
        if "Tool error: " in prompt:
            return Script.text(GAVE_UP)
        number = int(re.findall(r"#(\d+)#", prompt)[-1])
        return Script.text(turns[number].text, turns[number].split)

    server = serve(ScriptedEngine(say, syntax=syntax), slots=1)
    server.http.timeout = 600
    with_calls = asked_again = 0
    for number, turn in enumerate(turns):
        whole, streamed = [], []
        for dialect, (of_whole, of_stream) in READ.items():
            response = post(server, dialect, number, turn, stream=False)
            assert response.status_code == 200, response.text
            whole.append(of_whole(response.json()))
            streamed.append(of_stream(post(server, dialect, number, turn, stream=True)))
        place = (seed, number, turn)
        assert whole[0] == whole[1] == whole[2], place
        assert streamed[0] == streamed[1] == streamed[2], place
        if GAVE_UP in (whole[0].content, whole[0].reasoning):
            asked_again += 1
            assert streamed[0].end in ("stop", "error") and not streamed[0].calls, place
        else:
            assert whole[0] == streamed[0], place
        with_calls += bool(whole[0].calls)
    print(f"{syntax}: {count} texts in 6 forms each, {with_calls} with calls, {asked_again} asked again")
    assert with_calls > count / 5 and asked_again > 0


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_one_text_is_one_answer(serve: Serve, syntax: str) -> None:
    hold_equal(serve, syntax, 25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("syntax", SYNTAXES)
def test_one_text_is_one_answer_thousandfold(serve: Serve, syntax: str) -> None:
    hold_equal(serve, syntax, 1000)
