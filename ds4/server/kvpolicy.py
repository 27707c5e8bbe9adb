"""When a checkpoint is worth writing, and which one has to go: arithmetic only, no files and no clock.

Frontiers are token counts. They are absolute (multiples of one step from the beginning of the prompt), so that
conversations with a common beginning meet at the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ds4._core import sha1_hex
from ds4.errors import ConfigError

HALF_LIFE_SECONDS = 6 * 3600
LEAST_HITS = 0.01
"""Decayed hits below this count as none."""
ANCHORS = frozenset(("cold", "evict", "shutdown"))
"""Reasons that mark where conversations end or branch."""
ANCHOR_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class KvConfig:
    """Where checkpoints lie and when they are written. Sizes in tokens but for `budget_bytes`.

    `cold_max` 0 writes none of long new prompts, `continued_interval` 0 none while a conversation grows.
    `boundary_trim` tokens at the end of a prompt are left out, then down to a multiple of `boundary_align` (0: any).
    """

    directory: Path
    budget_bytes: int = 4096 << 20
    min_tokens: int = 512
    cold_max: int = 30000
    continued_interval: int = 10000
    boundary_trim: int = 32
    boundary_align: int = 2048
    read_only: bool = False

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ConfigError(f"--kv-cache-min-tokens: expected a positive number, got {self.min_tokens}")
        if 0 < self.cold_max < self.min_tokens:
            raise ConfigError(
                f"--kv-cache-cold-max-tokens: expected 0 or at least the minimum of {self.min_tokens}, "
                f"got {self.cold_max}"
            )

    @property
    def step(self) -> int:
        """Distance of continued frontiers, 0 for none."""
        interval, align = self.continued_interval, self.boundary_align
        return -(-interval // align) * align if align > 0 else interval


def fits(config: KvConfig, file_bytes: int) -> bool:
    """A file may take the budget less one per cent of its own size."""
    return file_bytes + -(-file_bytes // 100) <= config.budget_bytes


def store_length(config: KvConfig, prompt_tokens: int) -> int:
    """How much of a prompt to store: without its end, which the next tokens may change, down to the grid."""
    if prompt_tokens > config.min_tokens + config.boundary_trim:
        kept = prompt_tokens - config.boundary_trim
        if config.boundary_align > 0:
            kept -= kept % config.boundary_align
        if kept >= config.min_tokens:
            return kept
    return prompt_tokens


def cold_length(config: KvConfig, prompt_tokens: int, anchor: int) -> int:
    """Tokens of a new prompt to store, 0 for none. `anchor` ends what conversations may share; -1: unknown."""
    if not config.min_tokens <= prompt_tokens <= config.cold_max:
        return 0
    return anchor if anchor >= config.min_tokens else store_length(config, prompt_tokens)


def continued_frontier(config: KvConfig, live: int, last_store: int) -> int:
    """`live` if a growing session is to be stored there, else 0."""
    step = config.step
    return live if step > 0 and live >= config.min_tokens and live % step == 0 and live > last_store else 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """What eviction looks at. `tokens` 0 is a file that nobody can use."""

    name: str
    size: int
    tokens: int = 0
    hits: int = 0
    used: int = 0
    reason: str = "unknown"
    model: object = None
    ctx: int = 0
    text_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Incoming:
    """The checkpoint that needs room."""

    text: bytes
    model: object
    ctx: int


def supersedes(incoming: Incoming, old: Candidate) -> bool:
    """Does the new file hold everything that the old one, an automatic step on the same way, does?"""
    return (
        old.reason == "continued"
        and 0 < old.text_bytes < len(incoming.text)
        and old.model == incoming.model
        and incoming.ctx <= old.ctx
        and sha1_hex(incoming.text[: old.text_bytes]) == old.name
    )


def score(candidate: Candidate, now: float, incoming: Incoming | None = None) -> float:
    """Value of keeping a file: tokens per byte, more with recent hits and for anchors, less when superseded."""
    if candidate.size <= 0 or candidate.tokens <= 0:
        return 0.0
    hits = float(candidate.hits) if candidate.used else 0.0
    if now > candidate.used:
        hits *= 2.0 ** (-(now - candidate.used) / HALF_LIFE_SECONDS)
        if hits < LEAST_HITS:
            hits = 0.0
    value = (hits + 1) * candidate.tokens / candidate.size
    if candidate.reason in ANCHORS:
        value *= ANCHOR_FACTOR
    if incoming is not None and supersedes(incoming, candidate):
        value *= 0.05 + 0.45 * hits / (hits + 1)
    return value


def victims(
    candidates: list[Candidate], budget: int, extra: int, now: float, incoming: Incoming | None = None
) -> list[Candidate]:
    """What to remove so that `extra` more bytes fit; the least valuable first, of equals the one used longest ago.

    Nothing for an `extra` that never fits: a file that is not written must not cost others their place.
    """
    if extra > budget:
        return []
    total = sum(c.size for c in candidates)
    chosen: list[Candidate] = []
    if total <= budget - extra:
        return chosen
    for candidate in sorted(candidates, key=lambda c: (score(c, now, incoming), c.used, c.name)):
        chosen.append(candidate)
        total -= candidate.size
        if total <= budget - extra:
            break
    return chosen
