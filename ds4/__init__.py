"""ds4: local inference for DeepSeek V4 and its relatives, served to real agents."""

from __future__ import annotations

__version__ = "0.1.0"
