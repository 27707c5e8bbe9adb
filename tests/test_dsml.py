"""The output parser: worked cases, split invariance, sampling policy, repair, and what it refuses.

`data/parser_cases.jsonl` holds worked cases of the format: whole turns ("final"), streams ("stream": what is sent
after each piece), sampling ("greedy") and repairs ("repair"). `data/cases.jsonl` holds cases from bug reports.
Where this parser means to differ from a worked case, `DECIDED` says so.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ds4._dsml import ContentDelta, Parser, ReasoningDelta, Result, ToolCallDelta, ToolCallEnd, ToolCallStart
from tests.fuzz import dsml as dsml_fuzz
from tests.support.turns import SYNTAXES, Turn, damaged, options_for, outcome, random_calls, run, soup, written

DATA = Path(__file__).parent / "data"
WORKED = [json.loads(line) for line in (DATA / "parser_cases.jsonl").read_text().splitlines()]
REPORTED = [
    case for line in (DATA / "cases.jsonl").read_text().splitlines() if (case := json.loads(line))["area"] == "parser"
]

D = "｜DSML｜"
INVOKE = f'<{D}invoke name="f">\n'
OPEN, CLOSE = f"\n\n<{D}tool_calls>\n", f"</{D}tool_calls>"
END = f"</{D}invoke>\n"


def param(name: str, value: str, string: bool = True) -> str:
    return f'<{D}parameter name="{name}" string="{"true" if string else "false"}">{value}</{D}parameter>\n'


def block(*calls: str) -> str:
    return OPEN + "".join(INVOKE + body + END for body in calls) + CLOSE


def run_all_splits(text: str | bytes, cause: str, syntax: str, **options: Any) -> Result:
    """Whole, byte by byte, at every single cut: always the same result."""
    data = text.encode() if isinstance(text, str) else text
    whole = run([data], cause, syntax, **options)
    assert outcome(run([data[i : i + 1] for i in range(len(data))], cause, syntax, **options)) == outcome(whole)
    for i in range(1, len(data)):
        assert outcome(run([data[:i], data[i:]], cause, syntax, **options)) == outcome(whole), (data[:i], data[i:])
    return whole


def pairs(text: str) -> Any:
    """JSON with its members in order, duplicates kept."""
    return json.loads(text, object_pairs_hook=lambda members: ["{}", *members])


# ---- worked cases ------------------------------------------------------------------------------------------------

SCHEMAS = {"C49": [("f", '{"properties":{"id":{"type":"string"}}}')]}

# Deliberate differences from the worked results, with the reason.
DECIDED: dict[str, dict[str, Any]] = {
    # A second `</think>` re-routes the draft to reasoning in the stream; the whole result says the same.
    "C29": {"reasoning": "r1draft r2", "content": "final"},
    "C30": {"reasoning": "r1draft", "content": ""},
    # The wrapper that only closes complete calls is added.
    "C31": {"reasoning": "p", "content": "", "calls": [["f", '{"city": "Rome"}']], "finish": "tool_calls"},
    # A call that the limit cut is no text: no markup reaches the content.
    "C33": {"reasoning": "p", "content": "go"},
    # "tool_calls" is never reported without calls.
    "C39": {"finish": "stop"},
}


@pytest.mark.parametrize("case", [c for c in WORKED if c["kind"] == "final"], ids=lambda c: c["id"])
def test_worked_turn(case: dict[str, Any]) -> None:
    want = case | DECIDED.get(case["id"], {})
    cause = "length" if case["cause"] == "length" else "eos"
    options = {"thinking": case["thinking"], "tools": True, "schemas": SCHEMAS.get(case["id"], [])}
    r = run_all_splits(case["raw"], cause, case["syntax"], **options)
    assert (r.reasoning or None) == want["reasoning"]
    assert r.content == want["content"]
    assert [(c.name, pairs(c.arguments)) for c in r.calls] == [(n, pairs(a)) for n, a in want["calls"]]
    assert r.finish == want["finish"]


def test_second_think_without_tools_is_content() -> None:
    """The worked result as it stands (C29) where no tools are declared."""
    r = run_all_splits("r1</think>draft r2</think>final", "eos", "deepseek4", thinking=True)
    assert (r.reasoning, r.content) == ("r1", "draft r2</think>final")


STREAM_OPTIONS: dict[str, dict[str, Any]] = {
    "S01": {"syntax": "deepseek4", "thinking": True, "tools": False},
    "S02": {"syntax": "deepseek4", "thinking": False},
    "S05": {"syntax": "qwen", "thinking": True},
    "S06": {"syntax": "deepseek4", "thinking": True},
    "S07": {"syntax": "deepseek4", "thinking": False},
    "S09": {"syntax": "deepseek4", "thinking": False},
    "S10": {"syntax": "deepseek4", "thinking": True, "tools": False},
}


def joined(events: list[list[str]]) -> dict[str, str]:
    out: dict[str, str] = {}
    for channel, text in events:
        out[channel] = out.get(channel, "") + text
    return out


@pytest.mark.parametrize("case", [c for c in WORKED if c["kind"] == "stream"], ids=lambda c: c["id"])
def test_worked_stream(case: dict[str, Any]) -> None:
    """Never later than the table, never another text.

    Two steps differ on purpose. A scalar JSON value ("2" in S06) waits for its close tag, because `00123` or
    `2026-11-30` must still be able to become a string. What S09 and S11 lose is given out.
    """
    options = {"thinking": True, "tools": True, "syntax": "deepseek4"} | STREAM_OPTIONS.get(case["id"], {})
    turn = Turn(options.pop("syntax"), **options)
    want: list[list[str]] = []
    for piece, events in case["steps"]:
        want += events
        if piece is None:
            turn.finish("eos")
        else:
            turn.feed(piece.encode())
        have, table = joined(turn.sent), joined(want)
        for channel, text in table.items():
            if case["id"] == "S06" and text.endswith('"n":2') and not have[channel].endswith("2"):
                text = text[:-1]
            assert have[channel].startswith(text), (piece, channel)
    end = {k: v for k, v in joined(turn.sent).items() if v}
    if case["id"] == "S08":
        assert (end.pop("tool_start[0]"), end.pop("args[0]")) == ("w", "{}")
    if case["id"] == "S09":
        assert end == {"content": "ok" + OPEN + "junk"}
    elif case["id"] == "S11":
        assert end == {"reasoning": f"maybe <{D}tool_calls> hm", "content": "No tool needed."}
    else:
        assert end == joined(want)


def test_text_streams_as_soon_as_no_tag_can_follow() -> None:
    turn = Turn("deepseek4", tools=True)
    assert turn.feed(b"a <b") == [["content", "a <b"]]
    assert turn.feed("> <｜DS".encode()) == [["content", ">"]]
    assert turn.feed(b"x") == [["content", " <｜DSx"]]


@pytest.mark.parametrize("case", [c for c in WORKED if c["kind"] == "greedy"], ids=lambda c: c["id"])
def test_sampling_policy(case: dict[str, Any]) -> None:
    turn = Turn(case["syntax"], tools=True)
    for piece, state, greedy in case["steps"]:
        turn.feed(piece.encode())
        assert turn.parser.greedy is greedy, (piece, state)


def test_a_value_without_a_type_is_sampled_as_json_and_read_as_text() -> None:
    turn = Turn("deepseek4", tools=True)
    steps = (
        (f'{OPEN}{INVOKE}<{D}parameter name="n">', True),
        ('{"a": ', True),
        ('"so', False),
        ('me"', True),
        ("}", True),
        (f"</{D}parameter>{END}{CLOSE}", False),
    )
    for piece, greedy in steps:
        turn.feed(piece.encode())
        assert turn.parser.greedy is greedy, piece
    (call,) = turn.finish("eos").calls
    assert json.loads(call.arguments) == {"n": '{"a": "some"}'}


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("", "5"),
        (' string="true"', "5"),
        (' string="false"', 5),
        (' string="True"', 5),
        (' string="yes"', 5),
        (' string=""', 5),
    ],
)
def test_only_the_word_true_makes_a_text(attribute: str, value: object) -> None:
    text = f'{OPEN}{INVOKE}<{D}parameter name="n"{attribute}>5</{D}parameter>{END}{CLOSE}'
    (call,) = run_all_splits(text, "eos", "deepseek4", tools=True).calls
    assert json.loads(call.arguments) == {"n": value}


def test_no_greedy_sampling_while_thinking_or_without_tools() -> None:
    for options in ({"thinking": True, "tools": True}, {"tools": False}):
        turn = Turn("deepseek4", **options)
        turn.feed((OPEN + INVOKE).encode())
        assert not turn.parser.greedy


@pytest.mark.parametrize("case", [c for c in WORKED if c["kind"] == "repair"], ids=lambda c: c["id"])
def test_worked_repair(case: dict[str, Any]) -> None:
    syntax = "glm" if "GLM" in case["id"] else "deepseek4"
    thinking = "</think>" in case["text"]
    r = run_all_splits(case["text"], "eos", syntax, thinking=thinking, tools=True)
    if case["append"]:
        assert len(r.calls) == 1 and r.finish == "tool_calls"
        body = case["text"].partition("</think>")[2] or case["text"]
        assert r.raw == (body.rstrip() + "\n" + case["append"]).encode()
    else:
        assert not r.calls and r.finish != "tool_calls"
    for cause in ("length", "stop", "error"):
        assert not run([case["text"].encode()], cause, syntax, thinking=thinking, tools=True).calls


# ---- cases from bug reports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REPORTED, ids=lambda c: c["id"])
def test_reported(case: dict[str, Any]) -> None:
    given, want = case["input"], case["expect"]
    schemas = [(t["function"]["name"], json.dumps(t["function"])) for t in given["tools"]]
    syntax = {"dsml": "deepseek4"}.get(given["syntax"], given["syntax"])
    options = {"thinking": given["prompt_ended_in_think"], "tools": bool(schemas), "schemas": schemas}
    r = run_all_splits(given["text"], given.get("stop_cause", "eos"), syntax, **options)
    assert (
        [{"name": c.name, "arguments": json.loads(c.arguments)} for c in r.calls] == want["tool_calls"]
        if ("tool_calls" in want)
        else not r.calls
    )
    assert r.finish == want["finish_reason"]
    if "content" in want:
        exact = given.get("exact_content", False)
        assert (r.content if exact else r.content.strip()) == want["content"]
    if "reasoning" in want:
        assert r.reasoning == want["reasoning"]
    if "reasoning_contains" in want:
        assert want["reasoning_contains"] in r.reasoning
    if "no_markup_in" in want:
        assert "<" not in r.content and r.cut.decode() in given["text"]
    known = {
        "tool_calls", "finish_reason", "content", "reasoning", "reasoning_contains", "no_markup_in", "also_ok",
        "stream_indexes", "ids_unique", "concatenated_argument_deltas_equal_final",
    }  # fmt: skip
    assert want.keys() <= known, "a condition that nothing checks"


# ---- values, by hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ("2", 2),
        (" -1.5e+3 ", -1500.0),
        ('"s"', "s"),
        ("true", True),
        ("", None),
        ("  ", None),
        ("00123", "00123"),
        ("2026-11-30", "2026-11-30"),
        ("1.", "1."),
        ("True", "True"),
        ("None", "None"),
        ("nul", "nul"),
        ("{'a': 1}", "{'a': 1}"),
        ("[link](x) & <b>", "[link](x) & <b>"),
        ("{", "{"),
        ('"open', '"open'),
        ("5 6", "5 6"),
        ('{"a": [1, {"b": null}], "c": "\\u00e9\\n"} ', {"a": [1, {"b": None}], "c": "é\n"}),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
        ('{"a": 1}}', {"a": 1}),
        ("[]", []),
        ("{" + " " * 100 + "}", {}),
        ("{" + " " * 100 + "'a'}", "{" + " " * 100 + "'a'}"),
        ("[" * 500 + "]" * 500, json.loads("[" * 500 + "]" * 500)),
    ],
)
def test_json_values(value: str, want: Any) -> None:
    """One JSON value stays JSON; what is none becomes a string; nothing else is guessed."""
    r = run_all_splits(block(param("v", value, string=False)), "eos", "deepseek4", tools=True)
    assert [json.loads(c.arguments) for c in r.calls] == [{"v": want}]


@pytest.mark.parametrize(
    "value",
    [
        "[1, 2",
        '{"a": 1, b}',
        "[1 2]",
        "[01]",
        '["\\x"]',
        '{"a": tru}',
        '{"a" 1}',
        "[1,]",
        '{"a": 1,}',
        "[" * 600,
        "[1]]]"[:2],
    ],
)
def test_json_that_breaks_after_its_start_voids_the_call(value: str) -> None:
    """Its first bytes may have been sent; no string can follow them."""
    text = block(param("v", value, string=False))
    r = run_all_splits(text, "eos", "deepseek4", tools=True)
    assert (r.calls, r.void_calls, r.finish, r.error) == ((), 1, "stop", "invalid tool call")
    assert r.content == text


def test_json_streams_from_its_second_token() -> None:
    turn = Turn("deepseek4", tools=True)
    turn.feed((OPEN + INVOKE + f'<{D}parameter name="v" string="false">').encode())
    assert turn.feed(b" {") == []
    assert turn.feed(b' "a" : ') == [["args[0]", '{"a":']]
    assert turn.feed(b'"x y"') == [["args[0]", '"x y"']]
    assert turn.feed(b" , ") == [["args[0]", ","]]


@pytest.mark.parametrize("syntax", ["glm", "qwen"])
@pytest.mark.parametrize(
    ("schema", "value", "want"),
    [
        ({"type": "string"}, "42", "42"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "42", 42),
        ({"type": "integer"}, "042", "042"),
        ({"type": "number"}, "abc", "abc"),
        ({"type": "boolean"}, "true", True),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"a": 1', '{"a": 1'),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "42", "42"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "42", 42),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "42", "42"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "true"}, "true", "true"),
        ({"description": "anything"}, "[1]", [1]),
        ({"$ref": "#/x"}, '"quoted"', '"quoted"'),
        ({"type": 7}, "42", 42),
    ],
)
def test_declared_types(syntax: str, schema: dict[str, Any], value: str, want: Any) -> None:
    text = {
        "glm": f"<tool_call>f<arg_key>v</arg_key><arg_value>{value}</arg_value></tool_call>",
        "qwen": f"<tool_call>\n<function=f>\n<parameter=v>\n{value}\n</parameter>\n</function>\n</tool_call>",
    }[syntax]
    properties = {"properties": {"v": schema}}
    for shape in (
        properties,
        {"name": "f", "parameters": properties},
        {"name": "f", "input_schema": properties},
        {"type": "function", "function": {"name": "f", "parameters": properties}},
    ):
        r = run([text.encode()], "eos", syntax, tools=True, schemas=[("f", json.dumps(shape).encode())])
        assert [json.loads(c.arguments) for c in r.calls] == [{"v": want}]


DEFS: dict[str, Any] = {
    "S": {"type": "string"},
    "N": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "L": {"$ref": "#/definitions/list"},
    "a/b~c": {"enum": ["x"]},
    "loop": {"$ref": "#/$defs/loop"},
    "two": {"allOf": [{"type": ["string", "integer"]}, {"$ref": "#/$defs/N"}]},
    "kinds": [{"type": "boolean"}, {"type": "string"}],
}


@pytest.mark.parametrize(
    ("schema", "value", "want"),
    [
        ({"$ref": "#/$defs/S"}, "42", "42"),
        ({"$ref": "#/$defs/S", "description": "no JSON"}, "null", "null"),
        ({"$ref": "#/$defs/N"}, "null", None),
        ({"$ref": "#/$defs/L"}, '["a"]', ["a"]),
        ({"$ref": "#/$defs/a~1b~0c"}, "x", "x"),
        ({"$ref": "#/%24defs/S"}, "42", "42"),
        ({"$ref": "#/$defs/kinds/1"}, "true", "true"),
        ({"$ref": "#/$defs/kinds/2"}, "true", True),
        ({"$ref": "#/$defs/loop"}, "42", 42),
        ({"$ref": "#/$defs/none"}, "42", 42),
        ({"$ref": "other.json#/S"}, "42", 42),
        ({"$ref": "#"}, '{"a":1}', {"a": 1}),
        ({"anyOf": [{"$ref": "#/$defs/S"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/S"}, {"type": "null"}]}, "42", "42"),
        ({"oneOf": [{"$ref": "#/$defs/S"}, {"$ref": "#/$defs/N"}]}, "42", 42),
        ({"allOf": [{"$ref": "#/$defs/S"}, {"description": "x"}]}, "42", "42"),
        ({"$ref": "#/$defs/two"}, "42", 42),
        ({"type": ["string", "null"], "anyOf": [{"type": "string"}]}, "null", "null"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "42", 42),
        (True, "42", 42),
    ],
)
def test_declared_types_by_reference(schema: Any, value: str, want: Any) -> None:
    """In Qwen's syntax, where an undeclared value that is JSON becomes JSON: only a found declaration keeps text."""
    text = f"<tool_call>\n<function=f>\n<parameter=v>\n{value}\n</parameter>\n</function>\n</tool_call>"
    inside = {"properties": {"v": schema}, "$defs": DEFS, "definitions": {"list": {"type": "array"}}}
    around = {"name": "f", "parameters": {"properties": {"v": schema}}, "$defs": DEFS, "definitions": {"list": {}}}
    joined = {"$ref": "#/$defs/own", "$defs": {**DEFS, "own": {"allOf": [{"properties": {"v": schema}}]}}}
    for shape in (inside, {"name": "f", "parameters": inside}, around, joined):
        r = run([text.encode()], "eos", "qwen", tools=True, schemas=[("f", json.dumps(shape))])
        assert [json.loads(c.arguments) for c in r.calls] == [{"v": want}]


def test_references_that_double_are_resolved_once() -> None:
    """Sixty schemas, each of two references to the next: 2**60 paths."""
    defs: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    shape = {"properties": {"v": {"$ref": "#/$defs/d0"}, "w": {"$ref": "#/$defs/d40"}}, "$defs": defs}
    defs["d60"] = {"type": "string"}
    text = b"<tool_call>\n<function=f>\n<parameter=v>\n42\n</parameter>\n</function>\n</tool_call>"
    r = run([text], "eos", "qwen", tools=True, schemas=[("f", json.dumps(shape))])
    assert json.loads(r.calls[0].arguments) == {"v": "42"}


@pytest.mark.parametrize("schema", ["", "nonsense", "[]", "null", '{"properties":7}', "[" * 100_000])
def test_an_unreadable_schema_declares_nothing(schema: str) -> None:
    text = b"<tool_call>\n<function=f>\n<parameter=v>\n42\n</parameter>\n</function>\n</tool_call>"
    r = run([text], "eos", "qwen", tools=True, schemas=[("f", schema)])
    assert json.loads(r.calls[0].arguments) == {"v": 42}


def test_a_qwen_parameter_ends_with_its_function_only_at_the_end() -> None:
    """Closing tags that more text follows are part of the value; cut off, nothing is completed."""
    schemas = [("w", '{"properties":{"t":{"type":"string"}}}')]
    start = "<tool_call>\n<function=w>\n<parameter=t>\nx\n</function>\n</tool_call>"
    r = run_all_splits(start + "\n", "eos", "qwen", tools=True, schemas=schemas)
    assert [json.loads(c.arguments) for c in r.calls] == [{"t": "x"}] and r.raw == start.encode()
    assert not run_all_splits(start, "length", "qwen", tools=True, schemas=schemas).calls
    more = start + "\ny\n</parameter>\n</function>\n</tool_call>"
    r = run_all_splits(more, "eos", "qwen", tools=True, schemas=schemas)
    assert [json.loads(c.arguments) for c in r.calls] == [{"t": "x\n</function>\n</tool_call>\ny"}]


def test_the_qwen_wrapper_is_completed() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    for tail in ("", "</tool", "</tool_call"):
        r = run_all_splits(text + tail, "eos", "qwen", tools=True)
        assert [json.loads(c.arguments) for c in r.calls] == [{"a": 1}]
        assert r.raw == (text + "</tool_call>").encode()
        assert not run_all_splits(text + tail, "length", "qwen", tools=True).calls


# ---- thinking ----------------------------------------------------------------------------------------------------


def test_a_block_in_open_reasoning_is_a_call_only_if_the_turn_ends_behind_it() -> None:
    call = block(param("a", "x"))
    for tail, calls in ((" \n", 1), (" no.", 0), ("</think>", 0), (" <", 0), ("</thin", 0)):
        r = run_all_splits("hm" + call + tail, "eos", "deepseek4", thinking=True, tools=True)
        assert len(r.calls) == calls, tail
        assert r.reasoning == ("hm" if calls else ("hm" + call + tail).removesuffix("</think>"))
        assert r.content == ""


def test_decoding_goes_on_behind_a_block_in_reasoning() -> None:
    """The next token tells a call from a thought, so the parser does not stop at the end tag."""
    turn = Turn("deepseek4", thinking=True, tools=True)
    turn.feed(("hm" + block("")).encode())
    assert not turn.parser.stop_now and turn.parser.reasoning_open and turn.parser.calls == 0
    turn.feed(b" But no.</think>Done.")
    assert turn.finish("eos").content == "Done."


def test_a_think_tag_inside_a_value_of_open_reasoning() -> None:
    inside = "hm" + block(param("a", "x </think> y"))
    r = run_all_splits(inside, "eos", "deepseek4", thinking=True, tools=True)
    assert [json.loads(c.arguments) for c in r.calls] == [{"a": "x </think> y"}]
    # A thought, if the turn goes on; the tag in its value is still data.
    r = run_all_splits(inside + " no.</think>Done.", "eos", "deepseek4", thinking=True, tools=True)
    assert (r.reasoning, r.content, r.calls) == (inside + " no.", "Done.", ())
    # A value that is never closed was a quotation, and the tag is real.
    quoted = f'hm {OPEN}{INVOKE}<{D}parameter name="a" string="true">ls... no.</think>'
    r = run_all_splits(quoted + "Answer.", "eos", "deepseek4", thinking=True, tools=True)
    assert (r.reasoning, r.content, r.calls) == (quoted.removesuffix("</think>"), "Answer.", ())
    # So it was if a new block starts behind the tag.
    r = run_all_splits(quoted + block(param("a", "pwd")), "eos", "deepseek4", thinking=True, tools=True)
    assert [json.loads(c.arguments) for c in r.calls] == [{"a": "pwd"}]
    assert r.reasoning == quoted.removesuffix("</think>")


@pytest.mark.parametrize("syntax", ["glm", "qwen"])
def test_tags_in_thoughts_are_thoughts(syntax: str) -> None:
    text = "I would use <tool_call> and <arg_key> or <function=f>.</think>Yes."
    r = run_all_splits(text, "eos", syntax, thinking=True, tools=True)
    assert (r.reasoning, r.content) == (text.partition("</think>")[0], "Yes.")


# ---- parallel calls and the end of decoding ----------------------------------------------------------------------


def test_decoding_stops_at_the_end_of_a_dsml_block() -> None:
    turn = Turn("deepseek4", tools=True)
    data = block("", param("a", "x")).encode()
    turn.feed(data[:-1])
    assert not turn.parser.stop_now
    turn.feed(data[-1:])
    assert turn.parser.stop_now and turn.parser.calls == 2
    assert turn.feed(b" more text") == []
    assert turn.finish("length").finish == "tool_calls"


@pytest.mark.parametrize("syntax", ["glm", "qwen"])
def test_calls_of_their_own_blocks_go_on(syntax: str) -> None:
    one = written([("f", {})], syntax)[0].lstrip()
    turn = Turn(syntax, tools=True)
    turn.feed(one.encode())
    assert not turn.parser.stop_now and not turn.parser.greedy
    turn.feed(b"\n" + one.encode())
    assert turn.parser.calls == 2 and not turn.parser.stop_now
    turn.feed(b"\nDone")
    assert turn.parser.stop_now
    assert turn.finish("eos").raw == (one + "\n" + one).encode()


def test_a_cut_second_block_voids_the_first() -> None:
    one = written([("f", {})], "qwen")[0].lstrip()
    r = run_all_splits(one + "\n<tool_call>\n<func", "length", "qwen", tools=True)
    assert (r.calls, r.void_calls, r.finish, r.content) == ((), 1, "length", "")
    assert r.cut == (one + "\n<tool_call>\n<func").encode()


def test_a_start_tag_cut_by_the_limit_is_no_text() -> None:
    for cause, content in (("length", "ok"), ("stop", "ok"), ("eos", f"ok\n\n<{D}tool")):
        r = run_all_splits(f"ok\n\n<{D}tool", cause, "deepseek4", tools=True)
        assert (r.content, r.calls) == (content, ())
    assert run_all_splits("1 <", "length", "deepseek4", tools=True).content == "1 <"


def test_prose_that_speaks_of_the_tags_is_text() -> None:
    text = f'The block starts with <{D}tool_calls>, holds <{D}invoke name="f"> and ends with {CLOSE}. Right?'
    r = run_all_splits(text, "eos", "deepseek4", tools=True)
    assert (r.content, r.finish, r.error) == (text, "stop", None)
    r = run_all_splits(text + block(""), "eos", "deepseek4", tools=True)
    assert r.content == text and len(r.calls) == 1


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("deepseek4", f'<{D}function_calls>\n<{D}invoke name="f">\n{END}</{D}function_calls>'),
        ("deepseek4", f'{OPEN}<{D}invoke_all name="f">\n{END}{CLOSE}'),
        ("deepseek4", f'{OPEN}<{D}invokename="f">\n{END}{CLOSE}'),
        ("deepseek4", f'{OPEN}{INVOKE}<{D}parameters name="a" string="true">x</{D}parameter>\n{END}{CLOSE}'),
        ("qwen", "<tool_call>\n<function=f<g>\n</function>\n</tool_call>"),
        ("qwen", "<tool_call>\n<function=f>\n<parameter=a<b>\nx\n</parameter>\n</function>\n</tool_call>"),
        ("qwen", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        ("glm", "<tool_call> \n</tool_call>"),
    ],
)
def test_what_only_looks_like_a_call(syntax: str, text: str) -> None:
    """Another word where the name of a tag ends, the block of an older model, a name that a tag cuts."""
    r = run_all_splits(text, "eos", syntax, tools=True)
    assert r.calls == () and r.content == text


def test_names_are_not_looked_up() -> None:
    for syntax in SYNTAXES:
        text, _ = written([("nobody.declared-me", {})], syntax)
        r = run_all_splits(text.lstrip(), "eos", syntax, tools=True, schemas=[("f", "{}")])
        assert [(c.name, c.arguments) for c in r.calls] == [("nobody.declared-me", "{}")]


def test_a_space_before_the_end_of_a_tag() -> None:
    """V4.1's tags are read with and without it."""
    text = f'<{D} calls >\n<{D} invoke name="f" >\n<{D} parameter name="a" string="true" >x</{D} parameter >\n'
    text += f"</{D} invoke >\n</{D} calls >"
    r = run_all_splits(text, "eos", "deepseek41", tools=True)
    assert [(c.name, json.loads(c.arguments)) for c in r.calls] == [("f", {"a": "x"})]
    assert r.raw == text.encode()


def test_a_malformed_block_at_the_end_is_an_error_to_tell() -> None:
    nameless = f"ok{OPEN}<{D}invoke>\n{END}{CLOSE}\n"
    r = run_all_splits(nameless, "eos", "deepseek4", tools=True)
    assert (r.content, r.finish, r.error, r.void_calls) == (nameless, "stop", "invalid tool call", 0)
    assert run_all_splits(nameless + "Well.", "eos", "deepseek4", tools=True).error is None
    r = run_all_splits("ok" + OPEN + INVOKE, "eos", "deepseek4", tools=True)
    assert (r.content, r.finish, r.error) == ("ok" + OPEN + INVOKE, "error", "unterminated tool call")


def test_what_was_wrong_is_named() -> None:
    body = f'<{D}parameter name="a" string="false">[1'
    for text, detail in (
        (f"{OPEN}<{D}invoke>\n{END}{CLOSE}", "invoke without name"),
        (f'{OPEN}{INVOKE}<{D}parameter string="true">x</{D}parameter>{END}{CLOSE}', "parameter without name"),
        (f"{OPEN}{INVOKE}{END}junk{CLOSE}", "unexpected text between the tags"),
        (f"{OPEN}{INVOKE}{body}</{D}parameter>{END}{CLOSE}", "parameter value is not valid JSON"),
        (
            f"{OPEN}{INVOKE}{body.replace('false', 'true')}{END}{CLOSE}",
            "parameter or tag not closed before the end of the block",
        ),
        (f"{OPEN}<{D}invoke\n</{D}invoke>\n{CLOSE}", "tag without an end"),
    ):
        r = run_all_splits(text, "eos", "deepseek4", tools=True)
        assert r.error == "invalid tool call" and r.detail == detail
    assert run([OPEN.encode() + INVOKE.encode()], "eos", "deepseek4", tools=True).detail is None


@pytest.mark.parametrize("tail", ["", "\n", "\nDone.", CLOSE, "<b>"])
def test_an_implicit_invoke_opens_a_block_where_asked(tail: str) -> None:
    calls = "\n\n" + INVOKE + param("a", "x") + END + INVOKE + END.rstrip()
    options = {"tools": True, "implicit_invoke": True}
    r = run_all_splits("ok" + calls + tail, "eos", "deepseek4", **options)
    assert [(c.name, json.loads(c.arguments)) for c in r.calls] == [("f", {"a": "x"}), ("f", {})]
    assert (r.content, r.raw) == ("ok", (calls + (tail if tail == CLOSE else "")).encode())
    r = run_all_splits("hm" + calls + tail, "eos", "deepseek4", thinking=True, **options)
    assert r.calls == () and r.reasoning == "hm" + calls + tail
    r = run_all_splits("hm</think>ok" + calls + tail, "eos", "deepseek4", thinking=True, **options)
    assert (r.reasoning, r.content, len(r.calls)) == ("hm", "ok", 2)
    r = run_all_splits("ok" + calls + tail, "eos", "deepseek4", tools=True)
    assert r.calls == () and r.content == "ok" + calls + tail


def test_an_implicit_invoke_is_not_completed() -> None:
    options = {"tools": True, "implicit_invoke": True}
    for text in (INVOKE, INVOKE + END + INVOKE, INVOKE + f'<{D}parameter name="a" string="true">x'):
        assert run_all_splits(text, "eos", "deepseek4", **options).calls == ()
    assert run_all_splits(INVOKE + END, "length", "deepseek4", **options).calls == ()
    for syntax, more in (("glm", {"tools": True}), ("deepseek4", {"tools": False})):
        with pytest.raises(ValueError, match="implicit_invoke"):
            Parser(syntax, implicit_invoke=True, **more)


# ---- text --------------------------------------------------------------------------------------------------------


def test_broken_text_is_repaired_as_the_decoder_does() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        data = b"".join(
            rng.choice(
                (b"a", "é".encode(), "\U0001f600".encode(), rng.randbytes(1), b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0")
            )
            for _ in range(rng.randrange(9))
        )
        want = data.decode("utf-8", "replace")
        assert run_all_splits(data, "eos", "raw").content == want
        assert run_all_splits(data, "eos", "deepseek4", tools=True, thinking=True).reasoning == want
        value = block(f'<{D}parameter name="a" string="true">').partition(END)[0].encode() + data
        r = run_all_splits(value + f"</{D}parameter>{END}{CLOSE}".encode(), "eos", "deepseek4", tools=True)
        if b"\n" not in data:
            assert [json.loads(c.arguments)["a"] for c in r.calls] == [want]


def test_qwen_drops_the_line_feeds_around_its_parts() -> None:
    r = run_all_splits("a \n\n</think>\n\n b", "eos", "qwen", thinking=True)
    assert (r.reasoning, r.content) == ("a ", " b")
    assert run_all_splits("a\n", "length", "qwen", thinking=True).reasoning == "a"
    assert run_all_splits("\n a\n", "eos", "chatml", tools=True).content == "\n a\n"


# ---- the surface -------------------------------------------------------------------------------------------------


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="syntax: expected one of"):
        Parser("gpt")
    for options in ({"thinking": True}, {"tools": True}):
        with pytest.raises(ValueError, match="raw"):
            Parser("raw", **options)
    parser = Parser("chatml")
    with pytest.raises(RuntimeError, match="before finish"):
        _ = parser.result
    with pytest.raises(ValueError, match="cause"):
        parser.finish("tool_calls")
    with pytest.raises(TypeError):
        parser.feed("text")  # type: ignore[arg-type]
    parser.finish("eos")
    with pytest.raises(RuntimeError, match="after finish"):
        parser.feed(b"x")
    with pytest.raises(RuntimeError, match="twice"):
        parser.finish("eos")


def test_events_compare_and_print() -> None:
    assert Parser("raw").feed(b"a") == [ContentDelta("a")] != [ReasoningDelta("a")]
    for event in (ContentDelta("a"), ToolCallStart(1, "f"), ToolCallDelta(1, "{"), ToolCallEnd(1, b"x")):
        assert eval(repr(event)) == event
    assert repr(run([b"a"], "eos", "raw")).startswith("Result(reasoning='', content='a'")


@pytest.mark.parametrize(
    ("cause", "finish"), [("eos", "stop"), ("stop", "stop"), ("length", "length"), ("error", "error")]
)
def test_causes(cause: str, finish: str) -> None:
    assert run([b"text"], cause, "deepseek4", tools=True).finish == finish
    assert run([], cause, "deepseek4", thinking=True, tools=True).finish == finish


# ---- work --------------------------------------------------------------------------------------------------------

ADVERSARIAL = {
    "text": "word ",
    "spaces": " ",
    "lt": "<",
    "closing": "</",
    "starts": f"<{D}tool_calls>",
    "half starts": f"<{D}tool_cal",
    "glm starts": "<tool_call>",
    "quoted blocks": f'<{D}tool_calls>\n<{D}invoke name="f">\n</{D}invoke>\n</{D}tool_calls> no ',
}
IN_VALUE = {
    "entities": "&amp;amp;",
    "amp": "amp;",
    "ampersands": "&",
    "lt": "&lt;",
    "half closes": f"</{D}param",
    "line feeds": "\n",
    "function ends": "</function>\n",
    "function ends far apart": "</function>" + " " * 60,
    "think": "</think>",
    "quotes": '"\\',
}


def steps(text: str, syntax: str, **options: Any) -> float:
    """Bytes looked at per byte fed, one byte at a time."""
    parser = Parser(syntax, tools=True, **options)
    data = text.encode()
    for i in range(len(data)):
        parser.feed(data[i : i + 1])
    parser.finish("eos")
    return parser.steps / len(data)


@pytest.mark.parametrize("syntax", ["deepseek4", "glm", "qwen"])
@pytest.mark.parametrize("thinking", [False, True])
def test_work_grows_linearly(syntax: str, thinking: bool) -> None:
    heads = {
        "deepseek4": (
            OPEN + INVOKE + f'<{D}parameter name="a" string="true">',
            f'<{D}parameter name="a" string="false">[',
        ),
        "glm": ("<tool_call>f<arg_key>a</arg_key><arg_value>", "<tool_call>f<arg_key>"),
        "qwen": ("<tool_call>\n<function=f>\n<parameter=a>\n", "<tool_call>\n<function=f>\n<parameter=b>\n"),
    }[syntax]
    schemas = [("f", '{"properties":{"a":{"type":"string"}}}')]
    texts = [("", unit) for unit in ADVERSARIAL.values()] + [(heads[0] + "&", "amp;")]
    texts += [(head, unit) for head in heads for unit in (*IN_VALUE.values(), *ADVERSARIAL.values())]
    for head, unit in texts:
        once, twice = (
            steps(head + unit * (n // len(unit)), syntax, thinking=thinking, schemas=schemas) for n in (1500, 6000)
        )
        assert twice < 50 and twice < 1.5 * once + 1, (head, unit, once, twice)


@pytest.mark.parametrize("what", ["10^5 calls", "10^6 members", "64 MiB of text", "deep values"])
def test_work_grows_linearly_at_full_size(what: str) -> None:
    """Bytes looked at: a quarter of it against all of it, in pieces of 64 KiB."""

    def turn(n: int) -> bytes:
        if what == "10^5 calls":
            return (OPEN + (INVOKE + param("a", "x") + END) * n + CLOSE).encode()
        if what == "10^6 members":
            return block(param("a", "{" + ",".join(f'"k{i:06}":"{i:06}"' for i in range(n)) + "}", False)).encode()
        if what == "deep values":
            return block(*(param("a", "[" * 500 + "]" * 500, False) for _ in range(n))).encode()
        return block(param("a", "a line\n" * (n // 7))).encode()

    full = {"10^5 calls": 10**5, "10^6 members": 10**6, "64 MiB of text": 64 << 20, "deep values": 10**4}[what]
    steps = []
    for n in (full // 4, full):
        data, parser = turn(n), Parser("deepseek4", tools=True)
        for i in range(0, len(data), 1 << 16):
            parser.feed(data[i : i + (1 << 16)])
        parser.finish("eos")
        assert len(parser.result.calls) == (n if what in ("10^5 calls", "deep values") else 1)
        assert parser.result.raw == data and parser.steps < 3 * len(data)
        steps.append(parser.steps)
    assert 3.9 * steps[0] <= steps[1] <= 4.1 * steps[0]


# ---- any split, any text -----------------------------------------------------------------------------------------


def pieces_of(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def check_any(rng: random.Random, data: bytes) -> None:
    options = options_for(rng)
    cause = rng.choice(("eos", "eos", "length", "stop", "error"))
    syntax = options.pop("syntax")
    whole = run([data], cause, syntax, **options)
    single = [data[i : i + 1] for i in range(len(data))]
    for pieces in (single, pieces_of(rng, data), pieces_of(rng, data)):
        assert outcome(run(pieces, cause, syntax, **options)) == outcome(whole), (pieces, cause, syntax, options)


@pytest.mark.parametrize("kind", ["soup", "damaged", "bytes"])
def test_random_turns_do_not_depend_on_the_split(kind: str) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(1500):
        if kind == "soup":
            data = soup(rng)
        elif kind == "bytes":
            data = rng.randbytes(rng.randrange(40))
        else:
            text, _ = written(random_calls(rng), rng.choice(SYNTAXES))
            data = damaged(rng, (rng.choice(("", "plan</think>")) + "Sure." + text).encode())
        check_any(rng, data)


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_what_was_written_is_read(syntax: str) -> None:
    """Random calls whose strings quote the markup survive writing and reading, and the block is found exactly."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(400):
        calls = random_calls(rng)
        text, schemas = written(calls, syntax)
        thinking = syntax != "chatml"
        before = "plan</think>Sure." if thinking else "Sure."
        for pieces in ([before + text], [*(before + text)]):
            r = run([p.encode() for p in pieces], "eos", syntax, thinking=thinking, tools=True, schemas=schemas)
            assert (r.reasoning, r.content) == ("plan" if thinking else "", "Sure."), text
            assert [(c.name, json.loads(c.arguments)) for c in r.calls] == [*map(retyped(schemas), calls)], text
            assert r.raw == text.encode()


def retyped(schemas: list[tuple[str, str]]) -> Any:
    """Where a property is declared as string or JSON, a string that is JSON of a declared type becomes JSON."""
    declared = {name: json.loads(schema)["parameters"]["properties"] for name, schema in schemas}
    kinds = {bool: "boolean", int: "number", float: "number", list: "array", dict: "object", type(None): "null"}

    def value_of(name: str, key: str, value: Any) -> Any:
        types = declared.get(name, {}).get(key, {}).get("type", [])
        if isinstance(value, str) and len(types) > 1:
            try:
                read = json.loads(value)
            except ValueError:
                return value
            return read if kinds.get(type(read)) in types else value
        return value

    return lambda call: (call[0], {key: value_of(call[0], key, value) for key, value in call[1].items()})


def test_fuzz_target() -> None:
    """The target runs, on its own examples and on damaged ones."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        data = dsml_fuzz.example(rng)
        dsml_fuzz.target(data)
        dsml_fuzz.target(damaged(rng, data))
