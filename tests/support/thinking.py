"""A server whose prompts end inside a reasoning block, as those of reasoning models do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds4.prompt.types import Conversation, Message, RenderedPrompt, Renderer
from tests.support.running_server import RunningServer, Serve


class ThinkingRenderer:
    """Another renderer's prompts, open for reasoning unless the effort is none; the output is parsed as Qwen's."""

    syntax = "qwen"

    def __init__(self, inner: Renderer) -> None:
        self._inner = inner

    def render(self, conversation: Conversation) -> RenderedPrompt:
        return replace(self._inner.render(conversation), thinking=conversation.effort != "none")

    def render_tail(self, messages: Sequence[Message], conversation: Conversation) -> RenderedPrompt:
        return self._inner.render_tail(messages, conversation)


def thinking_server(serve: Serve, *scripts: Any, **fields: Any) -> RunningServer:
    server = serve(*scripts, **fields)
    preparer = server.app._service.preparer
    preparer.renderer = ThinkingRenderer(preparer.renderer)
    return server
