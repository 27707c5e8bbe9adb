"""The vendors' Python SDKs on Chat Completions, Responses and Messages. Run by sdk_python.sh; see sdk.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
from sdk import KEY, MAX_TURNS, MODEL, OUTPUT, URL, Dialect, begin, main
from tools import list_dir, write_file

TOOLS: dict[str, Callable[..., str]] = {"list_dir": list_dir, "write_file": write_file}
TEXT = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "list_dir": {"type": "object", "properties": {"path": TEXT}, "required": ["path"]},
    "write_file": {"type": "object", "properties": {"path": TEXT, "content": TEXT}, "required": ["path", "content"]},
}


class OpenAI(Dialect):
    def __init__(self) -> None:
        self.client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)

    def too_long(self, error: Exception) -> bool:
        return isinstance(error, openai.BadRequestError) and error.code == "context_length_exceeded"


class Chat(OpenAI):
    name = "chat"

    def stream(self, messages: list[Any], tools: bool = True) -> Any:
        declared = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
        more: dict[str, Any] = {"tools": declared} if tools else {}
        return self.client.chat.completions.stream(model=MODEL, messages=messages, **more)

    def answer(self, prompt: str, *, tools: bool) -> str:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for _ in range(MAX_TURNS):
            with self.stream(messages, tools) as stream:
                message = stream.get_final_completion().choices[0].message
            print("chat thinking:", getattr(message, "reasoning_content", ""))
            if not message.tool_calls:
                return str(message.content)
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                result = TOOLS[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        raise RuntimeError("the loop does not end")

    def cancel(self, prompt: str) -> None:
        with self.stream([{"role": "user", "content": prompt}]) as stream:
            begin(stream)


class Responses(OpenAI):
    name = "responses"

    def stream(self, items: list[Any], tools: bool = True) -> Any:
        declared = [{"type": "function", "name": n, "parameters": s, "strict": False} for n, s in SCHEMAS.items()]
        more: dict[str, Any] = {"tools": declared} if tools else {}
        return self.client.responses.stream(
            model=MODEL, input=items, reasoning={"summary": "auto"}, store=False, **more
        )

    def answer(self, prompt: str, *, tools: bool) -> str:
        items: list[Any] = [{"role": "user", "content": prompt}]
        for _ in range(MAX_TURNS):
            with self.stream(items, tools) as stream:
                thinking = "".join(e.delta for e in stream if e.type == "response.reasoning_summary_text.delta")
                response = stream.get_final_response()
            print("responses thinking:", thinking)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return str(response.output_text)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            for call in calls:
                result = TOOLS[call.name](**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        raise RuntimeError("the loop does not end")

    def cancel(self, prompt: str) -> None:
        with self.stream([{"role": "user", "content": prompt}]) as stream:
            begin(stream)


class Messages(Dialect):
    name = "messages"

    def __init__(self) -> None:
        self.client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)

    def too_long(self, error: Exception) -> bool:
        return isinstance(error, anthropic.BadRequestError) and "prompt is too long" in error.message

    def stream(self, turns: list[Any], tools: bool = True) -> Any:
        declared = [{"name": n, "input_schema": s} for n, s in SCHEMAS.items()]
        more: dict[str, Any] = {"tools": declared} if tools else {}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        return self.client.messages.stream(model=MODEL, max_tokens=OUTPUT, messages=turns, thinking=thinking, **more)

    def answer(self, prompt: str, *, tools: bool) -> str:
        turns: list[Any] = [{"role": "user", "content": prompt}]
        for _ in range(MAX_TURNS):
            with self.stream(turns, tools) as stream:
                message = stream.get_final_message()
            print("messages thinking:", *(b.thinking for b in message.content if b.type == "thinking"))
            turns.append({"role": "assistant", "content": message.content})
            uses = [b for b in message.content if b.type == "tool_use"]
            if not uses:
                return "".join(b.text for b in message.content if b.type == "text")
            results = [{"type": "tool_result", "tool_use_id": b.id, "content": TOOLS[b.name](**b.input)} for b in uses]
            turns.append({"role": "user", "content": results})
        raise RuntimeError("the loop does not end")

    def cancel(self, prompt: str) -> None:
        with self.stream([{"role": "user", "content": prompt}]) as stream:
            begin(stream)


if __name__ == "__main__":
    main(Chat(), Responses(), Messages())
