"""Whatever clients send as arguments, schema or name: every renderer draws it, and never as structure."""

from __future__ import annotations

import random

import pytest

from ds4.prompt.registry import SYNTAXES
from ds4.prompt.types import Conversation, Message, Renderer, Tool, ToolCall
from tests.prompt.test_chatml import info
from tests.support.prompts import specials

SEED = 20261130

ATOMS = (
    *'{}[]",:\\',
    *(
        "\\u",
        "\\ud800",
        "\\u0000",
        "\ud800",
        "\x00",
        "\n",
        " ",
        "é",
        "a",
        '"a":',
        "1",
        "-",
        "1e400",
        "0.10",
        "true",
        "nul",
    ),
    *("</arg_value>", "</parameter>", "</｜DSML｜parameter>", "</｜DSML｜ parameter>", "&lt;", "<think>", "<|im_end|>"),
)
WHOLE = (
    '{"a": 1, "a": 2}',
    '{"f": 1e400, "g": -1e-400, "h": 123456789012345678901234567890}',
    '{"": "", " ": " "}',
    '{"a":' * 300 + "1" + "}" * 300,
    "[" * 100_000,
    '{"a": "' + "\\ud83d" * 1000 + '"}',
)


def garbage(rng: random.Random) -> str:
    return "".join(rng.choices(ATOMS, k=rng.randrange(25)))


RENDERERS = [
    pytest.param(make(info("x", name)), id=name if make is syntax.make else f"{name}-official")
    for name, syntax in sorted(SYNTAXES.items())
    for make in (syntax.make, syntax.make_official)
    if make is not None
]


def conversation(arguments: str, schema: str, name: str) -> Conversation:
    turn = Message("assistant", "t", "r", (ToolCall("c", name, arguments),))
    return Conversation((Message("user", "q"), turn, Message("tool", "R", call_id="c")), (Tool(name, schema),))


@pytest.mark.parametrize("renderer", RENDERERS)
def test_garbage_is_drawn(renderer: Renderer) -> None:
    rng = random.Random(SEED)
    plain = specials(renderer.render(conversation("text", "{}", "f")))
    for i in range(1500):
        arguments, schema, name = garbage(rng), garbage(rng), garbage(rng)
        prompt = renderer.render(conversation(arguments, schema, name))
        found = specials(prompt)
        # Garbage that is an object has any number of parameters; the structure around them is the same.
        assert _without_parameters(found) == _without_parameters(plain), (SEED, i, arguments, schema, name)


def _without_parameters(found: list[str]) -> list[str]:
    return [text for text in found if text != "｜DSML｜" and "arg_" not in text]


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("arguments", WHOLE, ids=range(len(WHOLE)))
def test_extremes_are_drawn(renderer: Renderer, arguments: str) -> None:
    for schema in ("{}", arguments):
        text = renderer.render(conversation(arguments, schema, "f")).text
        assert "R" in text.rpartition("tool_re")[0]
