"""Doubles for tests: a scripted engine behind the same surface as the real one. No product code imports this.

`ds4.testing.driver` drives a scheduler with it, step by step.
"""

from ds4.testing.engine import ScriptedEngine, ScriptedSampler, ScriptedSession, StepRecord
from ds4.testing.script import Script, ScriptLike, hash_model
from ds4.testing.tokenizer import ScriptedTokenizer

__all__ = [
    "Script",
    "ScriptLike",
    "ScriptedEngine",
    "ScriptedSampler",
    "ScriptedSession",
    "ScriptedTokenizer",
    "StepRecord",
    "hash_model",
]
