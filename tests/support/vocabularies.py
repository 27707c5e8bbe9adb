"""Small byte-level vocabularies, for constraints over tokens that a test chooses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers

from ds4.engine.tokenizer import Tokenizer, TokenizerSpec

MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "｜DSML｜")
"""The marks of the tool syntaxes, which a vocabulary may hold as tokens of their own."""


def byte_vocabulary(*specials: str, longer: Iterable[str] = ()) -> Tokenizer:
    """One token per byte, one for each text of `longer`, special tokens, the last of which ends the text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain = [*alphabet, *("".join(piece for piece, _ in level.pre_tokenize_str(text)) for text in longer)]
    tokens = [*plain, *specials, "<|end|>"]
    named = {i: text for i, text in enumerate(tokens) if i >= len(plain)}
    return Tokenizer(TokenizerSpec(Path("x.gguf"), tokens, named, [], "llama-bpe", eos_ids=(len(tokens) - 1,)))
