"""The draft layers of DeepSeek V4 in float64, one sum after the other: slow, and written apart from the engine.

Streams of the model come in as given numbers; what is checked against this is the drafters alone.
"""

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


class Oracle:
    """Draft layers of `weights` (published names, with the model's embedding and head) for a config.json."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, npt.NDArray[Any]], *, rounding: bool) -> None:
        self.c = config
        self.w = {name: np.asarray(w, np.float64) for name, w in weights.items()}
        self.rounding = rounding
        pairs = config["qk_rope_head_dim"] // 2
        self.freq = np.array([config["rope_theta"] ** (-i / pairs) for i in range(pairs)])

    def turn(self, x: F64, position: int, back: bool = False) -> F64:
        """Rotates the tail of each vector: the pair (a, b) is the complex number a + ib."""
        tail = 2 * len(self.freq)
        z = x[..., -tail::2] + 1j * x[..., 1 - tail :: 2]
        z = z * np.exp((-1j if back else 1j) * position * self.freq)
        out = x.copy()
        out[..., -tail::2], out[..., 1 - tail :: 2] = z.real, z.imag
        return out

    def eighth(self, x: F64) -> F64:
        """The storage rounding of key rows: groups of 64 before the tail, in 8-bit floats with a common scale."""
        if not self.rounding:
            return x
        out, width = x.copy(), len(x) - 2 * len(self.freq)
        codes = np.array([(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1])
        codes = np.concatenate([np.arange(8) * 2.0**-9, codes])
        for i in range(0, width, 64):
            group = out[i : i + 64]
            scale = 2.0 ** np.ceil(np.log2(max(np.abs(group).max(), 1e-4) / 448))
            size = np.abs(group) / scale
            above = np.searchsorted(codes, size).clip(1, len(codes) - 1)
            low, high = codes[above - 1], codes[above]
            up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
            out[i : i + 64] = np.sign(group) * np.where(up, high, low) * scale
        return out

    def key(self, p: str, x: F64, position: int) -> F64:
        row = unit(self.w[p + "attn.wkv.weight"] @ x, self.c["rms_norm_eps"]) * self.w[p + "attn.kv_norm.weight"]
        return self.eighth(self.turn(row, position))

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
        q = self.turn(unit((self.w[p + "attn.wq_b.weight"] @ low).reshape(heads, dim), eps), position)
        seen = np.stack(rows)
        out = np.zeros((heads, dim))
        for h in range(heads):
            e = np.exp(seen @ q[h] / np.sqrt(dim))
            out[h] = e @ seen / (e.sum() + np.exp(self.w[p + "attn.attn_sink"][h]))
        out = self.turn(out, position, back=True).reshape(groups, -1)
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


class MtpOracle(Oracle):
    """The head's window over a sequence. `streams` [T, n, H] are the model's after its last layer, of `tokens` [T]."""

    def pair(self, streams: F64, token: int) -> F64:
        eps = self.c["rms_norm_eps"]
        e = unit(self.w["embed.weight"][token], eps) * self.w["mtp.0.enorm.weight"]
        h = unit(streams, eps) * self.w["mtp.0.hnorm.weight"]
        return self.w["mtp.0.e_proj.weight"] @ e + h @ self.w["mtp.0.h_proj.weight"].T

    def drafts(self, streams: F64, tokens: Sequence[int], last: int, count: int) -> list[F64]:
        """Logits of `count` guesses, each fed with the one before, behind `tokens` and then `last`."""
        p, eps = "mtp.0.", self.c["rms_norm_eps"]
        window: list[F64] = []
        for at, token in list(enumerate(tokens))[1:]:
            y, _, _ = self.mixed(p + "hc_attn", self.pair(streams[at - 1], token))
            window.append(self.key(p, unit(y, eps) * self.w[p + "attn_norm.weight"], at))
        out, x, token = [], streams[-1], last
        for i in range(count):
            at = len(tokens) + i
            x = self.pair(x, token)
            y, _, _ = self.mixed(p + "hc_attn", x)
            seen = window[max(0, len(window) - self.c["sliding_window"] + 1) :]
            window.append(self.key(p, unit(y, eps) * self.w[p + "attn_norm.weight"], at))
            [x] = self.layer(p, [x], [at], seen)
            out.append(self.logits(self.collapsed(p, x), p + "norm.weight"))
            token = int(out[-1].argmax())
        return out


class DSparkOracle(Oracle):
    """`heard` [T, targets, n, H]: the model's streams behind each target layer."""

    def drafts(self, heard: F64, last: int) -> tuple[list[F64], list[float]]:
        """Logits of the block's guesses behind T tokens and then `last`, and how sure each is."""
        c, w, eps = self.c, self.w, self.c["rms_norm_eps"]
        count, stages = len(heard), 3
        windows: list[list[F64]] = [[] for _ in range(stages)]
        for at in range(count):
            m = unit(w["mtp.0.main_proj.weight"] @ heard[at].mean(1).reshape(-1), eps) * w["mtp.0.main_norm.weight"]
            for s in range(stages):
                windows[s].append(self.key(f"mtp.{s}.", m, at))
        size = c["dspark_block_size"]
        ids = [last, *[c["dspark_noise_token_id"]] * (size - 1)]
        block = [np.repeat(w["embed.weight"][i][None], c["hc_mult"], 0) for i in ids]
        places = [count + i for i in range(size)]
        for s in range(stages):
            block = self.layer(f"mtp.{s}.", block, places, windows[s][-c["sliding_window"] :])
        out, sure, token = [], [], last
        for x in block:
            y = self.collapsed("mtp.2.", x)
            chain = w["mtp.2.markov_head.markov_w1.weight"][token]
            out.append(self.logits(y, "mtp.2.norm.weight") + w["mtp.2.markov_head.markov_w2.weight"] @ chain)
            [value] = w["mtp.2.confidence_head.proj.weight"] @ np.concatenate([y, chain])
            sure.append(float(logistic(value)))
            token = int(out[-1].argmax())
        return out, sure
