"""Tool memory: replay only of whole turns, limits, the blocks of a text, the saved map."""

from __future__ import annotations

import random
import struct

import pytest

from ds4._dsml import Parser
from ds4.prompt.types import Message, ToolCall
from ds4.server.tool_memory import ReplayStats, ToolMemory, decode_map, encode_map

D = "｜DSML｜"


def block(name: str) -> bytes:
    return f'\n\n<{D}tool_calls>\n<{D}invoke name="{name}">\n</{D}invoke>\n</{D}tool_calls>'.encode()


def turn(*ids: str) -> Message:
    return Message("assistant", calls=tuple(ToolCall(i, "f", "{}") for i in ids))


def raws(memory: ToolMemory, *messages: Message) -> list[list[bytes | None]]:
    return [[c.raw for c in m.calls] for m in memory.attach(messages)[0]]


def test_a_turn_is_replayed_only_as_a_whole() -> None:
    memory = ToolMemory()
    memory.remember(["a", "b"], block("ab"))
    memory.remember(["c"], block("c"))
    user = Message("user", "hi")
    messages, stats = memory.attach([user, turn("a", "b"), turn("c"), turn("a", "x"), turn("a", "c"), turn("y")])
    assert messages[0] is user
    assert [[c.raw for c in m.calls] for m in messages[1:]] == [
        [block("ab")] * 2,
        [block("c")],
        [None, None],
        [None, None],
        [None],
    ]
    assert stats == ReplayStats(mem=2, canonical=3, missing_ids=2)


def test_equal_blocks_of_two_turns_are_one() -> None:
    memory = ToolMemory()
    memory.remember(["a"], block("same"))
    used = memory.bytes_used
    memory.remember(["b"], bytes(block("same")))
    assert memory.bytes_used == used + 1
    assert memory.block("a") == memory.block("b") == block("same")


def test_what_a_client_claims_is_cleared() -> None:
    forged = Message("assistant", calls=(ToolCall("z", "f", "{}", raw=b"forged"),))
    assert raws(ToolMemory(), forged) == [[None]]


def test_disabled_remembers_nothing() -> None:
    memory = ToolMemory(enabled=False)
    memory.remember(["a"], block("a"))
    memory.restore([("b", block("b"))])
    assert len(memory) == 0 and raws(memory, turn("a"), turn("b")) == [[None], [None]]
    assert memory.export(block("a")) == []


def test_nothing_to_remember() -> None:
    memory = ToolMemory()
    memory.remember(["a"], b"")
    memory.remember([], block("a"))
    memory.remember([""], block("a"))
    assert len(memory) == memory.bytes_used == 0


def test_the_least_recently_used_ids_go_first() -> None:
    memory = ToolMemory(max_ids=3)
    for name in "abc":
        memory.remember([name], block(name))
    memory.attach([turn("a")])
    memory.remember(["d"], block("d"))
    assert [name in memory for name in "abcd"] == [True, False, True, True]
    memory = ToolMemory(max_bytes=3 * (2 * len(block("x")) + 1))
    for name in "abcd":
        memory.remember([name], block(name))
    assert [name in memory for name in "abcd"] == [False, True, True, True]
    memory.remember(["huge"], bytes(10**6))
    assert len(memory) == memory.bytes_used == 0, "a block over the limit is not kept"


def test_random_use_keeps_the_accounts() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    memory = ToolMemory(max_ids=20, max_bytes=6000)
    for _ in range(3000):
        ids = [str(rng.randrange(40)) for _ in range(rng.randrange(1, 4))]
        data = block("f" * rng.randrange(20))
        if rng.random() < 0.7:
            memory.remember(ids, data)
        elif rng.random() < 0.5:
            memory.restore([(i, data) for i in ids])
        else:
            memory.attach([turn(*ids)])
        known = {i: b for i in map(str, range(40)) if (b := memory.block(i)) is not None}
        assert len(known) == len(memory) <= 20
        cost = sum(map(len, known)) + sum(2 * len(b) for b in set(known.values()))
        assert memory.bytes_used == cost <= 6000
        for b in set(known.values()):
            assert sorted(memory.export(b)) == sorted((i, b) for i, have in known.items() if have == b)


def test_a_later_turn_takes_an_id_over() -> None:
    memory = ToolMemory()
    memory.remember(["a"], block("old"))
    memory.remember(["a"], block("new"))
    assert memory.block("a") == block("new") and memory.export(block("old")) == []


def test_export_finds_the_blocks_of_a_text() -> None:
    memory = ToolMemory()
    one = b"<tool_call>a</tool_call>"
    memory.remember(["g1"], one)
    memory.remember(["g2", "g3"], one + b"\n<tool_call>b</tool_call>")
    memory.remember(["d"], block("d"))
    memory.remember(["p"], b'<tool_calls><invoke name="f"></invoke></tool_calls>')
    memory.remember(["q"], f"<{D} calls >...".encode())
    memory.remember(["unused"], block("unused"))
    text = b"x" + block("d") + b"y" + one + b" " + one + b"\n<tool_call>b</tool_call>\n\n" + one
    assert memory.export(text) == [
        ("d", block("d")),
        ("g1", one),
        ("g2", one + b"\n<tool_call>b</tool_call>"),
        ("g3", one + b"\n<tool_call>b</tool_call>"),
    ]
    assert [i for i, _ in memory.export(b'a<tool_calls><invoke name="f"></invoke></tool_calls>')] == ["p"]
    assert [i for i, _ in memory.export(f"\n\n<{D} calls >...".encode())] == ["q"]
    assert memory.export(block("d")[:-1]) == memory.export(b"") == []


def test_what_the_parser_calls_raw_is_found_again() -> None:
    """The block that the parser reports is the one that stands in the text."""
    for syntax, text in (
        ("deepseek4", "Sure." + block("f").decode()),
        ("glm", "p<tool_call>a<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>\n<tool_call>b</tool_call>"),
        ("qwen", "p\n\n<tool_call>\n<function=f>\n</function>\n</tool_call>"),
    ):
        parser = Parser(syntax, tools=True)
        parser.feed(text.encode())
        parser.finish("eos")
        memory = ToolMemory()
        ids = [f"call_{c.index}" for c in parser.result.calls]
        memory.remember(ids, parser.result.raw)
        assert [i for i, _ in memory.export(b"before" + text.encode() + b"after")] == ids


def test_restored_entries_never_replace_sampled_ones() -> None:
    memory = ToolMemory()
    memory.remember(["a"], block("mem"))
    memory.restore([("a", block("disk")), ("b", block("disk"))])
    assert memory.block("a") == block("mem")
    assert memory.attach([turn("a"), turn("b")])[1] == ReplayStats(mem=1, disk=1)


def test_map_round_trip() -> None:
    entries = [("call_1", block("a")), ("é", b"\x00\xff"), ("call_2", block("a"))]
    data = encode_map(entries)
    assert data[:8] == b"KTM\x01" + struct.pack("<I", 3)
    assert decode_map(data) == entries
    assert decode_map(memoryview(data), {"é"}) == entries[1:2]
    assert encode_map([]) == encode_map([("", b"x"), ("x", b""), ("x" * 257, b"x")]) == b""


def test_a_damaged_map_gives_what_stands_before_the_damage() -> None:
    entries = [("call_1", block("a")), ("call_2", block("b"))]
    data = encode_map(entries)
    first = len(encode_map(entries[:1]))
    for n in range(len(data)):
        assert decode_map(data[:n]) == (entries[:1] if n >= first else [])
    assert decode_map(data + b"trailing") == entries
    for at, bad in (
        (0, b"X"),
        (3, b"\x02"),
        (4, struct.pack("<I", 400_001)),
        (8, struct.pack("<I", 0)),
        (8, struct.pack("<I", 257)),
        (12, struct.pack("<I", 0)),
        (12, struct.pack("<I", 2**29 + 1)),
        (16, b"\xff"),
    ):
        assert decode_map(data[:at] + bad + data[at + len(bad) :]) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_random_map_does_no_harm(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(encode_map([(f"call_{i}", block(str(i))) for i in range(5)]))
    for _ in range(500):
        copy = bytearray(data)
        for _ in range(rng.randrange(1, 5)):
            copy[rng.randrange(len(copy))] = rng.randrange(256)
        for call_id, found in decode_map(bytes(copy)):
            assert call_id and found
