"""Random checkpoints of the supported families: real shapes for speed, tiny ones for tests, no training.

Every tensor is drawn from its own generator, seeded with the checkpoint's seed and the tensor's name, so its bytes do
not depend on the other tensors; the file is written a few rows at a time, several tensors at once.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ds4.convert import gguf_out
from ds4.convert.blocks import random_rows
from ds4.convert.gguf_out import Chunk, Key, OutTensor, Progress
from ds4.convert.types import TypePlan
from ds4.engine.deepseek4 import Layout, Shape
from ds4.engine.tensors import DType
from ds4.errors import ConfigError

_CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Recipe:
    """A family at one size: keys without prefix, tensors with shapes, and the tokens that its prompts need. `drafts`:
    keys and tensors of layers that draft, by kind."""

    family: str
    keys: Mapping[str, Any]
    tensors: Mapping[str, Shape]
    specials: tuple[str, ...]
    eos: str
    pre: str
    drafts: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Shape]]] = field(default_factory=dict)


# ---- sizes

_V4_SPECIALS = (
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<\uff5c\u2581pad\u2581\uff5c>",
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
    "<think>",
    "</think>",
    "\uff5cDSML\uff5c",
    "<\uff5clatest_reminder\uff5c>",
)
_CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _deepseek4(layout: Layout, window: int, top_k: int, rotated: int, scale: float, limit: float = 10.0) -> Recipe:
    keys = {
        "block_count": len(layout.ratios),
        "context_length": 1 << 20,
        "embedding_length": layout.width,
        "vocab_size": layout.vocab,
        "attention.head_count": layout.heads,
        "attention.head_count_kv": 1,
        "attention.key_length": layout.head_dim,
        "attention.value_length": layout.head_dim,
        "attention.q_lora_rank": layout.q_rank,
        "attention.output_group_count": layout.out_groups,
        "attention.output_lora_rank": layout.out_rank,
        "attention.sliding_window": window,
        "attention.compress_ratios": list(layout.ratios),
        "attention.indexer.head_count": layout.index_heads,
        "attention.indexer.key_length": layout.index_dim,
        "attention.indexer.top_k": top_k,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.compress_rope_freq_base": 160000.0,
        "rope.dimension_count": rotated,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 65536,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "hyper_connection.count": layout.streams,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "expert_count": layout.experts,
        "expert_used_count": layout.used,
        "expert_shared_count": layout.shared,
        "expert_feed_forward_length": layout.ff,
        "expert_gating_func": 4,
        "expert_weights_norm": True,
        "expert_weights_scale": scale,
        "hash_layer_count": layout.hash_layers,
        "swiglu_clamp_exp": [limit] * len(layout.ratios),
    }
    layers, rank = len(layout.ratios), min(256, layout.width)
    spark = {
        "dspark.block_size": 5,
        "dspark.markov_rank": rank,
        "dspark.noise_token_id": layout.vocab - 1,
        "dspark.target_layer_ids": list(range(layers))[-3:],
        "dspark.stage_count": 3,
    }
    drafts: dict[str, tuple[Mapping[str, Any], Mapping[str, Shape]]] = {
        "mtp": ({"nextn_predict_layers": 1}, layout.mtp()),
        "dspark": (spark, layout.dspark(3, min(3, layers), rank)),
    }
    return Recipe("deepseek4", keys, layout.tensors(), _V4_SPECIALS, _V4_SPECIALS[1], "joyai-llm", drafts)


_FLASH = Layout(
    vocab=129280,
    width=4096,
    heads=64,
    head_dim=512,
    q_rank=1024,
    out_groups=8,
    out_rank=1024,
    index_heads=64,
    index_dim=128,
    streams=4,
    experts=256,
    used=6,
    shared=1,
    ff=2048,
    hash_layers=3,
    ratios=(0, 0, *(4, 128) * 20, 4),
)
_PRO = replace(
    _FLASH,
    width=7168,
    heads=128,
    q_rank=1536,
    out_groups=16,
    experts=384,
    ff=3072,
    ratios=(128, 128, *(4, 128) * 29, 4),
)
_TINY = replace(
    _FLASH,
    vocab=512,
    width=256,
    heads=4,
    head_dim=128,
    q_rank=256,
    out_groups=2,
    out_rank=128,
    index_heads=32,
    experts=8,
    used=3,
    ff=256,
    ratios=(0, 128, 4, 128, 4),
)


def _llama(
    vocab: int, width: int, ff: int, layers: int, heads: int, kv_heads: int, context: int, theta: float
) -> Recipe:
    dim = width // heads
    q, kv = heads * dim, kv_heads * dim
    shapes: dict[str, Shape] = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (width,),
            f"blk.{i}.attn_q.weight": (q, width),
            f"blk.{i}.attn_k.weight": (kv, width),
            f"blk.{i}.attn_v.weight": (kv, width),
            f"blk.{i}.attn_output.weight": (width, q),
            f"blk.{i}.ffn_norm.weight": (width,),
            f"blk.{i}.ffn_gate.weight": (ff, width),
            f"blk.{i}.ffn_up.weight": (ff, width),
            f"blk.{i}.ffn_down.weight": (width, ff),
        }
    keys = {
        "block_count": layers,
        "context_length": context,
        "embedding_length": width,
        "feed_forward_length": ff,
        "vocab_size": vocab,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": dim,
        "rope.freq_base": theta,
    }
    return Recipe("llama", keys, shapes, _CHATML_SPECIALS, "<|im_end|>", "smollm")


SIZES: dict[str, dict[str, Callable[[], Recipe]]] = {
    "deepseek4": {
        "tiny": lambda: _deepseek4(_TINY, window=16, top_k=8, rotated=64, scale=1.5, limit=4.0),
        "flash": lambda: _deepseek4(_FLASH, window=128, top_k=512, rotated=64, scale=1.5),
        "pro": lambda: _deepseek4(_PRO, window=128, top_k=1024, rotated=64, scale=2.5),
    },
    "llama": {
        "tiny": lambda: _llama(512, 256, 512, 3, 4, 2, 2048, 10000.0),
        "135m": lambda: _llama(49152, 576, 1536, 30, 9, 3, 8192, 100000.0),
        "1.7b": lambda: _llama(49152, 2048, 8192, 24, 32, 32, 8192, 130000.0),
    },
}
"""Families and their sizes by name."""

DEFAULT_TYPES = {
    "tiny": TypePlan(DType.F32, DType.F32, DType.F32, DType.F32, DType.F32, DType.F32),
    "flash": TypePlan(DType.F16, DType.Q8_0, DType.IQ2_XXS, DType.Q2_K, DType.Q8_0, DType.F16),
    "pro": TypePlan(DType.F16, DType.Q8_0, DType.IQ2_XXS, DType.Q2_K, DType.Q8_0, DType.F16),
    "135m": TypePlan(DType.Q8_0, DType.Q8_0, None, None, DType.Q4_1, DType.F16),
    "1.7b": TypePlan(DType.Q8_0, DType.Q8_0, None, None, DType.Q4_0, DType.F16),
}
"""Types of published files of that size."""


def synthesise(
    path: Path,
    family: str,
    size: str,
    seed: int,
    plan: TypePlan,
    *,
    layers: int | None = None,
    drafts: str | None = None,
    distinct_layers: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Writes a random checkpoint and returns its bytes. `layers` keeps only the first ones, to fit a machine; `drafts`
    adds layers that draft, "mtp" or "dspark". Of each matrix of the layers `distinct_layers` different ones are drawn,
    later layers name the same bytes again: a model of full size in a small file, for a backend that holds copies.

    Raises ConfigError for an unknown family or size, layers out of range, types whose blocks do not fit the rows.
    """
    recipe = recipe_of(family, size, layers, drafts)
    if distinct_layers is not None and distinct_layers < 1:
        raise ConfigError(f"--distinct-layers {distinct_layers}: expected a number from 1")
    tensors = [_drawn(recipe, name, shape, seed, plan) for name, shape in recipe.tensors.items()]
    if distinct_layers is not None:
        tensors = _shared(tensors, distinct_layers)
    name = f"random-{family}-{size}-seed{seed}"
    return gguf_out.write_gguf(
        path, family, _keys(recipe, name), tensors, force=force, progress=progress, workers=os.cpu_count() or 1
    )


def _shared(tensors: list[OutTensor], distinct: int) -> list[OutTensor]:
    """The same list; a layer's matrix beyond the first `distinct` of its kind is one of these again, in turn."""
    kinds: dict[tuple[str, Shape, DType], list[str]] = {}
    out = []
    for t in tensors:
        family, *rest = t.name.split(".", 2)
        if family == "blk" and len(t.shape) > 1:
            alike = kinds.setdefault((rest[-1], t.shape, t.dtype), [])
            if len(alike) >= distinct:
                t = replace(t, same_as=alike[len(alike) % distinct])
            alike.append(t.name)
        out.append(t)
    return out


def recipe_of(family: str, size: str, layers: int | None = None, drafts: str | None = None) -> Recipe:
    """Raises ConfigError."""
    sizes = SIZES.get(family)
    if sizes is None:
        raise ConfigError(f"--family {family}: expected one of {', '.join(SIZES)}")
    if size not in sizes:
        raise ConfigError(f"--size {size}: {family} has {', '.join(sizes)}")
    recipe = _cut(sizes[size](), f"{family} {size}", layers)
    if drafts is None:
        return recipe
    if drafts not in recipe.drafts:
        raise ConfigError(f"--{drafts}: {family} has no such layers")
    keys, tensors = recipe.drafts[drafts]
    return replace(recipe, keys={**recipe.keys, **keys}, tensors={**recipe.tensors, **tensors})


def _cut(recipe: Recipe, name: str, layers: int | None) -> Recipe:
    """The first layers alone."""
    if layers is None:
        return recipe
    most = recipe.keys["block_count"]
    if not 1 <= layers <= most:
        raise ConfigError(f"--layers {layers}: {name} has 1 to {most}")
    tensors = {n: s for n, s in recipe.tensors.items() if not n.startswith("blk.") or int(n.split(".")[1]) < layers}
    keys = {k: v[:layers] if isinstance(v, list) else v for k, v in recipe.keys.items()} | {"block_count": layers}
    if "hash_layer_count" in keys:
        keys["hash_layer_count"] = min(layers, keys["hash_layer_count"])
    drafts = dict(recipe.drafts)
    if "dspark" in drafts:
        # It listens to the last layers that are left.
        spark, shapes = drafts["dspark"]
        targets = list(range(layers))[-3:]
        main = shapes["mtp.0.main_proj.weight"][0]
        drafts["dspark"] = (
            {**spark, "dspark.target_layer_ids": targets},
            {**shapes, "mtp.0.main_proj.weight": (main, len(targets) * main)},
        )
    return replace(recipe, keys=keys, tensors=tensors, drafts=drafts)


# ---- tensors


def _drawn(recipe: Recipe, name: str, shape: Shape, seed: int, plan: TypePlan) -> OutTensor:
    source = DType.I32 if name.endswith("tid2eid.weight") else DType.F32
    dtype = plan.of(name, shape, source)

    def chunks() -> Iterator[Chunk]:
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if source is DType.I32:
            yield from _expert_table(rng, shape, int(recipe.keys["expert_count"]))
        elif len(shape) == 1:
            middle, spread = _vector_of(name)
            yield (middle + spread * rng.standard_normal(shape)).astype(np.float32).tobytes()
        else:
            cols = shape[-1]
            spread = _spread_of(recipe, name, cols)
            step = max(1, _CHUNK_ELEMENTS // cols)
            rows = math.prod(shape[:-1])
            for first in range(0, rows, step):
                yield random_rows(rng, dtype, min(step, rows - first), cols, spread)

    return OutTensor(name, shape, dtype, chunks)


def _expert_table(rng: np.random.Generator, shape: Shape, experts: int) -> Iterator[Chunk]:
    """Different experts in every row."""
    rows, used = shape
    for first in range(0, rows, 4096):
        draws = rng.random((min(4096, rows - first), experts))
        yield np.argsort(draws, axis=1)[:, :used].astype(np.int32).tobytes()


def _vector_of(name: str) -> tuple[float, float]:
    """(mean, standard deviation), so that every branch has an effect and none dominates."""
    part = name.split(".")[-2]
    if part.endswith("norm"):
        return 1.0, 0.1
    if part.endswith("_scale"):
        return 1.0, 0.2
    return 0.0, {"attn_sinks": 1.0, "exp_probs_b": 0.3}.get(part, 0.5)


def _spread_of(recipe: Recipe, name: str, cols: int) -> float:
    """Standard deviation of a matrix: outputs of about the size of inputs, a little more before a gate."""
    part = name.split(".")[-2]
    if part.endswith("_ape"):
        return 0.5
    if part == "token_embd":
        return 1.0 if "output.weight" in recipe.tensors else 3.0 / math.sqrt(cols)  # it is the head as well
    gain = 2.0 if part in ("output", "ffn_gate_inp") or part.startswith(("ffn_gate_", "ffn_up_")) else 1.0
    return gain / math.sqrt(cols)


# ---- metadata


def _keys(recipe: Recipe, name: str) -> dict[str, Key]:
    keys = {"general.name": gguf_out.text(name), "general.quantization_version": gguf_out.u32(2)}
    for key, value in recipe.keys.items():
        keys[f"{recipe.family}.{key}"] = gguf_out.key(value)
    return keys | _tokenizer(recipe)


def _tokenizer(recipe: Recipe) -> dict[str, Key]:
    """Special tokens, one token per byte, one merge, and words that are sampled and never encoded: what a random model
    says is text, as much as that of a trained one."""
    vocab = int(recipe.keys["vocab_size"])
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    spelled = [chr(b) if b in printable else chr(next(others)) for b in range(256)]
    tokens = [*recipe.specials, *spelled, "th"]
    tokens += [f"\u0120w{i}" for i in range(len(tokens), vocab)]
    kinds = [3] * len(recipe.specials) + [1] * (vocab - len(recipe.specials))
    return {
        "tokenizer.ggml.model": gguf_out.text("gpt2"),
        "tokenizer.ggml.pre": gguf_out.text(recipe.pre),
        "tokenizer.ggml.tokens": gguf_out.texts(tokens),
        "tokenizer.ggml.token_type": gguf_out.i32_array(kinds),
        "tokenizer.ggml.merges": gguf_out.texts(["t h"]),
        "tokenizer.ggml.bos_token_id": gguf_out.u32(0),
        "tokenizer.ggml.eos_token_id": gguf_out.u32(recipe.specials.index(recipe.eos)),
    }
