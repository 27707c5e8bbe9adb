"""The extension module that computes: `ds4._cpu`, or `ds4._cuda` with a GPU. Both bind the same classes.

Functions on numbers and block formats (`row_bytes`, `dequantize`, ...) are the same in both and taken from `ds4._cpu`.
Classes are not: a model of one module takes sessions and samplers of the same module only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from ds4.engine.backends import status
from ds4.errors import ConfigError

if TYPE_CHECKING:
    from ds4 import _cpu

KINDS = ("cpu", "cuda", "reference")
"""Backends that can be asked for by name; "auto" is "cuda" where a device of it can be used, else "cpu"."""

_MODULES = {"cpu": "ds4._cpu", "cuda": "ds4._cuda", "reference": "ds4._cpu"}


class NativeModule(Protocol):
    """The classes of one extension module; `ds4/_cpu.pyi` documents them."""

    @property
    def Backend(self) -> type[_cpu.Backend]: ...
    @property
    def Model(self) -> type[_cpu.Model]: ...
    @property
    def Session(self) -> type[_cpu.Session]: ...
    @property
    def Sampler(self) -> type[_cpu.Sampler]: ...
    @property
    def Unsupported(self) -> type[_cpu.Unsupported]: ...


def resolve(name: str) -> str:
    """The kind of backend that `name` means on this machine: one of `KINDS`.

    Raises ConfigError for a name that is none, and for a backend asked for by name that cannot run here, saying why.
    """
    if name == "auto":
        return "cuda" if status("cuda").usable else "cpu"
    if name not in KINDS:
        raise ConfigError(f"unknown backend '{name}'; valid ones are: auto, {', '.join(KINDS)}")
    if name != "reference" and not (found := status(name)).usable:
        raise ConfigError(f"backend '{name}' cannot run here: {found.detail}")
    return name


def module_of(kind: str) -> NativeModule:
    """The extension module of a kind of backend that `resolve` returned."""
    return cast("NativeModule", importlib.import_module(_MODULES[kind]))
