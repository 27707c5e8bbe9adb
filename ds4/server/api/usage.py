"""Numbers about a generation: what it cost, in each dialect's own members: the same numbers everywhere.

`cached_tokens` are prompt tokens that were not evaluated again, from whatever cache; `cache_write_tokens` those that
were evaluated and kept. OpenAI counts both as part of the prompt tokens, Anthropic beside its `input_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds4.server.types import Finish

_LOWEST = -9999.0
"""JSON has no infinity: the log-probability of what cannot happen, as OpenAI writes it."""


def finite_logprob(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST


def total(finishes: Sequence[Finish], per_prompt: int = 1) -> Finish:
    """Several generations as one; each `per_prompt` in a row share a prompt, which counts once.

    Of those that share one evaluated it and the others took it over from that one: what the former found in a cache is
    what was cached.
    """
    if len(finishes) == 1:
        return finishes[0]
    prompts = [finishes[at : at + per_prompt] for at in range(0, len(finishes), per_prompt)]
    return replace(
        finishes[0],
        prompt_tokens=sum(group[0].prompt_tokens for group in prompts),
        cached_tokens=sum(min(f.cached_tokens for f in group) for group in prompts),
        cache_write_tokens=sum(max(f.cache_write_tokens for f in group) for group in prompts),
        completion_tokens=sum(f.completion_tokens for f in finishes),
        reasoning_tokens=sum(f.reasoning_tokens for f in finishes),
        ttft=min(f.ttft for f in finishes),
        prefill_seconds=max(f.prefill_seconds for f in finishes),
        decode_seconds=max(f.decode_seconds for f in finishes),
    )


def together(first: Finish, second: Finish) -> Finish:
    """Two answers to one request, of which the client gets the second: the prompt counts once, both answers do."""
    return replace(
        second,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        cache_write_tokens=first.cache_write_tokens,
        completion_tokens=first.completion_tokens + second.completion_tokens,
        reasoning_tokens=first.reasoning_tokens + second.reasoning_tokens,
        ttft=first.ttft,
        prefill_seconds=first.prefill_seconds + second.prefill_seconds,
        decode_seconds=first.decode_seconds + second.decode_seconds,
    )


def openai_usage(finish: Finish, *, timings: bool) -> dict[str, object]:
    """`usage` of Chat Completions and Completions."""
    used: dict[str, object] = {
        "prompt_tokens": finish.prompt_tokens,
        "completion_tokens": finish.completion_tokens,
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
        "prompt_tokens_details": _cache_details(finish),
        "completion_tokens_details": {"reasoning_tokens": finish.reasoning_tokens},
    }
    if timings:
        used["timings"] = timing_numbers(finish)
    return used


def responses_usage(finish: Finish, *, timings: bool = False) -> dict[str, object]:
    """`usage` of Responses."""
    used: dict[str, object] = {
        "input_tokens": finish.prompt_tokens,
        "input_tokens_details": _cache_details(finish),
        "output_tokens": finish.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": finish.reasoning_tokens},
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
    }
    if timings:
        used["timings"] = timing_numbers(finish)
    return used


def messages_usage(prompt: int, cached: int, written: int, output: int) -> dict[str, object]:
    """`usage` of Messages: three counts that together are the prompt, and the output."""
    return {
        "input_tokens": max(0, prompt - cached - written),
        "output_tokens": output,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
    }


def timing_numbers(finish: Finish) -> dict[str, object]:
    """Milliseconds and tokens per second, under llama.cpp's names."""
    evaluated = finish.prompt_tokens - finish.cached_tokens
    return {
        "cache_n": finish.cached_tokens,
        "prompt_n": evaluated,
        "prompt_ms": round(finish.prefill_seconds * 1e3, 3),
        "prompt_per_second": _rate(evaluated, finish.prefill_seconds),
        "predicted_n": finish.completion_tokens,
        "predicted_ms": round(finish.decode_seconds * 1e3, 3),
        # The first token comes out of the prefill; the decode time is that of the others.
        "predicted_per_second": _rate(max(0, finish.completion_tokens - 1), finish.decode_seconds),
        "ttft_ms": round(finish.ttft * 1e3, 3),
    }


def _cache_details(finish: Finish) -> dict[str, object]:
    return {"cached_tokens": finish.cached_tokens, "cache_write_tokens": finish.cache_write_tokens}


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0
