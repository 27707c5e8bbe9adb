"""The Python SDKs and LangChain as they are installed here: what `make test-clients` asks of every client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.desk import LANGCHAIN, SDK_PYTHON, Client, Room, check_cancel, check_overflow

pytestmark = pytest.mark.parametrize("client", [SDK_PYTHON, LANGCHAIN], ids=lambda c: c.id)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    made = Room(tmp_path, SDK_PYTHON=sys.executable)
    yield made
    made.close()


def test_cancelled_turns_and_tool_loops(client: Client, room: Room) -> None:
    check_cancel(room, client)


def test_full_context(client: Client, room: Room) -> None:
    check_overflow(room, client)
