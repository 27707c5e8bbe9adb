"""Reported mistakes of prompt renderers (`tests/data/cases.jsonl`, kind render), through the chat API's reader."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from ds4._json import dumps, parse
from ds4.prompt.types import RenderedPrompt
from ds4.server.api.chat import read_conversation
from ds4.server.api.prepare import Preparer
from ds4.testing.engine import ScriptedEngine
from tests.support.prompts import specials

LINES = (Path(__file__).parent.parent / "data/cases.jsonl").read_text(encoding="utf-8").splitlines()
CASES = {case["id"]: case for case in map(json.loads, LINES) if case["kind"] == "render"}
"""All of them are of syntax `dsml`, drawn here as V4."""


def render(given: dict[str, Any]) -> RenderedPrompt:
    preparer = Preparer(ScriptedEngine(syntax="deepseek4"), 100)
    body = {"messages": given["messages"], "tools": given.get("tools", [])}
    body |= {"enable_thinking": given["thinking"]} if "thinking" in given else {}
    conversation, *_ = read_conversation(parse(dumps(body)), preparer)
    return preparer.renderer.render(conversation)


def test_every_case_is_here() -> None:
    assert sorted(CASES) == ["PR-01", "PR-02", "PR-03", "PR-04"]
    assert {case["input"]["syntax"] for case in CASES.values()} == {"dsml"}


def test_arguments_as_an_object() -> None:
    given = CASES["PR-01"]["input"]
    as_text = copy.deepcopy(given)
    as_text["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"q":"cats","n":5}'
    assert render(given) == render(as_text)


def test_a_result_with_its_own_closing_tag() -> None:
    case = CASES["PR-02"]
    text = render(case["input"]).text
    result = case["input"]["messages"][2]["content"]
    assert text.count("</tool_result>") == case["expect"]["count_of"]["</tool_result>"]
    inside = text.partition("<tool_result>")[2].partition("</tool_result>")[0]
    assert inside == result.replace("</tool_result>", "&lt;/tool_result>")
    for readable in case["expect"]["model_can_still_read"]:
        assert readable in inside


def test_control_tokens_typed_by_a_user() -> None:
    case = CASES["PR-03"]
    prompt = render(case["input"])
    assert specials(prompt) == case["expect"]["special_token_ids_in_prompt"]
    assert case["input"]["messages"][0]["content"] in prompt.segments


def test_arguments_are_decoded_and_typed() -> None:
    case = CASES["PR-04"]
    for expected in case["expect"]["prompt_contains"]:
        assert expected in render(case["input"]).text
