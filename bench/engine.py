"""End-to-end rates of the engine: prefill, decode at depth, batched decode, and what a step costs beside the forward.

    python bench/engine.py [MODEL] [--threads N] [--isa NAME] [--backend NAME] [--json]

Prefill is 512 tokens in one session; decode is one token per step of `Engine.step`, sampled greedily, at depth 0 and
2048; batches are 2, 4, 8 and 16 sessions, once more with 16 sessions at the default sampling. Each number is the best
of several rounds: neighbours on the machine only make it slower. The second column counts CPU time of all threads,
which neighbours disturb less. The overhead is the CPU time of a 16-row step of a one-layer model of 32 columns, where
the forward itself costs next to nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ds4
from ds4 import _cpu
from ds4.engine.engine import Engine
from ds4.engine.types import Row, SamplingParams

PREFILL = 512
STEPS = 32
GREEDY = SamplingParams(temperature=0)


Rates = tuple[float, float]
"""Tokens per second of the fastest round, and tokens per second of CPU time of all threads in the cheapest one."""


def best(rounds: int, run: Callable[[], int]) -> Rates:
    """`run` returns how many tokens it made."""
    wall, cpu = [], []
    for _ in range(rounds):
        start, start_cpu = time.perf_counter(), time.process_time()
        tokens = run()
        wall.append(tokens / (time.perf_counter() - start))
        cpu.append(tokens / (time.process_time() - start_cpu))
    return max(wall), max(cpu)


def prompt(engine: Engine, n: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(engine.info.vocab_size // 8, engine.info.vocab_size, n)]


def prefill_rate(engine: Engine, n: int, rounds: int) -> Rates:
    session = engine.new_session(n)
    tokens = prompt(engine, n, 1)

    def run() -> int:
        session.clear()
        session.sync(tokens)
        return n

    return best(rounds, run)


def decode_rate(engine: Engine, width: int, depth: int, rounds: int, params: SamplingParams = GREEDY) -> Rates:
    sessions = [engine.new_session(depth + 8 + STEPS * (rounds + 1)) for _ in range(width)]
    samplers = [engine.new_sampler(params) for _ in range(width)]
    sessions[0].sync(prompt(engine, max(1, depth), 2))
    for other in sessions[1:]:
        other.fork_from(sessions[0])
    tokens = [9 + i for i in range(width)]

    def run() -> int:
        for _ in range(STEPS):
            rows = [Row(s, [t], p) for s, t, p in zip(sessions, tokens, samplers, strict=True)]
            for i, result in enumerate(engine.step(rows)):
                tokens[i] = result.token or 0
        return STEPS * width

    run()
    return best(rounds, run)


def step_overhead() -> dict[str, float]:
    """Microseconds of a 16-row step: through `Engine.step`, through the binding alone, and per part."""
    from tests.support.tiny_llama import TinyLlama

    tiny = TinyLlama.make(layers=1, width=32, ff=32, heads=1, kv_heads=1, vocab=260, qtype=0)
    with tempfile.TemporaryDirectory() as folder:
        engine = ds4.load(tiny.write_gguf(Path(folder) / "tiny.gguf"), threads=1, ctx=4096, check_memory=False)
    sessions = [engine.new_session() for _ in range(16)]
    samplers = [engine.new_sampler(GREEDY) for _ in range(16)]
    rows = [Row(s, [5], p) for s, p in zip(sessions, samplers, strict=True)]
    native = [(s.native, [5], p, False) for s, p in zip(sessions, samplers, strict=True)]
    one = [native[0]]
    model = engine._model.native
    assert all(isinstance(p, _cpu.Sampler) for p in samplers)

    def cost(run: Callable[[], object], n: int = 50, rounds: int = 15) -> float:
        times = []
        for _ in range(rounds):
            for s in sessions:
                s.clear()
            start = time.process_time()
            for _ in range(n):
                run()
            times.append((time.process_time() - start) / n * 1e6)
        return min(times)

    whole = cost(lambda: engine.step(rows))
    binding = cost(lambda: model.step(native))
    single = cost(lambda: model.step(one))
    return {
        "Engine.step, 16 rows of a trivial model, us": whole,
        "  of it Python (Engine.step less the binding), us": whole - binding,
        "binding with forward, 16 rows, us": binding,
        "binding with forward, 1 row, us": single,
    }


def measure(engine: Engine, rounds: int) -> Iterator[tuple[str, Rates]]:
    yield f"prefill {PREFILL}", prefill_rate(engine, PREFILL, rounds)
    yield "decode at depth 0", decode_rate(engine, 1, 0, rounds)
    yield "decode at depth 2048", decode_rate(engine, 1, 2048, rounds)
    for width in (2, 4, 8, 16):
        yield f"decode, {width} sessions", decode_rate(engine, width, 16, rounds)
    yield "decode, 16 sessions, default sampling", decode_rate(engine, 16, 16, rounds, SamplingParams(seed=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default=None, help="GGUF file or directory (default: the demo model)")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()

    start = time.perf_counter()
    config: dict[str, Any] = {"threads": args.threads, "isa": args.isa, "backend": args.backend}
    engine = ds4.load(args.model, ctx=4096, slots=16, **config)
    opened = time.perf_counter() - start
    rates = dict(measure(engine, args.rounds))
    overhead = step_overhead()
    if args.json:
        print(json.dumps({"model": engine.info.id, "backend": engine.backend_name, "rates": rates, "step": overhead}))
        return
    print(f"{engine.info.id} on {engine.backend_name}, opened in {opened:.2f} s")
    print(f"{'tokens per second':55} {'of wall':>10} {'of CPU':>10}")
    for name, (wall, cpu) in rates.items():
        print(f"{name:55} {wall:10.1f} {cpu:10.1f}")
    for name, value in overhead.items():
        print(f"{name:55} {value:10.1f}")


if __name__ == "__main__":
    main()
