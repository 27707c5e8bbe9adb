"""Where a constraint begins and ends in one generation, with a sampler that only remembers what it is told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from ds4.engine.constraint import Compiler, Constraint, Grammar
from ds4.engine.tokenizer import Tokenizer
from ds4.errors import EngineError
from ds4.server.constrained import Constrained
from tests.support.vocabularies import byte_vocabulary

LONG = ("</think>", "k>\n\n", ">{", ">[")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte, and some longer ones."""
    return byte_vocabulary(*LONG)


@pytest.fixture(scope="module")
def constraint(tokenizer: Tokenizer) -> Constraint:
    return Compiler(tokenizer, tokenizer.vocab_size).compile(Grammar("regex", r"\{[0-9]*\}"))


class Remembering:
    """A sampler without sampling."""

    def __init__(self) -> None:
        self.forbidden: tuple[int, ...] = ()
        self.mask: npt.NDArray[np.uint32] | None = None

    def force_greedy(self, on: bool) -> None:
        raise AssertionError

    def forbid(self, ids: Sequence[int]) -> None:
        self.forbidden = tuple(ids)

    def set_mask(self, mask: npt.NDArray[np.uint32] | None) -> None:
        self.mask = None if mask is None else mask.copy()

    def observe(self, ids: Sequence[int], *, prompt: bool) -> None:
        raise AssertionError

    def allows(self, tokenizer: Tokenizer) -> set[bytes]:
        assert self.mask is not None
        bits = np.unpackbits(self.mask.view(np.uint8), bitorder="little")
        return {tokenizer.token_bytes(int(i)) for i in np.flatnonzero(bits)}


def begin(constraint: Constraint, tokenizer: Tokenizer, *, thinking: bool) -> tuple[Constrained, Remembering]:
    sampler = Remembering()
    eos = tokenizer.eos_ids
    return Constrained(constraint, sampler, thinking=thinking, eos_ids=eos, encode=tokenizer.encode), sampler


def feed(constrained: Constrained, tokenizer: Tokenizer, text: str) -> bool:
    ids = tokenizer.encode_with_specials(text)
    done = [constrained.accept(token, tokenizer.token_bytes(token)) for token in ids]
    assert not any(done[:-1])
    return done[-1]


def test_from_the_first_token(constraint: Constraint, tokenizer: Tokenizer) -> None:
    constrained, sampler = begin(constraint, tokenizer, thinking=False)
    assert sampler.allows(tokenizer) == {b"{"}
    assert not feed(constrained, tokenizer, "{1")
    assert sampler.allows(tokenizer) == {*(b"%d" % d for d in range(10)), b"}"}
    with pytest.raises(EngineError):
        constrained.end()
    assert feed(constrained, tokenizer, "}")
    constrained.end()


@pytest.mark.parametrize("close", ["</think>", "</think>\n\n", "</think\n></think>", "</think>\n"])
def test_behind_the_reasoning(constraint: Constraint, tokenizer: Tokenizer, close: str) -> None:
    constrained, sampler = begin(constraint, tokenizer, thinking=True)
    text = f"a [ </thin {close}"
    ids = tokenizer.encode(text.removesuffix("k>\n\n"))
    if text.endswith("k>\n\n"):
        ids.append(tokenizer.special_ids["k>\n\n"])
    for n, token in enumerate(ids):
        assert sampler.mask is None
        assert sampler.forbidden == tokenizer.eos_ids
        assert not constrained.accept(token, tokenizer.token_bytes(token))
        if tokenizer.decode(ids[: n + 1]).rstrip().endswith(b"</think>"):
            break
    assert sampler.forbidden == ()
    assert sampler.allows(tokenizer) == {b"{"}
    assert feed(constrained, tokenizer, "{}")


def test_a_token_that_reaches_into_the_answer(constraint: Constraint, tokenizer: Tokenizer) -> None:
    constrained, sampler = begin(constraint, tokenizer, thinking=True)
    for token in [*tokenizer.encode("x</think"), tokenizer.special_ids[">{"]]:
        assert not constrained.accept(token, tokenizer.token_bytes(token))
    assert b"}" in sampler.allows(tokenizer)
    constrained, _ = begin(constraint, tokenizer, thinking=True)
    feed(constrained, tokenizer, "x</think")
    with pytest.raises(EngineError):
        constrained.accept(tokenizer.special_ids[">["], b">[")


def test_the_reasoning_cannot_be_all(constraint: Constraint, tokenizer: Tokenizer) -> None:
    constrained, _ = begin(constraint, tokenizer, thinking=True)
    feed(constrained, tokenizer, "{}")
    with pytest.raises(EngineError):
        constrained.end()
