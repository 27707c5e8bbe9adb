"""What every endpoint works with: the engine, the way to the engine thread, configuration, and request bodies."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ds4._json import Bodies, Node
from ds4.engine.types import EngineLike
from ds4.prompt.types import Conversation
from ds4.server.api.common import UnknownFields
from ds4.server.api.live import LiveTurns
from ds4.server.api.prepare import Preparer, Prompt
from ds4.server.config import ServerConfig
from ds4.server.sse import KeepAlive
from ds4.server.tool_memory import ToolMemory

if TYPE_CHECKING:
    from ds4.server.bridge import Bridge, Pending
    from ds4.server.http import Request
    from ds4.server.kvstore import KvStore
    from ds4.server.metrics import Metrics
    from ds4.server.scheduler import Scheduler
    from ds4.server.trace import Tracer
    from ds4.server.types import GenerationRequest

log = logging.getLogger("ds4.server")


_BODIES = 192 << 20
"""Bytes of former bodies and what was made of them: about 32 conversations of a megabyte."""


class Service:
    """One open model behind the API. Belongs to the event loop."""

    def __init__(
        self,
        engine: EngineLike,
        config: ServerConfig,
        scheduler: Scheduler,
        bridge: Bridge,
        metrics: Metrics,
        *,
        tool_memory: ToolMemory,
        store: KvStore | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.engine = engine
        self.config = config
        self.scheduler = scheduler
        self.bridge = bridge
        self.metrics = metrics
        self.accepting = True
        """False from the beginning of a shutdown."""
        self.model_id = config.alias or engine.info.id
        self.n_slots = config.engine.slots
        self.preparer = Preparer(
            engine,
            config.max_output_tokens,
            specials_in_text=config.allow_special_in_text,
            template=config.template,
        )
        self.keepalive = KeepAlive(config.keepalive_seconds)
        self.unknown = UnknownFields()
        self.token_bytes = engine.tokenizer.token_bytes
        self.live = LiveTurns()
        self.tool_memory = tool_memory
        self._store = store
        self._tracer = tracer
        self._bodies = Bodies(_BODIES)

    async def prompt(self, conversation: Conversation) -> Prompt:
        """The prompt of a conversation, with calls that were sampled here exactly as they were sampled."""
        if not any(message.calls for message in conversation.messages):
            return await self.preparer.prompt(conversation)
        await self._recall(conversation)
        messages, replay = self.tool_memory.attach(conversation.messages)
        if replay.missing_ids and self.tool_memory.enabled:
            log.debug("%d calls of the history were not sampled here", replay.missing_ids)
        return await self.preparer.prompt(replace(conversation, messages=messages))

    async def _recall(self, conversation: Conversation) -> None:
        """Calls that were sampled before a restart come back from the checkpoints."""
        if self._store is None or not self.tool_memory.enabled:
            return
        ids = {call.id for message in conversation.messages for call in message.calls}
        unknown = {call_id for call_id in ids if call_id not in self.tool_memory}
        if unknown:
            await asyncio.to_thread(self._store.restore_calls, unknown)

    def submit(self, request: GenerationRequest, body: bytes, *, stream: bool, again: bool = False) -> Pending:
        """Queues a generation of the request with this body. Raises ShuttingDown."""
        pending = self.bridge.submit(request)
        if self._tracer is not None:
            pending.record = self._tracer.begin(request, body, stream=stream, again=again)
        return pending

    def remember_call(self, call_id: str, block: bytes) -> None:
        """The client knows a call that was sampled in `block` by this id."""
        self.tool_memory.remember((call_id,), block)

    def body(self, request: Request) -> Node:
        """The request's JSON object. Raises JSONError."""
        return self._bodies.parse(request.body).as_object()
