"""Random JSON schemas that a small model can finish an answer for: everything in them is bounded."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("red", "green", "blue", "left", "right", "naïve", 'a"b', "")
PATTERNS = ("^[a-z]{1,6}$", "^[A-Z][0-9]{2}$", "^(cat|dog)s?$", r"^\d{4}-\d{2}$")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Nested objects and arrays, enum, const, bounded numbers, strings with length or pattern, anyOf, null, bool."""
    kinds = ["string", "string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf"]
    kind = "object" if depth == 0 else rng.choice(kinds)
    match kind:
        case "object":
            return random_object(rng, depth)
        case "array":
            low = rng.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(rng, depth + 1),
                "minItems": low,
                "maxItems": low + rng.randint(0, 2),
            }
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "string":
            return random_string(rng)
        case "integer":
            low = rng.randint(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 3, 5000))}
        case "number":
            low = rng.randint(-50, 50)
            bounds = ("minimum", "maximum") if rng.random() < 0.5 else ("exclusiveMinimum", "exclusiveMaximum")
            return {"type": "number", bounds[0]: low, bounds[1]: low + rng.choice((1, 10.5))}
        case "enum":
            values = [*rng.sample(WORDS, rng.randint(1, 4)), *rng.sample((1, -2.5, None, True, [1], {"a": 2}), 2)]
            return {"enum": values}
        case "const":
            return {"const": rng.choice((*WORDS, 7, False, None, [1, "x"]))}
        case _:
            return {"type": kind}


def random_object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """An object schema without further members, some of its properties optional."""
    names = rng.sample(("name", "age", "unit_2", "Größe", "list of x", "z"), rng.randint(1 if depth == 0 else 0, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def random_string(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}


def random_parameters(rng: random.Random) -> dict[str, Any]:
    """An object schema for a function's parameters: names that every tool syntax can write."""
    names = rng.sample(("city", "days", "unit", "path", "options"), rng.randint(1, 2))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, 2) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
