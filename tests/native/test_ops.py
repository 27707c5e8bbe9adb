"""Every operation of the CPU backend, on every instruction set that this machine runs, against the reference backend.

Tolerances. Block-quantised weights meet activations that are rounded to int8 per 32 columns. Where the input already
lies on such a grid that rounding is exact, and only f32 summation error is left: `CLOSE`, relative to the RMS of the
result. For arbitrary inputs each rounded value is off by up to amax / 254 of its block, which for normal inputs is
about 0.8 % of the result's RMS: `INT8_RMS` bounds the RMS of the error, `INT8_MAX` its largest value. BF16 weights meet
activations rounded to 8 significant bits (0.2 % RMS).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize

from ds4 import _cpu

Array = npt.NDArray[np.float32]

CLOSE = 3e-5
INT8_RMS = 0.015
INT8_MAX = 0.08
EPS = 1e-5

ISAS = _cpu.cpu_isas()
INT8 = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "IQ2_XXS", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
FLOAT = ["F32", "F16", "BF16"]
TYPES = INT8 + FLOAT
HALF_FIELDS = {  # byte offsets of the half-precision scales in a block
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0], "MXFP4": [], "IQ2_XXS": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
BLOCK = {t: 32 if t in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4") else 256 for t in INT8}

reference = _cpu.reference_ops()


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> _cpu.Ops:
    return _cpu.cpu_ops(2, request.param)


class Matrix:
    """A random matrix in a file format."""

    def __init__(self, rng: np.random.Generator, type_name: str, rows: int, cols: int) -> None:
        self.shape = (rows, cols)
        if type_name in FLOAT:
            data = quantize(rng.standard_normal((rows, cols)).astype(np.float32), Q[type_name])
        else:
            blocks = rows * cols // BLOCK[type_name]
            block_bytes = _cpu.row_bytes(Q[type_name], BLOCK[type_name])
            data = rng.integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
            for at in HALF_FIELDS[type_name]:
                scale = rng.uniform(0.001, 0.02, blocks) * rng.choice([-1, 1], blocks)
                data[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
            if type_name == "MXFP4":
                data[:, 0] = rng.integers(118, 124, blocks)
        self.part = (np.ascontiguousarray(data).view(np.uint8).reshape(-1), int(Q[type_name]), rows, cols)

    def on(self, ops: _cpu.Ops, use: str = "linear") -> _cpu.OpsWeight:
        return ops.load([self.part], use)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def on_grid(x: Array) -> Array:
    """x with every run of 16 columns rounded to 127 steps of a power of two, the largest magnitude to the last step:
    what the kernels round to without a loss.
    """
    runs = x.reshape(*x.shape[:-1], -1, 16)
    most = np.abs(runs).max(-1, keepdims=True)
    step = np.exp2(np.floor(np.log2(most)) - 6)
    return (np.rint(runs * (127 / most)) * step).astype(np.float32).reshape(x.shape)


def vector(x: Array) -> tuple[npt.NDArray[np.uint8], int, int, int]:
    return (x.view(np.uint8), int(Q.F32), 1, x.size)


def poisoned(*shape: int) -> Array:
    return np.full(shape, np.nan, np.float32)


def error(got: Array, want: Array) -> tuple[float, float]:
    """RMS and largest error, relative to the RMS of `want`."""
    assert np.isfinite(got).all()
    scale = float(np.sqrt(np.mean(np.square(want, dtype=np.float64)))) or 1.0
    diff = (got - want).astype(np.float64)
    return float(np.sqrt(np.mean(diff**2))) / scale, float(np.abs(diff).max()) / scale


def assert_close(got: Array, want: Array, limit: float = CLOSE) -> None:
    assert error(got, want)[1] < limit


def cols_for(rng: np.random.Generator, type_name: str) -> int:
    if type_name in FLOAT:
        return int(rng.integers(1, 90))
    return BLOCK[type_name] * int(rng.integers(1, 9 if BLOCK[type_name] == 32 else 4))


def inputs(rng: np.random.Generator, type_name: str, tokens: int, cols: int) -> Array:
    """Inputs that the kernels of this type take without rounding."""
    x = normal(rng, tokens, cols)
    if type_name == "BF16":
        return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return x if type_name in FLOAT else on_grid(x)


# ---- matrix products


@pytest.mark.parametrize("type_name", TYPES)
def test_linear(ops: _cpu.Ops, rng: np.random.Generator, type_name: str) -> None:
    for tokens in (1, 2, 3, 16, int(rng.integers(4, 16)), int(rng.integers(17, 71))):
        rows, cols = int(rng.integers(2, 90)), cols_for(rng, type_name)
        w = Matrix(rng, type_name, rows, cols)
        x, b = inputs(rng, type_name, tokens, cols), normal(rng, rows)
        got, want = poisoned(tokens, rows), poisoned(tokens, rows)
        for bias in (False, True):
            for o, y in ((ops, got), (reference, want)):
                o.linear(w.on(o), x, y, bias=o.load([vector(b)]) if bias else None)
            assert_close(got, want)


@pytest.mark.parametrize("type_name", TYPES)
def test_precise_weights_round_no_activations(ops: _cpu.Ops, rng: np.random.Generator, type_name: str) -> None:
    tokens, rows, cols = 5, 24, 512
    w, x = Matrix(rng, type_name, rows, cols), normal(rng, tokens, cols)
    got, want = poisoned(tokens, rows), poisoned(tokens, rows)
    ops.linear(w.on(ops, "precise"), x, got)
    reference.linear(w.on(reference), x, want)
    assert_close(got, want)


def test_small_matrices_are_read_anew(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    """A weight may come to lie where another one was: nothing of that one is remembered."""
    x = normal(rng, 3, 4 * 32)
    fn = Matrix(rng, "F32", 24, 4 * 32)
    for _ in range(5):
        base, scale = vector(normal(rng, 24)), vector(normal(rng, 3))
        results = []
        for o in (ops, reference):
            y, mix = poisoned(3, 32), poisoned(3, 20)
            o.hc_in(fn.on(o, "precise"), o.load([base]), o.load([scale]), x, y, mix)
            results.append((y, mix))
        for got, want in zip(*results, strict=True):
            assert_close(got, want)


@pytest.mark.parametrize("type_name", TYPES)
def test_linear_of_a_norm(ops: _cpu.Ops, rng: np.random.Generator, type_name: str) -> None:
    tokens, rows, cols = 19, 64, 512
    w, gain = Matrix(rng, type_name, rows, cols), vector(rng.uniform(0.5, 1.5, cols).astype(np.float32))
    x, got, want = normal(rng, tokens, cols) * 3, poisoned(tokens, rows), poisoned(tokens, rows)
    for o, y in ((ops, got), (reference, want)):
        o.linear(w.on(o), x, y, gain=o.load([gain]), eps=EPS)
    rms, most = error(got, want)
    if type_name in ("F32", "F16"):
        assert most < CLOSE
    else:
        assert rms < INT8_RMS and most < INT8_MAX


def rounded(ops: _cpu.Ops, x: Array) -> Array:
    """What the kernels make of activations: their product with a matrix of ones on the diagonal."""
    cols = x.shape[1]
    blocks = np.zeros((cols, cols // 32, 34), np.uint8)
    blocks[:, :, :2] = np.float16(1).reshape(1).view(np.uint8)
    blocks[np.arange(cols), np.arange(cols) // 32, 2 + np.arange(cols) % 32] = 1
    y = poisoned(*x.shape)
    ops.linear(ops.load([(blocks.reshape(-1), int(Q.Q8_0), cols, cols)]), x, y)
    return y


def test_activations_are_rounded_by_runs_of_16(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    """A value is off by half a step at most, and a step is under 2 / 127 of its run's largest value. A row's noise is
    about that of 127 steps for 32 columns, more where its runs are alike, less where few are large.
    """
    for cols in (32, 96, 544):
        x = normal(rng, 19, cols) ** 3
        x *= np.exp2(rng.integers(-20, 20, (19, cols // 16))).astype(np.float32).repeat(16, 1)
        x[3], x[4, :16] = 0, 0
        error = np.abs(rounded(ops, x) - x).reshape(19, -1, 16)
        most = np.abs(x).reshape(19, -1, 16).max(-1, keepdims=True)
        assert (error <= most / 127).all()
        assert not error[3].any()
    for power, most_noise in ((1, 1.7), (3, 1.2)):  # the square of the noise against that of 127 steps for 32 columns
        x = normal(rng, 64, 544) ** power
        blocks = x.reshape(64, -1, 32)
        step = np.abs(blocks).max(-1, keepdims=True) / 127
        plain = np.rint(blocks / step) * step - blocks
        assert np.square(rounded(ops, x) - x).mean() < most_noise * np.square(plain).mean()


def test_tiny_and_huge_activations(ops: _cpu.Ops) -> None:
    x = np.zeros((4, 64), np.float32)
    x[0], x[1], x[2], x[3] = 1e-30, 1e-42, 1e32, 3e38
    y = rounded(ops, x)
    assert np.abs(y[0] / x[0] - 1).max() < 0.01
    assert np.abs(y[1]).max() < 1e-35
    assert np.abs(y[2] / x[2] - 1).max() < 0.01
    assert not np.isfinite(y[3]).any()  # beyond 2^110: never a wrong number


@pytest.mark.parametrize("type_name", INT8)
def test_largest_codes(ops: _cpu.Ops, rng: np.random.Generator, type_name: str) -> None:
    """Weights at the ends of their codes against activations at the ends of theirs: no sum in between saturates."""
    cols = 256
    signs = np.array([[1.0], [-1.0]]) * np.stack([np.ones(cols), (-1.0) ** np.arange(cols)])[:, None]
    x = 127 * signs.reshape(-1, cols).astype(np.float32)
    for fill in (0x00, 0x7F, 0x80, 0xFF):
        w = Matrix(rng, type_name, 16, cols)
        bytes_ = w.part[0].reshape(-1, _cpu.row_bytes(Q[type_name], BLOCK[type_name]))
        kept = [b for at in HALF_FIELDS[type_name] for b in (at, at + 1)] + [0] * (type_name == "MXFP4")
        scales = bytes_[:, kept].copy()
        bytes_[:] = fill
        bytes_[:, kept] = scales
        got, want = poisoned(len(x), 16), poisoned(len(x), 16)
        for o, y in ((ops, got), (reference, want)):
            o.linear(w.on(o), x, y)
        # Alternating signs cancel exactly where all weights are equal: the error is measured by the largest result.
        assert np.abs(got - want).max() <= CLOSE * max(1.0, float(np.abs(want).max()))


@pytest.mark.parametrize("type_name", TYPES)
def test_linear_add(ops: _cpu.Ops, rng: np.random.Generator, type_name: str) -> None:
    tokens, rows, cols = int(rng.integers(1, 40)), int(rng.integers(2, 70)), cols_for(rng, type_name)
    w, x = Matrix(rng, type_name, rows, cols), inputs(rng, type_name, tokens, cols)
    got = normal(rng, tokens, rows)
    want = got.copy()
    for o, y in ((ops, got), (reference, want)):
        o.linear_add(w.on(o), x, y)
    assert_close(got, want)


@pytest.mark.parametrize("up_type", ["same", "Q8_0"])
@pytest.mark.parametrize("type_name", TYPES)
def test_linear_swiglu(ops: _cpu.Ops, rng: np.random.Generator, type_name: str, up_type: str) -> None:
    up_type = type_name if up_type == "same" else up_type
    tokens, rows, cols = int(rng.integers(1, 40)), int(rng.integers(2, 50)), 256
    gate, up = Matrix(rng, type_name, rows, cols), Matrix(rng, up_type, rows, cols)
    x = inputs(rng, type_name if up_type == type_name else "Q8_0", tokens, cols)
    if type_name == "BF16" and up_type != type_name:  # bf16 and the int8 grid: small whole numbers lie on both
        x = np.rint(rng.uniform(-127, 127, (tokens, cols))).astype(np.float32)
        x[:, ::16] = 127
        x /= 64
    got, want = poisoned(tokens, rows), poisoned(tokens, rows)
    for o, y in ((ops, got), (reference, want)):
        o.linear_swiglu(o.load([gate.part, up.part], "swiglu"), x, y)
    assert_close(got, want, 2 * CLOSE)


def test_stacked_types(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    types = [*rng.choice(TYPES, 4), "Q6_K", "Q4_K", "Q4_K", "Q3_K"]
    parts = [Matrix(rng, str(t), int(rng.integers(1, 40)), 512).part for t in types]
    rows = sum(p[2] for p in parts)
    x = np.rint(rng.uniform(-127, 127, (23, 512))).astype(np.float32)
    x[:, ::16] = 127
    got, want = poisoned(23, rows), poisoned(23, rows)
    for o, y in ((ops, got), (reference, want)):
        o.linear(o.load(parts), x, y)
    assert_close(got, want, 2e-4)


def test_large_activations_take_several_passes(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    tokens, rows, cols = 330, 40, 2048
    w, x = Matrix(rng, "Q4_1", rows, cols), on_grid(normal(rng, tokens, cols))
    got, want = poisoned(tokens, rows), poisoned(tokens, rows)
    for o, y in ((ops, got), (reference, want)):
        o.linear(w.on(o), x, y)
    assert_close(got, want)


def test_tied_head_and_embedding(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    for type_name in TYPES:
        w = Matrix(rng, type_name, 40, 256)
        ids = [int(i) for i in rng.integers(0, 40, 21)]
        for use in ("tied", "embedding"):
            got, want = poisoned(21, 256), poisoned(21, 256)
            ops.embed(w.on(ops, use), ids, got)
            reference.embed(w.on(reference, use), ids, want)
            assert np.array_equal(got, want)
        x = inputs(rng, type_name, 3, 256)
        got, want = poisoned(3, 40), poisoned(3, 40)
        ops.linear(w.on(ops, "tied"), x, got)
        reference.linear(w.on(reference, "tied"), x, want)
        assert_close(got, want)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_heads_table_is_not_read_again(ops: _cpu.Ops, rng: np.random.Generator, type_name: str) -> None:
    """Rows are looked up in what was packed: the file's own need not be in memory."""
    w = Matrix(rng, type_name, 53, 96)
    ids, got, want = [0, 52, 15, 16, 31, 32, 15], poisoned(7, 96), poisoned(7, 96)
    reference.embed(w.on(reference, "tied"), ids, want)
    head = w.on(ops, "tied")
    w.part[0][:] = 0
    ops.embed(head, ids, got)
    assert np.array_equal(got, want)


def test_zero_rows_and_extreme_activations(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    """Saturation: every activation at +-127 steps, every weight at its extreme."""
    for type_name in ("Q8_0", "Q5_1", "Q4_1", "IQ4_NL"):
        block_bytes = _cpu.row_bytes(Q[type_name], 32)
        header = 4 if type_name.endswith("_1") else 2
        data = np.full((32, 4, block_bytes), 0x80 if type_name == "Q8_0" else 0xFF, np.uint8)
        data[:, :, :header] = np.tile(np.float16(1).reshape(1).view(np.uint8), header // 2)
        x = np.full((5, 128), 127, np.float32)
        x[1], x[2, ::2], x[3] = -127, -127, 0
        got, want = poisoned(5, 32), poisoned(5, 32)
        for o, y in ((ops, got), (reference, want)):
            o.linear(o.load([(data.reshape(-1), int(Q[type_name]), 32, 128)]), x, y)
        assert_close(got, want)
        assert not got[3].any()


# ---- exactness: a row's bits depend on nothing but the row


def splits(rng: np.random.Generator, n: int) -> list[npt.NDArray[np.int64]]:
    order = rng.permutation(n)
    cuts = np.sort(rng.choice(np.arange(1, n), 5, replace=False))
    return [*np.split(order, cuts), *np.split(np.arange(n), n)[:3]]


@pytest.mark.parametrize("type_name", TYPES)
def test_rows_are_bit_equal_in_any_batch(ops: _cpu.Ops, rng: np.random.Generator, type_name: str) -> None:
    tokens, rows, cols = 70, 56, 512
    w, gate, up = (Matrix(rng, type_name, rows, cols) for _ in range(3))
    gain = vector(rng.uniform(0.5, 1.5, cols).astype(np.float32))
    x, residual = normal(rng, tokens, cols), normal(rng, tokens, rows)

    def all_products(o: _cpu.Ops, index: npt.NDArray[np.int64]) -> list[Array]:
        part = np.ascontiguousarray(x[index])
        plain, add, gated = poisoned(len(index), rows), residual[index].copy(), poisoned(len(index), rows)
        o.linear(w.on(o), part, plain, gain=o.load([gain]))
        o.linear_add(w.on(o), part, add)
        o.linear_swiglu(o.load([gate.part, up.part], "swiglu"), part, gated, gain=o.load([gain]))
        return [plain, add, gated]

    whole = all_products(ops, np.arange(tokens))
    isa = next(i for i in ISAS if ops.name.startswith(f"cpu ({i}"))
    for o in (ops, _cpu.cpu_ops(1, isa), _cpu.cpu_ops(3, isa)):
        for index in splits(rng, tokens):
            for got, want in zip(all_products(o, index), whole, strict=True):
                assert np.array_equal(got, want[index])


@pytest.mark.skipif("avx512" not in ISAS, reason="one vector instruction set only")
@pytest.mark.parametrize("type_name", [*INT8, "F16", "F32"])
def test_vector_sets_agree_bit_for_bit(rng: np.random.Generator, type_name: str) -> None:
    """Both run the same f32 operations in the same order: a checkpoint made on one goes on on the other."""
    w, x = Matrix(rng, type_name, 48, 512), normal(rng, 21, 512)
    gain = vector(rng.uniform(0.5, 1.5, 512).astype(np.float32))
    results = []
    for isa in ("avx512", "avx2"):
        o = _cpu.cpu_ops(2, isa)
        y = poisoned(21, 24)
        half = w.part[0].reshape(2, -1)
        parts = [(np.ascontiguousarray(h), w.part[1], 24, 512) for h in half]
        o.linear_swiglu(o.load(parts, "swiglu"), x, y, gain=o.load([gain]))
        results.append(y)
    assert np.array_equal(*results)


# ---- rows


def test_rms_norm_and_gather(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    for dim in (1, 7, 16, 33, 576, 1000):
        x, gain = normal(rng, 9, dim) * 5, rng.uniform(0.5, 1.5, dim).astype(np.float32)
        got, want = poisoned(9, dim), poisoned(9, dim)
        for o, y in ((ops, got), (reference, want)):
            o.rms_norm(x, o.load([vector(gain)]), EPS, y)
        assert_close(got, want, 2e-6)
        alias = x.copy()
        ops.rms_norm(alias, ops.load([vector(gain)]), EPS, alias)
        assert np.array_equal(alias, got)
        out = poisoned(4, dim)
        ops.gather(x, [8, 0, 0, 3], out)
        assert np.array_equal(out, x[[8, 0, 0, 3]])


# ---- attention and state

SHAPES = [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 2, 24), (5, 1, 80), (3, 1, 7)]
Spec = tuple[str, str, int, int, int, int, int]


def kv_specs(kv_heads: int, dim: int, layers: int = 2) -> list[Spec]:
    return [(f"{n}.{layer}", "append", int(Q.F16), kv_heads, dim, 1, 0) for layer in range(layers) for n in "kv"]


def fill(state: _cpu.OpsState, data: npt.NDArray[np.float16]) -> None:
    """data [buffers, tokens, heads * dim]."""
    for i, rows in enumerate(data):
        state.import_rows(i, 0, len(rows), np.ascontiguousarray(rows).view(np.uint8).reshape(-1))


def exported(state: _cpu.OpsState, buffers: int, tokens: int, width: int) -> npt.NDArray[np.float16]:
    out = np.full((buffers, tokens, width), np.nan, np.float16)
    for i in range(buffers):
        row = np.empty(tokens * width * 2, np.uint8)
        state.export_rows(i, 0, tokens, row)
        out[i] = row.view(np.float16).reshape(tokens, width)
    return out


def random_kv(rng: np.random.Generator, buffers: int, tokens: int, width: int) -> npt.NDArray[np.float16]:
    return rng.standard_normal((buffers, tokens, width)).astype(np.float16)


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_store(
    ops: _cpu.Ops, rng: np.random.Generator, q_heads: int, kv_heads: int, dim: int, interleaved: bool
) -> None:
    pairs = dim // 2 - (dim > 32) * 4
    freq = [float(10000.0 ** (-i / pairs)) for i in range(pairs)]
    tokens = 21
    positions = [int(p) for p in rng.permutation(200)[:tokens]]
    qkv = normal(rng, tokens, (q_heads + 2 * kv_heads) * dim)
    results = []
    for o in (ops, reference):
        state = o.new_state(kv_specs(kv_heads, dim), 200)
        state.reserve(200)
        rows, x = [(state, p) for p in positions], qkv.copy()
        table = poisoned(tokens, 2 * pairs)
        o.rope_table(rows, freq, table)
        o.rope_store(x, table, interleaved, rows, 2, 3, q_heads, kv_heads, dim)
        results.append((table, x, exported(state, 4, 200, kv_heads * dim)[2:][:, positions]))
    (table, x, stored), (want_table, want_x, want_stored) = results
    assert np.array_equal(table, want_table)
    assert_close(x[:, : q_heads * dim], want_x[:, : q_heads * dim], 1e-6)
    assert np.allclose(stored, want_stored, rtol=1.1e-3, atol=1e-6)  # one step of half precision
    assert np.array_equal(stored[1], want_stored[1])


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), SHAPES)
def test_attention(ops: _cpu.Ops, rng: np.random.Generator, q_heads: int, kv_heads: int, dim: int) -> None:
    """A ragged step: decode rows of sessions at random depths, and a prefill chunk of one of them."""
    depths = [0, 1, 15, 16, 63, 64, 65, 255, 256, 257, int(rng.integers(300, 900))]
    chunk = int(rng.integers(5, 40))
    data = [random_kv(rng, 4, d + 1, kv_heads * dim) for d in depths]
    data.append(random_kv(rng, 4, 250 + chunk, kv_heads * dim))
    at = [(i, d) for i, d in enumerate(depths)] + [(len(depths), 250 + i) for i in range(chunk)]
    q = normal(rng, len(at), q_heads * dim) * 2
    scale = dim**-0.5

    def run(o: _cpu.Ops, order: npt.NDArray[np.int64]) -> Array:
        states = [o.new_state(kv_specs(kv_heads, dim), 1000) for _ in data]
        for s, d in zip(states, data, strict=True):
            s.reserve(d.shape[1])
            fill(s, d)
        out = poisoned(len(order), q_heads * dim)
        rows = [(states[at[i][0]], at[i][1]) for i in order]
        o.attention(np.ascontiguousarray(q[order]), rows, 2, 3, q_heads, kv_heads, dim, scale, out)
        return out

    every = np.arange(len(at))
    got, want = run(ops, every), run(reference, every)
    assert_close(got, want, 2e-5)
    isa = next(i for i in ISAS if ops.name.startswith(f"cpu ({i}"))
    for o in (ops, _cpu.cpu_ops(1, isa), _cpu.cpu_ops(3, isa)):
        for index in (rng.permutation(len(at)), every[-3:], every[10:11], every[5:6]):
            assert np.array_equal(run(o, index), got[index])


def test_attention_reads_nothing_beyond_a_row(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    """Later keys and values of the same page are infinite; earlier rows must not notice."""
    data = random_kv(rng, 2, 50, 64)
    q, clean, dirty = normal(rng, 20, 128), poisoned(20, 128), poisoned(20, 128)
    for tail, out in ((None, clean), (np.float16(np.inf), dirty)):
        if tail is not None:
            data[:, 20:] = tail
        state = ops.new_state(kv_specs(1, 64, 1), 64)
        state.reserve(50)
        fill(state, data)
        ops.attention(q, [(state, i) for i in range(20)], 0, 1, 2, 1, 64, 0.125, out)
    assert np.array_equal(clean, dirty)


def test_softmax_extremes(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    """Scores of thousands: one key takes all, nothing overflows."""
    data = random_kv(rng, 2, 700, 32) * np.float16(30)
    q = normal(rng, 4, 64) * 100
    results = []
    for o in (ops, reference):
        state = o.new_state(kv_specs(1, 32, 1), 700)
        state.reserve(700)
        fill(state, data)
        out = poisoned(4, 64)
        o.attention(q, [(state, 699 - i) for i in range(4)], 0, 1, 2, 1, 32, 1.0, out)
        results.append(out)
    assert_close(results[0], results[1], 1e-3)


def test_state_export_import_truncate(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    width = 3 * 20
    data = random_kv(rng, 4, 150, width)
    state = ops.new_state(kv_specs(3, 20), 1000)
    assert state.capacity == 1000 and state.resident_bytes == 0
    state.reserve(150)
    grown = state.resident_bytes
    fill(state, data)
    assert np.array_equal(exported(state, 4, 150, width), data)
    part = np.empty(5 * width * 2, np.uint8)
    state.export_rows(1, 62, 5, part)
    assert np.array_equal(part.view(np.float16).reshape(5, width), data[1, 62:67])
    state.truncate(70)
    assert 0 < state.resident_bytes < grown
    assert np.array_equal(exported(state, 4, 70, width), data[:, :70])
    state.truncate(0)
    assert state.resident_bytes == 0
    for call in (
        lambda: state.reserve(1001),
        lambda: state.export_rows(0, 0, 1, part[: width * 2]),
        lambda: state.export_rows(4, 0, 0, part[:0]),
        lambda: state.import_rows(0, 999, 2, np.zeros(2 * width * 2, np.uint8)),
        lambda: state.import_rows(0, -1, 1, np.zeros(width * 2, np.uint8)),
        lambda: state.import_rows(0, 0, 1, np.zeros(7, np.uint8)),
    ):
        with pytest.raises(ValueError, match="state"):
            call()


def test_fork_shares_pages_and_copies_on_write(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    width, q_width = 64, 128
    first = ops.new_state(kv_specs(1, 64, 1), 512)
    data = random_kv(rng, 2, 300, width)
    first.reserve(300)
    fill(first, data)
    forks = []
    for n in (300, 128, 100, 1, 0):
        fork = ops.new_state(kv_specs(1, 64, 1), 512)
        fork.fork_from(first, n)
        assert np.array_equal(exported(fork, 2, n, width), data[:, :n])
        forks.append((fork, n))
    # Rows written on either side stay there: in the shared pages (after a rewind) and in the partial last page.
    table = np.concatenate([np.ones((1, 32), np.float32), np.zeros((1, 32), np.float32)], 1)
    for state, at in ((first, 10), (forks[0][0], 20), (forks[1][0], 128), (forks[2][0], 70)):
        ops.rope_store(normal(rng, 1, q_width + 2 * width), table, True, [(state, at)], 0, 1, 2, 1, 64)
    expect = {id(first): 10, id(forks[0][0]): 20, id(forks[2][0]): 70}
    for state, n in [(first, 300), *forks]:
        got = exported(state, 2, n, width)
        changed = np.flatnonzero((got != data[:, :n]).any((0, 2)))
        assert list(changed) == ([expect[id(state)]] if id(state) in expect else [])
    chain = ops.new_state(kv_specs(1, 64, 1), 512)
    chain.fork_from(forks[0][0], 200)
    chain.fork_from(chain, 30)
    kept = exported(chain, 2, 30, width)
    del forks, first
    assert np.array_equal(exported(chain, 2, 30, width), kept)
    with pytest.raises(ValueError, match="fork"):
        chain.fork_from(chain, 513)
    other = ops.new_state(kv_specs(1, 32, 1), 512)
    with pytest.raises(ValueError, match="another kind"):
        other.fork_from(chain, 10)


def test_other_kinds_of_state(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    specs: list[Spec] = [
        ("k.0", "append", int(Q.F16), 2, 24, 1, 0),
        ("compressed", "append", int(Q.F32), 1, 10, 4, 0),
        ("window", "ring", int(Q.BF16), 1, 12, 1, 8),
        ("memory", "recurrent", int(Q.F32), 2, 16, 1, 3),
        ("count", "counter", int(Q.I32), 1, 2, 1, 1),
    ]
    rows = [200, 50, 8, 3, 1]
    sizes = [2 * 24 * 2, 40, 24, 128, 8]
    a, b = ops.new_state(specs, 203), ops.new_state(specs, 203)
    a.reserve(200)
    data = [rng.integers(0, 256, n * s, dtype=np.uint8) for n, s in zip(rows, sizes, strict=True)]
    for i, d in enumerate(data):
        a.import_rows(i, 0, rows[i], d)
    b.fork_from(a, 130)
    a.import_rows(3, 0, 3, np.zeros(3 * 128, np.uint8))
    for i, n in enumerate([130, 33, 8, 3, 1]):
        out = np.zeros(n * sizes[i], np.uint8)
        b.export_rows(i, 0, n, out)
        assert np.array_equal(out, data[i][: n * sizes[i]]), specs[i]
    b.truncate(5)
    out = np.zeros(8 * 24, np.uint8)
    b.export_rows(2, 0, 8, out)
    assert np.array_equal(out, data[2])
    bad: list[tuple[Any, ...]] = [
        ("r", "ring", int(Q.F32), 1, 4, 1, 0),
        ("a", "append", int(Q.F32), 0, 4, 1, 0),
        ("a", "append", int(Q.F32), 1, 4, 0, 0),
    ]
    for spec in bad:
        with pytest.raises(ValueError, match="state buffer"):
            ops.new_state([spec], 10)
    with pytest.raises(RuntimeError, match="Q4_0"):
        ops.new_state([("a", "append", int(Q.Q4_0), 1, 32, 1, 0)], 10)


# ---- refusals


def test_bad_arguments(ops: _cpu.Ops, rng: np.random.Generator) -> None:
    w = Matrix(rng, "Q4_1", 32, 64)
    packed = w.on(ops)
    with pytest.raises(ValueError, match="shapes"):
        ops.linear(packed, normal(rng, 2, 64), poisoned(2, 31))
    with pytest.raises(ValueError, match="another use"):
        ops.linear_swiglu(packed, normal(rng, 2, 64), poisoned(2, 16))
    with pytest.raises(ValueError, match="another backend"):
        ops.linear(w.on(reference), normal(rng, 2, 64), poisoned(2, 32))
    with pytest.raises(ValueError, match="SwiGLU"):
        ops.load([w.part], "swiglu")
    with pytest.raises(ValueError, match="32 and 64 columns"):
        ops.load([Matrix(rng, "Q4_1", 4, 32).part, w.part])
    with pytest.raises(RuntimeError, match="I32"):
        ops.load([(np.zeros(64 * 4, np.uint8), int(Q.I32), 2, 32)])
    with pytest.raises(ValueError, match="token id"):
        ops.embed(w.on(ops, "embedding"), [32], poisoned(1, 64))
    with pytest.raises(ValueError, match="gather"):
        ops.gather(normal(rng, 2, 4), [2], poisoned(1, 4))
    state = ops.new_state(kv_specs(1, 32, 1), 70)
    qkv, table = normal(rng, 1, 128), np.ones((1, 32), np.float32)
    for at in (-1, 70):
        with pytest.raises(ValueError, match="position"):
            ops.rope_store(qkv, table, True, [(state, at)], 0, 1, 2, 1, 32)
    with pytest.raises(ValueError, match="names of keys"):
        ops.rope_store(qkv, table, True, [(state, 0)], 1, 0, 2, 1, 32)
    with pytest.raises(ValueError, match="not in the state"):
        ops.attention(normal(rng, 1, 64), [(state, 69)], 0, 1, 2, 1, 32, 1.0, poisoned(1, 64))


def test_choice_of_backend() -> None:
    with pytest.raises(ValueError, match="threads"):
        _cpu.cpu_ops(-1)
    with pytest.raises(ValueError, match="instruction set"):
        _cpu.cpu_ops(1, "sse9")
    assert _cpu.cpu_ops(3, "scalar").name.startswith("cpu (scalar, 3 threads")
    assert _cpu.cpu_ops(1, "auto").name.startswith(f"cpu ({ISAS[0]}")


@pytest.mark.parametrize("threads", [2, 3])
def test_more_rows_than_the_pool_counts(rng: np.random.Generator, threads: int) -> None:
    """The pool counts 65,535 units; beyond that a unit is several rows."""
    o = _cpu.cpu_ops(threads)
    table = normal(rng, 50, 8)
    ids = rng.integers(0, 50, 2 * 65535 + 77).astype(np.int32)
    out = poisoned(len(ids), 8)
    o.embed(o.load([(table.view(np.uint8).reshape(-1), int(Q.F32), 50, 8)], "embedding"), ids, out)
    assert np.array_equal(out, table[ids])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_small_calls(rng: np.random.Generator, threads: int) -> None:
    """Fork-join under stress: more threads than cores, thousands of calls of changing size."""
    o = _cpu.cpu_ops(threads)
    w = Matrix(rng, "Q8_0", 200, 32)
    packed, alone = w.on(o), _cpu.cpu_ops(1)
    x, y, want = normal(rng, 9, 32), poisoned(9, 200), poisoned(9, 200)
    alone.linear(w.on(alone), x, want)
    for i in range(1500):
        n = 1 + i % 9
        y[:n] = np.nan
        o.linear(packed, x[:n], y[:n])
        assert np.array_equal(y[:n], want[:n])
