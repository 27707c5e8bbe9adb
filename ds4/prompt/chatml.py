"""The ChatML renderer: `<|im_start|>ROLE`, newline, content, `<|im_end|>`; no reasoning, tools in Qwen's syntax.

Follows the chat template of SmolLM2-Instruct. Literal text is never trimmed. Two things that the template does not
know are added: tools (their declaration stands before the client's system text, calls and results as in
`qwen_tools`), and an assistant turn to go on with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ds4.prompt.qwen_tools import calls_text, results_text, tools_text
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
        if conversation.tools:
            declaration = tools_text(conversation.tools)
            system = f"{declaration}\n\n{system}" if system else declaration
        head = [("system", system)] if first or system else []
        turns = [*head, *_turns(rest, conversation.tools)]
        return _prompt(turns, continue_last=conversation.continue_final)

    def render_tail(self, messages: Sequence[Message], conversation: Conversation) -> RenderedPrompt:
        # The end mark was never sampled into the state: generation stops at it.
        tail = _prompt(_turns((m for m in messages if m.role != "system"), conversation.tools), continue_last=False)
        return RenderedPrompt(_merged([_END, "\n", *tail.segments]))


def _turns(messages: Iterable[Message], tools: Sequence[Tool]) -> Iterator[tuple[str, str]]:
    """(role, text) of each turn; a run of tool results is one user turn."""
    for is_result, run in groupby(messages, key=lambda m: m.role == "tool"):
        if is_result:
            yield "user", results_text(m.content for m in run)
            continue
        for message in run:
            calls = calls_text(message.calls, tools, after_text=bool(message.content))
            yield message.role, message.content + calls


def _prompt(turns: Iterable[tuple[str, str]], *, continue_last: bool) -> RenderedPrompt:
    segments: list[Segment] = []
    for role, text in turns:
        segments += (_START, f"{role}\n{text}", _END, "\n")
    if continue_last:
        del segments[-2:]
    else:
        segments += (_START, "assistant\n")
    return RenderedPrompt(_merged(segments))


def _merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Neighbouring texts become one: the tokenizer must see no border where the template has none."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and isinstance(segment, str) and isinstance(merged[-1], str):
            merged[-1] += segment
        else:
            merged.append(segment)
    return tuple(merged)
