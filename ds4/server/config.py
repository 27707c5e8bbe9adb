"""Everything a server run is told, parsed once from flags and environment and passed down."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ds4.engine.types import EngineConfig, SamplingParams
from ds4.server.kvpolicy import KvConfig


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Configuration of `ds4-server`.

    `sampling` holds the values of fields that a request leaves out; `max_output_tokens` likewise, and both are bounded
    by the context. `alias` is the model id shown to clients instead of the model's own. `draft_timing`: the log tells
    for each generation what guessing took and gained. `keepalive_seconds` is the longest silence of a stream that
    waits; `drain_seconds` what running requests get at shutdown. `kv` None: no checkpoints on disk. `trace` is the file
    that everything about each generation is written to. `mixed_prefill_quantum` 0: a quarter of a prefill chunk.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = "127.0.0.1"
    port: int = 8000
    cors: bool = False
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    alias: str | None = None
    max_output_tokens: int = 393216
    mixed_prefill_quantum: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    timings: bool = False
    tool_memory_ids: int = 100_000
    exact_tool_replay: bool = True
    allow_special_in_text: bool = False
    template: str = "ds4"
    draft_timing: bool = False
    keepalive_seconds: float = 5.0
    drain_seconds: float = 30.0
    kv: KvConfig | None = None
    log_format: Literal["text", "json"] = "text"
    trace: Path | None = None

    @property
    def loopback(self) -> bool:
        """The server can be reached from this machine only."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False
