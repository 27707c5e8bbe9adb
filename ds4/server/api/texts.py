"""Strings of request bodies, the long ones remembered: a client sends its whole history again with every turn.

A text is known by its own bytes in the body, compared in full. So it is decoded once, and it is the same object as last
time: its hash is known and comparing it costs nothing, by which rendering and encoding find what they made of it
(`ds4.bounded`, `ds4.engine.encoding`).
"""

from __future__ import annotations

from xxhash import xxh3_128_digest

from ds4._json import Node
from ds4.bounded import BoundedCache

_LONG = 256
"""Bytes from which on looking a text up costs less than what is saved later."""

_known: BoundedCache[bytes, tuple[bytes, str]] = BoundedCache(128 << 20)


def string(node: Node) -> str:
    """The text of a string node. Raises JSONError for another kind."""
    if node.end - node.start < _LONG:
        return node.as_str()
    raw = node.raw
    digest = xxh3_128_digest(raw)
    found = _known.get(digest)
    # The digest is not a cryptographic one: two texts that share it can be made.
    if found is not None and found[0] == raw:
        return found[1]
    text = node.as_str()
    # A text takes up to four bytes a character; the caches behind this one hold it as well.
    _known.put(digest, (raw, text), 5 * len(raw) + 256)
    return text
