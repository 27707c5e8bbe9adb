"""DeepSeek V4 in every element type that files have: each is the model of its dequantised values, on every CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ds4 import _cpu
from ds4.convert.convert import convert
from ds4.convert.encode import ENCODABLE
from ds4.convert.types import TypePlan, class_of
from ds4.engine.engine import build_model
from ds4.engine.model_file import ModelFile, open_model_file
from ds4.engine.tensors import DType
from tests.support.tiny_deepseek4 import tiny

PROMPT = [int(t) for t in tiny("flash").prompt()[:24]]

# The streams before and after layers 0..2, which choose experts by table: later ones choose by score, and random
# weights have ties enough to choose otherwise.
COMPARED = 4
# Largest error of the streams, relative to their largest value: that of activations in 8 bits (or BF16's of mantissa).
LIMIT = 0.05


@dataclass(frozen=True, slots=True)
class OneType(TypePlan):
    """All matrices of projections and experts in one type, where their rows are whole blocks of it."""

    dtype: DType = DType.F32

    def of(self, name: str, shape: tuple[int, ...], source: DType) -> DType:
        known = class_of(name) != "other" and len(shape) > 1
        return self.dtype if known and shape[-1] % self.dtype.block_elements == 0 else source


def hidden(file: ModelFile, backend: _cpu.Backend) -> npt.NDArray[np.float32]:
    model = build_model(file, backend, kv_qat=False)
    model.load()
    return model.hidden_states(PROMPT)


@pytest.mark.parametrize("dtype", ENCODABLE, ids=lambda d: d.name)
def test_a_type_is_its_dequantised_values(tmp_path: Path, dtype: DType) -> None:
    source = open_model_file(tiny("flash").write_hf(tmp_path / "tiny"))
    convert(source, tmp_path / "q.gguf", OneType(dtype=dtype))
    quantised = open_model_file(tmp_path / "q.gguf")
    kinds = {n for n, t in quantised.tensors.items() if t.dtype is dtype}
    assert {"blk.3.ffn_gate_exps.weight", "blk.3.ffn_down_exps.weight", "blk.0.attn_kv.weight"} <= kinds
    convert(quantised, tmp_path / "wide.gguf", OneType(dtype=DType.F32))
    wide = open_model_file(tmp_path / "wide.gguf")
    assert all(wide.tensors[n].dtype is DType.F32 for n in kinds)
    exact = hidden(quantised, _cpu.Backend("reference"))
    assert np.array_equal(exact, hidden(wide, _cpu.Backend("reference")))
    for isa in _cpu.cpu_isas():
        got = hidden(quantised, _cpu.Backend("cpu", threads=2, isa=isa))[:COMPARED]
        worst = float((np.abs(got - exact[:COMPARED]).max((1, 2)) / np.abs(exact[:COMPARED]).max((1, 2))).max())
        print(dtype.name, isa, "relative error of the streams:", worst)
        assert worst < (1e-5 if dtype in (DType.F32, DType.F16) else LIMIT)
