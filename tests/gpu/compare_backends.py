"""Holds the CUDA backend against the others on one model file; called by run_python.sh, one line per check.

`ds4 logits` on all backends, then on the GPU alone: greedy text, batches and chunks bit for bit, a saved session, a
plan that does not fit. Exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from pathlib import Path

import numpy as np

from ds4.cli.main import main as ds4
from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig, Row, SamplingParams
from ds4.errors import MemoryPlanError

TEXT = (
    "The sea was calm in the morning. Two boats left the harbour, one of them red, the other one white. "
    "Nobody on the pier could say which of the two would come back first, and nobody asked. "
)
GREEDY = SamplingParams(temperature=0)
failed = 0


def check(name: str, ok: bool, detail: str = "") -> None:
    global failed
    failed += not ok
    print(f"  {'ok    ' if ok else 'FAILED'} {name}{': ' + detail if detail else ''}", flush=True)


def prompt_of(engine: Engine) -> list[int]:
    """About 200 tokens of text, or random ones for a model without tokenizer."""
    try:
        return engine.tokenizer.encode(TEXT * 5)[:200]
    except Exception:
        rng = np.random.default_rng(3)
        return [int(i) for i in rng.integers(0, engine.info.vocab_size, 200)]


def greedy(engine: Engine, prompt: list[int], n: int) -> tuple[list[int], float]:
    session, sampler = engine.new_session(), engine.new_sampler(GREEDY)
    session.sync(prompt)
    token = int(session.logits().argmax())
    out = [token]
    start = time.perf_counter()
    for _ in range(n - 1):
        found = engine.step([Row(session, [token], sampler)])[0].token
        assert found is not None
        token = found
        out.append(token)
    return out, (n - 1) / (time.perf_counter() - start)


def compare_logits(model: Path, prompt: list[int], out: Path) -> None:
    np.save(out / "tokens.npy", np.array(prompt, np.int32))
    rows = {}
    for backend in ("reference", "cpu", "cuda"):
        target = out / f"logits_{backend}.npy"
        status = ds4(["logits", str(model), "--tokens", str(out / "tokens.npy"), "--out", str(target), "--backend",
                      backend, "--chunk", "64"])  # fmt: skip
        assert status == 0
        rows[backend] = np.load(target)
        target.unlink()
    exact = rows.pop("reference")
    mean, same = {}, {}
    for backend, found in rows.items():
        error = np.abs(found - exact) / exact.std()
        mean[backend], same[backend] = float(error.mean()), float((found.argmax(-1) == exact.argmax(-1)).mean())
        print(
            f"  {backend:4} against reference, {len(exact)} positions: difference in standard deviations of the logits "
            f"mean {mean[backend]:.5f}, largest {error.max():.4f}; same best token {100 * same[backend]:.1f}%"
        )
    # Quantised activations may flip a choice of experts or rows, on any backend; the CPU backend says how often.
    check(
        "ds4 logits: cuda is as close to the reference as the CPU is",
        bool(np.isfinite(rows["cuda"]).all())
        and mean["cuda"] <= 1.25 * mean["cpu"] + 1e-3
        and same["cuda"] >= same["cpu"] - 0.03,
    )


def compare_draws(engine: Engine, prompt: list[int]) -> None:
    """Steps whose tokens are drawn on the device, beside steps whose logits come to the host for the sampler."""
    kinds = ({"temperature": 0.0}, {"min_p": 0.05}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.95}, {"temperature": 1.7})
    params = [SamplingParams(seed=40 + i, **kind) for i, kind in enumerate(kinds)]
    mask = np.random.default_rng(4).integers(0, 2**32, engine.info.vocab_size // 32, dtype=np.uint32)
    pairs = []
    for p in params:
        pair = [(engine.new_session(), engine.new_sampler(p)) for _ in range(2)]
        for session, sampler in pair:
            session.sync(prompt[:40])
            sampler.forbid([1, 2, 3])
            if p.top_k:
                sampler.set_mask(mask)
        pairs.append(pair)
    tokens = [prompt[40]] * len(params)
    steps = 0
    while steps < 24:
        here = engine.step([Row(a[0], [t], a[1]) for (a, _), t in zip(pairs, tokens, strict=True)])
        host = engine.step([Row(b[0], [t], b[1], want_logits=True) for (_, b), t in zip(pairs, tokens, strict=True)])
        if [r.token for r in here] != [r.token for r in host]:
            break
        tokens = [r.token or 0 for r in here]
        steps += 1
    check("tokens drawn on the device are the sampler's", steps == 24, f"{steps} steps of {len(params)} kinds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    print(args.model)
    config = {"model": args.model, "ctx": 512, "slots": 4}
    cpu = Engine.open(EngineConfig(backend="cpu", **config))
    reports: list[tuple[int, int]] = []
    start = time.perf_counter()
    cuda = Engine.open(EngineConfig(**config), lambda done, total: reports.append((done, total)))
    took = time.perf_counter() - start
    check("auto takes the GPU", cuda.backend_name.startswith("cuda"), f"{cuda.backend_name}, opened in {took:.2f} s")
    check("progress while uploading", len(reports) > 1 and reports[-1][0] == reports[-1][1], f"{len(reports)} reports")
    check("plan of device memory", cuda.plan.on_device and cuda.plan.available_bytes > 1 << 30, f"{cuda.plan}")
    prompt = prompt_of(cpu)
    compare_logits(args.model, prompt, args.out)

    compare_draws(cuda, prompt)

    ours, rate = greedy(cuda, prompt, 64)
    theirs, _ = greedy(cpu, prompt, 64)
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), 64)
    # Rounding may part ways where two tokens are close; a wrong kernel does so at once.
    check("greedy tokens", same >= 4, f"first {same} of 64 equal the CPU's, {rate:.0f} tokens/s")
    again, _ = greedy(cuda, prompt, 64)
    check("greedy tokens again", again == ours)

    sessions = [cuda.new_session() for _ in range(3)]
    for s, n in zip(sessions, (150, 90, 33), strict=True):
        s.sync(prompt[:n])
    alone = cuda.new_session()
    for i in range(150):
        cuda.step([Row(alone, [prompt[i]], None, want_logits=i == 149)])
    check("token by token equals a prefill, bit for bit", bool((alone.logits() == sessions[0].logits()).all()))
    cuda.step([Row(s, [prompt[150]], None, want_logits=True) for s in sessions])
    cuda.step([Row(alone, [prompt[150]], None, want_logits=True)])
    check("alone equals in a batch, bit for bit", bool((alone.logits() == sessions[0].logits()).all()))

    file = io.BytesIO()
    alone.save(file)
    file.seek(0)
    moved = cpu.new_session()
    moved.load(file)
    check("a saved session opens on the CPU", list(moved.tokens) == list(alone.tokens))
    other = cuda.new_session()
    other.fork_from(alone)
    cuda.step([Row(other, [5], None, want_logits=True), Row(alone, [5], None, want_logits=True)])
    check("a fork goes on alike, bit for bit", bool((alone.logits() == other.logits()).all()))
    copy = cuda.new_session()
    start = time.perf_counter()
    copy.fork_from(alone)
    taken = time.perf_counter() - start
    cuda.step([Row(alone, [7], None, want_logits=True)])
    before = alone.logits()
    cuda.step([Row(alone, (prompt * 2)[:400])])
    alone.fork_from(copy)
    cuda.step([Row(alone, [7], None, want_logits=True)])
    check(
        "400 tokens later a session goes back to its copy, bit for bit",
        bool((alone.logits() == before).all()),
        f"taken in {1e3 * taken:.3f} ms, {cuda.plan.snapshots} snapshots of {cuda.plan.snapshot_bytes} bytes planned",
    )
    try:
        Engine.open(EngineConfig(backend="cuda", model=args.model, ctx=4 << 20, slots=1 << 20))
        check("a plan that does not fit is refused", False)
    except MemoryPlanError as e:
        check("a plan that does not fit is refused", "device memory" in str(e))
    try:
        text = "".join(cuda.generate("Once upon a time", GREEDY, max_tokens=24))
        print(f"  text: {text!r}")
    except Exception as e:
        print(f"  no text: {type(e).__name__}: {e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
