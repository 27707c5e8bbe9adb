"""Opens a random model on a backend, without a file."""

from __future__ import annotations

from typing import Any

from ds4 import _cpu
from ds4.engine.session import ModelHandle, Session
from tests.support.tiny_llama import TinyLlama

F32, F16 = 0, 1
BACKENDS = ["reference", "cpu"]


def open_model(
    tiny: TinyLlama,
    backend: str,
    *,
    chunk: int = 16,
    kind: str = "interleaved",
    kv_type: int = F16,
    threads: int = 2,
    isa: str = "auto",
    faulty: bool = False,
) -> tuple[ModelHandle, _cpu.Backend]:
    device = _cpu.Backend(backend, threads=threads, isa=isa, faulty=faulty)
    native = _cpu.Model(device, "llama", tiny.params(kind), tiny.tensors(kind), kv_type=kv_type)
    native.load()
    return ModelHandle(native, "llama", f"tiny-{tiny.seed}", chunk), device


def step(model: ModelHandle, *rows: tuple[Session, Any]) -> None:
    """One step that keeps the logits of every row."""
    model.native.step([(session.native, tokens, None, True) for session, tokens in rows])
