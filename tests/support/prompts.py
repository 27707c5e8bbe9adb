"""Worked prompts of every syntax (`tests/data/prompts.jsonl`), and what tests ask about a rendered prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ds4.prompt.types import Conversation, Message, RenderedPrompt, Segment, Special, Tool, ToolCall

WEATHER = Tool(
    "get_weather",
    '{"name": "get_weather", "description": "Get weather", "parameters": {"type": "object", "properties": '
    '{"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}',
)


@dataclass(frozen=True)
class Worked:
    """A conversation and its prompt; `⟪NAME⟫` in the prompt stands for a long text."""

    id: str
    conversation: Conversation
    prompt: str


def worked(prefix: str) -> list[Worked]:
    """The worked prompts whose id begins with `prefix`."""
    lines = (Path(__file__).parent.parent / "data/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [_worked(case) for case in map(json.loads, lines) if case["id"].startswith(prefix)]


def _worked(case: dict) -> Worked:
    messages = tuple(message for entry in case["messages"] for message in _messages(entry))
    conversation = Conversation(messages, (WEATHER,) if case["tools"] else (), case["effort"])
    return Worked(case["id"], conversation, case["prompt"])


def _messages(entry: dict) -> Iterator[Message]:
    role = {"developer": "system"}.get(entry["role"], entry["role"])
    raw = entry.get("raw_tool_text")
    calls = tuple(
        ToolCall(i, name, arguments, raw=None if raw is None else raw.encode())
        for i, name, arguments in entry.get("calls", ())
    )
    if isinstance(entry["content"], str):
        yield Message(role, entry["content"], entry.get("reasoning", ""), calls, entry.get("id"))
        return
    for i, part in enumerate(entry["content"]):  # a user message in parts: texts, and [id, text] of results
        if isinstance(part, str):
            yield Message("user", part, joined=i > 0)
        else:
            yield Message("tool", part[1], call_id=part[0], joined=i > 0)


def specials(prompt: RenderedPrompt) -> list[str]:
    return [s.text for s in prompt.segments if isinstance(s, Special)]


def special_ranges(prompt: RenderedPrompt) -> list[tuple[int, int]]:
    """Where special tokens stand in `prompt.text`, as half-open ranges of characters."""
    ranges: list[tuple[int, int]] = []
    at = 0
    for segment in prompt.segments:
        text = segment if isinstance(segment, str) else segment.text
        if not isinstance(segment, str):
            ranges.append((at, at + len(text)))
        at += len(text)
    return ranges


def text_of(segments: Iterable[Segment]) -> str:
    return RenderedPrompt(tuple(segments)).text


def harmless(conversation: Conversation, *, trimmed: bool = False) -> Conversation:
    """The conversation with `x` in place of every text, values of arguments included; what was empty stays empty.

    `trimmed`: white space alone counts as empty, and a think tag at the start of an answer, which replaces the
    reasoning, stays.
    """

    def text(value: str) -> str:
        content = value.strip(" \t\n") if trimmed else value
        if trimmed and content.startswith(("<think>", "</think>")):
            return "<think>"
        return "x" if content else ""

    def call(call: ToolCall) -> ToolCall:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return replace(call, arguments="not json" if call.arguments.strip() else call.arguments)
        return replace(call, arguments=json.dumps(dict.fromkeys(arguments, "x")))

    messages = tuple(
        replace(m, content=text(m.content), reasoning=text(m.reasoning), calls=tuple(map(call, m.calls)))
        for m in conversation.messages
    )
    tools = tuple(replace(tool, schema="{}") for tool in conversation.tools)
    return replace(conversation, messages=messages, tools=tools)


def typed_tools(calls: Iterable[ToolCall]) -> tuple[Tool, ...]:
    """A declaration for each call, by which a parser knows the types of its arguments."""
    names = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
    tools = []
    for call in calls:
        members = json.loads(call.arguments)
        properties = {key: {"type": names.get(type(value), "null")} for key, value in members.items()}
        schema = {"name": call.name, "parameters": {"type": "object", "properties": properties}}
        tools.append(Tool(call.name, json.dumps(schema, ensure_ascii=False)))
    return tuple(tools)
