"""Which exact text the model sampled for a tool call, by the call's id.

A client sends calls back as JSON. Rendered again they may differ from what was sampled (order, white space, escapes),
and then the cached prefix ends there. So the sampled block is remembered and takes the place of the rendered calls:

    ids     id -> Entry(block, source)             newest use last
    blocks  exact bytes -> Block(ids)              radix tree: finds known blocks inside a longer text

All calls of one assistant turn share one block, and the block lives as long as one of its ids. Over either limit the
ids used least recently go. Safe for calls from several threads.

The map of a saved text ("KTM") travels with it, so that replay survives a restart (`export`, `encode_map`,
`decode_map`, `restore`):

    "KTM"  u8 version = 1  u32 count   then per entry:  u32 id length  u32 block length  id  block     little-endian
"""

from __future__ import annotations

import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ds4._rax import Rax
from ds4.bounded import once_per_object
from ds4.prompt.types import Message

MAX_IDS = 100_000
MAX_BYTES = 512 * 2**20
MAX_ID_BYTES = 256

Source = Literal["mem", "disk"]

_MAP_HEADER = struct.Struct("<3sBI")
_MAP_ENTRY = struct.Struct("<II")

# Where a tool block may begin, in every model syntax, with the blank line that belongs to it.
_BLOCK_START = re.compile("(?:\n\n)?<(?:｜DSML｜ calls ?|(?:｜?DSML｜)?tool_calls|tool_call)>".encode())


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """How the calls of one request's history were rendered.

    `mem`, `disk`: messages whose block is replayed, by where it came from. `canonical`: messages with calls that are
    rendered from JSON. `missing_ids`: calls whose id is not known.
    """

    mem: int = 0
    disk: int = 0
    canonical: int = 0
    missing_ids: int = 0


class _Block:
    """One sampled block and the ids that point to it."""

    __slots__ = ("data", "ids")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.ids: dict[str, None] = {}

    @property
    def cost(self) -> int:
        # The radix tree holds the bytes a second time.
        return 2 * len(self.data)


class ToolMemory:
    """Remembers sampled blocks. `enabled` False (`--disable-exact-tool-replay`): remembers and replays nothing.

    `max_ids` and `max_bytes` (of ids and blocks, as held in memory) bound it.
    """

    def __init__(self, *, max_ids: int = MAX_IDS, max_bytes: int = MAX_BYTES, enabled: bool = True) -> None:
        self.enabled = enabled
        self._max_ids = max_ids
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, tuple[_Block, Source]] = OrderedDict()
        self._blocks: Rax[_Block] = Rax()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, call_id: str) -> bool:
        """Is the id taken? New ids are checked against this."""
        return call_id in self._ids

    @property
    def bytes_used(self) -> int:
        return self._bytes

    def block(self, call_id: str) -> bytes | None:
        """The block that the call was sampled in."""
        found = self._ids.get(call_id)
        return None if found is None else found[0].data

    def remember(self, call_ids: Iterable[str], block: bytes) -> None:
        """The calls of one assistant turn were sampled as `block`. Without a block nothing is remembered."""
        with self._lock:
            for call_id in call_ids:
                self._put(call_id, block, "mem")

    def restore(self, entries: Iterable[tuple[str, bytes]]) -> None:
        """Takes entries of a saved text. What is known already stays as it is."""
        with self._lock:
            for call_id, block in entries:
                if call_id not in self._ids:
                    self._put(call_id, block, "disk")

    def attach(self, messages: Sequence[Message]) -> tuple[tuple[Message, ...], ReplayStats]:
        """Sets `raw` of the calls whose turn can be replayed, and clears it elsewhere.

        A turn is replayed only if every one of its calls is known and all point to the same block.
        """
        counts = {"mem": 0, "disk": 0, "canonical": 0}
        missing = 0
        out: list[Message] = []
        with self._lock:
            for message in messages:
                if message.calls:
                    found = [self._use(call.id) for call in message.calls]
                    missing += found.count(None)
                    first = found[0]
                    same = first is not None and all(f is not None and f[0] is first[0] for f in found)
                    raw = first[0].data if first is not None and same else None
                    sources: set[Source] = {f[1] for f in found if f is not None}
                    counts["canonical" if raw is None else "disk" if "disk" in sources else "mem"] += 1
                    if any(call.raw != raw for call in message.calls):
                        message = _with_block(message, raw)
                out.append(message)
        return tuple(out), ReplayStats(**counts, missing_ids=missing)

    def export(self, text: bytes) -> list[tuple[str, bytes]]:
        """(id, block) of every id whose block stands in `text` (special tokens spelled out), in order of appearance.

        Blocks are found by their exact bytes from left to right, the longest known one at each place.
        """
        entries: list[tuple[str, bytes]] = []
        seen: set[bytes] = set()
        at = 0
        with self._lock:
            while (start := _BLOCK_START.search(text, at)) is not None:
                at = start.end()
                for begin in dict.fromkeys((start.start(), text.index(b"<", start.start()))):
                    found = self._blocks.longest_prefix(text, begin)
                    if found is not None:
                        data, block = found
                        at = begin + len(data)
                        if data not in seen:
                            seen.add(data)
                            entries += [(call_id, block.data) for call_id in block.ids]
                        break
        return entries

    def _use(self, call_id: str) -> tuple[_Block, Source] | None:
        found = self._ids.get(call_id)
        if found is not None:
            self._ids.move_to_end(call_id)
        return found

    def _put(self, call_id: str, data: bytes, source: Source) -> None:
        if not self.enabled or not data or not call_id:
            return
        if call_id in self._ids:
            self._drop(call_id)
        block = self._blocks.find(data)
        if block is None:
            block = _Block(data)
            self._blocks[data] = block
            self._bytes += block.cost
        block.ids[call_id] = None
        self._ids[call_id] = (block, source)
        self._bytes += len(call_id)
        while len(self._ids) > self._max_ids or self._bytes > self._max_bytes:
            self._drop(next(iter(self._ids)))

    def _drop(self, call_id: str) -> None:
        block, _ = self._ids.pop(call_id)
        self._bytes -= len(call_id)
        del block.ids[call_id]
        if not block.ids:
            del self._blocks[block.data]
            self._bytes -= block.cost


@once_per_object(16 << 20, lambda message, raw: 512 * len(message.calls))
def _with_block(message: Message, raw: bytes | None) -> Message:
    """A turn with its calls drawn as `raw`; the same one in every request, so that others remember what they made."""
    return replace(message, calls=tuple(replace(call, raw=raw) for call in message.calls))


def encode_map(entries: Sequence[tuple[str, bytes]]) -> bytes:
    """The section for `entries`, b"" for none. Ids and blocks that a reader would refuse are left out."""
    kept = [
        (call_id.encode(), block)
        for call_id, block in entries
        if 0 < len(call_id.encode()) <= MAX_ID_BYTES and 0 < len(block) <= MAX_BYTES
    ]
    if not kept:
        return b""
    parts = [_MAP_HEADER.pack(b"KTM", 1, len(kept))]
    for call_id, block in kept:
        parts += (_MAP_ENTRY.pack(len(call_id), len(block)), call_id, block)
    return b"".join(parts)


def decode_map(
    data: bytes | memoryview, wanted: Collection[str] | None = None, *, max_ids: int = MAX_IDS
) -> list[tuple[str, bytes]]:
    """Entries of a section, only those in `wanted` if given.

    The section is untrusted: a wrong length, an id that is no UTF-8 or the end of the data stops the reading, and
    what was read until then is kept. Nothing is allocated by a length that the data does not have.
    """
    entries: list[tuple[str, bytes]] = []
    view = memoryview(data)
    if len(view) < _MAP_HEADER.size:
        return entries
    magic, version, count = _MAP_HEADER.unpack_from(view)
    if magic != b"KTM" or version != 1 or count > 4 * max_ids:
        return entries
    at = _MAP_HEADER.size
    for _ in range(count):
        if len(view) - at < _MAP_ENTRY.size:
            break
        id_length, block_length = _MAP_ENTRY.unpack_from(view, at)
        at += _MAP_ENTRY.size
        if not (0 < id_length <= MAX_ID_BYTES and 0 < block_length <= MAX_BYTES):
            break
        if len(view) - at < id_length + block_length:
            break
        try:
            call_id = str(view[at : at + id_length], "utf-8")
        except UnicodeDecodeError:
            break
        if wanted is None or call_id in wanted:
            entries.append((call_id, bytes(view[at + id_length : at + id_length + block_length])))
        at += id_length + block_length
    return entries
