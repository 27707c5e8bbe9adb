"""The last positions of a context of 2^20 tokens: both CPU backends go on from the same rows to the same logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds4.engine.engine import Engine
from ds4.engine.session import Session
from ds4.engine.types import EngineConfig, Row
from tests.support.tiny_deepseek4 import TinyDeepSeek4, drawn

CONTEXT = 1 << 20
LAST = 12  # tokens that are evaluated; the last one closes a window of 4 and one of 128


def model() -> TinyDeepSeek4:
    return drawn(
        17,
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        compress_ratios=[0, 4, 128, 0],
        num_attention_heads=2,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=32,
        o_groups=1,
        o_lora_rank=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        num_hash_layers=1,
        index_n_heads=8,
        index_head_dim=32,
        num_nextn_predict_layers=0,
    )


def filled(engine: Engine, tokens: npt.NDArray[np.int32]) -> Session:
    """A session of these tokens with random rows, the same for every backend."""
    session, native = engine.new_session(), engine._model.native
    rng = np.random.default_rng(23)
    session.native.begin_import(tokens, len(tokens))
    for index, (_, _, _, heads, width, *_) in enumerate(native.state_specs):
        count = native.buffer_rows(index, len(tokens))
        rows = rng.standard_normal((count, heads * width), np.float32)
        session.native.import_rows([(index, 0, count)], rows.view(np.uint8).reshape(-1))
    session.native.finish_import(None)
    return session


def test_the_end_of_the_context(tmp_path: Path) -> None:
    path = model().write_hf(tmp_path / "long")
    tokens = np.random.default_rng(29).integers(0, 64, CONTEXT, np.int32)
    found = {}
    for backend in ("reference", "cpu"):
        config = EngineConfig(model=path, backend=backend, ctx=CONTEXT, threads=2, check_memory=False, kv_qat=False)
        engine = Engine.open(config)
        native = engine._model.native
        session = filled(engine, tokens[:-LAST])
        found[backend] = native.all_logits(session.native, tokens[-LAST:])
        assert session.n_tokens == CONTEXT
        session.close()
        if backend == "cpu":
            single = filled(engine, tokens[:-LAST])
            for i, token in enumerate(tokens[-LAST:]):
                engine.step([Row(single, [int(token)], want_logits=True)])
                assert np.array_equal(single.logits(), found[backend][i]), i
        engine.close()
    worst = float(np.abs(found["cpu"] - found["reference"]).max())
    print("logits at 2^20:", worst)
    assert worst < 2e-4 and np.abs(found["reference"]).max() > 1
