"""By what texts the next turn finds what a session holds: keys of its state, and of what the client saw of it.

A generation leaves a `Naming` behind: plain data, worked out on any thread. Where the client's next prompt spells the
turn in another way than the state has it, the whole conversation is rendered for it, 4 ms per megabyte. So long ones
are named on the event loop, just before the end of the answer is sent (`ds4.server.bridge`): no step waits for that,
and the next request finds the names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds4.prompt.types import Message, ToolCall
from ds4.server.keys import key_of_tokens
from ds4.server.reuse import LiveText, Visible

if TYPE_CHECKING:
    from ds4 import _dsml
    from ds4.engine.tokenizer import Tokenizer
    from ds4.server.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class Names:
    """`text` is the key of all that the session holds, `visible` of what the client saw of it."""

    text: LiveText | None = None
    visible: Visible | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Naming:
    """A session of `live` tokens: the prompt with cache key `key`, and `drawn`.

    `last` is the token drawn last, which the session lacks when `missing` is 1. `result` is what the output was parsed
    to, None: the client left before its end; `over`: it came to an end, and not inside reasoning. `shown`: the end is
    one that a client goes on from, and there was reasoning. `left_out`: the client sends its conversation without it.
    """

    request: GenerationRequest
    tokenizer: Tokenizer
    key: bytes
    live: int
    drawn: tuple[int, ...]
    last: int
    missing: int
    result: _dsml.Result | None
    over: bool
    shown: bool
    left_out: bool

    @property
    def size(self) -> int:
        """Bytes of text that may have to be rendered."""
        if self.result is None:
            return 0
        return len(self.key) if self.shown or self.result.calls else 0

    def names(self) -> Names:
        return Names(self._text(), self._visible())

    def _text(self) -> LiveText | None:
        result = self.result
        if result is not None and self.over and result.calls and not self._stands_as_drawn(result):
            sent = self._as_sent(result, result.reasoning)
            return None if sent is None else LiveText(sent, self.live)
        drawn = key_of_tokens(self.tokenizer, self.drawn)
        return None if drawn is None else LiveText(self.key, self.live, drawn)

    def _stands_as_drawn(self, result: _dsml.Result) -> bool:
        """Do content and calls, put together again, spell what was drawn? White space before calls is no content."""
        drawn = self.tokenizer.decode(self.drawn)
        if self.missing > 0:
            drawn += self.tokenizer.token_bytes(self.last)
        return drawn.endswith(result.content.encode("utf-8", "replace") + (result.raw or b""))

    def _as_sent(self, result: _dsml.Result, reasoning: str) -> bytes | None:
        """The key of the state as a client sends the turn back: without its last token where the state lacks it."""
        if self.request.visible is None:
            return None
        calls = tuple(ToolCall("", call.name, call.arguments, result.raw) for call in result.calls)
        key = self.request.visible(Message("assistant", result.content, reasoning, calls))
        if key is None or self.missing not in (0, 1):
            return None
        last = self.tokenizer.token_bytes(self.last) if self.missing else b""
        return key.removesuffix(last) if key.endswith(last) else None

    def _visible(self) -> Visible | None:
        """Where what the client saw differs from the state: there was reasoning.

        Clients of Responses never send it back. A prompt without tools is rendered without it, whoever sends it; with
        tools it is rendered for clients that send it, and those that do not are met here. After a stop string, an error
        or the length limit the state is not what the client goes on with.
        """
        request, result = self.request, self.result
        if result is None or not self.shown or request.visible is None or not self.over:
            return None
        if result.finish not in ("stop", "tool_calls") or result.void_calls:
            return None
        kind = "responses-visible" if request.dialect == "responses" else "thinking-visible"
        key = self._as_sent(result, "")
        sent = kind == "thinking-visible" and request.tools and not self.left_out
        return None if not key else Visible(key, self.live, kind, sent)
