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

from ds4._dsml import Result
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
