"""One streamed tool loop per dialect with the vendors' Python SDKs; prints thinking and answers.

Run by sdk_python.sh. Exit status 3: the server said in the SDK's typed error that the context is too small.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
from tools import list_dir, write_file

URL, MODEL, KEY = os.environ["BASE_URL"], os.environ["MODEL"], os.environ["API_KEY"]
TOOLS: dict[str, Callable[..., str]] = {"list_dir": list_dir, "write_file": write_file}
TEXT = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "list_dir": {"type": "object", "properties": {"path": TEXT}, "required": ["path"]},
    "write_file": {"type": "object", "properties": {"path": TEXT, "content": TEXT}, "required": ["path", "content"]},
}
MAX_TURNS = 5


def chat(prompt: str) -> str:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(MAX_TURNS):
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
            message = stream.get_final_completion().choices[0].message
        print("chat thinking:", message.reasoning_content)
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise RuntimeError("the loop does not end")


def responses(prompt: str) -> str:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    tools = [{"type": "function", "name": n, "parameters": s, "strict": False} for n, s in SCHEMAS.items()]
    items: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(MAX_TURNS):
        with client.responses.stream(
            model=MODEL, input=items, tools=tools, reasoning={"summary": "auto"}, store=False
        ) as stream:
            thinking = "".join(e.delta for e in stream if e.type == "response.reasoning_summary_text.delta")
            response = stream.get_final_response()
        print("responses thinking:", thinking)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += [item.model_dump(exclude_none=True) for item in response.output]
        for call in calls:
            result = TOOLS[call.name](**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    raise RuntimeError("the loop does not end")


def messages(prompt: str) -> str:
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    tools = [{"name": n, "input_schema": s} for n, s in SCHEMAS.items()]
    turns: list[Any] = [{"role": "user", "content": prompt}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    for _ in range(MAX_TURNS):
        with client.messages.stream(
            model=MODEL, max_tokens=2048, messages=turns, tools=tools, thinking=thinking
        ) as stream:
            message = stream.get_final_message()
        print("messages thinking:", *(b.thinking for b in message.content if b.type == "thinking"))
        turns.append({"role": "assistant", "content": message.content})
        uses = [b for b in message.content if b.type == "tool_use"]
        if not uses:
            return "".join(b.text for b in message.content if b.type == "text")
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": TOOLS[b.name](**b.input)} for b in uses]
        turns.append({"role": "user", "content": results})
    raise RuntimeError("the loop does not end")


def main() -> int:
    too_long = 0
    for loop in (chat, responses, messages):
        try:
            print(f"{loop.__name__} answer:", loop(sys.argv[1]))
        except openai.BadRequestError as error:
            print(f"{loop.__name__} refused:", error.code)
            too_long += error.code == "context_length_exceeded"
            continue
        except anthropic.BadRequestError as error:
            print(f"{loop.__name__} refused:", error.message)
            too_long += "prompt is too long" in error.message
            continue
        made = Path("hello.txt")
        if made.read_text() != "hi":
            raise RuntimeError(f"{loop.__name__} made a wrong file")
        if loop is not messages:
            made.unlink()
    return 3 if too_long == 3 else 0 if too_long == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
