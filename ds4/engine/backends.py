"""Which backends this build has, which run on this machine, and why the rest do not: `ds4 --backends`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

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
        return BackendStatus(name, False, f"this build has no ds4._{name} extension module")
    if name == "cpu":
        from ds4 import _cpu

        return BackendStatus(name, True, f"instruction sets here, best first: {', '.join(_cpu.cpu_isas())}")
    return BackendStatus(name, False, f"ds4._{name} is built, but no device of it can be opened here")


def print_backends() -> int:
    for name in NAMES:
        s = status(name)
        print(f"{name:6} {'usable ' if s.usable else 'missing'}  {s.detail}")
    return 0
