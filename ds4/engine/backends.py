"""Which backends this build has, which run on this machine, and why the rest do not: `ds4 --backends`."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("cpu", "cuda", "rocm", "metal")
"""In order of preference from last to first: "auto" takes the last usable one."""


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """`usable` backends can be asked for by name; `detail` says what runs or what is missing."""

    name: str
    usable: bool
    detail: str


def status(name: str) -> BackendStatus:
    """State of one backend. Raises ValueError for a name that is none."""
    if name not in NAMES:
        raise ValueError(f"unknown backend {name!r}; valid ones are: {', '.join(NAMES)}")
    if importlib.util.find_spec(f"ds4._{name}") is None:
        detail = f"this build has no ds4._{name} extension module"
        if name == "cuda":
            detail += " (build with DS4_CUDA=1 where nvcc is installed)"
        return BackendStatus(name, False, detail)
    try:
        module = importlib.import_module(f"ds4._{name}")
    except ImportError as e:
        return BackendStatus(name, False, f"ds4._{name} cannot be loaded: {e}")
    return _cuda_status(module) if name == "cuda" else _cpu_status(module)


def _cpu_status(module: Any) -> BackendStatus:
    return BackendStatus("cpu", True, f"instruction sets here, best first: {', '.join(module.cpu_isas())}")


def _cuda_status(module: Any) -> BackendStatus:
    """The first device is the one that computes: CUDA_VISIBLE_DEVICES chooses another."""
    devices, why = module.devices()
    speaks, built_with = module.runtime_versions()
    if not devices:
        if not speaks:  # the runtime's own words for this are about versions
            why = "no NVIDIA driver is installed"
        return BackendStatus("cuda", False, f"no device: {why} (built with CUDA {built_with})")
    described = []
    for name, size, problem in devices:
        described.append(f"{name}, {size / 2**30:.1f} GiB" + (f" (not usable: {problem})" if problem else ""))
    driver = f"driver {_driver_version() or 'of unknown version'} for CUDA {speaks}, built with CUDA {built_with}"
    return BackendStatus("cuda", not devices[0][2], f"{'; '.join(described)}; {driver}")


def _driver_version(root: Path = Path("/")) -> str:
    """Version of NVIDIA's kernel driver, "" where the system does not say."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return match[0] if match else ""


def print_backends() -> int:
    for name in NAMES:
        s = status(name)
        print(f"{name:6} {'usable ' if s.usable else 'missing'}  {s.detail}")
    return 0
