"""DeepSeek V4 in GGUF files: both published ways of types and keys, what a file may leave out, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGMLQuantizationType as Q

from ds4 import _cpu
from ds4.engine.engine import Engine, build_model
from ds4.engine.model_file import check_model_file, open_model_file, read_model_file
from ds4.engine.types import EngineConfig
from ds4.errors import ModelFileError, UnsupportedModelError
from tests.support.tiny_deepseek4 import TinyDeepSeek4, tiny

FLASH = tiny("flash")
PROMPT = [int(t) for t in FLASH.prompt()[:40]]

# Element types by the end of the name; everything else is F32.
SMALL_TYPES = {
    "token_embd.weight": Q.F16,
    "output.weight": Q.Q8_0,
    "_fn.weight": Q.F16,
    "_ape.weight": Q.F16,
    "_compressor_kv.weight": Q.F16,
    "_compressor_gate.weight": Q.F16,
    "indexer.attn_q_b.weight": Q.F16,
    "indexer.proj.weight": Q.F16,
    "ffn_gate_inp.weight": Q.F16,
    "attn_q_a.weight": Q.Q8_0,
    "attn_q_b.weight": Q.Q8_0,
    "attn_kv.weight": Q.Q8_0,
    "attn_output_a.weight": Q.Q8_0,
    "attn_output_b.weight": Q.Q8_0,
    "shexp.weight": Q.Q8_0,
    "ffn_gate_exps.weight": Q.Q4_0,
    "ffn_up_exps.weight": Q.Q4_0,
    "ffn_down_exps.weight": Q.Q8_0,
}
LARGE_TYPES = {
    "token_embd.weight": Q.BF16,
    "output.weight": Q.BF16,
    "_compressor_kv.weight": Q.BF16,
    "_compressor_gate.weight": Q.BF16,
    "indexer.attn_q_b.weight": Q.Q8_0,
    "indexer.proj.weight": Q.BF16,
    "ffn_gate_inp.weight": Q.BF16,
    "attn_q_a.weight": Q.Q8_0,
    "attn_kv.weight": Q.Q8_0,
    "shexp.weight": Q.Q8_0,
    "_exps.weight": Q.MXFP4,
}


def last_logits(path: Path, backend: str = "cpu", qat: bool = True) -> npt.NDArray[np.float32]:
    engine = Engine.open(EngineConfig(model=path, backend=backend, ctx=64, threads=2, kv_qat=qat))
    session = engine.new_session()
    session.sync(PROMPT)
    return session.logits()


def test_both_formats_are_one_model(tmp_path: Path) -> None:
    a = FLASH.write_gguf(tmp_path / "tiny-F32.gguf")
    b = FLASH.write_hf(tmp_path / "tiny")
    assert np.array_equal(last_logits(a), last_logits(b))
    m = open_model_file(a)
    assert (m.family, m.syntax, m.format, m.id) == ("deepseek4", "deepseek4", "gguf", "tiny")


@pytest.mark.parametrize("variant", ["flash", "pro"])
@pytest.mark.parametrize("types", [SMALL_TYPES, LARGE_TYPES], ids=["small", "large"])
def test_types_of_published_files(tmp_path: Path, variant: str, types: dict[str, Q]) -> None:
    """The kernels against the exact oracle on the same file: rounding activations to 8 bits is all that differs, up to
    the first layer that chooses experts by score, where random weights have ties enough to choose otherwise."""
    path = tiny(variant).write_gguf(tmp_path / "m.gguf", types)
    streams = []
    for backend in ("cpu", "reference"):
        model = build_model(open_model_file(path), _cpu.Backend(backend), kv_qat=False)
        model.load()
        streams.append(model.hidden_states(PROMPT[:30])[:4])
    error = np.abs(streams[0] - streams[1]).max((1, 2)) / np.abs(streams[1]).max((1, 2))
    print("relative error after layers 0..3:", error)
    assert error[0] == 0 and (error < 0.04).all()
    assert np.isfinite(last_logits(path)).all()


def test_keys_in_every_integer_and_float_type(tmp_path: Path) -> None:
    """Some writers use 64 bits, arrays of f64, arrays for numbers that hold for all layers, and leave defaults out."""
    want = last_logits(FLASH.write_gguf(tmp_path / "plain.gguf"))
    p = "deepseek4."
    changes: dict[str, Any] = {
        p + "block_count": np.uint64(5),
        p + "context_length": np.uint64(1 << 20),
        p + "attention.head_count": np.int32(4),
        p + "rope.scaling.original_context_length": np.uint64(65536),
        p + "expert_feed_forward_length": [256] * 5,
        p + "swiglu_clamp_exp": [4.0] * 5,
        p + "swiglu_clamp_shexp": [4.0] * 5,
        p + "rope.freq_base": np.float64(10000.0),
        p + "rope.scaling.factor": 16,
        p + "attention.compress_ratios": [0, 0, 4, 128, 4, 0, 0],
        p + "vocab_size": None,
        p + "rope.scaling.type": None,
        p + "rope.scaling.yarn_beta_fast": None,
        p + "attention.layer_norm_rms_epsilon": None,
        p + "expert_weights_norm": True,
        p + "expert_gating_func": 4,
        p + "embedding_length_out": 1024,
        p + "feed_forward_length": 256,
        p + "nextn_predict_layers": 0,
        p + "expert_group_count": 0,
    }
    path = FLASH.write_gguf(tmp_path / "other.gguf", keys=changes)
    assert gguf.GGUFReader(path).fields[p + "block_count"].types[0].name == "UINT64"
    assert np.array_equal(last_logits(path), want)


def test_ratios_follow_from_the_compressors(tmp_path: Path) -> None:
    for variant in ("flash", "pro"):
        model = tiny(variant)
        path = model.write_gguf(tmp_path / f"{variant}.gguf", keys={"deepseek4.attention.compress_ratios": None})
        assert open_model_file(path).hparams["attention.compress_ratios"] == model.config["compress_ratios"][:5]


def test_draft_layers_are_left_out(tmp_path: Path) -> None:
    tensors = FLASH.gguf_tensors()
    draft = {f"blk.5.{n[6:]}": w for n, w in tensors.items() if n.startswith("blk.4.")}
    draft["blk.5.nextn.eh_proj.weight"] = np.zeros((256, 512), "f4")
    keys = {"deepseek4.block_count": 6, "deepseek4.nextn_predict_layers": 1}
    path = FLASH.write_gguf(tmp_path / "m.gguf", keys=keys, tensors=tensors | draft)
    m = open_model_file(path)
    assert m.hparams["block_count"] == 5 and m.tensors.keys() == tensors.keys()
    mtp = tensors | {"mtp.0.e_proj.weight": np.zeros((256, 256), "f4")}
    assert open_model_file(FLASH.write_gguf(tmp_path / "n.gguf", tensors=mtp)).tensors.keys() == tensors.keys()


def write(tmp_path: Path, keys: dict[str, Any] | None = None, **tensors: Any) -> Path:
    kept = {n: w for n, w in (FLASH.gguf_tensors() | tensors).items() if w is not None}
    return FLASH.write_gguf(
        tmp_path / "m.gguf", keys={f"deepseek4.{k}": v for k, v in (keys or {}).items()}, tensors=kept
    )


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"attention.compress_ratios": [0, 0, 4, 8, 4]}, "deepseek4.attention.compress_ratios: holds 8, allowed"),
        ({"attention.compress_ratios": [0, 0, 128, 0, 4]}, "blk.2.attn_compressor_kv.weight: shape"),
        (
            {"attention.compress_ratios": [0, 4, 4, 128, 4]},
            r"blk.1.attn_compressor_kv.weight, .*and 2 more: 10 tensors",
        ),
        ({"attention.compress_ratios": [0] * 5}, "blk.2.attn_compressor"),
        ({"attention.compress_ratios": [4]}, "deepseek4.attention.compress_ratios: has 1 entries for 5 layers"),
        ({"attention.compress_ratios": "all"}, "deepseek4.attention.compress_ratios: expected integers"),
        ({"expert_count": 9}, "blk.0.ffn_gate_inp.weight: shape"),
        ({"expert_used_count": 9}, "deepseek4.expert_used_count: is 9, allowed are 1 to 8"),
        ({"expert_used_count": 2}, "blk.0.ffn_gate_tid2eid.weight: shape"),
        ({"hash_layer_count": 4}, "blk.3.ffn_gate_tid2eid.weight: the tensor is missing"),
        ({"expert_feed_forward_length": [256, 128]}, "deepseek4.expert_feed_forward_length: is"),
        ({"attention.output_group_count": 3}, "attention.output_group_count: is 3, which does not divide"),
        ({"attention.sliding_window": 0}, "attention.sliding_window: is 0"),
        ({"rope.dimension_count": 65}, "rope.dimension_count: is 65, which is odd"),
        ({"rope.dimension_count": 130}, "rope.dimension_count: is 130"),
        ({"hyper_connection.sinkhorn_iterations": 1001}, "hyper_connection.sinkhorn_iterations: is 1001"),
        ({"attention.head_count_kv": 4}, "attention.head_count_kv: is 4"),
        ({"attention.head_count": [4] * 5}, "attention.head_count"),
        ({"expert_weights_scale": float("nan")}, "epsilon, scale or limit"),
        ({"expert_gating_func": 2}, "expert_gating_func"),
        ({"expert_group_count": 8}, "expert_group_count: above 1"),
        ({"swiglu_clamp_exp": [4.0, 5.0]}, "swiglu_clamp_exp: different values per layer"),
        ({"rope.scaling.type": "linear"}, "rope.scaling.type: 'linear'"),
        ({"an.unknown.key": 1}, "an.unknown.key: is not implemented"),
    ],
)
def test_keys_that_are_refused(tmp_path: Path, keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelFileError, match=text):
        Engine.open(EngineConfig(model=write(tmp_path, keys), backend="reference", ctx=32))


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"blk.0.attn_kv.weight": None}, "blk.0.attn_kv.weight: the tensor is missing"),
        ({"blk.3.exp_probs_b.bias": None}, "blk.3.exp_probs_b.bias: the tensor is missing"),
        (
            {"blk.4.ffn_up_exps.weight": np.zeros((7, 256, 256), "f4")},
            r"blk.4.ffn_up_exps.weight: shape \[7, 256, 256\]",
        ),
        ({"blk.0.ffn_gate_tid2eid.weight": np.full((320, 3), 8, "i4")}, "entry 0 is 8, there are 8 experts"),
        ({"blk.0.ffn_gate_tid2eid.weight": np.full((320, 3), 7, "i4")}, "row 0 holds expert 7 twice"),
        ({"blk.0.attn_extra.weight": np.zeros(4, "f4")}, "blk.0.attn_extra.weight: this tensor is not implemented"),
        ({"blk.7.attn_kv.weight": np.zeros((4, 4), "f4")}, "blk.7.attn_kv.weight: this tensor is not implemented"),
        ({"blk.0.attn_kv.weight": np.zeros((128, 256), "i4")}, "I32"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelFileError, match=text):
        Engine.open(EngineConfig(model=write(tmp_path, **tensors), backend="reference", ctx=32))


def test_other_tensor_names_are_listed(tmp_path: Path) -> None:
    """Older community files name the projections otherwise: the error lists what is missing."""
    renamed = {
        n.replace("attn_q_a", "attn_qa").replace("attn_kv", "attn_wkv"): w for n, w in FLASH.gguf_tensors().items()
    }
    path = FLASH.write_gguf(tmp_path / "m.gguf", tensors=renamed)
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_q_a\.weight, .* and 12 more: 20 tensors are missing"):
        open_model_file(path)


def test_the_successor_is_refused(tmp_path: Path) -> None:
    model = TinyDeepSeek4(FLASH.variant, FLASH.config, FLASH.weights, FLASH.head)
    keys = {k.replace("deepseek4.", "deepseek41."): v for k, v in model.gguf_keys().items()}
    path = model.write_gguf(tmp_path / "m.gguf", keys=keys, arch="deepseek41")
    with pytest.raises(UnsupportedModelError, match=r"'deepseek41' \(DeepSeek V4.1\) is another graph"):
        open_model_file(path)
    assert read_model_file(path).family == "deepseek41"  # can still be looked at
    with pytest.raises(UnsupportedModelError):
        check_model_file(read_model_file(path))
