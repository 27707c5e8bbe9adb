"""What a scripted engine says: the pieces of one answer, their timing and where it fails."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

Model = Callable[[npt.NDArray[np.int32]], int]
"""Next token id as a function of all tokens of the session."""

Split = Literal["words", "chars", "bytes"] | int


@dataclass(frozen=True, slots=True)
class Script:
    """One answer: each piece (bytes, or a token id) is one token; end-of-text follows the last unless `ends` is False.

    `delay` is seconds of (simulated) work per token. `failure` is the 1-based number of the token whose step fails
    with EngineError. A script that is over when end-of-text is forbidden, or that does not end, starts again.
    """

    pieces: tuple[bytes | int, ...]
    delay: float = 0.0
    ends: bool = True
    failure: int | None = None

    @classmethod
    def of(cls, said: ScriptLike) -> Script:
        """A Script as it is; a whole text split into words; a sequence of pieces, each one token."""
        if isinstance(said, Script):
            return said
        if isinstance(said, (str, bytes)):
            return cls.text(said)
        return cls(tuple(_as_bytes(piece) for piece in said))

    @classmethod
    def text(cls, text: str | bytes, split: Split = "words", *, delay: float = 0.0, ends: bool = True) -> Script:
        """`split`: "words" (with the white space before them), "chars", "bytes", or n bytes per token."""
        data = _as_bytes(text)
        if split == "words":
            pieces = re.findall(rb"\s*\S+|\s+$", data)
        elif split == "chars":
            pieces = [c.encode() for c in data.decode()]
        else:
            size = 1 if split == "bytes" else int(split)
            pieces = [data[i : i + size] for i in range(0, len(data), size)]
        return cls(tuple(pieces), delay=delay, ends=ends)

    def fail_at(self, token: int) -> Script:
        """The same script, failing in the step that would draw its `token`-th token (1 = the prefill's last step)."""
        return replace(self, failure=token)

    def slow(self, seconds: float) -> Script:
        """The same script with `seconds` of work per token."""
        return replace(self, delay=seconds)

    def endless(self) -> Script:
        """The same script without an end: it repeats for as long as it is asked."""
        return replace(self, ends=False)


ScriptLike = Script | str | bytes | Sequence[str | bytes]


def hash_model(seed: int, *, end: int, mean_length: int = 40, alphabet: bytes = b"abcdefgh ") -> Model:
    """A model whose next byte depends on every token before it: one wrong token of state changes all that follows.

    After about `mean_length` tokens it draws `end` (an end-of-text id).
    """

    def next_token(tokens: npt.NDArray[np.int32]) -> int:
        mixed = int.from_bytes(_digest(seed, tokens), "little")
        return end if mixed % mean_length == 0 else alphabet[(mixed >> 16) % len(alphabet)]

    return next_token


def _digest(seed: int, tokens: npt.NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=8, key=seed.to_bytes(8, "little")).digest()


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
