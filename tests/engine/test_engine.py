"""Opening models of both formats, the Python API, and what the engine refuses."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

import ds4
from ds4 import _cpu
from ds4.engine import engine as engine_module
from ds4.engine.engine import Engine, fingerprint
from ds4.engine.model_file import open_model_file
from ds4.engine.types import EngineConfig, EngineLike, Row, SamplingParams, SessionLike
from ds4.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineError,
    MemoryPlanError,
    ModelFileError,
    UnsupportedModelError,
)
from tests.support.tiny_llama import TinyLlama

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama.make(layers=2, tied=False).write_gguf(tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf")


def open_engine(path: Path, **config: Any) -> Engine:
    return ds4.load(path, **{"backend": "reference", "ctx": 128, "prefill_chunk": 16} | config)


@pytest.fixture(scope="module")
def engine(gguf_file: Path) -> Engine:
    return open_engine(gguf_file)


def test_engine_and_session_satisfy_their_protocols(engine: Engine) -> None:
    def takes(e: EngineLike, s: SessionLike) -> tuple[EngineLike, SessionLike]:
        return e, s

    assert takes(engine, engine.new_session())[0].info.family == "llama"


@pytest.mark.parametrize("options", [{}, {"tied": False, "biases": True}], ids=str)
def test_gguf_and_safetensors_of_one_model_agree(tmp_path: Path, options: dict[str, Any]) -> None:
    tiny = TinyLlama.make(layers=2, **options)
    tokens = [int(t) for t in np.random.default_rng(1).integers(0, 320, 30)]
    expected = tiny.logits(tokens)[-1]
    for path in (tiny.write_gguf(tmp_path / "tiny.gguf"), tiny.write_hf(tmp_path / "hf")):
        session = open_engine(path).new_session()
        session.sync(tokens)
        assert np.abs(session.logits() - expected).max() < 2e-2  # f16 keys and values


def test_info_plan_and_progress(gguf_file: Path) -> None:
    seen: list[tuple[int, int]] = []
    engine = ds4.load(gguf_file, backend="reference", ctx=100, slots=3, progress=lambda d, t: seen.append((d, t)))
    assert seen[-1][0] == seen[-1][1] and sorted(seen) == seen
    info = engine.info
    assert (info.id, info.family, info.syntax, info.ctx_train) == ("tiny", "llama", "chatml", 512)
    assert (info.vocab_size, info.n_layers, info.path) == (320, 2, gguf_file)
    assert info.n_params == sum(w.size for w in TinyLlama.make(layers=2, tied=False).weights.values())
    assert info.types == {"F32": 4 * info.n_params}
    plan = engine.plan
    assert plan.weight_bytes == 4 * info.n_params and plan.slots == 3
    # K and V: 2 buffers x 2 layers x 2 heads x 32 x f16, 100 tokens; token ids; one row of logits.
    assert plan.state_bytes == 100 * (2 * 2 * 2 * 32 * 2) + 4 * 100 + 4 * 320
    assert engine.backend_name == "reference"
    assert engine.new_session().ctx == 100 and engine.new_session(7).ctx == 7


def test_a_plan_that_does_not_fit_is_refused(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "available_memory", lambda: 300 << 20)
    with pytest.raises(MemoryPlanError, match=r"would fit: \d+ slots with --ctx 100000"):
        open_engine(gguf_file, ctx=100_000, slots=64)
    open_engine(gguf_file, ctx=100_000, slots=64, check_memory=False)


def test_context_of_its_own_choice(gguf_file: Path) -> None:
    assert open_engine(gguf_file, ctx=0).config.ctx == 512, "as trained"
    for exactly in (1, 300, 513):
        assert open_engine(gguf_file, ctx=exactly).config.ctx == exactly


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"backend": "tpu"}, "unknown backend 'tpu'"),
        ({"ctx": -1}, "ctx is -1"),
        ({"slots": 0}, "slots is 0"),
        ({"threads": -1}, "threads is -1"),
        ({"prefill_chunk": -1}, "prefill_chunk is -1"),
    ],
    ids=str,
)
def test_bad_configuration(gguf_file: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_engine(gguf_file, **config)
    with pytest.raises(TypeError):
        ds4.load(gguf_file, no_such_option=1)


def test_bad_isa(gguf_file: Path) -> None:
    with pytest.raises(ConfigError, match="sse9"):
        open_engine(gguf_file, backend="cpu", isa="sse9")


def test_unsupported_files_name_the_key(tmp_path: Path) -> None:
    path = TinyLlama.make(layers=1).write_gguf(tmp_path / "m.gguf")
    file = open_model_file(path)
    backend = _cpu.Backend("reference")

    def refused(error: type[ModelFileError], **changes: Any) -> str:
        hparams = dict(file.hparams) | changes
        with pytest.raises(error) as e:
            engine_module.build_model(replace(file, hparams=hparams), backend)  # type: ignore[arg-type]
        return str(e.value)

    assert "rope.scaling.type: 'yarn' is not implemented" in refused(
        UnsupportedModelError, **{"rope.scaling.type": "yarn"}
    )
    assert "llama.attention.head_count: one value per layer" in refused(
        UnsupportedModelError, **{"attention.head_count": [4]}
    )
    assert "blk.0.ffn_gate.weight: shape [192, 128]" in refused(ModelFileError, feed_forward_length=64)
    assert "feed_forward_length: is 0" in refused(ModelFileError, feed_forward_length=0)
    with pytest.raises(UnsupportedModelError, match=r"general.architecture: 'rwkv' is not implemented"):
        engine_module.build_model(replace(file, family="rwkv"), backend)
    with pytest.raises(ModelFileError, match="cannot open"):
        open_engine(tmp_path / "absent.gguf")


def test_generate_equals_step_by_step(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("the thing")
    session = engine.new_session()
    session.sync(prompt)
    sampler = engine.new_sampler(GREEDY)
    tokens = [int(session.logits().argmax())]
    while len(tokens) < 20:
        [result] = engine.step([Row(session, tokens[-1:], sampler)])
        assert result.token is not None and result.logprobs is None
        tokens.append(result.token)
    ends = [i for i, t in enumerate(tokens) if t in engine.tokenizer.eos_ids]
    expected = engine.tokenizer.decode(tokens[: ends[0] if ends else 20]).decode("utf-8", "replace")
    assert "".join(engine.generate("the thing", GREEDY, max_tokens=20)) == expected
    assert "".join(engine.generate(prompt, GREEDY, max_tokens=20)) == expected
    assert list(engine.generate(prompt, GREEDY, max_tokens=0)) == []
    with pytest.raises(ContextLengthError):
        list(engine.generate([5] * 129, GREEDY))


def test_generate_stops_at_the_context(gguf_file: Path) -> None:
    engine = open_engine(gguf_file, ctx=10)
    params = SamplingParams(temperature=1.0, seed=5, logit_bias=dict.fromkeys(engine.tokenizer.eos_ids, -1e9))
    # Eight prompt tokens leave room for two fed ones; the token sampled after the last is still given out.
    text = list(engine.generate([40] * 8, params, max_tokens=100))
    assert 1 <= len(text) <= 4


def test_a_step_wakes_whoever_waits_at_a_file_descriptor(engine: Engine) -> None:
    session = engine.new_session()
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    try:
        with pytest.raises(ContextLengthError):
            engine.step([Row(session, [5] * 500)], wake=writes)
        with pytest.raises(BlockingIOError):
            os.read(reads, 100)
        engine.step([Row(session, [5, 6])], wake=writes)
        assert int.from_bytes(os.read(reads, 100), sys.byteorder) == 1, "once, as an eventfd takes it"
        engine.step([Row(session, [7])])
        with pytest.raises(BlockingIOError):
            os.read(reads, 100)
    finally:
        os.close(reads)
        os.close(writes)
        session.close()


def test_step_results_and_clock(engine: Engine) -> None:
    a, b = engine.new_session(), engine.new_session()
    before = a.last_used
    sampler = engine.new_sampler(SamplingParams(seed=1, logprobs=2))
    results = engine.step([Row(a, [1, 2], sampler), Row(b, np.array([3], np.int32), want_logits=True)])
    assert results[0].token is not None and results[0].logprobs is not None
    assert len(results[0].logprobs.top) == 2 and results[0].logprobs.logprob <= 0
    assert results[1].token is None and b.has_logits and not a.has_logits
    assert a.last_used >= before
    with pytest.raises(ValueError, match="object"):
        engine.step([Row(object(), [1])])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="object"):
        engine.step([Row(a, [1], object())])  # type: ignore[arg-type]
    assert a.n_tokens == 2


def test_saved_sessions_stay_with_their_weights(tmp_path: Path, engine: Engine) -> None:
    other = open_engine(TinyLlama.make(layers=2, tied=False, seed=2).write_gguf(tmp_path / "other.gguf"))
    session = engine.new_session()
    session.sync([1, 2, 3])
    path = tmp_path / "session"
    with path.open("wb") as out:
        assert session.save(out) == session.payload_bytes() > 0
    with path.open("rb") as stored:
        again = engine.new_session()
        again.load(stored)
    assert np.array_equal(again.logits(), session.logits())
    with path.open("rb") as stored, pytest.raises(CheckpointError, match="fingerprint"):
        other.new_session().load(stored)


def test_fingerprint_sees_names_shapes_types_and_bytes(tmp_path: Path) -> None:
    paths = {
        "same": TinyLlama.make(layers=1),
        "again": TinyLlama.make(layers=1),
        "seed": TinyLlama.make(layers=1, seed=9),
        "type": TinyLlama.make(layers=1, qtype=GGMLQuantizationType.Q8_0),
        "shape": TinyLlama.make(layers=1, ff=160),
    }
    prints = {name: fingerprint(open_model_file(t.write_gguf(tmp_path / f"{name}.gguf"))) for name, t in paths.items()}
    assert prints["same"] == prints["again"]
    assert len(set(prints.values())) == 4
    file = open_model_file(tmp_path / "same.gguf")
    tensor = file.tensors["blk.0.attn_k.weight"]
    for at in (0, tensor.nbytes // 2, tensor.nbytes - 1):
        data = bytearray(tensor.data)
        data[at] ^= 1
        changed = replace(file, tensors=file.tensors | {tensor.name: replace(tensor, data=memoryview(data))})
        assert fingerprint(changed) != prints["same"]


def test_warm_weights_reads_and_changes_nothing(gguf_file: Path, engine: Engine) -> None:
    warm = open_engine(gguf_file, warm_weights=True)
    a, b = warm.new_session(), engine.new_session()
    a.sync([4, 5])
    b.sync([4, 5])
    assert np.array_equal(a.logits(), b.logits())


def test_close(gguf_file: Path) -> None:
    engine = open_engine(gguf_file)
    session = engine.new_session()
    session.sync([1, 2])
    engine.close()
    engine.close()
    assert session.tokens.tolist() == [1, 2]
    for use in (engine.new_session, lambda: engine.step([Row(session, [3])]), lambda: engine.fingerprint):
        with pytest.raises(EngineError, match="closed"):
            use()


def test_module_exports() -> None:
    from ds4.engine.session import Session

    assert (ds4.Engine, ds4.Session, ds4.SamplingParams) == (Engine, Session, SamplingParams)
    with pytest.raises(AttributeError):
        ds4.Nothing  # noqa: B018


def test_a_chunk_of_zero_is_the_backends_choice(gguf_file: Path) -> None:
    assert open_engine(gguf_file, prefill_chunk=0).config.prefill_chunk == 512


def test_default_configuration_is_sane() -> None:
    config = EngineConfig()
    assert config.backend == "auto" and config.prefill_chunk == 0
