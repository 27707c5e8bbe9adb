"""Streaming parser of reasoning, content and tool calls. See `_dsml.pyx` for the picture and the invariants."""

from collections.abc import Sequence
from typing import Final, Literal, final

Syntax = Literal["deepseek4", "deepseek41", "glm", "qwen", "chatml", "raw"]
Cause = Literal["eos", "length", "stop", "error"]

@final
class ReasoningDelta:
    """More of the reasoning: whole code points, never empty."""

    text: Final[str]
    def __init__(self, text: str) -> None: ...

@final
class ContentDelta:
    """More of the answer: whole code points, never empty."""

    text: Final[str]
    def __init__(self, text: str) -> None: ...

@final
class ToolCallStart:
    """Call `index` (0, 1, ...) is announced: its name is known, its arguments follow.

    An announced call counts only when its `ToolCallEnd` arrives: a block that turns out to be malformed or is cut
    leaves its calls without one, and they must never be executed (`Result.void_calls` says how many).
    """

    index: Final[int]
    name: Final[str]
    def __init__(self, index: int, name: str) -> None: ...

@final
class ToolCallDelta:
    """A fragment of the arguments of call `index`; its fragments together are one compact JSON object."""

    index: Final[int]
    arguments: Final[str]
    def __init__(self, index: int, arguments: str) -> None: ...

@final
class ToolCallEnd:
    """Call `index` is complete and may be executed. `raw` is the exact block that all calls of the turn share.

    The ends of all calls come together, in order, when the block is complete: call 1 starts before call 0 ends. A
    dialect that nests events closes call n when call n + 1 starts.
    """

    index: Final[int]
    raw: Final[bytes]
    def __init__(self, index: int, raw: bytes) -> None: ...

Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallDelta | ToolCallEnd

@final
class Call:
    """A complete call: `arguments` is one compact JSON object."""

    index: Final[int]
    name: Final[str]
    arguments: Final[str]

@final
class Result:
    """What the whole turn was. It equals the concatenation of the turn's events.

    reasoning, content: text, "" if there is none.
    calls: the complete calls (those with a `ToolCallEnd`).
    raw: the exact block of the calls, for replay; b"" without calls.
    finish: "tool_calls" with at least one call; else "stop", "length" (cause length) or "error" (cause error, or a
        block that ended unterminated and cannot be completed).
    error: None, "invalid tool call" or "unterminated tool call": what to tell the model in a retry.
    detail: what was wrong with an invalid call ("invoke without name", ...).
    void_calls: calls that were announced but never completed. A stream that has sent them ends with an error unless
        `finish` is "length".
    cut: the bytes of a block that the length limit, a stop string or an engine error cut. They are in no text.
    """

    reasoning: Final[str]
    content: Final[str]
    calls: Final[tuple[Call, ...]]
    raw: Final[bytes]
    finish: Final[Literal["stop", "length", "tool_calls", "error"]]
    error: Final[str | None]
    detail: Final[str | None]
    void_calls: Final[int]
    cut: Final[bytes]

@final
class Parser:
    """Turns the bytes of one assistant turn into events, whatever way they are split.

    syntax: "deepseek4", "deepseek41" (one parser, all DSML spellings), "glm", "qwen", "chatml" (the Qwen tool syntax,
        no trimming), "raw" (everything is content; neither `thinking` nor `tools`).
    thinking: the prompt ended inside an open reasoning block.
    tools: tool calls are looked for. Without it markup is text.
    schemas: (tool name, JSON schema of the tool or of its parameters); types of GLM and Qwen arguments.
    implicit_invoke: outside reasoning a DSML invoke whose block wrapper is missing opens a block, which ends with its
        last invoke. A server takes such markup for text; an agent may prefer to run it.

    Not to be used by two threads at once; different parsers share nothing, so that they may run in parallel, also
    without the GIL.

    Raises ValueError for an unknown syntax or a combination that has no meaning.
    """

    def __init__(
        self,
        syntax: str,
        *,
        thinking: bool = False,
        tools: bool = False,
        schemas: Sequence[tuple[str, bytes | str]] = (),
        implicit_invoke: bool = False,
    ) -> None: ...
    def feed(self, data: bytes) -> list[Event]:
        """Takes the next bytes (one token, many, part of a code point) and returns what became certain.

        Bytes after `stop_now` are accepted. Raises RuntimeError after `finish`.
        """

    def finish(self, cause: str) -> list[Event]:
        """Ends the turn and returns what was held back. `cause`: "eos", "length", "stop" (a client's stop string) or
        "error". Only "eos" lets missing outer wrappers be completed. Raises ValueError for another cause, RuntimeError
        the second time."""

    @property
    def greedy(self) -> bool:
        """The next token is tool-call structure: sample greedily. False for text and argument payload."""

    @property
    def stop_now(self) -> bool:
        """The tool calls of the turn are complete: stop decoding."""

    @property
    def reasoning_open(self) -> bool:
        """The next byte belongs to reasoning, as far as is known."""

    @property
    def calls(self) -> int:
        """Number of calls announced so far, void ones included."""

    @property
    def steps(self) -> int:
        """Bytes looked at so far, with repetitions: a measure of work that a test can hold against the input."""

    @property
    def result(self) -> Result:
        """The turn as a whole. Raises RuntimeError before `finish`."""
