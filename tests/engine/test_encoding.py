"""Remembered prompts: the same ids and keys as without memory, however a conversation grows, forks or is edited."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from ds4.engine import encoding
from ds4.engine.encoding import EncodedPrompt, PromptEncoder, special_key, well_formed


@dataclass(frozen=True)
class Special:
    text: str
    optional: bool = False


SPECIALS = {"<s>": 1000, "<e>": 1001, "<t>": 1002}
Segment = str | Special


class Counting:
    """A vocabulary of characters, which sees what it is asked to encode."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.asked.append(text)
        # Depends on both neighbours, so a text that is cut at a wrong place gives other ids.
        return [ord(b) + ord(a) % 7 for a, b in zip("\0" + text, text, strict=False)]


def encoder() -> tuple[PromptEncoder, Counting]:
    counting = Counting()
    return PromptEncoder(counting, SPECIALS.get, "test"), counting


def turn(rng: random.Random) -> list[Segment]:
    texts = [rng.choice(["", "user\n", "é", "long text " * rng.randrange(30)]) for _ in range(rng.randrange(4))]
    tag: list[Segment] = [rng.choice([Special("<t>", optional=True), Special("<none>", optional=True)])]
    return [Special("<s>"), *texts, *(tag if rng.random() < 0.5 else []), *texts[:1], Special("<e>"), "\n"]


def test_memory_changes_nothing() -> None:
    seed = random.SystemRandom().getrandbits(32)
    rng = random.Random(seed)
    remembering, _ = encoder()
    conversations: list[list[list[Segment]]] = [[] for _ in range(5)]
    given: list[tuple[EncodedPrompt, EncodedPrompt]] = []
    for _ in range(400):
        number = rng.randrange(5)
        turns = conversations[number]
        match rng.randrange(6):
            case 0 if turns:
                turns[rng.randrange(len(turns))] = turn(rng)
            case 1 if turns:
                del turns[rng.randrange(len(turns)) :]
            case 2:
                conversations[number] = turns = list(rng.choice(conversations))
            case _:
                turns.append(turn(rng))
        header: list[Segment] = [Special("<s>"), "assistant\n", *rng.choice([[], [Special("<t>")], ["\n"]])]
        segments = [segment for part in turns for segment in part] + header
        fresh, _ = encoder()
        expected, found = fresh(segments), remembering(segments)
        assert found.key == expected.key, f"seed {seed}"
        np.testing.assert_array_equal(found.ids, expected.ids, err_msg=f"seed {seed}")
        assert found.ids.dtype == np.int32 and not found.ids.flags.writeable
        given.append((expected, found))
    # Prompts share memory with those that went on from them, and forked, and keep their own ids.
    assert any(np.shares_memory(a.ids, b.ids) for (_, a), (_, b) in pairwise(given))
    for expected, found in given:
        np.testing.assert_array_equal(found.ids, expected.ids, err_msg=f"seed {seed}")


def test_a_growing_conversation_is_encoded_once() -> None:
    remember, counting = encoder()
    history: list[Segment] = []
    for i in range(20):
        history += [Special("<s>"), "user\n", f"question {i}", Special("<e>")]
        remember([*history, Special("<s>"), "assistant\n"])
        remember([*history, Special("<s>"), "assistant\n"])
    assert counting.asked == ["user\nquestion 0", "assistant\n", *(f"user\nquestion {i}" for i in range(1, 20))]


def test_a_long_history_costs_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    remember, _ = encoder()
    looked_at: list[str] = []
    special = remember._special
    monkeypatch.setattr(remember, "_special", lambda segment: looked_at.append(segment.text) or special(segment))
    for n in (1000, 4000):
        history: list[Segment] = []
        for i in range(n):
            history += [Special("<s>"), f"{n} {i}", Special("<e>")]
        remember(history)
        looked_at.clear()
        remember([*history, Special("<s>"), "new", Special("<e>")])
        # The last mark stands behind the last special token: nothing before it is looked at again.
        assert looked_at == ["<s>", "<e>"]


def test_the_old_prompt_gives_way_to_the_longer_one() -> None:
    remember, _ = encoder()
    first = [Special("<s>"), "a", Special("<e>")]
    remember(first)
    remember([*first, Special("<s>"), "b", Special("<e>")])
    assert len(remember._prompts) == 1
    remember([Special("<s>"), "other", Special("<e>")])
    assert len(remember._prompts) == 2


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_PROMPTS_COST", 40_000)
    monkeypatch.setattr(encoding, "_RUNS_COST", 40_000)
    remember, counting = encoder()
    for i in range(200):
        remember([Special("<s>"), f"text {i} " + "x" * 100, Special("<e>")])
        assert remember._prompts_cost == sum(known.cost for known in remember._prompts.values()) <= 40_000
        assert remember._runs.cost <= 40_000
    assert 1 < len(remember._prompts) < 200
    remember([Special("<s>"), "text 0 " + "x" * 100, Special("<e>")])
    assert len(counting.asked) == 201
    remember([Special("<s>"), "y" * 20_000, Special("<e>")])
    assert remember._prompts_cost <= 40_000


def test_a_special_token_that_the_vocabulary_lacks() -> None:
    remember, counting = encoder()
    prompt = remember(["a", Special("<none>", optional=True), "b"])
    assert prompt.key == b"a<none>b" and counting.asked == ["a<none>b"]
    with pytest.raises(ValueError, match="the vocabulary of test has no special token '<none>'"):
        remember(["a", Special("<none>")])


def test_keys() -> None:
    remember, _ = encoder()
    prompt = remember([Special("<s>"), "é\ud83d\ude00\ud800", Special("<e>")])
    assert prompt.key == special_key(1000) + "é\U0001f600\ufffd".encode() + special_key(1001)
    assert special_key(1000) == b"\xff\xe8\x03\x00\x00"
    assert remember([]).key == b"" and len(remember([]).ids) == 0
    assert well_formed("\ud83d\ude00") == "\U0001f600"


def test_the_same_prompt_again_is_the_same_one_and_stays_the_latest() -> None:
    encode, counting = encoder()
    prompts: list[list[Segment]] = [[Special("<s>"), text, Special("<e>"), "assistant\n"] for text in ("a", "b")]
    first, other = encode(prompts[0]), encode(prompts[1])
    asked = len(counting.asked)
    assert encode(list(prompts[0])) is first and encode(prompts[1]) is other and encode(prompts[0]) is first
    assert len(counting.asked) == asked
    assert next(reversed(encode._prompts.values())).prompt is first
