"""Rules about former turns that several syntaxes share: whose reasoning is kept, in which order results stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ds4.prompt.types import Conversation, Message, ToolCall


def is_user_like(message: Message) -> bool:
    """User text or a tool result: what a model answers."""
    return message.role in ("user", "tool")


def last_user_like(messages: Sequence[Message]) -> int:
    """Index of the last user-like message, -1 without one. Reasoning behind it belongs to the turn at hand."""
    return max((i for i, message in enumerate(messages) if is_user_like(message)), default=-1)


def has_tool_context(conversation: Conversation, messages: Iterable[Message] = ()) -> bool:
    """Tools are declared, or were used: then a model was trained to see the reasoning of all turns."""
    return bool(conversation.tools) or any(
        message.calls or message.role == "tool" for message in (*conversation.messages, *messages)
    )


def replayed(calls: Sequence[ToolCall]) -> bytes | None:
    """The block in which all calls of a turn were sampled, if it is known: it is drawn as it was."""
    raw = calls[0].raw if calls else None
    if raw is None or any(call.raw != raw for call in calls):
        return None
    return raw


def split_prefix(messages: Sequence[Message], conversation: Conversation) -> tuple[list[Message], Message | None]:
    """The turns to draw, and the assistant turn at the end that is to be gone on with, if there is one."""
    if conversation.continue_final and messages and messages[-1].role == "assistant":
        return list(messages[:-1]), messages[-1]
    return list(messages), None


def last_calls(messages: Sequence[Message]) -> tuple[ToolCall, ...]:
    """The calls of the last assistant turn that has any."""
    return next((message.calls for message in reversed(messages) if message.calls), ())


def in_call_order(messages: Sequence[Message], before: tuple[ToolCall, ...] = ()) -> list[Message]:
    """Results of each run of user-like messages in the order of the calls they answer; user text keeps its places.

    Calls are those of the last assistant turn that has any, at first `before`. A result of no such call goes first;
    equals keep their order.
    """
    ranks = _ranks(before)
    out: list[Message] = []
    run: list[Message] = []

    def flush() -> None:
        results = iter(sorted((m for m in run if m.role == "tool"), key=lambda m: ranks.get(m.call_id or "", 0)))
        out.extend(next(results) if m.role == "tool" else m for m in run)
        run.clear()

    for message in messages:
        if is_user_like(message):
            run.append(message)
            continue
        flush()
        out.append(message)
        if message.calls:
            ranks = _ranks(message.calls)
    flush()
    return out


def _ranks(calls: Sequence[ToolCall]) -> dict[str, int]:
    return {call.id: i for i, call in enumerate(calls)}


def results_first(messages: Sequence[Message]) -> list[Message]:
    """In each message that a client gave in parts, the results before the text: a user turn then follows them all."""
    out: list[Message] = []
    group: list[Message] = []
    for message in messages:
        if not message.joined:
            out += sorted(group, key=lambda m: m.role != "tool")
            group.clear()
        group.append(message)
    return out + sorted(group, key=lambda m: m.role != "tool")
