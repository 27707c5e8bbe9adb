"""The draft layers of DeepSeek V4 in float64, one sum after the other: slow, and written apart from the engine.

Streams of the model come in as given numbers; what is checked against this is the drafters alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.support.deepseek4_oracle import F64, Oracle, logistic, unit


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
