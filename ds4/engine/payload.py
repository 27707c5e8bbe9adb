"""The session payload: one session as bytes, independent of the backend that computed it.

Layout and refusals: `docs/formats/session-payload.md`. Everything the header claims is compared with the receiving
session before anything of a claimed size is allocated. Integrity of the rows (a checksum) is the business of whoever
stores the payload.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4 import _cpu
from ds4.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO

    import numpy.typing as npt

MAGIC = b"DS4STATE"
VERSION = 2
_PREFIX = struct.Struct("<8sII")  # magic, version, bytes of the header
_MAX_HEADER = 1 << 20
_MAX_NUMBER = 1 << 53
_CHUNK = 1 << 17
"""Bytes of a file that are read at once; an allocator keeps more of what is larger."""
_GROUP, _DEVICE_GROUP = 4 << 20, 32 << 20
"""Bytes of rows, of as many buffers as it takes, that are exported or imported with one call. Steps of other sessions
come between as the session sees fit: a call for each buffer would wait for a step each. From a device rows come so
fast that a call should not end before its time."""
_DRAFT = "draft."
_ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4}
_MAX_ROW = 64 << 20


@dataclass(frozen=True, slots=True)
class BufferHeader:
    """One state buffer: its declaration by the family, and the rows stored here. `type` is a GGUF type name."""

    name: str
    kind: str
    type: str
    heads: int
    width: int
    ratio: int
    capacity: int
    rows: int


@dataclass(frozen=True, slots=True)
class PayloadHeader:
    """What a payload says about itself. `fingerprint` identifies the weights that computed it."""

    family: str
    fingerprint: str
    vocab: int
    n_tokens: int
    longest: int
    """The most tokens that the state has held: ring buffers have lost what lies further back."""
    logits: bool
    buffers: tuple[BufferHeader, ...]


_HEADER_FIELDS = tuple(PayloadHeader.__dataclass_fields__)
_BUFFER_FIELDS = tuple(BufferHeader.__dataclass_fields__)


def _buffers(model: _cpu.Model, n_tokens: int) -> tuple[BufferHeader, ...]:
    return tuple(
        BufferHeader(name, kind, _cpu.dtype_name(dtype), heads, width, ratio, capacity, model.buffer_rows(i, n_tokens))
        for i, (name, kind, dtype, heads, width, ratio, capacity, _) in enumerate(model.state_specs)
    )


def _is_draft(buffer: BufferHeader) -> bool:
    """Only guesses are made from it: a payload may have it or not, whatever the reader has."""
    return buffer.name.startswith(_DRAFT)


def _longest(model: _cpu.Model, session: _cpu.Session) -> int:
    """What a reader must know of the past: nothing where no ring buffer has lost any of it."""
    rings = any(kind == "ring" for _, kind, *_ in model.state_specs)
    return session.longest if rings else session.n_tokens


def _row_bytes(model: _cpu.Model, index: int) -> int:
    _, _, dtype, heads, width, _, _, _ = model.state_specs[index]
    return _cpu.row_bytes(dtype, heads * width)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows [first, first + count) of the model's buffer `index`; None: of no buffer of the model."""

    index: int | None
    first: int
    count: int
    row_bytes: int


def _groups(model: _cpu.Model, parts: Iterable[_Rows]) -> Iterator[tuple[list[_Rows], int]]:
    """The rows in groups of some MB or one row, and each group's bytes. A group is of the model or all not."""
    most = _GROUP if model.host_memory else _DEVICE_GROUP
    group: list[_Rows] = []
    size = 0
    for part in parts:
        first, left = part.first, part.count
        while left:
            if group and (size + part.row_bytes > most or (group[0].index is None) != (part.index is None)):
                yield group, size
                group, size = [], 0
            count = min(left, max(1, (most - size) // part.row_bytes))
            group.append(_Rows(part.index, first, count, part.row_bytes))
            size += count * part.row_bytes
            first, left = first + count, left - count
    if group:
        yield group, size


def _pages(size: int) -> memoryview:
    """Memory that the system has back as soon as nobody holds it; an allocator would keep a piece of this size."""
    return memoryview(mmap.mmap(-1, size))


def _ranges(group: list[_Rows]) -> list[tuple[int, int, int]]:
    return [(rows.index, rows.first, rows.count) for rows in group if rows.index is not None]


def payload_bytes(model: _cpu.Model, session: _cpu.Session, family: str, fingerprint: str) -> int:
    """Size of the payload that `write_payload` would write."""
    n_tokens, logits = session.n_tokens, session.has_logits
    header = PayloadHeader(
        family, fingerprint, model.vocab, n_tokens, _longest(model, session), logits, _buffers(model, n_tokens)
    )
    return (
        _PREFIX.size
        + len(_encode(header))
        + 4 * n_tokens
        + (4 * model.vocab if logits else 0)
        + model.state_bytes(n_tokens)
    )


def _encode(header: PayloadHeader) -> bytes:
    fields = {name: getattr(header, name) for name in _HEADER_FIELDS}
    fields["buffers"] = [{name: getattr(buffer, name) for name in _BUFFER_FIELDS} for buffer in header.buffers]
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def write_payload(model: _cpu.Model, session: _cpu.Session, family: str, fingerprint: str, file: BinaryIO) -> int:
    """Writes the session, returns the bytes written. Raises OSError of the file; the session does not change."""
    tokens = session.tokens
    logits = session.logits() if session.has_logits else None
    header = PayloadHeader(
        family,
        fingerprint,
        model.vocab,
        len(tokens),
        _longest(model, session),
        logits is not None,
        _buffers(model, len(tokens)),
    )
    encoded = _encode(header)
    written = 0

    def put(data: bytes | memoryview) -> None:
        nonlocal written
        file.write(data)
        written += len(data)

    put(_PREFIX.pack(MAGIC, VERSION, len(encoded)))
    put(encoded)
    put(tokens.astype("<i4").tobytes())
    if logits is not None:
        put(logits.astype("<f4").tobytes())
    scratch = memoryview(b"")
    rows = (_Rows(i, 0, buffer.rows, _row_bytes(model, i)) for i, buffer in enumerate(header.buffers))
    for group, size in _groups(model, rows):
        if size > len(scratch):
            scratch = _pages(size)
        view = scratch[:size]
        session.export_rows(_ranges(group), view)
        for at in range(0, size, _GROUP):
            put(view[at : at + _GROUP])
    return written


def read_header(file: BinaryIO) -> PayloadHeader:
    """Reads and checks the header alone. Raises CheckpointError."""
    return _read_header(file)[1]


def _read_header(file: BinaryIO) -> tuple[int, PayloadHeader]:
    prefix = _read_exactly(file, _PREFIX.size, "prefix")
    magic, version, size = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise CheckpointError(f"not a session payload: magic {magic!r}, expected {MAGIC!r}")
    if not 1 <= version <= VERSION:
        raise CheckpointError(f"payload version {version}, this build reads versions 1 to {VERSION}")
    if not 0 < size <= _MAX_HEADER:
        raise CheckpointError(f"payload header of {size} bytes, at most {_MAX_HEADER} are allowed")
    try:
        return version, _decode(json.loads(_read_exactly(file, size, "header")))
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"payload header is damaged: {e}") from None


def _decode(raw: Any) -> PayloadHeader:
    def members(value: Any, cls: type, where: str) -> dict[str, Any]:
        names = set(cls.__dataclass_fields__)  # type: ignore[attr-defined]
        if not isinstance(value, dict) or set(value) != names:
            raise ValueError(f"{where} does not have the members {sorted(names)}")
        for name, kind in cls.__annotations__.items():
            member = value[name]
            if kind == "int" and not (type(member) is int and 0 <= member <= _MAX_NUMBER):
                raise ValueError(f"{where}.{name} is not a count")
            if kind == "str" and not isinstance(member, str):
                raise ValueError(f"{where}.{name} is not a string")
            if kind == "bool" and not isinstance(member, bool):
                raise ValueError(f"{where}.{name} is not a boolean")
        return value

    header = members(raw, PayloadHeader, "header")
    buffers = header["buffers"]
    if not isinstance(buffers, list):
        raise ValueError("header.buffers is not a list")
    parsed = tuple(BufferHeader(**members(b, BufferHeader, f"buffers[{i}]")) for i, b in enumerate(buffers))
    return PayloadHeader(**{**header, "buffers": parsed})


def read_payload(model: _cpu.Model, session: _cpu.Session, family: str, fingerprint: str, file: BinaryIO) -> None:
    """Replaces the session. Raises CheckpointError, or the file's OSError; the session is cleared then."""
    session.clear()
    version, header = _read_header(file)
    for name, found, wanted in (
        ("family", header.family, family),
        ("weights fingerprint", header.fingerprint, fingerprint),
        ("vocabulary size", header.vocab, model.vocab),
    ):
        if found != wanted:
            raise CheckpointError(f"payload of another model: {name} {found!r}, this model has {wanted!r}")
    if header.n_tokens > session.ctx:
        raise CheckpointError(f"payload of {header.n_tokens} tokens, the session has room for {session.ctx}")
    indices = _match(header.buffers, _buffers(model, header.n_tokens))
    rings = any(buffer.kind == "ring" for buffer in header.buffers)
    if header.longest < header.n_tokens or (header.longest > header.n_tokens and not rings):
        raise CheckpointError(f"payload of {header.n_tokens} tokens that says it held up to {header.longest}")
    if header.logits and header.n_tokens == 0:
        raise CheckpointError("payload with logits of no tokens")
    sizes = [_file_row_bytes(buffer) for buffer in header.buffers]
    rows = sum(size * buffer.rows for size, buffer in zip(sizes, header.buffers, strict=True))
    _check_length(file, 4 * header.n_tokens + (4 * header.vocab if header.logits else 0) + rows)

    tokens = np.frombuffer(_read_exactly(file, 4 * header.n_tokens, "tokens"), dtype="<i4").astype(np.int32)
    logits: npt.NDArray[np.float32] | None = None
    if header.logits:
        logits = np.frombuffer(_read_exactly(file, 4 * header.vocab, "logits"), dtype="<f4").astype(np.float32)
        if np.isnan(logits).any():
            raise CheckpointError("payload is damaged: a logit is not a number")
    try:
        session.begin_import(tokens, header.longest)
        scratch = memoryview(b"")
        for group, size in _groups(model, _stored_rows(version, header, indices, sizes)):
            if size > len(scratch):
                scratch = _pages(size)
            view = scratch[:size]
            _read_into(file, view, "rows")
            if ranges := _ranges(group):
                session.import_rows(ranges, view)
        session.finish_import(logits)
    except ValueError as e:
        session.clear()
        raise CheckpointError(f"payload is damaged: {e}") from None
    except BaseException:
        session.clear()
        raise


def _stored_rows(version: int, header: PayloadHeader, indices: list[int | None], sizes: list[int]) -> Iterator[_Rows]:
    """All rows in the order of the file, as the model counts them."""
    for buffer, index, row_bytes in zip(header.buffers, indices, sizes, strict=True):
        # Version 1 has the rows of a full ring where the ring had them: the oldest one stands at `turn`.
        turn = header.n_tokens % buffer.rows if version == 1 and buffer.kind == "ring" and buffer.rows else 0
        yield _Rows(index, buffer.rows - turn, turn, row_bytes)
        yield _Rows(index, 0, buffer.rows - turn, row_bytes)


def _match(found: tuple[BufferHeader, ...], expected: tuple[BufferHeader, ...]) -> list[int | None]:
    """The model's buffer for each of the payload's, None for one that only another reader drafts with.

    Raises CheckpointError where the buffers are not the model's; those that only drafts are made from may be others.
    """
    theirs = [buffer for buffer in found if not _is_draft(buffer)]
    ours = [buffer for buffer in expected if not _is_draft(buffer)]
    if len(theirs) != len(ours):
        raise CheckpointError(f"payload of {len(theirs)} state buffers, this model has {len(ours)}")
    for found_buffer, wanted_buffer in zip(theirs, ours, strict=True):
        if found_buffer != wanted_buffer:
            raise CheckpointError(f"payload with state buffer {found_buffer}, this model has {wanted_buffer}")
    at = {buffer: i for i, buffer in enumerate(expected)}
    if len(set(found)) != len(found):
        raise CheckpointError("payload with a state buffer twice")
    return [at.get(buffer) for buffer in found]


def _file_row_bytes(buffer: BufferHeader) -> int:
    """Bytes of a row as stored. Raises CheckpointError for a draft buffer that none of ours can be."""
    size = _ELEMENT_BYTES.get(buffer.type, 0) * buffer.heads * buffer.width
    if not 0 < size <= _MAX_ROW:
        raise CheckpointError(f"payload with state buffer {buffer}, whose rows are impossible")
    return size


def _check_length(file: BinaryIO, need: int) -> None:
    """Refuses a file that is shorter than its header says, where the file can tell."""
    if not file.seekable():
        return
    here = file.tell()
    left = file.seek(0, 2) - here
    file.seek(here)
    if left < need:
        raise CheckpointError(f"payload is cut: {left} bytes after the header, which promises {need}")


def _read_exactly(file: BinaryIO, size: int, what: str) -> bytes:
    parts: list[bytes] = []
    left = size
    while left:
        part = file.read(min(left, _CHUNK))
        if not part:
            raise CheckpointError(f"payload is cut in its {what}: {left} of {size} bytes are missing")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _read_into(file: BinaryIO, view: memoryview, what: str) -> None:
    done = 0
    while done < len(view):
        part = file.read(min(len(view) - done, _CHUNK))
        if not part:
            raise CheckpointError(f"payload is cut in its {what}")
        view[done : done + len(part)] = part
        done += len(part)
