"""Which moments of which sessions are stored on disk. Engine thread; the store itself is `ds4.server.kvstore`.

    cold        a long new prompt: what other conversations may share of it, before anything is generated
    continued   a growing session, whenever it stands exactly on an absolute frontier
    evict       a session that gives way to another conversation
    shutdown    every session, at the end

A store never moves a session: prefill chunks end where one is due, and it happens when the session stands there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ds4.server.keys import Markers, anchor, key_of_tokens
from ds4.server.kvfile import RESPONSES_VISIBLE, THINKING_VISIBLE
from ds4.server.kvpolicy import cold_length, continued_frontier
from ds4.server.reuse import NEAR

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ds4.engine.tokenizer import Tokenizer
    from ds4.server.generation import Generation
    from ds4.server.kvstore import KvStore
    from ds4.server.reuse import Reuse
    from ds4.server.slots import Slot

log = logging.getLogger("ds4.kv")

_FLAGS = {"responses-visible": RESPONSES_VISIBLE, "thinking-visible": THINKING_VISIBLE}


class Checkpoints:
    """The policy of one scheduler over one store."""

    def __init__(self, store: KvStore, tokenizer: Tokenizer, markers: Markers | None) -> None:
        self.store = store
        self._config = store.config
        self._tokenizer = tokenizer
        self._markers = markers
        self._specials: npt.NDArray[np.int64] = np.fromiter(tokenizer.special_ids.values(), np.int64)

    def leaving(self, slot: Slot, reuse: Reuse) -> None:
        """The slot's session is about to lose what `reuse` does not keep.

        It is stored when another conversation takes its place, not when the same one answers anew.
        """
        live = slot.session.n_tokens
        kept = reuse.tokens if reuse.in_place else 0
        if live - kept > NEAR and kept < slot.prompt_tokens - 1:
            self._store(slot, "evict")

    def begin(self, generation: Generation) -> None:
        """The prompt is about to be evaluated: marks where its chunks have to end."""
        slot, prompt, kept = generation.slot, generation.job.prompt, generation.reuse.tokens
        total = len(prompt)
        if kept == 0:
            slot.last_store = 0
            place = anchor(prompt, generation.job.query.key, self._markers, self._specials.tolist())
            generation.cold = cold_length(self._config, total, place)
        elif generation.reuse.entry is not None:
            slot.last_store = kept
        if generation.cold:
            generation.stop_at((generation.cold,))
        step = self._config.step
        if step:
            generation.stop_at(range((kept // step + 1) * step, total + 1, step))

    def reached(self, generation: Generation) -> None:
        """A chunk or a token was evaluated."""
        slot = generation.slot
        live = slot.session.n_tokens
        continued = continued_frontier(self._config, live, slot.last_store)
        reason = "cold" if live == generation.cold else "continued" if continued else None
        if reason is None or generation.in_tool_call:
            return
        if self._store(slot, reason, generation.prompt_tokens) and continued:
            slot.last_store = continued

    def end(self, slots: Iterable[Slot]) -> None:
        """Stores what is resident. Nothing runs any more."""
        for slot in slots:
            if slot.session.n_tokens >= self._config.min_tokens:
                log.info(
                    "persisting resident KV cache before shutdown slot=%d tokens=%d", slot.index, slot.session.n_tokens
                )
                self._store(slot, "shutdown")
                self.store.flush()

    def _store(self, slot: Slot, reason: str, prompt_tokens: int = 0) -> bool:
        live = slot.session.n_tokens
        if live < self._config.min_tokens:
            return False
        try:
            key, flags = self._key(slot)
            if not key:
                return False
            return self.store.offer(slot.session, key, reason, flags=flags, trimmed=max(0, prompt_tokens - live))
        except Exception as error:
            log.warning("kv cache store failed (%s): %s", reason, error, exc_info=error)
            return False

    def _key(self, slot: Slot) -> tuple[bytes | None, int]:
        """The text that the next request will begin with, and the flag that says what text it is.

        Clients that send their reasoning back are found by the whole text, until one goes on without it.
        """
        live = slot.session.n_tokens
        seen, text = slot.visible, slot.text
        if seen is not None and seen.tokens == live and not seen.sent:
            return seen.key, _FLAGS[seen.kind]
        if text is not None and text.tokens == live:
            return text.whole, 0
        return key_of_tokens(self._tokenizer, slot.session.tokens.tolist()), 0
