"""Cost of one draw at vocabularies of 49k and 150k, against a sort of the vocabulary in numpy.

Run: `python bench/sampler.py`. Times are the best of many, in microseconds, and include the Python call.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ds4.engine.sampler import new_sampler
from ds4.engine.types import SamplingParams

SETTINGS = {
    "greedy": SamplingParams(temperature=0, seed=1),
    "default (min-p 0.05)": SamplingParams(seed=1),
    "temperature 1, no truncation": SamplingParams(min_p=0, seed=1),
    "top-k 40, top-p 0.95": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0, seed=1),
    "top-p 0.95": SamplingParams(temperature=0.7, top_p=0.95, min_p=0, seed=1),
    "default, logprobs 5": SamplingParams(seed=1, logprobs=5),
    "default, presence 0.5": SamplingParams(seed=1, presence_penalty=0.5),
}


def best_of(call: Callable[[], object], n: int) -> float:
    best = float("inf")
    for _ in range(n):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def sorted_top_p(logits: np.ndarray) -> int:
    order = np.argsort(-logits)
    w = np.exp((logits[order] - logits[order[0]]) / np.float32(0.7))
    mass = np.cumsum(w) / w.sum()
    return int(order[int(np.searchsorted(mass, 0.95 * 0.5))])


def main() -> None:
    rng = np.random.default_rng(1)
    print(f"{'setting':32}{'49152':>10}{'151936':>10}   microseconds per draw")
    rows = {v: (rng.normal(size=v) * 3).astype(np.float32) for v in (49152, 151936)}
    for logits in rows.values():
        logits[rng.integers(0, len(logits), 5)] = [14, 15, 16, 17, 18]
    for name, params in SETTINGS.items():
        samplers = {v: new_sampler(params, v) for v in rows}
        times = [best_of(lambda s=samplers[v], x=x: s.sample(x), 400) for v, x in rows.items()]  # type: ignore[misc]
        print(f"{name:32}" + "".join(f"{t:10.1f}" for t in times))
    times = [best_of(lambda x=x: sorted_top_p(x), 10) for x in rows.values()]  # type: ignore[misc]
    print(f"{'numpy: sort, top-p 0.95':32}" + "".join(f"{t:10.1f}" for t in times))


if __name__ == "__main__":
    main()
