"""A small random Llama: its weights, a plain numpy forward pass as the oracle, and writers for both file formats.

Weights are drawn in the order of Hugging Face files (half-split rotation). GGUF files hold the query and key rows
permuted for interleaved rotation, so the two formats of one model compute the same function.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TinyLlama:
    """Shape, seed and element type of a random model. `qtype` is used for all matrices."""

    seed: int = 1
    layers: int = 3
    width: int = 128
    ff: int = 192
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 320
    theta: float = 10000.0
    eps: float = 1e-5
    qtype: GGMLQuantizationType = GGMLQuantizationType.F32
    tied: bool = True
    biases: bool = False
    rope_factors: bool = False
    ctx: int = 512
    weights: dict[str, Array] = field(default_factory=dict, compare=False)
    """Engine tensor name -> values as they are after a round trip through `qtype`, in Hugging Face row order."""

    @staticmethod
    def make(**options: Any) -> TinyLlama:
        shape = TinyLlama(**options)
        rng = np.random.default_rng(shape.seed)

        def matrix(rows: int, cols: int, gain: float = 1.0) -> Array:
            values = (rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)
            return dequantize(quantize(values, shape.qtype), shape.qtype).astype(np.float32)

        def vector(n: int, middle: float) -> Array:
            return (middle + 0.2 * rng.standard_normal(n)).astype(np.float32)

        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        w: dict[str, Array] = {
            "token_embd.weight": matrix(shape.vocab, shape.width, 3.0),
            "output_norm.weight": vector(shape.width, 1.0),
        }
        if not shape.tied:
            w["output.weight"] = matrix(shape.vocab, shape.width, 3.0)
        if shape.rope_factors:
            w["rope_freqs.weight"] = np.linspace(1, 8, shape.head_dim // 2).astype(np.float32)
        for layer in range(shape.layers):
            p = f"blk.{layer}."
            w[p + "attn_norm.weight"] = vector(shape.width, 1.0)
            w[p + "attn_q.weight"] = matrix(q, shape.width, 2.0)
            w[p + "attn_k.weight"] = matrix(kv, shape.width, 2.0)
            w[p + "attn_v.weight"] = matrix(kv, shape.width)
            w[p + "attn_output.weight"] = matrix(shape.width, q)
            w[p + "ffn_norm.weight"] = vector(shape.width, 1.0)
            w[p + "ffn_gate.weight"] = matrix(shape.ff, shape.width)
            w[p + "ffn_up.weight"] = matrix(shape.ff, shape.width)
            w[p + "ffn_down.weight"] = matrix(shape.width, shape.ff)
            if shape.biases:
                w[p + "attn_q.bias"] = vector(q, 0.0)
                w[p + "attn_k.bias"] = vector(kv, 0.0)
                w[p + "attn_v.bias"] = vector(kv, 0.0)
        return replace(shape, weights=w)

    # ---- oracle

    def frequencies(self) -> npt.NDArray[np.float64]:
        freq = self.theta ** (-2.0 * np.arange(self.head_dim // 2) / self.head_dim)
        return freq / self.weights["rope_freqs.weight"] if self.rope_factors else freq

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float64]:
        """Logits of every position, [T, vocab], in f64."""
        w = {name: value.astype(np.float64) for name, value in self.weights.items()}
        n, d = len(tokens), self.head_dim

        def rms(x: npt.NDArray[np.float64], gain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * gain

        angle = np.arange(n)[:, None] * self.frequencies()
        cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]

        def rope(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            a, b = x[..., : d // 2], x[..., d // 2 :]
            return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

        x = w["token_embd.weight"][tokens]
        for layer in range(self.layers):
            p = f"blk.{layer}."
            h = rms(x, w[p + "attn_norm.weight"])

            def project(name: str, heads: int, h: Any = h, p: str = p) -> npt.NDArray[np.float64]:
                y = h @ w[f"{p}attn_{name}.weight"].T + w.get(f"{p}attn_{name}.bias", 0.0)
                return y.reshape(n, heads, d)

            q, k, v = rope(project("q", self.heads)), rope(project("k", self.kv_heads)), project("v", self.kv_heads)
            group = self.heads // self.kv_heads
            out = np.empty((n, self.heads, d))
            for head in range(self.heads):
                scores = q[:, head] @ k[:, head // group].T / np.sqrt(d)
                scores[np.triu_indices(n, 1)] = -np.inf
                e = np.exp(scores - scores.max(axis=-1, keepdims=True))
                out[:, head] = e / e.sum(axis=-1, keepdims=True) @ v[:, head // group]
            x = x + out.reshape(n, -1) @ w[p + "attn_output.weight"].T
            h = rms(x, w[p + "ffn_norm.weight"])
            gate = h @ w[p + "ffn_gate.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "ffn_up.weight"].T)) @ w[p + "ffn_down.weight"].T
        return rms(x, w["output_norm.weight"]) @ w["token_embd.weight" if self.tied else "output.weight"].T

    # ---- file formats

    def _interleaved(self, value: Array) -> Array:
        """Rows of one stacked-heads matrix or bias in GGUF order: row 2i + j of a head is row i + j * d/2."""
        heads = value.shape[0] // self.head_dim
        split = value.reshape(heads, 2, self.head_dim // 2, *value.shape[1:])
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(value.shape)

    def gguf_weights(self) -> dict[str, Array]:
        rotated = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")
        return {n: self._interleaved(v) if n.endswith(rotated) else v for n, v in self.weights.items()}

    def params(self, kind: str = "interleaved") -> dict[str, Any]:
        """Hyper-parameters as the native model takes them."""
        return {
            "block_count": self.layers,
            "embedding_length": self.width,
            "feed_forward_length": self.ff,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": self.theta,
            "attention.layer_norm_rms_epsilon": self.eps,
            "vocab_size": self.vocab,
            "rope.kind": kind,
        }

    def tensors(self, kind: str = "interleaved") -> dict[str, tuple[memoryview, tuple[int, ...], int]]:
        """Tensors as the native model takes them: bytes, shape, type id."""
        weights = self.gguf_weights() if kind == "interleaved" else self.weights
        out = {}
        for name, value in weights.items():
            qtype = self.qtype if value.ndim == 2 else GGMLQuantizationType.F32
            data = np.ascontiguousarray(quantize(value, qtype)).view(np.uint8).reshape(-1)
            out[name] = (memoryview(data), value.shape, int(qtype))
        return out

    def write_gguf(self, path: Path) -> Path:
        """With a byte-level vocabulary, so that text works too."""
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("Tiny Llama")
        writer.add_context_length(self.ctx)
        writer.add_embedding_length(self.width)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(self.ff)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(self.theta)
        writer.add_layer_norm_rms_eps(self.eps)
        writer.add_vocab_size(self.vocab)
        names, kinds, merges = byte_vocabulary(self.vocab)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(names)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for name, value in self.gguf_weights().items():
            qtype = self.qtype if value.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(name, quantize(value, qtype), raw_dtype=qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def write_hf(self, folder: Path) -> Path:
        """config.json and model.safetensors, F32."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.ff,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.theta,
            "rms_norm_eps": self.eps,
            "max_position_embeddings": self.ctx,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.biases,
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32",
        }
        (folder / "config.json").write_text(json.dumps(config))
        names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
        parts = {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        }
        tensors = {}
        for name, value in self.weights.items():
            stem, _, kind = name.rpartition(".")
            if stem.startswith("blk."):
                _, layer, part = stem.split(".")
                tensors[f"model.layers.{layer}.{parts[part]}.{kind}"] = value
            else:
                tensors[f"{names[stem]}.{kind}"] = value
        save_file(tensors, folder / "model.safetensors")
        return folder


def byte_vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """Names, GGUF token types and merges: 3 control tokens, 256 bytes, one merge, fillers."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shown = {b: chr(b) for b in printable}
    spare = 0
    for b in range(256):
        if b not in shown:
            shown[b] = chr(256 + spare)
            spare += 1
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(shown[b] for b in range(256)), "th"]
    kinds = [3, 3, 3, *[1] * 257]
    while len(names) < size:
        names.append(f"<|unused{len(names)}|>")
        kinds.append(3)
    return names, kinds, ["t h"]
