"""LangChain's models on Chat Completions, Responses and Messages. Run by sdk_langchain.sh; see sdk.py."""

from __future__ import annotations

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from sdk import KEY, MAX_TURNS, MODEL, OUTPUT, URL, Dialect, begin, main
from tools import list_dir, write_file

TOOLS = {function.__name__: tool(function) for function in (list_dir, write_file)}


class LangChain(Dialect):
    def __init__(self, name: str, model: BaseChatModel) -> None:
        self.name = name
        self.plain = model
        self.with_tools = model.bind_tools(list(TOOLS.values()))

    def answer(self, prompt: str, *, tools: bool) -> str:
        model = self.with_tools if tools else self.plain
        history: list[AnyMessage] = [HumanMessage(prompt)]
        for _ in range(MAX_TURNS):
            first, *rest = model.stream(history)
            message: AIMessageChunk = sum(rest, first)
            print(f"{self.name} thinking:", thoughts(message))
            if not message.tool_calls:
                return str(message.text)
            history += [message, *(TOOLS[call["name"]].invoke(call) for call in message.tool_calls)]
        raise RuntimeError("the loop does not end")

    def cancel(self, prompt: str) -> None:
        chunks: Any = self.with_tools.stream(prompt)
        begin(chunks)
        chunks.close()

    def too_long(self, error: Exception) -> bool:
        return isinstance(error, ContextOverflowError)


def thoughts(message: AIMessage) -> str:
    return "".join(block.get("reasoning", "") for block in message.content_blocks if block["type"] == "reasoning")


OPENAI: dict[str, Any] = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
THINKING = {"type": "enabled", "budget_tokens": 1024}

if __name__ == "__main__":
    main(
        LangChain("chat", ChatOpenAI(**OPENAI)),
        LangChain("responses", ChatOpenAI(**OPENAI, use_responses_api=True, reasoning={"summary": "auto"})),
        LangChain(
            "messages",
            ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, max_tokens=OUTPUT, thinking=THINKING),
        ),
    )
