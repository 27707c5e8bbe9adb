"""Generations whose tokens are guessed ahead: the same events, the same sessions, the same checkpoints, fewer steps."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from ds4.convert.synth import DEFAULT_TYPES, synthesise
from ds4.engine.engine import Engine
from ds4.engine.session import Session
from ds4.engine.types import EngineConfig, Row, SamplingParams
from ds4.server.exposition import render
from ds4.server.generation import Generation
from ds4.server.metrics import Metrics
from ds4.server.observer import StepReport
from ds4.server.types import Event, Finish
from ds4.testing import Script, ScriptedEngine, hash_model
from ds4.testing.driver import Clock, Driver
from ds4.testing.tokenizer import ScriptedTokenizer

END = 256
Guess = Callable[[list[int]], Sequence[int]]


def knowing(seed: int, right: float, draw: random.Random) -> Guess:
    """Guesses of who knows what the model says, and is wrong at times."""
    model = hash_model(seed, end=END)

    def guess(tokens: list[int]) -> list[int]:
        out: list[int] = []
        for _ in range(draw.randint(1, 5)):
            token = model(np.array([*tokens, *out], np.int32))
            out.append(token if draw.random() < right else (token + 1) % 256)
        return out

    return guess


def engine_of(seed: int, guess: Guess | None, clock: Clock, **more: Any) -> ScriptedEngine:
    return ScriptedEngine(
        model=hash_model(seed, end=END), guess=guess, step_seconds=1.0, draft_seconds=0.01, sleep=clock.sleep, **more
    )


def untimed(events: Sequence[Event]) -> list[Event]:
    return [
        replace(e, ttft=0.0, prefill_seconds=0.0, decode_seconds=0.0, drafted=0, accepted=0, draft_seconds=0.0)
        if isinstance(e, Finish)
        else e
        for e in events
    ]


class Reports:
    """Observer that keeps the reports of all steps."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []

    def on_start(self, *_: object) -> None: ...
    def on_end(self, *_: object) -> None: ...
    def on_idle(self) -> None: ...
    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)


@pytest.mark.parametrize("seed", range(12))
def test_guesses_change_no_event(seed: int) -> None:
    """Stop strings, length, the context's end and log-probabilities fall into the middle of accepted guesses."""
    rng = random.Random(seed)
    fields: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 3, 7, 50])}
    if seed % 3 == 0:
        fields["stop"] = (bytes([rng.randrange(97, 123)]),)
    if seed % 4 == 0:
        fields["sampling"] = SamplingParams(temperature=0.0, logprobs=2)
    ctx = rng.choice([20, 32, 1000])
    found = []
    for guess in (None, knowing(seed, 0.8, random.Random(seed))):
        clock = Clock()
        engine = engine_of(seed, guess, clock, ctx=ctx)
        driver = Driver(engine, clock=clock)
        job = driver.ask([1, 2, 3, 4, 5, 6, 7, 8], **fields)
        session = driver.scheduler.slots[0].session
        found.append((untimed(driver.events(job)), session.tokens.tolist(), engine.n_steps))
    plain, guessed = found
    print(ctx, fields, "steps", plain[2], guessed[2])
    assert plain[:2] == guessed[:2]
    assert guessed[2] <= plain[2]


def test_right_guesses_save_steps_and_are_counted() -> None:
    clock, reports = Clock(), Reports()
    engine = engine_of(4, knowing(4, 1.0, random.Random(4)), clock)
    driver = Driver(engine, clock=clock, observer=reports, draft_timing=True)
    finish = driver.finish(driver.ask([1, 2, 3], max_tokens=60))
    assert isinstance(finish, Finish)
    made = finish.completion_tokens
    drafted, accepted = sum(r.drafted for r in reports.steps), sum(r.accepted for r in reports.steps)
    print("tokens", made, "steps", engine.n_steps, "drafted", drafted, "accepted", accepted)
    assert 0 < accepted <= drafted and engine.n_steps + accepted in (made, made + 1)
    assert (finish.drafted, finish.accepted) == (drafted, accepted)
    assert finish.draft_seconds == pytest.approx(0.01 * sum(r.drafted > 0 for r in reports.steps))
    metrics = Metrics()
    for report in reports.steps:
        metrics.on_step(report)
    body = render(metrics)[0].decode()
    assert f"ds4_draft_tokens_total {float(drafted)}" in body
    assert f"ds4_draft_tokens_accepted_total {float(accepted)}" in body
    assert metrics.completion_tokens == sum(len(r.itl) + len(r.ttft) for r in reports.steps)
    assert metrics.completion_tokens in (made, made + 1)  # the end token is drawn, too


def test_only_one_generation_alone_guesses() -> None:
    """Not beside another one that decodes, not beside a prefill."""
    clock, reports = Clock(), Reports()
    engine = engine_of(5, knowing(5, 1.0, random.Random(5)), clock)
    driver = Driver(engine, slots=2, clock=clock, observer=reports, mixed_prefill_quantum=4)
    driver.submit([1, 2], max_tokens=30)
    driver.submit([3] * 40, max_tokens=30)
    driver.run()
    both = [r for r in reports.steps if r.decode_rows + r.prefill_rows > 1 or r.prefill_rows]
    alone = [r for r in reports.steps if r.decode_rows == 1 and not r.prefill_rows]
    assert both and alone
    assert not any(r.drafted for r in both)
    assert any(r.drafted for r in alone)


def test_a_script_goes_on_greedy_where_the_parser_says_so() -> None:
    """The sampler is told of a tool call's structure before each draw, also of tokens that were guessed."""
    pieces = ["Let me look.", "\n\n<tool_call>", '\n{"name": "f", ', '"arguments": {"a": "b c"', "}}", "\n</tool_call>"]
    tokenizer = ScriptedTokenizer()
    said = [tokenizer.piece_id(p.encode()) for p in pieces]
    traces = []
    for guess in (False, True):
        clock = Clock()

        def following(tokens: list[int], said: list[int] = said) -> list[int]:
            at = next((i + 1 for i in range(len(said)) if tokens[-1] == said[i]), 0)
            return said[at : at + 3]

        engine = ScriptedEngine(
            Script(tuple(p.encode() for p in pieces)),
            guess=following if guess else None,
            step_seconds=1.0,
            sleep=clock.sleep,
            tokenizer=tokenizer,
        )
        driver = Driver(engine, clock=clock)
        driver.ask("do it", tools=True)
        traces.append(engine.samplers[0].greedy_trace)
        steps = engine.n_steps
    assert traces[0] == traces[1] and True in traces[0]
    assert steps < 1 + len(pieces)


def test_a_failed_draw_in_the_middle_ends_the_job_alone() -> None:
    """A guessed token that leaves nothing to choose: the job fails, the session holds what it held."""
    clock = Clock()
    model = hash_model(1, end=END)
    guess = knowing(1, 1.0, random.Random(1))
    engine = engine_of(1, guess, clock)
    driver = Driver(engine, clock=clock)
    job = driver.submit([1, 2, 3], max_tokens=40)
    driver.step()
    first = engine.samplers[0].drawn
    forbidden = [model(np.array([1, 2, 3], np.int32))]
    for _ in range(3):
        forbidden.append(model(np.array([1, 2, 3, *forbidden], np.int32)))
    engine.samplers[0].forbid(forbidden[2:3])
    driver.run()
    assert first == 1
    assert driver.events(job)[-1].__class__.__name__ == "Failed"
    assert driver.scheduler.slots[0].session.tokens.tolist()[:3] == [1, 2, 3]
    assert driver.finish(driver.ask([9, 9], max_tokens=5)).completion_tokens > 0


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A random model with a prediction head and a tokenizer."""
    path = tmp_path_factory.mktemp("speculation") / "m.gguf"
    plan = DEFAULT_TYPES["tiny"]
    synthesise(path, "deepseek4", "tiny", 5, plan, drafts="mtp")
    engine = Engine.open(EngineConfig(model=path, ctx=256, threads=2, mtp=True, mtp_draft=4, mtp_margin=0.0))
    yield engine
    engine.close()


class Snapshots:
    """In the place of checkpoints: what the session holds whenever one might be stored."""

    store = None

    def __init__(self) -> None:
        self.taken: list[tuple[int, str]] = []

    def leaving(self, *_: object) -> None: ...
    def begin(self, *_: object) -> None: ...
    def reached(self, generation: Generation) -> None:
        file = io.BytesIO()
        generation.slot.session.save(file)
        self.taken.append((generation.slot.session.n_tokens, sha256(file.getvalue()).hexdigest()))


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3, top_k=20, frequency_penalty=0.4, logprobs=1),
], ids=["greedy", "sampled"])  # fmt: skip
def test_a_real_engine_serves_the_same(
    drafting: Engine, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the scheduler, with a drafter that knows what comes and errs at times: equal events, and equal payloads
    at every token, also those in the middle of accepted guesses."""
    known: list[int] = []
    rng = random.Random(4)

    def oracle(self: Engine, rows: Sequence[Row], sessions: Sequence[Session]) -> tuple[list[Sequence[int]], float]:
        [row] = rows
        at, most = row.session.n_tokens + 1, row.drafts
        assert isinstance(most, int)
        right = known[at : at + most] if len(row.tokens) == 1 else []
        return [[t if rng.random() < 0.85 else (t + 1) % 512 for t in right]], 0.0

    monkeypatch.setattr(Engine, "_drafts", oracle)
    found = []
    for most in (0, 4):
        monkeypatch.setattr(Engine, "most_drafts", property(lambda self, n=most: n))
        snapshots = Snapshots()
        driver = Driver(drafting, checkpoints=snapshots)  # type: ignore[arg-type]
        job = driver.submit(list(range(20, 60)), sampling=params, max_tokens=60, ignore_eos=True)
        driver.run()
        events = driver.events(job)
        session = driver.scheduler.slots[0].session
        known = [*session.tokens.tolist(), 0]
        finish = events[-1]
        assert isinstance(finish, Finish)
        print("drafted", finish.drafted, "accepted", finish.accepted)
        assert (finish.accepted > 20) is (most > 0)
        found.append((untimed(events), session.tokens.tolist(), snapshots.taken))
        driver.scheduler.slots.close()
    assert found[0] == found[1]
    assert len(found[0][2]) == 60
