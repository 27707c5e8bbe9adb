"""Copies that slots keep of their sessions: which ones, what they save, and that nothing comes of them but speed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig, Row
from ds4.errors import EngineError
from ds4.prompt.types import Special
from ds4.server.config import ServerConfig
from ds4.server.reuse import NOTHING, LiveText, Lookup, Query, materialise, probe
from ds4.server.slots import Slot, Slots, describe
from ds4.server.snapshots import Past, Snapshot, Snapshots
from ds4.testing import Script, ScriptedEngine, ScriptedSession, hash_model
from ds4.testing.driver import Driver
from tests.support.engines import opened
from tests.support.running_server import RunningServer, Serve
from tests.support.tiny_deepseek4 import tiny

SLACK = 128


def ring_engine(*scripts: Any, snapshots: int = 4, slack: int = SLACK, **fields: Any) -> ScriptedEngine:
    """Sessions that can be cut by no more than `slack` tokens."""
    return ScriptedEngine(*scripts, rewinds=False, slack=slack, snapshots=snapshots, **fields)


def prefilled(driver: Driver, job: Any) -> int:
    """Tokens of the job's prompt that were evaluated."""
    end = driver.finish(job)
    return end.prompt_tokens - end.cached_tokens


def ask(server: RunningServer, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """(text, tokens of the prompt, those of them that were evaluated)"""
    body = {"messages": messages, "temperature": 0}
    answer = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    tokens = answer["usage"]["prompt_tokens"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], tokens, tokens - cached


def distinct(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(256) for _ in range(n)]


def check(driver: Driver) -> None:
    """What snapshots hold is always the beginning of what their session holds."""
    for slot in driver.scheduler.slots:
        live = slot.session.tokens.tolist()
        lengths = [snapshot.tokens for snapshot in slot.past]
        assert lengths == sorted(set(lengths))
        for snapshot in slot.past:
            assert snapshot.session.tokens.tolist() == live[: snapshot.tokens]
            assert all(name.tokens <= snapshot.tokens for name in snapshot.names)
            assert isinstance(snapshot.session, ScriptedSession) and not snapshot.session.closed


def open_snapshots(engine: ScriptedEngine, slots: int) -> int:
    return sum(not session.closed for session in engine.sessions[slots:])


# ---- what they save


def test_asking_again_after_a_long_answer_evaluates_one_token() -> None:
    driver = Driver(ring_engine(Script.text("x" * 400, 1), Script.text("y" * 400, 1)))
    prompt = distinct(random.Random(1), 700)
    driver.ask(prompt)
    again = driver.ask(prompt)
    assert prefilled(driver, again) == 1
    assert driver.text(again) == "y" * 400
    assert prefilled(driver, driver.ask(prompt)) == 1, "and once more: the copy is still there"
    check(driver)


def test_without_snapshots_it_is_evaluated_whole() -> None:
    driver = Driver(ring_engine(Script.text("x" * 400, 1), snapshots=0))
    prompt = distinct(random.Random(1), 700)
    driver.ask(prompt)
    assert prefilled(driver, driver.ask(prompt)) == 700
    assert open_snapshots(driver.engine, 1) == 0


def test_another_last_turn_goes_on_from_where_the_turn_began() -> None:
    rng = random.Random(2)
    driver = Driver(ring_engine(Script.text("x" * 400, 1), Script.text("y" * 400, 1), Script.text("z")))
    history = distinct(rng, 600)
    driver.ask(history)
    held = driver.scheduler.slots[0].session.tokens.tolist()
    turn = [*held, *distinct(rng, 300)]
    assert prefilled(driver, driver.ask(turn)) == 300
    edited = [*held, *distinct(rng, 250)]
    assert prefilled(driver, driver.ask(edited)) == 250
    check(driver)


def test_another_last_turn_of_a_history_that_was_new(serve: Serve) -> None:
    """The first request brings ten turns along; its last one is long and then edited."""
    engine = ring_engine(Script.text("x" * 400, 1), Script.text("y"), syntax="deepseek4")
    server = serve(engine, slots=1)
    history: list[dict[str, str]] = []
    for turn in range(5):
        history += [{"role": "user", "content": f"{turn} " * 60}, {"role": "assistant", "content": f"{turn}" * 60}]
    ask(server, [*history, {"role": "user", "content": "a" * 300}])
    _, tokens, new = ask(server, [*history, {"role": "user", "content": "b" * 300}])
    assert tokens > 1000 and 300 <= new < 310


def test_a_system_prompt_is_shared_with_another_slot(serve: Serve) -> None:
    """Two agents with one long system prompt: the second one forks what the first one keeps of it."""
    engine = ring_engine(Script.text("x" * 400, 1), syntax="deepseek4", slots=2)
    server = serve(engine, slots=2)
    system = {"role": "system", "content": "Be careful. " * 100}
    ask(server, [system, {"role": "user", "content": "a" * 300}])
    _, tokens, new = ask(server, [system, {"role": "user", "content": "b" * 300}])
    assert tokens > 1000 and 300 <= new < 310
    states = server.app._scheduler.slots
    assert all(slot.session.n_tokens for slot in states), "in a slot of its own"


def test_a_prompt_whose_history_holds_hidden_reasoning_is_asked_again(serve: Serve) -> None:
    """What the client sends is not what the session holds: the text decides."""
    thought = "I think of it. " * 30
    engine = ring_engine(
        [*thought, "</think>", *("yes " * 50)], [*thought, "</think>", *("no " * 150)], syntax="deepseek4"
    )
    engine.tokenizer.encode_segments([Special("</think>")])
    server = serve(engine, slots=1)
    question = {"role": "user", "content": "Is it? " * 30}
    said, _, _ = ask(server, [question])
    history = [question, {"role": "assistant", "content": said}, {"role": "user", "content": "Sure? " * 60}]
    ask(server, history)
    _, tokens, new = ask(server, history)
    assert tokens > 500 and new == 1
    history[-1] = {"role": "user", "content": "Really? " * 60}
    _, _, new = ask(server, history)
    assert 480 <= new < 490


# ---- whose they are


def test_they_go_with_what_the_session_held() -> None:
    rng = random.Random(3)
    engine = ring_engine(Script.text("x" * 300, 1))
    driver = Driver(engine)
    driver.ask(distinct(rng, 400))
    assert open_snapshots(engine, 1) == 1
    driver.ask(distinct(rng, 500))
    check(driver)
    assert open_snapshots(engine, 1) == 1, "the first conversation's is closed"
    slot = driver.scheduler.slots[0]
    slot.clear()
    assert open_snapshots(engine, 1) == 0 and len(slot.past) == 0


def test_a_failed_step_leaves_none() -> None:
    engine = ring_engine(Script.text("x" * 300, 1))
    driver = Driver(engine)
    driver.ask(distinct(random.Random(4), 400))
    engine.fail_at(engine.n_steps + 3)
    driver.ask([*driver.scheduler.slots[0].session.tokens.tolist(), 5, 6, 7])
    assert driver.scheduler.slots[0].session.n_tokens == 0
    assert open_snapshots(engine, 1) == 0


def test_they_end_with_the_server() -> None:
    engine = ring_engine(Script.text("x" * 300, 1))
    driver = Driver(engine)
    driver.ask(distinct(random.Random(4), 400))
    driver.scheduler.close()
    assert open_snapshots(engine, 0) == 0


def test_no_more_than_were_planned() -> None:
    rng = random.Random(5)
    engine = ring_engine(Script.text("x" * 200, 1), snapshots=3)
    driver = Driver(engine)
    prompt = distinct(rng, 900)
    for _ in range(6):
        driver.ask(prompt)
        check(driver)
        assert open_snapshots(engine, 1) <= 3
        prompt = [*driver.scheduler.slots[0].session.tokens.tolist(), *distinct(rng, 200)]


def test_a_copy_that_fails_costs_speed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    engine = ring_engine(Script.text("x" * 300, 1))
    driver = Driver(engine)

    def fails(self: ScriptedSession, other: ScriptedSession, n_tokens: int | None = None) -> None:
        raise EngineError("no memory")

    monkeypatch.setattr(ScriptedSession, "fork_from", fails)
    prompt = distinct(random.Random(6), 400)
    for _ in range(2):
        assert driver.text(driver.ask(prompt)) == "x" * 300
    assert prefilled(driver, driver.ask(prompt)) == 400
    assert "no snapshot of 400 tokens: no memory" in caplog.text
    assert open_snapshots(engine, 1) == 0


def test_memory_that_is_short_is_theirs_first(caplog: pytest.LogCaptureFixture) -> None:
    engine = ring_engine(Script.text("x" * 300, 1))
    driver = Driver(engine, slots=2)
    prompts = [distinct(random.Random(seed), 400) for seed in (7, 8)]
    for prompt in prompts:
        driver.ask(prompt)
    assert open_snapshots(engine, 2) == 2
    engine.memory_left = engine.plan.snapshot_bytes - 1
    driver.clock.now += 10
    assert prefilled(driver, driver.ask(prompts[0])) == 1, "what is there still serves this one"
    assert open_snapshots(engine, 2) == 0
    assert "memory is short" in caplog.text
    engine.memory_left = None
    driver.clock.now += 10
    driver.ask(prompts[1])
    assert open_snapshots(engine, 2) == 1


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_prompts_answers_as_without(seed: int) -> None:
    """Prompts of a tree in random order, some cancelled, in a few slots: each answer is that of its prompt alone."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = hash_model(seed, end=256)
    plain = Driver(ScriptedEngine(model=model))
    engine = ring_engine(model=model, slack=rng.choice([0, 16, 128]), snapshots=rng.randrange(1, 5))
    driver = Driver(engine, slots=2)
    known = [distinct(rng, 300)]
    saved = 0
    for _ in range(40):
        base = rng.choice(known[-6:])
        prompt = rng.choice([base, base[: rng.randrange(1, len(base))] + distinct(rng, rng.randrange(1, 200))])
        job = driver.submit(prompt, max_tokens=rng.choice([1, 50, 300]))
        if rng.random() < 0.2:
            driver.steps(rng.randrange(1, 4))
            driver.scheduler.cancel(job)
            driver.run()
        else:
            driver.run()
            plain.scheduler.slots[0].clear()
            plain.scheduler.slots[0].forget()
            wanted = plain.ask(prompt, max_tokens=job.request.max_tokens)
            assert driver.text(job) == plain.text(wanted)
            end = driver.finish(job)
            saved += end.cached_tokens
        known.append(driver.scheduler.slots[rng.randrange(2)].session.tokens.tolist() or base)
        check(driver)
        assert open_snapshots(engine, 2) <= 2 * engine.plan.snapshots
    assert saved > 0


def test_a_snapshot_of_something_else_is_never_gone_on_with() -> None:
    """Whatever went wrong before: the tokens decide."""
    engine = ring_engine()
    slots = Slots(engine, 1)
    slot = slots[0]
    slot.session.append(list(range(200)) * 3)
    other = engine.new_session()
    other.append([7] * 400)
    slot.past.add(Snapshot(other), 4)
    query = Query(np.array([*(list(range(200)) * 2), 1, 2, 3], np.int32))
    reuse = probe(slot, Lookup(query, slots))
    assert (reuse.kind, reuse.tokens, reuse.state) == ("memory-rewind", 400, other)
    assert materialise(slot, query, reuse) == NOTHING
    assert slot.session.n_tokens == 0 and len(slot.past) == 0


# ---- which ones are kept


def past_of(*lengths: int, most: int, slack: int = 0) -> Past:
    engine = ring_engine(slack=slack)
    past, tokens = Past(), list(range(256)) * 40
    for length in lengths:
        session = engine.new_session()
        session.append(tokens[:length])
        past.add(Snapshot(session), most)
    return past


@pytest.mark.parametrize(
    ("lengths", "most", "kept"),
    [
        ((100, 200, 300), 4, [100, 200, 300]),
        ((4000, 4200, 4280, 4450, 4500), 4, [4000, 4200, 4450, 4500]),
        ((1000, 1010, 3000), 2, [1000, 3000]),
        ((100, 200), 1, [200]),
        ((4000, 4100, 4200, 4300, 4400, 4500), 3, [4000, 4300, 4500]),
    ],
)
def test_the_least_useful_one_goes(lengths: tuple[int, ...], most: int, kept: list[int]) -> None:
    assert [snapshot.tokens for snapshot in past_of(*lengths, most=most)] == kept


def test_where_an_earlier_turn_begins_is_worth_more_than_where_its_answer_does() -> None:
    engine, past = ring_engine(slack=0), Past()
    for tokens, turn in ((4000, True), (4290, False), (4520, True), (4770, False), (5000, True), (5250, False)):
        session = engine.new_session()
        session.append([7] * tokens)
        past.add(Snapshot(session, turn=turn), 4)
    assert [snapshot.tokens for snapshot in past] == [4000, 4520, 5000, 5250]


def test_one_stands_for_all_that_it_can_be_cut_to() -> None:
    past = past_of(100, most=4, slack=50)
    (old,) = past
    old.name([LiveText(b"early", 100), LiveText(b"too early", 20)])
    assert [name.tokens for name in old.names] == [100]
    session = ring_engine(slack=50).new_session()
    session.append(list(range(140)))
    past.add(Snapshot(session, (LiveText(b"late", 140),)), 4)
    assert [(s.tokens, [n.key for n in s.names]) for s in past] == [(140, [b"early", b"late"])]
    past.cut(120)
    assert [(s.tokens, [n.key for n in s.names]) for s in past] == [(120, [b"early"])]
    past.cut(80)
    assert len(past) == 0


def test_the_log_says_that_a_snapshot_served() -> None:
    driver = Driver(ring_engine(Script.text("x" * 300, 1)), slots=2)
    prompt = distinct(random.Random(9), 400)
    driver.ask(prompt)
    query = driver.submit(prompt).query
    route = driver.scheduler.slots.route(query, driver.clock.now)
    assert route is not None
    assert describe(route, 400, driver.clock.now).startswith(
        "slot 0: memory-rewind (snapshot), 399 of 400 prompt tokens reused, 301 of 700 live tokens dropped"
    )


# ---- the families that need them


@pytest.fixture(scope="module", params=["flash", "pro"])
def tiny_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tiny(request.param).write_hf(tmp_path_factory.mktemp("snapshots") / request.param)
    engine = Engine.open(EngineConfig(model=path, backend="cpu", ctx=2048, threads=2, snapshots=4))
    yield engine
    engine.close()


def run(engine: Engine, slot: Slot, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Evaluates what the session lacks; the logits behind it."""
    engine.step([Row(slot.session, tokens[slot.session.n_tokens :], want_logits=True)])
    return slot.session.logits()


def test_a_tiny_model_goes_back_bit_for_bit(tiny_engine: Engine) -> None:
    """Regenerate, another last turn, and a fork, each 400 tokens after the copy was made."""
    engine = tiny_engine
    assert engine.plan.snapshots == 4 and engine.plan.snapshot_bytes > 0
    rng = np.random.default_rng(11)
    tokens = rng.integers(0, engine.info.vocab_size, 1200).astype(np.int32)
    slots = Slots(engine, 2)
    snapshots = Snapshots(engine, slots, None, lambda: 0.0)
    slot = slots[0]
    run(engine, slot, tokens[:250])
    snapshots.take(slot)
    behind = run(engine, slot, tokens[:500])
    snapshots.take(slot)
    run(engine, slot, tokens[:900])
    assert not slot.session.can_rewind(500), "or the test shows nothing"
    plain = engine.new_session()
    for wanted, kept, target in (
        (np.concatenate([tokens[:500], tokens[900:1000]]), 500, 1),
        (tokens[:500], 499, 0),
        (np.concatenate([tokens[:400], tokens[1000:1100]]), 400, 0),
        (np.concatenate([tokens[:260], tokens[1000:1100]]), 250, 0),
    ):
        query = Query(wanted)
        reuse = probe(slots[target], Lookup(query, slots))
        assert reuse.tokens == kept and reuse.state is not None
        assert materialise(slots[target], query, reuse) == reuse
        got = run(engine, slots[target], wanted)
        plain.clear()
        engine.step([Row(plain, wanted, want_logits=True)])
        assert np.array_equal(got, plain.logits())
        if kept == 499:
            assert np.array_equal(got, behind)
        run(engine, slot, np.concatenate([slot.session.tokens, tokens[:300]]))
    slots.close()
    plain.close()


def chat(server: RunningServer, messages: list[dict[str, str]], **fields: Any) -> tuple[str, int, int]:
    """(text, tokens of the prompt that were evaluated, tokens of the answer)"""
    body = {"messages": messages, "temperature": 0, "reasoning_effort": "none", "ignore_eos": True, **fields}
    answer = server.http.post("/v1/chat/completions", json=body, timeout=600).raise_for_status().json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], usage["prompt_tokens"] - cached, usage["completion_tokens"]


def test_a_trained_model_asks_again_and_edits(tmp_path: Path) -> None:
    config = EngineConfig(ctx=2048, slots=1, threads=2, snapshots=4)
    with opened(config, "v4-nano") as engine:
        server = RunningServer(engine, ServerConfig(engine=config, port=0))
        try:
            history = [
                {"role": "system", "content": "You are the clerk of a small library. " * 10},
                {"role": "user", "content": "Tell me about the books. " * 10},
            ]
            first, _, made = chat(server, history, max_tokens=400)
            again, new, _ = chat(server, history, max_tokens=60)
            assert made == 400 and new == 1 and again and first.startswith(again)
            longer = [*history, {"role": "assistant", "content": first}, {"role": "user", "content": "And? " * 60}]
            second, _, _ = chat(server, longer, max_tokens=160)
            edited = [*longer[:-1], {"role": "user", "content": "Why? " * 60}]
            third, renewed, _ = chat(server, edited, max_tokens=60)
            turn = len(engine.tokenizer.encode("Why? " * 60))
            assert turn <= renewed <= turn + 8, "the turn and what stands around it"
        finally:
            server.stop()
        plain = RunningServer(engine, ServerConfig(engine=config, port=0))
        try:
            for messages, said in ((history, again), (longer, second), (edited, third)):
                slot = plain.app._scheduler.slots[0]
                slot.clear()
                slot.forget()
                text, new, _ = chat(plain, messages, max_tokens=60)
                assert said.startswith(text) and new > 100
        finally:
            plain.stop()
