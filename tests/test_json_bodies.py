"""Bodies that begin like a former one: the same values and the same errors as if they were the first of their kind."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ds4 import _json
from ds4._json import Bodies, JSONError, Node, Spans, parse

TEXTS = ("", "a", 'q"\\', "é", "深度", "🚀\n", "x" * 70, "\x1b</tool>", "0" * 40)


def value(rng: random.Random, depth: int = 0) -> Any:
    if depth < 4 and rng.random() < 0.5:
        inner = [value(rng, depth + 1) for _ in range(rng.randrange(5))]
        if rng.random() < 0.5:
            return inner
        return {rng.choice(TEXTS) + str(rng.randrange(3)): v for v in inner}
    return rng.choice((*TEXTS, None, True, False, 0, -7, 12.5, 10**17, 1e300, rng.randrange(10**6)))


def spelled(rng: random.Random, tree: Any) -> bytes:
    separators = rng.choice(((",", ":"), (", ", ": "), (" ,\n", " : ")))
    return json.dumps(tree, ensure_ascii=rng.random() < 0.3, separators=separators).encode()


def seen(node: Node) -> list[object]:
    """Everything that a node says of itself and of what is in it."""
    facts: list[object] = [node.kind, node.path, node.start, node.end, node.raw, node.minified(), node.canonical()]
    if node.kind == "object":
        facts += [len(node), [(name, seen(inner)) for name, inner in node.items()]]
    if node.kind == "array":
        facts += [len(node), [seen(inner) for inner in node]]
    return facts


def outcome(read: Any, body: bytes) -> object:
    try:
        return seen(read(body))
    except JSONError as error:
        return str(error), error.path, error.offset


def edited(rng: random.Random, body: bytes) -> bytes:
    """Another end, another byte somewhere, something put in or taken out."""
    at = rng.randrange(len(body) + 1)
    piece = bytes(rng.choice(b'[]{},:"\\ 01e-u') for _ in range(rng.randrange(4)))
    match rng.randrange(5):
        case 0:
            return body[:at] + piece
        case 1:
            return body[:at] + piece + body[at + 1 :]
        case 2:
            return body[:at] + piece + body[at:]
        case 3:
            return body[:at] + body[rng.randrange(at, len(body) + 1) :]
        case _:
            return body + piece


@pytest.mark.parametrize("isa", ["scalar", "sse2", "avx2", "avx512"])
def test_any_beginning_changes_nothing(isa: str) -> None:
    seed = random.SystemRandom().getrandbits(32)
    rng = random.Random(seed)
    try:
        before = _json.use_isa(isa)
    except ValueError:
        pytest.skip(f"{isa} is not available here")
    try:
        for _ in range(60):
            tree = [value(rng) for _ in range(rng.randrange(1, 6))]
            bodies = Bodies(rng.choice((1 << 20, 2000)), shortest=rng.choice((0, 8, 64)))
            known = spelled(rng, tree)
            for _ in range(12):
                grown = [*tree, *(value(rng) for _ in range(rng.randrange(3)))]
                body = known if rng.random() < 0.1 else spelled(rng, grown) if rng.random() < 0.3 else known[:-1]
                body = body if rng.random() < 0.3 else edited(rng, body)
                assert outcome(bodies.parse, body) == outcome(parse, body), f"seed {seed}: {known!r}, {body!r}"
                known = body or b"0"
    finally:
        _json.use_isa(before)


def test_every_cut_of_a_body() -> None:
    """A body that ends, or goes on otherwise, behind each of its bytes."""
    body = b'{"m":1,"a":[{"r":"x\\u00e9","n":12},{"r":"y","c":[1,[2,{"d":-0.5e1}],"z"]}],"t":true,"n":null}'
    for at in range(len(body) + 1):
        for end in (b"", b'"', b"]}", b"}", b"0]}", b',"q":[]}', b"\xff", b'1,"q":2}]}'):
            bodies = Bodies(1 << 20, shortest=1)
            bodies.parse(body)
            assert outcome(bodies.parse, body[:at] + end) == outcome(parse, body[:at] + end), (at, end)


def conversation(turns: list[dict[str, object]], **members: object) -> bytes:
    return json.dumps({**members, "messages": turns, "stream": True}, ensure_ascii=False).encode()


def test_what_was_made_is_found_again() -> None:
    """Of values in the common beginning, whatever was edited: `each` and `get` give what reading anew would."""
    seed = random.SystemRandom().getrandbits(32)
    rng = random.Random(seed)
    bodies, spans, found = Bodies(1 << 20, shortest=1), Spans(3000, shortest=20), Spans(1 << 20, shortest=1)
    turns: list[dict[str, object]] = []
    reads = 0

    def make(node: Node) -> str:
        nonlocal reads
        reads += 1
        return json.dumps(node.loads(), sort_keys=True)

    total = 0
    for _ in range(600):
        if turns and rng.random() < 0.1:
            turns[rng.randrange(len(turns))] = {"edited": value(rng)}
        if turns and rng.random() < 0.05:
            del turns[rng.randrange(len(turns)) :]
        turns = [*(turns if len(turns) < 40 else []), {"role": rng.choice("ua"), "content": value(rng)}]
        node = bodies.parse(conversation(turns, model="m", n=rng.choice((1, 1, 1, 2))))
        assert spans.each(node["messages"], make, 1) == [json.dumps(t, sort_keys=True) for t in turns], f"seed {seed}"
        total += len(turns)
        known = found.get(node["messages"])
        assert known in (None, turns), f"seed {seed}"
        if known is None:
            found.put(node["messages"], list(turns), 1)
    assert reads < total // 2


def test_a_grown_body_costs_what_is_new() -> None:
    bodies = Bodies(1 << 24, shortest=1000)
    for n in (500, 2000):
        turns: list[dict[str, object]] = [{"role": "user", "content": f"{n} turn {i} " + "x" * 100} for i in range(n)]
        whole = bodies.parse(conversation(turns)).steps
        more = bodies.parse(conversation([*turns, {"role": "user", "content": "new"}])).steps
        assert whole > 5 * n and more < 20
    # Each conversation is there once.
    assert len(bodies) == 2


def test_memory_is_bounded() -> None:
    bodies = Bodies(200_000, shortest=100)
    for i in range(300):
        body = conversation([{"content": f"{i} " + "y" * (i * 37 % 5000)}])
        assert bodies.parse(body)["messages"][0]["content"].as_str().startswith(f"{i} ")
        assert bodies.bytes_held <= 200_000 and len(bodies) <= 64
    assert len(bodies) > 3
    # One that is larger than all is parsed and not kept.
    assert len(bodies.parse(conversation([{"content": "z" * 100_000}]))) == 2
    assert bodies.bytes_held <= 200_000
    with pytest.raises(TypeError):
        bodies.parse(bytearray(b"{}"))  # type: ignore[arg-type]
