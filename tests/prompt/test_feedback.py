"""What a model is told about a call that cannot be read: worked texts of every syntax."""

from __future__ import annotations

import pytest

from ds4.prompt.chatml import ChatMLRenderer
from ds4.prompt.deepseek4 import ABSOLUTE_MAXIMUM, DeepSeek4Renderer
from ds4.prompt.deepseek41 import DeepSeek41Renderer
from ds4.prompt.feedback import feedback, system_region
from ds4.prompt.glm import GlmRenderer
from ds4.prompt.qwen import QwenRenderer
from ds4.prompt.types import Conversation, Message, Renderer
from tests.support.prompts import WEATHER, specials

DSML = (
    "Tool error: invalid DSML tool call: {}\nThe previous assistant output was not executed because the DSML syntax "
    "was malformed. Emit a new valid DSML tool call, or answer normally if no tool is needed."
)
TAGS = (
    "Tool error: invalid tool call: {}\nThe previous assistant output was not executed because the <tool_call> syntax "
    "was malformed. Emit a new valid tool call, or answer normally if no tool is needed."
)
DETAIL = "unterminated tool call"


def conversation(effort: str = "high", system: str = "Be <brief>.") -> Conversation:
    return Conversation((Message("system", system), Message("user", "q")), (WEATHER,), effort)


def told(renderer: Renderer, effort: str, *, reasoning_open: bool = False) -> str:
    asked = conversation(effort)
    return feedback(renderer, asked, renderer.render(asked), DETAIL, reasoning_open=reasoning_open).text


@pytest.mark.parametrize("renderer", [DeepSeek4Renderer(), DeepSeek41Renderer()], ids=["V4", "V4.1"])
def test_deepseek(renderer: Renderer) -> None:
    text = told(renderer, "high")
    head = f"<｜end▁of▁sentence｜><｜User｜><tool_result>{DSML.format(DETAIL)}\n\nSystem prompt reminder:\n## Tools\n\n"
    assert text.startswith(head)
    assert text.endswith("to invoke tool calls.\n\n\nBe <brief>.</tool_result><｜Assistant｜><think>")
    assert text.count(WEATHER.schema) == 1
    assert told(renderer, "none").endswith("</tool_result><｜Assistant｜></think>")
    assert told(renderer, "high", reasoning_open=True) == "</think>" + text


def test_the_reminder_is_text() -> None:
    renderer, asked = DeepSeek4Renderer(), conversation()
    prompt = feedback(renderer, asked, renderer.render(asked), DETAIL, reasoning_open=False)
    assert specials(prompt) == ["<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>"]


@pytest.mark.parametrize("effort", ["max", "low", 40])
def test_the_region_is_without_effort(effort: str) -> None:
    for renderer in (DeepSeek4Renderer(), DeepSeek41Renderer(), DeepSeek4Renderer(official=True)):
        region = system_region(renderer.render(conversation(effort)))
        assert "Reasoning Effort" not in region and ABSOLUTE_MAXIMUM not in region
        assert region.startswith(("## Tools", "Be <brief>."))
    bare = Conversation((Message("user", "q"),), (), effort)
    assert system_region(DeepSeek41Renderer().render(bare)) == ""
    assert (
        "reminder"
        not in feedback(
            DeepSeek41Renderer(), bare, DeepSeek41Renderer().render(bare), DETAIL, reasoning_open=False
        ).text
    )


def test_the_others_have_no_reminder() -> None:
    said = TAGS.format(DETAIL)
    assert told(GlmRenderer(), "high") == (f"<|observation|><tool_response>{said}</tool_response><|assistant|><think>")
    block = (
        f"<|im_end|>\n<|im_start|>user\n<tool_response>\n{said}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert told(QwenRenderer(), "high") == f"{block}<think>\n"
    assert told(QwenRenderer(), "none") == f"{block}<think>\n\n</think>\n\n"
    assert told(ChatMLRenderer(), "none") == block
