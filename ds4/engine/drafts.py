"""Layers that only draft, of a DeepSeek V4 model: found in its file or in one of their own, under one naming.

Two kinds exist. The multi-token prediction head ("mtp") is one layer that guesses a token at a time; DSpark ("dspark")
is a few layers that guess a block at once. Both are called `mtp.S.*` in published checkpoints, stage S, and so they are
here, the tensors of a layer by their GGUF names (`mtp.0.attn_q_a.weight`).

Spellings that are read: safetensors as published; GGUF files with `mtp.S.*`; GGUF files with the head as a further
layer (`blk.43.nextn.*`); GGUF files of architecture `dflash`.

Sources: DeepSeek's published checkpoints; the tensor names and keys of published GGUF files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ds4.engine import hf_deepseek4
from ds4.engine.gguf import GGUFFile
from ds4.engine.safetensors import read_directory
from ds4.engine.tensors import Tensor
from ds4.errors import ModelFileError, UnsupportedModelError

Kind = Literal["mtp", "dspark"]

_NEXTN = {
    "nextn.eh_proj.weight": "eh_proj.weight",
    "nextn.enorm.weight": "enorm.weight",
    "nextn.hnorm.weight": "hnorm.weight",
    "nextn.shared_head_norm.weight": "norm.weight",
    "nextn.embed_tokens.weight": "embed_tokens.weight",
    "nextn.shared_head_head.weight": "shared_head_head.weight",
}
_HEADS = {f"output_hc_{part}.weight": f"hc_head_{part}.weight" for part in ("fn", "base", "scale")}
_DFLASH_FIRST = {"fc.weight": "main_proj.weight", "enc.output_norm.weight": "main_norm.weight"}
_DFLASH_LAST = {
    "output_norm.weight": "norm.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    **_HEADS,
}
# Of the drafter as a whole: published under one of its stages, whichever.
_FIRST = ("main_proj.weight", "main_norm.weight")
_LAST = ("norm.weight", "hc_head_fn.weight", "hc_head_base.weight", "hc_head_scale.weight")
_LAST_GROUPS = ("markov_head.", "confidence_head.")
_STAGE = re.compile(r"mtp\.(0|[1-9]\d{0,2})\.(.+)")
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)")
_KEYS = ("block_size", "markov_rank", "noise_token_id", "target_layer_ids", "stage_count")


@dataclass(frozen=True)
class DraftFile:
    """Draft layers as found. `hparams` are keys of the kind ("dspark.block_size"); `stored` has the name in the file of
    every tensor whose name is another one here."""

    path: Path
    kind: Kind
    tensors: dict[str, Tensor]
    hparams: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """Tokens that are guessed at once; 0: any number, one after the other."""
        size = self.hparams.get("dspark.block_size", 0)
        return size if type(size) is int else 0


def read_draft_file(path: Path, layers: int) -> DraftFile:
    """The draft layers in a file or directory of their own, or beside a model; `layers` of the model they belong to.

    Raises ModelFileError and UnsupportedModelError.
    """
    path = path.expanduser()
    if path.is_dir():
        config, files, _ = read_directory(path)
        found = from_directory(path, config, files)
    else:
        found = from_gguf(GGUFFile(path), layers)
    if found is None:
        raise ModelFileError(path, "mtp.0", "the file has no draft layers")
    return found


# ---- GGUF


def from_gguf(file: GGUFFile, layers: int) -> DraftFile | None:
    """The draft layers of a GGUF file, None where it has none."""
    if file.metadata.get("general.architecture") == "dflash":
        return _from_dflash(file)
    tensors, stored = {name: t for name, t in file.tensors.items() if name.startswith("mtp.")}, dict[str, str]()
    if not tensors:
        for name, tensor in file.tensors.items():
            match = _BLOCK.fullmatch(name)
            if match is not None and int(match[1]) == layers:
                new = "mtp.0." + _NEXTN.get(match[2], match[2])
            elif name in _HEADS:
                new = "mtp.0." + _HEADS[name]
            else:
                continue
            tensors[new], stored[new] = tensor, name
        if not any(name.startswith(f"blk.{layers}.nextn.") for name in stored.values()):
            return None
    return _draft_file(file.path, tensors, _gguf_keys(file.metadata), stored)


def _gguf_keys(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in (*_KEYS, "n_layers"):
        for prefix in ("dspark.", "deepseek4.dspark.", "deepseek4.dspark_", "deepseek4-dspark.dspark."):
            if (value := metadata.get(prefix + key)) is not None:
                found[key] = _plain(value)
    if "n_layers" in found:
        found.setdefault("stage_count", found.pop("n_layers"))
    return found


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _from_dflash(file: GGUFFile) -> DraftFile:
    stages = {int(m[1]) for name in file.tensors if (m := _BLOCK.fullmatch(name))}
    last = max(stages, default=0)
    tensors, stored = dict[str, Tensor](), dict[str, str]()
    for name, tensor in file.tensors.items():
        if (match := _BLOCK.fullmatch(name)) is not None:
            new = f"mtp.{match[1]}.{match[2]}"
        elif name in _DFLASH_FIRST:
            new = f"mtp.0.{_DFLASH_FIRST[name]}"
        elif name in _DFLASH_LAST:
            new = f"mtp.{last}.{_DFLASH_LAST[name]}"
        elif name in ("token_embd.weight", "output.weight"):
            continue  # the model's
        else:
            raise UnsupportedModelError(file.path, name, "this tensor is not part of a DSpark drafter")
        tensors[new], stored[new] = tensor, name
    values = {key: file.metadata.get(f"dflash.{key}") for key in ("block_size", "target_layers")}
    keys: dict[str, Any] = {"block_size": values["block_size"]}
    keys["noise_token_id"] = file.metadata.get("tokenizer.ggml.mask_token_id")
    targets = _plain(values["target_layers"])
    if not isinstance(targets, list) or any(type(t) is not int or t < 1 for t in targets):
        raise ModelFileError(file.path, "dflash.target_layers", f"is {targets!r}, expected positive integers")
    keys["target_layer_ids"] = [t - 1 for t in targets]  # counted by the layers that read them
    return _draft_file(file.path, tensors, keys, stored)


# ---- safetensors


def from_directory(path: Path, config: Mapping[str, Any], files: Mapping[str, Tensor]) -> DraftFile | None:
    """The draft layers of a safetensors directory, None where it has none."""
    tensors, stored = dict[str, Tensor](), dict[str, str]()
    for name, tensor in files.items():
        match = _STAGE.fullmatch(name.removeprefix("model."))
        if match is None:
            continue
        if (base := name.removesuffix(".scale")) != name and f"{base}.weight" in files:
            continue  # belongs to the matrix beside it
        if (base := name.removesuffix(".weight")) != name:
            tensor = hf_deepseek4.with_scales(path, name, tensor, files.get(f"{base}.scale"))
        new = f"mtp.{match[1]}.{hf_deepseek4.draft_name(match[2])}"
        if new in tensors:
            raise ModelFileError(path, name, f"{new} is in the file twice")
        tensors[new], stored[new] = replace(tensor, name=new), name
    if not tensors:
        return None
    keys = {key: config[f"dspark_{key}"] for key in _KEYS if f"dspark_{key}" in config}
    return _draft_file(path, tensors, keys, stored)


# ---- both


def _draft_file(path: Path, tensors: dict[str, Tensor], keys: dict[str, Any], stored: dict[str, str]) -> DraftFile:
    if not any(name.endswith("main_proj.weight") for name in tensors):
        return DraftFile(path, "mtp", tensors, {}, stored)
    last = max(int(m[1]) for name in tensors if (m := _STAGE.fullmatch(name)))
    moved, names = dict[str, Tensor](), dict[str, str]()
    for name, tensor in tensors.items():
        match = _STAGE.fullmatch(name)
        assert match is not None
        rest, new = match[2], name
        if rest in _FIRST:
            new = f"mtp.0.{rest}"
        elif rest in _LAST or rest.startswith(_LAST_GROUPS):
            new = f"mtp.{last}.{rest}"
        if new in moved:
            raise ModelFileError(path, stored.get(name, name), f"{new} is in the file twice")
        if rest.startswith("confidence_head.") and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))
        moved[new] = tensor
        if (old := stored.get(name, name)) != new:
            names[new] = old
    if "markov_rank" not in keys and (w1 := moved.get(f"mtp.{last}.markov_head.markov_w1.weight")) is not None:
        keys["markov_rank"] = w1.shape[-1] if w1.shape else 0
    keys.setdefault("stage_count", last + 1)
    for key in _KEYS:
        value = keys.get(key)
        good = isinstance(value, list) if key == "target_layer_ids" else type(value) is int
        if not good:
            found = "the key is missing" if value is None else f"is {value!r}"
            raise ModelFileError(path, f"dspark.{key}", found)
    return DraftFile(path, "dspark", moved, {f"dspark.{key}": keys[key] for key in _KEYS}, names)
