"""Which extension module computes: by name, by what the machine has, and each with its own classes."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ds4 import _cpu
from ds4.engine import backends
from ds4.engine.engine import Engine
from ds4.engine.native import module_of, resolve
from ds4.engine.types import EngineConfig, Row, SamplingParams
from ds4.errors import ConfigError, MemoryPlanError
from tests.support.tiny_llama import TinyLlama

GIB = 1 << 30
GREEDY = SamplingParams(temperature=0)
MODULE = "ds4._cuda"


class FakeBackend(_cpu.Backend):
    """A "GPU" that computes with the reference operations."""

    free = 10 * GIB

    def __init__(self, kind: str, **options: Any) -> None:
        assert kind == "cuda" and options == {"threads": 0, "isa": "auto"}
        super().__init__("reference")

    @property
    def free_device_memory(self) -> int:
        return self.free


class FakeModel(_cpu.Model):
    loads = 0

    def load(self, progress: Any = None) -> None:
        FakeModel.loads += 1
        super().load(progress)


class FakeSession(_cpu.Session):
    pass


class FakeSampler(_cpu.Sampler):
    pass


def fake_cuda(devices: list[tuple[str, int, str]], why: str = "") -> Any:
    module: Any = ModuleType(MODULE)
    module.__spec__ = ModuleSpec(MODULE, None)
    module.Backend, module.Model, module.Session, module.Sampler = FakeBackend, FakeModel, FakeSession, FakeSampler
    module.Unsupported = type("Unsupported", (RuntimeError,), {})
    module.devices = lambda: (devices, why)
    module.runtime_versions = lambda: ("" if why == INSUFFICIENT else "13.1", "13.0")
    return module


def install(monkeypatch: pytest.MonkeyPatch, *args: Any) -> Any:
    module = fake_cuda(*args)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return TinyLlama.make(layers=1).write_gguf(tmp_path / "tiny.gguf")


INSUFFICIENT = "CUDA driver version is insufficient for CUDA runtime version"
GPU = ("Test GPU", 24 * GIB, "")
OLD = ("Old GPU", 8 * GIB, "no kernel image is available")


def test_auto_takes_a_usable_gpu(monkeypatch: pytest.MonkeyPatch, gguf_file: Path) -> None:
    module = install(monkeypatch, [GPU])
    assert resolve("auto") == "cuda" and module_of("cuda") is module
    engine = Engine.open(EngineConfig(model=gguf_file, ctx=64))
    assert engine.plan.on_device and engine.plan.available_bytes == 10 * GIB
    session, sampler = engine.new_session(), engine.new_sampler(GREEDY)
    assert type(session.native) is FakeSession and type(sampler) is FakeSampler
    session.sync([1, 2, 3])
    token = engine.step([Row(session, [4], sampler)])[0].token

    # The CPU beside it: an instruction set is a wish about the CPU, also under "auto".
    plain = Engine.open(EngineConfig(model=gguf_file, ctx=64, isa="scalar"))
    assert plain.backend_name.startswith("cpu") and not plain.plan.on_device
    exact = Engine.open(EngineConfig(model=gguf_file, ctx=64, backend="reference"))
    other, drawn = exact.new_session(), exact.new_sampler(GREEDY)
    other.sync([1, 2, 3])
    assert exact.step([Row(other, [4], drawn)])[0].token == token

    with pytest.raises(ValueError, match="Session is not this engine's"):
        engine.step([Row(other, [5], sampler)])
    with pytest.raises(ValueError, match="Sampler is not this engine's"):
        engine.step([Row(session, [5], drawn)])
    assert session.n_tokens == other.n_tokens == 4


@pytest.mark.parametrize(
    ("devices", "why", "said"),
    [
        ([], "no CUDA-capable device is detected", "no device: no CUDA-capable device is detected"),
        ([], INSUFFICIENT, "no device: no NVIDIA driver is installed"),
        ([OLD], "", "Old GPU, 8.0 GiB (not usable: no kernel image is available)"),
        ([OLD, GPU], "", "Test GPU, 24.0 GiB"),
    ],
)
def test_no_usable_gpu(
    devices: list[tuple[str, int, str]], why: str, said: str, monkeypatch: pytest.MonkeyPatch, gguf_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    install(monkeypatch, devices, why)
    assert resolve("auto") == "cpu"
    with pytest.raises(ConfigError, match="backend 'cuda' cannot run here") as e:
        Engine.open(EngineConfig(model=gguf_file, backend="cuda"))
    assert said in str(e.value)
    backends.print_backends()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("cuda   missing") and said in lines[1] and "CUDA 13.0" in lines[1]


def test_a_usable_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [GPU, OLD])
    monkeypatch.setattr(backends, "_driver_version", lambda: "580.159.04")
    found = backends.status("cuda")
    assert found.usable
    assert found.detail == (
        "Test GPU, 24.0 GiB; Old GPU, 8.0 GiB (not usable: no kernel image is available); "
        "driver 580.159.04 for CUDA 13.1, built with CUDA 13.0"
    )


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Sep  2 2026\nGCC version:  gcc 12.2.0\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n",
    ],
)
def test_driver_version(line: str, tmp_path: Path) -> None:
    assert backends._driver_version(tmp_path) == ""
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text(line)
    assert backends._driver_version(tmp_path) == "580.159.04"


def test_a_build_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "DS4_CUDA=1" in backends.status("cuda").detail
    assert resolve("auto") == "cpu"
    with pytest.raises(ConfigError, match="valid ones are: auto, cpu, cuda, reference"):
        resolve("tpu")


def test_the_plan_is_checked_against_device_memory(monkeypatch: pytest.MonkeyPatch, gguf_file: Path) -> None:
    install(monkeypatch, [GPU])
    monkeypatch.setattr(FakeBackend, "free", 64 << 20)  # all of it is headroom
    loads = FakeModel.loads
    with pytest.raises(MemoryPlanError, match=r"0\.00 GiB of device memory.*--backend cpu computes in this machine's"):
        Engine.open(EngineConfig(model=gguf_file, ctx=64))
    assert FakeModel.loads == loads, "refused before the first byte is uploaded"
    Engine.open(EngineConfig(model=gguf_file, ctx=64, check_memory=False))
    assert FakeModel.loads == loads + 1


@pytest.mark.parametrize("options", [{"isa": "avx2"}, {"threads": 2}])
def test_options_of_the_cpu_are_not_ignored(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, gguf_file: Path
) -> None:
    install(monkeypatch, [GPU])
    with pytest.raises(ConfigError, match="isa and threads are the CPU backend's"):
        Engine.open(EngineConfig(model=gguf_file, backend="cuda", **options))


@pytest.mark.skipif(importlib.util.find_spec(MODULE) is None, reason="this build has no ds4._cuda")
def test_both_modules_in_one_process() -> None:
    """Needs no GPU: the classes of the CUDA module on its reference operations, beside those of the CPU module."""
    from ds4 import _cuda

    devices, why = _cuda.devices()
    assert bool(devices) != bool(why)
    tiny = TinyLlama.make(layers=1)
    logits = []
    for module in (_cpu, _cuda):
        model = module.Model(module.Backend("reference"), "llama", tiny.params(), tiny.tensors())
        model.load()
        session = module.Session(model, 8)
        model.step([(session, [1, 2, 3], None, True)])
        logits.append(session.logits())
        with pytest.raises(module.Unsupported, match=f"'tpu' is not in {module.__name__}"):
            module.Backend("tpu")
        with pytest.raises(ValueError, match="outside the vocabulary"):
            model.step([(session, [-1], None, True)])
    assert np.array_equal(*logits)
    assert _cpu.Unsupported is not _cuda.Unsupported and _cpu.Session is not _cuda.Session
    with pytest.raises(TypeError):
        _cuda.Model(_cpu.Backend("reference"), "llama", tiny.params(), tiny.tensors())
    if not devices:
        with pytest.raises(_cuda.Unsupported, match="no CUDA device"):
            _cuda.Backend("cuda")
