"""What a slot can reuse of a prompt: one ladder of tiers, asked by routing and carried out by admission.

`probe` is cheap: it compares tokens and asks the session what it can do; it never tokenises and changes nothing.
`materialise` brings the slot's session to exactly what the probe promised. Routing scores with the same probe whose
answer is then materialised, so the two cannot disagree.

The tier that keeps most of the prompt wins; the order of the ladder breaks ties. A tier that has to copy or read
state must beat the others by its `margin`, or it is not worth the copy.

    tier            keeps                                    the slot's session
    memory-token    all live tokens, a prefix of the prompt  grows
    memory-rewind   the common prefix                        is cut, where its family can
    fork            the common prefix with another slot      becomes a copy of that slot's, cut
    none            nothing                                  is cleared
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ds4.server.slots import Slot


log = logging.getLogger("ds4.reuse")


@dataclass(frozen=True, slots=True)
class Reuse:
    """`tokens` leading tokens of the prompt that need no evaluation, by tier `kind`; `source` is forked from.

    `tokens` is always less than the prompt: its last token is evaluated for the logits. `in_place` says that the
    slot's own state is what is kept.
    """

    kind: str
    tokens: int
    in_place: bool = True
    source: Slot | None = None


NOTHING = Reuse("none", 0, in_place=False)


@dataclass(frozen=True, slots=True)
class Query:
    """What the tiers look at: the prompt, [n] int32, and its cache key."""

    prompt: npt.NDArray[np.int32]
    key: bytes = b""


class Lookup:
    """One decision: the query, the slots that may be forked from, and each one's common prefix, computed once.

    Good until a session changes.
    """

    def __init__(self, query: Query, slots: Iterable[Slot] = ()) -> None:
        self.query = query
        self.slots = tuple(slots)
        self._common: dict[int, int] = {}

    def common(self, slot: Slot) -> int:
        """Tokens that the prompt, without its last token, shares with the slot's session."""
        found = self._common.get(slot.index)
        if found is None:
            found = min(slot.session.common_prefix(self.query.prompt), len(self.query.prompt) - 1)
            self._common[slot.index] = found
        return found


class Tier(Protocol):
    """One rung of the ladder."""

    margin: int
    """Tokens by which it has to beat the tiers before it."""

    def probe(self, slot: Slot, lookup: Lookup) -> Reuse | None: ...
    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        """Brings the session to `reuse.tokens` tokens. Raises whatever the session raises when it cannot after all."""


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


class Fork:
    """The longest common prefix lives in another slot, busy or not: its state is copied and the other left alone."""

    margin = 32

    def probe(self, slot: Slot, lookup: Lookup) -> Reuse | None:
        best: Reuse | None = None
        for other in lookup.slots:
            if other is slot:
                continue
            kept = lookup.common(other)
            if kept > (best.tokens if best else 0) and other.session.can_rewind(kept):
                best = Reuse("fork", kept, in_place=False, source=other)
        return best

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        assert reuse.source is not None
        slot.session.fork_from(reuse.source.session, reuse.tokens)


class Cold:
    """Nothing is kept."""

    margin = 0

    def probe(self, slot: Slot, lookup: Lookup) -> Reuse | None:
        return NOTHING

    def materialise(self, slot: Slot, query: Query, reuse: Reuse) -> None:
        if slot.session.n_tokens:
            slot.session.clear()


LADDER: dict[str, Tier] = {
    "memory-token": MemoryToken(),
    "memory-rewind": MemoryRewind(),
    "fork": Fork(),
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
