"""When checkpoints are written and which go: the numbers of the policy."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from ds4.errors import ConfigError
from ds4.server.kvpolicy import (
    Candidate,
    Incoming,
    KvConfig,
    cold_length,
    continued_frontier,
    fits,
    score,
    store_length,
    supersedes,
    victims,
)

NOW = 1_000_000_000


def config(**fields: Any) -> KvConfig:
    return KvConfig(Path("unused"), **fields)


def file(name: str, tokens: int, size: int, **fields: Any) -> Candidate:
    return Candidate(name, size, tokens, **{"used": NOW, "reason": "cold", **fields})


def name_of(text: bytes) -> str:
    return hashlib.sha1(text).hexdigest()


@pytest.mark.parametrize(
    ("fields", "prompt", "stored"),
    [
        ({}, 11011, 10240),
        ({}, 1695, 1695),
        ({"boundary_trim": 0, "boundary_align": 1000}, 3500, 3000),
        ({"boundary_trim": 0, "boundary_align": 0}, 3500, 3500),
        ({}, 10000, 8192),
        ({"boundary_align": 0}, 1000, 968),
    ],
)
def test_store_length(fields: dict[str, Any], prompt: int, stored: int) -> None:
    assert store_length(config(**fields), prompt) == stored


def test_cold_length() -> None:
    assert cold_length(config(), 511, 511) == 0, "too short"
    assert cold_length(config(), 30001, 600) == 0, "too long"
    assert cold_length(config(cold_max=0), 1000, 600) == 0
    assert cold_length(config(), 5000, 600) == 600
    assert cold_length(config(), 5000, 511) == 4096, "an anchor below the minimum is none"
    assert cold_length(config(), 5000, -1) == 4096


@pytest.mark.parametrize(
    ("live", "last", "fields", "frontier"),
    [
        (10239, 0, {}, 0),
        (10240, 0, {}, 10240),
        (10240, 4096, {}, 10240),
        (30720, 24576, {}, 30720),
        (18432, 10240, {}, 0),
        (20480, 10240, {}, 20480),
        (20480, 20480, {}, 0),
        (29999, 20480, {"boundary_align": 0}, 0),
        (30000, 20480, {"boundary_align": 0}, 30000),
        (10240, 0, {"continued_interval": 0}, 0),
    ],
)
def test_continued_frontiers_are_absolute(live: int, last: int, fields: dict[str, Any], frontier: int) -> None:
    assert continued_frontier(config(**fields), live, last) == frontier


def test_one_per_cent_of_headroom() -> None:
    small = config(budget_bytes=1100)
    assert fits(small, 48 + 4 + 100 + 930)
    assert not fits(small, 48 + 4 + 100 + 938)
    assert not fits(small, 48 + 4 + 100 + 900 + 40)


def test_bad_configurations() -> None:
    with pytest.raises(ConfigError, match="cold-max-tokens: expected 0 or at least the minimum of 512, got 100"):
        config(cold_max=100)
    with pytest.raises(ConfigError, match="min-tokens"):
        config(min_tokens=0)


def test_denser_files_and_anchors_stay() -> None:
    dense, thin = file("dense", 2048, 2048), file("thin", 512, 4096)
    assert victims([dense, thin], 5000, 0, NOW) == [thin]
    anchor, step = file("anchor", 100, 1000), file("step", 100, 1000, reason="continued")
    assert victims([anchor, step], 1500, 0, NOW) == [step]


def test_room_for_a_new_file() -> None:
    files = [file("a", 10, 400, used=NOW - 2), file("b", 10, 400, used=NOW - 1)]
    assert victims(files, 1000, 200, NOW) == []
    assert victims(files, 1000, 201, NOW) == [files[0]], "equal scores: the one used longest ago"
    assert victims(files, 1000, 1000, NOW) == files
    assert victims(files, 1000, 1001, NOW) == [], "what never fits costs nobody a place"


def test_a_superseded_step_goes_first() -> None:
    text = bytes(range(200))
    step = file(name_of(text[:100]), 100, 1000, reason="continued", text_bytes=100, ctx=32768, model=1)
    poor = file("poor", 100, 1800)
    assert score(step, NOW) > 0.5 * score(poor, NOW)
    assert victims([step, poor], 2800, 500, NOW, Incoming(text, 1, 32768)) == [step]
    assert supersedes(Incoming(text, 1, 32768), step)
    assert not supersedes(Incoming(text, 1, 65536), step), "the old file is of use in smaller contexts"
    assert not supersedes(Incoming(text, 2, 32768), step)
    assert not supersedes(Incoming(text[:100], 1, 32768), step), "not longer"
    assert not supersedes(Incoming(text[50:], 1, 32768), step), "another text"


def test_hits_fade() -> None:
    half = 6 * 3600
    old, fresh = file("old", 100, 1000, hits=10, used=NOW - 14 * half), file("fresh", 120, 1000)
    assert score(old, NOW) < score(fresh, NOW)
    assert score(file("x", 100, 1000, hits=3), NOW) == pytest.approx(4 * score(file("x", 100, 1000), NOW))
    assert score(file("x", 100, 1000, hits=3, used=NOW - half), NOW) == pytest.approx(2.5 * 0.2)
    assert score(file("x", 100, 1000, hits=3, used=0), NOW) == pytest.approx(0.2)
    assert score(Candidate("foreign", 1000), NOW) == 0


def test_a_big_step_survives_a_small_anchor() -> None:
    """The value counts tokens per byte: the fixed part of a small file weighs."""
    big, small = file("big", 20480, 20480 * 100, reason="continued"), file("small", 600, 600 * 250)
    assert victims([big, small], 20480 * 100, 0, NOW) == [small]


@pytest.mark.parametrize("seed", range(5))
def test_victims_are_the_least_valuable(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    files = [
        file(f"{i}", rng.randrange(1, 5000), rng.randrange(1, 10**6), hits=rng.randrange(5), used=NOW - i)
        for i in range(200)
    ]
    total = sum(f.size for f in files)
    extra = rng.randrange(total // 2)
    gone = victims(files, total - 1, extra, NOW)
    left = [f for f in files if f not in gone]
    assert sum(f.size for f in left) + extra <= total - 1
    assert sum(f.size for f in left) + extra + gone[-1].size > total - 1, "not one more than needed"
    assert max(score(f, NOW) for f in gone) <= min(score(f, NOW) for f in left)
