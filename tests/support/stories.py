"""Random conversations as clients send them: one meaning, and its body in Chat, Responses and Messages.

`plain` bodies say everything in the one way that every server of the field reads. Other bodies say the same in the many
ways that clients have: content in parts, arguments spaced, members in any order, thinking switched by any of its names.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from ds4._json import Node, parse
from ds4.prompt.types import Conversation
from ds4.server.api import chat, messages, responses
from ds4.server.api.live import LiveTurns
from ds4.server.api.prepare import Preparer
from tests.support.conversations import Conversations

Dialect = Literal["chat", "responses", "messages"]
DIALECTS: tuple[Dialect, ...] = ("chat", "responses", "messages")

_SWITCHES: dict[Dialect, dict[str, list[dict[str, Any]]]] = {
    "chat": {
        "none": [{"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}, {"think": False},
                 {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}],
        "low": [{"reasoning_effort": "low"}, {"reasoning_effort": "minimal"}, {"reasoning": {"effort": "low"}}],
        "high": [{"reasoning_effort": "high"}, {}, {"thinking": {"type": "enabled"}}, {"reasoning_effort": "xhigh"}],
    },
    "responses": {
        "none": [{"reasoning": {"effort": "none"}}, {"thinking": False}],
        "low": [{"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "minimal", "summary": "auto"}}],
        "high": [{"reasoning": {"effort": "high"}}, {}, {"reasoning": {"summary": "auto"}}],
    },
    "messages": {
        "none": [{"thinking": {"type": "disabled"}}, {"output_config": {"effort": "none"}}],
        "low": [{"output_config": {"effort": "low"}},
                {"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}],
        "high": [{"output_config": {"effort": "high"}}, {}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}],
    },
}  # fmt: skip
"""Ways to say an effort; the first one is the plain one. Others than these are said by the first one's member."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of one of three kinds: `role` system, user, or assistant with the results of its calls in their order."""

    role: str
    text: str
    reasoning: str | None = None
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    results: tuple[tuple[str, str], ...] = ()
    after: str | None = None
    """What the user says beside the results."""


@dataclass(frozen=True)
class Story:
    """One conversation. `effort` is a name or a level, `choice` auto, none, required, or the name of a tool."""

    system: str | None
    turns: tuple[_Turn, ...]
    tools: tuple[dict[str, Any], ...]
    effort: str | int
    choice: str
    rng: random.Random = field(compare=False, repr=False)

    @property
    def has_late_system(self) -> bool:
        """There are system turns behind the first turn."""
        return any(turn.role == "system" for turn in self.turns)

    # ---- bodies

    def body(self, dialect: Dialect, *, plain: bool = False, joined: bool = False) -> dict[str, Any]:
        """The request. `joined`: Messages says results and the text behind them in one message of the user."""
        write = _Writer(None if plain else self.rng, joined)
        body: dict[str, Any] = {"model": "m"}
        if dialect == "chat":
            first = [] if self.system is None else [{"role": "system", "content": write.content(self.system, "text")}]
            body["messages"] = [*first, *(m for turn in self.turns for m in write.chat(turn))]
            tools = [{"type": "function", "function": tool} for tool in self.tools]
            named: Any = {"type": "function", "function": {"name": self.choice}}
        elif dialect == "responses":
            if self.system is not None:
                body["instructions"] = self.system
            body["input"] = [item for turn in self.turns for item in write.items(turn)]
            tools = [{"type": "function", **tool} for tool in self.tools]
            named = {"type": "function", "name": self.choice}
        else:
            body["max_tokens"] = 100
            if self.system is not None:
                body["system"] = self.system if plain else write.parts(self.system, "text", 1)
            body["messages"] = [m for turn in self.turns for m in write.blocks(turn)]
            tools = [
                {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
                for t in self.tools
            ]
            named = {"type": "tool", "name": self.choice}
        if tools:
            body["tools"] = tools
            if plain or self.choice in ("auto", "none", "required"):
                # Some servers write the beginning of a call into the prompt, or leave out all tools but the named one:
                # what must be called is no part of a plain body.
                said = "auto" if plain and self.choice != "none" else self.choice
                said = "any" if said == "required" and dialect == "messages" else said
                body["tool_choice"] = {"type": said} if dialect == "messages" else said
            else:
                body["tool_choice"] = named
        body |= self._switch(dialect, plain=plain)
        return body if plain else write.shuffled(body)

    def _switch(self, dialect: Dialect, *, plain: bool) -> dict[str, Any]:
        ways = _SWITCHES[dialect].get(str(self.effort))
        if ways is not None:
            return ways[0] if plain else self.rng.choice(ways)
        member = {"chat": "reasoning_effort", "responses": "reasoning", "messages": "output_config"}[dialect]
        return {member: self.effort if dialect == "chat" else {"effort": self.effort}}

    # ---- what the server reads

    def read(self, dialect: Dialect, preparer: Preparer, *, joined: bool = False) -> Conversation:
        """The conversation that the endpoint's own reader makes of a body."""
        return read(dialect, parse(self.text(dialect, joined=joined)), preparer)

    def text(self, dialect: Dialect, *, joined: bool = False) -> bytes:
        """A body as it travels."""
        body = self.body(dialect, joined=joined)
        # DeepSeek's renderers keep the escapes of JSON values, which in Messages are those of the body.
        ascii_only = dialect != "messages" and self.rng.random() < 0.5
        return json.dumps(body, ensure_ascii=ascii_only, indent=self.rng.choice((None, None, 2))).encode()


def read(dialect: Dialect, node: Node, preparer: Preparer) -> Conversation:
    if dialect == "chat":
        return chat.read_conversation(node, preparer)[0]
    if dialect == "responses":
        return responses.read_prompt(node, preparer, [], LiveTurns()).conversation
    return messages.read_prompt(node, preparer, [], LiveTurns()).conversation


class _Writer:
    """Writes turns; `rng` None: plainly."""

    def __init__(self, rng: random.Random | None, joined: bool) -> None:
        self._rng = rng
        self._joined = joined

    def _maybe(self) -> bool:
        return self._rng is not None and self._rng.random() < 0.5

    def content(self, text: str, kind: str) -> Any:
        """A text as a string or in parts."""
        return self.parts(text, kind, 2) if self._maybe() else text

    def parts(self, text: str, kind: str, most: int) -> list[dict[str, Any]]:
        assert self._rng is not None
        at = self._rng.randint(0, len(text)) if most > 1 else len(text)
        pieces = [text[:at], text[at:]] if at < len(text) else [text]
        return [{"type": kind, "text": piece} for piece in pieces]

    def shuffled(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self._rng is not None
        names = list(body)
        self._rng.shuffle(names)
        return {name: body[name] for name in names}

    def _arguments(self, arguments: dict[str, Any]) -> str:
        return json.dumps(arguments, ensure_ascii=False, indent=1 if self._maybe() else None)

    def chat(self, turn: _Turn) -> list[dict[str, Any]]:
        if turn.role != "assistant":
            role = "developer" if turn.role == "system" and self._maybe() else turn.role
            return [{"role": role, "content": self.content(turn.text, "text")}]
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.reasoning is not None:
            message["reasoning" if self._maybe() else "reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": name, "arguments": self._arguments(arguments)}}
                for i, name, arguments in turn.calls
            ]
        found = [
            {"role": "tool", "tool_call_id": i, "content": self.content(result, "text")} for i, result in turn.results
        ]
        after = [] if turn.after is None else [{"role": "user", "content": self.content(turn.after, "text")}]
        return [message, *found, *after]

    def items(self, turn: _Turn) -> list[dict[str, Any]]:
        if turn.role != "assistant":
            role = "developer" if turn.role == "system" and self._maybe() else turn.role
            return [{"type": "message", "role": role, "content": self.content(turn.text, "input_text")}]
        found: list[dict[str, Any]] = []
        if turn.reasoning is not None:
            if self._maybe():
                found.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": turn.reasoning}]})
            else:
                part = {"type": "reasoning_text", "text": turn.reasoning}
                found.append({"type": "reasoning", "summary": [], "content": [part]})
        if turn.text or not turn.calls:
            content = self.content(turn.text, "output_text")
            found.append({"type": "message", "role": "assistant", "content": content})
        for i, name, arguments in turn.calls:
            found.append({"type": "function_call", "call_id": i, "name": name, "arguments": self._arguments(arguments)})
        for i, result in turn.results:
            output = self.content(result, "input_text")
            found.append({"type": "function_call_output", "call_id": i, "output": output})
        if turn.after is not None:
            found.append({"type": "message", "role": "user", "content": self.content(turn.after, "input_text")})
        return found

    def blocks(self, turn: _Turn) -> list[dict[str, Any]]:
        if turn.role != "assistant":
            return [{"role": turn.role, "content": self.content(turn.text, "text")}]
        content: list[dict[str, Any]] = []
        if turn.reasoning is not None:
            content.append({"type": "thinking", "thinking": turn.reasoning, "signature": "s"})
        if turn.text or not turn.calls:
            content.append({"type": "text", "text": turn.text})
        for i, name, arguments in turn.calls:
            content.append({"type": "tool_use", "id": i, "name": name, "input": arguments})
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": i, "content": self.content(result, "text")}
            for i, result in turn.results
        ]
        found = [{"role": "assistant", "content": content}]
        after = None if turn.after is None else {"type": "text", "text": turn.after}
        if after is not None and self._joined and results:
            results.append(after)
            after = None
        if results:
            found.append({"role": "user", "content": results})
        if after is not None:
            found.append({"role": "user", "content": [after]})
        return found


class Stories:
    """A source of stories. `efforts` are drawn from; `closing`: texts that would end a wrapper occur too;
    `rising`: the ids of parallel calls rise in the order of the calls."""

    def __init__(
        self, seed: int, efforts: tuple[str | int, ...], *, closing: bool = True, rising: bool = False
    ) -> None:
        self._rising = rising
        self._rng = random.Random(seed)
        self._efforts = efforts
        self._make = Conversations(seed + 1, closing=closing, garbage=False)

    def story(self) -> Story:
        rng, make = self._rng, self._make
        effort = rng.choice(self._efforts)
        tools = tuple(self._tool(name) for name in rng.sample(("get_weather", "bash", "f"), rng.randint(1, 3)))
        choices = ["auto", "auto", "none"] if effort != "none" else ["auto", "none", "required", tools[0]["name"]]
        turns: list[_Turn] = []
        for number in range(rng.randint(1, 4)):
            turns.append(_Turn("user", make.text() or "u"))
            if rng.random() < 0.15:
                turns.append(_Turn("system", make.text() or "s"))
            turns.append(self._answer(number))
        if not turns[-1].results or rng.random() < 0.3:
            turns.append(_Turn("user", make.text() or "u"))
        return Story(
            (make.text() or "S") if rng.random() < 0.6 else None,
            tuple(turns),
            tools if rng.random() < 0.7 else (),
            effort,
            rng.choice(choices),
            rng,
        )

    def _answer(self, number: int) -> _Turn:
        rng, make = self._rng, self._make
        ids = [f"{letter}{number}" for letter in rng.sample("pqrst", rng.choice((0, 0, 1, 2, 3)))]
        ids = sorted(ids) if self._rising else ids
        calls = tuple(
            (i, rng.choice(("get_weather", "bash", "f")), {make.name(): make.value() for _ in range(rng.randrange(4))})
            for i in ids
        )
        rng.shuffle(ids)
        return _Turn(
            "assistant",
            make.text(),
            make.text() or "r" if rng.random() < 0.7 else None,
            calls,
            tuple((i, make.text()) for i in ids),
            (make.text() or "a") if calls and rng.random() < 0.3 else None,
        )

    def _tool(self, name: str) -> dict[str, Any]:
        properties = {self._make.name(): {"type": self._rng.choice(("string", "integer", "object"))} for _ in range(2)}
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if self._rng.random() < 0.5:
            parameters["required"] = list(properties)[:1]
        return {"name": name, "description": self._make.text(), "parameters": parameters}
