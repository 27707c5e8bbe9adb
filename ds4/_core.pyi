"""Bytes and tokens: SHA-1, incremental UTF-8, surrogate repair, stop strings, common prefixes, event framing.

Token sequences are list or tuple of int, or any C-contiguous one-dimensional buffer of 4 or 8 byte integers (NumPy
array, `array.array`, memoryview).
"""

from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer

Tokens = Sequence[int] | Buffer

SHA1_BACKEND: str
"""What computes SHA-1 on this CPU: "sha-ni" or "portable"."""

def sha1(data: Buffer) -> bytes:
    """The digest of `data`, 20 bytes (FIPS 180-4)."""

def sha1_hex(data: Buffer) -> str:
    """The digest as 40 lower-case hexadecimal digits."""

def sha1_tokens(tokens: Tokens) -> bytes:
    """The digest of token ids as little-endian unsigned 32-bit words, without intermediate Python objects.

    Raises TypeError for what is no token sequence, ValueError for an id outside 0 .. 2**32 - 1.
    """

@final
class Sha1:
    """SHA-1 in pieces. Calls on one object are serialised."""

    def __init__(self, data: Buffer = b"") -> None: ...
    def update(self, data: Buffer) -> None: ...
    def update_tokens(self, tokens: Tokens) -> None: ...
    def digest(self) -> bytes:
        """The digest of everything so far; more may follow."""
    def hexdigest(self) -> str: ...
    def copy(self) -> Sha1: ...

@final
class Utf8Decoder:
    """Bytes in any split in, whole code points out; the pieces together are the decoding of the bytes together.

    Invalid input becomes U+FFFD, one for each maximal subpart of an ill-formed sequence (Unicode 15 section 3.9,
    WHATWG Encoding). At most three bytes are held back.
    """

    def feed(self, data: bytes) -> str: ...
    def finish(self) -> str:
        """What was held back as U+FFFD ("" if nothing); the decoder starts anew."""
    @property
    def pending(self) -> bytes:
        """The held back bytes."""

def repair_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and unpaired surrogates replaced by U+FFFD; itself if it has none."""

MAX_STOP_BYTES: int
"""Stop strings may have this many bytes together: 2**20."""

@final
class StopMatcher:
    """Finds the first stop string in a byte stream and holds back exactly what may still become one.

    The first position at which any stop string is complete decides; of those that end there the longest (which starts
    first) counts. So the result is the same for every split of the text, and no byte after the match is needed.
    Empty stop strings are ignored. Raises ValueError above MAX_STOP_BYTES.
    """

    def __init__(self, stops: Sequence[bytes]) -> None: ...
    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        """(text that no match can claim any more, the stop string that was found or None).

        On a match the text ends right before it. After a match everything is swallowed and the match repeated.
        """
    def finish(self) -> bytes:
        """The text still held back; b"" after a match."""
    @property
    def matched(self) -> bytes | None: ...
    @property
    def held(self) -> int:
        """Bytes held back now."""

def prefixed_strings(data: Buffer, at: int, count: int) -> tuple[list[str], int]:
    """(strings, where the last one ends) of `count` strings from offset `at`, each behind its length in bytes.

    Lengths have 8 bytes, little endian; bytes that are not UTF-8 become U+FFFD. Ends before the first string that
    `data` does not hold whole: fewer came then. Raises ValueError for a negative offset.
    """

def common_prefix(a: Buffer, b: Buffer) -> int:
    """Length in bytes of the equal prefix."""

def is_prefix(prefix: Buffer, data: Buffer) -> bool:
    """Does `data` begin with `prefix`?"""

def common_prefix_tokens(a: Tokens, b: Tokens) -> int:
    """Length in tokens of the equal prefix; the two may be of different kinds.

    Raises TypeError for what is no token sequence, OverflowError for an int of more than 64 bits.
    """

def tokens_below(tokens: Tokens, limit: int) -> bool:
    """Is each id one of 0 to `limit` - 1? Raises as `common_prefix_tokens`."""

def use_sha1(name: str) -> str:
    """Chooses "sha-ni" or "portable"; returns what was in use. For tests. Raises ValueError for what the CPU lacks."""

def frame_event(head: bytes, data: bytes, chunked: bool = False) -> bytes:
    """A server-sent event: `head` (all lines before the data, and `data: `), `data` and an empty line.

    Line breaks in `data` begin further `data:` lines. `chunked`: as one chunk of a body (RFC 9112 section 7.1).
    """

def frame_chunk(data: bytes) -> bytes:
    """`data` as one chunk of a body. Raises ValueError for none, which would end the body."""

def roomy(size: int) -> int:
    """A size of memory for `size` bytes, at most an eighth or 4 KiB more, with few different values.

    What grows a little every time then fits where its forerunner was freed, whose pages are at hand.
    """

def join_roomy(parts: Sequence[Buffer]) -> bytes:
    """`b"".join(parts)`, in memory of a `roomy` size."""

class Bell:
    """One thread waits, any other rings; a ring before the wait counts, several count as one.

    A core that has nothing to do falls asleep, and a thread on it takes 50 to 150 us to wake. Who is told that a ring
    is near stays awake for a millisecond, and then gets the interpreter at the ring, before the one that rings goes on.
    """

    def wait(self) -> None:
        """Until somebody has rung since the last wait. The interpreter is free meanwhile. One thread at a time."""
    def wait_briefly(self) -> bool:
        """As `wait`, awake and for at most 0.3 ms. Whether somebody has rung."""
    def forget(self) -> None:
        """Rings until now do not count."""
    def ring(self) -> None: ...
    def soon(self) -> None:
        """A ring is near. Nothing happens unless somebody waits."""
