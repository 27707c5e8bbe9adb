"""JSON for tests of `ds4._json`: random values, random spellings, and the standard library as the oracle."""

from __future__ import annotations

import json
import math
import random
from typing import Any

from ds4 import _json
from ds4._json import JSONError


def usable_isas() -> list[str]:
    """The instruction sets that this CPU has, the plainest first."""
    found = []
    for name in ("scalar", "sse2", "avx2", "avx512"):
        try:
            before = _json.use_isa(name)
        except ValueError:
            continue
        _json.use_isa(before)
        found.append(name)
    return found


def random_value(r: random.Random, depth: int = 0) -> Any:
    """A value without surrogates and with finite numbers, nested at most six deep."""
    kind = r.randrange(9 if depth < 5 else 6)
    if kind == 0:
        return r.choice([None, True, False])
    if kind == 1:
        return r.randrange(-(10 ** r.randrange(1, 25)), 10 ** r.randrange(1, 25))
    if kind == 2:
        return r.uniform(-1, 1) * 10.0 ** r.randrange(-300, 300)
    if kind < 6:
        odd = ['"', "\\", "\n", "\b", "é", "ÿ", "Ā", "深", "\ud7ff", "\ufffd", "🚀", "\u2028", "\x00", "\x1b", "\x7f"]
        return "".join(r.choice([r.choice(odd), "x" * r.randrange(80)]) for _ in range(r.randrange(12)))
    if kind == 6:
        return [random_value(r, depth + 1) for _ in range(r.randrange(6))]
    names = ["a", 'b"', "é🚀", "k" * 70, "\n\x01"]
    return {r.choice(names) + str(r.randrange(4)): random_value(r, depth + 1) for _ in range(r.randrange(6))}


def respelled(r: random.Random, value: Any) -> str:
    """The value as JSON with random white space and random escapes."""

    def space() -> str:
        return "".join(r.choices(" \t\r\n", k=r.choice([0, 0, 1, 3])))

    if isinstance(value, str):
        out = ""
        for c in value:
            units = c.encode("utf-16-be")
            escaped = "".join(f"\\u{units[i]:02x}{units[i + 1]:02X}" for i in range(0, len(units), 2))
            plain = json.dumps(c, ensure_ascii=False)[1:-1]
            out += r.choice([plain, escaped, "\\/" if c == "/" else plain])
        return f'"{out}"'
    if isinstance(value, list):
        return "[" + ",".join(space() + respelled(r, v) + space() for v in value) + space() + "]"
    if isinstance(value, dict):
        members = (space() + respelled(r, k) + space() + ":" + space() + respelled(r, v) for k, v in value.items())
        return "{" + ",".join(m + space() for m in members) + space() + "}"
    return json.dumps(value)


def repaired(value: Any) -> Any:
    """The value with surrogates as `_json` gives them."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [repaired(v) for v in value]
    if isinstance(value, dict):
        return {repaired(k): repaired(v) for k, v in value.items()}
    return value


def depth_of(value: Any) -> int:
    if isinstance(value, (list, dict)):
        inside = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth_of, inside), default=0)
    return 0


class Oracle:
    """What the standard library says about a body, made as strict as RFC 8259.

    `valid`, `value` (surrogates repaired); `infinite`: a number is no finite double; `huge`: an integer has more
    digits than Python converts.
    """

    def __init__(self, body: bytes) -> None:
        self.valid = True
        self.value: Any = None
        self.infinite = False
        self.huge = False
        try:
            # `json` would take a byte order mark, other encodings, NaN and Infinity.
            self.value = json.loads(
                body.decode(), parse_int=self._int, parse_float=self._float, parse_constant=self._refuse
            )
            self.valid = depth_of(self.value) <= _json.MAX_DEPTH
            self.value = repaired(self.value)
        except (ValueError, RecursionError):
            self.valid = False

    def _int(self, text: str) -> int:
        self.infinite |= math.isinf(float(text))
        if len(text.lstrip("-")) > 4300:
            self.huge = True
            return 0
        return int(text)

    def _float(self, text: str) -> float:
        value = float(text)
        if math.isinf(value):
            self.infinite = self.huge = True
            return 0.0
        return value

    @staticmethod
    def _refuse(text: str) -> float:
        raise ValueError(text)


def check(body: bytes) -> None:
    """`_json` and the oracle agree on the verdict, the value and every form of the text. Raises AssertionError."""
    oracle = Oracle(body)
    try:
        root = _json.parse(body)
    except JSONError as e:
        assert not oracle.valid, f"refused, but valid: {e}"
        assert e.syntax and 0 <= e.offset <= len(body)
        return
    assert oracle.valid, "accepted, but not valid"
    line, small = root.canonical(), root.minified()
    assert _json.minify(small) == small and len(small.encode()) <= len(body)
    if oracle.infinite:
        assert line.encode() == root.raw
    else:
        assert _json.canonical(line) == line
    try:
        value = root.loads()
    except JSONError as e:
        assert oracle.huge and e.message == "Number out of range"
        return
    assert not oracle.huge
    # Compared as text: 1, 1.0 and True are different, and so are 0.0 and -0.0.
    want = json.dumps(oracle.value)
    assert json.dumps(value) == want
    for text in (line, small, _json.dumps(value)):
        assert json.dumps(_json.loads(text)) == want
