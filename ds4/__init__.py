"""ds4: local inference for DeepSeek V4 and its relatives, served to real agents.

The Python API in five lines; without a path `load` opens the demo model:

    import ds4

    engine = ds4.load("model.gguf", ctx=8192)
    for text in engine.generate("The capital of France is", ds4.SamplingParams(temperature=0), max_tokens=32):
        print(text, end="", flush=True)

`Engine.step` advances many sessions in one forward pass; `Session` saves, loads, rewinds and forks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike

    from ds4.engine.engine import Engine
    from ds4.engine.session import Session
    from ds4.engine.types import Progress, SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "Session", "__version__", "load"]


def load(path: str | PathLike[str] | None = None, *, progress: Progress | None = None, **config: Any) -> Engine:
    """Opens a model: a GGUF file, a safetensors directory, or the demo model when `path` is None.

    `config` are the fields of `ds4.engine.types.EngineConfig` (`ctx`, `slots`, `threads`, `backend`, ...).
    `progress` is called with (done, total) parts of the weights. Raises what `Engine.open` raises, and TypeError for a
    field that does not exist.
    """
    from pathlib import Path

    from ds4.engine.engine import Engine
    from ds4.engine.types import EngineConfig

    return Engine.open(EngineConfig(model=None if path is None else Path(path), **config), progress)


def __getattr__(name: str) -> Any:
    # Loaded on first use: programs that only print their version or help do not need the native module.
    if name == "Engine":
        from ds4.engine.engine import Engine

        return Engine
    if name == "Session":
        from ds4.engine.session import Session

        return Session
    if name == "SamplingParams":
        from ds4.engine.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'ds4' has no attribute {name!r}")
