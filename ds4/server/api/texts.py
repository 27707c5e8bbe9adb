"""Strings of request bodies, the long ones remembered: a client sends its whole history again with every turn.

A text that was there before is the same object as then, by which rendering and encoding find what they made of it
(`ds4.bounded`, `ds4.engine.encoding`). So is a message.
"""

from __future__ import annotations

from ds4._json import Texts
from ds4.bounded import remembered
from ds4.prompt.draft import size_of
from ds4.prompt.types import Message

string = Texts(128 << 20).read
"""The text of a string node. Raises JSONError for another kind."""


@remembered(128 << 20, size_of)
def known_message(message: Message) -> Message:
    """The first message that was equal to this one."""
    return message
