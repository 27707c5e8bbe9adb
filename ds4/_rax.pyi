"""Compressed radix tree over bytes. See `_rax.pyx` for the picture and the invariants."""

from collections.abc import Iterator
from typing import Generic, TypeVar, final, overload

V = TypeVar("V")
D = TypeVar("D")

@final
class Rax(Generic[V]):
    """An ordered map from bytes to objects that answers prefix questions.

    Every method is atomic: under the GIL, and without it by locking the tree. An iterator whose tree changes
    raises RuntimeError at its next step.
    """

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: bytes) -> bool: ...
    def __getitem__(self, key: bytes) -> V:
        """Raises KeyError."""

    def __setitem__(self, key: bytes, value: V) -> None: ...
    def __delitem__(self, key: bytes) -> None:
        """Raises KeyError."""

    def __iter__(self) -> Iterator[bytes]:
        """Keys in the order of their bytes."""

    def insert(self, key: bytes, value: V) -> bool:
        """Stores `value`, replacing an older one. True if the key is new."""

    @overload
    def find(self, key: bytes) -> V | None: ...
    @overload
    def find(self, key: bytes, default: D) -> V | D: ...
    def remove(self, key: bytes) -> bool:
        """True if the key was there."""

    def longest_prefix(self, query: bytes, start: int = 0) -> tuple[bytes, V] | None:
        """The longest stored key that is a prefix of `query[start:]` (all of it included), with its value.

        Raises ValueError if `start` is not within the query.
        """

    def items(self, prefix: bytes = b"") -> Iterator[tuple[bytes, V]]:
        """(key, value) of all keys that start with `prefix`, in the order of their bytes."""

    def clear(self) -> None: ...
    @property
    def memory(self) -> int:
        """Bytes of the tree's own nodes, values not counted."""

    def check(self) -> None:
        """Walks the whole tree and raises AssertionError if an invariant is broken (for tests)."""
