"""A history of many calls costs what it is long: reading and drawing it are counted in function calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ds4._json import dumps, parse
from ds4.prompt.registry import SYNTAXES
from ds4.server.api.chat import read_conversation


def history(calls: int) -> bytes:
    """Turns of four calls and their results, each call another text."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go on."}]
    for turn in range(calls // 4):
        ids = [f"call_{turn}_{i}" for i in range(4)]
        functions = [{"name": "read", "arguments": f'{{"path": "{i}.txt", "lines": [1, 2]}}'} for i in ids]
        messages.append(
            {
                "role": "assistant",
                "content": f"Turn {turn}.",
                "tool_calls": [
                    {"id": i, "type": "function", "function": f} for i, f in zip(ids, functions, strict=True)
                ],
            }
        )
        messages += [{"role": "tool", "tool_call_id": i, "content": f"result of {i}"} for i in ids]
    parameters = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "array"}}}
    return dumps(
        {"messages": messages, "tools": [{"type": "function", "function": {"name": "read", "parameters": parameters}}]}
    )


def work(syntax: str, calls: int) -> tuple[int, int]:
    """(function calls of reading and drawing, of Python and of C; bytes of the prompt)."""
    preparer: Any = SimpleNamespace(syntax=syntax, n_ctx=1 << 20)
    info: Any = SimpleNamespace(id="model", name="model", path="model", syntax=syntax)
    body, renderer = history(calls), SYNTAXES[syntax].make(info)
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        conversation, *_ = read_conversation(parse(body), preparer)
        text = renderer.render(conversation).text
    finally:
        sys.setprofile(None)
    assert f"result of call_{calls // 4 - 1}_3" in text
    return count, len(text)


@pytest.mark.parametrize("syntax", sorted(SYNTAXES))
def test_work_grows_linearly(syntax: str) -> None:
    one, length = work(syntax, 500)
    four, longer = work(syntax, 2000)
    assert 3 * length < longer < 4.2 * length
    assert four < 4.1 * one


@pytest.mark.slow
@pytest.mark.parametrize("syntax", sorted(SYNTAXES))
def test_a_hundred_thousand_calls(syntax: str) -> None:
    one, _ = work(syntax, 25_000)
    four, _ = work(syntax, 100_000)
    assert four < 4.1 * one
