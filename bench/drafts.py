"""Guessing ahead: what a step with drafts costs beside a plain one, what guessing costs, and how often it is right.

    python -m bench.drafts [MODEL] [--head FILE] [--drafts 1,2,4] [--depth N] [--threads N] [--rounds N] [--save]

MODEL is a DeepSeek V4 model with a multi-token prediction head, or HEAD a file with one. Without either the head is
drawn at random in the model's shape: then its guesses are noise, and what is measured is time. Without MODEL the model
is random, too.

Per number of drafts k, greedy, one session, tokens per second as the median of rounds in turn:

    plain       one token a step
    all right   the step verifies k guesses that are the true continuation: the most that k guesses can bring
    all wrong   k guesses that are never right: the most that they can cost
    head        the model's head guesses, as the server would use it, but always

Every run writes the same tokens; a run that does not ends the benchmark. `pays from` is the mean number of right
guesses in a step from which on guessing is worth its time: (seconds of a step that verifies, and of guessing) / (plain
step) - 1.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.report import median, save, table
from ds4.convert import gguf_out
from ds4.convert.blocks import random_rows
from ds4.convert.gguf_out import OutTensor
from ds4.convert.synth import DEFAULT_TYPES, synthesise
from ds4.engine import deepseek4
from ds4.engine.engine import Engine
from ds4.engine.model_file import open_model_file
from ds4.engine.tensors import DType
from ds4.engine.types import EngineConfig, Row, SamplingParams

TOKENS = 96
_SMALL = ("_fn.weight", "ffn_gate_inp.weight")


def random_head(model: Path, target: Path, seed: int = 1) -> None:
    """A multi-token prediction head with random weights in the shape of a model, projections and experts in Q8_0."""
    shapes = deepseek4.layout(open_model_file(model).hparams).mtp()

    def drawn(name: str, shape: tuple[int, ...]) -> OutTensor:
        rng = np.random.default_rng([seed, len(name), *shape])
        cols, vector = shape[-1], len(shape) == 1
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        middle = 1.0 if name.endswith(("norm.weight", "_scale.weight")) else 0.0
        dtype = DType.Q8_0 if not vector and cols % 32 == 0 and not name.endswith(_SMALL) else DType.F32
        data = (middle + 0.2 * rng.standard_normal(shape)).astype(np.float32).tobytes() if vector else b""
        return OutTensor(
            name, shape, dtype, lambda: [data if vector else random_rows(rng, dtype, rows, cols, cols**-0.5)]
        )

    gguf_out.write_gguf(target, "deepseek4", {}, [drawn(n, s) for n, s in shapes.items()], force=True)


@dataclass
class Run:
    """One way to decode the same tokens."""

    name: str
    drafts: int
    right: bool | None
    """Guesses given from outside, right or wrong; None: the engine's own."""


def decode(engine: Engine, prompt: list[int], truth: list[int], run: Run) -> tuple[list[int], float, int, int, float]:
    """(tokens, seconds, guessed, right, seconds of guessing) of one run."""
    session, sampler = engine.new_session(), engine.new_sampler(SamplingParams(temperature=0.0))
    session.sync(prompt[:-1])
    made, token, drafted, accepted, guessing = [prompt[-1]], prompt[-1], 0, 0, 0.0
    vocab = engine.info.vocab_size
    start = time.perf_counter()
    while len(made) <= TOKENS:
        most = min(run.drafts, TOKENS - len(made))
        if run.right is None or not most:
            tried: int | list[int] = most
        else:
            following = truth[len(made) : len(made) + most]
            tried = following if run.right else [(t + 1) % vocab for t in following]
        [result] = engine.step([Row(session, [token], sampler, drafts=tried)])
        ahead = result.ahead
        while result is not None and result.token is not None:
            token = result.token
            made.append(token)
            result = ahead.after(token) if ahead is not None and len(made) <= TOKENS else None  # type: ignore[assignment]
            accepted += result is not None
        if ahead is not None:
            drafted += ahead.drafted
            guessing += ahead.seconds
    seconds = time.perf_counter() - start
    session.close()
    return made, seconds, drafted, accepted, guessing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--head", type=Path)
    parser.add_argument("--drafts", default="1,2,4")
    parser.add_argument("--depth", type=int, default=256, help="tokens before the first step")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    counts = [int(k) for k in args.drafts.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model: Path | None = args.model
        if model is None:
            model = Path(folder) / "model.gguf"
            synthesise(model, "deepseek4", "tiny", 1, DEFAULT_TYPES["tiny"])
        head: Path | None = args.head
        found = open_model_file(model).draft_layers()
        drawn = head is None and (found is None or found.kind != "mtp")
        if drawn:
            head = Path(folder) / "head.gguf"
            random_head(model, head)
        engine = Engine.open(
            EngineConfig(
                model=model,
                backend=args.backend,
                ctx=args.depth + TOKENS + 32,
                threads=args.threads,
                mtp=True,
                mtp_model=head,
                mtp_draft=max(counts),
                mtp_margin=0.0,
            )
        )
        rng = np.random.default_rng(7)
        prompt = rng.integers(engine.info.vocab_size // 8, engine.info.vocab_size, args.depth).tolist()
        plain = Run("plain", 0, None)
        truth = decode(engine, prompt, [], plain)[0]
        runs = [plain]
        for k in counts:
            runs += [Run("all right", k, True), Run("all wrong", k, False), Run("head", k, None)]
        seconds: dict[int, list[float]] = {i: [] for i in range(len(runs))}
        shares: dict[int, tuple[int, int, float]] = {}
        for _ in range(args.rounds):
            for i, run in enumerate(runs):
                made, took, drafted, accepted, guessing = decode(engine, prompt, truth, run)
                if made != truth:
                    raise SystemExit(f"{run.name} with {run.drafts} drafts wrote other tokens")
                seconds[i].append(took)
                shares[i] = drafted, accepted, guessing
        base = median(seconds[0]) / TOKENS
        rows, numbers = [], []
        for i, run in enumerate(runs):
            took, (drafted, accepted, guessing) = median(seconds[i]), shares[i]
            steps = TOKENS - accepted
            pays = "" if run.right is not None or not run.drafts else f"{took / steps / base - 1:.2f}"
            rows.append(
                (run.name, run.drafts, TOKENS / took, f"{base * TOKENS / took:.2f}", f"{accepted}/{drafted}", pays)
            )
            numbers.append(
                {
                    "run": run.name,
                    "drafts": run.drafts,
                    "tokens_per_second": TOKENS / took,
                    "ratio": base * TOKENS / took,
                    "drafted": drafted,
                    "accepted": accepted,
                    "guessing_ms_per_step": 1000 * guessing / max(1, steps),
                    "step_ms": 1000 * took / steps,
                }
            )
        kind = "random, in the model's shape: its guesses are noise" if drawn else "the model's"
        print(f"{engine.info.name} on {engine.backend_name}; head: {kind}; plain step {1000 * base:.3f} ms\n")
        print(table(("run", "drafts", "tokens/s", "ratio", "right", "pays from"), rows))
        for n in numbers:
            if n["run"] == "head":
                print(f"guessing {n['drafts']}: {n['guessing_ms_per_step']:.3f} ms of {n['step_ms']:.3f} ms a step")
        if args.save:
            facts = {"model": engine.info.name, "backend": engine.backend_name, "head": kind, "depth": args.depth}
            print(save("drafts", {**facts, "tokens": TOKENS, "runs": numbers}))
        engine.close()


if __name__ == "__main__":
    main()
