"""What a slot can reuse of a prompt: one ladder of tiers, asked by routing and carried out by admission.

`probe` is cheap: it compares tokens and asks the session what it can do; it never tokenises and changes nothing.
`materialise` brings the slot's session to exactly what the probe promised. Routing scores with the same probe whose
answer is then materialised, so the two cannot disagree.

The tier that keeps most of the prompt wins; the order of the ladder breaks ties. A tier that has to copy or read
state must beat the others by its `margin`, or it is not worth the copy.

    tier            keeps                                    the slot's session
    (visible)       all live tokens: what the client saw     grows
                    of them is a prefix of its prompt
    memory-token    all live tokens, a prefix of the prompt  grows
    memory-rewind   the common prefix                        is cut, where its family can
    memory-text     all live tokens, or those of the last    grows, or is cut to the last prompt
                    prompt: their text is a prefix
    fork            the common prefix with another slot      becomes a copy of that slot's, cut
    disk-text       a checkpoint: its text is a prefix       is loaded (`ds4.server.kvstore`)
    none            nothing                                  is cleared

The visible tiers are `responses-visible`, `anthropic-tool-output` and `thinking-visible`: the client replays its
conversation without the reasoning, which stays in the state.

Where text decided, the kept tokens need not be those that the whole prompt is encoded to: the model drew them itself,
or hidden reasoning stands between them. `settle` then makes the prompt anew: the kept tokens, then the rest of the
text, encoded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ds4.errors import CheckpointError
from ds4.server.keys import tokens_of_key

if TYPE_CHECKING:
    import numpy.typing as npt

    from ds4.engine.tokenizer import Tokenizer
    from ds4.server.kvdir import Entry
    from ds4.server.kvstore import KvStore
    from ds4.server.slots import Slot

NEAR = 32
"""Tokens that are evaluated again rather than kept in another division of the same text than the prompt's own."""

log = logging.getLogger("ds4.reuse")


@dataclass(frozen=True, slots=True)
class Reuse:
    """`tokens` leading tokens of the prompt that need no evaluation, by tier `kind`; `source` is forked from.

    Once settled, `tokens` is always less than the prompt: its last token is evaluated for the logits. `in_place` says
    that the slot's own state is what is kept. `text_bytes` of the prompt's key are what the kept tokens and `tail`
    stand for, None: exactly the prompt's own tokens. `tail` is evaluated again. `entry` is the checkpoint to load.
    """

    kind: str
    tokens: int
    in_place: bool = True
    source: Slot | None = None
    text_bytes: int | None = None
    tail: tuple[int, ...] = ()
    entry: Entry | None = None


NOTHING = Reuse("none", 0, in_place=False)


@dataclass(frozen=True, slots=True)
class Query:
    """What the tiers look at: the prompt, [n] int32, and its cache key."""

    prompt: npt.NDArray[np.int32]
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class LiveText:
    """The key of what the first `tokens` tokens of a session stand for."""

    key: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Visible(LiveText):
    """As LiveText, of what the client saw: without the reasoning, and with the tool calls as they were drawn.

    `kind` is the tier that it makes possible.
    """

    kind: str


class Lookup:
    """One decision: the query, the slots that may be forked from, and what was found out about it, each once.

    Good until a session changes. Without a `store` nothing is looked for on disk.
    """

    def __init__(self, query: Query, slots: Iterable[Slot] = (), store: KvStore | None = None) -> None:
        self.query = query
        self.slots = tuple(slots)
        self._store = store
        self._common: dict[int, int] = {}
        self._entry: Entry | None = None

    def common(self, slot: Slot) -> int:
        """Tokens that the prompt, without its last token, shares with the slot's session."""
        found = self._common.get(slot.index)
        if found is None:
            found = min(slot.session.common_prefix(self.query.prompt), len(self.query.prompt) - 1)
            self._common[slot.index] = found
        return found

    def checkpoint(self) -> Entry | None:
        """The best checkpoint on disk."""
        if self._store is not None:
            self._entry, self._store = self._store.find(self.query.key), None
        return self._entry


class Tier(Protocol):
    """One rung of the ladder."""

    margin: int
    """Tokens by which it has to beat the tiers before it."""

    def probe(self, slot: Slot, lookup: Lookup) -> Reuse | None: ...
    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        """Brings the session to `reuse.tokens` tokens. Raises whatever the session raises when it cannot after all."""


class VisibleText:
    """What the client saw of the live state is a proper prefix of its prompt."""

    margin = 0

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def probe(self, slot: Slot, lookup: Lookup) -> Reuse | None:
        seen = slot.visible
        if seen is None or seen.kind != self._kind or not _begins(slot, seen, lookup.query.key):
            return None
        return Reuse(self._kind, seen.tokens, text_bytes=len(seen.key))

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        """The session is there already."""


class MemoryToken:
    """The live tokens are a proper prefix of the prompt."""

    margin = 0

    def probe(self, slot: Slot, lookup: Lookup) -> Reuse | None:
        live = slot.session.n_tokens
        return Reuse("memory-token", live) if 0 < live == lookup.common(slot) else None

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        """The session is there already."""


class MemoryRewind:
    """The prompt leaves the live tokens somewhere, or ends within them: the session is cut back.

    A prompt that is live as a whole is cut to all but its last token, which is evaluated again for its logits.
    """

    margin = 0

    def probe(self, slot: Slot, lookup: Lookup) -> Reuse | None:
        kept = lookup.common(slot)
        if 0 < kept < slot.session.n_tokens and slot.session.can_rewind(kept):
            return Reuse("memory-rewind", kept)
        return None

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        slot.session.rewind(reuse.tokens)


class MemoryText:
    """The text of the live tokens, or of the last prompt among them, is a prefix of the prompt's."""

    margin = NEAR

    def probe(self, slot: Slot, lookup: Lookup) -> Reuse | None:
        return _by_text("memory-text", slot, lookup.query.key)

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        slot.session.rewind(reuse.tokens)


def _by_text(kind: str, slot: Slot, key: bytes) -> Reuse | None:
    """What of the slot's state has a text that `key` begins with.

    The last prompt may also be the whole of `key`, when it is asked again: then its last token is evaluated again.
    """
    text, asked, session = slot.text, slot.asked, slot.session
    if text is not None and _begins(slot, text, key):
        return Reuse(kind, text.tokens, text_bytes=len(text.key))
    if asked is None or not 1 < asked.tokens <= session.n_tokens or not key.startswith(asked.key):
        return None
    again = len(key) == len(asked.key)
    kept = asked.tokens - again
    if not session.can_rewind(kept):
        return None
    tail = (int(session.tokens[kept]),) if again else ()
    return Reuse(kind, kept, text_bytes=len(asked.key), tail=tail)


def _begins(slot: Slot, text: LiveText, key: bytes) -> bool:
    """Is the text of the live state a proper prefix of the key?"""
    return 0 < slot.session.n_tokens == text.tokens and 0 < len(text.key) < len(key) and key.startswith(text.key)


class Fork:
    """The longest common prefix lives in another slot, busy or not: its state is copied and the other left alone."""

    margin = 32

    def probe(self, slot: Slot, lookup: Lookup) -> Reuse | None:
        best: Reuse | None = None
        for other in lookup.slots:
            if other is slot or other.loading:
                continue
            kept = lookup.common(other)
            if kept > (best.tokens if best else 0) and other.session.can_rewind(kept):
                best = Reuse("fork", kept, in_place=False, source=other)
            by_text = _by_text("fork", other, lookup.query.key)
            if by_text is not None and by_text.tokens > (best.tokens if best else 0) + NEAR:
                best = replace(by_text, in_place=False, source=other)
        return best

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        assert reuse.source is not None
        slot.session.fork_from(reuse.source.session, reuse.tokens)


class Disk:
    """The text of a checkpoint is a prefix of the prompt's. The scheduler loads it beside the running steps."""

    margin = 64

    def probe(self, slot: Slot, lookup: Lookup) -> Reuse | None:
        entry = lookup.checkpoint()
        if entry is None:
            return None
        return Reuse("disk-text", entry.tokens, in_place=False, text_bytes=entry.text_bytes, entry=entry)

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        """The session was loaded before."""
        assert reuse.entry is not None
        if slot.session.n_tokens != reuse.entry.tokens:
            raise CheckpointError(f"{slot.session.n_tokens} tokens, the checkpoint has {reuse.entry.tokens}")


class Cold:
    """Nothing is kept."""

    margin = 0

    def probe(self, slot: Slot, lookup: Lookup) -> Reuse | None:
        return NOTHING

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        if slot.session.n_tokens:
            slot.session.clear()


LADDER: dict[str, Tier] = {
    "responses-visible": VisibleText("responses-visible"),
    "anthropic-tool-output": VisibleText("anthropic-tool-output"),
    "thinking-visible": VisibleText("thinking-visible"),
    "memory-token": MemoryToken(),
    "memory-rewind": MemoryRewind(),
    "memory-text": MemoryText(),
    "fork": Fork(),
    "disk-text": Disk(),
    "none": Cold(),
}


def probe(slot: Slot, lookup: Lookup) -> Reuse:
    """The best that `slot` can do for the prompt."""
    best = NOTHING
    for tier in LADDER.values():
        found = tier.probe(slot, lookup)
        if found is not None and found.tokens > best.tokens + tier.margin:
            best = found
    return best


def materialise(slot: Slot, query: Query, reuse: Reuse) -> Reuse:
    """Brings `slot.session` to the promised prefix and returns what is really kept.

    That is `reuse`, or `NOTHING` when the session failed to deliver: a cache may only change speed.
    """
    try:
        LADDER[reuse.kind].materialise(slot, query, reuse)
    except Exception as error:
        log.warning("slot %d: %s of %d tokens failed: %s", slot.index, reuse.kind, reuse.tokens, error, exc_info=True)
        slot.session.clear()
        return NOTHING
    return reuse


def settle(slot: Slot, query: Query, reuse: Reuse, tokenizer: Tokenizer) -> tuple[Reuse, Query] | None:
    """What is kept and the prompt to go on with, once `reuse` was carried out.

    State that was chosen by its text stays as it is, unless the prompt's own tokens are nearly all there: then the
    last few are given up and nothing differs from an evaluation from the start. None when the session cannot go on
    with this prompt (too long with what it holds, nothing left to evaluate, or cut inside a character).
    """
    if reuse.text_bytes is None:
        return reuse, query
    session = slot.session
    live = session.n_tokens
    common = min(session.common_prefix(query.prompt), len(query.prompt) - 1)
    if common > 0 and live - common <= NEAR and session.can_rewind(common):
        session.rewind(common)
        return replace(reuse, tokens=common, text_bytes=None), query
    more = tokens_of_key(tokenizer, query.key[reuse.text_bytes :])
    rest = None if more is None else [*reuse.tail, *more]
    if not rest or live + len(rest) >= session.ctx:
        return None
    prompt = np.concatenate([session.tokens, np.asarray(rest, np.int32)])
    return replace(reuse, tokens=live), replace(query, prompt=prompt)
