"""Engines on real models, for tests of the whole server; a test whose model is not there is skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ds4.engine.demo import demo_model_path
from ds4.engine.engine import Engine
from ds4.engine.types import EngineConfig
from ds4.errors import ConfigError

MODELS = ("demo", "v4-nano")
V4_NANO = Path(os.environ.get("DS4_TEST_MODELS", "")) / "v4-nano" / "v4-nano-q8_0.gguf"


@contextmanager
def opened(config: EngineConfig, model: str = "demo") -> Iterator[Engine]:
    """An engine on one of `MODELS`, closed at the end."""
    if model == "v4-nano":
        if not V4_NANO.is_file():
            pytest.skip("DS4_TEST_MODELS names no folder with v4-nano")
        config = replace(config, model=V4_NANO)
    else:
        try:
            demo_model_path()
        except ConfigError as error:
            pytest.skip(str(error))
    engine = Engine.open(config)
    try:
        yield engine
    finally:
        engine.close()
