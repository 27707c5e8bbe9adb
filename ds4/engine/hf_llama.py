"""Llama checkpoints of Hugging Face under GGUF's names: hyper-parameters of config.json and tensors.

Values are not converted: rotary rows stay half-split, unlike in GGUF files. Source: transformers, `LlamaConfig` and
`LlamaForCausalLM`.
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
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_SCALING = {
    "factor": "rope.scaling.factor",
    "low_freq_factor": "rope.scaling.low_freq_factor",
    "high_freq_factor": "rope.scaling.high_freq_factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
_GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.(.+)\.(weight|bias)")


def hparams(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF keys without prefix. Raises ModelFileError or UnsupportedModelError naming the member of config.json."""
    values: dict[str, Any] = {}
    for member, key in _NUMBERS.items():
        if (value := config.get(member)) is not None:
            if type(value) not in (int, float):
                raise ModelFileError(path, member, f"is {value!r}, expected a number")
            values[key] = value
        elif member != "num_key_value_heads":
            raise ModelFileError(path, member, "the member is missing")
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(path, "hidden_act", f"{act!r} is not implemented, only 'silu'")
    if (head_dim := config.get("head_dim")) is not None:
        if type(head_dim) is not int:
            raise ModelFileError(path, "head_dim", f"is {head_dim!r}, expected an integer")
        values["attention.key_length"] = values["attention.value_length"] = head_dim
        values["rope.dimension_count"] = head_dim
    # transformers 5 writes theta and scaling into one object, earlier versions into two members.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelFileError(path, "rope_scaling", f"is {rope!r}, expected an object")
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if type(theta) not in (int, float):
        raise ModelFileError(path, "rope_theta", f"is {theta!r}, expected a number")
    values["rope.freq_base"] = float(theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str):
        raise ModelFileError(path, "rope_scaling.rope_type", f"is {kind!r}, expected a string")
    if kind != "default":
        values["rope.scaling.type"] = kind
        for member, key in _SCALING.items():
            if (value := rope.get(member)) is not None:
                if type(value) not in (int, float):
                    raise ModelFileError(path, f"rope_scaling.{member}", f"is {value!r}, expected a number")
                values[key] = value
    return values


def tensors(path: Path, config: Mapping[str, Any], files: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by GGUF name. Raises UnsupportedModelError naming a tensor that Llama does not have."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in files.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue  # a buffer that old checkpoints stored; it follows from theta
        new = _GLOBAL.get(name)
        if new is None and (match := _LAYER_NAME.fullmatch(name)) is not None and match[2] in _LAYER:
            new = f"blk.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
        if new is None:
            raise UnsupportedModelError(path, name, "this tensor is not part of a Llama model")
        renamed[new] = replace(tensor, name=new)
    if config.get("tie_word_embeddings", False) is True:
        renamed.pop("output.weight", None)
    elif "output.weight" not in renamed:
        raise ModelFileError(path, "lm_head.weight", "the tensor is missing and tie_word_embeddings is not true")
    return renamed
