"""The output parser beside DeepSeek's own (`deepseek-recipe`): equal, but for the differences that are listed here.

`docs/parsing.md` explains each difference. A random turn on which the two disagree must show the sign of one of them,
and each difference has an example, so that the list stays as short as the truth.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

import pytest

from ds4._dsml import Result
from tests.support.turns import damaged, random_calls, run, written

recipe = pytest.importorskip("deepseek_recipe")

MODELS = {"deepseek4": recipe.ModelVersion.DeepseekV4Pro, "deepseek41": recipe.ModelVersion.DeepseekV41Flash}


@dataclass(frozen=True)
class Read:
    """What a parser made of a turn; arguments as (key, value) pairs, or None where they are no JSON."""

    reasoning: str
    content: str
    calls: list[tuple[str, Any]]


def pairs(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=lambda members: ("{}", *members), strict=False)
    except ValueError:
        return None


def ours(text: str, syntax: str, thinking: bool) -> tuple[Read, Result]:
    r = run([text.encode()], "eos", syntax, thinking=thinking, tools=True)
    return Read(r.reasoning, r.content, [(c.name, pairs(c.arguments)) for c in r.calls]), r


def theirs(text: str, syntax: str, thinking: bool) -> Read:
    conversation = recipe.Conversation([recipe.UserMessage("x")], thinking_mode=thinking)
    request = recipe.ConversationRequest(conversation, MODELS[syntax])
    stage = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    stream = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(request, "id", "m"),
        recipe.ParsingOptions(parse_tool_calls=True, thinking_initial_stage=stage),
    )
    answer = recipe.ChatCompletionResponse("id", "m", 0, 0, 0)
    chunk = recipe.InferenceChunk
    for piece in (chunk.ready(), chunk.text(text), chunk.finish(recipe.InferenceFinishReason.Stop)):
        for delta in stream.push(piece):
            answer.accumulate(delta)
    for delta in stream.finish():
        answer.accumulate(delta)
    message = json.loads(answer.to_json())["choices"][0]["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return Read(
        message.get("reasoning_content") or "",
        message.get("content") or "",
        [(name, pairs(arguments) if arguments else None) for name, arguments in calls],
    )


D = "｜DSML｜"
_OWN = {"deepseek4": (D, "tool_calls"), "deepseek41": (f"{D} ", "calls")}


def signs(text: str, syntax: str, thinking: bool, us: Read, result: Result, them: Read) -> set[str]:
    """The listed differences (docs/parsing.md) whose sign the turn shows."""
    x, block = _OWN[syntax]
    start = f"<{x}{block}>"
    answer = text.partition("</think>")[2] if thinking else text
    kept = us.content + us.reasoning
    values = repr([value for _, value in us.calls])
    raw = result.raw.decode()
    found = {
        # White space around the parts.
        "trim": us.content.strip() == them.content.strip() and us.reasoning.strip() == them.reasoning.strip()
        and us.calls == them.calls,
        # What is not a whole, well-formed block stays text and calls nothing.
        "malformed": result.error is not None or result.void_calls > 0 or (D in kept and not us.calls),
        "bare invoke": f"<{x}invoke" in text and start not in text,
        "quoted tag": f"<{D}" in kept,
        # A value ends at its own close tag, not at any closing DSML tag, and its escapes are undone.
        "tags in values": f"</{D}" in values or f"</{D}" in raw.replace(f"</{x}parameter>", "")
        .replace(f"</{x}invoke>", "").replace(f"</{x}{block}>", ""),
        "escapes": "&" in raw,
        # Attributes are attributes, in any order and spacing; without string="..." the value is a string.
        "attributes": any(
            not re.fullmatch(f'<{x}parameter name="[^"<]*" string="(true|false)">', tag)
            for tag in re.findall(f"<{x}parameter[^>]*>", raw)
        ) or any(not re.fullmatch(f'<{x}invoke name="[^"<]*">', tag) for tag in re.findall(f"<{x}invoke[^>]*>", raw)),
        # Every argument is JSON.
        "json": any(value is None for _, value in them.calls),
        # Thinking.
        "second think": "</think>" in answer,
        "block in thinking": thinking and start in text.partition("</think>")[0],
    }  # fmt: skip
    return {name for name, shown in found.items() if shown}


def turns(rng: random.Random) -> tuple[str, str, bool]:
    syntax = rng.choice(list(MODELS))
    thinking = rng.random() < 0.5
    return syntax, ("plan</think>" if thinking else "") + "Sure." + written(random_calls(rng), syntax)[0], thinking


def test_well_formed_turns_read_the_same() -> None:
    """Unless a value quotes closing DSML tags or escapes (where the two differ on purpose): all of it."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    compared = 0
    while compared < 1000:
        syntax, text, thinking = turns(rng)
        us, result = ours(text, syntax, thinking)
        if re.search(f"</{D}|&(amp;)*lt;", repr(us.calls)):
            continue
        compared += 1
        assert us == theirs(text, syntax, thinking), text
        assert result.finish == "tool_calls" and result.error is None


@pytest.mark.parametrize("thinking", [False, True])
def test_plain_turns_read_the_same(thinking: bool) -> None:
    """Text without tags, with everything else that JSON, markup and bytes may throw in."""
    rng = random.Random(thinking)
    for _ in range(500):
        words = [
            rng.choice(("a", "<b>", "&lt;", '"', "\\", "é", "\U0001f600", " ", "\n", "{", "<", ">")) for _ in range(9)
        ]
        text = "plan</think>" + "".join(words) if thinking else "".join(words)
        us, _ = ours(text, "deepseek4", thinking)
        them = theirs(text, "deepseek4", thinking)
        # Blank lines at the start of an answer are not text for the other parser.
        assert (us.reasoning, us.content.lstrip("\n")) == (them.reasoning, them.content.lstrip("\n")), text


def test_damaged_turns_differ_only_as_listed() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    equal = 0
    for _ in range(4000):
        syntax, text, thinking = turns(rng)
        text = damaged(rng, text.encode()).decode("utf-8", "replace")
        if rng.random() < 0.1:
            text = text.replace(f"<{D}tool_calls>\n", "", 1)
        us, result = ours(text, syntax, thinking)
        them = theirs(text, syntax, thinking)
        if us == them:
            equal += 1
            continue
        why = signs(text, syntax, thinking, us, result, them)
        assert why, (text, us, them)
    assert equal > 100


INVOKE, END = f'<{D}invoke name="f">\n', f"</{D}invoke>\n"
OPEN, CLOSE = f"<{D}tool_calls>\n", f"</{D}tool_calls>"
PARAM, PARAM_END = f'<{D}parameter name="a" string="true">', f"</{D}parameter>\n"

EXAMPLES = {
    "trim": f"ok \t\n\n{OPEN}{INVOKE}{END}{CLOSE}",
    "malformed": f"{OPEN}{INVOKE}{END}junk\n{INVOKE}{END}{CLOSE}",
    "bare invoke": f"ok\n\n{INVOKE}{END}",
    "quoted tag": f"Write <{D}tool_calls> first.",
    "tags in values": f"{OPEN}{INVOKE}{PARAM}x </{D}invoke> y{PARAM_END}{END}{CLOSE}",
    "escapes": f"{OPEN}{INVOKE}{PARAM}x &lt;/{D}parameter> y{PARAM_END}{END}{CLOSE}",
    "attributes": f'{OPEN}{INVOKE}<{D}parameter name="n">5{PARAM_END}{END}{CLOSE}',
    "json": f'{OPEN}{INVOKE}<{D}parameter name="n" string="false">00123{PARAM_END}{END}{CLOSE}',
    "second think": "plan</think>draft</think>answer",
    "block in thinking": f"I could {OPEN}{INVOKE}{END}{CLOSE} but no.</think>Nothing to do.",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_listed_difference_exists(name: str) -> None:
    text = EXAMPLES[name]
    thinking = "</think>" in text
    us, result = ours(text, "deepseek4", thinking)
    them = theirs(text, "deepseek4", thinking)
    assert us != them
    assert name in signs(text, "deepseek4", thinking, us, result, them)


@pytest.mark.parametrize("syntax", MODELS)
def test_both_read_the_spelling_of_the_other_model(syntax: str) -> None:
    text = written([("f", {"a": "x", "b": [1]})], "deepseek41" if syntax == "deepseek4" else "deepseek4")[0]
    assert ours(text, syntax, False)[0] == theirs(text, syntax, False) != Read("", text, [])


@pytest.mark.parametrize("spelling", [("DSML｜", "tool_calls"), ("", "tool_calls")])
def test_damaged_spellings_are_text_for_the_other_parser(spelling: tuple[str, str]) -> None:
    x, block = spelling
    text = f'ok\n\n<{x}{block}>\n<{x}invoke name="f">\n</{x}invoke>\n</{x}{block}>'
    assert ours(text, "deepseek4", False)[0] == Read("", "ok", [("f", ("{}",))])
    assert theirs(text, "deepseek4", False) != ours(text, "deepseek4", False)[0]
