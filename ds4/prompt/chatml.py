"""The ChatML renderer: `<|im_start|>ROLE`, newline, content, `<|im_end|>`; no reasoning, tools in Qwen's syntax.

Follows the chat template of SmolLM2-Instruct. Literal text is never trimmed. Two things that the template does not
know are added: tools (their declaration stands before the client's system text, calls and results as in
`qwen_tools`), and an assistant turn to go on with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from ds4.bounded import once_per_object
from ds4.prompt.draft import TURNS_COST, Draft, size_of
from ds4.prompt.history import split_prefix
from ds4.prompt.qwen_tools import calls_block, declaration, results_block
from ds4.prompt.types import Conversation, Message, RenderedPrompt, Segment, Special, Tool

SMOLLM_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

_START = Special("<|im_start|>")
_END = Special("<|im_end|>")


class ChatMLRenderer:
    """Implements `ds4.prompt.types.Renderer`.

    `default_system` is the system text of a conversation that brings none; empty: no system turn then.
    """

    syntax = "chatml"

    def __init__(self, default_system: str = "") -> None:
        self._default_system = default_system

    def render(self, conversation: Conversation) -> RenderedPrompt:
        messages = conversation.messages
        first, rest = (messages[0], messages[1:]) if messages and messages[0].role == "system" else (None, messages)
        system = first.content if first else self._default_system
        draft = Draft()
        if first or system or conversation.tools:
            draft.add(_START, "system\n")
            if conversation.tools:
                draft.add(*declaration(conversation.tools), "\n\n" if system else "")
            draft.add(system, _END, "\n")
        return _turns(draft, rest, conversation)

    def render_tail(self, messages: Sequence[Message], conversation: Conversation) -> RenderedPrompt:
        # The end mark was never sampled into the state: generation stops at it.
        return _turns(Draft(_END, "\n"), [m for m in messages if m.role != "system"], conversation)


def _turns(draft: Draft, messages: Sequence[Message], conversation: Conversation) -> RenderedPrompt:
    turns, prefix = split_prefix(messages, conversation)
    _draw(draft, turns, conversation.tools)
    draft.add(_START, "assistant\n", *(_body(prefix, conversation.tools) if prefix else ()))
    return draft.rendered()


def _draw(draft: Draft, messages: Iterable[Message], tools: tuple[Tool, ...]) -> None:
    """Each turn; a run of tool results is one user turn."""
    for is_result, run in groupby(messages, key=lambda m: m.role == "tool"):
        if is_result:
            draft.add(_START, "user\n", *results_block(run), _END, "\n")
            continue
        for message in run:
            draft.add(*_turn(message, tools))


@once_per_object(TURNS_COST, size_of)
def _turn(message: Message, tools: tuple[Tool, ...]) -> tuple[Segment, ...]:
    return _START, f"{message.role}\n", *_body(message, tools), _END, "\n"


def _body(message: Message, tools: tuple[Tool, ...]) -> list[Segment]:
    return [message.content, *calls_block(message.calls, tools, after_text=bool(message.content))]
