"""Which of very many checkpoints has the longest text that a prompt begins with, without opening a file.

A name is the SHA-1 of a text, so a beginning of the prompt of the same length is the text if it hashes to the name. To
hash a long prompt once for each length would cost milliseconds on the thread that runs the steps. So each usable entry
is a row of three columns, and most rows are out before anything is hashed:

    length   bytes of the text                 longer than the prompt: out
    tokens   of the session                    not more than the caller has anyway: out
    tail     the last 32 bytes of the text     do not stand in the prompt at that place: out

The rest, in practice the ones that are found, are told by one pass of SHA-1 over the prompt.

    rows     0  1  2  3 ... n-1     no order: a row that goes is replaced by the last one
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ds4.server.kvfile import TAIL_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

    from ds4.server.kvdir import Entry

_WORD = 8
_WORDS = TAIL_BYTES // _WORD


class CheckpointIndex:
    """The entries of a directory by name, and the usable ones by the text that they begin with.

    Not safe for several threads at once.
    """

    def __init__(self) -> None:
        self.bytes_used = 0
        """Of all entries together."""
        self.hashed_bytes = 0
        """What `find` has hashed so far: its work beyond looking at the columns."""
        self._entries: dict[str, Entry] = {}
        self._rows: dict[str, int] = {}
        self._names: list[str] = []
        self._lengths: npt.NDArray[np.int64] = np.zeros(64, np.int64)
        self._tokens: npt.NDArray[np.int64] = np.zeros(64, np.int64)
        self._tails: npt.NDArray[np.uint64] = np.zeros((64, _WORDS), np.uint64)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def add(self, entry: Entry, *, usable: bool) -> None:
        """Takes an entry in the place of one with the same name; only a `usable` one is ever found."""
        self.drop(entry.name)
        self._entries[entry.name] = entry
        self.bytes_used += entry.size
        if not usable:
            return
        row = len(self._names)
        if row == len(self._lengths):
            self._lengths, self._tokens, self._tails = (
                np.concatenate([column, np.zeros_like(column)]) for column in (self._lengths, self._tokens, self._tails)
            )
        self._names.append(entry.name)
        self._rows[entry.name] = row
        self._lengths[row] = entry.text_bytes
        self._tokens[row] = entry.tokens
        self._tails[row] = np.frombuffer(entry.tail.rjust(TAIL_BYTES, b"\0")[-TAIL_BYTES:], "<u8")

    def drop(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.bytes_used -= entry.size
            self.hide(name)

    def hide(self, name: str) -> None:
        """The entry stays, but is not found any more."""
        row = self._rows.pop(name, None)
        if row is None:
            return
        last = self._names.pop()
        if last != name:
            self._names[row] = last
            self._rows[last] = row
            end = len(self._names)
            for column in (self._lengths, self._tokens, self._tails):
                column[row] = column[end]

    def find(self, key: bytes, beyond: int = 0) -> Entry | None:
        """The usable entry with the longest text that `key` begins with, of those with more than `beyond` tokens."""
        rows = self._candidates(key, beyond)
        lengths = self._lengths[rows]
        best: Entry | None = None
        digest = hashlib.sha1(usedforsecurity=False)
        view = memoryview(key)
        at = 0
        for i in np.argsort(lengths, kind="stable"):
            length = int(lengths[i])
            if length > at:
                digest.update(view[at:length])
                self.hashed_bytes += length - at
                at = length
            if digest.hexdigest() == self._names[rows[i]]:
                best = self._entries[self._names[rows[i]]]
        return best

    def _candidates(self, key: bytes, beyond: int) -> npt.NDArray[np.intp]:
        """Rows that pass all three columns."""
        count = len(self._names)
        rows = np.flatnonzero((self._lengths[:count] <= len(key)) & (self._tokens[:count] > beyond))
        if not len(rows):
            return rows
        padded = key if len(key) >= _WORD else key.ljust(_WORD, b"\0")
        # The eight bytes at every offset of the key, as a number each.
        words: npt.NDArray[np.uint64] = np.ndarray((len(padded) - _WORD + 1,), "<u8", padded, strides=(1,))
        for word in reversed(range(_WORDS)):
            at = self._lengths[rows] - _WORD * (_WORDS - word)
            # Where a text is shorter than a tail, its first words say nothing.
            rows = rows[(at < 0) | (words[np.maximum(at, 0)] == self._tails[rows, word])]
            if not len(rows):
                break
        return rows
