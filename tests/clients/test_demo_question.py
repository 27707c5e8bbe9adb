"""Every client gets an answer to a plain question from the demo model, through a `ds4-server` process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4.engine.demo import demo_model_path
from ds4.errors import ConfigError
from tests.clients.desk import CLIENTS, Client, Desk
from tests.support.server_process import ServerProcess

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

CTX = 8192
"""The context that the model was trained for: the instructions and tools of the agents have to fit."""
QUESTION = "What is the capital city of France? Answer in one short sentence."
ANSWERS = {
    "codex": r" codex (.+?) tokens used",
    "claude": r'"is_error":false.*"result":"([^"]+)"',
    "opencode": r"· \S+ (?:\S*\[0m )?(.*\w.*)",
    "pi": r'"role":"assistant","content":\[\{"type":"text","text":"([^"]+)"',
    "llm": r"(.*\w.*)",
    "aider": r"Repo-map: disabled (.*\w.*?) Tokens: ",
    "sdk_python": r"chat answer: (.+?) responses .*answer: .*answer: ",
    "sdk_langchain": r"chat answer: (.+?) responses .*answer: .*answer: ",
    "sdk_node": r"chat answer: (.+?) responses .*answer: .*answer: .*answer: ",
}
"""Where the clients print it."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    try:
        demo_model_path()
    except ConfigError as error:
        pytest.skip(str(error))
    made = ServerProcess("--ctx", str(CTX), "--batched-session", "2", "--threads", "2", "--temp", "0", "--tokens", "64")
    yield made
    made.stop()


@pytest.mark.parametrize("client", CLIENTS, ids=lambda c: c.id)
def test_a_question_is_answered(client: Client, server: ServerProcess, tmp_path: Path) -> None:
    at = Desk.at(tmp_path, client, server.url, CONTEXT=str(CTX), OUTPUT="512")
    status, shown = at.run(QUESTION, "plain")
    assert status == 0
    found = re.search(ANSWERS[client.name], shown)
    assert found, ANSWERS[client.name]
    print("answer:", found[1])
