"""Random checkpoints: they open and run, are the seed's alone, and have the shapes and types that were asked for."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import pytest

from ds4 import _cpu
from ds4.cli import synth as cli
from ds4.convert.blocks import DRAWABLE, random_rows
from ds4.convert.convert import convert
from ds4.convert.synth import SIZES, recipe_of
from ds4.convert.types import TypePlan
from ds4.engine.engine import Engine
from ds4.engine.model_file import open_model_file
from ds4.engine.tensors import DType
from ds4.engine.types import EngineConfig
from ds4.errors import ConfigError


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["synth", *argv])
    return int(args.run(args))


@pytest.mark.parametrize("family", list(SIZES))
def test_tiny_models_run(tmp_path: Path, family: str) -> None:
    path = tmp_path / "m.gguf"
    assert run(str(path), "--family", family, "--seed", "3") == 0
    engine = Engine.open(EngineConfig(model=path, ctx=256, threads=2))
    session = engine.new_session()
    session.sync(engine.tokenizer.encode("the quick brown fox") * 8)
    logits = session.logits()
    spread = float(logits[logits > -1e30].std())
    print(family, "logits", spread)
    assert np.isfinite(spread) and 0.3 < spread < 30
    assert engine.tokenizer.decode(engine.tokenizer.encode("h\u00e9th")) == "h\u00e9th".encode()
    assert engine.info.syntax == {"deepseek4": "deepseek4", "llama": "chatml"}[family]


@pytest.mark.parametrize(("kind", "most"), [("mtp", 3), ("dspark", 5)])
def test_layers_that_draft(tmp_path: Path, kind: str, most: int) -> None:
    """They load, guess, and change none of the other tensors; a conversion takes them along where asked."""
    path, bare = tmp_path / "m.gguf", tmp_path / "bare.gguf"
    assert run(str(path), "--family", "deepseek4", "--seed", "3", f"--{kind}") == 0
    run(str(bare), "--family", "deepseek4", "--seed", "3")
    one, other = open_model_file(path), open_model_file(bare)
    assert one.tensors.keys() == other.tensors.keys()
    assert all(t.data == other.tensors[n].data for n, t in one.tensors.items())
    assert other.draft_layers() is None
    config = {"mtp": kind == "mtp", "dspark": kind == "dspark", "mtp_draft": 3, "mtp_margin": 0.0}
    converted, without = tmp_path / "q8.gguf", tmp_path / "without.gguf"
    convert(one, converted, TypePlan(dense=DType.Q8_0, experts=DType.Q8_0, experts_down=DType.Q8_0), drafts=True)
    convert(one, without, TypePlan())
    assert open_model_file(without).draft_layers() is None
    found = open_model_file(converted).draft_layers()
    assert found is not None and found.tensors["mtp.0.attn_q_b.weight"].dtype is DType.Q8_0
    guesses = []
    for model in (path, converted):
        engine = Engine.open(EngineConfig(model=model, ctx=64, threads=2, dspark_confidence=0.0, **config))  # type: ignore[arg-type]
        session = engine.new_session()
        session.sync([5, 6, 7])
        guesses.append(engine._model.native.draft_logits(session.native, 8, most))
    assert [len(g) for g, _ in guesses] == [most, most]
    error = float(np.abs(guesses[0][1][0] - guesses[1][1][0]).max() / guesses[0][1][0].std())
    print(kind, guesses[0][0], guesses[1][0], "difference of the first in standard deviations", error)
    with pytest.raises(ConfigError, match=r"--drafts: .* has no layers that draft"):
        convert(other, tmp_path / "no.gguf", TypePlan(), drafts=True)


def test_layers_that_share_their_bytes(tmp_path: Path) -> None:
    """Matrices repeat every so many layers, vectors do not, and what is drawn is what it is without sharing."""
    path, whole = tmp_path / "m.gguf", tmp_path / "whole.gguf"
    assert run(str(path), "--family", "deepseek4", "--distinct-layers", "2") == 0
    assert run(str(whole), "--family", "deepseek4") == 0
    assert path.stat().st_size < 0.6 * whole.stat().st_size
    shared, full = open_model_file(path).tensors, open_model_file(whole).tensors
    assert shared.keys() == full.keys()
    for i in range(2):
        assert shared[f"blk.{i}.ffn_up_exps.weight"].data == full[f"blk.{i}.ffn_up_exps.weight"].data
    for i in range(2, 5):
        assert shared[f"blk.{i}.ffn_up_exps.weight"].data == full[f"blk.{i % 2}.ffn_up_exps.weight"].data
        assert shared[f"blk.{i}.attn_norm.weight"].data == full[f"blk.{i}.attn_norm.weight"].data
    engine = Engine.open(EngineConfig(model=path, ctx=64, threads=2))
    session = engine.new_session()
    session.sync([5, 6, 7])
    assert np.isfinite(session.logits()).all()
    with pytest.raises(ConfigError, match="--distinct-layers 0"):
        run(str(tmp_path / "no.gguf"), "--family", "llama", "--distinct-layers", "0")


def test_the_seed_decides(tmp_path: Path) -> None:
    data = []
    for i, seed in enumerate(("1", "1", "2")):
        path = tmp_path / f"{i}.gguf"
        run(str(path), "--family", "deepseek4", "--seed", seed, "--layers", "2")
        data.append(path.read_bytes())
    assert data[0] == data[1] and data[0] != data[2]
    m = open_model_file(tmp_path / "0.gguf")
    assert m.tensors["blk.0.ffn_gate_exps.weight"].data != m.tensors["blk.0.ffn_up_exps.weight"].data
    # A tensor does not depend on its neighbours.
    run(str(tmp_path / "3.gguf"), "--family", "deepseek4", "--seed", "1", "--layers", "3")
    two, three = open_model_file(tmp_path / "0.gguf"), open_model_file(tmp_path / "3.gguf")
    assert all(t.data == three.tensors[n].data for n, t in two.tensors.items()) and len(three.tensors) > len(
        two.tensors
    )


def test_two_bit_experts(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    flags = ["--type", "q8_0", "--experts", "iq2_xxs", "--experts-down", "q2_k", "--other", "f16"]
    assert run(str(path), "--family", "deepseek4", *flags) == 0
    m = open_model_file(path)
    assert {n.split(".")[-2]: t.dtype.name for n, t in m.tensors.items() if "_exps" in n} == {
        "ffn_gate_exps": "IQ2_XXS",
        "ffn_up_exps": "IQ2_XXS",
        "ffn_down_exps": "Q2_K",
    }
    streams = []
    for backend in ("cpu", "reference"):
        engine = Engine.open(EngineConfig(model=path, backend=backend, ctx=64, threads=2, kv_qat=False))
        streams.append(engine._model.native.hidden_states([5, 100, 7, 30])[2])
    error = float(np.abs(streams[0] - streams[1]).max() / np.abs(streams[1]).max())
    print("relative error of the kernels after two layers:", error)
    assert error < 0.05


def test_real_shapes() -> None:
    """Parameters of the published models."""
    for size, layers, parameters in (("flash", 43, 284.3e9), ("pro", 61, 1573e9)):
        recipe = recipe_of("deepseek4", size)
        assert recipe.keys["block_count"] == layers
        total = sum(int(np.prod(s, dtype=np.int64)) for s in recipe.tensors.values())
        print(size, total)
        assert total == pytest.approx(parameters, rel=1e-3), size
    assert recipe_of("deepseek4", "flash").tensors["blk.42.ffn_down_exps.weight"] == (256, 4096, 2048)


def test_layers_of_a_real_shape(tmp_path: Path) -> None:
    recipe = recipe_of("deepseek4", "pro", 4, "dspark")
    assert recipe.tensors["mtp.0.main_proj.weight"] == (7168, 3 * 7168)
    assert recipe.keys["dspark.target_layer_ids"] == [1, 2, 3] and "mtp.2.attn_q_b.weight" in recipe.tensors
    assert recipe.keys["attention.compress_ratios"] == [128, 128, 4, 128] and recipe.keys["hash_layer_count"] == 3
    assert run(str(tmp_path / "l.gguf"), "--family", "llama", "--size", "135m", "--layers", "1") == 0
    m = open_model_file(tmp_path / "l.gguf")
    assert m.tensors["blk.0.ffn_up.weight"].dtype is DType.Q4_1 and m.hparams["block_count"] == 1
    assert m.tensors["token_embd.weight"].shape == (49152, 576)


@pytest.mark.parametrize(("dtype", "spread"), list(itertools.product(DRAWABLE, (0.02, 1.0))))
def test_random_blocks(dtype: DType, spread: float) -> None:
    print("seed 5")
    data = random_rows(np.random.default_rng(5), dtype, 64, 512, spread)
    values = _cpu.dequantize(int(dtype), data)
    assert values.size == 64 * 512
    assert abs(values.mean()) < 0.1 * spread
    near = 1.45 if dtype is DType.MXFP4 else 1.05
    assert spread / near < values.std() < spread * near


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--family", "gpt"], "--family gpt: expected one of deepseek4, llama"),
        (["--family", "llama", "--size", "flash"], "--size flash: llama has tiny, 135m"),
        (["--family", "llama", "--layers", "9"], "--layers 9: llama tiny has 1 to 3"),
        (["--family", "llama", "--seed", "-1"], "--seed"),
        (["--family", "llama", "--mtp"], "--mtp: llama has no such layers"),
        (["--family", "llama", "--type", "I32"], "--type I32: expected one of"),
        (["--family", "llama", "--size", "135m", "--type", "Q4_K"], "rows of 576 are not whole Q4_K blocks of 256"),
    ],
)
def test_flags_that_are_refused(tmp_path: Path, flags: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run(str(tmp_path / "m.gguf"), *flags)
    assert not list(tmp_path.iterdir())
