"""The DeepSeek V4 renderer.

    prompt    = BOS [effort text] system turns header
    system    = tools and every system text, hoisted, joined by blank lines
    user      = USER content
    results   = USER once per run, then <tool_result>...</tool_result> each
    assistant = ASSISTANT (THINK reasoning END_THINK | END_THINK) content [calls] EOS
    header    = ASSISTANT (THINK | END_THINK)

Nothing is trimmed and nothing separates turns. Reasoning of former turns is kept where tools are or were used.

`official` draws what DeepSeek's encoder for the 0731 weights draws (PyPI: `deepseek-recipe`): the system text stands
before the tools, user-like turns are merged, results are sorted, effort texts are one tier higher. `docs/prompts.md`
lists all differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds4.prompt.draft import Draft
from ds4.prompt.dsml import ASSISTANT, BOS, END_THINK, EOS, THINK, USER, Dsml
from ds4.prompt.effort import Effort, effort_name
from ds4.prompt.history import has_tool_context, is_user_like, last_calls, last_user_like, split_prefix
from ds4.prompt.types import Conversation, Message, RenderedPrompt, Segment

ABSOLUTE_MAXIMUM = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""

BEYOND_MAXIMUM = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

"""

_EFFORT_TEXTS: dict[Effort, str] = {"max": ABSOLUTE_MAXIMUM}
_OFFICIAL_EFFORT_TEXTS: dict[Effort, str] = {
    "medium": ABSOLUTE_MAXIMUM,
    "high": ABSOLUTE_MAXIMUM,
    "max": BEYOND_MAXIMUM,
}


class DeepSeek4Renderer:
    """Implements `ds4.prompt.types.Renderer`."""

    syntax = "deepseek4"

    def __init__(self, *, official: bool = False) -> None:
        self._official = official
        self._dsml = Dsml("tool_calls", "invoke", "parameter", official="V4" if official else None)

    def render(self, conversation: Conversation) -> RenderedPrompt:
        effort = effort_name(conversation.effort)
        draft = Draft(BOS, (_OFFICIAL_EFFORT_TEXTS if self._official else _EFFORT_TEXTS).get(effort, ""))
        draft.add(*self._system(conversation))
        return self._turns(draft, conversation, conversation.messages, live=False)

    def render_tail(self, messages: Sequence[Message], conversation: Conversation) -> RenderedPrompt:
        return self._turns(Draft(EOS), conversation, messages, live=True)

    def _system(self, conversation: Conversation) -> list[Segment]:
        texts = [message.content for message in conversation.messages if message.role == "system"]
        tools = self._dsml.declaration(conversation.tools) if conversation.tools else ()
        if self._official:
            text = "\n\n".join(text for text in texts if text)
            return [text, "\n\n", *tools] if tools else [text]
        return [*tools, *(f"\n\n{text}" for text in texts)] if tools else ["\n\n".join(texts)]

    def _turns(
        self, draft: Draft, conversation: Conversation, messages: Sequence[Message], *, live: bool
    ) -> RenderedPrompt:
        """Draws `messages` and the header. `live`: the turn before them is in the model's state already."""
        thinking = effort_name(conversation.effort) != "none"
        turns = [message for message in messages if message.role != "system"]
        if self._official:
            turns = _official_order(turns, len(last_calls(conversation.messages)) if live else 0)
        turns, prefix = split_prefix(turns, conversation)
        if self._official:
            first_kept = 0 if conversation.tools else len(turns)
        else:
            first_kept = 0 if has_tool_context(conversation, messages) else last_user_like(turns) + 1
        before = ""
        for i, message in enumerate(turns):
            if is_user_like(message):
                draft.add(*self._opening(before, message), *self._dsml.body(message))
            else:
                if self._official or before in ("user", "tool"):
                    draft.add(ASSISTANT)
                    if thinking and i >= first_kept:
                        draft.add(THINK, message.reasoning)
                    draft.add(END_THINK)
                draft.add(*self._dsml.body(message))
            before = message.role
        return header(draft, self._dsml, prefix, thinking=thinking)

    def _opening(self, before: str, message: Message) -> list[Segment]:
        """What stands before a user-like turn behind one of role `before`."""
        if self._official:
            goes_on = before == "tool" or before == message.role == "user"
            return ["\n\n"] if goes_on else [USER]
        goes_on = before in ("user", "tool") and (message.joined or before == message.role == "tool")
        return [] if goes_on else [USER]


def header(draft: Draft, dsml: Dsml, prefix: Message | None, *, thinking: bool) -> RenderedPrompt:
    """Opens the assistant turn to generate, or the one to go on with, whose reasoning is open until content follows."""
    draft.add(ASSISTANT)
    if prefix is None:
        draft.add(THINK if thinking else END_THINK)
        return draft.rendered(thinking=thinking)
    answering = bool(prefix.content or prefix.calls)
    if thinking:
        draft.add(THINK, prefix.reasoning)
    if answering or not thinking:
        draft.add(END_THINK)
    draft.add(prefix.content, *dsml.block(prefix.calls))
    return draft.rendered(thinking=thinking and not answering)


def _official_order(messages: Sequence[Message], before: int) -> list[Message]:
    """DeepSeek's order: adjacent user texts are one; calls stand by id; behind a turn with n calls the next n messages
    stand by id, what has none last.

    `before` is the number of calls of the turn in front of the first message.
    """
    merged: list[Message] = []
    for message in messages:
        if merged and message.role == merged[-1].role == "user":
            texts = (merged[-1].content, message.content)
            merged[-1] = replace(merged[-1], content="\n\n".join(text for text in texts if text))
        else:
            merged.append(_with_sorted_calls(message))
    out = list(merged)
    _sort_window(out, 0, before)
    for i, message in enumerate(merged):
        _sort_window(out, i + 1, len(message.calls))
    return out


def _with_sorted_calls(message: Message) -> Message:
    return replace(message, calls=tuple(sorted(message.calls, key=lambda call: call.id)))


def _sort_window(messages: list[Message], start: int, size: int) -> None:
    window = messages[start : start + size]
    if len(window) == size:
        messages[start : start + size] = sorted(window, key=lambda m: (m.call_id is None, m.call_id or ""))
