"""A trained DeepSeek V4: logits and greedy text of transformers, from the directory and from the 8-bit file.

`DS4_TEST_MODELS` names the folder with `v4-nano/` (config.json, model.safetensors, v4-nano-q8_0.gguf, tokenizer.json,
reference.json: prompts with transformers' greedy continuations and ten best logits after the prompt).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4.convert.convert import convert
from ds4.convert.types import TypePlan
from ds4.engine.engine import Engine
from ds4.engine.model_file import open_model_file
from ds4.engine.safetensors import read_directory
from ds4.engine.tensors import DType, Tensor
from ds4.engine.types import EngineConfig, Row
from tests.support.stored import Stored, write_safetensors

FOLDER = Path(os.environ.get("DS4_TEST_MODELS", "")) / "v4-nano"
CASES = ["chat", "chat_long", "tool_call", "tool_result", "long_tools"]

pytestmark = pytest.mark.skipif(
    not (FOLDER / "reference.json").is_file(), reason="DS4_TEST_MODELS names no folder with v4-nano"
)


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "reference.json").read_text())["cases"]
    return found


@pytest.fixture(scope="module", params=["directory", "gguf"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    path = FOLDER if request.param == "directory" else FOLDER / "v4-nano-q8_0.gguf"
    engine = Engine.open(EngineConfig(model=path, ctx=2048, threads=2, kv_qat=False))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The directory with every BF16 value as F32, for which the kernels do not round activations."""
    path = tmp_path_factory.mktemp("wide")
    (path / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    tensors = read_directory(FOLDER)[1]
    write_safetensors(path / "model.safetensors", {name: widened(t) for name, t in tensors.items()})
    engine = Engine.open(EngineConfig(model=path, ctx=2048, threads=2, kv_qat=False))
    yield engine
    engine.close()


def widened(t: Tensor) -> Stored:
    if t.dtype is DType.BF16:
        values = (np.frombuffer(t.data, "<u2").astype("<u4") << 16).tobytes()
        return Stored("F32", t.shape, values)
    return Stored(t.dtype.name, t.shape, bytes(t.data))


def test_converted_to_8_bits(cases: dict[str, Any], tmp_path: Path) -> None:
    """`ds4 convert --type Q8_0` keeps the greedy text and the tokenizer."""
    path = tmp_path / "nano.gguf"
    plan = TypePlan(DType.Q8_0, DType.Q8_0, DType.Q8_0, DType.Q8_0, DType.Q8_0)
    convert(open_model_file(FOLDER), path, plan)
    engine = Engine.open(EngineConfig(model=path, ctx=2048, threads=2, kv_qat=False))
    for case in ("chat", "tool_call"):
        c = cases[case]
        assert engine.tokenizer.encode_with_specials(c["text"]) == c["prompt_ids"]
        assert greedy(engine, c["prompt_ids"], len(c["greedy_ids"]))[1] == c["greedy_ids"]
    assert engine.tokenizer.eos_ids == open_model_file(FOLDER).stop_ids


@pytest.mark.parametrize("case", CASES)
def test_logits_in_f32(wide: Engine, cases: dict[str, Any], case: str) -> None:
    c = cases[case]
    logits, ids = greedy(wide, c["prompt_ids"], 8)
    error = float(np.abs(logits[c["top10_ids"]] - c["top10_logits"]).max())
    print(case, "largest error of the ten best logits:", error)
    assert error < 2e-3
    assert ids == c["greedy_ids"][:8]


@pytest.fixture(scope="module")
def oracle() -> Iterator[Engine]:
    engine = Engine.open(EngineConfig(model=FOLDER, backend="reference", ctx=2048, threads=2, kv_qat=False))
    yield engine
    engine.close()


@pytest.mark.parametrize("case", CASES)
def test_the_file_itself_on_the_oracle(oracle: Engine, cases: dict[str, Any], case: str) -> None:
    """BF16 weights as they are, in a backend that rounds no activations."""
    c = cases[case]
    logits, ids = greedy(oracle, c["prompt_ids"], 8)
    error = float(np.abs(logits[c["top10_ids"]] - c["top10_logits"]).max())
    print(case, "largest error of the ten best logits:", error)
    assert error < 1e-4
    assert ids == c["greedy_ids"][:8]


def greedy(engine: Engine, prompt: list[int], n: int) -> tuple[Any, list[int]]:
    """(logits after the prompt, the next n tokens)"""
    session = engine.new_session()
    session.sync(prompt)
    first = session.logits()
    ids = [int(first.argmax())]
    while len(ids) < n:
        engine.step([Row(session, [ids[-1]], want_logits=True)])
        ids.append(int(session.logits().argmax()))
    session.close()
    return first, ids


@pytest.mark.parametrize("case", CASES)
def test_greedy_continuation(engine: Engine, cases: dict[str, Any], case: str) -> None:
    c = cases[case]
    logits, ids = greedy(engine, c["prompt_ids"], len(c["greedy_ids"]))
    error = float(np.abs(logits[c["top10_ids"]] - c["top10_logits"]).max())
    print(case, len(c["prompt_ids"]), "prompt tokens; largest error of the ten best logits:", error)
    assert ids == c["greedy_ids"]
    assert error < 0.25


def test_tokenizers(engine: Engine, cases: dict[str, Any]) -> None:
    for c in cases.values():
        assert engine.tokenizer.encode_with_specials(c["text"]) == c["prompt_ids"]
        assert engine.tokenizer.decode(c["greedy_ids"]).decode() == c["greedy_text"]
