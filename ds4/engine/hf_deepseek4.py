"""DeepSeek V4 checkpoints under GGUF's names: hyper-parameters of config.json and tensors.

Two spellings are read: DeepSeek's published one (`layers.N.attn.wq_a.weight`, `ffn.experts.E.w1.weight`), and that of
the modules of transformers (`model.layers.N.self_attn.q_a_proj.weight`, experts of a layer in one tensor). Published
weights are 8- and 4-bit codes with scales beside them, which stay as they are.

Sources: DeepSeek's checkpoints and inference code; transformers, `DeepseekV4Config` and its weight conversion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ds4.engine.tensors import DType, Tensor
from ds4.errors import ModelFileError, UnsupportedModelError

_NUMBERS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "vocab_size": "vocab_size",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "qk_rope_head_dim": "rope.dimension_count",
    "q_lora_rank": "attention.q_lora_rank",
    "o_groups": "attention.output_group_count",
    "o_lora_rank": "attention.output_lora_rank",
    "sliding_window": "attention.sliding_window",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
    "hc_mult": "hyper_connection.count",
    "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    "hc_eps": "hyper_connection.epsilon",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_hash_layers": "hash_layer_count",
    "routed_scaling_factor": "expert_weights_scale",
    "swiglu_limit": "swiglu_clamp_exp",
    "rope_theta": "rope.freq_base",
    "compress_rope_theta": "attention.compress_rope_freq_base",
    "max_position_embeddings": "context_length",
}
_SCALING = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_FIXED = {"scoring_func": "sqrtsoftplus", "hidden_act": "silu", "norm_topk_prob": True, "tie_word_embeddings": False}
_GLOBAL = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "hc_head_fn": "output_hc_fn.weight",
    "hc_head_base": "output_hc_base.weight",
    "hc_head_scale": "output_hc_scale.weight",
}
_LAYER = {
    **{f"hc_{kind}_{part}": f"hc_{kind}_{part}.weight" for kind in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn_norm.weight": "attn_norm.weight",
    "attn.wq_a.weight": "attn_q_a.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wq_b.weight": "attn_q_b.weight",
    "attn.wkv.weight": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "attn.attn_sink": "attn_sinks.weight",
    "attn.wo_a.weight": "attn_output_a.weight",
    "attn.wo_b.weight": "attn_output_b.weight",
    "attn.compressor.wkv.weight": "attn_compressor_kv.weight",
    "attn.compressor.wgate.weight": "attn_compressor_gate.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight",
    "attn.compressor.norm.weight": "attn_compressor_norm.weight",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv.weight",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "ffn.shared_experts.w1.weight": "ffn_gate_shexp.weight",
    "ffn.shared_experts.w3.weight": "ffn_up_shexp.weight",
    "ffn.shared_experts.w2.weight": "ffn_down_shexp.weight",
}
_EXPERT = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
_MODULES_GLOBAL = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "hc_head.hc_fn": "output_hc_fn.weight",
    "hc_head.hc_base": "output_hc_base.weight",
    "hc_head.hc_scale": "output_hc_scale.weight",
}
_MODULES_LAYER = {
    **{f"{kind}_hc.{part}": f"hc_{kind}_{part}.weight" for kind in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_norm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_proj.weight": "attn_kv.weight",
    "self_attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.o_a_proj.weight": "attn_output_a.weight",
    "self_attn.o_b_proj.weight": "attn_output_b.weight",
    "self_attn.compressor.kv_proj.weight": "attn_compressor_kv.weight",
    "self_attn.compressor.gate_proj.weight": "attn_compressor_gate.weight",
    "self_attn.compressor.position_bias": "attn_compressor_ape.weight",
    "self_attn.compressor.kv_norm.weight": "attn_compressor_norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "indexer.attn_q_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.compressor.indexer.kv_proj.weight": "indexer_compressor_kv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "indexer_compressor_gate.weight",
    "self_attn.compressor.indexer.position_bias": "indexer_compressor_ape.weight",
    "self_attn.compressor.indexer.kv_norm.weight": "indexer_compressor_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
_MODULES_GATE_UP, _MODULES_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"

_LAYER_NAME = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(.+)")
_EXPERT_NAME = re.compile(r"ffn\.experts\.(0|[1-9]\d{0,5})\.(w[123])\.weight")

_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_SCALE_TILE, _SCALE_COLUMNS = 128, 32


# ---- config.json


def hparams(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF keys without prefix. Raises ModelFileError or UnsupportedModelError naming the member of config.json."""
    config = _published(path, config)
    values: dict[str, Any] = {}
    for member, key in _NUMBERS.items():
        value = config.get(member)
        if type(value) not in (int, float):
            found = "the member is missing" if value is None else f"is {value!r}, expected a number"
            raise ModelFileError(path, member, found)
        values[key] = value
    values["attention.value_length"] = values["attention.key_length"]
    for member, expected in _FIXED.items():
        if (value := config.get(member, expected)) != expected:
            raise UnsupportedModelError(path, member, f"{value!r} is not implemented, only {expected!r}")
    ratios = config.get("compress_ratios")
    if not isinstance(ratios, list) or any(type(r) is not int for r in ratios):
        raise ModelFileError(path, "compress_ratios", f"is {ratios!r}, expected a list of integers")
    values["attention.compress_ratios"] = ratios
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict):
        raise ModelFileError(path, "rope_scaling", f"is {scaling!r}, expected an object")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise UnsupportedModelError(path, "rope_scaling.type", f"{kind!r} is not implemented, only 'yarn'")
    values["rope.scaling.type"] = kind
    for member, key in _SCALING.items():
        if type(value := scaling.get(member)) not in (int, float):
            raise ModelFileError(path, f"rope_scaling.{member}", f"is {value!r}, expected a number")
        values[key] = value
    return values


def _published(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the members that transformers 5 writes folded back into the published ones."""
    out = dict(config)
    if "compress_ratios" not in out and isinstance(kinds := out.get("layer_types"), list):
        rates = out.get("compress_rates") or {}
        if wrong := [k for k in kinds if not isinstance(k, str) or k not in _RATIOS]:
            raise UnsupportedModelError(path, "layer_types", f"{wrong[0]!r} is not one of {', '.join(_RATIOS)}")
        out["compress_ratios"] = [rates.get(k, _RATIOS[k]) if isinstance(rates, dict) else None for k in kinds]
    if "num_hash_layers" not in out and isinstance(kinds := out.get("mlp_layer_types"), list):
        out["num_hash_layers"] = kinds.count("hash_moe")
        if kinds != ["hash_moe"] * kinds.count("hash_moe") + ["moe"] * kinds.count("moe"):
            raise UnsupportedModelError(path, "mlp_layer_types", "expected hash_moe layers followed by moe layers")
    rope = out.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(near := rope.get("main"), dict):
        far = rope.get("compress")
        if not isinstance(far, dict):
            raise ModelFileError(path, "rope_parameters.compress", f"is {far!r}, expected an object")
        if (kind := near.get("rope_type", "default")) != "default":
            raise UnsupportedModelError(path, "rope_parameters.main.rope_type", f"{kind!r} is not implemented")
        out["rope_scaling"] = far
        for member, source in (("rope_theta", near), ("compress_rope_theta", far)):
            if "rope_theta" in source:
                out[member] = source["rope_theta"]
    share, width = out.get("partial_rotary_factor"), out.get("head_dim")
    if "qk_rope_head_dim" not in out and isinstance(share, int | float) and isinstance(width, int):
        out["qk_rope_head_dim"] = int(width * share)
    return out


# ---- tensors


def tensors(path: Path, config: Mapping[str, Any], files: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The main model's tensors by GGUF name; experts stay apart, number 0 is `blk.N.ffn_up_exps.0.weight`.

    Draft layers (`mtp.*`) are left out, see `ds4.engine.drafts`. Raises UnsupportedModelError naming a tensor that
    DeepSeek V4 does not have, and ModelFileError naming one whose scales are missing or do not fit.
    """
    _check_quantisation(path, config)
    out: dict[str, Tensor] = {}
    for name, tensor in files.items():
        if name.startswith(("mtp.", "model.mtp.")):
            continue
        if (base := name.removesuffix(".scale")) != name and f"{base}.weight" in files:
            continue  # belongs to the matrix beside it
        if (base := name.removesuffix(".weight")) != name:
            tensor = with_scales(path, name, tensor, files.get(f"{base}.scale"))
        for new, part in _named(path, name, tensor):
            if new in out:
                raise ModelFileError(path, name, f"{new} is in the file twice")
            out[new] = replace(part, name=new)
    return out


def _named(path: Path, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    plain = name.removeprefix("model.")
    new = _GLOBAL.get(name) or _MODULES_GLOBAL.get(plain)
    if new is not None:
        yield new, tensor
        return
    if (match := _LAYER_NAME.fullmatch(plain)) is not None:
        layer, rest = f"blk.{match[1]}.", match[2]
        if (new := _LAYER.get(rest) or _MODULES_LAYER.get(rest)) is not None:
            yield layer + new, _as_i32(path, tensor)
            return
        if (expert := _EXPERT_NAME.fullmatch(rest)) is not None:
            yield f"{layer}{_EXPERT[expert[2]]}.{expert[1]}.weight", tensor
            return
        if rest == _MODULES_DOWN:
            yield layer + "ffn_down_exps.weight", tensor
            return
        if rest == _MODULES_GATE_UP:
            yield from _gate_and_up(path, layer, tensor)
            return
    raise UnsupportedModelError(path, name, "this tensor is not part of a DeepSeek V4 model")


def draft_name(name: str) -> str:
    """The GGUF name of a draft layer's tensor without its stage; what only draft layers have keeps its own name."""
    if (expert := _EXPERT_NAME.fullmatch(name)) is not None:
        return f"{_EXPERT[expert[2]]}.{expert[1]}.weight"
    if name in ("hc_head_fn", "hc_head_base", "hc_head_scale"):
        return f"{name}.weight"
    return _LAYER.get(name, name)


def _gate_and_up(path: Path, layer: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """[experts, gate rows then up rows, width], cut into one matrix each."""
    if len(tensor.shape) != 3 or tensor.shape[1] % 2 or 0 in tensor.shape:
        raise ModelFileError(path, tensor.name, f"shape {list(tensor.shape)}, expected [experts, 2 * width, hidden]")
    experts, rows, cols = tensor.shape
    size = tensor.data.nbytes // (2 * experts)
    for i in range(2 * experts):
        part = tensor.data[i * size : (i + 1) * size]
        kind = "ffn_up_exps" if i % 2 else "ffn_gate_exps"
        yield f"{layer}{kind}.{i // 2}.weight", Tensor(tensor.name, (rows // 2, cols), tensor.dtype, part)


def _as_i32(path: Path, tensor: Tensor) -> Tensor:
    """Tables of 64-bit integers as 32-bit ones."""
    if tensor.dtype is not DType.I64:
        return tensor
    values = np.frombuffer(tensor.data, "<i8")
    if len(values) and not (values.min() >= -(1 << 31) and values.max() < 1 << 31):
        raise ModelFileError(path, tensor.name, "a number is outside 32 bits")
    return replace(tensor, dtype=DType.I32, data=memoryview(values.astype("<i4").tobytes()))


# ---- codes with scales beside them


def _check_quantisation(path: Path, config: Mapping[str, Any]) -> None:
    settings = config.get("quantization_config")
    if settings is None:
        return
    if not isinstance(settings, dict):
        raise ModelFileError(path, "quantization_config", f"is {settings!r}, expected an object")
    tile = [_SCALE_TILE, _SCALE_TILE]
    for member, allowed in (("quant_method", ("fp8",)), ("fmt", ("e4m3",)), ("scale_fmt", ("ue8m0",))):
        if (value := settings.get(member, allowed[0])) not in allowed:
            raise UnsupportedModelError(path, f"quantization_config.{member}", f"{value!r}, only {allowed[0]!r}")
    if (value := settings.get("weight_block_size", tile)) != tile:
        raise UnsupportedModelError(path, "quantization_config.weight_block_size", f"{value!r}, only {tile}")


def with_scales(path: Path, name: str, tensor: Tensor, scales: Tensor | None) -> Tensor:
    """The matrix with its scales beside it; pairs of 4-bit codes, which files call bytes, as type F4."""
    if tensor.dtype in (DType.I8, DType.U8) and scales is not None and len(tensor.shape) == 2:
        tensor = replace(tensor, dtype=DType.F4, shape=(tensor.shape[0], 2 * tensor.shape[1]))
    if tensor.dtype not in (DType.F8_E4M3, DType.F4):
        if scales is not None:
            raise UnsupportedModelError(path, name, f"type {tensor.dtype.name} with scales is not implemented")
        return tensor
    if scales is None:
        raise ModelFileError(path, name.removesuffix(".weight") + ".scale", "the tensor is missing")
    if len(tensor.shape) != 2:
        raise ModelFileError(path, name, f"shape {list(tensor.shape)}, expected two axes")
    rows, cols = tensor.shape
    if tensor.dtype is DType.F4:
        expected = rows, -(-cols // _SCALE_COLUMNS)
    else:
        expected = -(-rows // _SCALE_TILE), -(-cols // _SCALE_TILE)
    if scales.shape != expected:
        raise ModelFileError(path, scales.name, f"shape {list(scales.shape)}, the matrix asks for {list(expected)}")
    if scales.dtype not in (DType.F8_E8M0, DType.U8):
        raise UnsupportedModelError(path, scales.name, f"type {scales.dtype.name}, only F8_E8M0 is implemented")
    return replace(tensor, scales=scales.data)
