"""What is remembered between requests changes the time, never a prompt: bodies of all dialects that grow, fork and are
edited at random, read and drawn with every memory and with none."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ds4._json import Bodies, JSONError, Node, Spans, parse
from ds4.bounded import BoundedCache
from ds4.errors import RequestError
from ds4.server.api import chat, chat_tools, content, messages, tools
from ds4.server.api.prepare import Preparer
from ds4.testing import ScriptedEngine
from tests.support.stories import DIALECTS, Dialect, Stories, read

HISTORY: dict[Dialect, str] = {"chat": "messages", "responses": "input", "messages": "messages"}


def edited(rng: random.Random, body: dict[str, Any], other: dict[str, Any], member: str) -> dict[str, Any]:
    """Most of it one turn shorter or as it was; else an item of another story, a member more in front or behind, a
    mark on an item that moves, or other tools."""
    items = list(body[member])
    i = rng.randrange(len(items))
    match rng.randrange(9):
        case 0:
            items[i] = rng.choice(other[member])
        case 1:
            return {"user": str(rng.random()), **body}
        case 2:
            return {**body, "user": str(rng.random())}
        case 3:
            items[i] = {**items[i], "cache_control": {"type": "ephemeral"}}
        case 4 if "tools" in other:
            return {**body, "tools": other["tools"]}
        case 5:
            items = json.loads(json.dumps(items[: i + 1]))
        case _:
            items = items[: max(1, len(items) - rng.randrange(3))]
    return {**body, member: items}


def outcome(dialect: Dialect, node: Node, preparer: Preparer) -> object:
    try:
        conversation = read(dialect, node, preparer)
    except (JSONError, RequestError) as error:
        return type(error), str(error)
    return conversation, preparer.renderer.render(conversation).segments


@pytest.mark.parametrize("syntax", ["chatml", "deepseek4", "glm"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_known_bodies_give_the_same_prompts(dialect: Dialect, syntax: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.SystemRandom().getrandbits(32)
    rng = random.Random(seed)
    preparer = Preparer(ScriptedEngine(syntax=syntax), 100)
    source = Stories(seed, ("none", "high"))
    bodies = Bodies(100_000, shortest=64)
    member = HISTORY[dialect]
    for module, name in ((chat, "_messages"), (messages, "_known"), (chat_tools, "_known"), (tools, "_known")):
        # So small that things are forgotten, and short values count.
        monkeypatch.setattr(module, name, Spans(20_000, shortest=8))
    reads = 0
    talks = [source.story().body(dialect) for _ in range(4)]
    for _ in range(150):
        talk = rng.randrange(4)
        body = talks[talk] if rng.random() < 0.3 else edited(rng, talks[talk], rng.choice(talks), member)
        if rng.random() < 0.1:
            talks[talk] = source.story().body(dialect)
        text = json.dumps(body, ensure_ascii=rng.random() < 0.1).encode()
        found = outcome(dialect, bodies.parse(text), preparer)
        with monkeypatch.context() as patch:
            patch.setattr(BoundedCache, "get", lambda self, key: None)
            patch.setattr(content, "string", Node.as_str)
            for module, name in ((chat, "_messages"), (messages, "_known"), (chat_tools, "_known"), (tools, "_known")):
                patch.setattr(module, name, Spans(0))
            expected = outcome(dialect, parse(text), preparer)
        assert found == expected, f"seed {seed}: {text!r}"
        reads += not isinstance(found[0], type)  # type: ignore[index]
    assert reads > 75
