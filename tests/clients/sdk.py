"""What the Python SDK scripts share. `TURN` says what each dialect of the SDK does:

    tools     a streamed tool loop, which must make hello.txt; the thinking is printed
    plain     a question without tools
    cancel    the stream of the prompt `COUNT` is closed when it has begun; then what `tools` says, with the same client

Exit status 3: every dialect was told, in a way that the SDK knows, that the context is too small.
"""

from __future__ import annotations

import itertools
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

URL, MODEL, KEY = os.environ["BASE_URL"], os.environ["MODEL"], os.environ["API_KEY"]
TURN, OUTPUT = os.environ["TURN"], int(os.environ["OUTPUT"])
MAX_TURNS = 5
TOO_LONG = 3
BEGUN = 10
"""Events of a stream after which some of the answer has come."""


class Dialect(ABC):
    """One of an SDK's clients, pointed at the server."""

    name: str

    @abstractmethod
    def answer(self, prompt: str, *, tools: bool) -> str:
        """The text that ends the turn; prints the thinking."""

    @abstractmethod
    def cancel(self, prompt: str) -> None:
        """Reads `BEGUN` events of a turn with tools and closes the stream."""

    @abstractmethod
    def too_long(self, error: Exception) -> bool:
        """Whether the SDK says with this error that the prompt does not fit."""


def begin(events: Iterable[object]) -> None:
    for _ in itertools.islice(events, BEGUN):
        pass


def main(*dialects: Dialect) -> None:
    prompt = sys.argv[1]
    refused = 0
    for dialect in dialects:
        if TURN == "cancel":
            dialect.cancel(os.environ["COUNT"])
            print(f"{dialect.name} cancelled")
        try:
            text = dialect.answer(prompt, tools=TURN != "plain")
        except Exception as error:
            if not dialect.too_long(error):
                raise
            print(f"{dialect.name} refused:", error)
            refused += 1
            continue
        if not text.strip():
            raise RuntimeError(f"{dialect.name} has no answer")
        print(f"{dialect.name} answer:", text)
        if TURN != "plain":
            made = Path("hello.txt")
            if made.read_text() != "hi":
                raise RuntimeError(f"{dialect.name} made a wrong file")
            if dialect is not dialects[-1]:
                made.unlink()
    sys.exit(0 if not refused else TOO_LONG if refused == len(dialects) else 1)
