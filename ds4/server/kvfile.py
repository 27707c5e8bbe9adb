"""One checkpoint file: a session payload in an envelope that says what it is, selects it by text and seals it.

    header 48 | text size 4 | text | payload | tool map, title (by flag) | seal 36

The byte table and the refusals are in `docs/formats/kv.md`. Everything here works on open files and knows neither
directory nor policy. Nothing of a size that a file claims is allocated before the size was compared with the file's.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, cast

import xxhash

from ds4.errors import Cancelled, CheckpointError
from ds4.server.tool_memory import decode_map

if TYPE_CHECKING:
    from ds4.engine.types import CancelCheck

MAGIC = b"KVC"
VERSION = 1
PAYLOAD_ABI = 3
"""The payload of `docs/formats/session-payload.md`. Other programs' files with this envelope have 0 to 2."""

REASONS = ("unknown", "cold", "continued", "evict", "shutdown", "agent-system", "agent-session")

TOOL_MAP, RESPONSES_VISIBLE, THINKING_VISIBLE, SESSION_TITLE, SEAL = 1, 2, 4, 8, 16
"""Flags. The first, the fourth and the last announce a section behind the payload, in this order."""

_HEADER = struct.Struct("<3sBBBBBIIIB3sQQQ")
_U32 = struct.Struct("<I")
_SEAL = struct.Struct("<3sB16s16s")
HEADER_BYTES = _HEADER.size
TEXT_AT = HEADER_BYTES + _U32.size
SEAL_BYTES = _SEAL.size
TAIL_BYTES = 32
"""The end of a text by which an index tells most texts apart without reading them."""
_CHUNK = 4 << 20
PACE_BYTES = 8 << 20


class DamagedFile(CheckpointError):
    """The file contradicts itself: it cannot have been written like this and never becomes usable."""


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed 48 bytes. `created` and `used` are Unix seconds; `model_id` 1..255 is derived from the weights."""

    model_id: int
    quant_bits: int
    reason: str
    flags: int
    tokens: int
    hits: int
    ctx: int
    created: int
    used: int
    payload_bytes: int

    @property
    def key_kind(self) -> str:
        if self.flags & RESPONSES_VISIBLE:
            return "responses-visible"
        return "thinking-visible" if self.flags & THINKING_VISIBLE else "token-text"


def pack_header(h: Header) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        h.quant_bits,
        REASONS.index(h.reason),
        h.flags,
        h.model_id,
        h.tokens,
        h.hits & 0xFFFFFFFF,
        h.ctx,
        PAYLOAD_ABI,
        bytes(3),
        h.created,
        h.used,
        h.payload_bytes,
    )


def unpack_header(data: bytes | memoryview) -> Header:
    """Raises CheckpointError for another format or version, DamagedFile for a header that nobody writes."""
    if len(data) < HEADER_BYTES:
        raise DamagedFile(f"{len(data)} bytes, the header alone has {HEADER_BYTES}")
    fields = _HEADER.unpack_from(data)
    magic, version, quant, reason, flags, model, tokens, hits, ctx, abi, reserved, created, used, size = fields
    if magic != MAGIC or version != VERSION or abi != PAYLOAD_ABI:
        raise CheckpointError(
            f"magic {magic!r}, version {version}, payload {abi}; this build reads {MAGIC!r}, {VERSION}, {PAYLOAD_ABI}"
        )
    if any(reserved):
        raise DamagedFile(f"reserved bytes {reserved!r}, expected zeros")
    if tokens == 0:
        raise DamagedFile("a checkpoint of no tokens")
    name = REASONS[reason] if reason < len(REASONS) else REASONS[0]
    return Header(model, quant, name, flags, tokens, hits, ctx, created, used, size)


@dataclass(frozen=True, slots=True)
class Layout:
    """A header and where the sections of its file lie, all inside the file's size."""

    header: Header
    text_bytes: int
    size: int

    @property
    def payload_at(self) -> int:
        return TEXT_AT + self.text_bytes

    @property
    def trailer_at(self) -> int:
        return self.payload_at + self.header.payload_bytes

    @property
    def sealed(self) -> bool:
        return bool(self.header.flags & SEAL)

    @property
    def seal_at(self) -> int:
        return self.size - SEAL_BYTES if self.sealed else self.size


def file_bytes(text_bytes: int, payload_bytes: int, trailer_bytes: int = 0) -> int:
    """Size of a sealed file."""
    return TEXT_AT + text_bytes + payload_bytes + trailer_bytes + SEAL_BYTES


def read_layout(file: BinaryIO) -> Layout:
    """Reads 52 bytes and compares them with the file's size. Raises CheckpointError, DamagedFile, OSError."""
    descriptor = file.fileno()
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, TEXT_AT, 0)
    header = unpack_header(head)
    if len(head) < TEXT_AT:
        raise DamagedFile(f"{size} bytes, header and text size alone have {TEXT_AT}")
    (text_bytes,) = _U32.unpack_from(head, HEADER_BYTES)
    layout = Layout(header, text_bytes, size)
    least = layout.trailer_at + (SEAL_BYTES if layout.sealed else 0)
    if size < least:
        raise DamagedFile(f"cut: {size} of at least {least} bytes")
    return layout


# ---- writing


def write_file(
    file: BinaryIO,
    header: Header,
    text: bytes,
    save: Callable[[BinaryIO], int],
    tool_map: bytes = b"",
    pace: Callable[[], None] | None = None,
) -> Layout:
    """Writes a whole file at the start of the empty `file`: `save` writes the payload and returns its bytes.

    `pace` is called after every `PACE_BYTES`: a place to let the disk follow.

    Raises CheckpointError when `save` writes another number of bytes than the header announces, and its errors.
    """
    flags = (header.flags & ~TOOL_MAP) | SEAL | (TOOL_MAP if tool_map else 0)
    header = replace(header, flags=flags)
    file.write(pack_header(header))
    body = _Hashing(file, pace)
    body.write(_U32.pack(len(text)))
    body.write(text)
    written = save(cast("BinaryIO", body))
    if written != header.payload_bytes:
        raise CheckpointError(f"the payload has {written} bytes, {header.payload_bytes} were announced")
    digest = body.digest()
    file.write(tool_map)
    file.write(_seal(header, digest, tool_map))
    return Layout(header, len(text), file_bytes(len(text), written, len(tool_map)))


def rewrite_trailer(file: BinaryIO, layout: Layout, tool_map: bytes) -> Layout:
    """Replaces the tool map of a sealed file in place, keeping text and payload. Torn, it fails its seal."""
    descriptor = file.fileno()
    body, _ = _read_seal(descriptor, layout)
    header = layout.header
    header = replace(header, flags=(header.flags & ~TOOL_MAP) | (TOOL_MAP if tool_map else 0))
    trailer = tool_map + _seal(header, body, tool_map)
    _write_all(descriptor, trailer, layout.trailer_at)
    os.ftruncate(descriptor, layout.trailer_at + len(trailer))
    _write_all(descriptor, pack_header(header), 0)
    os.fsync(descriptor)
    return Layout(header, layout.text_bytes, layout.trailer_at + len(trailer))


def rewrite_header(file: BinaryIO, header: Header) -> None:
    """Writes the header again: for `hits` and `used`, which the seal does not cover."""
    _write_all(file.fileno(), pack_header(header), 0)


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count


def _seal(header: Header, body: bytes, sections: bytes) -> bytes:
    return _SEAL.pack(b"KCS", 1, body, _outer(header, body, sections))


def _outer(header: Header, body: bytes, sections: bytes) -> bytes:
    fixed = pack_header(replace(header, hits=0, used=0))
    return xxhash.xxh3_128(fixed + body + sections).digest()


class _Hashing(io.RawIOBase):
    """Passes what is written on to a file and hashes it."""

    def __init__(self, file: BinaryIO, pace: Callable[[], None] | None) -> None:
        self._file = file
        self._pace = pace
        self._since = 0
        self._hash = xxhash.xxh3_128()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        self._file.write(view)
        self._hash.update(view)
        self._since += view.nbytes
        if self._pace is not None and self._since >= PACE_BYTES:
            self._since = 0
            self._pace()
        return view.nbytes

    def digest(self) -> bytes:
        digest: bytes = self._hash.digest()
        return digest


# ---- reading


def read_text(file: BinaryIO, layout: Layout) -> bytes:
    """The key text, already known to lie inside the file."""
    return _read(file.fileno(), layout.text_bytes, TEXT_AT)


def read_tail(file: BinaryIO, layout: Layout) -> bytes:
    """The last `TAIL_BYTES` of the key text, all of a shorter one."""
    count = min(TAIL_BYTES, layout.text_bytes)
    return _read(file.fileno(), count, layout.payload_at - count)


def verify(file: BinaryIO, layout: Layout, cancel: CancelCheck | None = None) -> None:
    """Reads the whole file against its seal. Raises DamagedFile, Cancelled, OSError."""
    if not layout.sealed:
        raise DamagedFile("the file has no seal")
    descriptor = file.fileno()
    body, outer = _read_seal(descriptor, layout)
    found = xxhash.xxh3_128()
    at = HEADER_BYTES
    while at < layout.trailer_at:
        if cancel is not None and cancel():
            raise Cancelled("cancelled while a checkpoint was read")
        data = _read(descriptor, min(_CHUNK, layout.trailer_at - at), at)
        found.update(data)
        at += len(data)
    if found.digest() != body:
        raise DamagedFile("text or payload do not match their checksum")
    _check_outer(descriptor, layout, body, outer)


def verify_trailer(file: BinaryIO, layout: Layout) -> None:
    """Checks header and tool map against the seal, without reading the payload. Raises DamagedFile, OSError."""
    descriptor = file.fileno()
    _check_outer(descriptor, layout, *_read_seal(descriptor, layout))


def _check_outer(descriptor: int, layout: Layout, body: bytes, outer: bytes) -> None:
    sections = _read(descriptor, layout.seal_at - layout.trailer_at, layout.trailer_at)
    if _outer(layout.header, body, sections) != outer:
        raise DamagedFile("header or tool map do not match their checksum")


def _read_seal(descriptor: int, layout: Layout) -> tuple[bytes, bytes]:
    magic, version, body, outer = _SEAL.unpack(_read(descriptor, SEAL_BYTES, layout.seal_at))
    if magic != b"KCS" or version != 1:
        raise DamagedFile("the seal is not one")
    return body, outer


def read_map(file: BinaryIO, layout: Layout, wanted: Collection[str] | None = None) -> list[tuple[str, bytes]]:
    """(id, block) of the tool map, only those in `wanted` if given; what is malformed is left out."""
    if not layout.header.flags & TOOL_MAP:
        return []
    return decode_map(_read(file.fileno(), layout.seal_at - layout.trailer_at, layout.trailer_at), wanted)


def _read(descriptor: int, count: int, at: int) -> bytes:
    """Exactly `count` bytes. Raises DamagedFile when the file ends before (it was cut after it was opened)."""
    parts: list[bytes] = []
    while count > 0:
        part = os.pread(descriptor, count, at)
        if not part:
            raise DamagedFile(f"cut: the file ends at {at}, {count} bytes more were announced")
        parts.append(part)
        count -= len(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class PayloadReader(io.RawIOBase):
    """The payload section as a file of its own: whoever reads it sees neither what is before nor what is behind."""

    def __init__(self, file: BinaryIO, layout: Layout, cancel: CancelCheck | None = None) -> None:
        self._descriptor = file.fileno()
        self._start = layout.payload_at
        self._size = layout.header.payload_bytes
        self._at = 0
        self._cancel = cancel

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: object) -> int:
        """Raises Cancelled where the caller has lost interest."""
        if self._cancel is not None and self._cancel():
            raise Cancelled("cancelled while a checkpoint was loaded")
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        view = view[: max(0, self._size - self._at)]
        count = os.preadv(self._descriptor, [view], self._start + self._at) if view else 0
        self._at += count
        return count
