"""A conversation, whatever dialect it came in, and the rendered prompt that a tokenizer takes.

Renderers emit segments: literal text, or the name of a special token. Text is encoded without the added
vocabulary, so no user, system or tool text can produce a special token (decision D2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in the history. `arguments` is JSON text as the client sent it; `raw` is the sampled block if known."""

    id: str
    name: str
    arguments: str
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `content` is text with image markers; `reasoning` the thinking text of an assistant turn.

    `joined`: a user or tool turn that stood in the same message of the client as the turn before it (Anthropic puts
    results and text into one user message); the syntaxes differ in what they print between the two.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Tool:
    """A callable tool: its name and its schema as canonical JSON text (one line)."""

    name: str
    schema: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Everything that decides the prompt. `effort`: none, low, medium, high, max or a level 0..100."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    effort: str | int = "high"
    continue_final: bool = False
    """The last message is an assistant turn to go on with (prefill), not a finished one."""


@dataclass(frozen=True, slots=True)
class Special:
    """A special token by its text, such as `<|im_start|>`.

    `optional`: a vocabulary that lacks it spells it as text. So are tags around tools and thinking, which carry meaning
    as text too; without its role tokens a model has no turns.
    """

    text: str
    optional: bool = False


Segment = str | Special


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as it was drawn: neighbouring texts in `drawn` are one text, which the tokenizer joins.

    They stay apart because the long ones among them are the client's own strings, known from its last request.
    `thinking` says that generation starts inside an open reasoning block.
    """

    drawn: tuple[Segment, ...]
    thinking: bool = False
    warnings: tuple[str, ...] = field(default=())

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The same with neighbouring texts joined."""
        joined: list[Segment] = []
        texts: list[str] = []
        for segment in (*self.drawn, None):
            if isinstance(segment, str):
                texts.append(segment)
                continue
            if texts:
                joined.append("".join(texts))
                texts.clear()
            if segment is not None:
                joined.append(segment)
        return tuple(joined)

    @property
    def text(self) -> str:
        """The prompt as one string, for people and traces."""
        return "".join(s if isinstance(s, str) else s.text for s in self.drawn)


class Renderer(Protocol):
    """Draws a conversation, and the live tail after tool results, in one model syntax."""

    syntax: str
    """Name of the syntax: also selects the output parser's dialect."""

    def render(self, conversation: Conversation) -> RenderedPrompt: ...
    def render_tail(self, messages: Sequence[Message], conversation: Conversation) -> RenderedPrompt:
        """What follows a live assistant turn: its end mark, `messages` (tool results, user turns), the header.

        Of `conversation` count the tools, the effort, the calls of its last assistant turn (in which order results
        stand depends on them), and `continue_final` if `messages` end in an assistant turn.
        """
