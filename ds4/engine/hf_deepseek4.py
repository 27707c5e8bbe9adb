"""DeepSeek V4 checkpoints under GGUF's names: hyper-parameters of config.json and tensors.

Source: DeepSeek's published checkpoints and inference code (`layers.N.attn.wq_a.weight`, `ffn.experts.E.w1.weight`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds4.engine.tensors import Tensor
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
_LAYER_NAME = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(.+)")
_EXPERT_NAME = re.compile(r"ffn\.experts\.(0|[1-9]\d{0,5})\.(w[123])\.weight")


def hparams(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF keys without prefix. Raises ModelFileError or UnsupportedModelError naming the member of config.json."""
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


def tensors(path: Path, config: Mapping[str, Any], files: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The main model's tensors by GGUF name; experts stay apart, number 0 is `blk.N.ffn_up_exps.0.weight`.

    Draft layers (`mtp.*`) are left out. Raises UnsupportedModelError naming a tensor that DeepSeek V4 does not have.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in files.items():
        if name.startswith("mtp."):
            continue
        new = _GLOBAL.get(name)
        if new is None and (match := _LAYER_NAME.fullmatch(name)) is not None:
            rest = _LAYER.get(match[2])
            if rest is None and (expert := _EXPERT_NAME.fullmatch(match[2])) is not None:
                rest = f"{_EXPERT[expert[2]]}.{expert[1]}.weight"
            new = f"blk.{match[1]}.{rest}" if rest is not None else None
        if new is None:
            raise UnsupportedModelError(path, name, "this tensor is not part of a DeepSeek V4 model")
        renamed[new] = replace(tensor, name=new)
    return renamed
