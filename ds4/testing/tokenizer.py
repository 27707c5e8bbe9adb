"""A tokenizer without a model: one token per byte, named special tokens, and whole pieces learned from scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ds4.engine.encoding import EncodedPrompt, special_key

BYTES = 256
FIRST_PIECE = 1024
VOCAB_SIZE = 1 << 17

DEFAULT_EOS = ("<|im_end|>", "<|endoftext|>", "<｜end▁of▁sentence｜>")
DEFAULT_SPECIALS = (*DEFAULT_EOS, "<|im_start|>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


class ScriptedTokenizer:
    """The surface of `ds4.engine.tokenizer.Tokenizer`, made of three ranges of ids.

    0..255 are the bytes; from 256 special tokens in the order in which they are first named (the default ones at
    once); from 1024 the pieces that `piece_id` was asked for. `encode` never produces anything but bytes, so text
    cannot become a special token.
    """

    def __init__(self, *, eos: Sequence[str] = DEFAULT_EOS) -> None:
        self._special_ids: dict[str, int] = {}
        self._piece_ids: dict[bytes, int] = {}
        self._table: dict[int, bytes] = {i: bytes([i]) for i in range(BYTES)}
        for text in (*DEFAULT_SPECIALS, *eos):
            self._add_special(text)
        self._eos_ids = tuple(self._special_ids[text] for text in eos)

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def bos_id(self) -> int | None:
        return None

    @property
    def add_bos(self) -> bool:
        return False

    @property
    def special_ids(self) -> Mapping[str, int]:
        return dict(self._special_ids)

    def special_id(self, text: str) -> int | None:
        return self._special_ids.get(text)

    def is_special(self, token: int) -> bool:
        return token in self._special_ids.values()

    def token_bytes(self, token: int) -> bytes:
        """Raises KeyError for an id that was never handed out."""
        return self._table[token]

    def decode(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._table[int(i)] for i in ids)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def encode_with_specials(self, text: str) -> list[int]:
        """As `encode`, but each special token's text (longest first) becomes that token."""
        ids: list[int] = []
        names = sorted(self._special_ids, key=len, reverse=True)
        at = 0
        while at < len(text):
            name = next((n for n in names if text.startswith(n, at)), None)
            if name is None:
                ids += self.encode(text[at])
                at += 1
            else:
                ids.append(self._special_ids[name])
                at += len(name)
        return ids

    def encode_prompt(self, segments: Iterable[object]) -> EncodedPrompt:
        """As `encode_segments` and `key_bytes` at once."""
        segments = tuple(segments)
        return EncodedPrompt(np.array(self.encode_segments(segments), np.int32), self.key_bytes(segments))

    def encode_prompt_within(self, segments: Iterable[object], characters: int) -> EncodedPrompt | None:
        """Nothing is remembered here: all of it is new."""
        segments = tuple(segments)
        new = sum(len(segment) for segment in segments if isinstance(segment, str))
        return self.encode_prompt(segments) if new <= characters else None

    def encode_segments(self, segments: Iterable[object]) -> list[int]:
        """Segments are `str` or have a `.text` naming a special token; an unknown name is learned."""
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, str):
                ids += self.encode(segment)
            else:
                ids.append(self._add_special(str(getattr(segment, "text"))))  # noqa: B009 - duck-typed on purpose
        return ids

    def key_bytes(self, segments: Iterable[object]) -> bytes:
        """The prompt as cache key: text as UTF-8, a special token as 0xFF and its id, four bytes little-endian."""
        parts: list[bytes] = []
        for segment in segments:
            if isinstance(segment, str):
                parts.append(segment.encode("utf-8", "replace"))
            else:
                token = self._add_special(str(getattr(segment, "text")))  # noqa: B009 - duck-typed on purpose
                parts.append(special_key(token))
        return b"".join(parts)

    def key_bytes_of_ids(self, ids: Iterable[int]) -> bytes:
        specials = set(self._special_ids.values())
        return b"".join(special_key(i) if i in specials else self._table[i] for i in ids)

    def piece_id(self, piece: bytes) -> int:
        """The id of a piece that is one token, whatever its length; learned on first use.

        A special token's text gives that special token, a single byte that byte.
        """
        if len(piece) == 1:
            return piece[0]
        special = self._special_ids.get(piece.decode("utf-8", "replace"))
        if special is not None:
            return special
        if piece not in self._piece_ids:
            token = FIRST_PIECE + len(self._piece_ids)
            if token >= VOCAB_SIZE:
                raise ValueError(f"more than {VOCAB_SIZE - FIRST_PIECE} different pieces")
            self._piece_ids[piece] = token
            self._table[token] = piece
        return self._piece_ids[piece]

    def _add_special(self, text: str) -> int:
        if text not in self._special_ids:
            token = BYTES + len(self._special_ids)
            if token >= FIRST_PIECE:
                raise ValueError(f"more than {FIRST_PIECE - BYTES} special tokens")
            self._special_ids[text] = token
            self._table[token] = text.encode()
        return self._special_ids[text]
