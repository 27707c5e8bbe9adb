"""The Qwen 3.8 renderer: ChatML turns with a reasoning block, tools in Qwen's syntax.

    system    = <|im_start|>system, effort sentence, tools and system text joined by blank lines; nothing without them
    user      = <|im_start|>user, trimmed content
    results   = one <|im_start|>user per run, <tool_response>...</tool_response> each
    assistant = <|im_start|>assistant, <think> reasoning </think>, content, calls
    header    = <|im_start|>assistant, <think> (open, or closed at once when thinking is off)

Every turn ends with <|im_end|> and a newline. System texts are hoisted. Reasoning of former turns is always kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ds4.bounded import once_per_object
from ds4.prompt.draft import TURNS_COST, WHITE_SPACE, Draft, size_of
from ds4.prompt.effort import effort_name
from ds4.prompt.history import replayed, results_first, split_prefix
from ds4.prompt.qwen_tools import calls_block, declaration, results_block
from ds4.prompt.types import Conversation, Message, RenderedPrompt, Segment, Special, Tool

_START = Special("<|im_start|>")
_END = Special("<|im_end|>")
_THINK = Special("<think>", optional=True)
_END_THINK = Special("</think>", optional=True)

EXTRA_HIGH = (
    "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, consider "
    "plausible alternatives, and prioritize correctness, consistency, and clarity in the final answer."
)
LOW = (
    "Reasoning effort is set to low. Keep your thinking brief and focused, moving directly to the conclusion without "
    "unnecessary elaboration."
)
_EFFORT_SENTENCES = {"low": LOW, "high": EXTRA_HIGH, "max": EXTRA_HIGH}


class QwenRenderer:
    """Implements `ds4.prompt.types.Renderer`."""

    syntax = "qwen"

    def render(self, conversation: Conversation) -> RenderedPrompt:
        draft = Draft()
        texts = [m.content.strip(WHITE_SPACE) for m in conversation.messages if m.role == "system"]
        parts: list[Sequence[Segment]] = [[_EFFORT_SENTENCES.get(effort_name(conversation.effort), "")]]
        parts.append(declaration(conversation.tools) if conversation.tools else ())
        parts.append(["\n\n".join(text for text in texts if text)])
        block: list[Segment] = []
        for part in parts:
            if any(part):
                block += ["\n\n", *part] if block else part
        if block:
            draft.add(_START, "system\n", *block, _END, "\n")
        return _turns(draft, conversation, conversation.messages)

    def render_tail(self, messages: Sequence[Message], conversation: Conversation) -> RenderedPrompt:
        # The end mark was never sampled into the state: generation stops at it.
        return _turns(Draft(_END, "\n"), conversation, messages)


def _turns(draft: Draft, conversation: Conversation, messages: Sequence[Message]) -> RenderedPrompt:
    turns = results_first([message for message in messages if message.role != "system"])
    turns, prefix = split_prefix(turns, conversation)
    for is_result, run in groupby(turns, key=lambda m: m.role == "tool"):
        if is_result:
            draft.add(_START, "user\n", *results_block(run), _END, "\n")
            continue
        for message in run:
            draft.add(*_turn(message, conversation.tools))
    thinking = effort_name(conversation.effort) != "none"
    draft.add(_START, "assistant\n")
    if prefix is None:
        draft.add(_THINK, "\n" if thinking else "\n\n")
        draft.add(*(() if thinking else (_END_THINK, "\n\n")))
        return draft.rendered(thinking=thinking)
    if thinking and not prefix.content.strip(WHITE_SPACE) and not prefix.calls:
        draft.add(_THINK, "\n", prefix.reasoning.lstrip(WHITE_SPACE))
        return draft.rendered(thinking=True)
    draft.add(*_answer(prefix, conversation.tools))
    return draft.rendered()


@once_per_object(TURNS_COST, size_of)
def _turn(message: Message, tools: tuple[Tool, ...]) -> tuple[Segment, ...]:
    if message.role == "user":
        return _START, "user\n", message.content.strip(WHITE_SPACE), _END, "\n"
    return _START, "assistant\n", *_answer(message, tools), _END, "\n"


def _answer(message: Message, tools: tuple[Tool, ...]) -> list[Segment]:
    """An assistant turn behind its header. White space at the end of text that no call follows is kept."""
    content = message.content.strip(WHITE_SPACE) if message.calls else message.content.lstrip(WHITE_SPACE)
    calls = calls_block(message.calls, tools, after_text=bool(content))
    reasoning = message.reasoning.strip(WHITE_SPACE)
    if content.startswith((_THINK.text, _END_THINK.text)):
        return [content, *calls]
    # A block that is replayed brings the white space before it.
    closing = "" if not content and reasoning and replayed(message.calls) is not None else "\n\n"
    return [_THINK, f"\n{reasoning}\n", _END_THINK, closing, content, *calls]
