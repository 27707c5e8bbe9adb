"""`ds4 inspect`: facts of a file as JSON and as tables, for sound, foreign and contradictory files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ds4.cli import inspect
from ds4.errors import ConfigError, ModelFileError
from tests.support.tiny_llama import TinyLlama


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    inspect.add_parser(parser.add_subparsers())
    args = parser.parse_args(["inspect", *argv])
    return int(args.run(args))


def facts(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    assert run(*argv, "--json") == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    f = facts(capsys)
    assert (f["family"], f["syntax"], f["id"]) == ("llama", "chatml", "smollm2-135m-instruct")
    assert f["types"]["Q4_1"] == {"tensors": 210, "bytes": 66355200} and f["n_tensors"] == 272
    assert f["biggest"][0] == {
        "name": "token_embd.weight",
        "shape": [49152, 576],
        "type": "Q8_0",
        "bytes": 30081024,
    }
    assert f["tokenizer"]["stop"] == {"0": "<|endoftext|>", "2": "<|im_end|>"} and f["tokenizer"]["merges"] == 48900
    assert f["problem"] is None and f["bits_per_weight"] == pytest.approx(5.744, abs=0.001)


def test_memory_plan_follows_context_and_slots(capsys: pytest.CaptureFixture[str]) -> None:
    one = facts(capsys, "--ctx", "4096")["memory"]
    more = facts(capsys, "--ctx", "8192", "--slots", "3")["memory"]
    assert (one["ctx"], one["slots"], more["ctx"], more["slots"]) == (4096, 1, 8192, 3)
    assert one["weight_bytes"] == more["weight_bytes"] > 90_000_000
    # 30 layers of K and V, 3 heads of 64 values of 2 bytes, for each token.
    assert more["state_bytes_per_slot"] - one["state_bytes_per_slot"] >= 4096 * 30 * 2 * 3 * 64 * 2
    total = more["weight_bytes"] + 3 * more["state_bytes_per_slot"] + more["workspace_bytes"]
    assert more["total_bytes"] == total
    assert facts(capsys)["memory"]["ctx"] == 8192


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--ctx", "1024") == 0
    out = capsys.readouterr().out
    for text in (
        "Hyper-parameters",
        "Q4_1",
        "token_embd.weight",
        "<|im_end|>",
        "Memory for 1 \u00d7 1024 tokens",
        "all sessions full",
    ):
        assert text in out
    assert ".gguf (gguf, 93.8 MiB)" in out and "134.5 M at 5.74 bits" in out


def test_directory_without_tokenizer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = TinyLlama.make(layers=1).write_hf(tmp_path / "tiny")
    f = facts(capsys, str(path))
    assert f["tokenizer"] is None and f["format"] == "safetensors" and f["types"].keys() == {"F32"}
    assert run(str(path)) == 0
    assert "No tokenizer." in capsys.readouterr().out


def foreign(path: Path, family: str, name: str) -> Path:
    writer = gguf.GGUFWriter(path, family)
    writer.add_name(name)
    writer.add_context_length(128)
    writer.add_block_count(1)
    writer.add_embedding_length(4)
    writer.add_float32(f"{family}.not_finite", float("nan"))
    writer.add_tensor("token_embd.weight", np.ones((8, 4), "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_unknown_family_has_no_memory_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    f = facts(capsys, str(foreign(tmp_path / "x.gguf", "mamba", "M")))
    assert f["problem"] is None and "mamba" in f["memory"]["unavailable"]
    assert f["hparams"]["not_finite"] == "nan"


def test_contradictions_are_shown_and_fail(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(foreign(tmp_path / "x.gguf", "llama", "M"))
    f = facts(capsys, path, status=1)
    assert "llama.feed_forward_length: the key is missing" in f["problem"] and f["memory"] is None
    assert run(path) == 1
    assert "Problem: " in capsys.readouterr().out


def test_names_in_the_file_cannot_reach_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = foreign(tmp_path / "x.gguf", "mamba", "evil\x1b]0;title\x07 [bold]name[/bold]")
    assert run(str(path)) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out
    assert r"evil\x1b]0;title\x07 [bold]name[/bold]" in out


def test_bad_arguments() -> None:
    for flag in ("--ctx", "--slots"):
        with pytest.raises(ConfigError, match=f"{flag}: expected a positive number, got 0"):
            run(flag, "0")
    with pytest.raises(ModelFileError, match="No such file"):
        run("/nowhere.gguf")
