"""DeepSeek V4 directories: both spellings of names and members, element types, codes with scales, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ds4 import _cpu
from ds4.cli.main import main
from ds4.engine.engine import Engine, build_model
from ds4.engine.model_file import open_model_file, read_model_file
from ds4.engine.tensors import DType
from ds4.engine.types import EngineConfig
from ds4.errors import ModelFileError, UnsupportedModelError
from tests.native.test_scaled import E2M1, e4m3
from tests.support.stored import Stored, bf16, write_safetensors
from tests.support.tiny_deepseek4 import tiny

Weights = dict[str, Any]
PROMPT = [5, 17, 300, 5, 9, 2, 77, 121, 200, 6]

# Matrices that published checkpoints store as 8-bit codes; all other matrices are BF16.
FP8 = re.compile(r".*(attn\.w(q_a|q_b|kv|o_a|o_b)|indexer\.wq_b|shared_experts\.w[123]|mtp\.0\.[eh]_proj)\.weight")
FP4 = re.compile(r".*experts\.\d+\.w[123]\.weight")
BF16 = re.compile(r".*(norm|embed|head|wgate|wkv|weights_proj|gate)\.weight|(norm|embed|head)\.weight")


def last_logits(path: Path, backend: str = "cpu") -> npt.NDArray[np.float32]:
    engine = Engine.open(EngineConfig(model=path, backend=backend, ctx=64, threads=2))
    session = engine.new_session()
    session.sync(PROMPT)
    return session.logits()


def modules(weights: Weights) -> Weights:
    """The published names as the modules of transformers, the experts of a layer in two tensors."""
    renames = [
        (r"attn\.indexer\.compressor\.", "self_attn.compressor.indexer."),
        (r"attn\.indexer\.weights_proj\.", "self_attn.compressor.indexer.scorer.weights_proj."),
        (r"attn\.indexer\.wq_b\.", "self_attn.compressor.indexer.q_b_proj."),
        (r"\.attn\.attn_sink", ".self_attn.sinks"),
        (r"\.attn\.", ".self_attn."),
        (r"wq_a", "q_a_proj"),
        (r"wq_b", "q_b_proj"),
        (r"q_norm", "q_a_norm"),
        (r"compressor\.norm|compressor\.indexer\.norm", lambda m: m[0].replace("norm", "kv_norm")),
        (r"wkv", "kv_proj"),
        (r"wgate", "gate_proj"),
        (r"wo_a", "o_a_proj"),
        (r"wo_b", "o_b_proj"),
        (r"\.ape", ".position_bias"),
        (r"\.attn_norm", ".input_layernorm"),
        (r"\.ffn_norm", ".post_attention_layernorm"),
        (r"hc_(attn|ffn)_", r"\1_hc."),
        (r"\.ffn\.", ".mlp."),
        (r"gate\.bias", "gate.e_score_correction_bias"),
        (r"shared_experts\.w1", "shared_experts.gate_proj"),
        (r"shared_experts\.w3", "shared_experts.up_proj"),
        (r"shared_experts\.w2", "shared_experts.down_proj"),
    ]
    out: Weights = {}
    for name, w in weights.items():
        if ".experts." in name:
            continue
        new = {"embed.weight": "embed_tokens.weight", "head.weight": "lm_head.weight"}.get(name, name)
        new = re.sub(r"^hc_head_", "hc_head.hc_", new)
        for pattern, replacement in renames if new.startswith("layers.") else ():
            new = re.sub(pattern, replacement, new)
        out[new if new.startswith("lm_head") else f"model.{new}"] = w
    for layer in range(5):

        def stack(n: str, layer: int = layer) -> npt.NDArray[np.float32]:
            return np.stack([weights[f"layers.{layer}.ffn.experts.{e}.{n}.weight"] for e in range(8)])

        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([stack("w1"), stack("w3")], 1)
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = stack("w2")
    return out


def test_facts(tmp_path: Path) -> None:
    m = open_model_file(tiny("flash").write_hf(tmp_path / "Tiny-V4"))
    assert (m.family, m.syntax, m.format, m.rope_kind) == ("deepseek4", "deepseek4", "safetensors", "interleaved")
    assert m.hparams.integer("attention.indexer.top_k") == 8 and m.hparams.integer("context_length") == 1 << 20
    assert m.n_params == sum(w.size for w in tiny("flash").weights.values())
    assert m.tensors["blk.0.ffn_gate_tid2eid.weight"].dtype is DType.I32  # stored as I64
    assert m.tokenizer_spec is None


def test_spelling_of_the_modules(tmp_path: Path) -> None:
    """Names, fused experts and configuration as transformers 5 writes them give the same tensors."""
    model = tiny("flash")
    rope = model.config["rope_scaling"]
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    path = model.write_hf(
        tmp_path / "modules",
        modules(model.weights),
        compress_ratios=None,
        num_hash_layers=None,
        qk_rope_head_dim=None,
        rope_scaling=None,
        rope_theta=None,
        compress_rope_theta=None,
        layer_types=[kinds[r] for r in model.config["compress_ratios"][:5]],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 2,
        partial_rotary_factor=0.5,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5},
            "compress": rope | {"rope_type": "yarn", "rope_theta": 160000, "attention_factor": 1.0},
        },
    )
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"compress_rates": None}))
    assert open_model_file(path).hparams["attention.compress_ratios"] == model.config["compress_ratios"][:5]
    (path / "config.json").write_text(json.dumps(config))
    got, want = open_model_file(path), open_model_file(model.write_hf(tmp_path / "published"))
    a, b = dict(got.hparams), dict(want.hparams)
    assert a.pop("attention.compress_ratios") == b.pop("attention.compress_ratios")[:5]  # type: ignore[index]
    assert a == b
    down = re.compile(r"(blk\.\d\.ffn_down_exps)\.(\d)\.weight")
    for name, t in want.tensors.items():
        if (match := down.fullmatch(name)) is None:
            assert got.tensors[name].shape == t.shape and got.tensors[name].data == t.data, name
        else:
            whole, e = got.tensors[f"{match[1]}.weight"], int(match[2])
            assert whole.shape == (8, *t.shape) and whole.data[e * t.nbytes : (e + 1) * t.nbytes] == t.data, name
    assert {down.sub(r"\1.weight", name) for name in want.tensors} == got.tensors.keys()
    assert np.array_equal(last_logits(path), last_logits(tmp_path / "published"))


def test_shards(tmp_path: Path) -> None:
    model = tiny("flash")
    want = open_model_file(model.write_hf(tmp_path / "one"))
    path = tmp_path / "three"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(model.config))
    names = list(model.weights)
    files = {f"model-{i}.safetensors": names[i::3] for i in range(3)}
    for file, part in files.items():
        write_safetensors(path / file, {n: model.weights[n] for n in part})
    index = {"weight_map": {n: file for file, part in files.items() for n in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    got = open_model_file(path)
    assert {n: t.data for n, t in got.tensors.items()} == {n: t.data for n, t in want.tensors.items()}


@pytest.mark.parametrize("convert", [bf16, lambda w: w.astype(np.float16)], ids=["BF16", "F16"])
def test_half_types(tmp_path: Path, convert: Callable[[Any], Any]) -> None:
    """Everything in a 16-bit type computes what its values in F32 compute, on the exact backend bit for bit."""
    model = tiny("flash")

    def widened(w: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if w.dtype == np.int64:
            return w
        half = convert(w)
        if isinstance(half, Stored):
            return (np.frombuffer(half.data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(w.shape)
        return half.astype(np.float32)

    halves = {n: w if w.dtype == np.int64 else convert(w) for n, w in model.weights.items()}
    a = last_logits(model.write_hf(tmp_path / "half", halves), "reference")
    b = last_logits(model.write_hf(tmp_path / "wide", {n: widened(w) for n, w in model.weights.items()}), "reference")
    assert np.array_equal(a, b)


# ---- codes with scales


def published(seed: int, weights: Weights | None = None) -> tuple[Weights, Weights, Weights]:
    """Random weights as DeepSeek stores them, their values in F32, and in BF16 with FP4 experts' values as F32."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    codes: Weights = {}
    values: Weights = {}
    halves: Weights = {}
    for name, w in (tiny("flash").weights if weights is None else weights).items():
        rows, cols = w.shape if w.ndim == 2 else (1, 1)
        if FP8.fullmatch(name):
            c = rng.integers(0, 256, w.shape, dtype=np.uint8)
            c[c & 127 == 127] = 0
            # Around magnitude 2^-4: codes reach 448, scales bring them down.
            s = rng.integers(114, 117, (-(-rows // 128), -(-cols // 128)), dtype=np.uint8)
            codes[name] = Stored("F8_E4M3", w.shape, c.tobytes())
            codes[name.removesuffix(".weight") + ".scale"] = Stored("F8_E8M0", s.shape, s.tobytes())
            tiles = np.repeat(np.repeat(s, 128, 0), 128, 1)[:rows, :cols].astype(int)
            values[name] = (e4m3(c) * 2.0 ** (tiles - 127)).astype(np.float32)
            halves[name] = bf16(values[name])
        elif FP4.fullmatch(name):
            c = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
            s = rng.integers(121, 124, (rows, cols // 32), dtype=np.uint8)
            codes[name] = Stored("I8", c.shape, c.tobytes())
            codes[name.removesuffix(".weight") + ".scale"] = Stored("F8_E8M0", s.shape, s.tobytes())
            nibbles = np.stack([c & 15, c >> 4], -1).reshape(rows, cols)
            values[name] = (E2M1[nibbles] * 2.0 ** (np.repeat(s, 32, 1).astype(int) - 127)).astype(np.float32)
            halves[name] = values[name]
        else:
            codes[name] = values[name] = halves[name] = w
    assert sum(v.code == "F8_E4M3" for v in codes.values() if isinstance(v, Stored)) == (
        5 * 8 + 2 if not weights else 10
    )
    return codes, values, halves


CONFIG_FP8 = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "expert_dtype": "fp4",
}


def test_codes_with_scales_are_exact(tmp_path: Path) -> None:
    codes, values, halves = published(20261130)
    path = tiny("flash").write_hf(tmp_path / "codes", codes, **CONFIG_FP8)
    wide = tiny("flash").write_hf(tmp_path / "values", values)
    m = open_model_file(path)
    assert m.n_params == open_model_file(wide).n_params
    assert m.tensors["blk.0.ffn_gate_exps.3.weight"].shape == (256, 256)
    assert m.tensors["blk.0.ffn_gate_exps.3.weight"].dtype is DType.F4
    assert m.type_bytes["F4"] == 5 * 24 * (256 * 128 + 256 * 8)
    got, want = last_logits(path, "reference"), last_logits(wide, "reference")
    assert np.array_equal(got, want) and np.abs(want).max() > 0.1
    # The kernels of 16-bit and 4-bit types round their activations, so there the types must agree, not the values.
    half = tiny("flash").write_hf(tmp_path / "halves", halves)
    only8 = {n: v for n, v in codes.items() if not FP4.fullmatch(n.replace(".scale", ".weight"))}
    only8 |= {n: v for n, v in halves.items() if FP4.fullmatch(n)}
    eight = tiny("flash").write_hf(tmp_path / "eight", only8, **CONFIG_FP8)
    assert np.array_equal(last_logits(eight), last_logits(half))
    worst = np.abs(last_logits(path) - want).max()
    print("cpu against exact:", worst, "of", np.abs(want).max())
    assert worst < 0.05 * np.abs(want).max()


def test_a_head_of_codes_is_exact(tmp_path: Path) -> None:
    """The prediction head as published, FP8 projections and FP4 experts, guesses as its values do."""
    model = tiny("flash")
    codes, values, _ = published(7, model.head)
    guesses = []
    for name, head in (("codes", codes), ("values", values)):
        path = model.write_hf(tmp_path / name, {**model.weights, **head}, **CONFIG_FP8)
        engine = Engine.open(EngineConfig(model=path, backend="reference", ctx=32, mtp=True, mtp_draft=2, mtp_margin=0))
        session = engine.new_session()
        session.sync([5, 6, 7, 8])
        guesses.append(engine._model.native.draft_logits(session.native, 9, 2))
    assert guesses[0][0] == guesses[1][0] and np.array_equal(guesses[0][1], guesses[1][1])
    found = open_model_file(tmp_path / "codes").draft_layers()
    assert found is not None and found.tensors["mtp.0.e_proj.weight"].dtype is DType.F8_E4M3
    assert found.tensors["mtp.0.ffn_up_exps.3.weight"].dtype is DType.F4
    model.write_hf(tmp_path / "cut", {n: w for n, w in {**model.weights, **codes}.items() if n != "mtp.0.h_proj.scale"})
    with pytest.raises(ModelFileError, match=r"mtp\.0\.h_proj\.scale: the tensor is missing"):
        Engine.open(EngineConfig(model=tmp_path / "cut", ctx=32, mtp=True))


@pytest.mark.parametrize(
    ("change", "where", "error"),
    [
        (lambda w: w.pop("layers.1.attn.wkv.scale"), "layers.1.attn.wkv.scale: the tensor is missing", ModelFileError),
        (
            lambda w: w.update({"layers.1.attn.wkv.scale": Stored("F8_E8M0", (1, 1), b"\x70")}),
            r"layers.1.attn.wkv.scale: shape \[1, 1\], the matrix asks for \[1, 2\]",
            ModelFileError,
        ),
        (
            lambda w: w.update({"layers.1.attn.wkv.scale": Stored("F32", (1, 2), bytes(8))}),
            "layers.1.attn.wkv.scale: type F32",
            UnsupportedModelError,
        ),
        (
            lambda w: w.update({"layers.0.hc_attn_base.scale": Stored("F8_E8M0", (1,), b"\x70")}),
            "layers.0.hc_attn_base.scale: this tensor is not part",
            UnsupportedModelError,
        ),
        (
            lambda w: w.update({"layers.2.attn.compressor.wkv.scale": Stored("F8_E8M0", (2, 2), bytes(4))}),
            "layers.2.attn.compressor.wkv.weight: type F32 with scales",
            UnsupportedModelError,
        ),
        (
            lambda w: w.pop("layers.3.ffn.experts.2.w1.scale"),
            "blk.3.ffn_gate_exps.2.weight",
            ModelFileError,
        ),
    ],
    ids=["missing", "shape", "type", "stray", "plain", "missing4"],
)
def test_scales_that_do_not_fit(
    tmp_path: Path, change: Callable[[Weights], Any], where: str, error: type[ModelFileError]
) -> None:
    codes, _, _ = published(1)
    change(codes)
    path = tiny("flash").write_hf(tmp_path / "m", codes, **CONFIG_FP8)
    with pytest.raises(error, match=where):
        last_logits(path)


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    codes, _, _ = published(2)
    s = codes["layers.4.attn.wq_a.scale"]
    codes["layers.4.attn.wq_a.scale"] = Stored(s.code, s.shape, b"\xff" + s.data[1:])
    path = tiny("flash").write_hf(tmp_path / "m", codes)
    with pytest.raises(ModelFileError, match=r"blk\.4: a scale is not a number"):
        last_logits(path)


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"compress_ratios": [0, 0, 4, 64, 4]}, "compress_ratios: holds 64, allowed are 0, 4, 128"),
        ({"compress_ratios": [0, 4]}, "compress_ratios: has 2 entries for 5 layers"),
        ({"compress_ratios": "0"}, "compress_ratios: is '0', expected a list"),
        ({"hidden_size": None}, "hidden_size: the member is missing"),
        ({"num_key_value_heads": 2}, "attention.head_count_kv: is 2"),
        ({"n_routed_experts": 16}, "ffn_gate_inp.weight: shape"),
        ({"num_experts_per_tok": 9}, "expert_used_count: is 9, allowed are 1 to 8"),
        ({"o_groups": 3}, "attention.output_group_count: is 3, which does not divide"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not implemented"),
        ({"norm_topk_prob": False}, "norm_topk_prob: False is not implemented"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type: 'linear' is not implemented"),
        ({"rope_scaling": {"type": "yarn", "factor": "16"}}, "rope_scaling.factor: is '16'"),
        ({"vocab_size": 321}, "token_embd.weight: shape"),
        ({"model_type": "deepseek_v41"}, "model_type: 'deepseek_v41' is not implemented.*another graph"),
        ({"model_type": ["deepseek_v4"]}, "model_type"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method: 'awq'"),
        ({"quantization_config": {"weight_block_size": [64, 64]}}, "quantization_config.weight_block_size"),
        ({"quantization_config": []}, r"quantization_config: is \[\]"),
        (
            {"mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"], "num_hash_layers": None},
            "mlp_layer_types: expected hash_moe layers followed",
        ),
        ({"layer_types": ["full_attention"], "compress_ratios": None}, "layer_types: 'full_attention' is not one of"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = tiny("flash").write_hf(tmp_path / "m", **changes)
    with pytest.raises(ModelFileError, match=text):
        build_model(open_model_file(path), _cpu.Backend("reference"))


def table(value: int, column: int = 0) -> npt.NDArray[np.int64]:
    values = tiny("flash").weights["layers.1.ffn.gate.tid2eid"].copy()
    values[7, column] = value
    return values


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layers.1.ffn.gate.tid2eid": table(8)}, "blk.1.ffn_gate_tid2eid.weight: entry 21 is 8, there are 8 experts"),
        ({"layers.1.ffn.gate.tid2eid": table(-1)}, "blk.1.ffn_gate_tid2eid.weight: entry 21 is -1"),
        ({"layers.1.ffn.gate.tid2eid": table(1 << 40)}, "layers.1.ffn.gate.tid2eid: a number is outside 32 bits"),
        (
            {"layers.1.ffn.gate.tid2eid": table(int(table(0)[7, 1]))},
            "blk.1.ffn_gate_tid2eid.weight: row 7 holds expert . twice",
        ),
        (
            {"layers.1.ffn.gate.tid2eid": table(0).astype(np.float32)},
            "blk.1.ffn_gate_tid2eid.weight: .*type I32",
        ),
        ({"layers.0.attn.wkv.weight": None}, "blk.0.attn_kv.weight"),
        ({"layers.2.attn.indexer.wq_b.weight": None}, "blk.2.indexer.attn_q_b.weight"),
        ({"layers.3.ffn.gate.bias": None}, "blk.3.exp_probs_b.bias"),
        ({"layers.4.ffn.experts.5.w2.weight": None}, "blk.4.ffn_down_exps.5.weight"),
        ({"layers.0.attn.compressor.ape": np.zeros((4, 256), "f4")}, "blk.0.attn_compressor_ape.weight"),
        ({"layers.0.attn.wkv.weight": np.zeros((128, 128), "f4")}, r"blk.0.attn_kv.weight: shape \[128, 128\]"),
        ({"layers.5.attn_norm.weight": np.zeros(256, "f4")}, "blk.5.attn_norm.weight"),
        ({"layers.0.attn.bias": np.zeros(256, "f4")}, "layers.0.attn.bias: this tensor is not part"),
        ({"model.layers.0.self_attn.kv_proj.weight": np.zeros((128, 256), "f4")}, "blk.0.attn_kv.weight.*twice"),
        ({"layers.0.attn.wkv.weight": np.zeros((128, 256), "i4")}, "I32"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, changes: Weights, text: str) -> None:
    weights = {n: w for n, w in (tiny("flash").weights | changes).items() if w is not None}
    path = tiny("flash").write_hf(tmp_path / "m", weights)
    with pytest.raises(ModelFileError, match=text):
        Engine.open(EngineConfig(model=path, backend="reference", ctx=32))


def test_draft_layers_are_left_out(tmp_path: Path) -> None:
    weights = tiny("flash").weights | {"mtp.0.e_proj.weight": np.zeros((256, 256), "f4")}
    path = tiny("flash").write_hf(tmp_path / "m", weights)
    assert (
        read_model_file(path).tensors.keys() == read_model_file(tiny("flash").write_hf(tmp_path / "n")).tensors.keys()
    )


def test_tools_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("flash")
    path = model.write_hf(tmp_path / "Tiny-V4")
    assert main(["inspect", str(path), "--json", "--ctx", "256"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["problem"] is None and facts["tokenizer"] is None and facts["family"] == "deepseek4"
    # Windows of 16 + 128 rows, open windows of 8 or 128 with the same slack, 64 or 2 compressed rows; all of it f32.
    window, four, far = 144 * 128, 136 * 512 + 64 * 128 + 136 * 512 + 64 * 128, 256 * 256 + 2 * 128
    assert facts["memory"]["state_bytes_per_slot"] == 4 * (5 * window + 2 * four + far) + 4 * 256 + 4 * 320
    np.save(tmp_path / "tokens.npy", model.prompt()[:60])
    argv = ["logits", str(path), "--tokens", str(tmp_path / "tokens.npy"), "--out", str(tmp_path / "out.npy")]
    assert main([*argv, "--kv-qat", "off", "-t", "2"]) == 0
    assert np.abs(np.load(tmp_path / "out.npy") - model.reference("logits")[:60]).max() < 2e-4
