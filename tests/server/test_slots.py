"""Which slot a prompt goes to."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ds4.server.kvpolicy import KvConfig
from ds4.server.kvstore import KvStore
from ds4.server.reuse import LiveText, Lookup, Query, Reuse, probe
from ds4.server.slots import STALE_SECONDS, Route, Slots, describe, score
from ds4.testing import ScriptedEngine
from ds4.testing.engine import ScriptedSession

NOW = 100_000.0
SYSTEM = list(range(1000, 1400))


def make(*slots: tuple[list[int], float] | None, prompts: tuple[int, ...] = (), rewinds: bool = True) -> Slots:
    """Each slot as (live tokens, idle seconds), None for an empty one; `prompts` are their last prompts' lengths."""
    made = Slots(ScriptedEngine(rewinds=rewinds), len(slots))
    for index, state in enumerate(slots):
        if state is None:
            continue
        tokens, idle = state
        made[index].session.sync(tokens)
        made[index].prompt_tokens = prompts[index] if index < len(prompts) else len(tokens)
        made[index].last_used = NOW - idle
    return made


def route(slots: Slots, prompt: list[int]) -> Route:
    found = slots.route(Query(np.array(prompt, np.int32)), NOW)
    assert found is not None
    return found


def own(n: int, base: int) -> list[int]:
    return list(range(base, base + n))


def test_the_conversation_that_goes_on_comes_first() -> None:
    slots = make((own(50, 0), 10.0), None, (own(200, 5000), 10.0), (own(20, 0), 10.0))
    found = route(slots, [*own(200, 5000), 7, 8])
    assert (found.slot.index, found.reuse.kind, found.reuse.tokens) == (2, "memory-token", 200)
    longest = route(slots, [*own(50, 0), 7, 8])
    assert (longest.slot.index, longest.reuse.tokens) == (0, 50)


def test_a_foreign_request_prefers_empty_then_stale_then_shortest() -> None:
    foreign = own(30, 90_000)
    recent_long, recent_short = (own(500, 0), 5.0), (own(100, 1000), 60.0)
    stale, staler = (own(900, 2000), STALE_SECONDS + 1), (own(50, 3000), STALE_SECONDS + 500)
    assert route(make(recent_long, recent_short, stale, staler, None), foreign).slot.index == 4
    assert route(make(recent_long, recent_short, stale, staler), foreign).slot.index == 3
    assert route(make(recent_long, recent_short, stale), foreign).slot.index == 2
    assert route(make(recent_long, recent_short), foreign).slot.index == 1
    almost = (own(10, 4000), STALE_SECONDS - 1)
    assert route(make(recent_long, almost, stale), foreign).slot.index == 2, "stale from one hour on"


def test_equal_scores_go_to_the_lower_index() -> None:
    foreign = own(30, 90_000)
    assert route(make(None, None, None), foreign).slot.index == 0
    assert route(make((own(9, 0), 5.0), (own(9, 100), 5.0)), foreign).slot.index == 0


def test_a_returning_owner_finds_a_stale_slot() -> None:
    slots = make((own(300, 0), 10 * STALE_SECONDS), None)
    assert route(slots, [*own(300, 0), 7]).slot.index == 0


@pytest.mark.parametrize("rewinds", [True, False])
def test_parallel_sub_agents_leave_the_main_conversation_alone(rewinds: bool) -> None:
    main = [*SYSTEM, *own(3000, 0)]
    slots = make((main, 1.0), None, None, None, rewinds=rewinds)
    for agent in range(3):
        found = route(slots, [*SYSTEM, *own(20, 50_000 + 100 * agent)])
        assert found.slot.index == 1 + agent
        assert found.reuse.kind == ("fork" if rewinds else "none")
        found.slot.session.sync([*SYSTEM, *own(20, 50_000 + 100 * agent)])
        found.slot.prompt_tokens = 420
        found.slot.last_used = NOW - 1.0
    again = route(slots, [*main, 7])
    assert (again.slot.index, again.reuse.tokens) == (0, len(main))


def test_a_new_conversation_takes_the_empty_slot_however_much_it_shares() -> None:
    shared = own(11_000, 0)
    slots = make(([*shared, 1, 2, 3], 1.0), None)
    found = route(slots, [*shared, 4, 5])
    assert (found.slot.index, found.reuse.kind, found.reuse.tokens) == (1, "fork", 11_000)


def test_without_an_empty_slot_the_least_loss_counts() -> None:
    shared = own(11_000, 0)
    slots = make(([*shared, *own(1000, 20_000)], 1.0), (own(5000, 50_000), 1.0))
    found = route(slots, [*shared, 99_999])
    assert (found.slot.index, found.reuse.kind) == (0, "memory-rewind"), "1000 tokens lost instead of 5000"
    slots = make(([*shared, *own(9000, 20_000)], 1.0), (own(5000, 50_000), 1.0))
    found = route(slots, [*shared, 99_999])
    assert (found.slot.index, found.reuse.kind, found.reuse.tokens) == (1, "fork", 11_000)


def test_asking_again_rewinds_the_own_answer_only() -> None:
    prompt = own(400, 0)
    slots = make(None, ([*prompt, *own(300, 9000)], 1.0), prompts=(0, 400))
    again = route(slots, prompt)
    assert (again.slot.index, again.reuse.kind, again.reuse.tokens) == (1, "memory-rewind", 399)
    other_answer = route(slots, [*prompt, 9000, 9001, 7, 7])
    assert (other_answer.slot.index, other_answer.reuse.tokens) == (1, 402)
    shorter = route(slots, prompt[:100])
    assert (shorter.slot.index, shorter.reuse.kind, shorter.reuse.tokens) == (0, "fork", 99)


def test_busy_slots_are_never_chosen_but_can_be_forked_from() -> None:
    slots = make((own(300, 0), 1.0), (own(10, 5000), 1.0))
    slots[0].generation = SimpleNamespace(restoring=None)  # type: ignore[assignment]
    found = route(slots, [*own(300, 0), 7])
    assert (found.slot.index, found.reuse.kind, found.reuse.source) == (1, "fork", slots[0])
    slots[1].generation = SimpleNamespace(restoring=None)  # type: ignore[assignment]
    assert slots.route(Query(np.array([1], np.int32)), NOW) is None
    assert slots.n_busy == 2


def test_the_order_of_scores() -> None:
    slots = make((own(1000, 0), 0.0), (own(1000, 0), STALE_SECONDS), (own(1000, 0), 1e9), None, prompts=(900, 900, 900))
    recent, stale, ancient, empty = slots
    nothing = Reuse("none", 0, in_place=False)
    order = [
        score(recent, Reuse("memory-token", 1000), NOW),
        score(recent, Reuse("memory-rewind", 950), NOW),
        score(empty, nothing, NOW),
        score(ancient, nothing, NOW),
        score(stale, nothing, NOW),
        score(recent, Reuse("memory-rewind", 500), NOW),
        score(recent, nothing, NOW),
    ]
    assert order == sorted(order, reverse=True)
    assert len(set(order)) == len(order)


def test_the_decision_is_one_line() -> None:
    shared = own(200, 0)
    slots = make((shared, 10.0), (own(70, 5000), 7200.0))
    slots[0].generation = SimpleNamespace(restoring=None)  # type: ignore[assignment]
    found = route(slots, [*shared, 9])
    assert describe(found, 201, NOW) == (
        "slot 1: fork of slot 0, 200 of 201 prompt tokens reused, 70 of 70 live tokens dropped (idle 7200 s, stale)"
    )


# ---- counted work: what routing compares, by bytes and by calls


class Counting(ScriptedEngine):
    """Counts the tokens that its sessions compare with a prompt's."""

    compared = 0

    def new_session(self, ctx: int | None = None) -> ScriptedSession:
        engine = self

        class Session(ScriptedSession):
            def common_prefix(self, tokens: Any, beyond: int = 0) -> int:
                found = super().common_prefix(tokens, beyond)
                engine.compared += max(found, 1)
                return found

        session = Session(len(self.sessions), ctx or self.config.ctx, rewinds=True, chunk=2048)
        self.sessions.append(session)
        return session


@pytest.mark.parametrize("what", ["goes on", "is asked again"])
def test_sixteen_times_one_history_is_compared_once(what: str) -> None:
    """Sixteen choices of one long prompt: only the one that goes on is compared as a whole, its text not even once
    for each slot. Work does not grow with the number of sessions that hold the same."""
    history = bytes(random.Random(1).choices(range(97, 123), k=20_000))
    engine = Counting(ctx=1 << 16)
    slots = Slots(engine, 16)
    for slot in slots:
        drawn = b"answer %04d" % slot.index * (5 + slot.index)
        slot.session.sync([*history, *drawn])
        slot.prompt_tokens = len(history)
        slot.asked = LiveText(history, len(history), last=history[-1])
        slot.text = LiveText(history, len(history) + len(drawn), drawn)
    key = history if what == "is asked again" else history + b"answer 0007" * 12 + b" and now?"
    query = Query(np.frombuffer(key, np.uint8).astype(np.int32), key)
    engine.compared = 0
    found = slots.route(query, NOW)
    assert found is not None
    assert (found.slot.index, found.reuse.tokens) == ((0, 19_999) if what == "is asked again" else (7, 20_132))
    assert engine.compared <= len(key) + 2 * 16
    lookup = Lookup(query, slots)
    for slot in slots:
        probe(slot, lookup)
    assert lookup.compared_bytes <= len(history)


def test_routing_does_not_hash_for_a_checkpoint_that_promises_no_more(tmp_path: Path) -> None:
    engine = ScriptedEngine(ctx=1 << 16)
    store = KvStore(KvConfig(tmp_path / "kv", min_tokens=16), engine)
    history = bytes(random.Random(2).choices(range(97, 123), k=5000))
    for size in (1000, 4000):
        session = engine.new_session()
        session.sync(list(history[:size]))
        assert store.offer(session, history[:size], "cold")
    store.flush()
    slots = Slots(engine, 2, store)
    slots[0].session.sync(list(history[:4500]))
    query = Query(np.frombuffer(history, np.uint8).astype(np.int32), history)
    found = slots.route(query, NOW)
    assert found is not None and found.reuse.kind == "memory-token"
    assert store.hashed_bytes == 0
    slots[0].session.clear()
    found = slots.route(query, NOW)
    assert found is not None and (found.reuse.kind, found.reuse.tokens) == ("disk-text", 4000)
    assert store.hashed_bytes == 4000, "once for all slots"
    store.close()
