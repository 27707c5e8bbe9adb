"""`ds4._core` against models that are too simple to be wrong, on random input and random splits."""

from __future__ import annotations

import array
import hashlib
import random
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ds4 import _core

SEED = 20261130


def pieces(r: random.Random, data: bytes, most: int = 5) -> list[bytes]:
    out = []
    while data:
        n = r.randrange(0, most + 1)
        out.append(data[:n])
        data = data[n:]
    return out


# ---- SHA-1 -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sha-ni", "portable"])
def sha1_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        before = _core.use_sha1(request.param)
    except ValueError:
        pytest.skip(f"{request.param} is not available here")
    yield request.param
    _core.use_sha1(before)


def test_sha1_vectors(sha1_backend: str) -> None:
    # FIPS 180 example values.
    assert _core.sha1_hex(b"abc") == "a9993e364706816aba3e25717850c26c9cd0d89d"
    assert _core.sha1_hex(b"") == "da39a3ee5e6b4b0d3255bfef95601890afd80709"
    long = b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"
    assert _core.sha1_hex(long) == "84983e441c3bd26ebaae4aa1f95129e5e54670f1"
    assert _core.sha1_hex(b"a" * 1_000_000) == "34aa973cd4c4daa4f61eeb2bdbad27316534016f"


def test_sha1_of_every_length_and_split(sha1_backend: str) -> None:
    print("seed", SEED)
    r = random.Random(SEED)
    data = r.randbytes(400)
    for n in range(400):
        assert _core.sha1(data[:n]) == hashlib.sha1(data[:n]).digest()
    for _ in range(100):
        h = _core.Sha1()
        for piece in pieces(r, data, 150):
            h.update(piece)
            assert h.copy().digest() == h.digest()
        assert h.hexdigest() == hashlib.sha1(data).hexdigest()
    big = r.randbytes(200_001)
    for form in (bytearray(big), memoryview(big), np.frombuffer(big, dtype=np.uint8)):
        assert _core.sha1(form) == hashlib.sha1(big).digest()


def test_sha1_of_tokens_is_that_of_their_words(sha1_backend: str) -> None:
    r = random.Random(SEED)
    for n in (0, 1, 15, 16, 17, 1023, 1024, 1025, 30_000):
        ids = [r.randrange(1 << r.randrange(1, 32)) for _ in range(n)]
        want = hashlib.sha1(array.array("I", ids).tobytes()).digest()
        forms = [
            ids,
            tuple(ids),
            np.array(ids, dtype=np.uint32),
            np.array(ids, dtype=np.int64),
            np.array(ids, dtype=np.uint64),
            array.array("I", ids),
            [np.int64(i) for i in ids],
        ]
        if max(ids, default=0) < 1 << 31:
            forms.append(np.array(ids, dtype=np.int32))
        for form in forms:
            assert _core.sha1_tokens(form) == want
            h = _core.Sha1(b"x")
            h.update_tokens(form)
            assert h.digest() == hashlib.sha1(b"x" + array.array("I", ids).tobytes()).digest()


def test_sha1_refuses_what_is_no_token_id() -> None:
    h = _core.Sha1(b"before")
    for bad, error in [
        ([1, -1], ValueError),
        ([1 << 32], ValueError),
        ([1 << 80], OverflowError),
        (np.array([3, -7], dtype=np.int32), ValueError),
        (np.array([3, 1 << 40]), ValueError),
        (np.array([1 << 63], dtype=np.uint64), OverflowError),
        ([1, "2"], TypeError),
        ([1.0], TypeError),
        (b"abcd", TypeError),
        ("abcd", TypeError),
        (np.array([1.0]), TypeError),
        (np.zeros((2, 2), dtype=np.int32), TypeError),
        (np.arange(8, dtype=np.int32)[::2], TypeError),
        (np.array([1], dtype=np.int16), TypeError),
        (np.frombuffer(bytes(9), dtype=np.int32, count=2, offset=1), TypeError),
        (np.array([1], dtype=">i4"), TypeError),
        (None, TypeError),
    ]:
        with pytest.raises(error):
            _core.sha1_tokens(bad)
        with pytest.raises(error):
            h.update_tokens([5] * 3000 + bad if isinstance(bad, list) else bad)
    assert h.digest() == hashlib.sha1(b"before").digest()


def test_list_that_shrinks_while_it_is_read() -> None:
    class Shrinks:
        def __index__(self) -> int:
            ids.clear()
            return 1

    ids: list[object] = [1, Shrinks(), 3, 4]
    with pytest.raises(RuntimeError):
        _core.sha1_tokens(ids)


# ---- UTF-8 -----------------------------------------------------------------------------------------------------


def random_bytes(r: random.Random, n: int) -> bytes:
    out = b""
    while len(out) < n:
        kind = r.randrange(6)
        if kind == 0:
            out += r.randbytes(r.randrange(4))
        elif kind == 1:
            out += b"a" * r.randrange(30)
        elif kind == 2:
            out += r.choice([b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe0\x80", b"\xf0\x80\x80", b"\xc0\xaf", b"\xff"])
        else:
            text = chr(r.choice([r.randrange(0x80), r.randrange(0x80, 0x800), r.randrange(0xE000), 0x1F680]))
            out += text.encode("utf-8", "replace")[: r.randrange(1, 5)]
    return out


def test_utf8_in_any_split_is_utf8_at_once() -> None:
    print("seed", SEED)
    r = random.Random(SEED)
    for _ in range(4000):
        data = random_bytes(r, r.randrange(80))
        want = data.decode("utf-8", "replace")
        d = _core.Utf8Decoder()
        parts = []
        for piece in pieces(r, data):
            parts.append(d.feed(piece))
            # No split inside a code point, and nothing held that could be decided.
            assert len(d.pending) <= 3
            assert all(len(part.encode()) == len(part.encode("utf-8", "strict")) for part in parts)
        parts.append(d.finish())
        assert "".join(parts) == want
        assert d.pending == b""
        assert d.feed(data) + d.finish() == want


@pytest.mark.parametrize(
    ("data", "want"),
    [
        # Unicode 15, table 3-8 and the examples around it; WHATWG gives the same.
        (b"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82A", "\ufffd" * 8 + "A"),
        (b"\xed\xa0\x80\xed\xbf\xbf\xed\xafA", "\ufffd" * 8 + "A"),
        (b"\xf4\x91\x92\x93\xffA\x80\xbfB", "\ufffd" * 5 + "A" + "\ufffd" * 2 + "B"),
        (b"\xe1\x80\xe2\xf0\x91\x92\xf1\xbfA", "\ufffd" * 4 + "A"),
    ],
)
def test_utf8_maximal_subparts(data: bytes, want: str) -> None:
    for step in range(1, len(data) + 1):
        d = _core.Utf8Decoder()
        got = "".join(d.feed(data[i : i + step]) for i in range(0, len(data), step)) + d.finish()
        assert got == want


def test_utf8_text_appears_as_soon_as_it_is_whole() -> None:
    d = _core.Utf8Decoder()
    assert [d.feed(bytes([b])) for b in "aé深🚀".encode()] == ["a", "", "é", "", "", "深", "", "", "", "🚀"]
    assert d.feed(b"\xf0\x9f") == "" and d.pending == b"\xf0\x9f"
    assert d.feed(b"") == "" and d.finish() == "\ufffd" and d.finish() == ""
    assert d.feed(b"x") == "x"
    with pytest.raises(TypeError):
        d.feed("x")  # type: ignore[arg-type]


def test_surrogates_are_repaired() -> None:
    whole = "aé深🚀"
    assert _core.repair_surrogates(whole) is whole
    assert _core.repair_surrogates("") == ""
    r = random.Random(SEED)
    units = ["a", "é", "深", "🚀", "\ud83d", "\ude80", "\udfff", "\ud800"]
    for _ in range(2000):
        text = "".join(r.choice(units) for _ in range(r.randrange(12)))
        want = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        got = _core.repair_surrogates(text)
        assert got == want
        assert got.encode().decode() == got
        # The same representation as any equal string, or comparing and hashing would go wrong.
        assert hash(got) == hash(want) and sys.getsizeof(got) <= sys.getsizeof(want.encode().decode()) + 8


# ---- stop strings ----------------------------------------------------------------------------------------------


def first_match(stops: list[bytes], text: bytes) -> tuple[int, bytes] | None:
    """(start, stop) by the definition: the first end, then the longest."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if s and text[:end].endswith(s)]
        if hits:
            best = max(hits, key=len)
            return end - len(best), best
    return None


def held_by_definition(stops: list[bytes], text: bytes) -> int:
    return max((n for s in stops for n in range(len(s)) if n <= len(text) and text.endswith(s[:n])), default=0)


def test_stop_matcher_follows_its_definition() -> None:
    print("seed", SEED)
    r = random.Random(SEED)
    for _ in range(6000):
        alphabet = r.choice([b"ab", b"abc", b"a"])
        stops = [bytes(r.choices(alphabet, k=r.randrange(6))) for _ in range(r.randrange(5))]
        text = bytes(r.choices(alphabet, k=r.randrange(30)))
        match = first_match(stops, text)
        m = _core.StopMatcher(stops)
        out = b""
        fed = b""
        got = None
        for piece in pieces(r, text):
            emit, got = m.feed(piece)
            out += emit
            fed += piece
            if got is not None:
                break
            # Exact hold-back: nothing more than may still become a stop string.
            assert m.held == held_by_definition(stops, fed) and out == fed[: len(fed) - m.held]
        if match is None:
            assert got is None and m.matched is None
            assert out + m.finish() == text
            assert m.finish() == b""
        else:
            assert (got, out) == (match[1], text[: match[0]])
            assert m.matched == match[1] and m.feed(b"more") == (b"", match[1]) and m.finish() == b""


def test_stop_strings_over_token_borders() -> None:
    m = _core.StopMatcher([b"two,three"])
    assert [m.feed(p) for p in (b"one,", b"tw", b"o,thr", b"ee,four")] == [
        (b"one,", None),
        (b"", None),
        (b"", None),
        (b"", b"two,three"),
    ]
    assert _core.StopMatcher([b"ab", b"abc"]).feed(b"xabc") == (b"x", b"ab")
    assert _core.StopMatcher([b"abcd", b"bc"]).feed(b"abcd") == (b"a", b"bc")
    assert _core.StopMatcher([b"c", b"abc"]).feed(b"xabc") == (b"x", b"abc")
    whole = b"nothing here"
    assert _core.StopMatcher([b"", b"zz"]).feed(whole)[0] is whole
    assert _core.StopMatcher([]).feed(whole) == (whole, None)


def test_stop_strings_are_bounded() -> None:
    most = _core.MAX_STOP_BYTES
    m = _core.StopMatcher([b"x" * (most // 2)] * 2)
    assert m.feed(b"x" * 1000 + b"y") == (b"x" * 1000 + b"y", None)
    with pytest.raises(ValueError, match=f"at most {most}"):
        _core.StopMatcher([b"x" * most, b"y"])
    with pytest.raises(TypeError):
        _core.StopMatcher(["text"])  # type: ignore[list-item]


# ---- common prefixes -------------------------------------------------------------------------------------------


def test_common_prefix_of_bytes() -> None:
    r = random.Random(SEED)
    for _ in range(2000):
        a = r.randbytes(r.randrange(120))
        cut = r.randrange(len(a) + 1)
        b = a[:cut] + bytes([a[cut] ^ 1]) * r.randrange(40) if cut < len(a) else a + r.randbytes(r.randrange(9))
        want = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert _core.common_prefix(a, b) == _core.common_prefix(memoryview(b), bytearray(a)) == want
        assert _core.is_prefix(b, a) == a.startswith(b)
        assert _core.is_prefix(a[:cut], a)
    big = bytes(3_000_000)
    assert _core.common_prefix(big, big[:-1] + b"x") == len(big) - 1
    with pytest.raises(TypeError):
        _core.common_prefix("a", b"a")  # type: ignore[arg-type]


def test_common_prefix_of_tokens_in_every_combination() -> None:
    r = random.Random(SEED)

    def forms(ids: list[int]) -> list[object]:
        return [
            ids,
            tuple(ids),
            np.array(ids, dtype=np.int32),
            np.array(ids, dtype=np.uint32),
            np.array(ids, dtype=np.int64),
            array.array("i", ids),
            memoryview(np.array(ids, dtype=np.int32)),
        ]

    for n, m, same in [
        (0, 0, 0),
        (0, 5, 0),
        (5, 3, 3),
        (20, 30, 17),
        (16, 40, 16),
        (3000, 2500, 1041),
        (1500, 1500, 1500),
    ]:
        a = [r.randrange(130_000) for _ in range(n)]
        b = a[:same] + [r.randrange(130_000) for _ in range(m - same)]
        if same < min(n, m):
            b[same] = a[same] + 1
        for x in forms(a):
            for y in forms(b):
                assert _core.common_prefix_tokens(x, y) == same
    # Equal bits are not equal values.
    minus, large = np.array([-1], dtype=np.int32), np.array([2**32 - 1], dtype=np.uint32)
    assert _core.common_prefix_tokens(minus, large) == 0
    assert _core.common_prefix_tokens([-1], minus) == 1
    for bad in (b"abc", "abc", None, 5, [1.5], ["x"]):
        with pytest.raises(TypeError):
            _core.common_prefix_tokens(bad, [1])
    with pytest.raises(OverflowError):
        _core.common_prefix_tokens([1 << 70], [1])


# ---- strings behind their lengths


def prefixed(*strings: bytes) -> bytes:
    return b"".join(len(s).to_bytes(8, "little") + s for s in strings)


def test_prefixed_strings_against_a_loop() -> None:
    print(f"seed {SEED}")
    r = random.Random(SEED)
    for _ in range(200):
        strings = [r.randbytes(r.randrange(12)) for _ in range(r.randrange(8))]
        before, after = r.randbytes(r.randrange(4)), r.randbytes(r.randrange(20))
        data = before + prefixed(*strings) + after
        expected = [s.decode("utf-8", "replace") for s in strings]
        end = len(data) - len(after)
        assert _core.prefixed_strings(memoryview(data), len(before), len(strings)) == (expected, end)


def test_prefixed_strings_end_where_the_data_does() -> None:
    data = prefixed(b"one", b"two", b"")
    for size in range(len(data) + 1):
        ends = [end for end in (11, 22, 30) if end <= size]
        expected = ["one", "two", ""][: len(ends)], ends[-1] if ends else 0
        assert _core.prefixed_strings(data[:size], 0, 3) == expected
    assert _core.prefixed_strings(data, 0, 2) == (["one", "two"], 22)
    for length in (4, 2**31, 2**63, 2**64 - 1, 2**64 - 8):
        assert _core.prefixed_strings(length.to_bytes(8, "little") + b"abc", 0, 1) == ([], 0)
    assert _core.prefixed_strings(data, 2**62, 1) == ([], 2**62)
    with pytest.raises(ValueError, match="offset -1"):
        _core.prefixed_strings(data, -1, 1)


# ---- joining ---------------------------------------------------------------------------------------------------


def test_join_in_roomy_memory() -> None:
    r = random.Random(SEED)
    for size in (0, 1, 65_535, 65_536, 65_537, 300_000, 1 << 20):
        data = r.randbytes(size)
        cuts = sorted(r.randrange(size + 1) for _ in range(5))
        parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
        joined = _core.join_roomy([memoryview(p) if i % 2 else p for i, p in enumerate(parts)])
        assert type(joined) is bytes and joined == data and len(joined) == size and hash(joined) == hash(data)
        assert joined + b"x" == data + b"x" and joined[:-1] == data[:-1]
    assert _core.join_roomy([]) == b""
    with pytest.raises((TypeError, BufferError)):
        _core.join_roomy([b"x" * 70_000, "text"])


def test_roomy_sizes_are_few_and_near() -> None:
    sizes = [_core.roomy(n) for n in range(0, 1 << 22, 99)]
    assert all(n <= size <= n + max(4096, n // 8) for n, size in zip(range(0, 1 << 22, 99), sizes, strict=True))
    assert sizes == sorted(sizes) and len(set(sizes)) < 80


# ---- events ----------------------------------------------------------------------------------------------------


def framed(head: bytes, data: bytes, chunked: bool) -> bytes:
    folded = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    whole = head + folded + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(whole), whole) if chunked else whole


def test_events() -> None:
    r = random.Random(SEED)
    for i in range(3000):
        data = r.randbytes(r.choice((0, 1, 14, 300, 5000)))
        if i % 2:
            data = bytes(r.choice(b"a\r\n\0\xff") for _ in range(r.randrange(9)))
        head = r.choice((b"", b"data: ", b"event: response.created\ndata: "))
        for chunked in (False, True):
            assert _core.frame_event(head, data, chunked) == framed(head, data, chunked)
        if data:
            assert _core.frame_chunk(data) == b"%x\r\n%b\r\n" % (len(data), data)
    # Sizes around every number of digits.
    for size in (1, 15, 16, 255, 256, 4095, 4096, 65535, 65536, 1 << 20):
        assert _core.frame_chunk(b"x" * size).startswith(b"%x\r\n" % size)
        assert _core.frame_event(b"", b"x" * size, True).startswith(b"%x\r\n" % (size + 2))
    with pytest.raises(ValueError, match="empty chunk"):
        _core.frame_chunk(b"")
    for bad in (None, "text", bytearray(b"x")):
        with pytest.raises(TypeError):
            _core.frame_event(b"", bad)
        with pytest.raises(TypeError):
            _core.frame_chunk(bad)


# ---- token ranges


@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.int64, np.uint32, np.uint64])
def test_tokens_below(kind: type) -> None:
    rng = random.Random(SEED)
    for _ in range(200):
        ids = [rng.randrange(9) for _ in range(rng.choice([0, 1, 5, 1024, 1025, 3000]))]
        given = np.array(ids, kind) if issubclass(kind, np.generic) else kind(ids)
        limit = rng.randrange(8, 10)
        assert _core.tokens_below(given, limit) == all(token < limit for token in ids)


def test_tokens_below_zero_and_beyond_64_bits() -> None:
    assert not _core.tokens_below(np.array([3, -1], np.int32), 9)
    assert not _core.tokens_below([2**40], 9)
    with pytest.raises(OverflowError):
        _core.tokens_below([2**70], 9)
    with pytest.raises(TypeError):
        _core.tokens_below(np.zeros(3, np.float32), 9)


# ---- the bell


def in_time(thread: threading.Thread) -> None:
    thread.join(60)
    assert not thread.is_alive(), "a ring was lost"


def waiting(bell: _core.Bell) -> threading.Thread:
    thread = threading.Thread(target=bell.wait, daemon=True)
    thread.start()
    return thread


def test_a_ring_before_the_wait_counts_and_several_are_one() -> None:
    bell = _core.Bell()
    bell.ring()
    bell.ring()
    in_time(waiting(bell))
    assert not bell.wait_briefly()
    bell.ring()
    assert bell.wait_briefly()
    bell.ring()
    bell.forget()
    assert not bell.wait_briefly()


def test_who_waits_goes_on_at_a_ring_only() -> None:
    bell = _core.Bell()
    bell.soon()  # nobody waits
    thread = waiting(bell)
    for _ in range(3):
        bell.soon()
        thread.join(0.01)
        assert thread.is_alive(), "a ring that is near is none"
    bell.ring()
    in_time(thread)


def test_no_ring_is_lost() -> None:
    """Ping-pong of two threads; each ring may find the other asleep, awake or before its wait."""
    there, back = _core.Bell(), _core.Bell()
    rng = random.Random(SEED)
    rounds = 3000

    def answer() -> None:
        for _ in range(rounds):
            there.wait()
            back.ring()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()

    def ask() -> None:
        for _ in range(rounds):
            if rng.random() < 0.5:
                there.soon()
            there.ring()
            while not (rng.random() < 0.5 and back.wait_briefly()):
                if rng.random() < 0.5:
                    back.wait()
                    break

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    in_time(asking)
    in_time(thread)
