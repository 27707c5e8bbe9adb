"""What a slot can reuse of a prompt: one ladder of tiers, asked by routing and carried out by admission.

`probe` is cheap: it compares tokens and asks the session what it can do; it never tokenises and changes nothing.
`materialise` brings the slot's session to exactly what the probe promised. Routing scores with the same probe whose
answer is then materialised, so the two cannot disagree.

The tier that keeps most of the prompt wins; the order of the ladder breaks ties. A tier that has to copy or read
state must beat the others by its `margin`, or it is not worth the copy.

    tier            keeps                                    the slot's session
    (visible)       all live tokens: what the client saw     grows
                    of them is a prefix of its prompt
    (tool-output)   all live tokens: the prompt has the      grows
                    results of exactly their last calls
    memory-token    all live tokens, a prefix of the prompt  grows
    memory-rewind   the common prefix, or of it what a       is cut, or becomes a copy of the snapshot
                    snapshot has (`ds4.server.snapshots`)
    memory-text     all live tokens, those of the last       grows, is cut, or becomes a copy of the
                    prompt or of a snapshot: their text is   snapshot
                    a prefix
    fork            the common prefix with another slot      becomes a copy of that slot's, cut
    disk-text       a checkpoint: its text is a prefix       is loaded (`ds4.server.kvstore`)
    none            nothing                                  is cleared

The visible tiers are `responses-visible` and `thinking-visible`: the client replays its conversation without the
reasoning, which stays in the state. The tiers `responses-tool-output` and `anthropic-tool-output` are bound by the ids
of the calls: what was sampled stays, however the client spells it now. The conversation before the calls must be what
it was; a request of nothing but results has none, and only this tier can serve it (else 409).

Where text decided, the kept tokens need not be those that the whole prompt is encoded to: the model drew them itself,
or hidden reasoning stands between them. `settle` then makes the prompt anew: the kept tokens, then the rest of the
text, encoded.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ds4.errors import CheckpointError, SessionInvalidError
from ds4.server.keys import tokens_of_key

if TYPE_CHECKING:
    import numpy.typing as npt

    from ds4.engine.tokenizer import Tokenizer
    from ds4.engine.types import SessionLike
    from ds4.server.kvdir import Entry
    from ds4.server.kvstore import KvStore
    from ds4.server.slots import Slot
    from ds4.server.types import Continuation

NEAR = 32
"""Tokens that are evaluated again rather than kept in another division of the same text than the prompt's own."""

log = logging.getLogger("ds4.reuse")


@dataclass(frozen=True, slots=True)
class Reuse:
    """`tokens` leading tokens of the prompt that need no evaluation, by tier `kind`; `source` is forked from.

    Once settled, `tokens` is always less than the prompt: its last token is evaluated for the logits. `in_place` says
    that the slot's own state is what is kept. `text_bytes` of the prompt's key are what the kept tokens and `tail`
    stand for, None: exactly the prompt's own tokens. `tail` is evaluated again. `rest` is the key of what follows,
    None: the prompt's own behind `text_bytes`. `left_out`: the client has sent the conversation without its reasoning.
    `entry` is the checkpoint to load, `state` the snapshot to copy, None: the session itself. `name` is the text that
    decided.
    """

    kind: str
    tokens: int
    in_place: bool = True
    source: Slot | None = None
    text_bytes: int | None = None
    tail: tuple[int, ...] = ()
    rest: bytes | None = None
    left_out: bool = False
    entry: Entry | None = None
    state: SessionLike | None = None
    name: LiveText | None = None


NOTHING = Reuse("none", 0, in_place=False)


@dataclass(frozen=True, slots=True)
class Query:
    """What the tiers look at: the prompt, [n] int32, its cache key, and the turn whose calls it answers."""

    prompt: npt.NDArray[np.int32]
    key: bytes = b""
    continues: Continuation | None = None


@dataclass(frozen=True, slots=True)
class LiveText:
    """The key of what the first `tokens` tokens of a session stand for: `key`, then `drawn`. `last` of them is known.

    In two pieces, because `key` is a prompt's, which may be long and is shared by all that came of it. `left_out`: the
    tokens have reasoning that the text has not.
    """

    key: bytes
    tokens: int
    drawn: bytes = b""
    last: int = -1
    left_out: bool = False

    @property
    def size(self) -> int:
        return len(self.key) + len(self.drawn)

    @property
    def whole(self) -> bytes:
        return self.key + self.drawn


@dataclass(frozen=True, slots=True)
class Visible:
    """What the client saw of a session of `tokens` tokens: without the reasoning, the tool calls as they were drawn.

    `kind` is the tier that it makes possible. `sent`: the client may yet send the reasoning back, and then the whole
    text is what it begins with.
    """

    key: bytes
    tokens: int
    kind: str
    sent: bool = False

    @property
    def text(self) -> LiveText:
        return LiveText(self.key, self.tokens, left_out=True)


@dataclass(frozen=True, slots=True)
class Bound:
    """A session of `tokens` tokens ends with the calls of the response `turn`, but for the tokens `missing`."""

    turn: str
    tokens: int
    missing: tuple[int, ...] = ()


class Lookup:
    """One decision: the query, the slots that may be forked from, and what was found out about it, each once.

    Good until a session changes. Without a `store` nothing is looked for on disk. `compared_bytes` counts the bytes of
    texts that were compared with the prompt's.
    """

    def __init__(self, query: Query, slots: Iterable[Slot] = (), store: KvStore | None = None) -> None:
        self.query = query
        self.slots = tuple(slots)
        self.compared_bytes = 0
        self._store = store
        self._common: dict[int, int] = {}
        self._at_most: dict[int, int] = {}
        self._reach: dict[int, tuple[int, SessionLike | None]] = {}
        self._begins: dict[int, bool] = {}
        self._by_text: dict[int, tuple[Reuse | None, int]] = {}
        self._sources: tuple[Slot, ...] = ()
        self._sources_beyond: int | None = None
        self._entry: Entry | None = None
        self._asked_beyond: int | None = None

    def common(self, slot: Slot, beyond: int = 0) -> int:
        """Tokens that the prompt, without its last token, shares with the slot's session; 0: not more than `beyond`."""
        index, most = slot.index, len(self.query.prompt) - 1
        found = self._common.get(index)
        if found is None:
            if beyond >= min(most, slot.session.n_tokens, self._at_most.get(index, most)):
                return 0
            found = min(slot.session.common_prefix(self.query.prompt, beyond), most)
            if found <= beyond:
                self._at_most[index] = beyond
                return 0
            self._common[index] = found
        return found if found > beyond else 0

    def reach(self, slot: Slot, beyond: int = 0) -> tuple[int, SessionLike | None]:
        """How many of those tokens the slot's session can be cut to, and the snapshot to copy for it."""
        common = self.common(slot, beyond)
        if not common:
            return 0, None
        found = self._reach.get(slot.index)
        if found is None:
            found = common, None
            if not slot.session.can_rewind(common):
                found = slot.past.best(common) or (0, None)
            self._reach[slot.index] = found
        return found

    def promise(self, slot: Slot) -> int:
        """How much a slot is worth looking at first: the prompt has its last answer where it would be, or the end of
        its last prompt."""
        text, asked, key = slot.text, slot.asked, self.query.key
        if text is not None and text.drawn and key.startswith(text.drawn, len(text.key)):
            return 2
        return int(asked is not None and key.startswith(asked.key[-64:], max(0, len(asked.key) - 64)))

    def begins(self, text: LiveText) -> bool:
        """Does the prompt's text begin with this one? The end is looked at first: it tells most texts apart."""
        key, base = self.query.key, text.key
        if not key.startswith(text.drawn, len(base)) or not key.startswith(base[-64:], max(0, len(base) - 64)):
            return False
        known = self._begins.get(id(base))
        if known is None:
            known = self._begins[id(base)] = key.startswith(base)
            self.compared_bytes += len(base)
        return known

    def by_text(self, slot: Slot, beyond: int) -> Reuse | None:
        """What of the slot's state has a text that the prompt's begins with; None: not more than `beyond` tokens."""
        found, asked = self._by_text.get(slot.index, (None, -1))
        if found is None and (asked < 0 or beyond < asked):
            found = _by_text(slot, self, beyond)
            self._by_text[slot.index] = found, beyond
        return found if found is not None and found.tokens > beyond else None

    def sources(self, beyond: int) -> tuple[Slot, ...]:
        """The slots that have more than `beyond` tokens of the prompt, in one way or the other, and maybe some that
        have less: each slot of a decision asks, and mostly there are none."""
        if self._sources_beyond is None or beyond < self._sources_beyond:
            self._sources_beyond = beyond
            self._sources = tuple(
                slot
                for slot in self.slots
                if not slot.loading
                and slot.session.n_tokens > beyond
                and (self.reach(slot, beyond)[0] > beyond or self.by_text(slot, max(beyond, NEAR)) is not None)
            )
        return self._sources

    def checkpoint(self, beyond: int) -> Entry | None:
        """The best checkpoint on disk with more than `beyond` tokens."""
        if self._store is not None and (self._asked_beyond is None or beyond < self._asked_beyond):
            if self._entry is None:
                self._entry = self._store.find(self.query.key, beyond)
            self._asked_beyond = beyond
        return self._entry if self._entry is not None and self._entry.tokens > beyond else None


class Tier(Protocol):
    """One rung of the ladder."""

    margin: int
    """Tokens by which it has to beat the tiers before it."""

    def probe(self, slot: Slot, lookup: Lookup, beyond: int) -> Reuse | None:
        """What it can keep; nobody wants it unless it is more than `beyond` tokens."""

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        """Brings the session to `reuse.tokens` tokens. Raises whatever the session raises when it cannot after all."""


class VisibleText:
    """What the client saw of the live state is a proper prefix of its prompt."""

    margin = 0

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def probe(self, slot: Slot, lookup: Lookup, beyond: int) -> Reuse | None:
        seen = slot.visible
        if seen is None or seen.kind != self._kind or not 0 < len(seen.key) < len(lookup.query.key):
            return None
        text = seen.text
        if not 0 < slot.session.n_tokens == seen.tokens or not lookup.begins(text):
            return None
        return Reuse(self._kind, seen.tokens, text_bytes=len(seen.key), left_out=True, name=text)

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        """The session is there already."""


class ToolOutput:
    """The prompt answers exactly the calls that the live state ends with: their ids bind it to this state."""

    margin = 0

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def probe(self, slot: Slot, lookup: Lookup, beyond: int) -> Reuse | None:
        wanted = lookup.query.continues
        if wanted is None or wanted.kind != self._kind or not slot.bound_to(wanted.turn):
            return None
        if not wanted.required and (slot.asked is None or not lookup.begins(slot.asked)):
            return None  # the client has changed what was before the calls
        assert slot.bound is not None
        seen = slot.visible
        left_out = seen is not None and lookup.begins(seen.text)
        return Reuse(self._kind, slot.bound.tokens, tail=slot.bound.missing, rest=wanted.tail, left_out=left_out)

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        """The session is there already."""


class MemoryToken:
    """The live tokens are a proper prefix of the prompt."""

    margin = 0

    def probe(self, slot: Slot, lookup: Lookup, beyond: int) -> Reuse | None:
        live = slot.session.n_tokens
        return Reuse("memory-token", live) if 0 < live == lookup.common(slot, beyond) else None

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        """The session is there already."""


class MemoryRewind:
    """The prompt leaves the live tokens somewhere, or ends within them: the session is cut back.

    A prompt that is live as a whole is cut to all but its last token, which is evaluated again for its logits.
    """

    margin = 0

    def probe(self, slot: Slot, lookup: Lookup, beyond: int) -> Reuse | None:
        kept, state = lookup.reach(slot, beyond)
        return Reuse("memory-rewind", kept, state=state) if beyond < kept < slot.session.n_tokens else None

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        slot.cut(reuse.tokens, reuse.state)


class MemoryText:
    """The text of the live tokens, of the last prompt among them or of a snapshot is a prefix of the prompt's."""

    margin = NEAR

    def probe(self, slot: Slot, lookup: Lookup, beyond: int) -> Reuse | None:
        return lookup.by_text(slot, beyond)

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        slot.cut(reuse.tokens, reuse.state)


def _by_text(slot: Slot, lookup: Lookup, beyond: int) -> Reuse | None:
    """What of the slot's state has a text that the prompt's begins with, more than `beyond` tokens: the most of it."""
    best: Reuse | None = None
    live = [(text, None) for text in (slot.text, slot.asked) if text is not None]
    past = [(text, snapshot.session) for snapshot in slot.past for text in snapshot.names]
    for text, state in sorted([*live, *past], key=lambda named: -named[0].tokens):
        if text.tokens <= (best.tokens if best else beyond):
            break
        found = _named(state or slot.session, text, lookup)
        if found is not None and found.tokens > (best.tokens if best else beyond):
            best = replace(found, state=state)
    return best


def _named(session: SessionLike, text: LiveText, lookup: Lookup) -> Reuse | None:
    """What of the session stands for the text, when the prompt's begins with it.

    A prompt may be asked again as a whole: then its last token is evaluated again.
    """
    again = text.size == len(lookup.query.key)
    kept = text.tokens - again
    if kept < 1 or text.tokens > session.n_tokens or (again and text.last < 0) or not session.can_rewind(kept):
        return None
    if not text.size or not lookup.begins(text):
        return None
    tail = (text.last,) if again else ()
    return Reuse("memory-text", kept, text_bytes=text.size, tail=tail, left_out=text.left_out, name=text)


class Fork:
    """The longest common prefix lives in another slot, busy or not: its state is copied and the other left alone."""

    margin = 32

    def probe(self, slot: Slot, lookup: Lookup, beyond: int) -> Reuse | None:
        best: Reuse | None = None
        for other in lookup.sources(beyond):
            if other is slot:
                continue
            most = max(beyond, best.tokens if best else 0)
            kept, state = lookup.reach(other, most)
            if kept > most:
                best = Reuse("fork", kept, in_place=False, source=other, state=state)
            by_text = lookup.by_text(other, max(beyond, (best.tokens if best else 0) + NEAR))
            if by_text is not None:
                best = replace(by_text, kind="fork", in_place=False, source=other)
        return best

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        assert reuse.source is not None
        slot.become(reuse.state or reuse.source.session, reuse.tokens)


class Disk:
    """The text of a checkpoint is a prefix of the prompt's. The scheduler loads it beside the running steps."""

    margin = 64

    def probe(self, slot: Slot, lookup: Lookup, beyond: int) -> Reuse | None:
        entry = lookup.checkpoint(beyond)
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

    def probe(self, slot: Slot, lookup: Lookup, beyond: int) -> Reuse | None:
        return NOTHING

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        if slot.session.n_tokens:
            slot.clear()


LADDER: dict[str, Tier] = {
    "responses-visible": VisibleText("responses-visible"),
    "responses-tool-output": ToolOutput("responses-tool-output"),
    "anthropic-tool-output": ToolOutput("anthropic-tool-output"),
    "memory-rewind": MemoryRewind(),
    "memory-token": MemoryToken(),
    "thinking-visible": VisibleText("thinking-visible"),
    "memory-text": MemoryText(),
    "fork": Fork(),
    "disk-text": Disk(),
    "none": Cold(),
}


_WITHOUT_NAMES = tuple(tier for tier in LADDER.values() if not isinstance(tier, VisibleText | ToolOutput))
"""What there is to ask where the client saw what the state holds, and no turn with calls is gone on with."""


def probe(slot: Slot, lookup: Lookup, beyond: int = 0) -> Reuse:
    """The best that `slot` can do for the prompt; NOTHING too when it keeps no more than `beyond` tokens."""
    if lookup.query.continues is not None and lookup.query.continues.required:
        return LADDER[lookup.query.continues.kind].probe(slot, lookup, 0) or NOTHING
    best = NOTHING
    # Nothing is better than to evaluate one token, but for what the client saw, which stands for the state itself.
    enough = len(lookup.query.prompt) - 1 if slot.visible is None else sys.maxsize
    for tier in LADDER.values() if slot.visible is not None or lookup.query.continues is not None else _WITHOUT_NAMES:
        if best.tokens >= enough > 0:
            break
        least = max(best.tokens, beyond) + tier.margin
        found = tier.probe(slot, lookup, least)
        if found is not None and found.tokens > least:
            best = found
    return best


def materialise(slot: Slot, query: Query, reuse: Reuse) -> Reuse:
    """Brings `slot.session` to the promised prefix and returns what is really kept.

    That is `reuse`, or `NOTHING` when the session failed to deliver: a cache may only change speed.
    """
    try:
        LADDER[reuse.kind].materialise(slot, query, reuse)
        if reuse.state is not None and reuse.text_bytes is None:
            same = slot.session.common_prefix(query.prompt)
            if same < reuse.tokens:
                raise SessionInvalidError(f"{same} tokens of the prompt, the session promised {reuse.tokens}")
    except Exception as error:
        log.warning("slot %d: %s of %d tokens failed: %s", slot.index, reuse.kind, reuse.tokens, error, exc_info=True)
        slot.clear()
        return NOTHING
    return reuse


def settle(slot: Slot, query: Query, reuse: Reuse, tokenizer: Tokenizer) -> tuple[Reuse, Query] | None:
    """What is kept and the prompt to go on with, once `reuse` was carried out.

    State that was chosen by its text stays as it is, unless the prompt's own tokens are nearly all there: then the
    last few are given up and nothing differs from an evaluation from the start. None when the session cannot go on
    with this prompt (too long with what it holds, nothing left to evaluate, or cut inside a character).
    """
    if reuse.text_bytes is None and reuse.rest is None:
        return reuse, query
    session = slot.session
    live = session.n_tokens
    if reuse.text_bytes is None or reuse.rest is not None:
        more = tokens_of_key(tokenizer, reuse.rest or b"")
        return _grown(session, query, reuse, more)
    common = min(session.common_prefix(query.prompt), len(query.prompt) - 1)
    if common > 0 and live - common <= NEAR and session.can_rewind(common):
        slot.cut(common)
        return replace(reuse, tokens=common, text_bytes=None), query
    return _grown(session, query, reuse, tokens_of_key(tokenizer, query.key[reuse.text_bytes :]))


def _grown(session: SessionLike, query: Query, reuse: Reuse, more: list[int] | None) -> tuple[Reuse, Query] | None:
    """The prompt that is the session's tokens, what is evaluated again, and `more`."""
    live = session.n_tokens
    rest = None if more is None else [*reuse.tail, *more]
    if not rest or live + len(rest) >= session.ctx:
        return None
    prompt = np.concatenate([session.tokens, np.asarray(rest, np.int32)])
    return replace(reuse, tokens=live), replace(query, prompt=prompt, continues=None)
