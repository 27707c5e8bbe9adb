"""A model on a GPU (or any backend) through its file: upload, decode, prefill, drafts, HTTP, from one open engine.

    ds4 synth /dev/shm/flash.gguf --family deepseek4 --size flash --mtp --distinct-layers 3
    python -m bench.full_size /dev/shm/flash.gguf --cuda --parts decode prefill steps drafts http

Weights of a random model say nothing, but cost what trained ones do; layers that share bytes of the file have copies of
their own on the device. HTTP is `ds4-server`'s own application in this process with `bench.serve` in another, against
the same prompts through `Engine.step`; `--trace` writes down the steps of both. Steps are what the scheduler may choose
from: prompts of 170 tokens, a long one's chunk, and both beside streams, with what its estimate makes of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench import report
from bench.step_share import Timed, trace
from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig, Row, SamplingParams
from ds4.server.app import App
from ds4.server.budget import StepCost
from ds4.server.config import ServerConfig
from ds4.server.generation import Job
from ds4.server.process import settle
from ds4.server.types import GenerationRequest

PARTS = ("open", "decode", "prefill", "steps", "drafts", "http")
SHORT = 170
"""Tokens of a prompt as the clients of `bench.serve` send it, here."""
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=1.0, min_p=0.05, seed=1)
now = time.perf_counter


def opened(args: argparse.Namespace) -> tuple[Engine, dict[str, Any]]:
    config = EngineConfig(
        model=args.model,
        backend="cuda" if args.cuda else "cpu",
        ctx=args.ctx,
        slots=args.slots,
        prefill_chunk=args.chunk,
        mtp=args.mtp,
        mtp_draft=4,
        mtp_margin=0.0,
    )
    start = now()
    parts: list[float] = []
    engine = Engine.open(config, lambda done, total: parts.append(now()))
    seconds = now() - start
    read = sum(engine.info.types.values())
    facts = {
        "backend": engine.backend_name,
        "seconds": seconds,
        "file_gb": args.model.stat().st_size / 1e9,
        "weights_gb": read / 1e9,
        "gb_per_s": read / 1e9 / seconds,
        "upload_gb_per_s": layer_rate(engine, parts),
        "device_gb": engine.plan.weight_bytes / 1e9,
    }
    print(
        f"{facts['backend']}: {facts['weights_gb']:.1f} GB of weights from a file of {facts['file_gb']:.1f} GB in "
        f"{seconds:.1f} s, {facts['gb_per_s']:.1f} GB/s with everything, {facts['upload_gb_per_s']:.1f} GB/s of "
        f"layers; {facts['device_gb']:.1f} GB held"
    )
    return engine, facts


def layer_rate(engine: Engine, reports: list[float]) -> float:
    """GB/s between the first and the last layer, by the reports of loading: one before the layers, one for each."""
    tensors = engine._file.tensors
    layers = sum(t.exact_nbytes for name, t in tensors.items() if name.startswith("blk."))
    count = min(len(reports) - 1, engine.info.n_layers)
    return layers / engine.info.n_layers * count / (reports[count] - reports[0]) / 1e9


def prompt(engine: Engine, n: int, seed: int) -> list[int]:
    """Bytes of no language: ids that every tokenizer has."""
    limit = min(engine.info.vocab_size, 250)
    return [10 + (seed * 7919 + i * 31 + i * i * 7) % (limit - 10) for i in range(n)]


def filled(engine: Engine, count: int, depth: int) -> list[Any]:
    """Sessions with a prompt of `depth` tokens each: one is evaluated, the others are its copies."""
    first = engine.new_session()
    first.sync(prompt(engine, depth, 1))
    others = [engine.new_session() for _ in range(count - 1)]
    for other in others:
        other.fork_from(first)
    return [first, *others]


def decode(engine: Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens/s of steps that draw a token for each session; medians of `--steps`."""
    rows = []
    for depth in args.depths:
        sessions = filled(engine, args.slots, depth)
        for width in (w for w in (1, 4, 8, 16) if w <= args.slots):
            for name, params in (("greedy", GREEDY), ("min-p", SAMPLED), ("logits", None)):
                if params is None and depth != args.depths[0]:
                    continue
                samplers = [engine.new_sampler(params or GREEDY) for _ in range(width)]
                tokens = [20 + i for i in range(width)]
                times = []
                for _ in range(args.steps + 3):
                    start = now()
                    results = engine.step(
                        [
                            Row(s, [t], sampler, want_logits=params is None)
                            for s, t, sampler in zip(sessions, tokens, samplers, strict=False)
                        ]
                    )
                    times.append(now() - start)
                    tokens = [r.token or 0 for r in results]
                rate = width / report.median(times[3:])
                rows.append({"depth": depth, "width": width, "draw": name, "tokens_per_s": rate})
        for session in sessions:
            session.close()
    print(
        report.table(
            ("decode, tokens/s", "depth", "draw", "rate"),
            [(f"{r['width']} sessions", str(r["depth"]), r["draw"], r["tokens_per_s"]) for r in rows],
        )
    )
    return rows


def prefill(engine: Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for n in args.prompts:
        for repeat in range(4):
            session = engine.new_session()
            start = now()
            session.sync(prompt(engine, n, repeat))
            seconds = now() - start
            session.close()
            if repeat:  # the first makes its memory
                rows.append({"tokens": n, "tokens_per_s": n / seconds})
    table = [
        (f"prefill of {n}", report.median([r["tokens_per_s"] for r in rows if r["tokens"] == n])) for n in args.prompts
    ]
    print(report.table((f"tokens/s, chunks of {engine.config.prefill_chunk}", "median"), table))
    return rows


def steps(engine: Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What steps of some prompts and some streams take: best of three, and the straight line through those without
    streams, as the scheduler estimates it."""
    chunk = engine.config.prefill_chunk
    most = min(args.slots, chunk // SHORT)
    mixes = [[SHORT] * n for n in (1, 2, 4, 8, 12) if n <= most]
    mixes += [[n] for n in (32, 128, 256, 512, 1024, 2048) if n <= chunk]
    rows = []
    cost = StepCost()
    streams = filled(engine, args.slots, args.depths[0])
    others = [engine.new_session() for _ in range(most)]
    sampler = engine.new_sampler(GREEDY)
    for width in (w for w in (0, 1, 4, 16) if w <= args.slots):
        for mix in mixes if width < 2 else [[], *([n] for n in (32, 128, 256, 512))]:
            times = []
            for repeat in range(4):
                work = [Row(s, [20 + repeat], engine.new_sampler(GREEDY)) for s in streams[:width]]
                for i, n in enumerate(mix):
                    others[i].clear()
                    work.append(Row(others[i], prompt(engine, n, 10 * i + repeat), sampler if i == 0 else None))
                if not work:
                    continue
                start = now()
                engine.step(work)
                times.append(now() - start)
            seconds = min(times[1:])
            rows.append({"prompts": mix, "tokens": sum(mix), "streams": width, "ms": 1e3 * seconds})
            if width == 0:
                cost.observe(sum(mix), seconds)
    for session in (*streams, *others):
        session.close()
    print(
        report.table(
            ("prompts", "tokens", "streams", "ms", "estimate"),
            [
                (f"{len(r['prompts'])} x {r['prompts'][0] if r['prompts'] else 0}", str(r["tokens"]), str(r["streams"]),
                 r["ms"], 1e3 * cost.seconds(r["tokens"] + r["streams"]))
                for r in rows
            ],
        )
    )  # fmt: skip
    print(f"a step takes {1e3 * cost.fixed:.1f} ms and {1e3 * cost.token:.3f} a token")
    return rows


def drafts(engine: Engine, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What guessing costs, and steps that verify k guesses beside plain ones; the guesses are as good as random."""
    rows: list[dict[str, Any]] = []
    for width in (w for w in (1, 4) if w <= args.slots):
        sessions = filled(engine, width, args.depths[0])
        for k in (0, 1, 2, 3, 4):
            samplers = [engine.new_sampler(GREEDY) for _ in range(width)]
            tokens = [20 + i for i in range(width)]
            steps, guessing = [], []
            for i in range(args.steps + 3):
                start = now()
                results = engine.step(
                    [Row(s, [t], m, drafts=k) for s, t, m in zip(sessions, tokens, samplers, strict=True)]
                )
                seconds = now() - start
                ahead = results[0].ahead
                if i >= 3:
                    steps.append(seconds)
                    guessing.append(ahead.seconds if ahead is not None else 0.0)
                tokens = [r.token or 0 for r in results]
            rows.append(
                {"width": width, "drafts": k, "step_ms": 1e3 * report.median(steps),
                 "guessing_ms": 1e3 * report.median(guessing)}
            )  # fmt: skip
        for session in sessions:
            session.close()
    print(
        report.table(
            ("steps with drafts, ms", "drafts", "step", "of it guessing", "per token if all hold"),
            [
                (
                    f"{r['width']} sessions",
                    str(r["drafts"]),
                    r["step_ms"],
                    r["guessing_ms"],
                    r["step_ms"] / (1 + r["drafts"]),
                )
                for r in rows
            ],
        )
    )
    return rows


def own_rate(engine: Engine | Timed, given: Sequence[Sequence[int]], n: int) -> float:
    """Tokens/s of the prompts, in steps of the configured size, and n drawn tokens each, by Engine.step alone."""
    width = len(given)
    sessions = [engine.new_session() for _ in range(width)]
    samplers = [engine.new_sampler(GREEDY) for _ in range(width)]
    for sampler in samplers:
        sampler.forbid(sorted(engine.tokenizer.eos_ids))
    prompts = [list(tokens) for tokens in given]
    tokens = [0] * width
    start = now()
    while any(prompts):
        left = engine.config.prefill_chunk
        rows: list[Row] = []
        ended: list[int | None] = []
        for s, rest in enumerate(prompts):
            if not rest or left == 0:
                continue
            piece, prompts[s] = rest[:left], rest[left:]
            left -= len(piece)
            ended.append(None if prompts[s] else s)
            rows.append(Row(sessions[s], piece, None if prompts[s] else samplers[s]))
        for whose, result in zip(ended, engine.step(rows), strict=True):
            if whose is not None:
                tokens[whose] = result.token or 0
    for _ in range(n - 1):
        results = engine.step([Row(x, [t], y) for x, t, y in zip(sessions, tokens, samplers, strict=True)])
        tokens = [r.token or 0 for r in results]
    seconds = now() - start
    for session in sessions:
        session.close()
    return width * n / seconds


async def _client(url: str, width: int, n: int, seed: int) -> dict[str, Any]:
    out = Path(f"/tmp/full_size_{seed}.json")
    command = [sys.executable, "-m", "bench.serve", "--url", url, "--concurrency", str(width), "--requests", str(width)]
    command += ["--max-tokens", str(n), "--input-words", "24", "--exact", "--seed", str(seed), "--warmup", "0"]
    process = await asyncio.create_subprocess_exec(*command, "--json", str(out), stdout=subprocess.DEVNULL)
    if await process.wait() != 0:
        raise RuntimeError("the load client reports incomplete answers")
    result: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return result


def http(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """`--rounds` of 16 streaming clients and of the bare engine in turn; the first of each warms up."""
    config = ServerConfig(engine=engine.config, port=0)
    found: dict[str, list[float]] = {"http": [], "engine": [], "ttft_p50_ms": [], "itl_p50_ms": [], "itl_p99_ms": []}

    async def serve() -> None:
        app = App(engine, config)
        await app.start()
        settle()
        timed = Timed(engine)
        app._thread._engine = timed
        prompts: list[Sequence[int]] = []
        submit = app._scheduler.submit

        def noted(request: GenerationRequest, sink: object = None) -> Job:
            prompts.append(request.prompt_tokens)
            return submit(request, sink)

        app._scheduler.submit = noted  # type: ignore[method-assign]
        served = asyncio.create_task(app.serve())
        for round_ in range(args.rounds + 1):
            timed.forget()
            prompts.clear()
            result = await _client(app.url, args.slots, args.tokens, 1000 + round_)
            steps = timed.steps
            timed.forget()
            rate = own_rate(timed, prompts, args.tokens)
            print(f"  round {round_}: HTTP {result['output_tokens_per_s']:.1f}, engine {rate:.1f} tokens/s", flush=True)
            if args.trace:
                cost = app._scheduler._budget.cost
                line = f"round {round_}: a step takes {1e3 * cost.fixed:.1f} ms and {1e3 * cost.token:.3f} a token\n"
                with args.trace.open("a") as out:
                    out.write(line + trace(steps) + "the engine alone\n" + trace(timed.steps))
            if round_:
                found["http"].append(result["output_tokens_per_s"])
                found["engine"].append(rate)
                found["ttft_p50_ms"].append(result["ttft_ms"]["p50"])
                found["itl_p50_ms"].append(result["itl_ms"]["p50"])
                found["itl_p99_ms"].append(result["itl_ms"]["p99"])
        app.request_stop()
        await served

    uvloop.run(serve())
    share = report.median([a / b for a, b in zip(found["http"], found["engine"], strict=True)])
    rows = [(name, report.median(values)) for name, values in found.items()]
    print(report.table((f"{args.slots} streams of {args.tokens} tokens", "median"), rows))
    print(f"HTTP's share of the engine's own rate: {100 * share:.1f} %")
    return {**found, "share": share}


def main() -> int:
    p = argparse.ArgumentParser(prog="bench.full_size", description=(__doc__ or "").splitlines()[0])
    p.add_argument("model", type=Path)
    p.add_argument(
        "--parts", nargs="+", default=[], metavar="PART", help=f"{', '.join(PARTS)}; default: all but drafts, steps"
    )
    p.add_argument("--cuda", action="store_true", help="on the GPU; default: the CPU")
    p.add_argument("--ctx", type=int, default=8192)
    p.add_argument("--slots", type=int, default=16)
    p.add_argument("--chunk", type=int, default=0, help="most prompt tokens of a step; 0: what the backend takes")
    p.add_argument("--depths", type=int, nargs="+", default=[512])
    p.add_argument("--prompts", type=int, nargs="+", default=[512, 2048])
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--tokens", type=int, default=128, help="of each stream through HTTP")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--trace", type=Path, help="append the steps of each HTTP round to this file")
    p.add_argument("--save", metavar="NAME", help="keep the numbers as bench/results/NAME.json")
    args = p.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        p.error(f"unknown parts: {', '.join(sorted(unknown))}")
    args.mtp = "drafts" in args.parts
    parts = args.parts or [x for x in PARTS if x not in ("drafts", "steps")]
    engine, facts = opened(args)
    result: dict[str, Any] = {"open": facts}
    for name, part in (("decode", decode), ("prefill", prefill), ("steps", steps), ("drafts", drafts), ("http", http)):
        if name in parts:
            result[name] = part(engine, args)
    engine.close()
    if args.save:
        print(f"saved {report.save(args.save, result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
