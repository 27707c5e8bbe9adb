"""Which renderer draws the prompts of a model, and what its syntax can express."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds4.engine.types import ModelInfo
from ds4.errors import ConfigError
from ds4.prompt.chatml import SMOLLM_SYSTEM, ChatMLRenderer
from ds4.prompt.types import Renderer


@dataclass(frozen=True, slots=True)
class Syntax:
    """A prompt syntax. `thinking`: it has a reasoning block. `levels`: effort may be a number from 0 to 100."""

    name: str
    make: Callable[[ModelInfo], Renderer]
    thinking: bool = False
    levels: bool = False


def _chatml(info: ModelInfo) -> Renderer:
    # The default system text is SmolLM's own; another ChatML model was not trained to be SmolLM.
    named = f"{info.id} {info.name}".lower()
    return ChatMLRenderer(SMOLLM_SYSTEM if "smollm" in named else "")


SYNTAXES = {syntax.name: syntax for syntax in (Syntax("chatml", _chatml),)}


def syntax_of(info: ModelInfo) -> Syntax:
    """The syntax of a model. Raises ConfigError when there is no renderer for it."""
    try:
        return SYNTAXES[info.syntax]
    except KeyError:
        known = ", ".join(sorted(SYNTAXES))
        raise ConfigError(f"{info.path}: no chat renderer for prompt syntax {info.syntax!r} (known: {known})") from None
