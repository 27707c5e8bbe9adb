"""Makes the native sampler of one sequence from `SamplingParams`."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ds4 import _cpu
from ds4.engine.types import SamplingParams

if TYPE_CHECKING:
    from ds4.engine.native import NativeModule

__all__ = ["new_sampler"]


def new_sampler(params: SamplingParams, vocab: int, module: NativeModule = _cpu) -> _cpu.Sampler:
    """A sampler for logits of shape [vocab], for steps of `module`; it satisfies `ds4.engine.types.SamplerLike`.

    Without a seed a fresh one is drawn from the system. Any integer is a seed; its low 64 bits count. Raises
    ValueError naming the parameter, its value and what is allowed.
    """
    seed = secrets.randbits(64) if params.seed is None else params.seed & (2**64 - 1)
    return module.Sampler(
        vocab=vocab,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=list(params.logit_bias.items()),
        logprobs=params.logprobs,
    )
