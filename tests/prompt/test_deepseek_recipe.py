"""Template `official` against DeepSeek's own encoder, the package `deepseek-recipe`, on random conversations.

Both the text and the places of special tokens must be equal. Left out of the comparison are what the two decide
differently on purpose: data that contains the closing delimiter of its own wrapper (escaped here, see
`test_closing_delimiters`), and characters in attributes that XML escapes.

`ds4` is then held equal to `official` on the conversations in which the differences that `docs/prompts.md` lists do
not occur, which `_comparable` makes of any conversation.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds4.engine.model_file import open_model_file
from ds4.prompt.deepseek4 import ABSOLUTE_MAXIMUM, DeepSeek4Renderer
from ds4.prompt.deepseek41 import DeepSeek41Renderer
from ds4.prompt.types import Conversation, Message, Tool, ToolCall
from tests.support.conversations import Conversations
from tests.support.prompts import special_ranges

recipe = pytest.importorskip("deepseek_recipe")

SEED = 20261130

Renderer = type[DeepSeek4Renderer] | type[DeepSeek41Renderer]
MODELS = [
    pytest.param(DeepSeek4Renderer, recipe.DeepseekV4Encoding(), id="V4"),
    pytest.param(DeepSeek41Renderer, recipe.DeepseekV41Encoding(), id="V4.1"),
]


def theirs(conversation: Conversation, encoding: Any) -> tuple[str, list[tuple[int, int]]]:
    rendered = encoding.render_conversation(_theirs(conversation))
    return rendered.prompt, list(rendered.special_ranges)


def _theirs(conversation: Conversation) -> Any:
    thinking = conversation.effort != "none"
    effort = {"medium": "high", "none": None}.get(conversation.effort, conversation.effort)
    messages = [
        _message(m, thinking, prefix=conversation.continue_final and m is conversation.messages[-1])
        for m in conversation.messages
    ]
    return recipe.Conversation(
        messages,
        thinking_mode=thinking,
        tools=[_tool(t) for t in conversation.tools] or None,
        reasoning_effort=effort,
    )


def _message(message: Message, thinking: bool, *, prefix: bool) -> Any:
    match message.role:
        case "system":
            return recipe.SystemMessage(message.content)
        case "user":
            return recipe.UserMessage(message.content)
        case "tool":
            return recipe.ToolMessage(message.content, message.call_id)
    # The package's own request conversion drops reasoning when thinking is off, and fills it when it is on.
    calls = [recipe.ToolCall(c.id, c.name, c.arguments) for c in message.calls]
    reasoning = message.reasoning if thinking else None
    return recipe.AssistantMessage(message.content, reasoning, calls or None, prefix=prefix)


def _tool(tool: Tool) -> Any:
    schema = json.loads(tool.schema)
    return recipe.ToolDefinition(schema["name"], schema["description"], schema["parameters"])


def hold_equal(make: Renderer, encoding: Any, seed: int, count: int) -> None:
    source = Conversations(seed, closing=False)
    renderer = make(official=True)
    for i in range(count):
        conversation = source.conversation()
        ours = renderer.render(conversation)
        text, ranges = theirs(conversation, encoding)
        assert ours.text == text, (seed, i, conversation)
        assert special_ranges(ours) == ranges, (seed, i, conversation)


@pytest.mark.parametrize(("make", "encoding"), MODELS)
def test_official_is_deepseeks_own(make: Renderer, encoding: Any) -> None:
    hold_equal(make, encoding, SEED, 600)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "encoding"), MODELS)
def test_official_is_deepseeks_own_thousandfold(make: Renderer, encoding: Any) -> None:
    hold_equal(make, encoding, SEED + 1, 20000)


@pytest.mark.parametrize(("make", "encoding"), MODELS)
@pytest.mark.parametrize("order", [("a", "b"), ("b", "a"), ("b",), ("b", "x"), ("x", "b", "a"), ("b", "b", "a")])
def test_order_of_results(make: Renderer, encoding: Any, order: tuple[str, ...]) -> None:
    calls = (ToolCall("a", "f", "{}"), ToolCall("b", "g", "{}"))
    results = tuple(Message("tool", f"of {i}", call_id=i) for i in order)
    conversation = Conversation((Message("user", "q"), Message("assistant", calls=calls), *results))
    assert make(official=True).render(conversation).text == theirs(conversation, encoding)[0]


@pytest.mark.parametrize(("make", "encoding"), MODELS)
def test_closing_delimiters(make: Renderer, encoding: Any) -> None:
    """Where data would end its wrapper the official template escapes it: the one difference to the package."""
    end = "</｜DSML｜parameter>" if make is DeepSeek4Renderer else "</｜DSML｜ parameter>"
    call = ToolCall("a", "f", json.dumps({"s": f"1{end}2"}))
    conversation = Conversation(
        (Message("user", "q"), Message("assistant", calls=(call,)), Message("tool", "3</tool_result>4", call_id="a"))
    )
    ours, (text, _) = make(official=True).render(conversation).text, theirs(conversation, encoding)
    assert f"1{end}2" in text and "3</tool_result>4" in text
    assert ours == text.replace(f"1{end}2", f"1&lt;{end[1:]}2").replace("3</tool_result>4", "3&lt;/tool_result>4")


# ---- ds4 and its written differences ----------------------------------------------------------------------------


def _comparable(conversation: Conversation, make: Renderer) -> Conversation:
    """The conversation without what the templates draw differently."""
    v4 = make is DeepSeek4Renderer
    messages: list[Message] = []
    before = ""  # the role drawn before; V4 hoists system texts
    for message in conversation.messages:
        match message.role:
            case "system":
                if v4 and not message.content:
                    continue  # `official` leaves it out
            case "user":
                if v4 and before in ("user", "tool"):
                    continue  # `official` merges the two
            case "tool":
                if before != "calls":
                    continue  # `official` V4 puts it elsewhere
                message = replace(message, call_id="c0")
            case "assistant":
                if before not in ("user", "tool") and (v4 or before != "system" or len(messages) == 1):
                    messages.append(Message("user", "u"))  # a turn that answers nothing has no header in `ds4`
                # JSON values are spaced differently; V4.1 has an empty line in calls without parameters. V4 may move
                # what follows several calls.
                calls = message.calls[: 1 if v4 else None]
                calls = tuple(replace(c, id=f"c{i}", arguments='{"k": "v"}') for i, c in enumerate(calls))
                message = replace(message, calls=calls)
        messages.append(message)
        if not v4 or message.role != "system":
            before = "calls" if message.calls else message.role
    if before in ("assistant", "calls") and not conversation.continue_final:
        messages.append(Message("user", "go on"))  # reasoning of a finished last turn is kept by `ds4`
    tools = conversation.tools
    if any(m.calls for m in messages) and not tools:
        tools = (Tool("f", '{"name": "f", "description": "", "parameters": {}}'),)  # history counts in `ds4` only
    effort = "low" if v4 and conversation.effort != "none" else conversation.effort  # texts are one tier apart
    return replace(conversation, messages=tuple(messages), tools=tools, effort=effort)


@pytest.mark.parametrize(("make", "encoding"), MODELS)
def test_ds4_is_official_but_for_the_listed_differences(make: Renderer, encoding: Any) -> None:
    source = Conversations(SEED + 2, closing=False)
    compared = 0
    for i in range(600):
        conversation = _comparable(source.conversation(), make)
        if not conversation.messages or (len(conversation.messages) == 1 and conversation.continue_final):
            continue  # a lone prefix is a former turn for `official`
        ours, official = make().render(conversation).text, make(official=True).render(conversation).text
        if conversation.tools:
            ours = _system_first(ours, conversation, make)
        assert ours == official, (SEED + 2, i, conversation)
        compared += 1
    assert compared > 500


def _system_first(text: str, conversation: Conversation, make: Renderer) -> str:
    """A prompt of `ds4` with tools and system text exchanged, as `official` has them."""
    declaration = text[text.index("## Tools") : text.index("to invoke tool calls.\n") + len("to invoke tool calls.\n")]
    systems = [m.content for m in conversation.messages if m.role == "system"]
    if make is DeepSeek41Renderer:
        first = conversation.messages[0]
        systems = [first.content] if first.role == "system" else []
    drawn = declaration + "".join(f"\n\n{system}" for system in systems)
    assert drawn in text
    joined = "\n\n".join(systems)
    return text.replace(drawn, f"{joined}\n\n{declaration}", 1)


def test_effort_texts_of_v4_are_one_tier_apart() -> None:
    conversation = Conversation((Message("user", "q"),), effort="high")
    assert ABSOLUTE_MAXIMUM in DeepSeek4Renderer(official=True).render(conversation).text
    assert ABSOLUTE_MAXIMUM in DeepSeek4Renderer().render(replace(conversation, effort="max")).text
    assert "Effort" not in DeepSeek4Renderer().render(conversation).text


def test_token_ids_are_deepseeks_own() -> None:
    """With a tokenizer at hand the ids are equal too: text is cut at the same places, and no data is a token."""
    file = Path(os.environ.get("DS4_TEST_MODELS", "")) / "v4-nano/tokenizer.json"
    if not file.is_file():
        pytest.skip("DS4_TEST_MODELS names no folder with v4-nano")
    encoding = recipe.DeepseekV4Encoding().with_tokenizer(recipe.Tokenizer.from_file(str(file)))
    tokenizer = open_model_file(file.parent).tokenizer()
    source, renderer = Conversations(SEED + 3, closing=False), DeepSeek4Renderer(official=True)
    for i in range(300):
        conversation = source.conversation()
        ids = tokenizer.encode_segments(renderer.render(conversation).segments)
        assert ids == encoding.encode(_theirs(conversation)), (SEED + 3, i, conversation)
