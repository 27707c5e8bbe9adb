"""Servers around scripted engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ds4.engine.types import EngineConfig
from ds4.server.config import ServerConfig
from ds4.server.http import Limits
from ds4.testing import ScriptedEngine
from tests.support.running_server import RunningServer, Serve


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve("a script", slots=2, cors=True)`; everything that was started is stopped at the end."""
    running: list[RunningServer] = []

    def start(*scripts: Any, slots: int = 2, limits: Limits | None = None, **fields: Any) -> RunningServer:
        engine = scripts[0] if scripts and isinstance(scripts[0], ScriptedEngine) else ScriptedEngine(*scripts)
        config = ServerConfig(
            engine=EngineConfig(ctx=engine.config.ctx, slots=slots, prefill_chunk=512), port=0, drain_seconds=5.0
        )
        server = RunningServer(engine, replace(config, **fields), limits)
        running.append(server)
        return server

    yield start
    for server in running:
        server.stop()
