"""Speed of the CPU kernels on the shapes of SmolLM2-135M, op by op, against what this machine can do at most.

    python -m bench.kernels [--threads 2] [--type Q4_1] [--isa auto] [--rows 1 16 512] [--depth 512 2048] [--json]
    python -m bench.kernels --save kernels      # bench/results/kernels.md, with what holds the rest

Peaks come from `bench/roofline.cpp`, built and run first (bandwidth of reads from huge pages; int8, bf16 and f32
multiply-adds). Each operation is the best of many runs: on a shared machine only the undisturbed run says what the
kernel does. The last lines add up a whole step (30 layers and the head) and give tokens per second.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize

from bench import report
from ds4 import _cpu

# What keeps a kernel from its floor, by kind of operation and rows: one, few (of several sessions), many (a prompt's).
REASONS = {
    "product one": "reads of matrices of 0.2 to 1 MB, begun anew by every thread after every operation; the head, one "
    "stream of 30 MB, shows what long reads reach",
    "product few": "{dots} dot products and {tail} multiplications of block scales share two pipes (at most "
    "{bound:.0%}); matrices are begun anew by every thread after every operation, and every thread packs all rows "
    "(2 us for 16 of 576 columns): in a step of many sessions each core takes its own rows through all of them instead",
    "product many": "block scales: per 32 columns and token {dots} dot products and {tail} multiplications share two "
    "pipes, which bounds the kernel at {bound:.0%}; the rest is rounding and packing activations and storing results",
    "attention one": "keys and values of a head lie in pages of 8 KiB, read in turn; merging of segments",
    "attention few": "widening f16 shares the ports with the multiply-adds",
    "attention many": "softmax (a tenth), widening of pages to f32 (4 %), keys computed beyond the diagonal",
    "rope": "scalar stores of transposed keys",
}
# Multiplications beside the dot products of 32 columns and one token: scale of the block, minimum.
TAIL = {"Q4_1": 2, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2, "Q6_K": 2, "Q3_K": 2, "Q2_K": 4}

LAYERS, WIDTH, HIDDEN, Q_HEADS, KV_HEADS, HEAD, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
PEAK_OF = {"BF16": "bf16", "F16": "f32", "F32": "f32"}


def head_type(type_name: str) -> str:
    """Of the head in a file whose other matrices are of this type."""
    return type_name if type_name in PEAK_OF else "Q8_0"


@dataclass(frozen=True)
class Line:
    """One measured operation; `floor_us` is what the roofline allows."""

    op: str
    rows: int
    us: float
    gops: float
    gbytes: float
    floor_us: float

    @property
    def of_peak(self) -> float:
        return self.floor_us / self.us

    def reason(self, type_name: str) -> str:
        kind = self.op.split(" ")[0].rstrip(",")
        if kind == "rope":
            return REASONS[kind]
        width = "one" if self.rows == 1 else "few" if self.rows <= 32 else "many"
        tail = TAIL.get(head_type(type_name) if kind == "head" else type_name, 1)
        text = REASONS[f"{'attention' if kind == 'attention' else 'product'} {width}"]
        return text.format(dots=8, tail=tail, bound=8 / (8 + tail))


def roofline(threads: int) -> dict[str, float]:
    """{"read": GB/s, "int8": Gop/s, "bf16": ..., "f32": ...}; 0 where the CPU lacks the instructions."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "roofline"
        source = Path(__file__).with_name("roofline.cpp")
        subprocess.run(["g++", "-O3", "-march=native", "-std=c++20", "-pthread", source, "-o", program], check=True)
        out = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True).stdout
    return {k: float(v) for k, v in (line.split() for line in out.splitlines())}


class Bench:
    def __init__(self, threads: int, isa: str, type_name: str, peaks: dict[str, float], seconds: float) -> None:
        self.ops = _cpu.cpu_ops(threads, isa)
        self.type = type_name
        self.peaks = peaks
        self.seconds = seconds
        self.rng = np.random.default_rng(1)
        self.lines: list[Line] = []

    def normal(self, *shape: int) -> npt.NDArray[np.float32]:
        return self.rng.standard_normal(shape).astype(np.float32)

    def weight(self, rows: int, cols: int, use: str = "linear", type_name: str | None = None) -> _cpu.OpsWeight:
        kind = Q[type_name or self.type]
        data = quantize(self.normal(rows, cols), kind).view(np.uint8).reshape(-1)
        parts = [(data, int(kind), rows, cols)]
        if use == "swiglu":
            parts = [(half, int(kind), rows // 2, cols) for half in np.split(data, 2)]
        return self.ops.load(parts, use)

    def add(self, op: str, rows: int, seconds: float, ops: float, read: float, peak: str) -> float:
        floor = max(ops / (self.peaks[peak] * 1e9 or 1e30), read / (self.peaks["read"] * 1e9))
        self.lines.append(Line(op, rows, seconds * 1e6, ops / seconds / 1e9, read / seconds / 1e9, floor * 1e6))
        return seconds

    def times(self, work: float) -> int:
        return max(5, min(2000, int(self.seconds / max(work, 1e-6))))

    def cold(self, runs: list[Callable[[], float]], guess: float) -> float:
        """Mean over `runs`, which follow one another through more memory than a cache holds, of each one's best."""
        best = [1e9] * len(runs)
        for _ in range(max(5, self.times(guess * len(runs)))):
            best = [min(b, run()) for b, run in zip(best, runs, strict=True)]
        return sum(best) / len(best)

    def product(self, op: str, rows: int, out: int, cols: int, type_name: str | None = None) -> float:
        """Measured once per operation and rows. Weights are read from memory, not from a cache: as many copies as the
        last-level cache does not hold.
        """
        if known := next((line for line in self.lines if (line.op, line.rows) == (op, rows)), None):
            return known.us / 1e6
        gated = op == "gate, up"
        use = "swiglu" if gated else "linear"
        one = self.weight(out, cols, use, type_name)
        copies = 1 if rows > 32 else max(1, int(80e6 / one.resident_bytes))
        weights = [one] + [self.weight(out, cols, use, type_name) for _ in range(copies - 1)]
        x, y = self.normal(rows, cols), self.normal(rows, out // 2 if gated else out)
        gain = self.ops.load([(np.ones(cols, np.float32).view(np.uint8), int(Q.F32), 1, cols)])

        def run(w: _cpu.OpsWeight, times: int) -> float:
            if gated:
                return self.ops.linear_swiglu(w, x, y, gain, times=times)
            if op in ("out", "down"):
                return self.ops.linear_add(w, x, y, times=times)
            return self.ops.linear(w, x, y, gain, times=times)

        guess = run(one, 2)
        best = run(one, self.times(guess)) if copies == 1 else self.cold([partial(run, w, 1) for w in weights], guess)
        peak = PEAK_OF.get(type_name or self.type, "int8")
        return self.add(op, rows, best, 2.0 * rows * out * cols, one.resident_bytes, peak)

    def attention(self, rows: int, depth: int, sessions: int) -> float:
        """`sessions` decode rows at `depth`, or one session's chunk of `rows` that ends at `depth`."""
        width = KV_HEADS * HEAD
        specs = [(n, "append", int(Q.F16), KV_HEADS, HEAD, 1, 0) for n in ("k.0", "v.0")]
        copies = sessions if sessions > 1 else max(1, int(60e6 / (depth * width * 4))) if rows == 1 else 1
        states = []
        for _ in range(copies):
            state = self.ops.new_state(specs, depth)
            state.reserve(depth)
            for i in range(2):
                data = self.rng.standard_normal((depth, width)).astype(np.float16)
                state.import_rows(i, 0, depth, data.view(np.uint8).reshape(-1))
            states.append(state)
        q, out = self.normal(rows, Q_HEADS * HEAD), self.normal(rows, Q_HEADS * HEAD)
        shape = (Q_HEADS, KV_HEADS, HEAD, HEAD**-0.5, out)
        if sessions > 1:
            lists = [[(s, depth - 1) for s in states]]
        else:
            lists = [[(s, depth - rows + i) for i in range(rows)] for s in states]
        guess = self.ops.attention(q, lists[0], 0, 1, *shape, 2)
        best = self.cold([partial(self.ops.attention, q, r, 0, 1, *shape, 1) for r in lists], guess)
        keys = sum(depth if sessions > 1 else depth - rows + i + 1 for i in range(rows))
        ops = 4.0 * keys * Q_HEADS * HEAD
        read = 4.0 * depth * width * (sessions if sessions > 1 else 1)
        return self.add(f"attention @{depth}", rows, best, ops, read, "f32")

    def rope(self, rows: int) -> float:
        if known := next((line for line in self.lines if (line.op, line.rows) == ("rope, store", rows)), None):
            return known.us / 1e6
        specs = [(n, "append", int(Q.F16), KV_HEADS, HEAD, 1, 0) for n in ("k.0", "v.0")]
        state = self.ops.new_state(specs, rows)
        list_ = [(state, i) for i in range(rows)]
        qkv, table = self.normal(rows, (Q_HEADS + 2 * KV_HEADS) * HEAD), np.zeros((rows, HEAD), np.float32)
        self.ops.rope_table(list_, [10000.0 ** (-i / 32) for i in range(HEAD // 2)], table)
        best = self.ops.rope_store(qkv, table, True, list_, 0, 1, Q_HEADS, KV_HEADS, HEAD, self.times(1e-6 * rows))
        width = (Q_HEADS + KV_HEADS) * HEAD
        return self.add("rope, store", rows, best, 3.0 * rows * width, 0.0, "f32")

    def step(self, rows: int, depth: int, prefill: bool) -> float:
        """Seconds of a whole step of `rows` rows: one session's chunk, or one row of each of `rows` sessions."""
        layer = self.product("q, k, v", rows, (Q_HEADS + 2 * KV_HEADS) * HEAD, WIDTH)
        layer += self.rope(rows)
        layer += self.attention(rows, depth, 1 if prefill else rows)
        layer += self.product("out", rows, WIDTH, Q_HEADS * HEAD)
        layer += self.product("gate, up", rows, 2 * HIDDEN, WIDTH)
        layer += self.product("down", rows, WIDTH, HIDDEN)
        return LAYERS * layer + self.product("head", 1 if prefill else rows, VOCAB, WIDTH, head_type(self.type))


def page(bench: Bench, steps: dict[str, float], command: str) -> str:
    """The table as Markdown: operations, bytes and floor of each kernel, the fraction reached, what holds the rest."""
    reasons: dict[str, int] = {}
    rows = []
    for line in bench.lines:
        note = reasons.setdefault(line.reason(bench.type), len(reasons) + 1)
        operations, read = line.gops * line.us / 1e3, line.gbytes * line.us / 1e3
        rows.append((line.op, line.rows, line.us, operations, read, line.floor_us, f"{line.of_peak:.0%}", note))
    facts = report.machine()
    peaks = ", ".join(f"{name} {value:.0f}" for name, value in bench.peaks.items())
    head = ("operation", "rows", "us", "Mop", "MB read", "floor, us", "of floor", "what holds the rest")
    lines = [
        f"# CPU kernels on the shapes of SmolLM2-135M, {bench.type} weights",
        "",
        f"`{command}`, {dt.date.today().isoformat()}, {facts['cores']}-core EPYC, Zen 4, {bench.ops.name}.",
        "",
        f"Measured peaks (`bench/roofline.cpp`; GB/s and Gop/s): {peaks}. The floor of an operation is the larger of",
        "its operations at the peak of their kind and its bytes at the peak of reading. Weights come from memory, not",
        "from a cache, except with many rows. Best of many runs.",
        "",
        report.table(head, rows),
        "",
        *(f"{number}. {reason}." for reason, number in reasons.items()),
        "",
        "A whole step from these parts:",
        "",
        report.table(("step", "tokens/s"), list(steps.items())),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--type", default="Q4_1")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 512], help="more than 32: one prefill chunk")
    parser.add_argument("--depth", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--seconds", type=float, default=0.3, help="per operation")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/NAME.md")
    args = parser.parse_args()
    bench = Bench(args.threads, args.isa, args.type, {}, args.seconds)
    threads = int(bench.ops.name.split(", ")[1].split()[0])
    bench.peaks = roofline(threads)
    steps = {}
    for rows in args.rows:
        for depth in args.depth:
            if depth >= rows or rows <= 32:
                steps[f"{rows} rows, depth {depth}"] = rows / bench.step(rows, depth, prefill=rows > 32)
    if args.save:
        path = report.RESULTS / f"{args.save}.md"
        path.write_text(page(bench, steps, " ".join(["python -m bench.kernels", *sys.argv[1:]])))
        print(f"saved {path}")
    if args.json:
        print(json.dumps({"backend": bench.ops.name, "peaks": bench.peaks, "steps": steps,
                          "ops": [asdict(line) for line in bench.lines]}))  # fmt: skip
        return
    print(bench.ops.name, args.type, "; peaks:", ", ".join(f"{k} {v:.0f}" for k, v in bench.peaks.items()))
    print(f"{'operation':<20}{'rows':>5}{'us':>10}{'Gop/s':>9}{'GB/s':>8}{'of peak':>9}")
    for line in bench.lines:
        print(f"{line.op:<20}{line.rows:>5}{line.us:>10.1f}{line.gops:>9.0f}{line.gbytes:>8.1f}{line.of_peak:>9.0%}")
    for name, rate in steps.items():
        print(f"step of {name}: {rate:.0f} tokens/s")


if __name__ == "__main__":
    main()
