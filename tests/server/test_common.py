"""Fields that mean the same in every dialect, value by value: thinking, effort, integers, members that occur twice."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import pytest

from ds4._json import JSONError, parse
from ds4.engine.types import SamplingParams
from ds4.prompt.registry import MAX_EFFORT_CONTEXT, SYNTAXES
from ds4.server.api.common import max_tokens, once, sampling, stop_strings, thinking_effort

LARGE = MAX_EFFORT_CONTEXT


def effort(text: str, syntax: str = "deepseek4", n_ctx: int = LARGE) -> str | int:
    body = parse(text.encode())
    return thinking_effort(body, body.get_str("model", ""), SYNTAXES[syntax], n_ctx)


# ---- thinking and effort ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "high"),
        ({"thinking": True}, "high"),
        ({"thinking": False}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "high"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "high"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "sideways"}}, "high"),
        ({"thinking": {}}, "high"),
        ({"thinking": None}, "high"),
        ({"think": False}, "none"),
        ({"enable_thinking": False}, "none"),
        ({"chat_template_kwargs": None}, "high"),
        ({"chat_template_kwargs": {"enable_thinking": False, "other": [1]}}, "none"),
        ({"chat_template_kwargs": {"thinking": False}}, "none"),
        ({"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": None}}, "low"),
        ({"reasoning_effort": None}, "high"),
        ({"reasoning_effort": "none"}, "none"),
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, "none"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "none"),
        ({"reasoning_effort": "low", "thinking": False}, "none"),
        ({"output_config": {"effort": "medium", "format": None}}, "medium"),
        ({"output_config": {"effort": None}}, "high"),
        ({"output_config": {"effort": "none"}}, "none"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "low"),
        ({"reasoning": {"effort": "none"}}, "none"),
        ({"reasoning": {"summary": "auto"}}, "high"),
    ],
)
def test_every_way_to_say_it(body: dict[str, Any], expected: str) -> None:
    assert effort(json.dumps(body)) == expected


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("max", "max"),
        ("xhigh", "high"),
        ("high", "high"),
        ("medium", "medium"),
        ("low", "low"),
        ("minimal", "low"),
        ("none", "none"),
    ],
)
def test_names_of_efforts(sent: str, meant: str) -> None:
    for body in ({"reasoning_effort": sent}, {"output_config": {"effort": sent}}, {"reasoning": {"effort": sent}}):
        assert effort(json.dumps(body)) == meant
        assert effort(json.dumps(body), "deepseek41") == meant


@pytest.mark.parametrize("sent", ["0", "7", "007", "42", "100", 0, 1, 42, 100])
def test_levels(sent: str | int) -> None:
    level = int(sent)
    for body in ({"reasoning_effort": sent}, {"output_config": {"effort": sent}}, {"reasoning": {"effort": sent}}):
        assert effort(json.dumps(body), "deepseek41") == (level or "none")
        for syntax in ("deepseek4", "glm", "qwen", "chatml"):
            with pytest.raises(JSONError, match="takes no numeric effort: expected one of max, xhigh, high"):
                effort(json.dumps(body), syntax)


@pytest.mark.parametrize(
    "sent", ["-1", "101", "1.5", "50x", "", "+5", " 5", "5 ", "٥", "ultra", -1, 101, 1.5, True, []]
)
@pytest.mark.parametrize("syntax", ["deepseek4", "deepseek41"])
def test_what_is_no_effort(sent: object, syntax: str) -> None:
    for body, param in (
        ({"reasoning_effort": sent}, "reasoning_effort"),
        ({"output_config": {"effort": sent}}, "output_config.effort"),
        ({"reasoning": {"effort": sent}}, "reasoning.effort"),
    ):
        with pytest.raises(JSONError) as caught:
            effort(json.dumps(body), syntax)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"think":false,"thinking":{"type":"enabled"}}', "high"),
        ('{"thinking":{"type":"enabled"},"think":false}', "none"),
        ('{"think":false,"thinking":{"type":"sideways"}}', "none"),
        ('{"reasoning_effort":"low","chat_template_kwargs":{"reasoning_effort":"max"}}', "max"),
        ('{"chat_template_kwargs":{"reasoning_effort":"max"},"reasoning_effort":"low"}', "low"),
        ('{"thinking":false,"reasoning":{"effort":"low"}}', "low"),
    ],
)
def test_later_members_override_earlier_ones(text: str, expected: str) -> None:
    assert effort(text) == expected


@pytest.mark.parametrize("off", ["deepseek-chat", "x-chat", "x-no-think", "x-nothink", "qwen/x-chat"])
def test_names_of_models_switch_thinking_where_nothing_else_does(off: str) -> None:
    assert effort(json.dumps({"model": off})) == "none"
    assert effort(json.dumps({"model": off, "reasoning_effort": "max"})) == "none"
    for switch in ({"thinking": {"type": "enabled"}}, {"thinking": {"type": "sideways"}}, {"think": True}):
        assert effort(json.dumps({"model": off, **switch})) == "high"
    assert effort(json.dumps({"model": off, "reasoning": {"effort": "low"}})) == "low"
    assert effort(json.dumps({"model": off, "thinking": None})) == "none"
    assert effort('{"model":"deepseek-reasoner"}') == effort('{"model":"deepseek-v4-flash"}') == "high"
    assert effort('{"model":"deepseek-reasoner","think":false}') == "none"


@pytest.mark.parametrize("body", [{"reasoning_effort": "max"}, {"output_config": {"effort": "max"}}])
def test_max_needs_room_and_says_so(body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ds4.server")
    assert effort(json.dumps(body), n_ctx=LARGE) == "max"
    assert caplog.records == []
    assert effort(json.dumps(body), n_ctx=LARGE - 1) == "high"
    (record,) = caplog.records
    assert record.getMessage() == f"effort max is served as high: context {LARGE - 1} is below {LARGE}"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"thinking": "on"}, "thinking"),
        ({"think": "no"}, "think"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning": "low"}, "reasoning"),
        ({"thinking": {"type": 5}}, "thinking.type"),
    ],
)
def test_values_of_another_kind_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(JSONError) as caught:
        effort(json.dumps(body))
    assert caught.value.param == param


# ---- numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", 5),
        ("5.0", 5),
        ("5e0", 5),
        ("0", 0),
        ("-0", 0),
        ("-1", None),
        ("null", None),
        ("384000", 384000),
        ("9223372036854775807", 2**63 - 1),
        ("9223372036854775808", 2**63 - 1),
        ("99999999999999999999999999", 2**63 - 1),
        ("1e30", 2**63 - 1),
        ("9" * 5000, None),
    ],
)
def test_an_output_budget_is_never_too_large(text: str, expected: int | None) -> None:
    body = parse(f'{{"max_tokens":{text}}}'.encode())
    if len(text) > 1000:  # not even a double
        with pytest.raises(JSONError, match="out of range"):
            max_tokens(body, ("max_tokens",))
    else:
        assert max_tokens(body, ("max_tokens",)) == expected


@pytest.mark.parametrize("text", ["-2", "1.5", "true", '"9"', "[]", "-1e30"])
def test_what_is_no_output_budget(text: str) -> None:
    with pytest.raises(JSONError) as caught:
        max_tokens(parse(f'{{"max_tokens":{text}}}'.encode()), ("max_tokens",))
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("text", "seed"),
    [
        ("0", 0),
        ("7", 7),
        ("7.0", 7),
        ("-1", None),
        ("null", None),
        ("18446744073709551615", 0),
        ("1e30", int(1e30) % 2**63),
    ],
)
def test_any_integer_is_a_seed(text: str, seed: int | None) -> None:
    assert sampling(parse(f'{{"seed":{text}}}'.encode()), SamplingParams(), 100).seed == seed


def test_what_a_body_does_not_say_is_the_default() -> None:
    own = SamplingParams(0.5, 7, 0.25, 0.125, 3, 0.5, 0.25, 1.5, {4: 2.0})
    assert sampling(parse(b"{}"), own, 100) == own
    assert sampling(parse(b"{}"), own, 100, logprobs=2) == dataclasses.replace(own, logprobs=2)
    untouched = [f.name for f in dataclasses.fields(own) if getattr(own, f.name) == getattr(SamplingParams(), f.name)]
    assert untouched == ["logprobs"]


def test_sampling_defaults() -> None:
    found = sampling(parse(b"{}"), SamplingParams(), 100)
    assert (found.temperature, found.top_p, found.min_p, found.top_k, found.seed) == (1.0, 1.0, 0.05, 0, None)
    assert (found.presence_penalty, found.frequency_penalty, found.repetition_penalty) == (0.0, 0.0, 1.0)


def test_stop_strings() -> None:
    def read(text: str) -> tuple[bytes, ...]:
        return stop_strings(parse(f'{{"stop":{text}}}'.encode()), "stop")

    assert read('"é"') == ("é".encode(),)
    assert read('["a","","b"]') == (b"a", b"b")
    assert read('""') == read("[]") == read("null") == ()
    assert len(read(json.dumps([str(i) for i in range(1000)]))) == 1000


# ---- members that occur twice -----------------------------------------------------------------------------------


def test_a_member_that_occurs_twice() -> None:
    once(parse(b'{"content":1,"role":1}'), "content")
    once(parse(b'{"content":1,"role":1,"role":2,"x":{"content":1,"content":2}}'), "content")
    number = b"9" * 5000
    for text in (b'{"content":1,"content":2}', b'{"content":%b,"a":1.5,"content":null}' % number):
        with pytest.raises(JSONError, match="Expected one content, got several"):
            once(parse(text), "content")
