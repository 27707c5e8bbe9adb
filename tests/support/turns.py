"""Model turns for tests of the output parser: feeding and checking them, and making them up.

The writer here is independent of the renderers: it states the formats once more, in the simplest way.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

from ds4._dsml import ContentDelta, Parser, ReasoningDelta, Result, ToolCallDelta, ToolCallEnd, ToolCallStart

SYNTAXES = ("deepseek4", "deepseek41", "glm", "qwen", "chatml")


class Turn:
    """Feeds a parser and gathers its events, checking what holds after every event."""

    def __init__(self, syntax: str, **options: Any) -> None:
        self.parser = Parser(syntax, **options)
        self.text = {"reasoning": "", "content": ""}
        self.started: list[str] = []
        self.arguments: list[str] = []
        self.ended: list[bytes] = []
        self.sent: list[list[str]] = []

    def take(self, events: Iterable[object]) -> list[list[str]]:
        seen: list[list[str]] = []
        for e in events:
            if isinstance(e, ReasoningDelta):
                assert e.text and not self.started
                self.text["reasoning"] += e.text
                seen.append(["reasoning", e.text])
            elif isinstance(e, ContentDelta):
                assert e.text
                self.text["content"] += e.text
                seen.append(["content", e.text])
            elif isinstance(e, ToolCallStart):
                assert e.index == len(self.started)
                self.started.append(e.name)
                self.arguments.append("")
                seen.append([f"tool_start[{e.index}]", e.name])
            elif isinstance(e, ToolCallDelta):
                assert e.index == len(self.started) - 1 and e.arguments and not self.ended
                self.arguments[e.index] += e.arguments
                seen.append([f"args[{e.index}]", e.arguments])
            else:
                assert isinstance(e, ToolCallEnd) and e.index == len(self.ended)
                self.ended.append(e.raw)
        self.sent.extend(seen)
        return seen

    def feed(self, data: bytes) -> list[list[str]]:
        return self.take(self.parser.feed(data))

    def finish(self, cause: str) -> Result:
        self.take(self.parser.finish(cause))
        r = self.parser.result
        assert self.text == {"reasoning": r.reasoning, "content": r.content}
        n = len(self.ended)
        assert [(c.index, c.name, c.arguments) for c in r.calls] == list(
            zip(range(n), self.started[:n], self.arguments[:n], strict=True)
        )
        assert all(raw == r.raw for raw in self.ended)
        assert len(self.started) == n + r.void_calls == self.parser.calls
        assert (r.finish == "tool_calls") == bool(r.calls)
        for c in r.calls:
            assert isinstance(json.loads(c.arguments), dict)
        return r


def outcome(r: Result) -> tuple[object, ...]:
    calls = [(c.name, c.arguments) for c in r.calls]
    return (r.reasoning, r.content, calls, r.raw, r.finish, r.error, r.detail, r.void_calls, r.cut)


def run(pieces: Iterable[bytes], cause: str, syntax: str, **options: Any) -> Result:
    turn = Turn(syntax, **options)
    for piece in pieces:
        turn.feed(piece)
    return turn.finish(cause)


# ---- making turns up ---------------------------------------------------------------------------------------------

D = "｜DSML｜"
_SOUP = [
    "<think>", "</think>", f"<{D}tool_calls>", f"</{D}tool_calls>", f'<{D}invoke name="f">', f"</{D}invoke>",
    f'<{D}parameter name="a" string="true">', f'<{D}parameter name="b" string="false">', f'<{D}parameter name="c">',
    f"</{D}parameter>", f"<{D} calls>", f"</{D} calls>", f'<{D} invoke name="g">', f"</{D} invoke>", f"<{D} calls >",
    f'<{D} parameter name="a" string="true">', f"</{D} parameter>", f"</{D} parameter >", "<DSML｜tool_calls>",
    "</DSML｜tool_calls>", "<tool_calls>", "</tool_calls>", '<invoke name="h">', "</invoke>",
    '<parameter name="a" string="true">', "</parameter>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<function=f>", "</function>", "<parameter=a>", "<parameter=b>", "f", "name",
    "\n", "\n\n", " ", "  ", "<", "&", "&lt;", "&amp;", "&amp;lt;", "&lt;/", f"&lt;/{D}parameter>",
    "&lt;/parameter>", "&lt;/arg_value>", "text", '"', "\\", "{", "}", "[1, 2]", '{"k": "v"}', "42", "007", "true",
    "null", " " * 70, "é", "\U0001f600", "\x00", "\t", '" string="', ">", "/",
]  # fmt: skip


def soup(rng: random.Random) -> bytes:
    """Tags and fragments in no order, now and then broken bytes."""
    parts = [rng.choice(_SOUP).encode() for _ in range(rng.randrange(1, 30))]
    for _ in range(rng.choice((0, 0, 1, 3))):
        parts.insert(rng.randrange(len(parts) + 1), rng.choice((b"\xff", b"\xe2\x80", b"\xef\xbd", b"\xed\xa0\xbd")))
    return b"".join(parts)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """`data` with pieces cut out, doubled, moved or replaced."""
    for _ in range(rng.randrange(1, 4)):
        a = rng.randrange(len(data) + 1)
        b = min(len(data), a + rng.choice((1, 2, 5, 20)))
        kind = rng.randrange(5)
        if kind == 0:
            data = data[:a] + data[b:]
        elif kind == 1:
            data = data[:b] + data[a:b] + data[b:]
        elif kind == 2:
            data = data[:a] + rng.choice(_SOUP).encode() + data[a:]
        elif kind == 3:
            data = data[:a] + bytes([rng.randrange(256)]) + data[b:]
        else:
            data = data[:a]
    return data


def random_text(rng: random.Random, longest: int = 12) -> str:
    return "".join(
        rng.choice((rng.choice(_SOUP), rng.choice("abc <>&\n\t\"\\")))
        for _ in range(rng.randrange(longest + 1))
    )  # fmt: skip


def random_json(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(4 if depth > 2 else 6)
    if kind == 0:
        return rng.choice((True, False, None))
    if kind == 1:
        return rng.choice((0, -1, 42, 1.5, -2e-7, 10**18))
    if kind < 4:
        return random_text(rng, 4)
    if kind == 4:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {random_text(rng, 2): random_json(rng, depth + 1) for _ in range(rng.randrange(4))}


def random_calls(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """(name, arguments) with strings that quote the markup."""
    calls = []
    for _ in range(rng.randrange(1, 4)):
        names = rng.sample("abcdefgh", rng.randrange(4))
        values = [random_text(rng) if rng.random() < 0.6 else random_json(rng) for _ in names]
        calls.append((rng.choice(("f", "get_weather", "mcp.read-file")), dict(zip(names, values, strict=True))))
    return calls


_TYPES: dict[type, str] = {
    str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def escaped(text: str, end: str) -> str:
    """Reversible escape of the delimiter `end`: "<" of it, and "&" of what looks like an escaped one."""
    out = []
    for i, c in enumerate(text):
        k = i + 1
        while text.startswith("amp;", k):
            k += 4
        if text.startswith(end, i):
            out.append("&lt;")
        elif c == "&" and text.startswith("lt;" + end[1:], k):
            out.append("&amp;")
        else:
            out.append(c)
    return "".join(out)


def _value(value: Any, close: str) -> str:
    if isinstance(value, str):
        return escaped(value, close)
    return json.dumps(value, ensure_ascii=False).replace(close, "\\u003c" + close[1:])


def written(calls: list[tuple[str, dict[str, Any]]], syntax: str) -> tuple[str, list[tuple[str, str]]]:
    """The canonical block of `calls`, and the schemas that make its argument types known.

    GLM and Qwen declare a type per property of a tool, so a tool's calls must agree on it: a property that they use
    with several types is declared with all of them.
    """
    declared: dict[str, dict[str, set[str]]] = {}
    for name, arguments in calls:
        for key, value in arguments.items():
            declared.setdefault(name, {}).setdefault(key, set()).add(_TYPES[type(value)])
    schemas = [
        (name, json.dumps({"parameters": {"properties": {k: {"type": sorted(t)} for k, t in keys.items()}}}))
        for name, keys in declared.items()
    ]
    if syntax in ("deepseek4", "deepseek41"):
        x, b = (f"{D} ", "calls") if syntax == "deepseek41" else (D, "tool_calls")
        close = f"</{x}parameter>"
        body = ""
        for name, arguments in calls:
            body += f'<{x}invoke name="{name}">\n'
            for key, value in arguments.items():
                string = "true" if isinstance(value, str) else "false"
                body += f'<{x}parameter name="{key}" string="{string}">{_value(value, close)}{close}\n'
            body += f"</{x}invoke>\n"
        return f"\n\n<{x}{b}>\n{body}</{x}{b}>", []
    blocks = []
    for name, arguments in calls:
        body = ""
        for key, value in arguments.items():
            text = _value(value, "</arg_value>" if syntax == "glm" else "</parameter>")
            if syntax == "glm":
                body += f"<arg_key>{key}</arg_key><arg_value>{text}</arg_value>"
            else:
                body += f"<parameter={key}>\n{text}\n</parameter>\n"
        if syntax == "glm":
            blocks.append(f"<tool_call>{name}{body}</tool_call>")
        else:
            blocks.append(f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>")
    return ("" if syntax == "glm" else "\n\n") + ("" if syntax == "glm" else "\n").join(blocks), schemas


def options_for(rng: random.Random) -> dict[str, Any]:
    """Any sensible set of parser options."""
    syntax = rng.choice((*SYNTAXES, "raw"))
    if syntax == "raw":
        return {"syntax": "raw"}
    schemas = [("f", '{"properties":{"a":{"type":"string"},"b":{"type":["integer","array"]},"c":{}}}')]
    return {
        "syntax": syntax,
        "thinking": rng.random() < 0.6,
        "tools": rng.random() < 0.9,
        "schemas": rng.choice((schemas, [])),
    } | ({"tools": True, "implicit_invoke": True} if syntax.startswith("deepseek") and rng.random() < 0.2 else {})
