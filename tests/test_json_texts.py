"""Long strings of bodies: decoded once, never mistaken for each other, bounded."""

from __future__ import annotations

import json
import random

import pytest

from ds4._json import JSONError, Node, Spans, Texts, parse


def node(text: str, member: str = "a", *, ascii_only: bool = False) -> Node:
    return parse(json.dumps({member: text}, ensure_ascii=ascii_only).encode())[member]


def test_a_long_text_is_the_same_object_in_the_next_body() -> None:
    texts = Texts(1 << 20)
    text = "a text of a conversation, \u00e9 " * 40
    first = texts.read(node(text))
    assert first == text
    assert texts.read(node(text, "another")) is first
    assert texts.read(node("short")) == "short"
    assert len(texts) == 1


def test_another_spelling_of_a_text_is_read_too() -> None:
    texts = Texts(1 << 20)
    text = "na\u00efve\n" * 100
    assert texts.read(node(text)) == texts.read(node(text, ascii_only=True)) == text


@pytest.mark.parametrize("size", [1, 7, 8, 31, 32, 33, 63, 64, 65, 100])
def test_texts_of_one_size_that_differ_in_one_byte_stay_apart(size: int) -> None:
    texts = Texts(1 << 24, shortest=0)
    base = "x" * size
    kinds = {base} | {base[:i] + c + base[i + 1 :] for i in range(size) for c in "yz"}
    for _ in range(2):
        for text in kinds:
            assert texts.read(node(text)) == text
    # Almost every one has a key of its own: what shares one would be decoded again every time.
    assert len(texts) == len(kinds)


def test_random_texts_in_little_room() -> None:
    seed = random.SystemRandom().getrandbits(32)
    rng = random.Random(seed)
    texts = Texts(20_000)
    pool = ["".join(rng.choice('ab"\\\u00e9\u4e2d\U0001f680') for _ in range(rng.randrange(2000))) for _ in range(60)]
    for _ in range(3000):
        text = rng.choice(pool)
        assert texts.read(node(text, ascii_only=rng.random() < 0.5)) == text, f"seed {seed}"
        assert len(texts) * 200 <= 20_000


def test_what_is_used_stays() -> None:
    texts = Texts(8_000)
    kept = texts.read(node("k" * 500))
    for i in range(100):
        texts.read(node(f"{i} " + "x" * 500))
        assert texts.read(node("k" * 500)) is kept
    dropped = texts.read(node("0 " + "x" * 500))
    assert texts.read(node("0 " + "x" * 500)) is dropped
    large = texts.read(node("y" * 5000))
    assert texts.read(node("y" * 5000)) is not large


def test_the_wrong_kind_has_its_path() -> None:
    with pytest.raises(JSONError, match=r"Expected `str`, got `array` - at `\$\.a`"):
        Texts(1 << 20).read(parse(b'{"a": [' + b"1," * 300 + b"1]}")["a"])


# ---- elements of an array, read once ---------------------------------------------------------------------------


def test_elements_are_made_once() -> None:
    made: list[str] = []

    def make(node: Node) -> str:
        made.append(node.path)
        return node["t"].as_str()

    spans = Spans(1 << 20, shortest=32)
    long, other = "long text " * 10, "other text " * 10
    body = parse(json.dumps({"a": [{"t": long}, {"t": "s"}, {"t": other}]}).encode())
    first = spans.each(body["a"], make, 2)
    assert first == [long, "s", other] and made == ["$.a[0]", "$.a[1]", "$.a[2]"]
    # In another place and another body: what is short, or new, is made.
    again = spans.each(parse(json.dumps([{"t": other}, {"t": "s"}, {"t": "s" * 50}, {"t": long}]).encode()), make, 2)
    assert again == [other, "s", "s" * 50, long] and again[0] is first[2] and again[3] is first[0]
    assert made[3:] == ["$[1]", "$[2]"]
    assert spans.each(parse(b"[]"), make, 1) == []
    with pytest.raises(JSONError, match="Expected `array`, got `object`"):
        spans.each(parse(b"{}"), make, 1)
    with pytest.raises(JSONError, match=r"missing required field `t` - at `\$\[0\]`"):
        spans.each(parse(b'[{"no": "%b"}]' % (b"x" * 50)), make, 1)


def test_texts_of_members() -> None:
    body = parse(b'{"a": "\\u00e9\\n", "b": [1, {"c" : null}], "d": -0, "e": 1.50, "f": true, "g": null, "a": "last"}')
    assert body.texts() == [
        ("a", "str", "last"), ("b", "array", '[1,{"c":null}]'), ("d", "int", "-0"),
        ("e", "float", "1.50"), ("f", "bool", "true"), ("g", "null", "null"),
    ]  # fmt: skip
    assert [(name, kind, value) for name, kind, value in body.texts()] == [
        (name, node.kind, node.as_str() if node.kind == "str" else node.minified()) for name, node in body.items()
    ]
    with pytest.raises(JSONError, match="Expected `object`, got `array`"):
        parse(b"[]").texts()
