"""Ids that clients see: a prefix that says what they name, and random digits."""

from __future__ import annotations

import secrets


def new_id(prefix: str, separator: str = "_") -> str:
    """Of a response, a message or an item."""
    return f"{prefix}{separator}{secrets.token_hex(12)}"


def new_call_id(prefix: str = "call") -> str:
    """Of a tool call: clients send it back beside the result, so it is unique for ever."""
    return f"{prefix}_{secrets.token_hex(16)}"
