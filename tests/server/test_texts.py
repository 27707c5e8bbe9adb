"""Long strings of request bodies: decoded once, and never mistaken for each other."""

from __future__ import annotations

import json

import pytest

from ds4._json import JSONError, parse
from ds4.server.api import texts
from ds4.server.api.texts import string


def node(text: str, member: str = "a", *, ascii_only: bool = False):  # type: ignore[no-untyped-def]
    return parse(json.dumps({member: text}, ensure_ascii=ascii_only).encode())[member]


def test_a_long_text_is_the_same_object_in_the_next_request() -> None:
    text = "a text of a conversation, é " * 40
    assert string(node(text)) == text
    assert string(node(text)) is string(node(text, "b"))
    assert string(node("short")) == "short"


def test_another_spelling_of_the_same_text_is_read_too() -> None:
    text = "naïve\n" * 100
    assert string(node(text)) == string(node(text, ascii_only=True)) == text


def test_texts_that_share_a_digest_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "xxh3_128_digest", lambda raw: b"the same")
    one, other = "one " * 100, "two " * 100
    for _ in range(2):
        assert string(node(one)) == one
        assert string(node(other)) == other


def test_the_wrong_kind_has_its_path() -> None:
    with pytest.raises(JSONError, match=r"Expected `str`, got `array` - at `\$\.a`"):
        string(parse(b'{"a": [' + b"1," * 300 + b"1]}")["a"])
