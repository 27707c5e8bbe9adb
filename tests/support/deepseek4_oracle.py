"""DeepSeek V4's layers in float64, as its description reads: slow, and written apart from the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def logistic(x: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-x))


def unit(x: F64, eps: float) -> F64:
    """x over its root mean square, along the last axis."""
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps)


# What the formats hold, in the order of their codes.
E4M3 = np.array([m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)])[:-1]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def rounded(x: F64, codes: F64, least: float) -> F64:
    """Groups (the last axis) to the nearest code times a power of two, ties to the even code."""
    amax = np.maximum(np.abs(x).max(-1, keepdims=True), least)
    scale = 2.0 ** np.ceil(np.log2(amax / codes[-1]))
    size = np.abs(x) / scale
    above = np.searchsorted(codes, size).clip(1, len(codes) - 1)
    low, high = codes[above - 1], codes[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return np.sign(x) * np.where(up, high, low) * scale


class Oracle:
    """Layers of `weights` (published names) that see a window of keys only, a token at a time."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, npt.NDArray[Any]], *, rounding: bool) -> None:
        self.c = config
        self.w = {name: np.asarray(w, np.float64) for name, w in weights.items()}
        self.rounding = rounding
        pairs = config["qk_rope_head_dim"] // 2
        self.freq = np.array([config["rope_theta"] ** (-i / pairs) for i in range(pairs)])

    def turn(self, x: F64, angle: F64, back: bool = False) -> F64:
        """Rotates the tail of each vector: the pair (a, b) is the complex number a + ib."""
        tail = 2 * angle.shape[-1]
        z = x[..., -tail::2] + 1j * x[..., 1 - tail :: 2]
        z = z * np.exp((-1j if back else 1j) * angle)
        out = x.copy()
        out[..., -tail::2], out[..., 1 - tail :: 2] = z.real, z.imag
        return out

    def eighth(self, x: F64) -> F64:
        """The storage rounding of key rows: groups of 64 before the tail, in 8-bit floats with a common scale."""
        if not self.rounding:
            return x
        out, width = x.copy(), x.shape[-1] - 2 * len(self.freq)
        for i in range(0, width, 64):
            out[..., i : i + 64] = rounded(x[..., i : i + 64], E4M3, 1e-4)
        return out

    def key(self, p: str, x: F64, position: int) -> F64:
        row = unit(self.w[p + "attn.wkv.weight"] @ x, self.c["rms_norm_eps"]) * self.w[p + "attn.kv_norm.weight"]
        return self.eighth(self.turn(row, position * self.freq))

    def mixed(self, p: str, streams: F64) -> tuple[F64, F64, F64]:
        """(input of a sub-layer, weights of its output, matrix [from, to] of the streams)."""
        n, eps = self.c["hc_mult"], self.c["hc_eps"]
        c = self.w[p + "_fn"] @ unit(streams.reshape(-1), self.c["rms_norm_eps"])
        a, b, s = self.w[p + "_scale"], self.w[p + "_base"], 2 * n
        share = logistic(c[:n] * a[0] + b[:n]) + eps
        m = np.exp((c[s:] * a[2] + b[s:]).reshape(n, n))
        m = m / m.sum(1)[:, None] + eps
        for i in range(self.c["hc_sinkhorn_iters"]):
            if i > 0:
                m = m / (m.sum(1)[:, None] + eps)
            m = m / (m.sum(0)[None, :] + eps)
        return np.einsum("j,jd->d", share, streams), 2 * logistic(c[n:s] * a[1] + b[n:s]), m

    def collapsed(self, p: str, streams: F64) -> F64:
        c = self.w[p + "hc_head_fn"] @ unit(streams.reshape(-1), self.c["rms_norm_eps"])
        share = logistic(c * self.w[p + "hc_head_scale"][0] + self.w[p + "hc_head_base"]) + self.c["hc_eps"]
        return np.einsum("j,jd->d", share, streams)

    def expert(self, p: str, x: F64) -> F64:
        limit = self.c["swiglu_limit"]
        gate, up = self.w[p + "w1.weight"] @ x, self.w[p + "w3.weight"] @ x
        gate, up = np.where(gate > limit, limit, gate), np.clip(up, -limit, limit)
        return self.w[p + "w2.weight"] @ (gate * logistic(gate) * up)

    def experts(self, p: str, x: F64) -> F64:
        score = np.sqrt(np.log1p(np.exp(self.w[p + "gate.weight"] @ x)))
        ranked = sorted(range(len(score)), key=lambda e: -(score[e] + self.w[p + "gate.bias"][e]))
        chosen = ranked[: self.c["num_experts_per_tok"]]
        total = sum(score[e] for e in chosen)
        out = self.expert(p + "shared_experts.", x)
        for e in chosen:
            out = out + score[e] / total * self.c["routed_scaling_factor"] * self.expert(f"{p}experts.{e}.", x)
        return out

    def attend(self, p: str, x: F64, position: int, rows: Sequence[F64]) -> F64:
        c, eps = self.c, self.c["rms_norm_eps"]
        heads, dim, groups = c["num_attention_heads"], c["head_dim"], c["o_groups"]
        low = unit(self.w[p + "attn.wq_a.weight"] @ x, eps) * self.w[p + "attn.q_norm.weight"]
        q = self.turn(unit((self.w[p + "attn.wq_b.weight"] @ low).reshape(heads, dim), eps), position * self.freq)
        seen = np.stack(rows)
        out = np.zeros((heads, dim))
        for h in range(heads):
            e = np.exp(seen @ q[h] / np.sqrt(dim))
            out[h] = e @ seen / (e.sum() + np.exp(self.w[p + "attn.attn_sink"][h]))
        out = self.turn(out, position * self.freq, back=True).reshape(groups, -1)
        a = self.w[p + "attn.wo_a.weight"].reshape(groups, c["o_lora_rank"], -1)
        return self.w[p + "attn.wo_b.weight"] @ np.einsum("gri,gi->gr", a, out).reshape(-1)

    def layer(self, p: str, block: Sequence[F64], positions: Sequence[int], window: Sequence[F64]) -> list[F64]:
        """Streams behind a layer whose rows all see the window and each other (a block of one: itself)."""
        eps = self.c["rms_norm_eps"]
        entered = [self.mixed(p + "hc_attn", x) for x in block]
        normed = [unit(y, eps) * self.w[p + "attn_norm.weight"] for y, _, _ in entered]
        keys = [self.key(p, y, at) for y, at in zip(normed, positions, strict=True)]
        out = []
        for x, y, at, (_, post, m) in zip(block, normed, positions, entered, strict=True):
            x = np.outer(post, self.attend(p, y, at, [*window, *keys])) + m.T @ x
            z, post, m = self.mixed(p + "hc_ffn", x)
            z = self.experts(p + "ffn.", unit(z, eps) * self.w[p + "ffn_norm.weight"])
            out.append(np.outer(post, z) + m.T @ x)
        return out

    def logits(self, y: F64, gain: str) -> F64:
        return self.w["head.weight"] @ (unit(y, self.c["rms_norm_eps"]) * self.w[gain])


class ModelOracle(Oracle):
    """The layers of the model itself, each over a whole sequence at once."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, npt.NDArray[Any]], *, rounding: bool) -> None:
        super().__init__(config, weights, rounding=rounding)
        yarn, pairs = config["rope_scaling"], len(self.freq)
        base, turns = config["compress_rope_theta"], [yarn["beta_fast"], yarn["beta_slow"]]
        # The pair that turns so many times in the original context, as a real number.
        fast, slow = (
            pairs * np.log(yarn["original_max_position_embeddings"] / (t * 2 * np.pi)) / np.log(base) for t in turns
        )
        plain = base ** (-np.arange(pairs) / pairs)
        stretched = np.clip((np.arange(pairs) - np.floor(fast)) / (np.ceil(slow) - np.floor(fast)), 0, 1)
        self.far = plain * (1 - stretched) + plain / yarn["factor"] * stretched

    def angles(self, ratio: int, positions: npt.NDArray[np.int64]) -> F64:
        """[T, pairs]: the one rounding to float32 is the model's own."""
        freq = (self.far if ratio else self.freq).astype(np.float32)
        return (positions.astype(np.float32)[:, None] * freq).astype(np.float64)

    def fourth(self, x: F64) -> F64:
        """The storage rounding of what the indexer compares: Hadamard's transform, then 4-bit floats by 32."""
        if not self.rounding:
            return x
        h = np.ones((1, 1))
        while len(h) < x.shape[-1]:
            h = np.block([[h, h], [h, -h]])
        y = x @ h / np.sqrt(len(h))
        return rounded(y.reshape(*x.shape[:-1], -1, 32), E2M1, 6 * 2.0**-126).reshape(x.shape)

    def pooled(self, p: str, x: F64, ratio: int) -> F64:
        """The compressed rows of the closed windows of x [T, H], normed and rotated, [T // ratio, dim]."""
        w = self.w
        key, gate = x @ w[p + "wkv.weight"].T, x @ w[p + "wgate.weight"].T
        count = len(x) // ratio
        key = key[: count * ratio].reshape(count, ratio, -1)
        gate = gate[: count * ratio].reshape(count, ratio, -1) + w[p + "ape"]
        if ratio == 4:  # the first half of the columns is for the window behind
            half = key.shape[-1] // 2
            before, shut = np.roll(key[..., :half], 1, 0), np.roll(gate[..., :half], 1, 0)
            shut[:1] = -np.inf
            key, gate = np.concatenate([before, key[..., half:]], 1), np.concatenate([shut, gate[..., half:]], 1)
        share = np.exp(gate - gate.max(1, keepdims=True)) if count else gate
        row = (share * key).sum(1) / share.sum(1)
        row = unit(row, self.c["rms_norm_eps"]) * w[p + "norm.weight"]
        return self.turn(row, self.angles(ratio, ratio * np.arange(count)))

    def chosen(self, a: str, x: F64, low: F64, angle: F64) -> npt.NDArray[np.bool_]:
        """[T, rows]: which compressed rows a token sees, by the indexer where there are too many."""
        c, w, heads = self.c, self.w, self.c["index_n_heads"]
        rows = self.fourth(self.pooled(a + "indexer.compressor.", x, 4))
        q = (low @ w[a + "indexer.wq_b.weight"].T).reshape(len(x), heads, -1)
        q = self.fourth(self.turn(q, angle[:, None]))
        weight = x @ w[a + "indexer.weights_proj.weight"].T
        score = np.einsum("th,thw->tw", weight, np.maximum(q @ rows.T, 0))
        seen = np.arange(len(rows))[None] < (np.arange(len(x))[:, None] + 1) // 4
        score = np.where(seen, score, -np.inf)
        best = np.argsort(-score, axis=1, kind="stable")[:, : c["index_topk"]]
        out = np.zeros_like(seen)
        np.put_along_axis(out, best, True, 1)
        return out & seen

    def attended(self, p: str, ratio: int, x: F64) -> F64:
        """Attention of every row of x [T, H] over the window and the compressed rows."""
        c, w, eps, a = self.c, self.w, self.c["rms_norm_eps"], p + "attn."
        heads, dim, groups, count = c["num_attention_heads"], c["head_dim"], c["o_groups"], len(x)
        at = np.arange(count)
        angle = self.angles(ratio, at)
        low = unit(x @ w[a + "wq_a.weight"].T, eps) * w[a + "q_norm.weight"]
        q = self.turn(unit((low @ w[a + "wq_b.weight"].T).reshape(count, heads, dim), eps), angle[:, None])
        rows = self.eighth(self.turn(unit(x @ w[a + "wkv.weight"].T, eps) * w[a + "kv_norm.weight"], angle))
        seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - c["sliding_window"])
        if ratio:
            far = self.eighth(self.pooled(a + "compressor.", x, ratio))
            more = np.arange(len(far))[None] < (at[:, None] + 1) // ratio
            if ratio == 4:
                more = self.chosen(a, x, low, angle)
            rows, seen = np.concatenate([rows, far]), np.concatenate([seen, more], 1)
        score = np.einsum("thd,rd->thr", q, rows) / np.sqrt(dim)
        share = np.where(seen[:, None], np.exp(score), 0.0)
        total = share.sum(-1) + np.exp(w[a + "attn_sink"])
        out = self.turn(np.einsum("thr,rd->thd", share, rows) / total[..., None], angle[:, None], back=True)
        group = w[a + "wo_a.weight"].reshape(groups, c["o_lora_rank"], -1)
        out = np.einsum("gri,tgi->tgr", group, out.reshape(count, groups, -1)).reshape(count, -1)
        return out @ w[a + "wo_b.weight"].T

    def fed(self, p: str, x: F64, tokens: npt.NDArray[np.int32]) -> F64:
        """The shared expert and the routed ones, of every row of x [T, H]."""
        c, w, f = self.c, self.w, p + "ffn."
        score = np.sqrt(np.log1p(np.exp(x @ w[f + "gate.weight"].T)))
        if f + "gate.tid2eid" in w:
            used = w[f + "gate.tid2eid"][tokens].astype(np.int64)
        else:
            used = np.argsort(-(score + w[f + "gate.bias"]), axis=1, kind="stable")[:, : c["num_experts_per_tok"]]
        weight = np.zeros_like(score)
        np.put_along_axis(weight, used, np.take_along_axis(score, used, 1), 1)
        weight *= c["routed_scaling_factor"] / weight.sum(1, keepdims=True)
        out = self.expert(f + "shared_experts.", x.T).T
        for e in range(c["n_routed_experts"]):
            out = out + weight[:, e : e + 1] * self.expert(f"{f}experts.{e}.", x.T).T
        return out

    def whole_layer(self, index: int, streams: F64, tokens: npt.NDArray[np.int32]) -> F64:
        """Streams [T, n, H] behind layer `index`, from those before it."""
        p, eps, x = f"layers.{index}.", self.c["rms_norm_eps"], streams
        ratio = self.c["compress_ratios"][index]
        for part in ("attn", "ffn"):
            entered = [self.mixed(f"{p}hc_{part}", s) for s in x]
            y = unit(np.stack([e[0] for e in entered]), eps) * self.w[f"{p}{part}_norm.weight"]
            out = self.attended(p, ratio, y) if part == "attn" else self.fed(p, y, tokens)
            post, m = np.stack([e[1] for e in entered]), np.stack([e[2] for e in entered])
            x = post[..., None] * out[:, None] + np.einsum("tjk,tjd->tkd", m, x)
        return x

    def streams(self, tokens: npt.NDArray[np.int32]) -> F64:
        """[layers + 1, T, n, H]: before the first layer and behind each."""
        x = np.repeat(self.w["embed.weight"][tokens][:, None], self.c["hc_mult"], 1)
        out = [x]
        for index in range(self.c["num_hidden_layers"]):
            out.append(self.whole_layer(index, out[-1], tokens))
        return np.stack(out)

    def all_logits(self, streams: F64) -> F64:
        """[T, vocab] of the streams [T, n, H] behind the last layer."""
        return np.stack([self.logits(self.collapsed("", x), "norm.weight") for x in streams])
