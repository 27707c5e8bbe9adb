"""What a quantisation costs: the same text under a model and under its conversions to every type.

    python -m bench.perplexity MODEL --text FILE                      # any text, in pieces of --ctx tokens
    python -m bench.perplexity MODEL --cases reference.json --save    # prompts, and what the model says to them
    python -m bench.perplexity FILE --text FILE --as-is --types      # the file against its own values in F32

With `--cases` (`{"cases": {name: {"prompt_ids": [...]}}}`) the text is what the source itself draws after each prompt,
at temperature 1 and from fixed seeds, so that its own perplexity is the least that any model can have on it, and every
conversion's excess is the information that it lost; with `--text` all tokens of the file are judged.

The source counts as F32 (BF16 values widened: nothing is rounded on the way). Each conversion is judged by its mean
negative log-likelihood in nats per token and the perplexity from it, by the Kullback-Leibler divergence from the source
at every judged position, and by how often its most probable token is the source's. A second table holds the CPU kernels
against exact arithmetic on the same file: what the rounding of activations alone does.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench import report
from ds4.convert.convert import convert
from ds4.convert.types import TypePlan
from ds4.engine.engine import Engine
from ds4.engine.model_file import ModelFile, open_model_file
from ds4.engine.tensors import DType
from ds4.engine.types import EngineConfig, Row, SamplingParams

Logits = npt.NDArray[np.float32]

TYPES = (
    *("BF16", "Q8_0", "Q6_K", "Q5_1", "Q5_K", "Q5_0", "Q4_1", "Q4_K", "IQ4_NL", "Q4_0", "MXFP4"),
    *("Q3_K", "Q2_K", "IQ2_XXS"),
)
CLASSES = {
    "all": ("embedding", "output", "experts", "experts_down", "dense"),
    "experts": ("experts", "experts_down"),
    "dense": ("dense",),
}
DRAWN_TOKENS = 160


@dataclass(slots=True)
class Piece:
    """A sequence, of which the tokens from `first` on are judged."""

    ids: list[int]
    first: int
    source: Logits = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """Log-probabilities of the source before each judged token, [judged, vocab]."""


@dataclass(frozen=True, slots=True)
class Cost:
    nll: float
    kl: float
    same: float
    """Share of positions with the source's best token."""


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def judged_logits(engine: Engine, pieces: list[Piece]) -> Iterator[Logits]:
    """For each piece the logits before its judged tokens, [judged, vocab]. Prompts that pieces share are read once."""
    base, prompt = engine.new_session(), None
    for piece in pieces:
        if prompt != piece.ids[: piece.first]:
            prompt = piece.ids[: piece.first]
            base.clear()
            base.sync(prompt)
        session = engine.new_session()
        session.fork_from(base)
        out = [base.logits()[None]]
        for start in range(piece.first, len(piece.ids) - 1, 256):
            out.append(engine.all_logits(session, piece.ids[start : min(start + 256, len(piece.ids) - 1)]))
        session.close()
        yield np.concatenate(out)


def cost(engine: Engine, pieces: list[Piece]) -> Cost:
    nll = kl = same = 0.0
    for piece, logits in zip(pieces, judged_logits(engine, pieces), strict=True):
        found, source = log_softmax(logits), piece.source.astype(np.float64)
        nll -= found[np.arange(len(found)), piece.ids[piece.first :]].sum()
        kl += (np.exp(source) * (source - found)).sum()
        same += (found.argmax(1) == source.argmax(1)).sum()
    n = sum(len(p.ids) - p.first for p in pieces)
    return Cost(nll / n, kl / n, same / n)


def drawn(engine: Engine, prompts: list[list[int]], seeds: int) -> Iterator[Piece]:
    """What the source says to each prompt, `seeds` times."""
    for prompt in prompts:
        base = engine.new_session()
        base.sync(prompt)
        for seed in range(seeds):
            session = engine.new_session()
            session.fork_from(base)
            sampler = engine.new_sampler(SamplingParams(temperature=1, min_p=0, seed=seed))
            ids = [*prompt, sampler.sample(base.logits()[: engine.tokenizer.vocab_size])[0]]
            while ids[-1] not in engine.tokenizer.eos_ids and len(ids) < len(prompt) + DRAWN_TOKENS:
                token = engine.step([Row(session, [ids[-1]], sampler)])[0].token
                assert token is not None
                ids.append(token)
            yield Piece(ids, len(prompt))


def open_engine(args: argparse.Namespace, path: Path, backend: str = "cpu") -> Engine:
    return Engine.open(
        EngineConfig(
            model=path, backend=backend, ctx=args.ctx + DRAWN_TOKENS, threads=args.threads, kv_qat=args.kv_qat == "on"
        )
    )


def plan_of(classes: str, dtype: DType, down: DType | None = None) -> TypePlan:
    chosen = dict.fromkeys(CLASSES[classes], dtype)
    if down is not None:
        chosen["experts_down"] = down
    return TypePlan(**chosen)


def conversions(args: argparse.Namespace) -> Iterator[tuple[str, str, TypePlan]]:
    """(type, classes, plan)"""
    for name in args.types:
        for classes in args.classes:
            yield name, classes, plan_of(classes, DType[name])
    if args.types and "experts" in args.classes:
        yield "IQ2_XXS, down Q2_K", "experts", plan_of("experts", DType.IQ2_XXS, DType.Q2_K)


def against_exact(args: argparse.Namespace, path: Path, pieces: list[Piece]) -> tuple[float, float, float]:
    """(largest logit difference in standard deviations, mean KL, share of equal best tokens) of the CPU's kernels."""
    exact, kernels = open_engine(args, path, "reference"), open_engine(args, path)
    a, b = (np.concatenate(list(judged_logits(engine, pieces))) for engine in (exact, kernels))
    exact.close()
    kernels.close()
    p, q = log_softmax(a), log_softmax(b)
    return (
        float(np.abs(a - b).max() / a.std()),
        float((np.exp(p) * (p - q)).sum(1).mean()),
        float((a.argmax(1) == b.argmax(1)).mean()),
    )


def read_pieces(args: argparse.Namespace, engine: Engine) -> list[Piece]:
    if args.cases:
        cases = json.loads(args.cases.read_text())["cases"].values()
        return list(drawn(engine, [list(c["prompt_ids"]) for c in cases], args.seeds))
    ids = engine.tokenizer.encode(args.text.read_text())
    return [Piece(ids[at : at + args.ctx], 1) for at in range(0, len(ids) - 1, args.ctx)]


def measure(args: argparse.Namespace, model: ModelFile, folder: Path) -> str:
    path = folder / "model.gguf"
    everything = TypePlan(*[DType.F32] * 6)
    convert(model, path, everything)
    engine = open_engine(args, path)
    pieces = read_pieces(args, engine)
    for piece, logits in zip(pieces, judged_logits(engine, pieces), strict=True):
        piece.source = log_softmax(logits).astype(np.float32)
    base = cost(engine, pieces)
    engine.close()
    judged, longest = sum(len(p.ids) - p.first for p in pieces), max(len(p.ids) for p in pieces)
    # The exact backend is slow: a tenth of the pieces.
    few = [p for p in pieces if len(p.ids) < 800][:: max(1, len(pieces) // 8)] or pieces[:1]
    rows: list[tuple[object, ...]] = [("F32", "all", f"{path.stat().st_size / 1e6:.1f}", *shown(base, base))]
    exact_rows: list[tuple[object, ...]] = []
    done: set[str] = set()
    if args.as_is:
        engine = open_engine(args, args.model)
        rows.append(("as it is", "all", f"{args.model.stat().st_size / 1e6:.1f}", *shown(cost(engine, pieces), base)))
        engine.close()
    for name, classes, plan in conversions(args):
        convert(model, path, plan, force=True)
        engine = open_engine(args, path)
        found = cost(engine, pieces)
        engine.close()
        rows.append((name, classes, f"{path.stat().st_size / 1e6:.1f}", *shown(found, base)))
        print(*rows[-1], file=sys.stderr, flush=True)
        if classes == "all" and name not in done:
            done.add(name)
            error, kl, same = against_exact(args, path, few)
            exact_rows.append((name, f"{error:.3f}", f"{kl:.2e}", f"{100 * same:.1f}"))
            print("  kernels:", *exact_rows[-1], file=sys.stderr, flush=True)
    facts = f"{len(pieces)} pieces of up to {longest} tokens, {judged} tokens judged, kv-qat {args.kv_qat}"
    costs = report.table(("type", "matrices", "MB", "nats", "perplexity", "% more", "KL", "same best, %"), rows)
    kernels = report.table(("type", "largest error, std", "KL", "same best, %"), exact_rows)
    n = sum(len(p.ids) - p.first for p in few)
    if not exact_rows:
        return f"{model.name}: {facts}.\n\n{costs}\n"
    return (
        f"{model.name}: {facts}.\n\n{costs}\n\n"
        f"The CPU's kernels against exact arithmetic on the same file, {n} tokens:\n\n{kernels}\n"
    )


def shown(found: Cost, base: Cost) -> tuple[str, ...]:
    excess = 100 * (np.exp(found.nll - base.nll) - 1)
    return (
        f"{found.nll:.4f}",
        f"{np.exp(found.nll):.4f}",
        f"{excess:.2f}",
        f"{max(0.0, found.kl):.2e}",
        f"{100 * found.same:.2f}",
    )


def main() -> int:
    p = argparse.ArgumentParser(prog="bench.perplexity", description=(__doc__ or "").splitlines()[0])
    p.add_argument("model", type=Path, help="GGUF file or safetensors directory")
    group = p.add_mutually_exclusive_group(required=True)
    group.add_argument("--text", type=Path, help="text file to judge")
    group.add_argument("--cases", type=Path, help="JSON file with prompts, whose answers are drawn and judged")
    p.add_argument("--seeds", type=int, default=6, help="answers a prompt (default: %(default)s)")
    p.add_argument("--ctx", type=int, default=2048)
    p.add_argument("--as-is", action="store_true", help="judge the GGUF file too: what its kernels' rounding costs")
    p.add_argument("--types", nargs="*", default=TYPES)
    p.add_argument("--classes", nargs="*", default=tuple(CLASSES), help=", ".join(CLASSES))
    p.add_argument("--kv-qat", choices=("on", "off"), default="off")
    p.add_argument("-t", "--threads", type=int, default=0)
    p.add_argument("--save", metavar="NAME", nargs="?", const="perplexity", help="as bench/results/NAME.md")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = measure(args, open_model_file(args.model), Path(folder))
    print(text)
    if args.save:
        words = [Path(a).name if a.startswith("/") else a for a in sys.argv[1:]]
        head = f"# Perplexity by type\n\n`python -m bench.perplexity {' '.join(words)}`, {dt.date.today()}.\n"
        (report.RESULTS / f"{args.save}.md").write_text(f"{head}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
