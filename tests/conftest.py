"""What holds for every test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A program that a test runs in this process sets up logging under `ds4` for all that come after it."""
    root = logging.getLogger("ds4")
    handlers, level, propagate = list(root.handlers), root.level, root.propagate
    yield
    root.handlers[:], root.propagate = handlers, propagate
    root.setLevel(level)
