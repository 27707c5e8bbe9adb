"""Text out of message content: a string, or parts put together without separator; equal text gives equal prompts.

All dialects write content in one of these two ways and only name their parts differently. Clients replay what one
dialect gave them in another's words, so a part counts by its `text`, whatever its type.
"""

from __future__ import annotations

from ds4._json import Node
from ds4.server.api.texts import string

IMAGES = frozenset({"image_url", "input_image", "image"})

NO_IMAGES = "image input is not supported by this model"


def text_of(node: Node | None) -> str:
    """The text of a content member. Raises JSONError at a part that has none."""
    if node is None:
        return ""
    if node.kind == "str":
        return string(node)
    if node.kind != "array":
        raise node.error(f"Expected `str` or `array`, got `{node.kind}`")
    return "".join([part_text(part) for part in node])


def part_text(part: Node) -> str:
    """The text of one part."""
    if part.kind == "str":
        return string(part)
    kind = part.as_object().get_str("type", "text")
    if kind in IMAGES:
        raise part["type"].error(NO_IMAGES)
    if kind == "refusal":
        return part.get_str("refusal", "")
    if "text" in part:
        return text_of(part.get("text"))
    raise part.error(f"Content of type {kind[:40]!r} is not supported: expected `text`")


def result_text(node: Node | None) -> str:
    """The text of a tool result. What the model cannot be shown becomes `[Unsupported TYPE]`.

    A refusal would end the client's conversation for good: the result is in its history from now on.
    """
    if node is None:
        return ""
    if node.kind == "str":
        return string(node)
    if node.kind != "array":
        return node.minified()
    return "".join([_result_part(part) for part in node])


def _result_part(part: Node) -> str:
    if part.kind != "object":
        return part.as_str()
    kind = part.get_str("type", "text")
    if kind == "tool_reference":
        return f"[tool_reference {part.get_str('tool_name', '')}]"
    if kind in IMAGES or "text" not in part:
        return f"[Unsupported {kind[:40]}]"
    return text_of(part.get("text"))


def arguments_text(node: Node | None) -> str:
    """Arguments as the client sent them, whatever they are: a string need not be JSON, a value need not be a string."""
    if node is None:
        return "{}"
    return string(node) if node.kind == "str" else node.minified()
