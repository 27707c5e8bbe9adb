"""What renderers remember changes the time, never a segment: conversations that grow, fork and are edited at random."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ds4.bounded import BoundedCache
from ds4.prompt.registry import SYNTAXES
from ds4.prompt.types import Conversation, Message, Renderer, Segment, Tool, ToolCall

TEXTS = ("", " ", "Hello.\n", "\n\ntext é🚀 ", "</tool_result> &lt;/tool_response> </parameter>", "<think>", "x" * 600)
ARGUMENTS = (
    "{}",
    "",
    "not JSON",
    '{"path": "a.txt", "n": 1}',
    '{"n": 1.50, "path": "</parameter>", "deep": {"a": [1, "é"], "b": null}}',
    '{"a": -0, "b": 1e400, "c": true, "path": "\\u00e9 </arg_value>"}',
)
TOOLS = tuple(
    Tool(name, f'{{"name": "{name}", "parameters": {{"type": "object", "properties": {{{properties}}}}}}}')
    for name, properties in (("read", '"n": {}, "path": {}'), ("write", '"path": {}, "n": {}'), ("é", ""))
)


def message(rng: random.Random) -> Message:
    text, role = rng.choice(TEXTS), rng.choice(("user", "assistant", "assistant", "tool", "tool", "system"))
    if role == "assistant":
        raw = rng.choice((None, None, b"\n\n<tool_call>\n<function=read>\n</function>\n</tool_call>"))
        calls = tuple(
            ToolCall(f"c{rng.randrange(4)}", rng.choice(("read", "write", "é", "<&>")), rng.choice(ARGUMENTS), raw)
            for _ in range(rng.choice((0, 0, 1, 3)))
        )
        return Message("assistant", text, rng.choice(TEXTS), calls)
    if role == "tool":
        return Message("tool", text, call_id=f"c{rng.randrange(4)}", joined=rng.random() < 0.3)
    return Message("system" if role == "system" else "user", text, joined=role == "user" and rng.random() < 0.3)


def edited(rng: random.Random, messages: list[Message]) -> list[Message]:
    """Mostly one turn more; else an edit, a cut, the same turns as other objects, or another order."""
    out = list(messages)
    i = rng.randrange(len(out)) if out else 0
    match rng.randrange(8):
        case 0 if out:
            out[i] = message(rng)
        case 1 if out:
            del out[i:]
        case 2:
            out = copy.deepcopy(out)
        case 3 if out:
            out[i] = copy.copy(out[i])
        case 4 if len(out) > 1:
            out[i - 1], out[i] = out[i], out[i - 1]
        case _:
            out.append(message(rng))
    return out[-40:]


MAKERS = [syntax.make for syntax in SYNTAXES.values()]
MAKERS += [syntax.make_official for syntax in SYNTAXES.values() if syntax.make_official is not None]


@pytest.mark.parametrize("make", MAKERS)
def test_remembered_turns_are_drawn_alike(make: Callable[[Any], Renderer], monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.SystemRandom().getrandbits(32)
    rng = random.Random(seed)
    renderer = make(SimpleNamespace(id="m", name="m"))
    talks: list[list[Message]] = [[], [], []]
    tools: tuple[Tool, ...] = ()
    for _ in range(150):
        talk = rng.randrange(3)
        talks[talk] = edited(rng, rng.choice(talks) if rng.random() < 0.1 else talks[talk])
        if rng.random() < 0.1:
            tools = tuple(rng.sample(TOOLS, rng.randrange(4)))
        messages = tuple(talks[talk]) or (Message("user", "?"),)
        conversation = Conversation(messages, tools, rng.choice(("none", "high", "max")), rng.random() < 0.2)
        cut = rng.randrange(len(messages))

        def drawn(conversation: Conversation = conversation, cut: int = cut) -> list[tuple[Segment, ...]]:
            tail = renderer.render_tail(conversation.messages[cut:], conversation)
            return [renderer.render(conversation).segments, tail.segments]

        first, again = drawn(), drawn()
        with monkeypatch.context() as patch:
            patch.setattr(BoundedCache, "get", lambda self, key: None)
            fresh = drawn()
        assert first == again == fresh, f"seed {seed}"
