"""Conversion: values survive exactly where types stay, else to the encoder's rounding; files are whole or absent."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from ds4 import _cpu
from ds4.cli import convert as cli
from ds4.convert import gguf_out
from ds4.convert.convert import convert
from ds4.convert.encode import ENCODABLE, encode
from ds4.convert.types import TypePlan, class_of
from ds4.engine.engine import Engine
from ds4.engine.model_file import ModelFile, open_model_file
from ds4.engine.tensors import DType
from ds4.engine.types import EngineConfig
from ds4.errors import ConfigError, ModelFileError
from tests.engine.test_hf_deepseek4 import CONFIG_FP8, published
from tests.support.stored import Stored, write_safetensors
from tests.support.tiny_deepseek4 import tiny
from tests.support.tiny_llama import TinyLlama


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["convert", *argv])
    return int(args.run(args))


def values(model: ModelFile, name: str) -> npt.NDArray[np.float32]:
    t = model.tensors[name]
    return _cpu.dequantize(int(t.dtype), t.data).reshape(t.shape)


def last_logits(path: Path, backend: str = "reference") -> npt.NDArray[np.float32]:
    engine = Engine.open(EngineConfig(model=path, backend=backend, ctx=64, threads=2))
    session = engine.new_session()
    session.sync([5, 17, 300, 5, 9, 2, 77])
    return session.logits()


def test_a_directory_becomes_the_same_model(tmp_path: Path) -> None:
    source = tiny("flash").write_hf(tmp_path / "tiny")
    assert run(str(source), str(tmp_path / "tiny.gguf")) == 0
    a, b = open_model_file(source), open_model_file(tmp_path / "tiny.gguf")
    assert b.tensors["blk.0.ffn_up_exps.weight"].shape == (8, 256, 256)
    assert b.n_params == a.n_params and b.name == "tiny"
    for key, value in a.hparams.items():
        assert b.hparams[key] == (pytest.approx(value) if isinstance(value, float) else value), key
    assert np.array_equal(last_logits(source), last_logits(tmp_path / "tiny.gguf"))
    # The file is what the gguf package reads too.
    stored = {t.name: t for t in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    want = tiny("flash").weights["layers.3.ffn.experts.5.w2.weight"]
    assert np.array_equal(stored["blk.3.ffn_down_exps.weight"].data[5], want)


def test_experts_of_several_files_stand_in_order(tmp_path: Path) -> None:
    """Shards hold the experts in any order."""
    model = tiny("flash")
    path = tmp_path / "shards"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(model.config))
    names = list(reversed(model.weights))
    weight_map = {}
    for i in range(2):
        file = f"model-{i}.safetensors"
        write_safetensors(path / file, {n: model.weights[n] for n in names[i::2]})
        weight_map |= dict.fromkeys(names[i::2], file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert run(str(path), str(tmp_path / "m.gguf")) == 0
    got = values(open_model_file(tmp_path / "m.gguf"), "blk.3.ffn_down_exps.weight")
    for e in range(8):
        assert np.array_equal(got[e], model.weights[f"layers.3.ffn.experts.{e}.w2.weight"])


def test_codes_with_scales_keep_their_values(tmp_path: Path) -> None:
    codes, _, _ = published(7)
    source = tiny("flash").write_hf(tmp_path / "codes", codes, **CONFIG_FP8)
    assert run(str(source), str(tmp_path / "m.gguf")) == 0
    m = open_model_file(tmp_path / "m.gguf")
    assert m.tensors["blk.1.ffn_gate_exps.weight"].dtype is DType.MXFP4
    assert m.tensors["blk.1.attn_q_a.weight"].dtype is DType.BF16
    for backend in ("reference", "cpu"):
        assert np.array_equal(last_logits(source, backend), last_logits(tmp_path / "m.gguf", backend))


def test_rotated_rows_change_places(tmp_path: Path) -> None:
    """GGUF's Llama rotates neighbouring rows, a directory's rotates halves: one function, two orders."""
    model = TinyLlama.make(biases=True)
    source = model.write_hf(tmp_path / "llama")
    assert run(str(source), str(tmp_path / "m.gguf")) == 0
    got, want = open_model_file(tmp_path / "m.gguf"), open_model_file(model.write_gguf(tmp_path / "want.gguf"))
    assert got.tensors.keys() == want.tensors.keys()
    for name, t in want.tensors.items():
        assert got.tensors[name].data == t.data, name
    assert np.abs(last_logits(source) - last_logits(tmp_path / "m.gguf")).max() < 1e-5


def test_chosen_types(tmp_path: Path) -> None:
    source = tiny("flash").write_gguf(tmp_path / "source.gguf")
    flags = ["--type", "Q8_0", "--experts", "Q4_0", "--experts-down", "mxfp4", "--embedding", "F16", "--other", "BF16"]
    assert run(str(source), str(tmp_path / "m.gguf"), *flags) == 0
    a, b = open_model_file(source), open_model_file(tmp_path / "m.gguf")
    expected = {
        "token_embd.weight": "F16",
        "output.weight": "Q8_0",
        "output_norm.weight": "F32",
        "output_hc_fn.weight": "BF16",
        "blk.2.attn_compressor_kv.weight": "BF16",
        "blk.2.attn_output_a.weight": "Q8_0",
        "blk.2.ffn_down_shexp.weight": "Q8_0",
        "blk.2.ffn_gate_inp.weight": "BF16",
        "blk.2.ffn_gate_exps.weight": "Q4_0",
        "blk.2.ffn_down_exps.weight": "MXFP4",
        "blk.2.ffn_gate_tid2eid.weight": "I32",
        "blk.2.attn_sinks.weight": "F32",
    }
    for name, dtype in expected.items():
        assert b.tensors[name].dtype.name == dtype, name
        if dtype != "I32":
            qtype = GGMLQuantizationType[dtype]
            assert np.array_equal(values(b, name), dequantize(quantize(values(a, name), qtype), qtype)), name
    # A second pass with the same types copies bytes.
    assert run(str(tmp_path / "m.gguf"), str(tmp_path / "again.gguf"), *flags) == 0
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()


def test_metadata_keeps_its_types(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "deepseek4.context_length": np.uint64(1 << 20),
        "deepseek4.rope.freq_base": np.float64(10000.1),
        "general.author": "someone",
        "general.file_type": 7,
        "deepseek4.attention.compress_ratios": None,
        "split.count": 1,
    }
    source = tiny("pro").write_gguf(tmp_path / "source.gguf", keys=keys)
    assert run(str(source), str(tmp_path / "m.gguf")) == 0
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["deepseek4.context_length"].types[0].name == "UINT64"
    assert fields["deepseek4.rope.freq_base"].types[0].name == "FLOAT64"
    assert fields["deepseek4.rope.freq_base"].contents() == 10000.1
    assert fields["general.author"].contents() == "someone"
    assert "general.file_type" not in fields and "split.count" not in fields
    assert fields["deepseek4.attention.compress_ratios"].contents() == [128, 128, 4, 128, 4]  # derived


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    model = open_model_file(tiny("flash").write_hf(tmp_path / "tiny"))
    target = tmp_path / "m.gguf"

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(model, target, TypePlan(), progress=stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny"]
    seen: list[tuple[int, int]] = []
    size = convert(model, target, TypePlan(), progress=lambda *at: seen.append(at))
    assert target.stat().st_size == size and seen[-1][0] == seen[-1][1] and len(seen) > 100
    with pytest.raises(ConfigError, match="exists; --force"):
        convert(model, target, TypePlan())
    convert(model, target, TypePlan(), force=True)
    with pytest.raises(ConfigError, match=r"ends in \.gguf"):
        convert(model, tmp_path / "m.bin", TypePlan())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--type", "Q9"], "--type Q9: expected one of F32, F16"),
        (["--experts-down", "Q8_1"], "--experts-down Q8_1: expected one of"),
    ],
)
def test_flags_that_are_refused(tmp_path: Path, flags: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run("nothing", str(tmp_path / "m.gguf"), *flags)


def test_rows_that_are_no_blocks(tmp_path: Path) -> None:
    source = TinyLlama.make(width=144, head_dim=36, layers=1).write_hf(tmp_path / "llama")
    with pytest.raises(ConfigError, match=r"rows of 144 are not whole Q8_0 blocks of 32; .*--embedding"):
        run(str(source), str(tmp_path / "m.gguf"), "--type", "Q8_0")
    assert not (tmp_path / "m.gguf").exists()


def test_values_that_do_not_fit(tmp_path: Path) -> None:
    for value, text in ((1e5, "beyond the range of F16"), (np.inf, "infinite")):
        weights = dict(tiny("flash").weights)
        weights["layers.1.attn.wkv.weight"] = np.full((128, 256), value, np.float32)
        source = tiny("flash").write_hf(tmp_path / f"m{value}", weights)
        with pytest.raises(ModelFileError, match=f"blk.1.attn_kv.weight: .*{text}"):
            run(str(source), str(tmp_path / "m.gguf"), "--type", "F16")
    codes, _, _ = published(3)
    scale = codes["layers.0.attn.wq_a.scale"]
    codes["layers.0.attn.wq_a.scale"] = Stored(scale.code, scale.shape, bytes(len(scale.data)))
    source = tiny("flash").write_hf(tmp_path / "small", codes)
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_q_a\.weight: a value does not fit BF16"):
        run(str(source), str(tmp_path / "m.gguf"))
    assert run(str(source), str(tmp_path / "m.gguf"), "--dense", "F32") == 0


@pytest.mark.parametrize("dtype", ENCODABLE, ids=lambda d: d.name)
def test_encoders(dtype: DType) -> None:
    print("seed", int(dtype))
    rows = np.random.default_rng(int(dtype)).standard_normal((3, 256)).astype(np.float32)
    blocks = encode(rows, dtype)
    assert blocks.shape == (3, _cpu.row_bytes(int(dtype), 256))
    back = _cpu.dequantize(int(dtype), blocks.reshape(-1)).reshape(rows.shape)
    error = {"F32": 0, "F16": 2e-3, "BF16": 1.6e-2, "Q8_0": 2e-2, "Q5_1": 0.12, "Q5_0": 0.2, "Q4_1": 0.25}
    error |= {"Q2_K": 1.2, "IQ2_XXS": 1.6, "Q3_K": 0.8}
    assert np.abs(back - rows).max() <= error.get(dtype.name, 0.6)


def test_classes() -> None:
    assert class_of("blk.10.ffn_gate_exps.weight") == "experts"
    assert class_of("blk.0.attn_kv.weight") == class_of("blk.0.ffn_down.weight") == "dense"
    assert class_of("blk.0.attn_compressor_kv.weight") == class_of("output_hc_fn.weight") == "other"
    assert gguf_out.key(1 << 40).kind is gguf.GGUFValueType.INT64
