"""Fuzz target of the output parser: any bytes, any options, any split.

No crash, the same outcome for every split, events that add up to the result, arguments that are JSON objects (`Turn`
checks the last two).
"""

from __future__ import annotations

import random
from typing import Any

from tests.support.turns import SYNTAXES, damaged, outcome, random_calls, run, soup, written

_SCHEMAS = [
    (
        "f",
        '{"properties":{"a":{"type":"string"},"b":{"type":["integer","array"]},"c":{},"d":{"$ref":"#/$defs/t"},'
        '"e":{"anyOf":[{"$ref":"#/$defs/t"},{"type":"null"}]}},"$defs":{"t":{"enum":["x",1]}}}',
    )
]
ALL = (*SYNTAXES, "raw")
_CAUSES = ("eos", "length", "stop", "error")


def target(data: bytes) -> None:
    """Byte 0: syntax; byte 1: thinking, tools, schemas, cause, bare invokes; byte 2: the split; then the turn."""
    if len(data) < 3:
        return
    syntax = ALL[data[0] % len(ALL)]
    flags, cut, text = data[1], data[2], data[3:]
    options: dict[str, Any] = {}
    if syntax != "raw":
        options = {
            "thinking": bool(flags & 1),
            "tools": bool(flags & 2),
            "schemas": _SCHEMAS if flags & 4 else [],
        }
        if syntax.startswith("deepseek") and options["tools"]:
            options["implicit_invoke"] = bool(flags & 32)
    cause = _CAUSES[flags >> 3 & 3]
    whole = outcome(run([text], cause, syntax, **options))
    at = cut * len(text) // 255
    assert outcome(run([text[:at], text[at:]], cause, syntax, **options)) == whole
    assert outcome(run([text[i : i + 1] for i in range(len(text))], cause, syntax, **options)) == whole


def example(rng: random.Random) -> bytes:
    """A starting point: a whole turn, a damaged one, or a soup of tags, behind random options."""
    kind = rng.randrange(3)
    if kind == 0:
        text = soup(rng)
    else:
        text = ("plan</think>Sure." + written(random_calls(rng), rng.choice(SYNTAXES))[0]).encode()
        if kind == 1:
            text = damaged(rng, text)
    return rng.randbytes(3) + text
