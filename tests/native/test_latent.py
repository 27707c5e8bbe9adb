"""Operations of DeepSeek V4 at the lengths that its tiny models do not reach: positions near 2^20, 100,000 rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ds4 import _cpu

F32 = 0


def backends() -> list[_cpu.Ops]:
    return [_cpu.reference_ops(), *(_cpu.cpu_ops(2, isa) for isa in _cpu.cpu_isas())]


@pytest.fixture(params=backends(), ids=lambda ops: ops.name.split(",")[0].replace("(", ""))
def ops(request: pytest.FixtureRequest) -> _cpu.Ops:
    found: _cpu.Ops = request.param
    return found


def frequencies(base: float, factor: float) -> npt.NDArray[np.float32]:
    plain = base ** (-np.arange(32) / 32)
    keep = 1 - np.clip((np.arange(32) - 15) / 10, 0, 1)
    return (plain * keep + plain / factor * (1 - keep)).astype(np.float32)


@pytest.mark.parametrize(("base", "factor"), [(10000.0, 1.0), (160000.0, 16.0)])
def test_angles_of_far_positions(ops: _cpu.Ops, base: float, factor: float) -> None:
    """The angle is the product rounded to f32 (at position 10^6 a step of it is 0.06), its cosine is exact for it."""
    freq = frequencies(base, factor)
    positions = [0, 1, 127, 65535, 65536, 100_003, 524_287, 999_999, (1 << 20) - 2, (1 << 20) - 1]
    state = ops.new_state([("r", "append", F32, 1, 4, 128, 0)], 1 << 20)
    table = np.zeros((len(positions), 64), np.float32)
    ops.rope_table_f32([(state, p) for p in positions], freq.tolist(), table)
    angle = (np.array(positions, np.float32)[:, None] * freq[None, :]).astype(np.float64)
    want = np.concatenate([np.cos(angle), np.sin(angle)], 1)
    worst = float(np.abs(table - want).max())
    print("largest error:", worst)
    assert worst <= 6e-8  # half a unit in the last place of numbers up to 1
    unrounded = np.array(positions, np.float64)[:, None] * freq.astype(np.float64)[None, :]
    assert np.abs(np.cos(unrounded) - want[:, :32]).max() > 1e-3  # the rounding is seen


def index_state(ops: _cpu.Ops, rows: npt.NDArray[np.float32]) -> _cpu.OpsState:
    tokens = 4 * len(rows)
    state = ops.new_state([("index", "append", F32, 1, rows.shape[1], 4, 0)], tokens)
    state.reserve(tokens)
    state.import_rows(0, 0, len(rows), rows.view(np.uint8).reshape(-1))
    return state


def best(
    q: npt.NDArray[np.float64], weight: npt.NDArray[np.float64], rows: npt.NDArray[np.float64], k: int
) -> list[int]:
    """Higher score first, then the lower row."""
    score = (np.maximum(rows @ q.T, 0) * weight).sum(1)
    return sorted(np.argsort(-score, kind="stable")[:k].tolist())


@pytest.mark.parametrize(("n", "heads", "k"), [(100_000, 16, 512), (25_001, 64, 1024)])
def test_selection_among_many_rows(ops: _cpu.Ops, n: int, heads: int, k: int) -> None:
    """Small integers make every sum exact, so the choice is exact too, with its many ties."""
    print("seed", n)
    rng = np.random.default_rng(n)
    rows = rng.integers(-2, 3, (n, 128)).astype(np.float32)
    rows[n // 2 :] = rows[: n - n // 2]  # every score occurs at least twice
    state = index_state(ops, rows)
    q = rng.integers(-2, 3, (2, heads * 128)).astype(np.float32)
    weight = rng.integers(-3, 4, (2, heads)).astype(np.float32)
    positions = [4 * n - 1, 4 * n - 3]  # the second does not see the last row, whose window is open
    got = ops.select(q, weight, [(state, p) for p in positions], 0, 4, k)
    for t, visible in enumerate((n, n - 1)):
        chosen = got[t]
        assert chosen is not None
        want = best(q[t].reshape(heads, 128).astype(np.float64), weight[t].astype(np.float64), rows[:visible], k)
        assert chosen.tolist() == want


def test_all_rows_are_visible_up_to_k(ops: _cpu.Ops) -> None:
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((513, 128)).astype(np.float32)
    state = index_state(ops, rows)
    q, weight = rng.standard_normal((3, 16 * 128)).astype(np.float32), np.ones((3, 16), np.float32)
    got = ops.select(q, weight, [(state, 2047), (state, 2050), (state, 2051)], 0, 4, 512)
    assert got[0] is None and got[1] is None  # 512 rows
    chosen = got[2]
    assert chosen is not None and len(set(chosen.tolist())) == 512
