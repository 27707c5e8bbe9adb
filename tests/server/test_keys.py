"""Cache keys: that they are a prompt's and nobody else's, and where conversations begin to differ."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ds4.prompt.registry import SYNTAXES
from ds4.prompt.types import Conversation, Message, Special
from ds4.server.keys import Markers, anchor, key_of_tokens, markers_of, tokens_of_key
from ds4.testing import ScriptedEngine

ENGINE = ScriptedEngine()
TOKENIZER = ENGINE.tokenizer


@pytest.mark.parametrize("seed", range(5))
def test_key_and_back(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    segments = [
        Special(rng.choice(["<|im_start|>", "<|im_end|>"]))
        if rng.random() < 0.4
        else "é漢🙂ab\n"[: rng.randrange(1, 7)]
        for _ in range(50)
    ]
    tokens = TOKENIZER.encode_segments(segments)
    key = TOKENIZER.key_bytes(segments)
    assert key_of_tokens(TOKENIZER, tokens) == key
    assert tokens_of_key(TOKENIZER, key) == tokens


def test_a_key_cut_inside_a_character_has_no_tokens() -> None:
    key = "aé".encode()
    assert tokens_of_key(TOKENIZER, key[1:]) == list("é".encode())
    assert tokens_of_key(TOKENIZER, key[2:]) is None


def test_drawn_bytes_cannot_imitate_a_special_token() -> None:
    special = TOKENIZER.special_ids["<|im_end|>"]
    imitation = [0xFF, *special.to_bytes(4, "little")]
    assert TOKENIZER.key_bytes_of_ids(imitation) == TOKENIZER.key_bytes_of_ids([special])
    assert key_of_tokens(TOKENIZER, imitation) is None
    assert key_of_tokens(TOKENIZER, [special]) is not None


def test_markers_of_every_syntax() -> None:
    for name, syntax in SYNTAXES.items():
        tokenizer = ScriptedEngine().tokenizer
        renderer = syntax.make(ENGINE.info)
        markers = markers_of(renderer, tokenizer)
        assert markers is not None, name
        turns = (
            Message("system", "S" * 40),
            Message("user", "first"),
            Message("user", "second"),
            Message("assistant", "answer"),
            Message("user", "third"),
        )
        for count, last in ((3, "second"), (5, "second"), (2, "first")):
            rendered = renderer.render(Conversation(turns[:count]))
            key, tokens = tokenizer.key_bytes(rendered.segments), tokenizer.encode_segments(rendered.segments)
            place = anchor(np.array(tokens), key, markers, list(tokenizer.special_ids.values()))
            assert place > 0, name
            kept = tokenizer.key_bytes_of_ids(tokens[:place])
            assert key.startswith(kept + markers.user), name
            assert last.encode() not in kept, name
            assert b"S" * 40 in kept, name


def test_markers_of_chatml() -> None:
    tokenizer = ScriptedEngine().tokenizer
    start = b"\xff" + tokenizer.special_ids["<|im_start|>"].to_bytes(4, "little")
    markers = markers_of(SYNTAXES["chatml"].make(ENGINE.info), tokenizer)
    assert markers is not None
    assert markers.user == start + b"user\n"
    assert markers.assistant.endswith(start + b"assistant\n")


def test_no_anchor() -> None:
    markers = Markers(b"\xff\x01\x00\x00\x00u", b"\xff\x01\x00\x00\x00a")
    tokens = np.array([1, 97, 1, 117])
    key = b"\xff\x01\x00\x00\x00a\xff\x01\x00\x00\x00u"
    assert anchor(tokens, key, markers, [1]) == -1, "no user turn before the first assistant turn"
    assert anchor(tokens, key, None, [1]) == -1
