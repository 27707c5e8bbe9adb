"""Real clients, each in its own folders, against a server whose model follows a script (`desk.py`).

The clients are pinned in versions.sh and installed on first use (`make test-clients`, docs/clients.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.desk import CLIENTS, Client, Room, check_cancel, check_overflow, check_tool_loop

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    made = Room(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda c: c.id)
def test_a_client_works(client: Client, room: Room) -> None:
    check_tool_loop(room, client)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda c: c.id)
def test_a_turn_is_cancelled(client: Client, room: Room) -> None:
    check_cancel(room, client)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda c: c.id)
def test_a_full_context_is_recognised(client: Client, room: Room) -> None:
    check_overflow(room, client)
