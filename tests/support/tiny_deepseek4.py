"""Small random DeepSeek V4 checkpoints whose reference outputs are in tests/data/deepseek4.

The references are transformers' (`DeepseekV4ForCausalLM`, float32, eager attention) for weights drawn from numpy's
default generator in the order below, so the order of the draws is part of the data.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from ds4.engine import drafts, hf_deepseek4
from ds4.engine.tensors import DType, Tensor
from tests.support.stored import Stored, write_safetensors

Array = npt.NDArray[Any]

SEED = 20260731
PROMPT_TOKENS = 300
DATA = Path(__file__).parent.parent / "data" / "deepseek4"
RATIOS = {"flash": [0, 0, 4, 128, 4], "pro": [128, 128, 4, 128, 4]}
# First bytes of sha256 over all weights: numpy may change its streams between versions, and then the references are
# another model's.
DIGESTS = {"flash": "5819064ffd4fd931", "pro": "24105540de5b8a31"}


def config(variant: str) -> dict[str, Any]:
    """config.json as the published checkpoints have it, small; the clamp is low so that it bites."""
    ratios = RATIOS[variant]
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 320,
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "num_hidden_layers": len(ratios),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "num_hash_layers": 3,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 4.0,
        "hidden_act": "silu",
        "sliding_window": 16,
        "compress_ratios": [*ratios, 0],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


class _Draws:
    """The generator's draws, each kept under its published name."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.weights: dict[str, Array] = {}

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> None:
        self.weights[name] = (self._rng.standard_normal(shape) * scale).astype(np.float32)

    def matrix(self, name: str, rows: int, cols: int, gain: float = 1.0) -> None:
        self.weights[name] = (self._rng.standard_normal((rows, cols)) * gain / math.sqrt(cols)).astype(np.float32)

    def vector(self, name: str, n: int, middle: float, spread: float = 0.1) -> None:
        self.weights[name] = (middle + spread * self._rng.standard_normal(n)).astype(np.float32)

    def hyper(self, prefix: str, rows: int, cols: int, scales: int) -> None:
        self.matrix(f"{prefix}_fn", rows, cols)
        self.vector(f"{prefix}_base", rows, 0.0, 0.5)
        self.vector(f"{prefix}_scale", scales, 1.0, 0.2)

    def expert_table(self, rows: int, experts: int, used: int) -> Array:
        return np.stack([self._rng.permutation(experts)[:used] for _ in range(rows)]).astype(np.int64)


def _layer(d: _Draws, c: Mapping[str, Any], p: str, ratio: int, table: Array | None) -> None:
    """The tensors of a layer under `p`; its router scores where it has no table."""
    width, streams, dim = c["hidden_size"], c["hc_mult"], c["head_dim"]
    heads, rank, groups, out_rank = c["num_attention_heads"], c["q_lora_rank"], c["o_groups"], c["o_lora_rank"]
    experts, ff = c["n_routed_experts"], c["moe_intermediate_size"]
    index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
    for kind in ("attn", "ffn"):
        d.hyper(f"{p}hc_{kind}", 2 * streams + streams**2, streams * width, 3)
    d.vector(p + "attn_norm.weight", width, 1.0)
    d.vector(p + "ffn_norm.weight", width, 1.0)
    a = p + "attn."
    d.matrix(a + "wq_a.weight", rank, width)
    d.vector(a + "q_norm.weight", rank, 1.0)
    d.matrix(a + "wq_b.weight", heads * dim, rank)
    d.matrix(a + "wkv.weight", dim, width)
    d.vector(a + "kv_norm.weight", dim, 1.0)
    d.matrix(a + "wo_a.weight", groups * out_rank, heads * dim // groups)
    d.matrix(a + "wo_b.weight", width, groups * out_rank)
    d.vector(a + "attn_sink", heads, 0.0, 1.0)
    if ratio:
        lanes = 2 if ratio == 4 else 1
        d.normal(a + "compressor.ape", ratio, lanes * dim, scale=0.5)
        d.matrix(a + "compressor.wkv.weight", lanes * dim, width)
        d.matrix(a + "compressor.wgate.weight", lanes * dim, width)
        d.vector(a + "compressor.norm.weight", dim, 1.0)
    if ratio == 4:
        d.matrix(a + "indexer.wq_b.weight", index_heads * index_dim, rank)
        d.matrix(a + "indexer.weights_proj.weight", index_heads, width)
        d.normal(a + "indexer.compressor.ape", 4, 2 * index_dim, scale=0.5)
        d.matrix(a + "indexer.compressor.wkv.weight", 2 * index_dim, width)
        d.matrix(a + "indexer.compressor.wgate.weight", 2 * index_dim, width)
        d.vector(a + "indexer.compressor.norm.weight", index_dim, 1.0)
    f = p + "ffn."
    d.matrix(f + "gate.weight", experts, width, 2.0)
    if table is not None:
        d.weights[f + "gate.tid2eid"] = table
    else:
        d.vector(f + "gate.bias", experts, 0.0, 0.3)
    for expert in (*(f"experts.{e}" for e in range(experts)), "shared_experts"):
        d.matrix(f"{f}{expert}.w1.weight", ff, width, 2.0)
        d.matrix(f"{f}{expert}.w3.weight", ff, width, 2.0)
        d.matrix(f"{f}{expert}.w2.weight", width, ff)


def _draw(c: Mapping[str, Any], seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """The model's weights, and those of its multi-token prediction head."""
    d = _Draws(seed)
    width, vocab, streams = c["hidden_size"], c["vocab_size"], c["hc_mult"]
    experts, used = c["n_routed_experts"], c["num_experts_per_tok"]
    d.normal("embed.weight", vocab, width)
    for layer in range(c["num_hidden_layers"]):
        table = d.expert_table(vocab, experts, used)
        _layer(d, c, f"layers.{layer}.", c["compress_ratios"][layer], table if layer < c["num_hash_layers"] else None)
    d.vector("norm.weight", width, 1.0)
    d.matrix("head.weight", vocab, width, 2.0)
    d.hyper("hc_head", streams, streams * width, 1)
    weights, d.weights = d.weights, {}
    _layer(d, c, "mtp.0.", 0, None)
    d.matrix("mtp.0.e_proj.weight", width, width)
    d.matrix("mtp.0.h_proj.weight", width, width)
    for name in ("enorm", "hnorm", "norm"):
        d.vector(f"mtp.0.{name}.weight", width, 1.0)
    d.hyper("mtp.0.hc_head", streams, streams * width, 1)
    return weights, d.weights


DSPARK = {
    "dspark_block_size": 5,
    "dspark_markov_rank": 32,
    "dspark_noise_token_id": 319,
    "dspark_target_layer_ids": [2, 3, 4],
}


def dspark_weights(c: Mapping[str, Any], seed: int = SEED + 2) -> dict[str, Array]:
    """A random DSpark drafter of three stages under its published names, see `DSPARK`."""
    d = _Draws(seed)
    width, vocab, streams, rank = c["hidden_size"], c["vocab_size"], c["hc_mult"], DSPARK["dspark_markov_rank"]
    assert isinstance(rank, int)
    d.matrix("mtp.0.main_proj.weight", width, 3 * width)
    d.vector("mtp.0.main_norm.weight", width, 1.0)
    for stage in range(3):
        _layer(d, c, f"mtp.{stage}.", 0, None)
    d.vector("mtp.2.norm.weight", width, 1.0)
    d.hyper("mtp.2.hc_head", streams, streams * width, 1)
    d.matrix("mtp.2.markov_head.markov_w1.weight", vocab, rank)
    d.matrix("mtp.2.markov_head.markov_w2.weight", vocab, rank, 4.0)
    d.matrix("mtp.2.confidence_head.proj.weight", 1, width + rank)
    return d.weights


@dataclass(frozen=True)
class TinyDeepSeek4:
    """One variant: "flash" begins with window-only layers, "pro" with layers of ratio 128. Do not change the arrays."""

    variant: str
    config: dict[str, Any]
    weights: dict[str, Array]
    """Published name -> float32 values, the tables of experts int64."""
    head: dict[str, Array]
    """The multi-token prediction head's, which is in a file only where it is asked for."""

    def prompt(self) -> npt.NDArray[np.int32]:
        """The tokens that the references continue."""
        draws = np.random.default_rng(SEED + 1).integers(2, self.config["vocab_size"], PROMPT_TOKENS)
        return draws.astype(np.int32)

    def reference(self, name: str) -> npt.NDArray[np.float32]:
        """ "logits" and "logits_qat" [T, vocab], "streams" [layers + 1, streams, width] of the last token; "mtp_logits"
        [43, vocab] of the head for every seventh pair of tokens, by a separate implementation in float64."""
        values: npt.NDArray[np.float32] = np.load(DATA / f"{self.variant}_{name}.npy")
        return values

    def write_hf(self, path: Path, weights: Mapping[str, Array | Stored] | None = None, **changes: Any) -> Path:
        """A safetensors directory; `weights` instead of the model's, `changes` to config.json (None: left out)."""
        path.mkdir(parents=True)
        members = {k: v for k, v in (self.config | changes).items() if v is not None}
        (path / "config.json").write_text(json.dumps(members))
        write_safetensors(path / "model.safetensors", self.weights if weights is None else weights)
        return path

    def gguf_tensors(self, draft: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Values under GGUF's names, the experts of a layer in one array; with those of `draft` layers."""
        files = {n: _tensor(n, w) for n, w in self.weights.items()}
        named = hf_deepseek4.tensors(Path("tiny"), self.config, files)
        if draft is not None:
            found = drafts.from_directory(Path("tiny"), DSPARK, {n: _tensor(n, w) for n, w in draft.items()})
            assert found is not None
            named |= found.tensors
        out: dict[str, Array] = {}
        stacks: dict[str, list[Array]] = {}
        for name, t in named.items():
            values = np.frombuffer(t.data, "<i4" if t.dtype is DType.I32 else "<f4").reshape(t.shape)
            parts = name.split(".")
            if parts[-2].isdigit():
                stacks.setdefault(".".join([*parts[:-2], parts[-1]]), []).append(values)
            else:
                out[name] = values
        return out | {name: np.stack(parts) for name, parts in stacks.items()}

    def gguf_keys(self) -> dict[str, Any]:
        """Hyper-parameters under GGUF's names, with the prefix."""
        values = hf_deepseek4.hparams(Path("tiny"), self.config)
        return {f"deepseek4.{k}": v for k, v in values.items()}

    def write_gguf(
        self,
        path: Path,
        types: Mapping[str, GGMLQuantizationType] | None = None,
        keys: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Array] | None = None,
        arch: str = "deepseek4",
    ) -> Path:
        """A GGUF file. `types` gives the element type of tensors whose name ends so; F32 otherwise. A key that is None
        is left out; numpy scalars are stored in their own type."""
        writer = gguf.GGUFWriter(path, arch)
        for key, value in (self.gguf_keys() | dict(keys or {})).items():
            _add_key(writer, key, value)
        for name, values in (self.gguf_tensors() if tensors is None else tensors).items():
            qtype = next((q for end, q in (types or {}).items() if name.endswith(end)), None)
            if values.dtype == np.int32 or qtype is None:
                writer.add_tensor(name, np.ascontiguousarray(values))
            else:
                writer.add_tensor(name, quantize(values, qtype), raw_dtype=qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _tensor(name: str, values: Array) -> Tensor:
    return Tensor(name, values.shape, _dtype(values), memoryview(values).cast("B"))


def _dtype(values: Array) -> DType:
    return DType.I64 if values.dtype == np.int64 else DType.F32


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        np.uint64: writer.add_uint64,
        np.int32: writer.add_int32,
        float: writer.add_float32,
        np.float64: writer.add_float64,
        str: writer.add_string,
        list: writer.add_array,
    }
    if value is not None:
        add[type(value)](key, value.item() if isinstance(value, np.generic) else value)


def digest(weights: Mapping[str, Array]) -> str:
    """First 16 hexadecimal digits of a hash over names and values."""
    h = hashlib.sha256()
    for name in sorted(weights):
        h.update(name.encode())
        h.update(weights[name].tobytes())
    return h.hexdigest()[:16]


@cache
def tiny(variant: str) -> TinyDeepSeek4:
    """The model that the references belong to. Raises AssertionError where numpy draws other numbers."""
    c = config(variant)
    weights, head = _draw(c, SEED)
    found = digest(weights)
    assert found == DIGESTS[variant], f"numpy {np.__version__} draws weights {found}, not {DIGESTS[variant]}"
    return TinyDeepSeek4(variant, c, weights, head)


def drawn(seed: int, **changes: Any) -> TinyDeepSeek4:
    """A model of another shape, without references: `changes` are members of config.json."""
    c = config("flash") | changes
    return TinyDeepSeek4("drawn", c, *_draw(c, seed))


def with_flash_state() -> TinyDeepSeek4:
    """All that the state of a session depends on as in DeepSeek V4 Flash, the rest as small as it gets."""
    ratios = [0, 0, *([4, 128] * 20), 4]
    return drawn(
        3,
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        num_attention_heads=1,
        head_dim=512,
        q_lora_rank=32,
        o_groups=1,
        o_lora_rank=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
        sliding_window=128,
        index_n_heads=1,
        index_topk=512,
        num_nextn_predict_layers=0,
    )


def both() -> Iterator[TinyDeepSeek4]:
    for variant in RATIOS:
        yield tiny(variant)
