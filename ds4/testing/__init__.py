"""Doubles for tests: a scripted engine behind the same surface as the real one. No product code imports this."""

from ds4.testing.driver import Clock, Driver
from ds4.testing.engine import ScriptedEngine, ScriptedSampler, ScriptedSession, StepRecord
from ds4.testing.script import Script, ScriptLike, hash_model
from ds4.testing.tokenizer import ScriptedTokenizer

__all__ = [
    "Clock",
    "Driver",
    "Script",
    "ScriptLike",
    "ScriptedEngine",
    "ScriptedSampler",
    "ScriptedSession",
    "ScriptedTokenizer",
    "StepRecord",
    "hash_model",
]
