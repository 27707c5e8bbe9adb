"""Saved sessions: continuing after a load is bit-equal to never having saved; damage and lies are refused."""

from __future__ import annotations

import io
import json
import struct
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4 import _cpu
from ds4.engine import payload
from ds4.engine.session import ModelHandle, Session
from ds4.errors import CheckpointError
from tests.support.native_model import BACKENDS, F32, open_model, step
from tests.support.tiny_llama import TinyLlama

CTX = 256


@pytest.fixture(scope="module", params=BACKENDS)
def model(request: pytest.FixtureRequest) -> ModelHandle:
    return open_model(TinyLlama.make(layers=2), request.param)[0]


def random_tokens(n: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 320, n)]


def saved(model: ModelHandle, tokens: list[int]) -> bytes:
    session = Session(model, CTX)
    if tokens:
        session.sync(tokens)
    file = io.BytesIO()
    expected = session.payload_bytes()
    assert session.save(file) == len(file.getvalue()) == expected
    return file.getvalue()


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 200])
def test_load_then_continue_equals_never_saved(model: ModelHandle, n: int) -> None:
    tokens = random_tokens(n, n)
    data = saved(model, tokens)
    restored, straight = Session(model, CTX), Session(model, CTX)
    restored.sync(random_tokens(120, 99))
    restored.load(io.BytesIO(data))
    assert restored.tokens.tolist() == tokens
    if n:
        straight.sync(tokens)
        assert np.array_equal(restored.logits(), straight.logits())
    assert saved(model, tokens) == data
    more = random_tokens(40, 1000 + n)
    step(model, (restored, more), (straight, more))
    assert np.array_equal(restored.logits(), straight.logits())


def test_payload_moves_between_backends() -> None:
    tokens = random_tokens(100, 3)
    first, second = (open_model(TinyLlama.make(layers=2), name)[0] for name in BACKENDS)
    session = Session(second, CTX)
    data = saved(first, tokens)
    session.load(io.BytesIO(data))
    again = io.BytesIO()
    session.save(again)
    assert again.getvalue() == data


def test_payload_without_logits(model: ModelHandle) -> None:
    session, other = Session(model, CTX), Session(model, CTX)
    model.native.step([(session.native, [1, 2, 3], None, False)])
    file = io.BytesIO()
    session.save(file)
    file.seek(0)
    other.load(file)
    assert other.tokens.tolist() == [1, 2, 3] and not other.has_logits
    assert other.sync([1, 2, 3]) == 2
    session.sync([1, 2, 3])
    assert np.array_equal(other.logits(), session.logits())


def test_other_bytes_may_surround_the_payload(model: ModelHandle) -> None:
    data = saved(model, [1, 2, 3])
    file = io.BytesIO(b"before" + data + b"after")
    file.seek(6)
    session = Session(model, CTX)
    session.load(file)
    assert file.read() == b"after" and session.n_tokens == 3


class Counting:
    """A native session that counts the calls that may have to wait for a step of others."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += name in ("export_rows", "import_rows")
        return getattr(self._native, name)


def test_buffers_share_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """96 small buffers are saved and loaded with one call, not one each; larger ones with one for every few MB."""
    model = open_model(TinyLlama.make(layers=48), "cpu")[0]
    session, restored = Session(model, CTX), Session(model, CTX)
    session.sync(random_tokens(60, 21))
    _, _, dtype, heads, width, *_ = model.native.state_specs[0]
    row, rows = _cpu.row_bytes(dtype, heads * width), model.native.state_bytes(60)
    for limit in (payload._GROUP, 100 * row + 1):
        monkeypatch.setattr(payload, "_GROUP", limit)
        least, most = -(-rows // limit), rows // (limit - row) + 1
        file = io.BytesIO()
        saving = Counting(session.native)
        payload.write_payload(model.native, saving, model.family, model.fingerprint, file)  # type: ignore[arg-type]
        file.seek(0)
        loading = Counting(restored.native)
        payload.read_payload(model.native, loading, model.family, model.fingerprint, file)  # type: ignore[arg-type]
        assert least <= saving.calls <= most and least <= loading.calls <= most
        again = io.BytesIO()
        restored.save(again)
        assert again.getvalue() == file.getvalue()


def test_saves_and_loads_beside_steps() -> None:
    """Steps of another session come between the parts of a save and of a load."""
    model = open_model(TinyLlama.make(layers=48), "cpu")[0]
    session, other, restored = (Session(model, CTX) for _ in range(3))
    session.sync(random_tokens(200, 22))
    alone = io.BytesIO()
    session.save(alone)
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            if other.n_tokens == CTX:
                other.clear()
            model.native.step([(other.native, [1], None, False)])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(3):
            file = io.BytesIO()
            session.save(file)
            file.seek(0)
            restored.load(file)
            assert file.getvalue() == alone.getvalue()
            again = io.BytesIO()
            restored.save(again)
            assert again.getvalue() == alone.getvalue()
    finally:
        done.set()
        thread.join()


def test_the_allocator_is_left_with_nothing_large(tmp_path: Path) -> None:
    """It would keep a buffer of some MB for good: 16 slots of a small model have 5 MB more then."""
    model = open_model(TinyLlama.make(layers=48), "cpu")[0]
    session, restored = Session(model, CTX), Session(model, CTX)
    session.sync(random_tokens(250, 24))
    size = session.payload_bytes()
    tracemalloc.start()
    try:
        with (tmp_path / "saved").open("w+b") as file:
            session.save(file)
            file.seek(0)
            restored.load(file)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert restored.tokens.tolist() == session.tokens.tolist()
    assert size > 1 << 20 and peak < size // 4


def test_rows_that_do_not_fit_are_refused() -> None:
    model = open_model(TinyLlama.make(layers=2), "cpu")[0]
    session = Session(model, CTX)
    session.sync(random_tokens(10, 23))
    _, _, dtype, heads, width, *_ = model.native.state_specs[0]
    row = _cpu.row_bytes(dtype, heads * width)
    for which, size in (
        ([(4, 0, 1)], row),
        ([(0, 0, 11)], 11 * row),
        ([(0, -1, 2)], 2 * row),
        ([(0, 11, 0)], 0),
        ([(0, 0, -1)], 0),
        ([(0, 0, 1)], row + 1),
        ([(0, 0, 2), (1, 0, 1)], 2 * row),
        ([(0, 0, 1), (1, 0, 2**62)], row),
        ([], 1),
    ):
        with pytest.raises(ValueError, match=r"rows|does not exist"):
            session.native.export_rows(which, bytearray(size))
    restored = Session(model, CTX)
    restored.native.begin_import(session.tokens, 10)
    with pytest.raises(ValueError, match="rows"):
        restored.native.import_rows([(0, 9, 2)], bytes(2 * row))


class Pipe(io.RawIOBase):
    """A stream that cannot seek and gives a few bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._file.read(min(size, 1000))


def test_streams(model: ModelHandle) -> None:
    data = saved(model, random_tokens(90, 4))
    session = Session(model, CTX)
    session.load(Pipe(data))  # type: ignore[arg-type]
    assert session.n_tokens == 90
    with pytest.raises(CheckpointError, match="cut"):
        session.load(Pipe(data[:-1]))  # type: ignore[arg-type]
    assert session.n_tokens == 0


def refused(model: ModelHandle, data: bytes, match: str = "") -> None:
    session = Session(model, CTX)
    session.sync([1, 2, 3])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=match):
            session.load(io.BytesIO(data))
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()
    assert session.n_tokens == 0 and not session.has_logits
    session.sync([1, 2])


def test_every_cut_is_refused(model: ModelHandle) -> None:
    data = saved(model, random_tokens(5, 5))
    header_end = 16 + struct.unpack_from("<I", data, 12)[0]
    borders = {0, 1, 8, 12, 15, 16, 17, header_end - 1, header_end, header_end + 19, header_end + 20}
    borders |= {header_end + 20 + 4 * 320, len(data) - 1, *range(header_end, len(data), 997)}
    for cut in sorted(borders):
        # What the file's length gives away is refused before the first token is read.
        refused(model, data[:cut], "which promises" if cut >= header_end else "cut in its (prefix|header)")


def rewritten(data: bytes, **changes: Any) -> bytes:
    size = struct.unpack_from("<I", data, 12)[0]
    header = json.loads(data[16 : 16 + size])
    for key, value in changes.items():
        if value is ...:
            del header[key]
        else:
            header[key] = value
    encoded = json.dumps(header).encode()
    return data[:12] + struct.pack("<I", len(encoded)) + encoded + data[16 + size :]


def test_lies_in_the_header_are_refused(model: ModelHandle) -> None:
    data = saved(model, random_tokens(5, 6))
    assert rewritten(data)[16:] != b""
    Session(model, CTX).load(io.BytesIO(rewritten(data)))
    header = json.loads(data[16 : 16 + struct.unpack_from("<I", data, 12)[0]])
    buffers = header["buffers"]
    refused(model, b"X" + data[1:], "magic")
    refused(model, data[:8] + struct.pack("<I", 3) + data[12:], "version 3")
    refused(model, data[:12] + struct.pack("<I", 0xFFFFFFFF) + data[16:], "header of 4294967295 bytes")
    refused(model, data[:12] + struct.pack("<I", 0) + data[16:], "header of 0 bytes")
    refused(model, rewritten(data, family="mamba"), "family 'mamba'.*'llama'")
    refused(model, rewritten(data, fingerprint="other"), "fingerprint")
    refused(model, rewritten(data, vocab=321), "321")
    refused(model, rewritten(data, n_tokens=257), "257 tokens.*256")
    refused(model, rewritten(data, n_tokens=6), "rows")
    refused(model, rewritten(data, n_tokens=2**60), "n_tokens is not a count")
    refused(model, rewritten(data, n_tokens=-1), "n_tokens is not a count")
    refused(model, rewritten(data, n_tokens=True), "n_tokens is not a count")
    refused(model, rewritten(data, n_tokens=5.0), "n_tokens is not a count")
    refused(model, rewritten(data, logits=1), "logits is not a boolean")
    refused(model, rewritten(data, logits=...), "members")
    refused(model, rewritten(data, extra=1), "members")
    refused(model, rewritten(data, buffers=buffers[:-1]), "3 state buffers.*4")
    refused(model, rewritten(data, buffers=buffers[::-1]), "k.1|v.1")
    refused(model, rewritten(data, buffers={}), "not a list")
    refused(model, rewritten(data, buffers=[1]), "members")
    for member, value in (("type", "F32"), ("kind", "ring"), ("rows", 4), ("width", 16), ("heads", 1), ("name", "x")):
        refused(model, rewritten(data, buffers=[{**buffers[0], member: value}, *buffers[1:]]), "state buffer")
    refused(model, data[:16] + b"[" * (len(data) - 16), "damaged")
    empty = saved(model, [])
    refused(model, rewritten(empty, logits=True), "no tokens")


def test_damage_in_tokens_and_logits_is_refused(model: ModelHandle) -> None:
    data = saved(model, random_tokens(5, 7))
    start = 16 + struct.unpack_from("<I", data, 12)[0]
    for bad in (320, -1, 2**31 - 1):
        refused(model, data[:start] + struct.pack("<i", bad) + data[start + 4 :], "outside the vocabulary")
    nan = struct.pack("<f", float("nan"))
    refused(model, data[: start + 20] + nan + data[start + 24 :], "not a number")


def test_random_header_damage_never_escapes(model: ModelHandle) -> None:
    """Any byte of prefix and header flipped: refused, or (a digit in the fingerprint excepted) harmless."""
    data = bytearray(saved(model, random_tokens(5, 8)))
    size = 16 + struct.unpack_from("<I", data, 12)[0]
    seed = 9
    print("seed", seed)
    rng = np.random.default_rng(seed)
    session = Session(model, CTX)
    for _ in range(400):
        at, bit = int(rng.integers(0, size)), int(rng.integers(0, 8))
        data[at] ^= 1 << bit
        with pytest.raises(CheckpointError):
            session.load(io.BytesIO(bytes(data)))
        data[at] ^= 1 << bit
        assert session.n_tokens == 0


def test_io_errors_pass_and_clear(model: ModelHandle) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 1500:
                raise OSError(5, "injected")
            return super().read(size)

    data = saved(model, random_tokens(90, 10))
    session = Session(model, CTX)
    session.sync([1])
    with pytest.raises(OSError, match="injected"):
        session.load(Broken(data))
    assert session.n_tokens == 0


def test_f32_state_is_another_layout(model: ModelHandle) -> None:
    wide = open_model(TinyLlama.make(layers=2), "reference", kv_type=F32)[0]
    refused(wide, saved(model, [1, 2]), "state buffer.*F16.*F32")


def test_header_can_be_read_alone(model: ModelHandle) -> None:
    header = payload.read_header(io.BytesIO(saved(model, [1, 2])))
    assert (header.family, header.n_tokens, header.logits, len(header.buffers)) == ("llama", 2, True, 4)
