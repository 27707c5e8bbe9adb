"""The index of checkpoints: it finds what comparing every text would find, and hashes no more than it must."""

from __future__ import annotations

import random

import pytest

from ds4._core import sha1_hex
from ds4.server.kvdir import Entry
from ds4.server.kvfile import TAIL_BYTES, Header, Layout
from ds4.server.kvindex import CheckpointIndex


def entry(text: bytes, tokens: int = 0) -> Entry:
    header = Header(7, 4, "cold", 16, tokens or len(text), 0, 1024, 1, 1, 100)
    return Entry(sha1_hex(text), 200 + len(text), Layout(header, len(text), 200 + len(text)), text[-TAIL_BYTES:])


def index_of(*texts: bytes) -> CheckpointIndex:
    index = CheckpointIndex()
    for text in texts:
        index.add(entry(text), usable=True)
    return index


@pytest.mark.parametrize("seed", range(8))
def test_it_equals_comparing_every_text(seed: int) -> None:
    """Texts of two letters share beginnings and ends; entries come, are replaced, hidden and go."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    trunk = bytes(rng.choices(b"ab", k=400))
    index = CheckpointIndex()
    known: dict[bytes, Entry] = {}
    hidden: set[bytes] = set()

    def text() -> bytes:
        return trunk[: rng.randrange(1, 400)] + bytes(rng.choices(b"ab", k=rng.choice([0, 0, 0, 3, 40])))

    found = 0
    for _ in range(600):
        what = rng.random()
        some = rng.choice(list(known)) if known and rng.random() < 0.5 else text()
        if what < 0.5:
            known[some] = entry(some, rng.randrange(1, 500))
            hidden.discard(some)
            index.add(known[some], usable=True)
        elif what < 0.6:
            known.pop(some, None)
            index.drop(sha1_hex(some))
        elif what < 0.65:
            hidden.add(some)
            index.hide(sha1_hex(some))
        else:
            key, beyond = text(), rng.choice([0, 0, 100, 400])
            fits = [t for t, e in known.items() if t not in hidden and key.startswith(t) and e.tokens > beyond]
            best = max(fits, key=len, default=None)
            assert index.find(key, beyond) == (None if best is None else known[best])
            found += best is not None
        assert len(index) == len(known)
        assert index.bytes_used == sum(e.size for e in known.values())
    assert found > 20


def test_what_is_not_usable_is_not_found() -> None:
    index = CheckpointIndex()
    index.add(entry(b"abc" * 20), usable=False)
    assert index.find(b"abc" * 30) is None
    assert len(index) == 1 and sha1_hex(b"abc" * 20) in index
    index.add(entry(b"abc" * 20), usable=True)
    assert index.find(b"abc" * 30) == index.get(sha1_hex(b"abc" * 20))


def test_texts_shorter_than_a_tail() -> None:
    index = index_of(b"a", b"abcdefg", b"abcdefgh", b"abcdefghi" * 3)
    assert [index.find(key) and index.find(key).text_bytes for key in (b"", b"b", b"ab", b"abcdefg!", b"abcdefgh")] == [  # type: ignore[union-attr]
        None,
        None,
        1,
        7,
        8,
    ]
    assert index.find(b"abcdefghi" * 4) == entry(b"abcdefghi" * 3)


def test_a_long_prompt_is_hashed_once_at_most() -> None:
    """Work is counted: 5,000 lengths cost the bytes of the longest text that is there, others nothing."""
    rng = random.Random(1)
    trunk = rng.randbytes(200_000)
    foreign = [rng.randbytes(size) for size in range(1000, 6000)]
    own = [trunk[:size] for size in (1500, 50_000, 150_000)]
    index = index_of(*foreign, *own)
    assert index.find(rng.randbytes(200_000)) is None
    assert index.hashed_bytes == 0, "no tail stands where its text would end"
    assert index.find(trunk) == entry(own[-1])
    assert index.hashed_bytes == 150_000
    assert index.find(trunk, beyond=150_000) is None
    assert index.hashed_bytes == 150_000, "nothing that promises more"


def test_a_tail_alone_is_no_match() -> None:
    index = index_of(b"x" * 50 + b"y" * TAIL_BYTES)
    assert index.find(b"z" * 50 + b"y" * TAIL_BYTES + b"more") is None
    assert index.hashed_bytes == 50 + TAIL_BYTES
