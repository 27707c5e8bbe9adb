"""Checkpoints through the scheduler: what is stored when, and that a restart changes nothing but the time."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from ds4.errors import CheckpointError
from ds4.prompt.registry import SYNTAXES
from ds4.prompt.types import Conversation, Message
from ds4.server import kvfile, kvstore
from ds4.server.checkpoints import Checkpoints
from ds4.server.generation import Job
from ds4.server.keys import markers_of
from ds4.server.kvpolicy import KvConfig
from ds4.server.kvstore import KvStore
from ds4.server.reuse import Lookup, Query, probe
from ds4.server.tool_memory import ToolMemory
from ds4.server.types import Failed, PrefillProgress
from ds4.testing import ScriptedEngine, hash_model
from ds4.testing.driver import Driver

MIN = 64


class Machine:
    """A server's engine side that can be shut down and started again over one directory."""

    def __init__(
        self,
        directory: Path,
        *,
        slots: int = 1,
        rewinds: bool = True,
        snapshots: int = 0,
        script: Any = None,
        **fields: Any,
    ) -> None:
        self.directory = directory
        self.sessions: dict[str, Any] = {"rewinds": rewinds, "snapshots": snapshots, "slack": 16 if snapshots else 0}
        self.fields = {"min_tokens": MIN, "boundary_align": 0, "continued_interval": 0, **fields}
        self.slots, self.script = slots, script
        self.running = False
        self.start()

    def start(self) -> None:
        end = ScriptedEngine().tokenizer.eos_ids[0]
        scripts = {"model": hash_model(1, end=end)} if self.script is None else {}
        args = () if self.script is None else (self.script,)
        self.engine = ScriptedEngine(*args, slots=self.slots, ctx=8192, **self.sessions, **scripts)
        self.store = KvStore(KvConfig(self.directory, **self.fields), self.engine, tool_memory=ToolMemory())
        self.renderer = SYNTAXES["chatml"].make(self.engine.info)
        tokenizer = self.engine.tokenizer
        checkpoints = Checkpoints(self.store, tokenizer, markers_of(self.renderer, tokenizer))
        self.driver = Driver(self.engine, slots=self.slots, checkpoints=checkpoints)
        self.running = True

    def stop(self) -> None:
        if self.running:
            self.driver.scheduler.close()
            self.running = False

    def restart(self) -> None:
        self.stop()
        self.start()

    def submit(self, messages: list[Message], **fields: Any) -> Job:
        segments = self.renderer.render(Conversation(tuple(messages))).segments
        tokenizer = self.engine.tokenizer
        return self.driver.submit(tokenizer.encode_segments(segments), key=tokenizer.key_bytes(segments), **fields)

    def ask(self, messages: list[Message], **fields: Any) -> Job:
        """One request from beginning to end; its answer becomes part of the conversation."""
        job = self.submit(messages, **fields)
        self.driver.run()
        messages.append(Message("assistant", self.driver.text(job)))
        return job

    def reuse(self, job: Job) -> tuple[str, int]:
        started = self.driver.started(job)
        assert started is not None
        return started.reuse, started.cached_tokens

    def reasons(self) -> list[str]:
        self.store.flush()
        found = []
        for path in sorted(self.directory.glob("*.kv"), key=lambda p: p.stat().st_mtime_ns):
            with path.open("rb", buffering=0) as file:
                found.append(kvfile.read_layout(file).header.reason)
        return sorted(found)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Any]:
    made: list[Machine] = []

    def make(**fields: Any) -> Machine:
        made.append(Machine(tmp_path / f"kv{len(made)}", **fields))
        return made[-1]

    yield make
    for machine in made:
        machine.stop()


def conversation(name: str, system: str = "You answer. " * 20) -> list[Message]:
    return [Message("system", system), Message("user", f"I am {name}. " * 10)]


def cold_answer(messages: list[Message], tmp_path: Path) -> str:
    """What a server without any cache says."""
    machine = Machine(tmp_path / "unused", min_tokens=8000, cold_max=0)
    try:
        return machine.driver.text(machine.ask(list(messages)))
    finally:
        machine.stop()


def test_the_shared_beginning_of_a_new_prompt_is_stored_before_the_answer(machines: Any, tmp_path: Path) -> None:
    machine = machines()
    first = conversation("Anna")
    machine.ask(first)
    assert machine.reasons() == ["cold"]
    machine.stop()
    assert machine.reasons() == ["cold", "shutdown"]
    machine.start()
    other = conversation("Bert")
    expected = cold_answer(other, tmp_path)
    job = machine.ask(other)
    kind, cached = machine.reuse(job)
    assert kind == "disk-text"
    shared = machine.engine.tokenizer.decode(job.prompt[:cached].tolist()).decode()
    assert shared.endswith("<|im_end|>\n") and "You answer." in shared and "Bert" not in shared
    assert machine.driver.text(job) == expected


@pytest.mark.parametrize("rewinds", [True, False])
def test_conversations_go_on_after_a_restart(machines: Any, tmp_path: Path, rewinds: bool) -> None:
    """Two conversations that took turns in one process; both are restored, nearly whole, with equal answers."""
    machine = machines(slots=2, rewinds=rewinds)
    talks = [conversation("Anna"), conversation("Bert")]
    for turn in range(4):
        for talk in talks:
            if turn:
                talk.append(Message("user", f"Question {turn}. " * 3))
            machine.ask(talk)
    machine.restart()
    for talk in talks:
        history = len(machine.driver.request("x" * 10).prompt_tokens)
        talk.append(Message("user", "And now?"))
        expected = cold_answer(talk, tmp_path)
        job = machine.ask(talk)
        kind, cached = machine.reuse(job)
        assert kind == "disk-text"
        assert cached > 0.9 * (len(job.prompt) - history - 60)
        assert machine.driver.text(job) == expected
        finish = machine.driver.finish(job)
        assert finish.cached_tokens + finish.cache_write_tokens == finish.prompt_tokens == len(job.prompt)


def test_one_slot_serves_many_conversations_from_disk(machines: Any, tmp_path: Path) -> None:
    machine = machines()
    talks = [conversation(name, system=f"{name} likes short answers. " * 8) for name in ("Anna", "Bert", "Cleo")]
    kinds = []
    for turn in range(3):
        for talk in talks:
            if turn:
                talk.append(Message("user", f"Question {turn}?"))
            expected = cold_answer(talk, tmp_path)
            job = machine.ask(talk)
            machine.store.flush()
            assert machine.driver.text(job) == expected
            kinds.append(machine.reuse(job)[0])
    assert "disk-text" not in kinds[:3]
    assert kinds[3:] == ["disk-text"] * 6


def test_continued_frontiers(machines: Any) -> None:
    machine = machines(continued_interval=256, cold_max=0)
    machine.ask([Message("user", "x" * 700)], max_tokens=1)
    machine.store.flush()
    sizes = sorted(e.tokens for e in machine.store._index)
    assert sizes == [256, 512]
    long = machines(continued_interval=256, cold_max=0, script=["y"] * 1000)
    long.ask([Message("user", "x" * 100)], max_tokens=400)
    long.store.flush()
    assert sorted(e.tokens for e in long.store._index) == [256, 512], "while it is generated too"


def test_not_inside_a_tool_call(machines: Any) -> None:
    call = "<tool_call>\n<function=f>\n<parameter=a>\n" + "z" * 600 + "\n</parameter>\n</function>\n</tool_call>"
    machine = machines(continued_interval=256, cold_max=0, script=list("q" * 200 + call))
    machine.ask([Message("user", "x" * 100)], tools=True, tool_schemas=(("f", "{}"),))
    machine.store.flush()
    assert sorted(e.tokens for e in machine.store._index) == [256]


def test_two_reasons_one_file(machines: Any) -> None:
    """Cold and continued at the same place."""
    machine = machines(continued_interval=512, boundary_align=512)
    machine.ask([Message("user", "x" * 600)], max_tokens=1)
    assert machine.reasons() == ["cold"]
    assert machine.driver.scheduler.slots[0].last_store == 512


def test_room_for_a_new_conversation(machines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three files fill the budget, each used twice; the fourth is due for two reasons at one place: one write, and it
    stays as long as its request runs; at no moment is more on disk than the budget."""
    machine = machines(slots=1, budget_bytes=13_500, boundary_trim=0, boundary_align=512, continued_interval=512)
    sizes: list[int] = []
    written: list[str] = []
    create = kvstore.create

    def watched(path: Path) -> BinaryIO:
        written.append(path.name[:40])
        sizes.append(sum(p.stat().st_size for p in machine.directory.glob("*.kv")))
        return create(path)

    monkeypatch.setattr(kvstore, "create", watched)
    talks = [[Message("user", f"{name} " * 300)] for name in ("a", "b", "c", "d")]
    for _ in range(3):
        for talk in talks[:3]:
            machine.ask(list(talk), max_tokens=1)
            machine.store.flush()
    written.clear()
    job = machine.ask(talks[3], max_tokens=1)
    machine.store.flush()
    key = machine.engine.tokenizer.key_bytes_of_ids(job.prompt[:512].tolist())
    assert written.count(kvstore.sha1_hex(key)) <= 1
    if written.count(kvstore.sha1_hex(key)):
        found = machine.store.find(job.query.key)
        assert found is not None and found.name == kvstore.sha1_hex(key)
    assert max(sizes) <= 13_500


def test_short_conversations_leave_nothing(machines: Any) -> None:
    machine = machines(min_tokens=500)
    machine.ask([Message("user", "hi")])
    machine.stop()
    assert machine.reasons() == []


def test_the_prompt_again_after_a_restart(machines: Any, tmp_path: Path) -> None:
    """The stored session holds the prompt's answer too: it is loaded, cut, and answers the same."""
    machine = machines(cold_max=0)
    talk = conversation("Anna")
    expected = machine.driver.text(machine.ask(list(talk)))
    machine.restart()
    job = machine.ask(list(talk))
    assert machine.driver.text(job) == expected


def test_a_damaged_file_costs_time_only(machines: Any, tmp_path: Path) -> None:
    machine = machines()
    talk = conversation("Anna")
    machine.ask(talk)
    machine.stop()
    for path in machine.directory.glob("*.kv"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    machine.start()
    talk.append(Message("user", "And now?"))
    expected = cold_answer(talk, tmp_path)
    job = machine.ask(list(talk))
    assert machine.reuse(job) == ("none", 0)
    assert machine.driver.text(job) == expected
    assert machine.reasons() == ["cold"], "removed, and written anew"
    machine.stop()
    machine.start()
    job = machine.ask(list(talk))
    assert machine.reuse(job)[0] == "disk-text"
    assert machine.driver.text(job) == expected


class Gate:
    """Holds loads of an engine's sessions until it is opened."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        for session in machine.engine.sessions:
            self._wrap(session, monkeypatch)

    def _wrap(self, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        load = session.load

        def gated(file: BinaryIO) -> None:
            self.entered.set()
            assert self.open.wait(30)
            load(file)

        monkeypatch.setattr(session, "load", gated)


def restored_beside(machines: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Machine, Gate, Job, Job, list[Message]]:
    """A machine where one job decodes while the checkpoint of another is being loaded."""
    machine: Machine = machines(slots=2)
    talk = conversation("Anna")
    machine.ask(talk)
    machine.restart()
    gate = Gate(machine, monkeypatch)
    running = machine.submit([Message("user", "hi")], ignore_eos=True, max_tokens=300)
    machine.driver.steps(3)
    talk.append(Message("user", "And now?"))
    restored = machine.submit(talk)
    machine.driver.step()
    assert gate.entered.wait(30)
    return machine, gate, running, restored, talk


def test_others_decode_while_a_checkpoint_is_loaded(
    machines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine, gate, running, restored, talk = restored_beside(machines, monkeypatch)
    expected = cold_answer(talk, tmp_path)
    before = machine.driver.text(running)
    machine.driver.steps(20)
    assert len(machine.driver.text(running)) >= len(before) + 20
    assert machine.driver.events(restored) == []
    states = [state.phase for state in machine.driver.scheduler.slot_states()]
    assert sorted(states) == ["decode", "restore"]
    gate.open.set()
    machine.driver.run()
    assert machine.driver.text(restored) == expected
    assert machine.reuse(restored)[0] == "disk-text"


def test_nobody_forks_a_session_that_is_being_loaded(
    machines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it held when it was looked at is replaced before it is copied: the fork would hold another conversation."""
    machine: Machine = machines(slots=2)
    anna, bert = conversation("Anna", system="A" * 300), conversation("Bert", system="B" * 300)
    machine.ask(anna)
    machine.restart()
    machine.ask(bert)
    machine.submit([Message("user", "hi")], ignore_eos=True, max_tokens=5000)
    machine.driver.steps(3)
    anna.append(Message("user", "And now?"))
    gate = Gate(machine, monkeypatch)
    restored = machine.submit(anna)
    machine.driver.step()
    assert gate.entered.wait(30)
    (loading,) = (slot for slot in machine.driver.scheduler.slots if slot.loading)
    bert.append(Message("user", "And you?"))
    prompt = machine.driver.request([*loading.session.tokens.tolist(), 97, 98]).prompt_tokens
    idle = next(slot for slot in machine.driver.scheduler.slots if slot is not loading)
    found = probe(idle, Lookup(Query(np.array(prompt, np.int32)), machine.driver.scheduler.slots))
    assert loading.session.n_tokens > 300, "it still holds Bert's"
    assert found.source is not loading
    gate.open.set()
    while machine.driver.end(restored) is None:
        machine.driver.step()
    assert machine.driver.text(restored) == cold_answer(anna, tmp_path)


def test_cancelled_while_its_checkpoint_is_loaded(machines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, gate, _, restored, talk = restored_beside(machines, monkeypatch)
    machine.driver.scheduler.cancel(restored)
    machine.driver.steps(2)
    assert machine.driver.scheduler.slots.n_busy == 2, "the reader still has the session"
    gate.open.set()
    machine.driver.run()
    assert machine.driver.finish(restored).reason == "cancelled"
    assert machine.driver.scheduler.slots.n_busy == 0
    assert machine.reuse(machine.ask(talk))[0] in ("disk-text", "memory-token"), "the file is still good"


def test_shutdown_while_a_checkpoint_is_loaded(machines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, gate, running, restored, _ = restored_beside(machines, monkeypatch)
    machine.driver.scheduler.shutdown(0.0)
    machine.driver.step()
    assert isinstance(machine.driver.end(running), Failed)
    assert not machine.driver.scheduler.stopped
    gate.open.set()
    machine.driver.run()
    assert machine.driver.scheduler.stopped
    end = machine.driver.end(restored)
    assert isinstance(end, Failed) and end.status == 503


def test_a_failing_load_falls_back(machines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = machines()
    talk = conversation("Anna")
    machine.ask(talk)
    machine.restart()

    def fails(file: BinaryIO) -> None:
        raise CheckpointError("scripted")

    monkeypatch.setattr(machine.engine.sessions[0], "load", fails)
    expected = cold_answer(talk[:-1], tmp_path)
    job = machine.ask(talk[:-1])
    assert machine.reuse(job) == ("none", 0)
    assert machine.driver.text(job) == expected
    assert machine.store.find(job.query.key) is None or machine.store._aside


def test_a_checkpoint_that_fails_in_prefill_is_not_chosen_again(machines: Any, tmp_path: Path) -> None:
    machine = machines()
    talk = conversation("Anna")
    machine.ask(talk)
    machine.restart()
    talk.append(Message("user", "And now?"))
    expected = cold_answer(talk, tmp_path)
    machine.engine.fail_in_prefill()
    failed = machine.submit(talk)
    machine.driver.run()
    assert isinstance(machine.driver.end(failed), Failed)
    job = machine.ask(talk)
    assert machine.driver.text(job) == expected
    assert machine.driver.started(failed).reuse == "disk-text"
    assert machine.reuse(job) != machine.reuse(failed)


def test_text_decides_where_the_model_drew_other_tokens(machines: Any) -> None:
    """The answer was drawn in pieces that the tokenizer does not make: it stays as it is, live and from disk."""
    machine = machines(script=["Hello "] + ["wide "] * 50 + ["world"])
    talk = conversation("Anna")
    assert machine.driver.text(machine.ask(talk)) == talk[-1].content
    talk.append(Message("user", "And now?"))
    live = machine.submit(talk)
    machine.driver.run()
    assert machine.reuse(live)[0] == "memory-text"
    finish = machine.driver.finish(live)
    asked = len(live.request.prompt_tokens)
    assert finish.prompt_tokens == asked, "what the client counts"
    assert len(live.prompt) < asked - 100, "fewer tokens than the prompt's own division has"
    assert finish.cached_tokens + finish.cache_write_tokens == asked
    machine.restart()
    talk += [Message("assistant", machine.driver.text(live)), Message("user", "Go on.")]
    stored = machine.ask(talk)
    assert machine.reuse(stored)[0] == "disk-text"


def test_several_answers_to_a_prompt_with_tokens_of_its_own(machines: Any) -> None:
    """One of them goes on with the live state; the others fork it instead of evaluating the text once more."""
    machine = machines(slots=3, script=["Hello "] + ["wide "] * 50 + ["world"])
    talk = conversation("Anna")
    machine.ask(talk)
    talk.append(Message("user", "And now? " * 5))
    jobs = [machine.submit(talk) for _ in range(3)]
    machine.driver.run()
    assert sorted(machine.reuse(job)[0] for job in jobs) == ["fork", "fork", "memory-text"]
    for job in jobs:
        assert machine.driver.finish(job).cache_write_tokens < 100
        assert job.prompt.tolist() == jobs[0].prompt.tolist()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("rewinds", "snapshots"), [(True, 0), (False, 0), (False, 3)])
def test_random_traffic_equals_a_server_without_cache(
    machines: Any, tmp_path: Path, seed: int, rewinds: bool, snapshots: int
) -> None:
    """Conversations that branch, repeat, grow and are interrupted by restarts; every answer equals the cold one."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    machine = machines(
        slots=rng.choice([1, 2, 3]),
        rewinds=rewinds,
        snapshots=snapshots,
        continued_interval=rng.choice([0, 128, 300]),
    )
    plain = Machine(tmp_path / "plain", min_tokens=8000, cold_max=0)
    talks = [conversation(f"guest {i}", system=f"System {i % 2}. " * 15) for i in range(4)]
    kinds: set[str] = set()
    for _ in range(12):
        batch = rng.sample(range(len(talks)), rng.randrange(1, 4))
        jobs = [(i, machine.submit(talks[i], max_tokens=60)) for i in batch]
        machine.driver.run()
        for i, job in jobs:
            reference = plain.submit(talks[i], max_tokens=60)
            plain.driver.scheduler.slots[0].session.clear()
            plain.driver.run()
            assert machine.driver.text(job) == plain.driver.text(reference), machine.reuse(job)
            kinds.add(machine.reuse(job)[0])
            if rng.random() < 0.2:
                talks[i] = talks[i][: rng.randrange(2, len(talks[i]) + 1)]
                while talks[i][-1].role == "assistant":
                    talks[i].pop()
            else:
                talks[i] += [Message("assistant", machine.driver.text(job)), Message("user", f"Q{rng.random()}")]
            for slot in machine.driver.scheduler.slots:
                live = slot.session.tokens.tolist()
                assert all(s.session.tokens.tolist() == live[: s.tokens] for s in slot.past)
        if rng.random() < 0.25:
            machine.restart()
    plain.stop()
    assert {"none", "disk-text"} <= kinds, kinds


# ---- interleaving: by the order of events


def test_others_decode_while_a_checkpoint_is_written(machines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is held; streams go on, the stored session too, and what is written is what it was then."""
    opened, entered = threading.Event(), threading.Event()
    create = kvstore.create

    def held(path: Path) -> BinaryIO:
        entered.set()
        assert opened.wait(30)
        return create(path)

    monkeypatch.setattr(kvstore, "create", held)
    machine = machines(slots=2, script=["y"] * 1000)
    machine.submit([Message("user", "hi")], ignore_eos=True, max_tokens=500)
    machine.driver.steps(3)
    stored = machine.submit(conversation("Anna"), ignore_eos=True, max_tokens=500)
    while not entered.is_set() or not machine.driver.text(stored):
        machine.driver.step()

    def drawn() -> list[int]:
        return [state.completion_tokens for state in machine.driver.scheduler.slot_states()]

    before = drawn()
    machine.driver.steps(30)
    assert [b - a for a, b in zip(before, drawn(), strict=True)] == [30, 30], "a token each in every step"
    assert list(machine.directory.glob("*.kv")) == []
    opened.set()
    machine.store.flush()
    (path,) = machine.directory.glob("*.kv")
    with path.open("rb", buffering=0) as file:
        layout = kvfile.read_layout(file)
        text = kvfile.read_text(file, layout)
    assert stored.query.key.startswith(text) and layout.header.tokens < len(stored.prompt)


def test_a_session_that_is_restored_joins_no_step_until_it_is_whole(
    machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, gate, _, restored, _ = restored_beside(machines, monkeypatch)
    (loading,) = (slot for slot in machine.driver.scheduler.slots if slot.loading)
    begun = len(machine.engine.steps)
    machine.driver.steps(25)
    during = machine.engine.steps[begun:]
    assert len(during) == 25
    assert all(index != loading.session.index for step in during for index, _, _ in step.rows)
    gate.open.set()
    machine.driver.scheduler.wait()
    held = loading.session.n_tokens
    begun = len(machine.engine.steps)
    machine.driver.step()
    mine = [count for index, count, _ in machine.engine.steps[begun].rows if index == loading.session.index]
    assert mine, "and is in the very next step"
    assert held + mine[0] <= len(restored.prompt)
    started = machine.driver.started(restored)
    assert started is not None and started.reuse == "disk-text"


@pytest.mark.parametrize("where", ["live", "disk"])
def test_progress_counts_what_no_cache_had(machines: Any, where: str) -> None:
    machine = machines(slots=1)
    talk = conversation("Anna")
    machine.ask(talk)
    if where == "disk":
        machine.restart()
    talk.append(Message("user", "z" * 5000))
    machine.engine.sleep = machine.driver.clock.sleep
    machine.engine.cost = lambda prompt, streams: 0.001 * prompt
    job = machine.ask(talk)
    started = machine.driver.started(job)
    assert started is not None and started.cached_tokens > 100
    progress = [event for event in machine.driver.events(job) if isinstance(event, PrefillProgress)]
    suffix = len(job.prompt) - started.cached_tokens
    assert len(progress) > 5
    assert {event.total for event in progress} == {suffix}
    assert 0 < progress[0].done < suffix and progress[-1].done == suffix
    assert [event.done for event in progress] == sorted(event.done for event in progress)
    evaluated = sum(step.n_tokens for step in machine.engine.steps if any(count > 1 for _, count, _ in step.rows))
    assert evaluated >= suffix
