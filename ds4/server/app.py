"""The server as a whole: one engine thread, one event loop, one socket; from the first line to the last.

with an open engine:  app = App(engine, config); await app.start(); await app.serve()
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from pathlib import Path

from ds4.engine.types import EngineLike, MemoryPlan
from ds4.prompt.registry import syntax_of
from ds4.server.api.service import Service
from ds4.server.arrivals import Arrivals
from ds4.server.bind import BindError, reason
from ds4.server.bridge import Bridge
from ds4.server.checkpoints import Checkpoints
from ds4.server.config import ServerConfig
from ds4.server.engine_thread import EngineThread
from ds4.server.http import HttpServer, Limits
from ds4.server.keys import Markers, markers_of
from ds4.server.kvstore import KvStore
from ds4.server.log import HttpLog
from ds4.server.metrics import Metrics
from ds4.server.routes import Router
from ds4.server.scheduler import Scheduler, SchedulerConfig
from ds4.server.tool_memory import ToolMemory
from ds4.server.trace import Tracer

log = logging.getLogger("ds4.server")

_GIB = float(1 << 30)


class App:
    """Owns everything but the engine. Belongs to the event loop that calls `start`."""

    def __init__(self, engine: EngineLike, config: ServerConfig, *, limits: Limits | None = None) -> None:
        self.engine = engine
        self.config = config
        self._limits = limits
        self._stop = asyncio.Event()
        self._http: HttpServer
        self._thread: EngineThread
        self._scheduler: Scheduler
        self._service: Service

    @property
    def port(self) -> int:
        """The bound port, after `start`."""
        return self._http.port

    @property
    def url(self) -> str:
        host = self._http.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Starts the engine thread and listens. Raises BindError, ConfigError."""
        config = self.config
        tool_memory = ToolMemory(max_ids=config.tool_memory_ids, enabled=config.exact_tool_replay)
        self._tracer = None if config.trace is None else Tracer(config.trace, self.engine.tokenizer)
        self._store = self._open_store(tool_memory)
        markers = self._markers()
        self._bridge = bridge = Bridge(asyncio.get_running_loop(), first_at_once=not self.engine.plan.on_device)
        metrics = Metrics(config.engine.slots)
        arrivals = Arrivals()
        chunk = config.engine.prefill_chunk or self.engine.config.prefill_chunk
        self._scheduler = Scheduler(
            self.engine,
            SchedulerConfig(
                slots=config.engine.slots,
                # The memory plan counts on steps of this size.
                prefill_quantum=chunk,
                mixed_prefill_quantum=min(config.mixed_prefill_quantum or max(1, chunk // 4), chunk),
                draft_timing=config.draft_timing,
            ),
            bridge.deliver,
            checkpoints=None if self._store is None else Checkpoints(self._store, self.engine.tokenizer, markers),
            observer=metrics,
            log_route=bridge.log_route,
            markers=markers,
            names_elsewhere=True,
            expected=arrivals.expected,
        )
        bridge.connect(self._scheduler)
        self._service = Service(
            self.engine,
            config,
            self._scheduler,
            bridge,
            metrics,
            tool_memory=tool_memory,
            store=self._store,
            tracer=self._tracer,
        )
        router = Router(self._service)
        self._http = HttpServer(
            router.handle,
            limits=self._limits,
            cors=config.cors,
            allowed_hosts=config.allowed_hosts,
            gate=router.gate,
            error_body=router.error_body,
            observers=(metrics, HttpLog()),
            arrivals=arrivals,
        )
        try:
            await self._http.start(config.host, config.port)
        except OSError as error:
            bridge.close()
            if self._store is not None:
                self._store.close()
            if self._tracer is not None:
                self._tracer.close()
            raise BindError(f"cannot listen on {config.host}:{config.port}: {reason(error)}") from None
        self._thread = EngineThread(self.engine, self._scheduler, bridge)
        self._thread.start()

    def _open_store(self, tool_memory: ToolMemory) -> KvStore | None:
        """The disk cache where one is asked for. A directory that cannot be used costs speed, not the server."""
        kv = self.config.kv
        if kv is None:
            return None
        try:
            return KvStore(kv, self.engine, tool_memory=tool_memory if self.config.exact_tool_replay else None)
        except OSError as error:
            log.error("kv cache disabled: %s: %s", kv.directory, reason(error))
            return None

    def _markers(self) -> Markers | None:
        """What turns begin with, where somebody needs to know."""
        if self._store is None and not self.engine.plan.snapshots:
            return None
        return markers_of(syntax_of(self.engine.info).make(self.engine.info), self.engine.tokenizer)

    async def serve(self) -> None:
        """Serves until `request_stop`, then drains: what runs gets `drain_seconds`, what waits is refused."""
        await self._stop.wait()
        grace = self.config.drain_seconds
        self._service.accepting = False
        self._scheduler.shutdown(grace)
        self._http.begin_shutdown()
        # The engine tells the generations that are out of time; their handlers need a moment to pass it on.
        await self._http.wait_closed(grace + 2.0)
        self._service.keepalive.stop()
        # What is resident is written to disk first, however much it is.
        patience = 10.0 if self._store is None else None
        if await asyncio.to_thread(self._thread.join, patience):
            self._bridge.close()
        else:
            log.error("the engine thread did not stop")
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def request_stop(self) -> None:
        """Begins the shutdown. Belongs to the event loop's thread."""
        self._stop.set()

    def handle_signals(self) -> None:
        """First SIGINT or SIGTERM: shut down. Second: exit with status 130 at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self._stop.is_set():
            os._exit(130)
        running = sum(state.request is not None for state in self._scheduler.slot_states())
        log.warning(
            "shutdown requested, draining %d running and refusing %d queued requests (again to exit at once)",
            running,
            self._scheduler.n_queued,
        )
        self.request_stop()

    # ---- what people read

    def startup_lines(self) -> list[str]:
        """Model, memory, backend, address, and a command that works."""
        info, plan, config = self.engine.info, self.engine.plan, self.config
        ctx = self._service.preparer.n_ctx
        lines = [
            f"model {info.name} ({info.family}, {info.n_params / 1e6:.1f} M parameters) from {info.path}",
            f"context {ctx} tokens per session (trained {info.ctx_train}), {config.engine.slots} sessions",
            f"memory: weights {plan.weight_bytes / _GIB:.2f} GiB + workspace {plan.workspace_bytes / _GIB:.2f} GiB "
            f"= {plan.at_start / _GIB:.2f} GiB now; + {plan.slots} x state of up to {plan.state_bytes / _GIB:.2f} GiB "
            f"{_snapshots(plan)}= {plan.total / _GIB:.2f} GiB at full context, of "
            f"{plan.available_bytes / _GIB:.2f} GiB available"
            f"{' on the device' if plan.on_device else ''}",
        ]
        lines.append(f"backend {self.engine.backend_name}, of this process in huge pages: {_huge_pages()}")
        if self.engine.most_drafts:
            kind = "mtp" if config.engine.mtp else "dspark"
            lines.append(f"drafts: {kind}, at most {self.engine.most_drafts} tokens a step, while one request decodes")
        elif config.engine.mtp or config.engine.dspark:
            lines.append("drafts: loaded, speculative decoding is off")
        if self._store is not None:
            lines.append(self._store.describe())
        if ctx > info.ctx_train:
            lines.append(f"warning: the model was trained on {info.ctx_train} tokens; beyond them it talks nonsense")
        if not config.loopback and not config.api_keys:
            lines.append(f"warning: anyone who can reach {config.host} can use this server; --api-key asks for a key")
        if self._tracer is not None:
            lines.append(self._tracer.describe())
        lines.append(f"listening on {self.url}")
        lines.append(f"try: {self.curl()}")
        return lines

    def curl(self) -> str:
        """A command line that asks this server something."""
        url = self.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self.config.api_keys else ""
        body = json.dumps({"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32})
        return f"curl '{url}/v1/chat/completions'{key} -H 'Content-Type: application/json' -d '{body}'"


def _snapshots(plan: MemoryPlan) -> str:
    if not plan.snapshots:
        return ""
    return f"and {plan.snapshots} snapshots of {plan.snapshot_bytes / (1 << 20):.1f} MiB "


def _huge_pages(status: Path = Path("/proc/self/smaps_rollup")) -> str:
    """Whether the system gave this process huge pages: weights are read about twice as fast from them."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return "unknown"
    kib = next((int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")), 0)
    return f"{kib / (1 << 20):.2f} GiB" if kib else "no"
