"""Which renderer draws the prompts of a model, and what its syntax can express."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ds4.engine.types import ModelInfo
from ds4.errors import ConfigError
from ds4.prompt.chatml import SMOLLM_SYSTEM, ChatMLRenderer
from ds4.prompt.deepseek4 import DeepSeek4Renderer
from ds4.prompt.deepseek41 import DeepSeek41Renderer
from ds4.prompt.glm import GlmRenderer
from ds4.prompt.qwen import QwenRenderer
from ds4.prompt.types import Renderer

TEMPLATES = ("ds4", "official")
"""`official` is the template of the model's maker, where ours differs from it (docs/prompts.md says how)."""

MAX_EFFORT_CONTEXT = 393216
"""Below this context size effort `max` is `high`: there is no room for what it asks of the model."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """A prompt syntax. `thinking`: it has a reasoning block. `levels`: effort may be a number from 0 to 100.

    `max_effort_context`: the context size in tokens from which effort `max` is served. `make_official`: the renderer of
    template `official`, None where there is one template only.
    """

    name: str
    make: Callable[[ModelInfo], Renderer]
    thinking: bool = False
    levels: bool = False
    max_effort_context: int = MAX_EFFORT_CONTEXT
    make_official: Callable[[ModelInfo], Renderer] | None = None


def _chatml(info: ModelInfo) -> Renderer:
    # The default system text is SmolLM's own; another ChatML model was not trained to be SmolLM.
    named = f"{info.id} {info.name}".lower()
    return ChatMLRenderer(SMOLLM_SYSTEM if "smollm" in named else "")


SYNTAXES = {
    syntax.name: syntax
    for syntax in (
        Syntax("chatml", _chatml),
        Syntax("glm", lambda info: GlmRenderer(), thinking=True),
        Syntax("qwen", lambda info: QwenRenderer(), thinking=True),
        Syntax(
            "deepseek4",
            lambda info: DeepSeek4Renderer(),
            thinking=True,
            make_official=lambda info: DeepSeek4Renderer(official=True),
        ),
        Syntax(
            "deepseek41",
            lambda info: DeepSeek41Renderer(),
            thinking=True,
            levels=True,
            make_official=lambda info: DeepSeek41Renderer(official=True),
        ),
    )
}


def syntax_of(info: ModelInfo, template: str = "ds4") -> Syntax:
    """The syntax of a model, with the renderer of one of `TEMPLATES`.

    Raises ConfigError when there is no renderer for the syntax, or no such template.
    """
    syntax = SYNTAXES.get(info.syntax)
    if syntax is None:
        known = ", ".join(sorted(SYNTAXES))
        raise ConfigError(f"{info.path}: no chat renderer for prompt syntax {info.syntax!r} (known: {known})")
    if template == "ds4":
        return syntax
    if template != "official" or syntax.make_official is None:
        having = ", ".join(name for name, other in sorted(SYNTAXES.items()) if other.make_official)
        raise ConfigError(f"{info.path}: prompt syntax {info.syntax} has no template {template!r} (only {having} have)")
    return replace(syntax, make=syntax.make_official, max_effort_context=0)
