"""Random conversations for the renderers, from a seed: every role in any order, calls, results, awkward text."""

from __future__ import annotations

import json
import random

from ds4.prompt.types import Conversation, Message, Tool, ToolCall

CONTROL_TEXTS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=",
    "<｜DSML｜ calls>",
    "[gMASK]<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|im_start|>system\n",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "<arg_value>",
    "<tool_result>",
    "<tool_response>",
)
"""What must stay text in data. None of these ends a wrapper that a renderer puts around data."""

CLOSING_TEXTS = (
    "</tool_result>",
    "&lt;/tool_result>",
    "&amp;lt;/tool_result>",
    "</｜DSML｜parameter>",
    "</｜DSML｜ parameter>",
    "&lt;/｜DSML｜parameter>",
    "</arg_key>",
    "</arg_value>",
    "&lt;/arg_value>",
    "</tool_response>",
    "</parameter>",
    "&amp;lt;/parameter>",
)

_WORDS = (
    "a",
    "Hello",
    " ",
    "\n",
    "\n\n",
    " x ",
    "é",
    "😀",
    "\t",
    "a < b && c",
    "&lt;b&gt;",
    '"',
    "\\",
    "Rome",
    "</b>",
    "0",
)
_ENDINGS = ("", "", "\n", " ")


class Conversations:
    """A source of conversations. `closing`: texts that would end a wrapper occur too; `garbage`: broken arguments."""

    def __init__(self, seed: int, *, closing: bool = True, garbage: bool = True) -> None:
        self._rng = random.Random(seed)
        self._words = (*_WORDS, *_WORDS, *CONTROL_TEXTS, *(CLOSING_TEXTS if closing else ()))
        self._garbage = garbage

    def text(self, most: int = 6) -> str:
        return "".join(self._rng.choices(self._words, k=self._rng.randrange(most)))

    def value(self, depth: int = 0) -> object:
        rng = self._rng
        kinds = ["text", "text", "int", "float", "constant", "list", "dict"]
        match rng.choice(kinds[: 5 if depth > 2 else 7]):
            case "text":
                return self.text()
            case "int":
                return rng.choice([0, 1, -7, 2**31, -(2**63), 2**64 - 1])
            case "float":
                return rng.choice(
                    [0.5, -1.25, 1e100, 1e-7, 2.5e-5, -1e-5, 1e-6, 1.0, 3.141592653589793, 1e16, 123456789.5]
                )
            case "constant":
                return rng.choice([True, False, None])
            case "list":
                return [self.value(depth + 1) for _ in range(rng.randrange(3))]
            case _:
                return {self.name(): self.value(depth + 1) for _ in range(rng.randrange(3))}

    def name(self) -> str:
        return self._rng.choice(("city", "days", "q", "path", "z_1", "a-b", "é"))

    def arguments(self) -> str:
        rng = self._rng
        if self._garbage and rng.random() < 0.15:
            return rng.choice(("not json", "[]", '"x"', "5", '{"a": ', "null", "", "  ", self.text()))
        members = {self.name(): self.value() for _ in range(rng.randrange(4))}
        return json.dumps(members, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)))

    def calls(self) -> tuple[ToolCall, ...]:
        rng = self._rng
        ids = rng.sample("pqrst", rng.choice((1, 1, 2, 3)))
        return tuple(ToolCall(i, rng.choice(("get_weather", "bash", "f")), self.arguments()) for i in ids)

    def tools(self) -> tuple[Tool, ...]:
        rng = self._rng
        names = rng.sample(("get_weather", "bash", "f"), rng.randrange(1, 4))
        return tuple(Tool(name, self._schema(name)) for name in names)

    def _schema(self, name: str) -> str:
        properties = {self.name(): {"type": self._rng.choice(("string", "integer", "object"))} for _ in range(2)}
        parameters = {"type": "object", "properties": properties}
        return json.dumps({"name": name, "description": self.text(), "parameters": parameters}, ensure_ascii=False)

    def message(self) -> Message:
        rng = self._rng
        match rng.choice(
            ("system", "user", "user", "assistant", "assistant", "calls", "calls", "tool", "tool", "tool")
        ):
            case "system":
                return Message("system", self.text())
            case "user":
                return Message("user", self.text())
            case "assistant":
                return Message("assistant", self.text(), reasoning=self.text())
            case "calls":
                return Message("assistant", self.text(3), reasoning=self.text(3), calls=self.calls())
            case _:
                return Message("tool", self.text(), call_id=rng.choice("pqrstz"))

    def conversation(self) -> Conversation:
        rng = self._rng
        messages: list[Message] = [Message("system", self.text())] if rng.random() < 0.4 else []
        while len(messages) < 1 + rng.randrange(9):
            message = self.message()
            messages.append(message)
            if message.calls and rng.random() < 0.8:  # mostly with its results, in any order
                ids = [call.id for call in message.calls]
                rng.shuffle(ids)
                messages += [Message("tool", self.text(), call_id=call_id) for call_id in ids]
        return Conversation(
            tuple(messages),
            self.tools() if rng.random() < 0.5 else (),
            rng.choice(("none", "low", "medium", "high", "max")),
            continue_final=messages[-1].role == "assistant" and not messages[-1].calls and rng.random() < 0.5,
        )
