"""What a constraint costs: compiling, a matcher per sequence, and per token the mask, the advance and the masked draw;
and what sixteen constrained sequences cost beside sixteen free ones.

Run: `python -m bench.constraint`. The vocabulary is the demo model's (49,152 tokens). Times of the first part are CPU
time of the thread in microseconds; "first" is a sequence after the compilation, "next" the tenth one of the same.

The second part samples at temperature 1 through the server's scheduler, engine and constraints, a case after the other
in every round: tokens per second are wall time, medians of the rounds. "CPU beside the step" is what the engine thread
does per token outside of `Engine.step`: parser, events, matcher and mask. The masked draw is a part of the step.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

from ds4.engine.constraint import Compiler, ConstraintLike, Grammar
from ds4.engine.demo import demo_model_path
from ds4.engine.engine import Engine
from ds4.engine.model_file import open_model_file
from ds4.engine.sampler import new_sampler
from ds4.engine.tokenizer import Tokenizer
from ds4.engine.types import EngineConfig, SamplingParams
from ds4.prompt.call_grammar import SYNTAXES, CallGrammar, Function
from ds4.prompt.call_inputs import INPUT, CallConstraint
from ds4.server.scheduler import Scheduler, SchedulerConfig
from ds4.server.types import GenerationRequest

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


SESSIONS = 16
STEPS = 64
ROUNDS = 5
PATCH = r"""start: "*** Begin Patch\n*** Add File: " NAME "\n" added{40,} "*** End Patch"
NAME: /[a-z_]{1,20}\.py/
added: "+" /[^\n]*/ "\n"
"""
"""No answer of any case comes to its end within the steps that are timed."""


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


# ---- sixteen sessions


def constraints(compiler: Compiler) -> dict[str, ConstraintLike | None]:
    people = {"type": "array", "items": PERSON, "minItems": 100}
    anything = {"type": "object", "additionalProperties": {}, "minProperties": 100}
    parameters = {"properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    calls = CallGrammar(SYNTAXES["chatml"], [Function("write", parameters, strict=True)], compiler.special_ids)
    form = compiler.compile(Grammar("lark", calls.forced(single=True)))
    patch = compiler.compile(Grammar("lark", PATCH))
    return {
        "free": None,
        "JSON schema": compiler.compile(Grammar("json_schema", json.dumps(people))),
        "JSON without a schema": compiler.compile(Grammar("json_schema", json.dumps(anything))),
        "custom tool by a Lark grammar": CallConstraint(form, {"write": patch}, SYNTAXES["chatml"], compiler.texts()),
    }


def sampled(engine: Engine, constraint: ConstraintLike | None, seed: int) -> tuple[float, float]:
    """(tokens per second, CPU microseconds per token beside the step) of all sessions at once."""
    scheduler = Scheduler(engine, SchedulerConfig(slots=SESSIONS), lambda batch: None)
    prompt = engine.tokenizer.encode("Write a long list of people and what they do.\n")
    jobs = [
        scheduler.submit(
            GenerationRequest(
                f"r{i}",
                "chat",
                "m",
                prompt,
                b"",
                SamplingParams(temperature=1.0, seed=seed + i),
                STEPS + 40,
                tools=isinstance(constraint, CallConstraint),
                constraint=constraint,
            )
        )
        for i in range(SESSIONS)
    ]
    while any(slot.generation is None or slot.generation.prefilling for slot in scheduler.slots):
        plan = scheduler.plan()
        scheduler.commit(plan, engine.step(plan.rows))
    tokens, beside = 0, 0.0
    begin = time.perf_counter()
    for _ in range(STEPS):
        start = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time()
        results = engine.step(plan.rows)
        stepped = time.thread_time()
        scheduler.commit(plan, results)
        beside += planned - start + time.thread_time() - stepped
        tokens += len(plan.rows)
    took = time.perf_counter() - begin
    for job in jobs:
        scheduler.cancel(job)
    scheduler.plan()
    return tokens / took, beside / tokens * 1e6


def decode() -> None:
    config = EngineConfig(ctx=512, slots=SESSIONS, threads=2)
    engine = Engine.open(config)
    try:
        cases = constraints(Compiler(engine.tokenizer, engine.info.vocab_size))
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
        for number in range(ROUNDS + 1):
            for name, constraint in cases.items():
                result = sampled(engine, constraint, 1000 * number)
                if number:
                    found[name].append(result)
    finally:
        engine.close()
    print(f"\n{f'{SESSIONS} sessions, sampled':32}{'tokens/s':>10}{'of free':>9}{'CPU beside the step, us/token':>31}")
    for name, results in found.items():
        rate = statistics.median(r for r, _ in results)
        share = statistics.median(r / free for (r, _), (free, _) in zip(results, found["free"], strict=True))
        print(f"{name:32}{rate:10.0f}{share:9.2f}{statistics.median(us for _, us in results):31.1f}")


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
    decode()


if __name__ == "__main__":
    main()
