"""Content codings of request bodies (RFC 9110 section 8.4): gzip, deflate, zstd, with a limit on the expanded size."""

from __future__ import annotations

import io
import zlib
from types import ModuleType

ACCEPTED = "gzip, deflate, zstd, identity"
"""Value of the `Accept-Encoding` header that a 415 carries (RFC 9110 section 15.5.16)."""

# RFC 9659: a zstd content coding must not need a window above 8 MiB, whatever the frame header asks for.
_ZSTD_WINDOW = 8 << 20
_STEP = 1 << 20


class CodingError(Exception):
    """A body that cannot be decoded; `status` is 400 (damaged), 413 (expands too far) or 415 (unknown coding)."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


def coding_of(header: str) -> str:
    """The one coding that a Content-Encoding header names, "" for none.

    Raises CodingError (415) for an unknown coding, and for more than one: nobody compresses twice but to attack.
    """
    names = [name for part in header.split(",") if (name := part.strip().lower()) and name != "identity"]
    if not names:
        return ""
    name = names[0].removeprefix("x-")
    if len(names) > 1 or name not in ("gzip", "deflate", "zstd"):
        raise CodingError(415, f"unsupported Content-Encoding {header[:80]!r}; supported: {ACCEPTED}")
    return name


def decode(coding: str, data: bytes, limit: int) -> bytes:
    """Expands `data`; `coding` as `coding_of` returns it.

    Raises CodingError: 413 when the result would be longer than `limit` bytes (never much more than that is
    held), 400 when the data is damaged, cut, or followed by something else.
    """
    try:
        if coding == "zstd":
            return _zstd(data, limit)
        if coding == "gzip":
            return _zlib(data, limit, 31)
        # "deflate" is the zlib format (RFC 9110 section 8.4.1.2); some senders leave out its two-byte head.
        head = int.from_bytes(data[:2], "big")
        wrapped = len(data) > 1 and data[0] & 15 == 8 and head % 31 == 0
        return _zlib(data, limit, 15 if wrapped else -15)
    except zlib.error as error:
        raise CodingError(400, f"the body is not valid {coding}, which Content-Encoding names: {error}") from None


def _too_large(coding: str, limit: int) -> CodingError:
    return CodingError(413, f"the {coding} body expands to more than {limit} bytes")


def _zlib(data: bytes, limit: int, wbits: int) -> bytes:
    coding = "gzip" if wbits == 31 else "deflate"
    parts: list[bytes] = []
    size = 0
    while True:
        member = zlib.decompressobj(wbits)
        while not member.eof:
            part = member.decompress(data, min(_STEP, limit - size + 1))
            data = member.unconsumed_tail
            size += len(part)
            if size > limit:
                raise _too_large(coding, limit)
            if part:
                parts.append(part)
            elif not data and not member.eof:
                raise CodingError(400, f"the {coding} body is cut short")
        data = member.unused_data
        if not data:
            return b"".join(parts)
        if wbits != 31:
            raise CodingError(400, f"{len(data)} bytes follow the end of the {coding} body")


def _zstd(data: bytes, limit: int) -> bytes:
    # Few clients use it, and every start would wait for it.
    import zstandard

    try:
        return _frames(zstandard, data, limit)
    except zstandard.ZstdError as error:
        raise CodingError(400, f"the body is not valid zstd, which Content-Encoding names: {error}") from None


def _frames(zstandard: ModuleType, data: bytes, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(write_size=_STEP)
        source = io.BytesIO(data)
        # A block of four bytes can stand for 128 KiB, so the piece fed at once bounds what one call can produce.
        while not frame.eof:
            piece = source.read(256)
            if not piece:
                raise CodingError(400, "the zstd body is cut short")
            part = frame.decompress(piece)
            size += len(part)
            if size > limit:
                raise _too_large("zstd", limit)
            parts.append(part)
        data = frame.unused_data + source.read()
        if not data:
            return b"".join(parts)
