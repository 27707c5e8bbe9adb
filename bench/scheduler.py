"""What the scheduler costs per streamed token: everything on the engine thread outside `engine.step`.

    python bench/scheduler.py [--tokens N] [--rounds N]

A scripted engine draws the tokens; planning, stop strings, the output parser, events and their delivery are the real
ones. Each figure is the best of several rounds of CPU time, so that a busy neighbour does not count. The claim: at
most 25 us per token at 16 streams. Exits with 1 when it does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ds4.engine.types import Row, RowResult, SamplingParams
from ds4.server.generation import Job
from ds4.server.scheduler import Scheduler, SchedulerConfig
from ds4.server.types import Event, GenerationRequest
from ds4.testing import Script, ScriptedEngine
from ds4.testing.driver import Driver

LIMIT_US = 25.0
PROSE = "The quick brown fox jumps over the lazy dog, and then it rests for a while in the shade. "
CALL = "<tool_call>\n<function=write>\n<parameter=text>\n" + PROSE
SCHEMA = '{"type": "object", "properties": {"text": {"type": "string"}}}'


@dataclass(frozen=True)
class Case:
    name: str
    streams: int
    text: str = PROSE
    tools: bool = False
    stop: tuple[bytes, ...] = ()
    logprobs: int | None = None


CASES = [
    Case("1 stream", 1),
    Case("4 streams", 4),
    Case("16 streams", 16),
    Case("16 streams, 4 stop strings", 16, stop=(b"\n\nHuman:", b"<|end|>", b"STOP", b"###")),
    Case("16 streams, inside a tool call", 16, text=CALL, tools=True),
    Case("16 streams, 5 log-probabilities", 16, logprobs=5),
]


def microseconds_per_token(case: Case, tokens: int) -> float:
    """CPU microseconds per token of one round, without `step`."""
    engine = ScriptedEngine(Script.text(case.text).endless())
    requests = Driver(engine)
    delivered = 0

    def deliver(batch: list[tuple[Job, list[Event]]]) -> None:
        nonlocal delivered
        delivered += len(batch)

    scheduler = Scheduler(engine, SchedulerConfig(slots=case.streams), deliver)
    for stream in range(case.streams):
        scheduler.submit(request(requests, case, stream))
    while any(slot.generation is None or slot.generation.prefilling for slot in scheduler.slots):
        plan = scheduler.plan()
        scheduler.commit(plan, engine.step(plan.rows))
    in_step = 0.0
    steps = tokens // case.streams
    before = completion_tokens(scheduler)
    delivered = 0
    begin = time.thread_time()
    for _ in range(steps):
        plan = scheduler.plan()
        results, seconds = timed_step(engine, plan.rows)
        in_step += seconds
        scheduler.commit(plan, results)
    spent = time.thread_time() - begin - in_step
    made = completion_tokens(scheduler) - before
    if made != steps * case.streams or delivered < made // 2:
        raise SystemExit(f"{case.name}: {made} tokens, {delivered} deliveries in {steps} steps of {case.streams}")
    return spent / (steps * case.streams) * 1e6


def completion_tokens(scheduler: Scheduler) -> int:
    return sum(state.completion_tokens for state in scheduler.slot_states())


def request(requests: Driver, case: Case, stream: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, logprobs=case.logprobs)
    return requests.request(
        f"prompt {stream}",
        max_tokens=1 << 30,
        stop=case.stop,
        tools=case.tools,
        tool_schemas=(("write", SCHEMA),) if case.tools else (),
        sampling=sampling,
    )


def timed_step(engine: ScriptedEngine, rows: Sequence[Row]) -> tuple[list[RowResult], float]:
    begin = time.thread_time()
    results = engine.step(rows)
    return results, time.thread_time() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description="CPU cost per streamed token outside the engine's step")
    parser.add_argument("--tokens", type=int, default=16_000, help="tokens per round (16000)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; the best counts (7)")
    args = parser.parse_args()
    print(f"{'case':<36}{'us/token':>10}")
    holds = True
    for case in CASES:
        best = min(microseconds_per_token(case, args.tokens) for _ in range(args.rounds))
        print(f"{case.name:<36}{best:>10.2f}")
        holds = holds and (case.streams < 16 or best <= LIMIT_US)
    print(f"at most {LIMIT_US:.0f} us at 16 streams: {'holds' if holds else 'DOES NOT HOLD'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
