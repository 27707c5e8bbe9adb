"""Copies of a session as it was: for families whose sessions cannot be cut back far.

A ring forgets what it has no room for. DeepSeek V4's hold their windows and 128 positions more: behind an answer of 400
tokens the session cannot go back to the prompt, which a client may ask again or with another last turn. So its slot
keeps forks of it, which share all whole pages with it, from where a client may want to go on:

    before the new part of a prompt   another last turn may follow what was kept
    inside a long new prompt          before its first and its last user turn: other conversations have what leads to
                                      the one in common, another last turn may follow the other; and where its last
                                      whole chunk ends, for a turn that is long itself and has another end
    behind a prompt                   it may be asked again

All snapshots of a slot are beginnings of its session: what the session loses, they lose. So they never hold anything
that the session does not, and a prompt's common prefix with the session is also that with each of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds4.server.keys import Markers, anchor, last_turn

if TYPE_CHECKING:
    from ds4.engine.types import EngineLike, SessionLike
    from ds4.server.generation import Generation
    from ds4.server.reuse import LiveText
    from ds4.server.slots import Slot

LEAST = 64
"""Tokens; less are evaluated sooner than they are worth a copy."""
SPLIT_FROM = 512
"""Tokens of a new prompt that is worth a chunk's end of its own before its last turn."""
REACH = 128
"""Tokens that a copy behind the prompt is likely to be cut back by."""
_NAMES = 4
_CHECK_SECONDS = 1.0

log = logging.getLogger("ds4.snapshots")


@dataclass(eq=False, slots=True)
class Snapshot:
    """`session` is nobody else's. `names` are texts that its tokens, or the first of them, stand for. `turn`: a turn
    begins behind it, or not far before its end; else an answer does."""

    session: SessionLike
    names: tuple[LiveText, ...] = ()
    turn: bool = True

    def name(self, names: Iterable[LiveText]) -> None:
        """Takes over those that it can be cut to, the longest few."""
        new = [name for name in names if name not in self.names and self.session.can_rewind(name.tokens)]
        self.names = tuple(sorted((*self.names, *new), key=lambda name: name.tokens)[-_NAMES:])

    @property
    def tokens(self) -> int:
        return self.session.n_tokens


class Past:
    """The snapshots of one slot, shortest first."""

    def __init__(self) -> None:
        self._kept: list[Snapshot] = []

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._kept)

    def best(self, common: int) -> tuple[int, SessionLike] | None:
        """The most of the session's first `common` tokens that a snapshot can be cut to, and whose state that is."""
        for snapshot in reversed(self._kept):
            tokens = min(common, snapshot.tokens)
            if tokens and snapshot.session.can_rewind(tokens):
                return tokens, snapshot.session
        return None

    def at(self, tokens: int) -> Snapshot | None:
        return next((snapshot for snapshot in self._kept if snapshot.tokens == tokens), None)

    def add(self, added: Snapshot, most: int) -> None:
        """Keeps one more, longer than all others, at most `most` in all.

        Shorter ones that it can stand for itself are given up.
        """
        for snapshot in tuple(self._kept):
            if added.session.can_rewind(snapshot.tokens):
                added.name(snapshot.names)
                added.turn |= snapshot.turn
                self._drop(snapshot)
        self._kept.append(added)
        while len(self._kept) > most:
            self._drop(self._least())

    def _least(self) -> Snapshot:
        """The one to do without: the next shorter one stands for it at the price of the tokens between them. The last
        turn is edited more often than earlier ones, and those more often than an earlier answer is asked for again."""
        best: tuple[float, Snapshot] | None = None
        before = 0
        for age, snapshot in zip(range(len(self._kept) - 1, 0, -1), self._kept, strict=False):
            worth = (snapshot.tokens - before) / min(2**age, 4) / (1 if snapshot.turn else 2)
            if best is None or worth < best[0]:
                best = worth, snapshot
            before = snapshot.tokens
        return best[1] if best else self._kept[0]

    def cut(self, tokens: int) -> None:
        """The session was cut to its first `tokens` tokens."""
        for snapshot in tuple(self._kept):
            if snapshot.tokens <= tokens:
                continue
            if tokens < LEAST or not snapshot.session.can_rewind(tokens) or self.at(tokens) is not None:
                self._drop(snapshot)
            else:
                snapshot.session.rewind(tokens)
                snapshot.names = tuple(name for name in snapshot.names if name.tokens <= tokens)

    def drop(self) -> None:
        """The session holds something else, or nothing."""
        for snapshot in self._kept:
            snapshot.session.close()
        self._kept.clear()

    def _drop(self, snapshot: Snapshot) -> None:
        self._kept.remove(snapshot)
        snapshot.session.close()


class Snapshots:
    """When the slots of one scheduler take snapshots. A copy that fails costs speed, never a request."""

    def __init__(
        self, engine: EngineLike, slots: Iterable[Slot], markers: Markers | None, clock: Callable[[], float]
    ) -> None:
        self._most = engine.plan.snapshots
        self._bytes = engine.plan.snapshot_bytes
        self._engine = engine
        self._slots = slots
        self._markers = markers
        self._clock = clock
        self._checked = -_CHECK_SECONDS
        self._room = True
        self._specials = list(engine.tokenizer.special_ids.values()) if markers is not None else []

    def begin(self, generation: Generation) -> None:
        """The new part of the prompt is about to be evaluated: marks where its chunks have to end."""
        if not self._most:
            return
        reuse, prompt, key = generation.reuse, generation.job.prompt, generation.job.query.key
        self.take(generation.slot)
        total, kept = len(prompt), reuse.tokens
        if self._markers is None or total - kept < SPLIT_FROM or reuse.text_bytes is not None or reuse.rest is not None:
            return
        chunk = self._engine.config.prefill_chunk
        wanted = {(total - REACH) // chunk * chunk: False}
        wanted[last_turn(prompt, key, self._markers, self._specials)] = True
        if kept == 0:
            wanted[anchor(prompt, key, self._markers, self._specials)] = True
        least = max(LEAST, kept + REACH)
        generation.places = {place: turn for place, turn in wanted.items() if least <= place < total - REACH}
        generation.stop_at(generation.places)

    def reached(self, generation: Generation) -> None:
        """A chunk or a token was evaluated."""
        turn = generation.places.get(generation.slot.session.n_tokens)
        if turn is not None:
            self.take(generation.slot, turn=turn)

    def take(self, slot: Slot, names: tuple[LiveText, ...] = (), *, turn: bool = True) -> None:
        """Keeps the session as it is now; `turn`: a turn is about to begin."""
        tokens = slot.session.n_tokens
        if not self._most or tokens < LEAST:
            return
        known = slot.past.at(tokens)
        if known is not None:
            known.name(names)
            return
        if not self._has_room():
            return
        session = self._engine.new_session(slot.session.ctx)
        try:
            session.fork_from(slot.session)
        except Exception as error:
            session.close()
            log.warning("slot %d: no snapshot of %d tokens: %s", slot.index, tokens, error)
            return
        slot.past.add(Snapshot(session, names, turn), self._most)

    def _has_room(self) -> bool:
        """Snapshots are the first thing to do without when memory is short."""
        now = self._clock()
        if now - self._checked >= _CHECK_SECONDS:
            self._checked = now
            left = self._engine.memory_left
            self._room = left is None or left >= self._bytes
            if not self._room:
                dropped = 0
                for slot in self._slots:
                    dropped += len(slot.past)
                    slot.past.drop()
                log.warning("memory is short (%d bytes left): %d snapshots dropped, none taken", left, dropped)
        return self._room
