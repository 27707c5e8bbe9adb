"""A running server around any engine, on its own thread and a free port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import uvloop

from ds4.engine.types import EngineLike
from ds4.server.app import App
from ds4.server.config import ServerConfig
from ds4.server.http import Limits


class RunningServer:
    """An `App` that serves until `stop`. `http` is a client with the server's address as its base."""

    def __init__(self, engine: EngineLike, config: ServerConfig, limits: Limits | None = None) -> None:
        self.engine = engine
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(engine, config, limits), daemon=True)
        self._thread.start()
        self._ready.wait(30)
        if self._error is not None:
            raise self._error
        self.http = httpx.Client(base_url=self.app.url, timeout=30)

    def _run(self, engine: EngineLike, config: ServerConfig, limits: Limits | None) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self.app = App(engine, config, limits=limits)
            try:
                await self.app.start()
            except BaseException as error:
                self._error = error
                return
            finally:
                self._ready.set()
            await self.app.serve()

        uvloop.run(serve())

    @property
    def url(self) -> str:
        return self.app.url

    def request_stop(self) -> None:
        self.loop.call_soon_threadsafe(self.app.request_stop)

    def stop(self) -> None:
        self.http.close()
        if self._thread.is_alive():
            self.request_stop()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def chat(self, content: object = "hi", **fields: Any) -> httpx.Response:
        """A chat request with one user message."""
        body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)


Serve = Callable[..., RunningServer]
"""Starts a server: scripts or a scripted engine, `slots`, `limits` of HTTP, and fields of `ServerConfig`."""
