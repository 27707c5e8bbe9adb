"""What a model is told when its tool call could not be read: a tool result that asks for another call, or an answer.

It follows the turn as it was sampled, broken call and all, which must not be executed or repaired. DeepSeek's models
are shown their system region once more, where the tools are declared: it may be far behind them.
"""

from __future__ import annotations

import re

from ds4.prompt.deepseek4 import ABSOLUTE_MAXIMUM, BEYOND_MAXIMUM
from ds4.prompt.draft import WHITE_SPACE
from ds4.prompt.dsml import ASSISTANT, END_THINK, USER
from ds4.prompt.types import Conversation, Message, RenderedPrompt, Renderer

_DSML = (
    "Tool error: invalid DSML tool call: {detail}\n"
    "The previous assistant output was not executed because the DSML syntax was malformed. Emit a new valid DSML tool "
    "call, or answer normally if no tool is needed."
)
_REMINDER = "\n\nSystem prompt reminder:\n"
_TAGS = (
    "Tool error: invalid tool call: {detail}\n"
    "The previous assistant output was not executed because the {tag} syntax was malformed. Emit a new valid tool "
    "call, or answer normally if no tool is needed."
)
_EFFORT = re.compile(
    "|".join([*map(re.escape, (ABSOLUTE_MAXIMUM, BEYOND_MAXIMUM)), r"Reasoning Effort: \d+ \(range [^\n]*\)\n\n"])
)


def feedback(
    renderer: Renderer, conversation: Conversation, prompt: RenderedPrompt, detail: str, *, reasoning_open: bool
) -> RenderedPrompt:
    """What follows the broken turn: its end, the result that says `detail`, and the header of the turn to come.

    `prompt` is what the conversation was rendered to. `reasoning_open`: the turn ended inside its reasoning.
    """
    if renderer.syntax in ("deepseek4", "deepseek41"):
        text = _DSML.format(detail=detail)
        region = system_region(prompt)
        text += _REMINDER + region if region else ""
    else:
        text = _TAGS.format(detail=detail, tag="<tool_call>")
    tail = renderer.render_tail((Message("tool", text),), conversation)
    if not reasoning_open:
        return tail
    return RenderedPrompt((END_THINK, *tail.drawn), tail.thinking)


def system_region(prompt: RenderedPrompt) -> str:
    """The text of a DeepSeek prompt before the first turn, without effort texts and control tokens."""
    texts: list[str] = []
    for segment in prompt.drawn:
        if segment in (USER, ASSISTANT):
            break
        if isinstance(segment, str) or segment.optional:
            texts.append(segment if isinstance(segment, str) else segment.text)
    text = "".join(texts)
    effort = _EFFORT.match(text)
    return text[effort.end() if effort else 0 :].strip(WHITE_SPACE)
