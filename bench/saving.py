"""What saving and loading big sessions adds to the time between the tokens of other streams.

    python -m bench.saving                  # demo model, 4 streams, sessions of 6,000 tokens; exit status 1 above 5 ms

Windows of steps in turn: nothing beside the streams, then a save of a big session every few steps (a fork on the
engine's thread, the rest on the store's), then a load into an idle session. For each window the longest gap between two
steps' tokens, and the median gap; the table has the medians over the windows, so that a neighbour who takes the
processor now and then does not decide. Then saves and loads one by one, with steps until each is done: how long they
take is the store's own account. `added` is the difference of the longest gaps beyond that of the median gaps:
memory bandwidth that a save takes is in the latter, waiting for it in the former. Claim: a save adds at most 5 ms to
any gap.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench import report
from bench.first_token import Runner, words
from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig
from ds4.server.engine_thread import run_once

LIMIT_MS = 5.0


class Windows:
    """Steps of running streams, and how long each took from the delivery of the one before."""

    def __init__(self, runner: Runner, steps: int) -> None:
        self._runner = runner
        self._steps = steps

    def run(self, beside: object = None, every: int = 0) -> list[float]:
        """Gaps of one window in ms; `beside` is called on this thread before every `every`-th step."""
        gaps = []
        last = time.perf_counter()
        for step in range(self._steps):
            if callable(beside) and every and step % every == 1:
                beside()
            run_once(self._runner.engine, self._runner.scheduler)
            now = time.perf_counter()
            gaps.append((now - last) * 1e3)
            last = now
        return gaps


class Account(logging.Handler):
    """Milliseconds of saves and loads, as the store's log has them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.ms: dict[str, list[float]] = {"save": [], "load": []}

    def emit(self, record: logging.LogRecord) -> None:
        for what, ms in re.findall(r"(save|load)=([\d.]+) ms", record.getMessage()):
            self.ms[what].append(float(ms))

    def of(self, what: str, begin: Callable[[], None], step: Callable[[], object]) -> tuple[float, int]:
        """Milliseconds of the save or load that `begin` asks for, and the steps until it was done."""
        known, steps = len(self.ms[what]), 0
        begin()
        while len(self.ms[what]) == known:
            step()
            steps += 1
        return self.ms[what][-1], steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="keep the numbers in bench/results/")
    args = parser.parse_args()
    count = args.streams
    engine = Engine.open(EngineConfig(model=args.model, ctx=args.tokens + 4096, slots=count + 1, threads=args.threads))
    rng = random.Random(1)
    big, target = engine.new_session(), engine.new_session()
    big.sync(engine.tokenizer.encode(words(rng, args.tokens + 100))[: args.tokens])
    text = words(rng, args.tokens).encode()
    results: dict[str, list[list[float]]] = {"nothing": [], "saves": [], "loads": []}
    on_thread: list[float] = []
    account = Account()
    logging.getLogger("ds4.kv").addHandler(account)
    logging.getLogger("ds4.kv").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(engine, Path(directory), count)
        store = runner.store
        windows = Windows(runner, args.steps)
        for i in range(count):
            runner.submit(f"{i} " + words(rng, 20), 3900)
        windows.run()
        saved = 0

        def save() -> None:
            nonlocal saved
            begin = time.perf_counter()
            saved += store.offer(big, text + b" %d" % saved, "evict")
            on_thread.append((time.perf_counter() - begin) * 1e3)

        store.offer(big, text, "evict")
        store.flush()
        key = text + b" and more"
        entry = store.find(key)
        assert entry is not None

        def load() -> None:
            store.restore(entry, target, key, lambda error: None)

        for _ in range(args.windows):
            results["nothing"].append(windows.run())
            results["saves"].append(windows.run(save, args.steps // 2))
            store.flush()
            results["loads"].append(windows.run(load, args.steps // 2))
            store.flush()
        beside: dict[str, list[tuple[float, int]]] = {"save": [], "load": []}
        for _ in range(5):
            for what, begin in (("save", save), ("load", load)):
                beside[what].append(account.of(what, begin, lambda: run_once(engine, runner.scheduler)))
        size = next(Path(directory).glob("*.kv")).stat().st_size / 2**20
        runner.scheduler.shutdown(0.0)
        while not runner.scheduler.stopped:
            run_once(engine, runner.scheduler)
        store.close()
    middle = {what: statistics.median(statistics.median(w) for w in found) for what, found in results.items()}
    longest = {what: statistics.median(max(w) for w in found) for what, found in results.items()}
    rows = []
    added = {}
    for what, found in results.items():
        worst = max(max(w) for w in found)
        added[what] = (longest[what] - longest["nothing"]) - (middle[what] - middle["nothing"])
        rows.append((what, f"{middle[what]:.2f}", f"{longest[what]:.2f}", f"{worst:.2f}", f"{added[what]:+.2f}"))
    print(f"{count} streams, {saved} saves of {args.tokens} tokens ({size:.0f} MiB); ms between the steps' tokens")
    print(report.table(("beside them", "median gap", "longest of a window", "longest of all", "added"), rows))
    print(
        f"a save on the engine's thread: median {statistics.median(on_thread):.3f} ms, longest {max(on_thread):.3f} ms"
    )
    taken = {what: [statistics.median(column) for column in zip(*all, strict=True)] for what, all in beside.items()}
    for what, (ms, steps) in taken.items():
        print(f"beside the streams a {what} takes {ms:.0f} ms, {steps:.0f} steps")
    holds = added["saves"] <= LIMIT_MS and max(on_thread) <= LIMIT_MS
    print(f"a save adds at most {LIMIT_MS:g} ms: {'holds' if holds else 'DOES NOT HOLD'}")
    if args.save:
        numbers = {
            "median_gap_ms": middle,
            "longest_gap_ms": longest,
            "added_ms": added,
            "taken_ms_and_steps": taken,
            "saves": saved,
            "file_mib": size,
        }
        report.save("saving", {"model": engine.info.name, "tokens": args.tokens, "streams": count, **numbers})
    runner.scheduler.slots.close()
    engine.close()
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
