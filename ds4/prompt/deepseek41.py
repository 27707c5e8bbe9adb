"""The DeepSeek V4.1 renderer.

    prompt    = BOS [SYSTEM effort tools] messages header
    system    = the first one goes on behind effort and tools; every other stands at its place: SYSTEM content
    user-like = USER, or a blank line while a user turn is open, then text or <tool_result>...</tool_result>
    assistant = ASSISTANT (THINK reasoning END_THINK | END_THINK) content [calls] EOS
    header    = ASSISTANT (THINK | END_THINK)

Results stand in the order of their calls. Reasoning of former turns is kept where tools are or were used.

`official` draws what DeepSeek's encoder draws (PyPI: `deepseek-recipe`): the first system text stands before the
tools, old reasoning is kept only where tools are declared. `docs/prompts.md` lists all differences.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds4.prompt.deepseek4 import header
from ds4.prompt.draft import Draft
from ds4.prompt.dsml import ASSISTANT, BOS, END_THINK, EOS, SYSTEM, THINK, USER, Dsml
from ds4.prompt.effort import effort_name
from ds4.prompt.history import has_tool_context, in_call_order, is_user_like, last_calls, split_prefix
from ds4.prompt.types import Conversation, Message, RenderedPrompt

_LEVELS = {"low": 50, "medium": 75, "high": 75, "max": 100}


def effort_text(effort: str | int) -> str:
    """The line that tells the model its effort, a level from 1 to 100; empty when thinking is off."""
    name = effort_name(effort)
    if name == "none":
        return ""
    level = min(effort, 100) if isinstance(effort, int) else _LEVELS[name]
    return f"Reasoning Effort: {level} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


class DeepSeek41Renderer:
    """Implements `ds4.prompt.types.Renderer`."""

    syntax = "deepseek41"

    def __init__(self, *, official: bool = False) -> None:
        self._official = official
        self._dsml = Dsml(" calls", " invoke", " parameter", official="V4.1" if official else None)

    def render(self, conversation: Conversation) -> RenderedPrompt:
        messages = conversation.messages
        draft = Draft(BOS)
        effort = effort_text(conversation.effort)
        first = messages[0].content if messages and messages[0].role == "system" else None
        tools = self._dsml.declaration(conversation.tools) if conversation.tools else ()
        if effort or tools or first is not None:
            draft.add(SYSTEM, effort)
            if self._official:
                draft.add(first or "", *(["\n\n", *tools] if tools else []))
            else:
                draft.add(*tools, "\n\n" if tools and first is not None else "", first or "")
        rest = messages if first is None else messages[1:]
        return self._turns(draft, conversation, rest, live=False)

    def render_tail(self, messages: Sequence[Message], conversation: Conversation) -> RenderedPrompt:
        return self._turns(Draft(EOS), conversation, messages, live=True)

    def _turns(
        self, draft: Draft, conversation: Conversation, messages: Sequence[Message], *, live: bool
    ) -> RenderedPrompt:
        """Draws `messages` and the header. `live`: the turn before them is in the model's state already."""
        thinking = effort_name(conversation.effort) != "none"
        turns, prefix = split_prefix(messages, conversation)
        turns = in_call_order(turns, last_calls(conversation.messages) if live else ())
        asked = [i for i, m in enumerate(turns) if m.role != "assistant"]
        if live or conversation.tools or (not self._official and has_tool_context(conversation)):
            first_kept = 0
        else:
            first_kept = len(turns) if self._official else (asked[-1] + 1 if asked else 0)
        pending = user_open = False
        for i, message in enumerate(turns):
            if message.role == "system":
                draft.add(SYSTEM, message.content)
                pending, user_open = True, False
            elif is_user_like(message):
                draft.add("\n\n" if user_open else USER)
                draft.add(*self._dsml.body(message))
                pending = user_open = True
            else:
                if pending or self._official:
                    draft.add(ASSISTANT)
                    if thinking and i >= first_kept:
                        draft.add(THINK, message.reasoning)
                    draft.add(END_THINK)
                draft.add(*self._dsml.body(message))
                pending = user_open = False
        if self._official and prefix and len(conversation.messages) == 1 and not conversation.tools:
            thinking = False  # nothing stands before it: DeepSeek's encoder takes it for a former turn
        return header(draft, self._dsml, prefix, thinking=thinking)
