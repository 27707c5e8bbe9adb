#!/usr/bin/env python3
"""The tool-heavy chat request that the JSON benchmarks read: the same bytes on every machine.

32 tool schemas, then 24 rounds of three tool calls and their three results, as a coding agent sends them on a late
turn. The arguments are JSON inside JSON strings, every other one with `\\u` escapes; about one word in nine needs an
escape or is not ASCII. Three sizes that differ in the length of the results: 0.16, 1 and 2 MB.

    python -m bench.corpus      prints size and SHA-1 of each; `DIGESTS` are the right ones
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

RESULT_CHARS = {"small": 1200, "medium": 12000, "large": 25500}
DIGESTS = {
    "small": "2c9187dcf110cfab924ada2b4a3f7e5ee535d448",
    "medium": "c1a6f73bc2666ed5570f8ba9598a01308eef17ae",
    "large": "9d74ed595faff3884ac793a8a995302377a82292",
}
ROUNDS = 24
TOOLS = 32
SEED = 20261130

PLAIN = (
    *("path", "file", "search", "replace", "error", "line", "result", "status", "build"),
    *("test", "cache", "token", "stream", "value", "index", "buffer", "commit", "branch"),
)
AWKWARD = (
    '"quoted"',
    "back\\slash",
    "tab\there",
    "line\nbreak",
    "café",
    "深度求索",
    "🚀",
    "👨\u200d💻",
    "\x1b[31merror\x1b[0m",
    "</tool>",
    "\u2028",
)


class Author:
    """Draws the parts of the request in a fixed order from one generator."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def prose(self, chars: int) -> str:
        words: list[str] = []
        left = chars
        while left > 0:
            word = self.rng.choice(AWKWARD if self.rng.random() < 0.11 else PLAIN)
            words.append(word)
            left -= len(word) + 1
        return " ".join(words)

    def parameter(self, position: int) -> tuple[str, dict[str, Any]]:
        kind = self.rng.choice(["string", "integer", "boolean", "array", "number"])
        schema: dict[str, Any] = {"type": kind, "description": self.prose(60)}
        if kind == "array":
            schema["items"] = {"type": "string"}
        elif kind == "string" and position % 2 == 1:
            schema["enum"] = [self.rng.choice(PLAIN) for _ in range(4)]
        return f"{self.rng.choice(PLAIN)}_{position}", schema

    def tool(self, number: int) -> dict[str, Any]:
        properties = dict(self.parameter(i) for i in range(6))
        function = {"name": f"tool_{number:02d}_{self.rng.choice(PLAIN)}", "description": self.prose(160)}
        parameters = {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:3],
            "additionalProperties": False,
        }
        return {"type": "function", "function": {**function, "parameters": parameters}}

    def call(self, turn: int, k: int, tool: dict[str, Any]) -> dict[str, Any]:
        arguments = {
            name: self.prose(120) if schema["type"] == "string" else self.rng.randrange(1 << 20)
            for name, schema in tool["function"]["parameters"]["properties"].items()
        }
        return {
            "id": f"call_{turn:02d}_{k}_{self.rng.getrandbits(64):016x}",
            "type": "function",
            "function": {
                "name": tool["function"]["name"],
                "arguments": json.dumps(arguments, ensure_ascii=k % 2 == 1),
            },
        }

    def request(self, result_chars: int) -> dict[str, Any]:
        tools = [self.tool(i) for i in range(TOOLS)]
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self.prose(2000)},
            {"role": "user", "content": self.prose(600)},
        ]
        for turn in range(ROUNDS):
            calls = [self.call(turn, k, tools[(3 * turn + k) % TOOLS]) for k in range(3)]
            content = self.prose(80) if turn % 2 == 1 else None
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": self.prose(result_chars)} for call in calls
            ]
            if turn % 6 == 5:
                messages.append({"role": "user", "content": self.prose(200)})
        return {
            "model": "deepseek-v4-flash",
            "stream": True,
            "temperature": 0.6,
            "max_tokens": 1024,
            "tool_choice": "auto",
            "stream_options": {"include_usage": True},
            "tools": tools,
            "messages": messages,
        }


def body(size: str) -> bytes:
    """The request of one size as clients send it: compact, UTF-8."""
    request = Author(SEED).request(RESULT_CHARS[size])
    data = json.dumps(request, ensure_ascii=False, separators=(",", ":")).encode()
    if hashlib.sha1(data).hexdigest() != DIGESTS[size]:
        raise AssertionError(f"corpus {size!r} has digest {hashlib.sha1(data).hexdigest()}, not {DIGESTS[size]}")
    return data


if __name__ == "__main__":
    for name in RESULT_CHARS:
        data = body(name)
        print(f"{name:6} {len(data):8} {hashlib.sha1(data).hexdigest()}")
