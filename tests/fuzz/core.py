"""Fuzz target of `ds4._core`: UTF-8, stop strings, hashes and prefixes in any split, against their definitions."""

from __future__ import annotations

import hashlib
import random

from ds4 import _core


def _split(data: bytes, step: int) -> list[bytes]:
    return [data[i : i + step] for i in range(0, len(data), step)]


def _first_match(stops: list[bytes], text: bytes) -> tuple[bytes, bytes | None]:
    """(text before, stop string): the first end decides, then the greatest length."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if s and text[:end].endswith(s)]
        if hits:
            best = max(hits, key=len)
            return text[: end - len(best)], best
    return text, None


def target(data: bytes) -> None:
    """Byte 0: number of stop strings; byte 1: width of the pieces; then the stop strings, each behind its length."""
    if len(data) < 2:
        return
    step, stops, at = data[1] % 9 + 1, [], 2
    for _ in range(data[0] % 5):
        length = data[at] % 8 if at < len(data) else 0
        stops.append(data[at + 1 : at + 1 + length])
        at += 1 + length
    text = data[at:]

    decoder = _core.Utf8Decoder()
    assert "".join([*map(decoder.feed, _split(text, step)), decoder.finish()]) == text.decode("utf-8", "replace")

    matcher, out = _core.StopMatcher(stops), b""
    for piece in _split(text, step):
        out += matcher.feed(piece)[0]
    out += matcher.finish()
    assert (out, matcher.matched) == _first_match(stops, text)

    sha = _core.Sha1()
    for piece in _split(text, step):
        sha.update(piece)
    assert sha.digest() == _core.sha1(text) == hashlib.sha1(text).digest()
    words = memoryview(text[: len(text) & ~3]).cast("I")
    ids = words.tolist()
    assert _core.sha1_tokens(ids) == _core.sha1_tokens(words) == hashlib.sha1(words).digest()

    cut = len(ids) * data[1] // 256
    other = [*ids[:cut], *(i ^ 1 for i in ids[cut:])]
    assert _core.common_prefix_tokens(ids, other) == _core.common_prefix_tokens(words, tuple(other)) == cut
    assert _core.common_prefix(text, text[:step] + b"\x00") in range(min(step, len(text)), len(text) + 1)

    folded = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    assert _core.frame_event(b"data: ", text) == b"data: " + folded + b"\n\n"
    assert _core.frame_event(b"", text, True) == _core.frame_chunk(folded + b"\n\n")

    repaired = _core.repair_surrogates(text.decode("utf-8", "surrogatepass") if _decodes(text) else "")
    assert repaired == repaired.encode().decode()


def _decodes(text: bytes) -> bool:
    try:
        text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def example(rng: random.Random) -> bytes:
    """Few letters, so that stop strings nearly match; some text of every width; some broken."""
    alphabet = rng.choice([b"ab", b"abc"])
    out = rng.randbytes(2)
    for _ in range(out[0] % 5):
        stop = bytes(rng.choices(alphabet, k=rng.randrange(7)))
        out += bytes([len(stop)]) + stop
    for _ in range(rng.randrange(30)):
        out += rng.choice([bytes(rng.choices(alphabet, k=4)), "é深🚀".encode(), rng.randbytes(2), b"\xed\xa0\xbd"])
    return out
