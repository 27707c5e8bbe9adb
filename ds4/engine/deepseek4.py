"""DeepSeek V4 in GGUF's terms: the tensors that a model has, their shapes, and what GGUF files leave to be derived.

Source: the tensor names and keys of published `deepseek4` GGUF files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds4.engine.tensors import Tensor

if TYPE_CHECKING:
    from ds4.engine.model_file import HParams

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a model. `ratios` has one entry per layer: tokens per compressed row, 0 for none."""

    vocab: int
    width: int
    heads: int
    head_dim: int
    q_rank: int
    out_groups: int
    out_rank: int
    index_heads: int
    index_dim: int
    streams: int
    experts: int
    used: int
    shared: int
    ff: int
    hash_layers: int
    ratios: tuple[int, ...]

    def tensors(self) -> dict[str, Shape]:
        """Every tensor by name, row-major shapes; the experts of a layer are one tensor of three axes."""
        return self.ends() | {name: shape for layer in range(len(self.ratios)) for name, shape in self.layer(layer)}

    def ends(self) -> dict[str, Shape]:
        """Tensors outside the layers."""
        n, width = self.streams, self.width
        return {
            "token_embd.weight": (self.vocab, width),
            "output.weight": (self.vocab, width),
            "output_norm.weight": (width,),
            "output_hc_fn.weight": (n, n * width),
            "output_hc_base.weight": (n,),
            "output_hc_scale.weight": (1,),
        }

    def layer(self, layer: int) -> list[tuple[str, Shape]]:
        """Tensors of one layer."""
        shapes = self._shapes(self.ratios[layer], layer < self.hash_layers)
        return [(f"blk.{layer}.{name}", shape) for name, shape in shapes.items()]

    def mtp(self) -> dict[str, Shape]:
        """Tensors of the multi-token prediction head."""
        own = {
            "e_proj.weight": (self.width, self.width),
            "h_proj.weight": (self.width, self.width),
            "enorm.weight": (self.width,),
            "hnorm.weight": (self.width,),
        }
        shapes = own | self._head() | self._shapes(0, False)
        return {f"mtp.0.{name}": shape for name, shape in shapes.items()}

    def dspark(self, stages: int, targets: int, rank: int) -> dict[str, Shape]:
        """Tensors of a DSpark drafter that listens to so many layers."""
        shapes: dict[str, Shape] = {
            "mtp.0.main_proj.weight": (self.width, targets * self.width),
            "mtp.0.main_norm.weight": (self.width,),
        }
        for stage in range(stages):
            shapes |= {f"mtp.{stage}.{name}": shape for name, shape in self._shapes(0, False).items()}
        last = self._head() | {
            "markov_head.markov_w1.weight": (self.vocab, rank),
            "markov_head.markov_w2.weight": (self.vocab, rank),
            "confidence_head.proj.weight": (1, self.width + rank),
        }
        return shapes | {f"mtp.{stages - 1}.{name}": shape for name, shape in last.items()}

    def _head(self) -> dict[str, Shape]:
        n = self.streams
        return {
            "norm.weight": (self.width,),
            "hc_head_fn.weight": (n, n * self.width),
            "hc_head_base.weight": (n,),
            "hc_head_scale.weight": (1,),
        }

    def _shapes(self, ratio: int, hashed: bool) -> dict[str, Shape]:
        n, width, dim = self.streams, self.width, self.head_dim
        mix = 2 * n + n * n
        q, low = self.heads * dim, self.out_groups * self.out_rank
        shapes: dict[str, Shape] = {
            "hc_attn_fn.weight": (mix, n * width),
            "hc_attn_base.weight": (mix,),
            "hc_attn_scale.weight": (3,),
            "hc_ffn_fn.weight": (mix, n * width),
            "hc_ffn_base.weight": (mix,),
            "hc_ffn_scale.weight": (3,),
            "attn_norm.weight": (width,),
            "attn_q_a.weight": (self.q_rank, width),
            "attn_q_a_norm.weight": (self.q_rank,),
            "attn_q_b.weight": (q, self.q_rank),
            "attn_kv.weight": (dim, width),
            "attn_kv_a_norm.weight": (dim,),
            "attn_sinks.weight": (self.heads,),
            "attn_output_a.weight": (low, q // self.out_groups),
            "attn_output_b.weight": (width, low),
            "ffn_norm.weight": (width,),
            "ffn_gate_inp.weight": (self.experts, width),
            "ffn_gate_exps.weight": (self.experts, self.ff, width),
            "ffn_up_exps.weight": (self.experts, self.ff, width),
            "ffn_down_exps.weight": (self.experts, width, self.ff),
            "ffn_gate_shexp.weight": (self.shared * self.ff, width),
            "ffn_up_shexp.weight": (self.shared * self.ff, width),
            "ffn_down_shexp.weight": (width, self.shared * self.ff),
        }
        if ratio:
            lanes = 2 if ratio == 4 else 1
            shapes |= {
                "attn_compressor_kv.weight": (lanes * dim, width),
                "attn_compressor_gate.weight": (lanes * dim, width),
                "attn_compressor_ape.weight": (ratio, lanes * dim),
                "attn_compressor_norm.weight": (dim,),
            }
        if ratio == 4:
            shapes |= {
                "indexer.attn_q_b.weight": (self.index_heads * self.index_dim, self.q_rank),
                "indexer.proj.weight": (self.index_heads, width),
                "indexer_compressor_kv.weight": (2 * self.index_dim, width),
                "indexer_compressor_gate.weight": (2 * self.index_dim, width),
                "indexer_compressor_ape.weight": (4, 2 * self.index_dim),
                "indexer_compressor_norm.weight": (self.index_dim,),
            }
        if hashed:
            shapes["ffn_gate_tid2eid.weight"] = (self.vocab, self.used)
        else:
            shapes["exp_probs_b.bias"] = (self.experts,)
        return shapes


def layout(h: HParams) -> Layout:
    """The layout of a model's hyper-parameters. Raises ModelFileError naming the key."""
    layers = h.integer("block_count", low=1, high=1 << 14)
    ratios = h.integers("attention.compress_ratios")
    if len(ratios) < layers:
        raise h.error("attention.compress_ratios", f"has {len(ratios)} entries for {layers} layers")
    if wrong := [r for r in ratios[:layers] if r not in (0, 4, 128)]:
        raise h.error("attention.compress_ratios", f"holds {wrong[0]}, allowed are 0, 4, 128")
    ff = h.integers("expert_feed_forward_length")
    if not ff or ff[0] < 1 or ff != [ff[0]] * len(ff):
        raise h.error("expert_feed_forward_length", f"is {ff}, expected one positive number for all layers")

    def size(key: str, default: int | None = None) -> int:
        return h.integer(key, default, low=1, high=1 << 30)

    heads, groups = size("attention.head_count"), size("attention.output_group_count")
    if heads % groups:
        raise h.error("attention.output_group_count", f"is {groups}, which does not divide {heads} heads")
    experts = size("expert_count")
    return Layout(
        vocab=size("vocab_size"),
        width=size("embedding_length"),
        heads=heads,
        head_dim=size("attention.key_length"),
        q_rank=size("attention.q_lora_rank"),
        out_groups=groups,
        out_rank=size("attention.output_lora_rank"),
        index_heads=size("attention.indexer.head_count"),
        index_dim=size("attention.indexer.key_length"),
        streams=size("hyper_connection.count"),
        experts=experts,
        used=h.integer("expert_used_count", low=1, high=experts),
        shared=size("expert_shared_count"),
        ff=ff[0],
        hash_layers=h.integer("hash_layer_count", low=0, high=layers),
        ratios=tuple(ratios[:layers]),
    )


def completed(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Keys and tensors of a GGUF file's main model: ratios that the file leaves out are derived from the shapes of the
    compressors, and draft layers, which a file may carry behind the main ones, are dropped."""
    values = {key: value for key, value in values.items() if not key.startswith("dspark")}
    layers = values.get("block_count")
    if type(layers) is not int or not 0 < layers <= 1 << 14:
        return values, dict(tensors)  # the check of hyper-parameters says what is wrong
    drafts = values.get("nextn_predict_layers", 0)
    if type(drafts) is int and 0 < drafts < layers and any(n.startswith(f"blk.{layers - 1}.nextn.") for n in tensors):
        layers -= drafts
        values["block_count"] = layers
    if "attention.compress_ratios" not in values:
        bias = [tensors.get(f"blk.{i}.attn_compressor_ape.weight") for i in range(layers)]
        values["attention.compress_ratios"] = [0 if t is None else t.shape[0] for t in bias]
    return values, {name: t for name, t in tensors.items() if not _drafts(name, layers, tensors)}


def _drafts(name: str, layers: int, tensors: Mapping[str, Tensor]) -> bool:
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    if first == "mtp":
        return True
    if first != "blk" or not number.isdecimal() or len(number) > 6 or int(number) < layers:
        return False
    return f"blk.{number}.nextn.eh_proj.weight" in tensors
