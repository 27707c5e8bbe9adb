"""Conversations that clients may go on with without sending them again: by a response's id, or by the ids of its calls.

    Responses   previous_response_id, or only the outputs of calls
    Messages    only the results of calls

A turn is kept as the conversation up to and including the answer. Bounded in number and in text; the turns used least
recently go first. A client whose turn is gone is told so and replays the history.

Results that come alone go on with the live state that made the calls, and with nothing else: the client relies on what
the server holds. Ids that no turn here has made are 400; a turn whose state is not live any more is 409. A response
that is named by its id is a conversation that the server keeps: it is evaluated anew when its state is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ds4.prompt.types import Conversation, Message, Tool
from ds4.server.api.responses_tools import ToolForm
from ds4.server.types import Continuation

if TYPE_CHECKING:
    from ds4.server.api.prepare import Preparer

MAX_TURNS = 1024
MAX_CHARACTERS = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LiveTurn:
    """A conversation that ends with the model's answer. `system` is the request's own system text, apart from it."""

    system: str | None
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    forms: Mapping[str, ToolForm] = field(default_factory=dict)
    """In which form calls of the tools come back, where the dialect has several."""

    @property
    def characters(self) -> int:
        """What it keeps in memory, about."""
        texts = len(self.system or "") + sum(len(tool.schema) for tool in self.tools)
        return texts + sum(
            len(message.content) + len(message.reasoning) + sum(len(call.arguments) for call in message.calls)
            for message in self.messages
        )


class LiveTurns:
    """Belongs to the event loop."""

    def __init__(self, max_turns: int = MAX_TURNS, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_turns = max_turns
        self._max_characters = max_characters
        self._turns: OrderedDict[str, LiveTurn] = OrderedDict()
        self._by_call: dict[str, str] = {}
        self._characters = 0

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def characters(self) -> int:
        return self._characters

    def remember(self, id: str, turn: LiveTurn) -> None:
        """Keeps the turn that the client knows as response or message `id`. One that is too large is not kept."""
        size = turn.characters
        if size > self._max_characters:
            return
        self._turns[id] = turn
        self._characters += size
        self._by_call.update((call.id, id) for call in turn.messages[-1].calls)
        while len(self._turns) > self._max_turns or self._characters > self._max_characters:
            self._drop(next(iter(self._turns)))

    def find(self, id: str) -> LiveTurn | None:
        turn = self._turns.get(id)
        if turn is not None:
            self._turns.move_to_end(id)
        return turn

    def of_calls(self, call_ids: Collection[str]) -> LiveTurn | None:
        """The turn whose calls are exactly these."""
        owner = self._owner(call_ids)
        return None if owner is None else self._turns[owner]

    def continuation(
        self, kind: str, preparer: Preparer, conversation: Conversation, *, required: bool
    ) -> Continuation | None:
        """How the conversation goes on with a turn of ours, when it ends with the results of exactly its calls.

        `kind` is the tier of the dialect; `required`: the client sent the results alone.
        """
        messages = conversation.messages
        last = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=-1)
        after = messages[last + 1 :]
        results = [message.call_id or "" for message in after if message.role == "tool"]
        owner = self._owner(results) if last >= 0 and results else None
        return None if owner is None else Continuation(kind, owner, preparer.tail(after, conversation), required)

    def _owner(self, call_ids: Collection[str]) -> str | None:
        """The id of the turn whose calls are exactly these; they are used now."""
        owners = {self._by_call.get(call_id) for call_id in call_ids}
        owner = owners.pop() if len(owners) == 1 else None
        turn = None if owner is None else self.find(owner)
        same = turn is not None and {call.id for call in turn.messages[-1].calls} == set(call_ids)
        return owner if same else None

    def _drop(self, id: str) -> None:
        turn = self._turns.pop(id)
        self._characters -= turn.characters
        for call in turn.messages[-1].calls:
            if self._by_call.get(call.id) == id:
                del self._by_call[call.id]
