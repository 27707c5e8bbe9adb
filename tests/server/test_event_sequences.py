"""Which events a stream has, in which order: every kind of turn in the three chat dialects, said once as a table.

Repeated deltas count as one. What is in the events is the business of the dialects' own tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import pytest

from ds4.testing import Script, ScriptedEngine
from tests.support.api import check_stream, parse_events
from tests.support.running_server import RunningServer, Serve

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}


def invoke(value: str) -> str:
    parameter = f'<｜DSML｜parameter name="a" string="true">{value}</｜DSML｜parameter>\n'
    return f'<｜DSML｜invoke name="f">\n{parameter}</｜DSML｜invoke>\n'


def block(*values: str) -> str:
    return "\n\n<｜DSML｜tool_calls>\n" + "".join(map(invoke, values)) + "</｜DSML｜tool_calls>"


@dataclass(frozen=True)
class Turn:
    """What the model says and how it is asked, and the events of each dialect."""

    said: str
    chat: str
    responses: str
    messages: str
    limit: int | None = None
    stop: str | None = None
    fails_at: int | None = None
    thinking: bool = True
    more: dict[str, Any] = field(default_factory=dict)


# Parts of the sequences. A message of Responses opens and closes with three events each.
R_MESSAGE = "+message part text text! part! message! "
R_THOUGHT = "+reasoning part summary summary! part! reasoning! "
R_CALL = "+call arguments "
M_THOUGHT = "+thinking thinking signature stop "
M_TEXT = "+text text stop "
M_CALL = "+tool_use input stop "

TURNS = {
    "text": Turn(
        "Hello there.",
        "role content finish=stop usage DONE",
        f"created in_progress {R_MESSAGE}completed",
        f"start {M_TEXT}delta=end_turn end",
        thinking=False,
    ),
    "nothing": Turn(
        "",
        "role finish=stop usage DONE",
        "created in_progress completed",
        "start +text stop delta=end_turn end",
        thinking=False,
    ),
    "reasoning and text": Turn(
        "Let me see.</think>Hello there.",
        "role reasoning content finish=stop usage DONE",
        f"created in_progress {R_THOUGHT}{R_MESSAGE}completed",
        f"start {M_THOUGHT}{M_TEXT}delta=end_turn end",
    ),
    "two reasonings": Turn(
        "Let me see.</think>No, wait.</think>Hello there.",
        "role reasoning content finish=stop usage DONE",
        f"created in_progress {R_THOUGHT}{R_MESSAGE}completed",
        f"start {M_THOUGHT}{M_TEXT}delta=end_turn end",
    ),
    "reasoning and a call": Turn(
        f"Let me see.</think>{block('x')}",
        "role reasoning call arguments finish=tool_calls usage DONE",
        f"created in_progress {R_THOUGHT}{R_CALL}arguments! call! completed",
        f"start {M_THOUGHT}{M_CALL}delta=tool_use end",
    ),
    "reasoning, text and two calls": Turn(
        f"Let me see.</think>I will look.{block('x', 'y')}",
        "role reasoning content call arguments call arguments finish=tool_calls usage DONE",
        # Calls of one block are announced one by one and done together, when the block is.
        f"created in_progress {R_THOUGHT}{R_MESSAGE}{R_CALL}{R_CALL}arguments! call! arguments! call! completed",
        f"start {M_THOUGHT}{M_TEXT}{M_CALL}{M_CALL}delta=tool_use end",
    ),
    "a call inside of open reasoning": Turn(
        f"Let me see.{block('x')}",
        "role reasoning call arguments finish=tool_calls usage DONE",
        f"created in_progress {R_THOUGHT}{R_CALL}arguments! call! completed",
        f"start {M_THOUGHT}{M_CALL}delta=tool_use end",
    ),
    "reasoning cut by the limit": Turn(
        "Let me see, let me see.",
        "role reasoning finish=length usage DONE",
        f"created in_progress {R_THOUGHT}incomplete",
        f"start {M_THOUGHT}+text stop delta=max_tokens end",
        limit=3,
    ),
    "text cut by the limit": Turn(
        "Hello there.",
        "role content finish=length usage DONE",
        f"created in_progress {R_MESSAGE}incomplete",
        f"start {M_TEXT}delta=max_tokens end",
        limit=2,
        thinking=False,
    ),
    "a call cut by the limit": Turn(
        f"I will look.{block('a long value')}",
        "role content call arguments finish=length usage DONE",
        f"created in_progress {R_MESSAGE}{R_CALL}incomplete",
        f"start {M_TEXT}{M_CALL}delta=max_tokens end",
        limit=45,
        thinking=False,
    ),
    "no budget": Turn(
        "Hello there.",
        "role finish=length usage DONE",
        "created in_progress incomplete",
        "start +text stop delta=max_tokens end",
        limit=0,
        thinking=False,
    ),
    "a stop string": Turn(
        "Hello there.",
        "role content finish=stop usage DONE",
        f"created in_progress {R_MESSAGE}completed",
        f"start {M_TEXT}delta=stop_sequence end",
        stop="the",
        thinking=False,
    ),
    "a broken call": Turn(
        f"I will look.{block('x').replace('</｜DSML｜invoke>', 'junk')}",
        # What follows the place where it breaks is text, and the end is an error: nobody may run the call.
        "role content call arguments content error",
        f"created in_progress {R_MESSAGE}{R_CALL}+message part text failed",
        f"start {M_TEXT}{M_CALL}+text text error",
        thinking=False,
    ),
    "a failure of the engine": Turn(
        "Let me see.</think>Hello there.",
        "role reasoning error",
        "created in_progress +reasoning part summary failed",
        "start +thinking thinking error",
        fails_at=3,
    ),
}


# ---- reading ----------------------------------------------------------------------------------------------------


def collapsed(names: list[str]) -> str:
    """Without repetitions of a delta."""
    deltas = {"reasoning", "content", "arguments", "text", "summary", "thinking", "input"}
    kept = names[:1] + [name for before, name in pairwise(names) if name != before or name not in deltas]
    return " ".join(kept)


def of_chat(response: httpx.Response) -> list[str]:
    names = []
    for event in response.text.split("\n\n")[:-1]:
        if event.startswith("event: error"):
            names.append("error")
            continue
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            names.append("DONE")
            continue
        chunk = json.loads(data)
        if not chunk["choices"]:
            names.append("usage")
            continue
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        if choice["finish_reason"] is not None:
            assert delta == {}
            names.append(f"finish={choice['finish_reason']}")
        elif "tool_calls" in delta:
            (call,) = delta["tool_calls"]
            names.append("call" if "id" in call else "arguments")
        else:
            (member,) = delta
            names.append({"reasoning_content": "reasoning"}.get(member, member))
    return names


def of_responses(response: httpx.Response) -> list[str]:
    short = {
        "output_text.delta": "text",
        "output_text.done": "text!",
        "content_part.added": "part",
        "content_part.done": "part!",
        "reasoning_summary_part.added": "part",
        "reasoning_summary_part.done": "part!",
        "reasoning_summary_text.delta": "summary",
        "reasoning_summary_text.done": "summary!",
        "function_call_arguments.delta": "arguments",
        "function_call_arguments.done": "arguments!",
    }
    names = []
    for event in parse_events(response.text):
        name = event.name.removeprefix("response.")
        if name.startswith("output_item"):
            kind = event.data["item"]["type"].removeprefix("function_")
            name = f"+{kind}" if name.endswith("added") else f"{kind}!"
        names.append(short.get(name, name))
    return names


def of_messages(response: httpx.Response) -> list[str]:
    names = []
    for event in parse_events(response.text):
        match event.name:
            case "content_block_start":
                names.append(f"+{event.data['content_block']['type']}")
            case "content_block_delta":
                names.append(event.data["delta"]["type"].removesuffix("_delta").removesuffix("_json"))
            case "content_block_stop":
                names.append("stop")
            case "message_delta":
                names.append(f"delta={event.data['delta']['stop_reason']}")
            case other:
                names.append({"message_start": "start", "message_stop": "end"}.get(other, other))
    return names


# ---- asking -----------------------------------------------------------------------------------------------------


def ask(server: RunningServer, dialect: str, turn: Turn) -> httpx.Response:
    said = [{"role": "user", "content": "x"}]
    body: dict[str, Any] = {"stream": True, "thinking": turn.thinking}
    if dialect == "chat":
        tools = [{"type": "function", "function": FUNCTION}]
        body |= {"messages": said, "tools": tools, "stream_options": {"include_usage": True}, "max_tokens": turn.limit}
        path = "/v1/chat/completions"
    elif dialect == "responses":
        body |= {"input": said, "tools": [{"type": "function", **FUNCTION}], "reasoning": {"summary": "auto"}}
        body |= {"max_output_tokens": turn.limit}
        path = "/v1/responses"
    else:
        tools = [{"name": "f", "input_schema": FUNCTION["parameters"]}]
        body |= {"messages": said, "tools": tools, "max_tokens": turn.limit}
        path = "/v1/messages"
    body["stop_sequences" if dialect == "messages" else "stop"] = turn.stop
    response = server.http.post(path, json=body)
    check_stream(response)
    return response


READ: dict[str, Callable[[httpx.Response], list[str]]] = {
    "chat": of_chat,
    "responses": of_responses,
    "messages": of_messages,
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("dialect", READ)
def test_events_in_their_order(serve: Serve, dialect: str, name: str) -> None:
    turn = TURNS[name]
    script = Script.text(turn.said, 4)
    script = script if turn.fails_at is None else script.fail_at(turn.fails_at)
    server = serve(ScriptedEngine(script, syntax="deepseek4"))
    assert collapsed(READ[dialect](ask(server, dialect, turn))) == getattr(turn, dialect)
