"""What a constraint costs: compiling, a matcher per sequence, and per token the mask, the advance and the masked draw.

Run: `python bench/constraint.py`. The vocabulary is the demo model's (49,152 tokens). Times are thread CPU time in
microseconds; "first" is a sequence after the compilation, "next" the tenth sequence of the same constraint.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

from ds4.engine.constraint import Compiler, Grammar
from ds4.engine.demo import demo_model_path
from ds4.engine.model_file import open_model_file
from ds4.engine.sampler import new_sampler
from ds4.engine.tokenizer import Tokenizer
from ds4.engine.types import SamplingParams
from ds4.prompt.call_grammar import SYNTAXES, CallGrammar, Function

VOCAB = 49152
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
ANSWER = json.dumps(
    {
        "name": "Ada Augusta King, Countess of Lovelace",
        "age": 36,
        "tags": ["a", "c"],
        "address": {"street": "St James's Square, a long line of text that a string may hold", "zip": "12345"},
    }
)
CALL = (
    "I look it up.<tool_call>\n<function=find>\n<parameter=query>\nwhere the countess lived, and when\n</parameter>\n"
    "<parameter=limit>\n5\n</parameter>\n</function>\n</tool_call>"
)
FIND = {"properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}, "required": ["query"]}


def thread_us() -> float:
    return time.thread_time() * 1e6


def follow(compiler: Compiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> tuple[list[float], list[float]]:
    """(microseconds of each mask, of each advance) along a text."""
    matcher = compiler.compile(grammar).matcher()
    masks, advances = [], []
    for token in tokenizer.encode(text):
        start = thread_us()
        matcher.mask()
        middle = thread_us()
        matcher.advance((token,))
        masks.append(middle - start)
        advances.append(thread_us() - middle)
    return masks, advances


def main() -> None:
    tokenizer = open_model_file(demo_model_path()).tokenizer()
    compiler = Compiler(tokenizer, VOCAB)
    start = time.process_time()
    compiler.compile(Grammar("regex", "a"))
    print(f"table of the vocabulary: {(time.process_time() - start) * 1e3:.0f} ms, once per model\n")
    calls = CallGrammar(SYNTAXES["chatml"], [Function("find", FIND, strict=True)], compiler.special_ids)
    cases = {
        "JSON schema": (Grammar("json_schema", json.dumps(PERSON)), ANSWER),
        "any JSON object": (Grammar("json_schema", '{"type": "object"}'), ANSWER),
        "text, then a strict call": (Grammar("lark", calls.optional(single=False)), CALL),
    }
    print(f"{'':26}{'compile':>9}{'matcher':>9}  {'mask: first':>22}{'next':>22}{'advance':>9}")
    print(f"{'':26}{'':>9}{'':>9}  {'median / mean / max':>22}{'median / mean / max':>22}{'median':>9}")
    for name, (grammar, text) in cases.items():
        start = time.process_time()
        constraint = compiler.compile(grammar)
        compiled = (time.process_time() - start) * 1e6
        first, _ = follow(compiler, tokenizer, grammar, text)
        for _ in range(9):
            later, advances = follow(compiler, tokenizer, grammar, text)
        start = thread_us()
        for _ in range(100):
            constraint.matcher()
        copy = (thread_us() - start) / 100
        shapes = (f"{statistics.median(t):.0f} / {statistics.mean(t):.0f} / {max(t):.0f}" for t in (first, later))
        print(
            f"{name:26}{compiled:9.0f}{copy:9.0f}  "
            + "".join(f"{s:>22}" for s in shapes)
            + f"{statistics.median(advances):9.1f}"
        )
    logits = (np.random.default_rng(1).normal(size=VOCAB) * 3).astype(np.float32)
    mask = compiler.compile(cases["any JSON object"][0]).matcher().mask()
    for name, masked in (("free", False), ("masked", True)):
        sampler = new_sampler(SamplingParams(seed=1), VOCAB)
        times = []
        for _ in range(400):
            start = thread_us()
            if masked:
                sampler.set_mask(mask)
            sampler.sample(logits)
            times.append(thread_us() - start)
        print(f"\n{name} draw: {statistics.median(times):.0f} us", end="")
    print()


if __name__ == "__main__":
    main()
