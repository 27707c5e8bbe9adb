"""Content codings: what was packed comes back, damage is found at every byte, and a bomb stays small."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
import zstandard

from ds4.server.coding import CodingError, coding_of, decode

Pack = Callable[[bytes], bytes]


def raw_deflate(data: bytes) -> bytes:
    squeeze = zlib.compressobj(wbits=-15)
    return squeeze.compress(data) + squeeze.flush()


def streamed_zstd(data: bytes) -> bytes:
    """Without the content's size in the head, in several blocks, as clients send what they do not know the end of."""
    squeeze = zstandard.ZstdCompressor().compressobj()
    parts = [
        squeeze.compress(data[i : i + 999]) + squeeze.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for i in range(0, len(data), 999)
    ]
    return b"".join(parts) + squeeze.flush()


PACKS: list[tuple[str, Pack]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstandard.compress),
    ("zstd", streamed_zstd),
]


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("", ""),
        ("identity", ""),
        ("gzip", "gzip"),
        (" X-GZIP ", "gzip"),
        ("deflate", "deflate"),
        ("zstd, identity", "zstd"),
    ],
)
def test_names(header: str, name: str):
    assert coding_of(header) == name


@pytest.mark.parametrize("header", ["br", "gzip, gzip", "zstd,gzip", "compress", "gzip;q=1", "x" * 10_000])
def test_unknown_names(header: str):
    with pytest.raises(CodingError, match=r"(?i)content-encoding") as caught:
        coding_of(header)
    assert caught.value.status == 415
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("name", "pack"), PACKS)
@pytest.mark.parametrize("seed", range(5))
def test_what_was_packed_comes_back_and_the_limit_is_exact(name: str, pack: Pack, seed: int):
    rng = random.Random(seed)
    print("seed", seed)
    size = rng.choice([0, 1, 5, 1000, 200_000, 3_000_000])
    data = rng.randbytes(size // 2) + b"z" * (size - size // 2)
    packed = pack(data)
    assert decode(name, packed, size) == data
    if size:
        with pytest.raises(CodingError) as caught:
            decode(name, packed, size - 1)
        assert caught.value.status == 413


@pytest.mark.parametrize(("name", "pack"), PACKS)
def test_a_body_cut_anywhere_is_refused(name: str, pack: Pack):
    packed = pack(b"some text, some text, some more text" * 3)
    for cut in range(len(packed)):
        with pytest.raises(CodingError) as caught:
            decode(name, packed[:cut], 10_000)
        assert caught.value.status == 400
        assert name in str(caught.value)


@pytest.mark.parametrize(("name", "pack"), PACKS)
def test_damage_is_an_error_or_harmless_never_a_crash(name: str, pack: Pack):
    rng = random.Random(3)
    packed = pack(bytes(rng.choice(b"abc") for _ in range(500)))
    for _ in range(500):
        damaged = bytearray(packed)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            assert len(decode(name, bytes(damaged), 10_000)) <= 10_000
        except CodingError as error:
            assert error.status in (400, 413)


@pytest.mark.parametrize(("name", "pack"), PACKS)
def test_a_bomb_costs_little_more_than_the_limit(name: str, pack: Pack):
    limit = 4 << 20
    bomb = pack(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(CodingError) as caught:
            decode(name, bomb, limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.status == 413
    assert peak < 4 * limit, f"{peak} bytes held for a limit of {limit}"


def test_a_zstd_frame_with_a_huge_window_is_refused():
    """The decoder would have to keep as much as the head asks for; RFC 9659 allows 8 MiB."""
    params = zstandard.ZstdCompressionParameters(window_log=27, compression_level=1)
    squeeze = zstandard.ZstdCompressor(compression_params=params).compressobj()
    packed = squeeze.compress(b"x" * 1000) + squeeze.flush()
    with pytest.raises(CodingError) as caught:
        decode("zstd", packed, 10_000)
    assert caught.value.status == 400
