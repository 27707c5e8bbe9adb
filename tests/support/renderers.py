"""Servers whose prompts end where a test wants them to: inside a reasoning block or not, for any output syntax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds4.prompt.types import Conversation, Message, RenderedPrompt, Renderer
from tests.support.running_server import RunningServer, Serve


class OtherEnd:
    """Another renderer's prompts. `thinking`: they are open for reasoning unless the effort is none."""

    def __init__(self, inner: Renderer, syntax: str, *, thinking: bool) -> None:
        self.syntax = syntax
        self._inner = inner
        self._thinking = thinking

    def render(self, conversation: Conversation) -> RenderedPrompt:
        thinking = self._thinking and conversation.effort != "none"
        return replace(self._inner.render(conversation), thinking=thinking)

    def render_tail(self, messages: Sequence[Message], conversation: Conversation) -> RenderedPrompt:
        return self._inner.render_tail(messages, conversation)


def server_for(serve: Serve, *scripts: Any, syntax: str, thinking: bool = False, **fields: Any) -> RunningServer:
    """A server whose output is parsed as `syntax`."""
    server = serve(*scripts, **fields)
    preparer = server.app._service.preparer
    preparer.renderer = OtherEnd(preparer.renderer, syntax, thinking=thinking)
    return server


def thinking_server(serve: Serve, *scripts: Any, **fields: Any) -> RunningServer:
    return server_for(serve, *scripts, syntax="qwen", thinking=True, **fields)
