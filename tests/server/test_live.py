"""Turns that can be gone on with: found by id and by calls, bounded, oldest first."""

from __future__ import annotations

from ds4.prompt.types import Message, Tool, ToolCall
from ds4.server.api.live import LiveTurn, LiveTurns


def turn(text: str, *call_ids: str) -> LiveTurn:
    calls = tuple(ToolCall(call_id, "f", "{}") for call_id in call_ids)
    return LiveTurn(None, (Message("user", text), Message("assistant", calls=calls)))


def test_by_id_and_by_calls() -> None:
    live = LiveTurns()
    live.remember("r1", turn("one", "a", "b"))
    live.remember("r2", turn("two", "c"))
    assert live.find("r1") == live.of_calls({"b", "a"}) == turn("one", "a", "b")
    assert live.of_calls(["c"]) == turn("two", "c")
    assert live.find("r3") is None
    for some in ({"a"}, {"a", "b", "c"}, {"x"}, {"a", "x"}, set()):
        assert live.of_calls(some) is None


def test_the_number_is_bounded_and_use_counts() -> None:
    live = LiveTurns(max_turns=2)
    live.remember("r1", turn("one", "a"))
    live.remember("r2", turn("two", "b"))
    assert live.of_calls(["a"]) is not None
    live.remember("r3", turn("three", "c"))
    assert (live.find("r2"), live.of_calls(["b"])) == (None, None)
    assert live.find("r1") and live.find("r3") and len(live) == 2


def test_the_text_is_bounded() -> None:
    live = LiveTurns(max_characters=100)
    for i in range(5):
        live.remember(f"r{i}", turn("x" * 30))
    assert (len(live), live.characters) == (3, 90)
    live.remember("large", turn("x" * 101))
    assert live.find("large") is None and len(live) == 3
    live.remember("all", LiveTurn("s" * 50, (Message("assistant", "x" * 20, "y" * 20),), (Tool("f", "z" * 10),)))
    assert (len(live), live.characters) == (1, 100)


def test_a_call_id_belongs_to_the_latest_turn() -> None:
    live = LiveTurns(max_turns=2)
    live.remember("r1", turn("one", "a"))
    live.remember("r2", turn("two", "a"))
    live.remember("r3", turn("three"))
    assert live.of_calls(["a"]) == turn("two", "a"), "dropping the older turn must not forget the newer one's call"
