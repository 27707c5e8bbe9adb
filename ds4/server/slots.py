"""The resident sessions and which of them a prompt goes to.

Every free slot gets a score; the best goes first, ties to the lower index:

    keeps all live tokens, or all but generated ones   the number of tokens reused  (the conversation goes on)
    empty                                              0                            (never evict for nothing)
    idle for an hour or longer                         below, longest idle first    (nobody waits for it)
    otherwise                                          below that, least loss first

The loss is what the slot's own conversation would have to evaluate again: the live tokens that are not kept. A
prompt that merely shares a preamble with a slot is no reason to cut that slot down while another is empty: the empty
one forks the preamble (`ds4.server.reuse`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ds4.server.reuse import Bound, LiveText, Lookup, Query, Reuse, Visible, probe
from ds4.server.snapshots import Past

if TYPE_CHECKING:
    from ds4.engine.types import EngineLike, SessionLike
    from ds4.server.generation import Generation
    from ds4.server.kvstore import KvStore
    from ds4.server.naming import Naming

STALE_SECONDS = 3600.0
_SPAN = 1 << 20
"""Stale scores are in -1 - _SPAN .. -1, recent ones below."""

log = logging.getLogger("ds4.slots")


@dataclass(eq=False, slots=True)
class Slot:
    """One resident session, the generation that runs on it, and what routing needs to know of its past.

    `prompt_tokens` is the length of the last prompt: what the session holds beyond it was generated. `last_used`
    is on the scheduler's clock. `tokens` is what the session held when its last generation ended: other threads
    read it instead of the session. `text` is the key of what the session held then, `visible` of
    what the client saw of it, `asked` of the last prompt once it is evaluated; `bound` says whose calls it ends with.
    `naming` is on its way to become `text` and `visible`.
    `past` has copies of the session as it was, `last_store` is the last frontier that was stored while the
    conversation grew.
    """

    index: int
    session: SessionLike
    generation: Generation | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    last_used: float = 0.0
    text: LiveText | None = None
    visible: Visible | None = None
    asked: LiveText | None = None
    bound: Bound | None = None
    naming: Naming | None = None
    past: Past = field(default_factory=Past)
    last_store: int = 0

    @property
    def busy(self) -> bool:
        return self.generation is not None

    @property
    def loading(self) -> bool:
        """Another thread is replacing the session: what it holds now may be gone a moment later."""
        return self.generation is not None and self.generation.restoring is not None

    def forget(self) -> None:
        """The session is about to hold something else: no text stands for it."""
        self.text = self.visible = self.asked = self.bound = self.naming = None

    def clear(self) -> None:
        """Empties the session."""
        self.past.drop()
        self.session.clear()

    def cut(self, tokens: int, state: SessionLike | None = None) -> None:
        """Cuts the session to its first `tokens` tokens, by way of a snapshot's `state` where it cannot be cut itself.

        Raises SessionInvalidError.
        """
        if state is None:
            self.session.rewind(tokens)
        else:
            self.session.fork_from(state, tokens)
        self.past.cut(tokens)

    def become(self, state: SessionLike, tokens: int) -> None:
        """The session becomes a copy of the first `tokens` tokens of another one. Raises SessionInvalidError."""
        self.past.drop()
        self.session.fork_from(state, tokens)

    def bound_to(self, turn: str) -> bool:
        """Is the session just what it was when the response `turn` ended with calls?"""
        return self.bound is not None and self.bound.turn == turn and self.bound.tokens == self.session.n_tokens > 0


@dataclass(frozen=True, slots=True)
class Route:
    """Where a prompt goes and what it finds there."""

    slot: Slot
    reuse: Reuse


class Slots:
    """The N resident sessions of an engine; all are created at once, so that the memory plan holds.

    With a `store`, prompts are looked for on disk too.
    """

    def __init__(self, engine: EngineLike, count: int, store: KvStore | None = None) -> None:
        self._store = store
        self._slots = [Slot(index, engine.new_session()) for index in range(count)]

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    @property
    def n_busy(self) -> int:
        return sum(slot.generation is not None for slot in self._slots)

    def route(self, query: Query, now: float) -> Route | None:
        """The best free slot for the prompt, or None while all are busy. Changes nothing.

        Raises RequestError (409) for a prompt that only a live state can serve, when that is gone.
        """
        wanted = query.continues
        if wanted is not None and wanted.required:
            bound = next((slot for slot in self._slots if slot.bound_to(wanted.turn)), None)
            if bound is None:
                raise wanted.gone
            return None if bound.busy else Route(bound, probe(bound, Lookup(query)))
        lookup = Lookup(query, self._slots, self._store)
        best: tuple[int, Route] | None = None
        free = [slot for slot in self._slots if not slot.busy]
        for slot in sorted(free, key=lookup.promise, reverse=True):
            # No score is higher than what is kept: who cannot keep more than the best so far is not looked at closely.
            ahead = max(0, best[0]) if best else 0
            if ahead >= len(query.prompt) - 1 > 0:
                break
            reuse = probe(slot, lookup, ahead)
            if ahead and reuse.tokens <= ahead:
                continue
            points = score(slot, reuse, now)
            if best is None or points > best[0]:
                best = points, Route(slot, reuse)
        return best[1] if best else None

    def probe(self, slot: Slot, query: Query) -> Reuse:
        """The best for the prompt in this very slot."""
        return probe(slot, Lookup(query, self._slots, self._store))

    def close(self) -> None:
        for slot in self._slots:
            slot.past.drop()
            slot.session.close()


def score(slot: Slot, reuse: Reuse, now: float) -> int:
    """How good it is to give the free `slot` to a prompt that finds `reuse` there (see the table above)."""
    live = slot.session.n_tokens
    kept = reuse.tokens if reuse.in_place else 0
    if kept and (kept == live or kept >= slot.prompt_tokens - 1 > 0):
        return kept
    if live == 0:
        return 0
    idle = now - slot.last_used
    if idle >= STALE_SECONDS:
        return -1 - _SPAN + min(int(idle), _SPAN)
    return -2 - _SPAN - (live - kept)


def describe(route: Route, prompt_tokens: int, now: float) -> str:
    """The decision in one line, for the log."""
    slot, reuse = route.slot, route.reuse
    live = slot.session.n_tokens
    origin = f" of slot {reuse.source.index}" if reuse.source is not None else ""
    if reuse.state is not None:
        origin += " (snapshot)"
    text = f"slot {slot.index}: {reuse.kind}{origin}, {reuse.tokens} of {prompt_tokens} prompt tokens reused"
    lost = live - reuse.tokens if reuse.in_place else live
    if lost > 0:
        idle = now - slot.last_used
        state = "stale" if idle >= STALE_SECONDS else "recent"
        text += f", {lost} of {live} live tokens dropped (idle {idle:.0f} s, {state})"
    return text


def log_route(line: str) -> None:
    log.info("%s", line)
