"""The envelope of a checkpoint: its bytes, and that nothing damaged passes."""

from __future__ import annotations

import io
import os
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

import pytest
import xxhash

from ds4.errors import Cancelled, CheckpointError
from ds4.server import kvfile
from ds4.server.kvfile import DamagedFile, Header
from ds4.server.tool_memory import encode_map

TEXT = b"\xff\x01\x00\x00\x00system\nhello"
PAYLOAD = bytes(range(256)) * 41
MAP = encode_map([("call_1", b"<tool_call>x</tool_call>"), ("call_2", b"<tool_call>y</tool_call>")])


def header(payload: bytes = PAYLOAD) -> Header:
    return Header(
        model_id=7,
        quant_bits=4,
        reason="cold",
        flags=0,
        tokens=5,
        hits=0,
        ctx=1024,
        created=1000,
        used=1001,
        payload_bytes=len(payload),
    )


def write(path: Path, *, payload: bytes = PAYLOAD, tool_map: bytes = b"") -> kvfile.Layout:
    with path.open("wb") as file:
        return kvfile.write_file(file, header(payload), TEXT, lambda out: out.write(payload), tool_map)


def check(path: Path) -> None:
    """What a loader does before it uses anything."""
    with path.open("rb", buffering=0) as file:
        layout = kvfile.read_layout(file)
        kvfile.verify(file, layout)


def test_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "f"
    layout = write(path, tool_map=MAP)
    body = struct.pack("<I", len(TEXT)) + TEXT + PAYLOAD
    digest = xxhash.xxh3_128(body).digest()
    flags = 1 | 16

    def head(hits: int, used: int) -> bytes:
        fields = struct.pack("<BBBBIIIB3sQQQ", 4, 1, flags, 7, 5, hits, 1024, 3, b"", 1000, used, len(PAYLOAD))
        return b"KVC\x01" + fields

    outer = xxhash.xxh3_128(head(0, 0) + digest + MAP).digest()
    assert len(head(0, 0)) == 48
    assert path.read_bytes() == head(0, 1001) + body + MAP + b"KCS\x01" + digest + outer
    assert layout.size == path.stat().st_size == kvfile.file_bytes(len(TEXT), len(PAYLOAD), len(MAP))
    with path.open("rb", buffering=0) as file:
        assert kvfile.read_layout(file) == layout
        assert kvfile.read_text(file, layout) == TEXT
        assert kvfile.read_map(file, layout) == [
            ("call_1", b"<tool_call>x</tool_call>"),
            ("call_2", b"<tool_call>y</tool_call>"),
        ]
        assert kvfile.read_map(file, layout, {"call_2"}) == [("call_2", b"<tool_call>y</tool_call>")]
        payload = io.BufferedReader(kvfile.PayloadReader(file, layout))
        assert payload.read() == PAYLOAD
        assert payload.seek(-3, io.SEEK_END) == len(PAYLOAD) - 3
        assert payload.read(100) == PAYLOAD[-3:], "never beyond its end"


@pytest.mark.parametrize("tool_map", [b"", MAP], ids=["no map", "map"])
def test_every_flipped_bit_is_seen(tmp_path: Path, tool_map: bytes) -> None:
    """But for hits and last use, which change in place."""
    path = tmp_path / "f"
    write(path, payload=PAYLOAD[:16], tool_map=tool_map)
    good = path.read_bytes()
    check(path)
    free = {*range(12, 16), *range(32, 40)}
    with path.open("r+b", buffering=0) as file:
        for at in range(len(good)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([good[at] ^ 1 << bit]), at)
                if at in free:
                    kvfile.verify(file, kvfile.read_layout(file))
                    continue
                with pytest.raises(CheckpointError):
                    kvfile.verify(file, kvfile.read_layout(file))
                    pytest.fail(f"byte {at} bit {bit} went unseen")
            os.pwrite(file.fileno(), good[at : at + 1], at)


def test_every_truncation_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write(path, payload=PAYLOAD[:64], tool_map=MAP)
    good = path.read_bytes()
    for size in range(0, len(good), 3):
        path.write_bytes(good[:size])
        with pytest.raises(DamagedFile):
            check(path)
            pytest.fail(f"{size} of {len(good)} bytes went unseen")
    path.write_bytes(good + b"x")
    with pytest.raises(DamagedFile):
        check(path)


def test_huge_claims_allocate_nothing(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write(path)
    good = path.read_bytes()
    for at, size in ((40, 8), (48, 4)):
        path.write_bytes(good[:at] + b"\xff" * size + good[at + size :])
        with pytest.raises(DamagedFile, match="cut"):
            check(path)


def test_other_formats_are_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write(path)
    good = path.read_bytes()
    for at, value in ((0, b"X"), (3, b"\x02"), (20, b"\x02")):
        path.write_bytes(good[:at] + value + good[at + 1 :])
        with path.open("rb", buffering=0) as file, pytest.raises(CheckpointError) as caught:
            kvfile.read_layout(file)
        assert not isinstance(caught.value, DamagedFile)


def test_trailer_and_header_in_place(tmp_path: Path) -> None:
    path = tmp_path / "f"
    layout = write(path)
    with path.open("r+b", buffering=0) as file:
        longer = kvfile.rewrite_trailer(file, layout, MAP)
    check(path)
    with path.open("r+b", buffering=0) as file:
        assert kvfile.read_layout(file) == longer
        assert [call_id for call_id, _ in kvfile.read_map(file, longer)] == ["call_1", "call_2"]
        kvfile.rewrite_header(file, replace(longer.header, hits=3, used=5000))
    check(path)
    with path.open("r+b", buffering=0) as file:
        shorter = kvfile.rewrite_trailer(file, kvfile.read_layout(file), b"")
    check(path)
    assert shorter.header.hits == 3
    assert path.stat().st_size == layout.size


def test_a_payload_of_another_size_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file, pytest.raises(CheckpointError, match="10 bytes, 10496 were announced"):
        kvfile.write_file(file, header(), TEXT, lambda out: out.write(b"0123456789"))


def test_reading_can_be_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "f"
    layout = write(path)
    with path.open("rb", buffering=0) as file:
        with pytest.raises(Cancelled):
            kvfile.verify(file, layout, lambda: True)
        with pytest.raises(Cancelled):
            kvfile.PayloadReader(file, layout, lambda: True).read(1)


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_raise_nothing_else(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / "f"
    write(path, payload=PAYLOAD[:200], tool_map=MAP)
    good = path.read_bytes()
    for _ in range(200):
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(bad))
            bad[at : at + rng.randrange(6)] = rng.randbytes(rng.randrange(6))
        path.write_bytes(bad)
        if bytes(bad) == good:
            continue
        with path.open("rb", buffering=0) as file:
            try:
                layout = kvfile.read_layout(file)
                kvfile.read_text(file, layout)
                kvfile.read_map(file, layout)
                kvfile.verify(cast(BinaryIO, file), layout)
            except CheckpointError:
                continue
        assert bytes(bad[:12] + bad[16:32] + bad[40:]) == good[:12] + good[16:32] + good[40:]
