"""Values of fields that mean the same in every dialect: sampling, limits, stop strings, thinking, choices.

A field that is null is absent. A field of the wrong type or range is 400 with its path. Which fields there are, and
what becomes of the others, is in `fields`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable
from dataclasses import replace

from ds4._json import Node
from ds4.engine.types import SamplingParams
from ds4.errors import RequestError
from ds4.prompt.registry import Syntax

log = logging.getLogger("ds4.server")

_EFFORTS = {
    "max": "max",
    "xhigh": "high",
    "high": "high",
    "medium": "medium",
    "low": "low",
    "minimal": "low",
    "none": "none",
}

_THINKING = frozenset(
    {
        "thinking",
        "think",
        "enable_thinking",
        "reasoning_effort",
        "output_config",
        "reasoning",
        "chat_template_kwargs",
    }
)
"""Members of a body that say something of it."""

_OFF_SUFFIXES = ("-chat", "-no-think", "-nothink")
_ON_SUFFIX = "-reasoner"


def given(body: Node) -> list[tuple[str, Node]]:
    """The members of an object that are not null, in the order of the body."""
    return sorted(((name, node) for name, node in body.items() if not node.is_null), key=lambda item: item[1].start)


def required(node: Node, name: str) -> Node:
    """A member that must be there and not null; the error names the member, not the object that lacks it."""
    member = node.as_object().get(name)
    if member is None:
        path = f"{node.path}.{name}"
        raise RequestError(f"missing {name} - at `{path}`", param=path.removeprefix("$."))
    return member


def once(node: Node, name: str) -> None:
    """Raises JSONError when an object has a member twice that readers disagree about."""
    if len(node) == len(node.keys()):
        return
    # Numbers stay text: Python refuses to convert very long ones.
    members = json.loads(node.raw, object_pairs_hook=lambda pairs: pairs, parse_int=str, parse_float=str)
    if sum(member == name for member, _ in members) > 1:
        raise node[name].error(f"Expected one {name}, got several")


def _is_beyond(node: Node) -> bool:
    """A positive number that has more than 64 bits."""
    return node.kind in ("int", "float") and node.as_float() >= 2.0**63


# ---- sampling ---------------------------------------------------------------------------------------------------


def sampling(body: Node, defaults: SamplingParams, vocab_size: int, *, logprobs: int | None = None) -> SamplingParams:
    """Sampling parameters of a request; `logprobs` is for who wants some. What the client leaves out is `defaults`.

    Temperature, top_p and min_p have no range of their own: below 0 is 0, a probability above 1 is 1. A negative
    seed is a random one, a negative top_k is off (conventions of llama.cpp's clients).
    """
    return SamplingParams(
        temperature=max(0.0, body.get_float("temperature", defaults.temperature)),
        top_p=_unit(body.get_float("top_p", defaults.top_p)),
        min_p=_unit(body.get_float("min_p", defaults.min_p)),
        top_k=min(max(0, body.get_int("top_k", defaults.top_k)), 2**31 - 1),
        seed=_seed(body, defaults.seed),
        presence_penalty=body.get_float("presence_penalty", defaults.presence_penalty),
        frequency_penalty=body.get_float("frequency_penalty", defaults.frequency_penalty),
        repetition_penalty=_repetition_penalty(body, defaults.repetition_penalty),
        logit_bias=_logit_bias(body, vocab_size) or defaults.logit_bias,
        logprobs=logprobs,
    )


def _unit(value: float) -> float:
    return min(1.0, max(0.0, value))


def _seed(body: Node, default: int | None) -> int | None:
    node = body.get("seed")
    if node is None:
        return default
    seed = int(node.as_float()) if _is_beyond(node) else node.as_int()
    return None if seed < 0 else seed & (2**63 - 1)


def _repetition_penalty(body: Node, default: float) -> float:
    for name in ("repetition_penalty", "repeat_penalty"):
        node = body.get(name)
        if node is not None:
            value = node.as_float()
            if value <= 0:
                raise node.error(f"Expected a number above 0, got {value:g}")
            return value
    return default


def _logit_bias(body: Node, vocab_size: int) -> dict[int, float]:
    node = body.get_object("logit_bias")
    biases: dict[int, float] = {}
    for key, value in node.items() if node is not None else ():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise value.error(f"Expected a token id from 0 to {vocab_size - 1} as the key, got {key[:40]!r}")
        biases[int(key)] = value.as_float(-100, 100)
    return biases


def choices(body: Node, slots: int) -> int:
    """`n`: how many answers, each in a slot of its own."""
    n = body.get_int("n", 1)
    if not 1 <= n <= slots:
        raise RequestError(f"n={n} is not supported: expected 1 to {slots}, the number of slots", param="n")
    return n


def choice_id(id: str, choice: int, choices: int) -> str:
    """How the log and `/slots` name one choice of a request."""
    return id if choices == 1 else f"{id}/{choice}"


def choice_sampling(params: SamplingParams, choice: int) -> SamplingParams:
    """Sampling of one of several choices: equal seeds would make equal choices."""
    return params if params.seed is None else replace(params, seed=(params.seed + choice) & (2**63 - 1))


def top_logprobs(body: Node) -> int | None:
    """OpenAI chat's `logprobs` (bool) and `top_logprobs` (0 to 20) as `SamplingParams.logprobs`."""
    wanted = body.get_bool("logprobs", False)
    top = body.get_int("top_logprobs", 0, 0, 20)
    if wanted:
        return top
    if top:
        raise body["top_logprobs"].error("top_logprobs needs logprobs to be true")
    return None


# ---- limits -----------------------------------------------------------------------------------------------------


def max_tokens(body: Node, names: Collection[str]) -> int | None:
    """The output budget: the last of `names` in the body. None: not given, or -1, which clients use for "no limit".

    Never an error for being large: the budget is clamped to what fits.
    """
    limit: int | None = None
    found = [node for name in names if (node := body.get(name)) is not None]
    for node in sorted(found, key=lambda node: node.start):
        limit = 2**63 - 1 if _is_beyond(node) else node.as_int(-1)
    return None if limit == -1 else limit


def stop_strings(body: Node, name: str) -> tuple[bytes, ...]:
    """A stop string or an array of them, without the empty ones."""
    node = body.get(name)
    if node is None:
        return ()
    if node.kind not in ("str", "array"):
        raise node.error(f"Expected `str` or `array`, got `{node.kind}`")
    texts = [item.as_str() for item in node] if node.kind == "array" else [node.as_str()]
    return tuple(text.encode() for text in texts if text)


def ignore_eos(body: Node) -> bool:
    """`ignore_eos`, which is greedy decoding over all other tokens and must be asked for as such."""
    if not body.get_bool("ignore_eos", False):
        return False
    if body.get_float("temperature") != 0:
        raise RequestError("ignore_eos requires an explicit temperature of 0", param="ignore_eos")
    return True


# ---- thinking ---------------------------------------------------------------------------------------------------


def thinking_effort(body: Node, model: str, syntax: Syntax, n_ctx: int) -> str | int:
    """Effort of the conversation: "none" when thinking is off, else a name, or a level where the model has them.

    Later members of the body override earlier ones. A `model` name that ends in -chat or -reasoner decides when the
    body has no switch. `output_config.effort` is Anthropic's, `reasoning.effort` OpenAI's name for the same.
    """
    on: bool | None = None
    effort: str | int | None = None
    for name, node in () if _THINKING.isdisjoint(body.keys()) else given(body):
        if name == "thinking":
            on = _thinking(node, on if on is not None else True)
        elif name in ("think", "enable_thinking"):
            on = node.as_bool()
        elif name == "reasoning_effort":
            effort = parse_effort(node, syntax)
        elif name in ("output_config", "reasoning"):
            value = node.as_object().get("effort")
            if value is not None:
                effort = parse_effort(value, syntax)
                on = effort not in ("none", 0) if name == "reasoning" else on
        elif name == "chat_template_kwargs":
            for key, value in given(node.as_object()):
                if key in ("enable_thinking", "thinking"):
                    on = value.as_bool()
                elif key == "reasoning_effort":
                    effort = parse_effort(value, syntax)
    if on is None:
        on = _alias_thinking(model)
    if on is False or effort in ("none", 0):
        return "none"
    if effort == "max" and n_ctx < syntax.max_effort_context:
        log.info("effort max is served as high: context %d is below %d", n_ctx, syntax.max_effort_context)
        return "high"
    return "high" if effort is None else effort


def _thinking(node: Node, before: bool) -> bool:
    """The switch after `thinking`, a bool or an object whose unknown types change nothing."""
    if node.kind == "bool":
        return node.as_bool()
    if node.kind != "object":
        raise node.error(f"Expected `bool` or `object`, got `{node.kind}`")
    kind = node.get_str("type", "")
    return {"enabled": True, "adaptive": True, "disabled": False}.get(kind, before)


def parse_effort(node: Node, syntax: Syntax) -> str | int:
    """An effort: a name, or 0 to 100 as string or integer for models that were trained on levels."""
    if node.kind not in ("str", "int"):
        raise node.error(f"Expected `str` or `int`, got `{node.kind}`")
    text = node.as_str() if node.kind == "str" else str(node.as_int())
    if text in _EFFORTS:
        return _EFFORTS[text]
    names = ", ".join(_EFFORTS)
    if text.isascii() and text.isdecimal() and len(text) <= 8 and int(text) <= 100:
        if syntax.levels:
            return int(text)
        raise node.error(f"This model takes no numeric effort: expected one of {names}, got {text}")
    allowed = f"one of {names}" + (", or 0 to 100" if syntax.levels else "")
    raise node.error(f"Expected {allowed}, got {text[:40]!r}")


def _alias_thinking(model: str) -> bool | None:
    if model.endswith(_OFF_SUFFIXES):
        return False
    return True if model.endswith(_ON_SUFFIX) else None


# ---- the rest ---------------------------------------------------------------------------------------------------


class UnknownFields:
    """Says once per field name that a field has no effect."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, where: str, names: Iterable[str]) -> None:
        for name in names:
            # The bound keeps a client that invents names from growing the set for ever.
            if name not in self._seen and len(self._seen) < 1000:
                self._seen.add(name)
                log.info("%s: field %r has no effect", where, name[:80])
