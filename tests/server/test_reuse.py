"""The reuse ladder: what a slot keeps of a prompt, and that what was promised is what is done."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ds4.errors import SessionInvalidError
from ds4.server.reuse import NOTHING, Bound, LiveText, Lookup, Query, Visible, materialise, probe, settle
from ds4.server.slots import Slot, Slots
from ds4.server.snapshots import Snapshot
from ds4.server.types import Continuation
from ds4.testing import ScriptedEngine
from ds4.testing.tokenizer import ScriptedTokenizer
from tests.support.agents import DIALECTS, TRACES, Ours, scripted


def query(*tokens: int) -> Query:
    return Query(np.array(tokens, np.int32))


def slots_with(*histories: list[int], rewinds: bool = True, slack: int = 0) -> Slots:
    slots = Slots(ScriptedEngine(rewinds=rewinds, slack=slack), len(histories))
    for slot, history in zip(slots, histories, strict=True):
        slot.session.sync(history) if history else slot.session.clear()
    return slots


@pytest.mark.parametrize(
    ("live", "prompt", "rewinds", "kind", "tokens"),
    [
        ([], [1, 2, 3], True, "none", 0),
        ([1, 2], [1, 2, 3], True, "memory-token", 2),
        ([1, 2], [1, 2, 3], False, "memory-token", 2),
        ([1, 2, 9], [1, 2, 3], True, "memory-rewind", 2),
        ([1, 2, 9], [1, 2, 3], False, "none", 0),
        ([1, 2, 3], [1, 2, 3], True, "memory-rewind", 2),
        ([1, 2, 3], [1, 2, 3], False, "none", 0),
        ([1, 2, 3, 4, 5], [1, 2, 3], True, "memory-rewind", 2),
        ([1, 2, 3, 4, 5], [1, 2, 3], False, "none", 0),
        ([9, 2, 3], [1, 2, 3], True, "none", 0),
        ([1], [1], True, "none", 0),
        ([1, 2], [1], True, "none", 0),
    ],
)
def test_live_tiers(live: list[int], prompt: list[int], rewinds: bool, kind: str, tokens: int) -> None:
    slot = slots_with(live, rewinds=rewinds)[0]
    reuse = probe(slot, Lookup(query(*prompt)))
    assert (reuse.kind, reuse.tokens) == (kind, tokens)
    assert slot.session.tokens.tolist() == live, "a probe changes nothing"
    assert materialise(slot, query(*prompt), reuse) == reuse
    assert slot.session.tokens.tolist() == prompt[:tokens]


def test_a_prompt_that_is_live_as_a_whole_is_looked_for_nowhere_else() -> None:
    class Store:
        asked = 0

        def find(self, key: bytes, beyond: int) -> None:
            self.asked += 1

    store = Store()
    slots = slots_with([1, 2, 3, 4], [1, 2, 3])
    assert probe(slots[0], Lookup(query(1, 2, 3), slots, cast(Any, store))).kind == "memory-rewind"
    assert store.asked == 0
    assert probe(slots[0], Lookup(query(1, 2, 9, 9), slots, cast(Any, store))).tokens == 2
    assert store.asked == 1
    # What the client saw stands for the state, whatever its tokens have in common with the prompt.
    slots[0].visible = Visible(b"seen", 4, "thinking-visible")
    kept = probe(slots[0], Lookup(Query(np.array([1, 2, 3], np.int32), b"seen and more"), slots, cast(Any, store)))
    assert (kept.kind, kept.tokens) == ("thinking-visible", 4)


def test_fork_takes_the_longest_prefix_of_another_slot() -> None:
    shared = list(range(100))
    slots = slots_with([], [*shared[:60], 500], [*shared, 700, 701])
    prompt = query(*shared, 1000, 1001)
    reuse = probe(slots[0], Lookup(prompt, slots))
    assert (reuse.kind, reuse.tokens, reuse.source) == ("fork", 100, slots[2])
    assert not reuse.in_place
    materialise(slots[0], prompt, reuse)
    assert slots[0].session.tokens.tolist() == shared
    assert slots[2].session.tokens.tolist() == [*shared, 700, 701], "the source is left alone"


def test_fork_is_for_more_than_a_few_tokens() -> None:
    slots = slots_with([], list(range(32)), [])
    prompt = query(*range(200))
    assert probe(slots[0], Lookup(prompt, slots)).kind == "none"
    slots[1].session.sync(list(range(33)))
    assert probe(slots[0], Lookup(prompt, slots)).kind == "fork"
    slots[0].session.sync([0])
    assert probe(slots[0], Lookup(prompt, slots)).kind == "memory-token", "not worth 32 tokens more"


def test_fork_needs_a_family_that_can_be_cut_or_the_whole_other_slot() -> None:
    shared = list(range(100))
    slots = slots_with([], [*shared, 7], shared, rewinds=False)
    reuse = probe(slots[0], Lookup(query(*shared, 1000), slots))
    assert (reuse.kind, reuse.tokens, reuse.source) == ("fork", 100, slots[2])
    slots[2].session.clear()
    assert probe(slots[0], Lookup(query(*shared, 1000), slots)) == NOTHING


@pytest.mark.parametrize("seed", range(20))
def test_what_a_decision_has_found_out_changes_no_answer(seed: int) -> None:
    """One look-up for all slots against a new one for each, whatever was asked for before."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    common = [rng.randrange(97, 123) for _ in range(200)]

    def history() -> list[int]:
        return common[: rng.choice((0, 10, 33, 40, 70, 150))] + [
            rng.randrange(97, 123) for _ in range(rng.randrange(40))
        ]

    slots = slots_with(*(history() for _ in range(6)), rewinds=seed % 2 == 0, slack=64)
    asked = query(*history(), 1)
    lookup = Lookup(asked, slots)
    for beyond in [rng.choice((0, 0, 5, 20, 60)) for _ in range(12)]:
        slot = rng.choice(list(slots))
        found, fresh = probe(slot, lookup, beyond), probe(slot, Lookup(asked, slots), beyond)
        assert (found.kind, found.tokens) == (fresh.kind, fresh.tokens)


def test_sources_are_looked_for_once_in_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = slots_with(*([i] * 50 for i in range(8)))
    lookup, reached = Lookup(query(*[99] * 50), slots), Counter[int]()
    reach = lookup.reach

    def counted(slot: Slot, beyond: int = 0) -> object:
        reached[slot.index] += 1
        return reach(slot, beyond)

    monkeypatch.setattr(lookup, "reach", counted)
    assert {probe(slot, lookup) for slot in slots} == {NOTHING}
    assert set(reached.values()) == {2}, "each slot's own, and once as a source for all"


def test_a_tier_that_fails_after_all_leaves_an_empty_session(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = slots_with([1, 2, 9])[0]
    reuse = probe(slot, Lookup(query(1, 2, 3)))
    assert reuse.kind == "memory-rewind"

    def fails(n_tokens: int) -> None:
        raise SessionInvalidError("lost")

    monkeypatch.setattr(slot.session, "rewind", fails)
    assert materialise(slot, query(1, 2, 3), reuse) == NOTHING
    assert slot.session.n_tokens == 0


def remember(slot: Slot, rng: random.Random, names: Sequence[LiveText] = ()) -> None:
    """Copies of the session as it was at a few places, with the names of those that have one."""
    live = slot.session.tokens.tolist()
    engine = ScriptedEngine(rewinds=False, slack=rng.choice([0, 10, 40]))
    known = [name.tokens for name in names if name.tokens <= len(live)]
    for length in sorted({rng.choice(known or [1]), *(rng.randrange(1, len(live) + 1) for _ in range(3))}):
        session = engine.new_session()
        session.append(live[:length])
        slot.past.add(Snapshot(session, tuple(name for name in names if name.tokens == length)), 4)


def past_of(slot: Slot) -> list[tuple[list[int], tuple[LiveText, ...]]]:
    return [(snapshot.session.tokens.tolist(), snapshot.names) for snapshot in slot.past]


def check_past(slot: Slot) -> None:
    live = slot.session.tokens.tolist()
    for tokens, names in past_of(slot):
        assert tokens == live[: len(tokens)], "snapshots are beginnings of the session"
        assert all(name.tokens <= len(tokens) for name in names)


@pytest.mark.parametrize("seed", range(20))
def test_routing_and_execution_agree(seed: int) -> None:
    """For random slots the tier that routing chose is the one that is carried out, to the token."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    kinds: set[tuple[str, bool]] = set()
    for _ in range(60):
        trunk = [rng.randrange(4) for _ in range(120)]

        def branch(trunk: list[int] = trunk) -> list[int]:
            return trunk[: rng.randrange(121)] + [rng.randrange(4) for _ in range(rng.choice([0, 0, 1, 5, 50]))]

        slots = slots_with(
            *(branch() if rng.random() < 0.7 else [] for _ in range(4)),
            rewinds=rng.random() < 0.4,
            slack=rng.choice([0, 10]),
        )
        for slot in slots:
            slot.prompt_tokens = rng.randrange(slot.session.n_tokens + 1)
            if slot.session.n_tokens and rng.random() < 0.6:
                remember(slot, rng)
        prompt = query(*branch(), rng.randrange(4))
        before = [slot.session.tokens.tolist() for slot in slots]
        past = [past_of(slot) for slot in slots]
        route = slots.route(prompt, now=0.0)
        assert route is not None
        assert route.reuse == probe(route.slot, Lookup(prompt, slots))
        assert materialise(route.slot, prompt, route.reuse) == route.reuse
        assert route.slot.session.tokens.tolist() == prompt.prompt[: route.reuse.tokens].tolist()
        assert route.reuse.tokens < len(prompt.prompt)
        for slot in slots:
            check_past(slot)
            if slot is not route.slot:
                assert slot.session.tokens.tolist() == before[slot.index] and past_of(slot) == past[slot.index]
        kinds.add((route.reuse.kind, route.reuse.state is not None))
    assert len(kinds) >= 4 and ("memory-rewind", True) in kinds, kinds


def tiers(name: str, dialect: str) -> dict[str, int]:
    """How many prompts of a trace each tier serves."""
    results = {
        "chat": "memory-text",
        "responses": "responses-visible",  # the first of two that keep all
        "messages": "anthropic-tool-output",
    }[dialect]
    visible = "responses-visible" if dialect == "responses" else "thinking-visible"
    # A user's turn behind calls answers none.
    after_calls = {"chat": "memory-text", "responses": "responses-visible", "messages": "memory-text"}[dialect]
    loop = Counter({"none": 1, results: 6}) + Counter([after_calls])
    return {
        "main agent, 3 sub-agents": Counter({"none": 1, "fork": 3, results: 10}),
        "tool loop, parallel results": loop,
        "JSON keys in another order": loop,
        "thinking dropped, tools": Counter({"none": 1, visible if dialect == "chat" else results: 6})
        + Counter([visible]),
        "thinking dropped, no tools": Counter({"none": 1, visible: 4, "fork": 1}),
        "regenerate": Counter({"none": 1, "memory-rewind": 1, visible: 3, "memory-text": 2}),
        "edit of an earlier turn": Counter({"none": 1, visible: 3, "fork": 1}),
        "compaction": Counter({"none": 1, visible: 4, "fork": 1}),
        # Twice in a session that holds the system prompt and little else, then always one that the disk has.
        "7 conversations, 4 sessions": Counter({"none": 1, "fork": 3, "memory-rewind": 3, "disk-text": 21}),
        "restart in the middle": Counter({"none": 1, "fork": 1, results: 4, "disk-text": 2}),
    }[name]


def check_trace(name: str, dialect: str, directory: Path | None, **sessions: Any) -> None:
    trace, habits, limit = TRACES[name]
    client = DIALECTS[dialect](**habits)
    client.server = Ours(lambda: scripted(**sessions), directory, 4)
    try:
        trace(client, random.Random(1), "You are an agent that edits files with care. " * 40)
    finally:
        client.server.stop()
    counter = client.counter
    print(f"{counter.evaluated} evaluated, {counter.ideal} needed; {client.server.tiers}")
    assert counter.ratio <= limit
    assert client.server.tiers == tiers(name, dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", TRACES)
def test_agents_hit_the_tiers_that_are_made_for_them(name: str, dialect: str, tmp_path: Path) -> None:
    check_trace(name, dialect, tmp_path)


@pytest.mark.parametrize("name", ["main agent, 3 sub-agents", "regenerate", "edit of an earlier turn", "compaction"])
def test_rings_need_neither_more_nor_a_disk(name: str) -> None:
    """Sessions that cannot be cut back far keep what these clients go back to."""
    check_trace(name, "chat", None, rewinds=False, slack=128, snapshots=4)


def in_pieces(tokenizer: ScriptedTokenizer, text: bytes, rng: random.Random) -> list[int]:
    """The text in tokens that `encode` would not make."""
    tokens = []
    while text:
        size = rng.randrange(1, 5)
        tokens.append(tokenizer.piece_id(text[:size]))
        text = text[size:]
    return tokens


@pytest.mark.parametrize("seed", range(20))
def test_routing_and_execution_agree_where_text_decides(seed: int) -> None:
    """Whatever is kept: the prompt that goes on stands for the request's text, and begins with the kept state."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    kinds: set[tuple[str, bool, bool]] = set()
    for _ in range(60):
        engine = ScriptedEngine(rewinds=rng.random() < 0.4, slack=rng.choice([0, 10]))
        tokenizer = engine.tokenizer
        assert isinstance(tokenizer, ScriptedTokenizer)
        trunk = bytes(rng.choices(b"ab", k=300))

        def branch(trunk: bytes = trunk) -> bytes:
            return trunk[: rng.randrange(301)] + bytes(rng.choices(b"ab", k=rng.choice([0, 0, 1, 5, 50])))

        slots = Slots(engine, 4)
        for slot in slots:
            asked, drawn = branch(), bytes(rng.choices(b"ab", k=rng.choice([0, 60])))
            first = in_pieces(tokenizer, asked, rng) if rng.random() < 0.7 else list(asked)
            tokens = first + in_pieces(tokenizer, drawn, rng)
            slot.session.sync(tokens) if tokens else slot.session.clear()
            slot.prompt_tokens = len(first)
            if rng.random() < 0.8:
                slot.text = LiveText(asked + drawn, len(tokens))
                slot.asked = LiveText(asked, len(first), last=first[-1] if first else -1)
            if rng.random() < 0.3 and len(tokens) > len(first):
                slot.bound = Bound(f"turn {slot.index % 2}", len(tokens), tuple(drawn[:1]) * rng.randrange(2))
            if rng.random() < 0.2:
                slot.visible = Visible(trunk[: rng.randrange(300)], len(tokens), "thinking-visible")
            if tokens and rng.random() < 0.7:
                names = [LiveText(asked, len(first), last=first[-1] if first else -1)]
                remember(slot, rng, names if asked else ())
        key = rng.choice([slot.asked.key for slot in slots if slot.asked] or [trunk])
        key = rng.choice([key, branch() + b"b", trunk + b"ab" * 20]) or b"a"
        answers = None
        if rng.random() < 0.3:
            required = rng.random() < 0.3 and any(slot.bound for slot in slots)
            turn = rng.choice([slot.bound.turn for slot in slots if slot.bound] or ["turn 2"])
            answers = Continuation("responses-tool-output", turn, b"ab", required=required)
        prompt = Query(np.frombuffer(key, np.uint8).astype(np.int32), key, answers)
        before = [slot.session.tokens.tolist() for slot in slots]
        past = [past_of(slot) for slot in slots]
        route = slots.route(prompt, now=0.0)
        assert route is not None
        slot, reuse = route.slot, route.reuse
        assert reuse == probe(slot, Lookup(prompt, slots))
        assert materialise(slot, prompt, reuse) == reuse
        settled = settle(slot, prompt, reuse, tokenizer)  # type: ignore[arg-type]
        assert settled is not None
        kept, goes_on = settled
        assert slot.session.n_tokens == kept.tokens < len(goes_on.prompt)
        assert goes_on.prompt[: kept.tokens].tolist() == slot.session.tokens.tolist()
        source = slot if kept.source is None else kept.source
        assert slot.session.tokens.tolist() == before[source.index][: kept.tokens], (
            "the state is a part of the source's"
        )
        if reuse.kind == "responses-tool-output":
            assert answers is not None and slot.bound is not None and slot.bound.turn == answers.turn
            held = tokenizer.decode(before[slot.index]) + bytes(slot.bound.missing)
            assert tokenizer.decode(goes_on.prompt.tolist()) == held + b"ab", "the state, what it lacks, the results"
            assert answers.required or (slot.asked is not None and key.startswith(slot.asked.key))
        elif not (reuse.kind == "thinking-visible" and kept.text_bytes is not None):
            assert answers is None or not answers.required
            assert tokenizer.decode(goes_on.prompt.tolist()) == key, "the prompt says what the request says"
        for other in slots:
            check_past(other)
            if other is not slot:
                assert other.session.tokens.tolist() == before[other.index] and past_of(other) == past[other.index]
        kinds.add((kept.kind, kept.text_bytes is not None, kept.state is not None))
    assert len(kinds) >= 5, kinds


def test_a_prompt_that_is_asked_again() -> None:
    """The state is cut behind the prompt, whose tokens are the model's own; its last token is evaluated again."""
    engine = ScriptedEngine()
    tokenizer = engine.tokenizer
    assert isinstance(tokenizer, ScriptedTokenizer)
    slot = Slots(engine, 1)[0]
    key = b"x" * 4 + b"wxyz" * 50
    pieces = [*b"xxxx", *([tokenizer.piece_id(b"wxyz")] * 50)]
    slot.session.sync([*pieces, 7, 8, 9])
    slot.text, slot.asked = LiveText(key + b"\7\10\11", len(pieces) + 3), LiveText(key, len(pieces), last=pieces[-1])
    again = Query(np.frombuffer(key, np.uint8).astype(np.int32), key)
    reuse = probe(slot, Lookup(again))
    assert (reuse.kind, reuse.tokens, reuse.tail) == ("memory-text", len(pieces) - 1, (pieces[-1],))
    materialise(slot, again, reuse)
    settled = settle(slot, again, reuse, tokenizer)  # type: ignore[arg-type]
    assert settled is not None
    assert settled[1].prompt.tolist() == pieces


def test_text_is_not_cut_inside_a_character() -> None:
    engine = ScriptedEngine()
    slot = Slots(engine, 1)[0]
    key = "long enough to be worth it, and then é".encode()
    slot.session.sync([engine.tokenizer.piece_id(key[:-1])] * 40)  # type: ignore[attr-defined]
    slot.text = LiveText(key[:-1], 40)
    asked = Query(np.array([1, 2, 3], np.int32), key)
    reuse = probe(slot, Lookup(asked))
    assert reuse.kind == "memory-text"
    assert settle(slot, asked, reuse, engine.tokenizer) is None
