"""Strings of request bodies, the long ones remembered: a client sends its whole history again with every turn.

A text that was there before is the same object as then, by which rendering and encoding find what they made of it
(`ds4.bounded`, `ds4.engine.encoding`).
"""

from __future__ import annotations

from ds4._json import Texts

string = Texts(128 << 20).read
"""The text of a string node. Raises JSONError for another kind."""
