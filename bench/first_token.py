"""First token of a long prompt: evaluated from the start, and found in a live session, another session, on a warm disk.

    python -m bench.first_token                    # demo model, 6,000 tokens, exit status 1 when a claim does not hold
    python -m bench.first_token --model F --tokens 3000

Every round has a new text, evaluates it cold, goes on with it in its session (live), asks for another end of it while
its session is busy (fork), and once more after all sessions were emptied and its checkpoint written (disk; the file is
in the page cache). Each of them adds the same short question. Time is from the submission to the first token, on the
engine's own thread, with everything in it that a server does there. The shares are medians over the rounds; CPU time
of the process beside them, because neighbours disturb clocks. Claims: live <= 3 %, fork <= 5 %, disk <= 10 % of cold.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench import report
from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig, SamplingParams
from ds4.prompt.registry import syntax_of
from ds4.server.checkpoints import Checkpoints
from ds4.server.engine_thread import run_once, share_interpreter
from ds4.server.generation import Job
from ds4.server.keys import markers_of
from ds4.server.kvpolicy import KvConfig
from ds4.server.kvstore import KvStore
from ds4.server.scheduler import Scheduler, SchedulerConfig
from ds4.server.types import ContentDelta, Event, Failed, Finish, GenerationRequest, Started

LIMITS = {"live": 3.0, "fork": 5.0, "disk": 10.0}
QUESTION = "\nAnd what do you make of that?"


class Runner:
    """An engine with its scheduler and a disk cache, driven on this thread; knows when each job's tokens came."""

    def __init__(self, engine: Engine, directory: Path, slots: int) -> None:
        share_interpreter()
        self.engine = engine
        tokenizer = engine.tokenizer
        renderer = syntax_of(engine.info, "ds4").make(engine.info)
        self.store = KvStore(KvConfig(directory, cold_max=0, continued_interval=0), engine)
        checkpoints = Checkpoints(self.store, tokenizer, markers_of(renderer, tokenizer))
        self.scheduler = Scheduler(engine, SchedulerConfig(slots=slots), self._deliver, checkpoints=checkpoints)
        self.times: dict[Job, list[float]] = {}
        self.texts: dict[Job, str] = {}
        self.reuse: dict[Job, str] = {}
        self.over: set[Job] = set()

    def _deliver(self, batch: list[tuple[Job, list[Event]]]) -> None:
        now = time.perf_counter()
        for job, events in batch:
            for event in events:
                if isinstance(event, Started):
                    self.reuse[job] = event.reuse
                elif isinstance(event, ContentDelta):
                    self.times.setdefault(job, []).append(now)
                    self.texts[job] = self.texts.get(job, "") + event.text
                elif isinstance(event, Failed):
                    raise RuntimeError(event.message)
                elif isinstance(event, Finish):
                    self.over.add(job)

    def submit(self, text: str, tokens: int) -> Job:
        tokenizer = self.engine.tokenizer
        ids = tokenizer.encode(text)
        request = GenerationRequest(
            id="r",
            dialect="completions",
            model="m",
            prompt_tokens=tuple(ids),
            key=text.encode(),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=tokens,
            syntax="raw",
            ignore_eos=True,
        )
        return self.scheduler.submit(request)

    def first(self, text: str) -> tuple[Job, float, float]:
        """(job, seconds, CPU seconds) from the submission to the first token."""
        begin, cpu = time.perf_counter(), time.process_time()
        job = self.submit(text, 8)
        while job not in self.times:
            run_once(self.engine, self.scheduler)
        return job, self.times[job][0] - begin, time.process_time() - cpu

    def finish(self, job: Job) -> None:
        while job not in self.over:
            run_once(self.engine, self.scheduler)

    def empty(self) -> None:
        for slot in self.scheduler.slots:
            slot.session.clear()
            slot.forget()


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(("river", "stone", "window", "garden", "letter", "number")) for _ in range(count))


def one_round(runner: Runner, rng: random.Random, tokens: int) -> dict[str, tuple[float, float]]:
    """(seconds, CPU seconds) of each way to the first token of a new text."""
    found: dict[str, tuple[float, float]] = {}
    runner.empty()
    base = words(rng, tokens - 30)
    cold, *found["cold"] = runner.first(base + QUESTION)  # type: ignore[assignment]
    runner.finish(cold)
    goes_on = base + QUESTION + runner.texts[cold] + QUESTION
    live, *found["live"] = runner.first(goes_on)  # type: ignore[assignment]
    fork, *found["fork"] = runner.first(base + " Once more." + QUESTION)  # type: ignore[assignment]
    runner.finish(live)
    runner.finish(fork)
    slot = next(s for s in runner.scheduler.slots if s.text is not None and s.text.whole.startswith(goes_on.encode()))
    assert slot.text is not None
    runner.store.offer(slot.session, slot.text.whole, "evict")
    runner.store.flush()
    again = slot.text.whole.decode("utf-8", "ignore") + QUESTION
    runner.empty()
    disk, *found["disk"] = runner.first(again)  # type: ignore[assignment]
    runner.finish(disk)
    kinds = [runner.reuse[job] for job in (cold, live, fork, disk)]
    if kinds[0] != "none" or not kinds[1].startswith("memory") or kinds[2:] != ["fork", "disk-text"]:
        raise RuntimeError(f"other ways than meant: {kinds}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="keep the numbers in bench/results/")
    args = parser.parse_args()
    engine = Engine.open(EngineConfig(model=args.model, ctx=args.tokens + 512, slots=2, threads=args.threads))
    rng = random.Random(1)
    rounds = []
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(engine, Path(directory), 2)
        for _ in range(args.rounds):
            rounds.append(one_round(runner, rng, args.tokens))
        runner.scheduler.close()
    rows = []
    holds = True
    numbers: dict[str, float] = {}
    for way in ("cold", "live", "fork", "disk"):
        seconds, cpu = (statistics.median(found[way][i] for found in rounds) for i in (0, 1))
        share, cpu_share = (
            100 * statistics.median(found[way][i] / found["cold"][i] for found in rounds) for i in (0, 1)
        )
        limit = LIMITS.get(way)
        holds = holds and (limit is None or share <= limit)
        rows.append((way, f"{seconds:.3f}", f"{cpu:.3f}", f"{share:.1f}", f"{cpu_share:.1f}", limit or ""))
        numbers[way] = round(share, 2)
    print(f"first token of a prompt of {args.tokens} tokens, {engine.info.name}, medians of {args.rounds} rounds")
    print(report.table(("found", "seconds", "CPU s", "% of cold", "% of its CPU", "claim %"), rows))
    print("the claims hold" if holds else "A CLAIM DOES NOT HOLD")
    if args.save:
        report.save("first_token", {"model": engine.info.name, "tokens": args.tokens, "share_percent": numbers})
    engine.close()
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
