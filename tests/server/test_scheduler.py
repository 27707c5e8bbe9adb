"""Continuous batching by hand: what each step holds, who waits, and how every job ends."""

from __future__ import annotations

import itertools
import json
import random
import threading
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from ds4.engine.types import SamplingParams
from ds4.errors import ConfigError, ContextLengthError, EngineError, RequestError, ShuttingDown
from ds4.server import scheduler
from ds4.server.engine_thread import EngineThread
from ds4.server.generation import Job
from ds4.server.metrics import Metrics
from ds4.server.observer import StepReport
from ds4.server.plan import Plan
from ds4.server.reuse import NEAR, Reuse
from ds4.server.scheduler import Scheduler, SchedulerConfig
from ds4.server.types import (
    ContentDelta,
    Event,
    Failed,
    Finish,
    PrefillProgress,
    SampledToken,
    Started,
    ToolCallEnd,
    ToolCallStart,
)
from ds4.testing import Script, ScriptedEngine, ScriptedSession, hash_model
from ds4.testing.driver import Clock, Driver
from ds4.testing.script import Split

END = 256
ENDLESS = Script.text("x").endless()


def chunk_ends(plan: Plan) -> list[tuple[int, int | None]]:
    """(slot, prompt position after the chunk; None for a decode row) of each row."""
    return [(work.generation.slot.index, work.end) for work in plan.work]


def tokens(n: int, base: int = 0) -> list[int]:
    """A prompt of n byte tokens that shares nothing with one of another base."""
    return [base] + [ord("a")] * (n - 1)


# ---- one job


def test_one_job_from_start_to_finish() -> None:
    clock = Clock()
    engine = ScriptedEngine(["Hello", " world"], step_seconds=0.5, sleep=clock.sleep)
    driver = Driver(engine, clock=clock)
    job = driver.ask("abcd", created=999.0)
    assert driver.events(job) == [
        Started(slot=0, reuse="none", prompt_tokens=4, cached_tokens=0),
        PrefillProgress(4, 4),
        ContentDelta("Hello"),
        ContentDelta(" world"),
        Finish(
            "stop",
            prompt_tokens=4,
            cached_tokens=0,
            cache_write_tokens=4,
            completion_tokens=2,
            ttft=1.5,
            prefill_seconds=0.5,
            decode_seconds=1.0,
        ),
    ]
    assert [step.rows[0][1] for step in engine.steps] == [4, 1, 1]
    assert driver.scheduler.slots[0].session.n_tokens == 6


def test_next_turn_and_repetition_report_what_they_reuse() -> None:
    driver = Driver(ScriptedEngine(["Hello", " world"]))
    first = driver.finish(driver.ask("abcd"))
    assert (first.cached_tokens, first.cache_write_tokens) == (0, 4)
    live = driver.scheduler.slots[0].session.tokens.tolist()
    second = driver.ask([*live, *b"more"])
    assert driver.started(second) == Started(0, "memory-token", 10, 6)
    finish = driver.finish(second)
    assert (finish.prompt_tokens, finish.cached_tokens, finish.cache_write_tokens) == (10, 6, 4)
    assert PrefillProgress(4, 4) in driver.events(second)
    again = driver.finish(driver.ask([*live, *b"more"]))
    assert (again.prompt_tokens, again.cached_tokens, again.cache_write_tokens) == (10, 9, 1)
    assert driver.text(second) == "Hello world"


def test_a_repeated_prompt_without_rewind_is_evaluated_anew() -> None:
    driver = Driver(ScriptedEngine("ok", rewinds=False))
    driver.ask("abcd")
    assert driver.finish(driver.ask("abcd")).cached_tokens == 0


def test_reasoning_is_counted() -> None:
    driver = Driver(ScriptedEngine(["I", " think", "</think>", "yes"]))
    job = driver.ask("q", thinking=True)
    assert (driver.reasoning(job), driver.text(job)) == ("I think", "yes")
    finish = driver.finish(job)
    assert (finish.completion_tokens, finish.reasoning_tokens) == (4, 3)


def test_a_code_point_split_over_tokens_arrives_whole() -> None:
    driver = Driver(ScriptedEngine(Script.text("naïve 😀", "bytes")))
    job = driver.ask("q")
    assert [e.text for e in driver.events(job) if isinstance(e, ContentDelta)] == list("naïve 😀")


def test_log_probabilities_come_before_their_text() -> None:
    driver = Driver(ScriptedEngine(["a", "bc"]))
    job = driver.ask("q", sampling=SamplingParams(temperature=0.0, logprobs=2))
    kinds = [type(e) for e in driver.events(job)]
    assert kinds[2:6] == [SampledToken, ContentDelta, SampledToken, ContentDelta]
    sampled = [e for e in driver.events(job) if isinstance(e, SampledToken)]
    assert [e.data for e in sampled] == [b"a", b"bc"]
    assert len(sampled[0].logprobs.top) == 2


def test_penalties_see_the_prompt_only_when_they_use_it() -> None:
    engine = ScriptedEngine("ok")
    driver = Driver(engine)
    driver.ask("abcd")
    driver.ask("abcd", sampling=SamplingParams(repetition_penalty=1.1))
    assert [s.observed_prompt for s in engine.samplers] == [[], list(b"abcd")]


def test_echo_comes_before_the_answer() -> None:
    driver = Driver(ScriptedEngine(["!"]))
    assert driver.text(driver.ask("abcd", echo_text=b"abcd")) == "abcd!"
    assert driver.text(driver.ask("abcd", echo_text=b"abcd", max_tokens=0)) == "abcd"


# ---- limits


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_max_tokens(limit: int) -> None:
    driver = Driver(ScriptedEngine(["a", "b", "c"]))
    job = driver.ask("q", max_tokens=limit)
    finish = driver.finish(job)
    assert (driver.text(job), finish.reason, finish.completion_tokens) == ("abc"[:limit], "length", limit)
    assert driver.scheduler.slots[0].session.n_tokens == limit, "the last token drawn is not evaluated"


def test_end_of_text_right_at_the_limit_is_a_stop() -> None:
    driver = Driver(ScriptedEngine(["a", "b"]))
    assert driver.finish(driver.ask("q", max_tokens=3)).reason == "stop"


def test_the_beginning_is_told_with_the_first_token_where_that_is_near() -> None:
    driver = Driver(ScriptedEngine(["a", "b"]), prefill_quantum=NEAR + 1)
    for size, kinds in ((NEAR, [Started, PrefillProgress, ContentDelta]), (NEAR + 1, [Started])):
        job = driver.submit(tokens(size, base=size))
        plan = driver.scheduler.plan()
        before = len(driver.deliveries)
        driver.scheduler.commit(plan, driver.engine.step(plan.rows))
        assert len(driver.deliveries) == before + 1
        [first] = [batch for batch in driver.deliveries if any(of is job for of, _ in batch)][:1]
        assert [type(event) for of, events in first if of is job for event in events] == kinds
        driver.run()


def test_a_failure_is_told_before_the_step() -> None:
    """Only beginnings wait for it."""
    driver = Driver(ScriptedEngine(["a", "b"]), slots=2)
    driver.submit("ab")
    cancelled = driver.submit("cd")
    driver.scheduler.plan()
    driver.scheduler.cancel(cancelled)
    driver.submit("ef")
    driver.scheduler.plan()
    assert any(of is cancelled and isinstance(events[-1], Finish) for of, events in driver.deliveries[-1])


@pytest.mark.parametrize(("cores", "told"), [(2, 1), (1, 0)])
def test_an_engine_thread_stays_awake_where_it_has_a_core(
    cores: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "usable_cores", lambda: cores)
    driver = Driver(ScriptedEngine("ok"))
    calls: list[str] = []
    bell = SimpleNamespace(ring=lambda: calls.append("ring"), soon=lambda: calls.append("soon"))
    monkeypatch.setattr(driver.scheduler, "_bell", bell)
    driver.scheduler.stay_awake()
    assert calls == ["soon"] * told


def test_ids_outside_the_vocabulary_are_refused_in_every_form() -> None:
    driver = Driver(ScriptedEngine("ok"))
    vocab = driver.engine.info.vocab_size
    for wrong in (-1, vocab):
        for prompt in ((1, wrong), np.array([1, wrong], np.int32), np.array([1, wrong], np.int64)):
            with pytest.raises(RequestError, match=f"token {wrong} is outside"):
                driver.scheduler.submit(driver.request("a", prompt_tokens=prompt))
    with pytest.raises(RequestError, match="is empty"):
        driver.scheduler.submit(driver.request("a", prompt_tokens=np.array([], np.int32)))


def test_max_tokens_zero_evaluates_the_prompt() -> None:
    engine = ScriptedEngine("never said")
    driver = Driver(engine)
    job = driver.ask("abcd", max_tokens=0)
    finish = driver.finish(job)
    assert (driver.text(job), finish.reason, finish.completion_tokens) == ("", "length", 0)
    assert engine.steps[0].rows == ((0, 4, None),)
    assert driver.scheduler.slots[0].session.logits()[ord("d")] == 1.0
    assert driver.finish(driver.ask("abcde")).cached_tokens == 4


def test_a_full_context_is_length() -> None:
    driver = Driver(ScriptedEngine(ENDLESS, ctx=10))
    job = driver.ask("abcd", max_tokens=1000)
    assert driver.finish(job).reason == "length"
    assert driver.finish(job).completion_tokens == 7, "six evaluated after the prompt, the seventh only drawn"
    assert driver.scheduler.slots[0].session.n_tokens == 10


def test_ignore_eos_goes_on_to_the_limit() -> None:
    driver = Driver(ScriptedEngine(["a", "b"]))
    job = driver.ask("q", ignore_eos=True, max_tokens=5)
    assert (driver.text(job), driver.finish(job).reason) == ("ababa", "length")


def test_nothing_to_choose_is_a_failure() -> None:
    driver = Driver(ScriptedEngine(Script(())))
    job = driver.ask("q", ignore_eos=True)
    end = driver.end(job)
    assert isinstance(end, Failed)
    assert "no token can be chosen" in end.message


# ---- stop strings


@pytest.mark.parametrize("cuts", range(3))
def test_a_stop_string_across_every_split(cuts: int) -> None:
    text, stop = b"one,two,three,four", b"two,three"
    for at in itertools.combinations(range(1, len(text)), cuts):
        pieces = [text[i:j] for i, j in itertools.pairwise((0, *at, len(text)))]
        driver = Driver(ScriptedEngine([*pieces, b"never"]))
        job = driver.ask("q", stop=(b"zzz", stop))
        finish = driver.finish(job)
        assert driver.text(job) == "one,"
        assert (finish.reason, finish.stop) == ("stop", stop)
        drawn = next(n for n in range(1, len(pieces) + 1) if b"".join(pieces[:n]).find(stop) >= 0)
        assert finish.completion_tokens == drawn
        evaluated = b"q" + b"".join(pieces[: drawn - 1])
        session = driver.scheduler.slots[0].session
        assert driver.engine.tokenizer.decode(session.tokens.tolist()) == evaluated


def test_the_earliest_stop_string_wins_and_what_was_held_back_is_said_at_the_end() -> None:
    driver = Driver(ScriptedEngine(["ab", "c", "d"]))
    job = driver.ask("q", stop=(b"cd", b"bc"))
    assert (driver.text(job), driver.finish(job).stop) == ("a", b"bc")
    driver = Driver(ScriptedEngine(["a", "b"]))
    job = driver.ask("q", stop=(b"bcd",))
    assert (driver.text(job), driver.finish(job).stop) == ("ab", None)
    job = driver.ask("q", stop=(b"bcd",), max_tokens=2)
    assert (driver.text(job), driver.finish(job).reason) == ("ab", "length")


def test_a_stop_string_leaves_a_usable_session() -> None:
    engine = ScriptedEngine(["one", " STOP", " more"])
    driver = Driver(engine)
    driver.ask("abcd", stop=(b"STOP",))
    assert driver.scheduler.slots[0].session.n_tokens == 5
    follow_up = driver.ask([*driver.scheduler.slots[0].session.tokens.tolist(), *b"?"])
    assert driver.finish(follow_up).cached_tokens == 5


# ---- tool calls

CALL = "<tool_call>\n<function=ls>\n<parameter=path>\n/tmp\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("split", ["words", "chars", 7])
def test_a_tool_call_ends_the_turn_and_its_structure_is_drawn_greedily(split: Split) -> None:
    script = Script.text("Let me look.\n\n" + CALL, split)
    driver = Driver(ScriptedEngine(Script((*script.pieces, b"no other call", b"never said"))))
    job = driver.ask("q", tools=True, sampling=SamplingParams(temperature=1.0))
    finish = driver.finish(job)
    # Only what follows tells that this syntax has no further block.
    assert (finish.reason, finish.completion_tokens) == ("tool_calls", len(script.pieces) + 1)
    assert driver.text(job) == "Let me look."
    assert json.loads(driver.arguments(job)) == {"path": "/tmp"}
    assert [e for e in driver.events(job) if isinstance(e, ToolCallStart)] == [ToolCallStart(0, "ls")]
    (end,) = (e for e in driver.events(job) if isinstance(e, ToolCallEnd))
    assert CALL.encode() in end.raw
    if split == "chars":
        (sampler,) = driver.engine.samplers
        forced = "".join("^" if on else "." for on in sampler.greedy_trace)
        said = "Let me look.\n\n" + CALL
        assert set(forced[: said.index(">") + 1]) == {"."}, "greedy only from the token after the marker"
        assert set(forced[said.index(">") + 1 : said.index("\n/tmp")]) == {"^"}
        assert set(forced[said.index("/tmp") + 1 : said.index("</parameter>") + 1]) == {"."}
        assert set(forced[said.index("parameter>", said.index("/tmp")) : len(said)]) == {"^"}


def test_decoding_stops_with_the_block_where_the_syntax_has_one() -> None:
    block = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="ls">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    script = Script.text("Sure.</think>" + block, "chars")
    driver = Driver(ScriptedEngine(Script((*script.pieces, b"never said")), syntax="deepseek4"))
    job = driver.ask("q", tools=True, thinking=True)
    finish = driver.finish(job)
    assert (finish.reason, finish.completion_tokens) == ("tool_calls", len(script.pieces))
    assert (driver.reasoning(job), driver.text(job), driver.arguments(job)) == ("Sure.", "", "{}")
    assert finish.reasoning_tokens == len("Sure.</think>")


def test_a_call_that_the_limit_cut_is_not_executable() -> None:
    driver = Driver(ScriptedEngine(Script.text(CALL, "chars")))
    job = driver.ask("q", tools=True, max_tokens=len(CALL) - 30)
    assert driver.finish(job).reason == "length"
    assert not any(isinstance(e, ToolCallEnd) for e in driver.events(job))


def test_a_call_that_never_ends_is_an_error() -> None:
    driver = Driver(ScriptedEngine(Script.text(CALL[:60], "chars")))
    finish = driver.finish(driver.ask("q", tools=True))
    assert (finish.reason, finish.error) == ("error", "unterminated tool call")


def test_a_stop_string_inside_a_call_is_an_error_not_a_call() -> None:
    driver = Driver(ScriptedEngine(Script.text(CALL, "chars")))
    job = driver.ask("q", tools=True, stop=(b"/tm",))
    finish = driver.finish(job)
    assert (finish.stop, finish.completion_tokens) == (b"/tm", CALL.index("/tm") + 3)
    assert not any(isinstance(e, ToolCallEnd) for e in driver.events(job))
    announced = any(isinstance(e, ToolCallStart) for e in driver.events(job))
    assert finish.reason == ("error" if announced else "stop")


def test_markup_is_text_without_tools() -> None:
    driver = Driver(ScriptedEngine(Script.text(CALL, "chars")))
    job = driver.ask("q")
    assert (driver.text(job), driver.finish(job).reason) == (CALL, "stop")


# ---- batching


def test_decode_rows_come_first_and_short_prompts_share_a_budget() -> None:
    driver = Driver(ScriptedEngine(ENDLESS), slots=4)
    driver.submit(tokens(10, 0))
    driver.submit(tokens(20, 1))
    assert chunk_ends(driver.step()) == [(0, 10), (1, 20)]
    driver.submit(tokens(30, 2))
    driver.submit(tokens(40, 3))
    assert chunk_ends(driver.step()) == [(0, None), (1, None), (2, 30), (3, 40)]
    assert chunk_ends(driver.step()) == [(0, None), (1, None), (2, None), (3, None)]


def test_an_idle_engine_gets_large_chunks_and_the_last_one_draws() -> None:
    driver = Driver(ScriptedEngine(ENDLESS))
    driver.submit(tokens(6000))
    ends = [chunk_ends(driver.step()) for _ in range(4)]
    assert ends == [[(0, 2048)], [(0, 4096)], [(0, 6000)], [(0, None)]]
    assert [step.rows[0][2] for step in driver.engine.steps] == [None, None, ord("x"), ord("x")]


def test_a_long_prompt_never_stalls_a_stream_by_more_than_one_small_chunk() -> None:
    driver = Driver(ScriptedEngine(ENDLESS), slots=2)
    stream = driver.submit(tokens(10, 0))
    driver.step()
    long = driver.submit(tokens(6000, 1))
    said = len(driver.text(stream))
    for step in range(1, 48):
        plan = driver.step()
        assert chunk_ends(plan)[0] == (0, None)
        assert plan.prefill_tokens <= 128
        assert len(driver.text(stream)) == said + step
    assert len(driver.text(long)) == 1, "6000 / 128 = 46.9 steps to the first token"


def begun(token_seconds: float, slots: int) -> tuple[Driver, Job]:
    """A driver that knows its speed, and a stream that has drawn its first token."""
    clock = Clock()
    engine = ScriptedEngine(ENDLESS, prefill_token_seconds=token_seconds, step_seconds=0.01, sleep=clock.sleep)
    driver = Driver(engine, clock=clock, slots=slots)
    for base, length in ((200, 600), (201, 100), (202, 600)):
        driver.ask(tokens(length, base), max_tokens=1)
    stream = driver.submit(tokens(20, 0))
    driver.step()
    assert len(driver.text(stream)) == 1
    return driver, stream


def test_streams_that_begin_together_go_on_together() -> None:
    driver, stream = begun(0.0005, slots=8)
    for base in range(1, 8):
        driver.submit(tokens(60, base))
    plans = [driver.step() for _ in range(4)]
    assert [[end for _, end in chunk_ends(plan)] for plan in plans] == [[60, 60], [60, 60], [60, 60], [60]]
    assert driver.text(stream) == "x", "it has waited"
    assert chunk_ends(driver.step()) == [(slot, None) for slot in range(8)], "and no longer than that"


def test_a_stream_that_goes_on_waits_for_no_prompt() -> None:
    driver, stream = begun(0.0005, slots=2)
    driver.step()
    driver.submit(tokens(60, 1))
    assert driver.step().work[0].end is None
    assert driver.text(stream) == "xxx"


def test_a_new_stream_waits_for_no_long_prompt() -> None:
    driver, stream = begun(0.0005, slots=2)
    driver.submit(tokens(5000, 1))
    assert driver.step().work[0].end is None
    assert driver.text(stream) == "xx"


def test_prompts_that_keep_coming_hold_no_stream_up_for_long() -> None:
    driver, stream = begun(0.0005, slots=64)
    start = driver.clock.now
    for base in range(1, 60):
        driver.submit(tokens(60, base))
        driver.step()
        if len(driver.text(stream)) > 1:
            break
    assert 0.2 < driver.clock.now - start <= 0.4


def test_prefills_take_turns() -> None:
    driver = Driver(ScriptedEngine(ENDLESS), slots=4)
    for base in range(3):
        driver.submit(tokens(5000, base))
    served = [chunk_ends(driver.step())[0] for _ in range(6)]
    assert served == [(0, 2048), (1, 2048), (2, 2048), (0, 4096), (1, 4096), (2, 4096)]
    # Slot 0 needs 904 tokens more; what it leaves goes to slot 1 (all it needs) and then to slot 2, on the small grid.
    assert chunk_ends(driver.step()) == [(0, 5000), (1, 5000), (2, 4096 + 128)]
    assert chunk_ends(driver.step()) == [(0, None), (1, None), (2, 4096 + 256)]


def test_mixed_prefills_take_turns_too() -> None:
    driver = Driver(ScriptedEngine(ENDLESS), slots=4)
    driver.submit(tokens(4, 9))
    driver.step()
    for base in range(3):
        driver.submit(tokens(1000, base))
    served = [chunk_ends(driver.step())[1:] for _ in range(6)]
    assert served == [[(1, 128)], [(2, 128)], [(3, 128)], [(1, 256)], [(2, 256)], [(3, 256)]]


@pytest.mark.parametrize("reused", [1, 100, 127, 128, 129, 1000])
def test_chunks_end_on_the_same_grid_whatever_was_reused(reused: int) -> None:
    prompt = tokens(1200)
    driver = Driver(ScriptedEngine(ENDLESS), slots=2)
    driver.ask(prompt[:reused], max_tokens=0)
    driver.submit(tokens(4, 9))
    driver.step()
    driver.submit(prompt)
    ends = [chunk_ends(driver.step())[1][1] for _ in range(2)]
    assert ends == [128 * (reused // 128 + 1), min(1200, 128 * (reused // 128 + 2))]


def test_admission_is_first_in_first_out() -> None:
    driver = Driver(ScriptedEngine("a b c"), slots=2)
    jobs = [driver.submit(tokens(5, base)) for base in range(6)]
    driver.step()
    assert [driver.started(job) is not None for job in jobs] == [True, True, False, False, False, False]
    assert driver.scheduler.n_queued == 4
    driver.run()
    starts = [job for batch in driver.deliveries for job, events in batch if isinstance(events[0], Started)]
    assert starts == jobs
    assert all(driver.finish(job).reason == "stop" for job in jobs)


def test_long_prompts_that_arrive_together_share_their_common_prefix() -> None:
    shared = tokens(4000)
    driver = Driver(ScriptedEngine("ok"), slots=3)
    jobs = [driver.submit([*shared, base]) for base in range(3)]
    driver.run()
    cached = [driver.finish(job).cached_tokens for job in jobs]
    assert cached[0] == 0
    assert all(n >= 2048 for n in cached[1:]), cached
    assert sum(step.n_tokens for step in driver.engine.steps) < 2 * 4000


def test_one_of_many_equal_prompts_is_evaluated() -> None:
    driver = Driver(ScriptedEngine(ENDLESS), slots=16)
    jobs = [driver.submit(tokens(500), max_tokens=3) for _ in range(16)]
    assert chunk_ends(driver.step()) == [(0, 500)]
    assert chunk_ends(driver.step()) == [(0, None), *((slot, 500) for slot in range(1, 16))]
    driver.run()
    assert [driver.finish(job).cached_tokens for job in jobs] == [0] + [499] * 15
    assert {driver.text(job) for job in jobs} == {"xxx"}


def test_equal_prompts_of_a_family_that_cannot_be_cut_wait_at_most_a_step() -> None:
    driver = Driver(ScriptedEngine(ENDLESS, rewinds=False), slots=4)
    jobs = [driver.submit(tokens(500), max_tokens=100) for _ in range(4)]
    assert chunk_ends(driver.step()) == [(0, 500)]
    assert chunk_ends(driver.step()) == [(0, None), (1, 128)], "the finished prompt cannot be cut to 499 tokens"
    assert chunk_ends(driver.step()) == [(0, None), (2, 256)], "but the unfinished one is a prefix as it is"
    driver.run()
    assert {driver.text(job) for job in jobs} == {"x" * 100}


def test_events_of_a_step_are_delivered_together() -> None:
    driver = Driver(ScriptedEngine(ENDLESS), slots=8)
    jobs = [driver.submit(tokens(5, base)) for base in range(8)]
    driver.step()
    driver.deliveries.clear()
    driver.step()
    assert [[job for job, _ in batch] for batch in driver.deliveries] == [jobs]


def test_bad_configuration_names_the_value() -> None:
    with pytest.raises(ConfigError, match="mixed_prefill_quantum must be at least 1, got 0"):
        SchedulerConfig(mixed_prefill_quantum=0)
    with pytest.raises(ConfigError, match="step_seconds must be positive, got 0"):
        SchedulerConfig(step_seconds=0)


# ---- cancellation


def usable(driver: Driver) -> bool:
    return driver.finish(driver.ask("still there?", max_tokens=3)).reason == "length"


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "before the first step"])
def test_cancellation(phase: str) -> None:
    driver = Driver(ScriptedEngine(ENDLESS))
    blocker = driver.submit(tokens(4, 9)) if phase == "queued" else None
    if blocker:
        driver.step()
    job = driver.submit(tokens(6000, 1))
    driver.steps({"queued": 1, "prefill": 2, "decode": 5, "before the first step": 0}[phase])
    before = driver.events(job).copy()
    evaluated = driver.scheduler.slots[0].session.n_tokens
    driver.scheduler.cancel(job)
    plan = driver.step()
    assert all(work.generation.job is not job for work in plan.work)
    new = driver.events(job)[len(before) :]
    assert [type(e) for e in new] == [Finish]
    assert driver.finish(job).reason == "cancelled"
    assert driver.scheduler.n_queued == 0
    if blocker:
        driver.scheduler.cancel(blocker)
        driver.step()
    else:
        session = driver.scheduler.slots[0].session
        assert session.n_tokens == evaluated, "what was evaluated stays"
        assert session.tokens[:6000].tolist() == tokens(6000, 1)[:evaluated]
    assert usable(driver)
    driver.scheduler.cancel(job)
    driver.run()
    assert driver.finish(job).reason == "cancelled", "cancelling twice is harmless"


def test_a_token_computed_for_a_client_that_left_is_dropped() -> None:
    driver = Driver(ScriptedEngine(ENDLESS), slots=2)
    gone, stays = driver.submit(tokens(4, 0)), driver.submit(tokens(4, 1))
    driver.step()
    plan = driver.scheduler.plan()
    results = driver.engine.step(plan.rows)
    driver.scheduler.cancel(gone)
    driver.scheduler.commit(plan, results)
    assert (driver.text(gone), driver.text(stays)) == ("x", "xx")
    driver.step()
    assert driver.finish(gone).reason == "cancelled"


def test_a_cancelled_prefill_is_resumed_from_where_it_was() -> None:
    driver = Driver(ScriptedEngine("ok"))
    job = driver.submit(tokens(6000))
    driver.steps(2)
    driver.scheduler.cancel(job)
    assert driver.finish(driver.ask(tokens(6000))).cached_tokens == 4096


# ---- failures


def test_a_failed_step_fails_its_jobs_and_only_them() -> None:
    driver = Driver(ScriptedEngine(ENDLESS), slots=2)
    first, second = driver.submit(tokens(4, 0)), driver.submit(tokens(4, 1))
    waiting = driver.submit(tokens(4, 2), max_tokens=2)
    driver.step()
    driver.engine.fail_at(3)
    driver.steps(2)
    for job in (first, second):
        assert driver.end(job) == Failed("scripted failure in step 3", 500)
    assert driver.text(first) == "xx"
    driver.run()
    assert driver.finish(waiting).reason == "length"
    assert [slot.session.n_tokens for slot in driver.scheduler.slots] == [5, 0], "cleared, one used again"


def test_repeated_failure_does_not_loop() -> None:
    driver = Driver(ScriptedEngine(ENDLESS), slots=2)
    jobs = [driver.submit(tokens(4, base)) for base in range(5)]
    for step in range(1, 100):
        driver.engine.fail_at(step)
    assert driver.run() == 3, "two, two and one job, each failed once"
    assert all(isinstance(driver.end(job), Failed) for job in jobs)


def test_the_text_of_a_foreign_error_is_not_for_clients() -> None:
    driver = Driver(ScriptedEngine("ok"))
    driver.engine.fail_at(1, MemoryError("secret /path"))
    assert driver.end(driver.ask("q")) == Failed("internal error", 500)
    assert driver.finish(driver.ask("q")).reason == "stop"


def test_failure_in_prefill_and_at_a_token() -> None:
    driver = Driver(ScriptedEngine(Script.text("a b c").fail_at(3), "fine"))
    job = driver.ask("q")
    assert driver.text(job) == "a b"
    assert driver.end(job) == Failed("scripted failure at token 3", 500)
    driver.engine.fail_in_prefill()
    job = driver.ask("abcd")
    assert [type(e) for e in driver.events(job)] == [Started, Failed]
    assert driver.text(driver.ask("abcd")) == "fine"


def test_what_breaks_one_generation_leaves_its_neighbours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(ScriptedEngine("a b c"), slots=2)
    bad, good = driver.submit(tokens(4, 0)), driver.submit(tokens(4, 1))
    driver.step()

    def breaks(data: bytes) -> list[object]:
        raise ValueError("no such state")

    class Broken:
        feed = staticmethod(breaks)
        reasoning_open = False

    generation = driver.scheduler.slots[0].generation
    assert generation is not None
    monkeypatch.setattr(generation, "_parser", Broken())
    driver.run()
    assert driver.end(bad) == Failed("internal error", 500)
    assert driver.text(good) == "a b c"
    assert driver.scheduler.slots.n_busy == 0


def test_a_request_that_cannot_start_fails_alone() -> None:
    driver = Driver(ScriptedEngine("ok"))
    job = driver.ask("q", syntax="no such syntax")
    assert isinstance(driver.end(job), Failed)
    assert driver.finish(driver.ask("q")).reason == "stop"


@pytest.mark.parametrize("breaks_at", [1, 2], ids=["routing", "first chunk"])
def test_a_prompt_that_breaks_the_lookup_fails_alone(monkeypatch: pytest.MonkeyPatch, breaks_at: int) -> None:
    driver = Driver(ScriptedEngine("a b c"), slots=2)
    good = driver.submit(tokens(60, 0))
    driver.step()
    looked_up = 0
    common = ScriptedSession.common_prefix

    def breaks(session: ScriptedSession, prompt: npt.NDArray[np.int32], beyond: int = 0) -> int:
        nonlocal looked_up
        looked_up += prompt[0] == 66
        if prompt[0] == 66 and looked_up >= breaks_at:
            raise IndexError("no such row")
        return common(session, prompt, beyond)

    monkeypatch.setattr(ScriptedSession, "common_prefix", breaks)
    bad, later = driver.submit(tokens(60, 66)), driver.submit(tokens(4, 1))
    driver.run(limit=20)
    assert driver.end(bad) == Failed("internal error", 500)
    assert (driver.started(bad) is None, driver.text(good), driver.text(later)) == (True, "a b c", "a b c")


def test_a_prompt_that_no_step_can_take_is_refused_at_once() -> None:
    driver = Driver(ScriptedEngine("a b c", ctx=100))
    running = driver.submit(tokens(4))
    driver.step()
    with pytest.raises(RequestError, match="empty"):
        driver.submit([])
    with pytest.raises(ContextLengthError, match="Prompt has 101 tokens"):
        driver.submit(tokens(101))
    for wrong in (-1, driver.engine.info.vocab_size, 1 << 40):
        with pytest.raises(RequestError, match=f"token {wrong} is outside"):
            driver.submit([1, 2, 3], prompt_tokens=(1, wrong, 3))
    with pytest.raises(RequestError, match="a token is outside"):
        driver.submit([1, 2, 3], prompt_tokens=(1, 1 << 70, 3))
    driver.run()
    assert driver.text(running) == "a b c"


class BrokenObserver:
    def on_start(self, job: Job, reuse: Reuse, queue_seconds: float) -> None:
        raise KeyError("start")

    def on_step(self, report: StepReport) -> None:
        raise KeyError("step")

    def on_end(self, job: Job, event: Finish | Failed) -> None:
        raise KeyError("end")

    def on_idle(self) -> None:
        raise KeyError("idle")


def test_an_observer_that_breaks_harms_no_job(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(ScriptedEngine("a b c"), observer=BrokenObserver())
    assert driver.text(driver.ask("q")) == "a b c"
    told = {record.message for record in caplog.records if "observer failed" in record.message}
    assert told == {f"observer failed: '{what}'" for what in ("start", "step", "end", "idle")}


def test_a_session_that_cannot_be_cleared_is_not_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(ScriptedEngine(ENDLESS), slots=2)
    first, second = driver.submit(tokens(4, 0)), driver.submit(tokens(4, 1))
    driver.step()

    def broken() -> None:
        raise EngineError("lost")

    plan = driver.scheduler.plan()
    monkeypatch.setattr(driver.engine.sessions[0], "clear", broken)
    driver.scheduler.fail(plan, EngineError("lost"))
    assert driver.end(first) == driver.end(second) == Failed("lost", 500)
    assert driver.scheduler.slots.n_busy == 0


def test_every_admission_is_one_line_of_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ds4.slots")
    driver = Driver(ScriptedEngine("ok"))
    driver.ask("abcd", id="first")
    driver.ask("abcd", id="second")
    assert [record.message for record in caplog.records if record.name == "ds4.slots"] == [
        "first: slot 0: none, 0 of 4 prompt tokens reused",
        "second: slot 0: memory-rewind, 3 of 4 prompt tokens reused, 2 of 5 live tokens dropped (idle 0 s, recent)",
    ]


def test_undeliverable_events_do_not_stop_the_scheduler() -> None:
    def closed(batch: list[tuple[Job, list[Event]]]) -> None:
        raise RuntimeError("event loop is closed")

    engine = ScriptedEngine("a b")
    scheduler = Scheduler(engine, SchedulerConfig(), closed)
    scheduler.submit(Driver(ScriptedEngine()).request("q"))
    while (plan := scheduler.plan()).rows:
        scheduler.commit(plan, engine.step(plan.rows))
    assert scheduler.slots.n_busy == 0
    assert len(engine.steps) == 3


# ---- shutdown


def test_shutdown_lets_running_jobs_finish_and_refuses_the_rest() -> None:
    driver = Driver(ScriptedEngine("a b c"))
    running, queued = driver.submit("q"), driver.submit("r")
    driver.step()
    driver.scheduler.shutdown(grace=60.0)
    with pytest.raises(ShuttingDown):
        driver.submit("s")
    driver.step()
    assert driver.end(queued) == Failed("server shutting down", 503)
    assert not driver.scheduler.stopped
    driver.run()
    assert driver.text(running) == "a b c"
    assert driver.scheduler.stopped


def test_shutdown_ends_running_jobs_at_the_deadline_or_at_the_second_call() -> None:
    clock = Clock()
    driver = Driver(ScriptedEngine(ENDLESS, step_seconds=1.0, sleep=clock.sleep), clock=clock)
    job = driver.submit("q")
    driver.step()
    driver.scheduler.shutdown(grace=5.0)
    assert driver.run() == 5
    assert driver.end(job) == Failed("shutdown requested", 503)
    assert driver.scheduler.stopped

    driver = Driver(ScriptedEngine(ENDLESS))
    job = driver.submit("q")
    driver.step()
    driver.scheduler.shutdown(grace=60.0)
    driver.step()
    assert driver.end(job) is None
    driver.scheduler.shutdown(grace=0.0)
    assert not driver.step().rows
    assert driver.end(job) == Failed("shutdown requested", 503)
    assert driver.scheduler.stopped


def test_shutdown_of_an_idle_scheduler_stops_at_once() -> None:
    driver = Driver(ScriptedEngine())
    driver.scheduler.shutdown(grace=60.0)
    assert not driver.step().rows
    assert driver.scheduler.stopped


# ---- what observers see


class Recorder:
    def __init__(self) -> None:
        self.starts: list[tuple[str, float]] = []
        self.steps: list[StepReport] = []
        self.ends: list[str] = []
        self.idle = 0

    def on_start(self, job: Job, reuse: Reuse, queue_seconds: float) -> None:
        self.starts.append((reuse.kind, queue_seconds))

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_end(self, job: Job, event: Finish | Failed) -> None:
        self.ends.append(event.reason if isinstance(event, Finish) else f"failed {event.status}")

    def on_idle(self) -> None:
        self.idle += 1


def test_the_observer_sees_every_step_start_and_end() -> None:
    clock, recorder = Clock(), Recorder()
    engine = ScriptedEngine("a b", "c", step_seconds=0.25, sleep=clock.sleep)
    driver = Driver(engine, clock=clock, observer=recorder)
    driver.submit(tokens(4, 0))
    driver.submit(tokens(6, 1))
    last = driver.submit(tokens(4, 2))
    driver.step()
    driver.scheduler.cancel(last)
    driver.run()
    assert recorder.starts == [("none", 0.0), ("none", 0.75)]
    assert recorder.ends == ["cancelled", "stop", "stop"]
    assert recorder.idle == 1
    first, second, *_ = recorder.steps
    assert first == StepReport(0.25, 0, 1, 4, queued=2, busy=1, ttft=[0.25], itl=[])
    assert second == StepReport(0.25, 1, 0, 0, queued=1, busy=1, ttft=[], itl=[0.25])


def test_gauges_fall_to_zero_when_the_last_job_is_cancelled() -> None:
    metrics = Metrics(slots_total=1)
    driver = Driver(ScriptedEngine(ENDLESS), observer=metrics)
    job, queued = driver.submit("q"), driver.submit("r")
    driver.step()
    assert (metrics.slots_busy, metrics.queue_length) == (1, 1)
    driver.scheduler.cancel(queued)
    driver.scheduler.cancel(job)
    driver.step()
    assert (metrics.slots_busy, metrics.queue_length) == (0, 0)
    assert metrics.finished == {("chat", "cancelled"): 2}


def test_slot_states_for_people() -> None:
    driver = Driver(ScriptedEngine(ENDLESS), slots=3)
    driver.submit(tokens(4, 0), id="short")
    driver.step()
    driver.submit(tokens(1000, 1), id="long")
    driver.step()
    states = [(s.request, s.phase, s.prompt_done, s.completion_tokens) for s in driver.scheduler.slot_states()]
    assert states == [("short", "decode", 4, 2), ("long", "prefill", 128, 0), (None, "idle", 0, 0)]


# ---- many jobs, exact state


def cold_answer(prompt: list[int], seed: int) -> str:
    driver = Driver(ScriptedEngine(model=hash_model(seed, end=END)))
    return driver.text(driver.ask(prompt, max_tokens=60))


@pytest.mark.parametrize("seed", range(8))
def test_answers_do_not_depend_on_neighbours_reuse_aborts_or_failures(seed: int) -> None:
    """Conversations that share prefixes, go on, are asked again, aborted and lost: each answer equals the cold one.

    The model's next token depends on all tokens before it, so a single wrong token of state changes the text.
    """
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = ScriptedEngine(model=hash_model(seed, end=END), rewinds=seed % 3 != 0)
    driver = Driver(engine, slots=rng.choice([1, 2, 4]), prefill_quantum=64, mixed_prefill_quantum=16)
    system = [rng.randrange(97, 105) for _ in range(80)]
    histories = [[*system, *(rng.randrange(97, 105) for _ in range(rng.randrange(1, 90)))] for _ in range(6)]
    live: dict[Job, list[int]] = {}
    aborted: set[Job] = set()
    kinds: set[str] = set()
    for _ in range(40):
        for _ in range(rng.randrange(3)):
            history = rng.choice(histories)
            live[driver.submit(history, max_tokens=60)] = history
        if rng.random() < 0.2:
            engine.fail_at(engine.n_steps + rng.randrange(1, 12))
        driver.steps(rng.randrange(25))
        for job, history in list(live.items()):
            if rng.random() < 0.015:
                driver.scheduler.cancel(job)
                aborted.add(job)
            end = driver.end(job)
            if isinstance(end, Finish) and job not in aborted and len(history) < 2000:
                answer = driver.text(job).encode()
                histories[rng.randrange(len(histories))] = [*history, *answer, END, rng.randrange(97, 105)]
    driver.run()
    answered = 0
    for job, history in live.items():
        end = driver.end(job)
        assert end is not None
        started = driver.started(job)
        if started is not None:
            kinds.add(started.reuse)
        if isinstance(end, Failed) or end.reason == "cancelled":
            assert cold_answer(history, seed).startswith(driver.text(job))
        else:
            assert driver.text(job) == cold_answer(history, seed)
            answered += 1
    assert answered > 10
    assert any(isinstance(driver.end(job), Failed) for job in live)
    assert len(kinds) >= 2, kinds
    assert driver.scheduler.slots.n_busy == 0


# ---- the thread


class Collector:
    """Takes deliveries from the engine thread and lets a test wait for ends."""

    def __init__(self) -> None:
        self.events: dict[Job, list[Event]] = {}
        self._changed = threading.Condition()

    def __call__(self, batch: list[tuple[Job, list[Event]]]) -> None:
        with self._changed:
            for job, events in batch:
                self.events.setdefault(job, []).extend(events)
            self._changed.notify_all()

    def end(self, job: Job) -> Event:
        def ended() -> bool:
            return isinstance(self.events.get(job, [None])[-1], (Finish, Failed))

        with self._changed:
            assert self._changed.wait_for(ended, timeout=60)
        return self.events[job][-1]

    def text(self, job: Job) -> str:
        return "".join(e.text for e in self.events[job] if isinstance(e, ContentDelta))


def threaded(engine: ScriptedEngine, slots: int) -> tuple[Collector, Scheduler, EngineThread]:
    collector = Collector()
    scheduler = Scheduler(engine, SchedulerConfig(slots=slots), collector)
    thread = EngineThread(engine, scheduler)
    thread.start()
    return collector, scheduler, thread


def test_identical_pairs_submitted_from_many_threads_get_identical_answers() -> None:
    engine = ScriptedEngine(model=hash_model(5, end=END))
    collector, scheduler, thread = threaded(engine, slots=4)
    requests = Driver(ScriptedEngine())
    prompts = [tokens(20 + 100 * base, base) for base in range(8)]
    jobs: dict[int, list[Job]] = {base: [] for base in range(8)}
    barrier = threading.Barrier(16)

    def client(base: int) -> None:
        barrier.wait()
        jobs[base].append(scheduler.submit(requests.request(prompts[base], max_tokens=60)))

    clients = [threading.Thread(target=client, args=(base,)) for base in range(8) for _ in range(2)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    for base, pair in jobs.items():
        for job in pair:
            assert isinstance(collector.end(job), Finish)
            assert collector.text(job) == cold_answer(prompts[base], 5)
    scheduler.shutdown(0.0)
    assert thread.join(30)
    assert all(session.closed for session in engine.sessions)


def test_the_thread_survives_failures_and_cancels_what_is_in_flight() -> None:
    engine = ScriptedEngine(ENDLESS)
    collector, scheduler, thread = threaded(engine, slots=1)
    requests = Driver(ScriptedEngine())
    engine.fail_at(1, EngineError("lost"))
    assert collector.end(scheduler.submit(requests.request("a"))) == Failed("lost", 500)
    with engine.paused():
        job = scheduler.submit(requests.request("b"))
        engine.wait_for_steps(2)
        scheduler.cancel(job)
    end = collector.end(job)
    assert isinstance(end, Finish) and end.reason == "cancelled"
    assert collector.text(job) == ""
    last = scheduler.submit(requests.request("c", max_tokens=3))
    assert isinstance(collector.end(last), Finish)
    assert collector.text(last) == "xxx"
    scheduler.shutdown(0.0)
    assert thread.join(30)
    with pytest.raises(ShuttingDown):
        scheduler.submit(requests.request("d"))


def test_the_thread_survives_a_scheduler_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine("fine")
    collector = Collector()
    scheduler = Scheduler(engine, SchedulerConfig(), collector)
    commit, broken = scheduler.commit, [True]

    def commit_once_broken(plan: Plan, results: list[object]) -> None:
        if broken.pop():
            broken.append(False)
            raise KeyError("gone")
        broken.append(False)
        commit(plan, results)  # type: ignore[arg-type]

    monkeypatch.setattr(scheduler, "commit", commit_once_broken)
    thread = EngineThread(engine, scheduler)
    thread.start()
    requests = Driver(ScriptedEngine())
    assert collector.end(scheduler.submit(requests.request("a"))) == Failed("internal error", 500)
    assert isinstance(collector.end(scheduler.submit(requests.request("b"))), Finish)
    scheduler.shutdown(0.0)
    assert thread.join(30)
