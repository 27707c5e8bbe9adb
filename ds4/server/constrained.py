"""A generation under a constraint: which tokens its sampler may draw, from the first token or from `</think>` on.

Reasoning is free, but for its end: a turn that stopped there would have no answer. Everything behind `</think>` is
the constraint's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds4.engine.constraint import ConstraintLike
from ds4.engine.types import SamplerLike
from ds4.errors import EngineError

_THINK_END = b"</think>"


class Constrained:
    """Guides one sampler. Raises EngineError from any method when nothing may be generated any more."""

    def __init__(
        self,
        constraint: ConstraintLike,
        sampler: SamplerLike,
        *,
        thinking: bool,
        eos_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """`thinking`: the prompt ends inside an open reasoning block."""
        self._matcher = constraint.matcher()
        self._sampler = sampler
        self._encode = encode
        self._reasoning: bytes | None = b"" if thinking else None
        """The last bytes of the open reasoning block; None behind it."""
        if thinking:
            sampler.forbid(tuple(eos_ids))
        else:
            sampler.set_mask(self._matcher.mask())

    def accept(self, token: int, data: bytes) -> bool:
        """Takes a drawn token that does not end the text, and its bytes; True when the answer is complete."""
        if self._reasoning is None:
            self._matcher.advance((token,))
        else:
            seen = self._reasoning + data
            end = seen.find(_THINK_END)
            if end < 0:
                self._reasoning = seen[-(len(_THINK_END) - 1) :]
                return False
            self._reasoning = None
            self._sampler.forbid(())
            # A token may reach beyond the tag; white space there is no part of the answer.
            rest = seen[end + len(_THINK_END) :].decode("utf-8", "replace").lstrip()
            if rest:
                self._matcher.advance(self._encode(rest))
        if self._matcher.finished:
            return True
        self._sampler.set_mask(self._matcher.mask())
        return False

    def end(self) -> None:
        """The model ends the text. Raises EngineError when it may not."""
        if self._reasoning is not None or not self._matcher.complete:
            raise EngineError("the text ended before the constraint was met")
