"""A model, from a safetensors directory or a GGUF file, as a GGUF file with chosen element types.

Values pass through F32 a few rows at a time; where the type stays, bytes are copied. Codes with scales beside them,
which GGUF does not have, become the type that holds exactly their values (MXFP4 or BF16).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGUFValueType

from ds4 import _cpu
from ds4.convert import gguf_out
from ds4.convert.encode import encode
from ds4.convert.gguf_out import Chunk, Key, OutTensor, Progress
from ds4.convert.types import TypePlan
from ds4.engine.gguf import GGUFFile
from ds4.engine.model_file import ModelFile
from ds4.engine.tensors import DType, Tensor
from ds4.engine.tokenizer import TokenizerSpec, pre_tokenizer_name
from ds4.errors import ConfigError, ModelFileError, UnsupportedModelError

_CHUNK_ELEMENTS = 1 << 21
_EXPERT = re.compile(r"(.+)\.(0|[1-9]\d*)\.(weight)")
_KINDS = {
    "u8": GGUFValueType.UINT8,
    "i8": GGUFValueType.INT8,
    "u16": GGUFValueType.UINT16,
    "i16": GGUFValueType.INT16,
    "u32": GGUFValueType.UINT32,
    "i32": GGUFValueType.INT32,
    "f32": GGUFValueType.FLOAT32,
    "bool": GGUFValueType.BOOL,
    "string": GGUFValueType.STRING,
    "u64": GGUFValueType.UINT64,
    "i64": GGUFValueType.INT64,
    "f64": GGUFValueType.FLOAT64,
}
# Facts about the source file that the new one does not share.
_OF_THE_FILE = ("general.architecture", "general.alignment", "general.file_type", "split.")


def convert(
    model: ModelFile,
    path: Path,
    plan: TypePlan,
    *,
    tokenizer: bool = True,
    drafts: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Writes `model` to `path`, returns the bytes of the file. With `drafts` the layers that draft come along.

    Raises ConfigError (types that do not fit, a place that is taken), ModelFileError (values that a type cannot hold)
    and UnsupportedModelError (a tokenizer that GGUF has no name for, unless `tokenizer` is off).
    """
    sources, keys = dict(model.tensors), metadata(model, tokenizer=tokenizer)
    if drafts:
        found = model.draft_layers()
        if found is None:
            raise ConfigError(f"--drafts: {model.path} has no layers that draft")
        sources |= {name: replace(t, name=name) for name, t in found.tensors.items()}
        keys |= {f"{model.family}.{name}": gguf_out.key(value) for name, value in found.hparams.items()}
    tensors = list(_tensors(model, sources, plan))
    return gguf_out.write_gguf(path, model.family, keys, tensors, force=force, progress=progress)


# ---- tensors


def _tensors(model: ModelFile, sources: Mapping[str, Tensor], plan: TypePlan) -> Iterator[OutTensor]:
    """In the order of the source; the experts of a layer, which directories keep apart, become one tensor."""
    stacks: dict[str, list[Tensor]] = {}
    for name, t in sources.items():
        match = _EXPERT.fullmatch(name)
        stacks.setdefault(f"{match[1]}.{match[3]}" if match else name, []).append(t)
    for name, parts in stacks.items():
        stacked = _EXPERT.fullmatch(parts[0].name) is not None
        if stacked:
            parts.sort(key=lambda t: int(t.name.split(".")[-2]))
        shape = (len(parts), *parts[0].shape) if stacked else parts[0].shape
        source = _plain_type(parts[0])
        dtype = plan.of(name, shape, source)
        order = _row_order(model, name, shape)
        yield OutTensor(name, shape, dtype, _Reader(model.path, parts, dtype, order))


def _plain_type(t: Tensor) -> DType:
    return {DType.F4: DType.MXFP4, DType.F8_E4M3: DType.BF16}.get(t.dtype, t.dtype)


def _row_order(model: ModelFile, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.intp] | None:
    """Which source row each row of the file is: GGUF's Llama rotates neighbours, Hugging Face's rotates halves."""
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
    if model.family != "llama" or model.rope_kind != "half_split" or match is None:
        return None
    heads = model.hparams.integer("attention.head_count")
    if match[1] == "k":
        heads = model.hparams.integer("attention.head_count_kv", heads)
    rows = np.arange(shape[0]).reshape(heads, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


class _Reader:
    """The bytes of one tensor of the new file."""

    def __init__(self, path: Path, parts: list[Tensor], dtype: DType, order: npt.NDArray[np.intp] | None) -> None:
        self._path, self._parts, self._dtype, self._order = path, parts, dtype, order

    def __call__(self) -> Iterator[Chunk]:
        for part in self._parts:
            plain = _plain(self._path, part)
            if part.dtype is DType.F8_E4M3 and (plain.dtype, self._dtype) == (DType.F32, DType.BF16):
                raise UnsupportedModelError(
                    self._path, part.name, "a value does not fit BF16; choose F32 for its class"
                )
            yield from self._part(plain)

    def _part(self, t: Tensor) -> Iterator[Chunk]:
        if self._order is not None:
            t = _reordered(t, self._order)
        if t.dtype is self._dtype:
            yield t.data
            return
        cols = t.shape[-1]
        row_bytes = _cpu.row_bytes(int(t.dtype), cols)
        step = max(1, _CHUNK_ELEMENTS // cols)
        for first in range(0, t.n_elements // cols, step):
            data = t.data[first * row_bytes : (first + step) * row_bytes]
            try:
                yield encode(_cpu.dequantize(int(t.dtype), data).reshape(-1, cols), self._dtype).tobytes()
            except ValueError as e:
                raise ModelFileError(self._path, t.name, str(e)) from None
            except _cpu.Unsupported as e:
                raise UnsupportedModelError(self._path, t.name, str(e)) from None


def _plain(path: Path, t: Tensor) -> Tensor:
    if t.scales is None:
        return t
    try:
        rows, cols = t.shape
        kind, data = _cpu.plain_matrix(int(t.dtype), rows, cols, t.data, t.scales)
    except ValueError as e:
        raise ModelFileError(path, t.name, str(e)) from None
    return Tensor(t.name, t.shape, DType(kind), memoryview(data))


def _reordered(t: Tensor, order: npt.NDArray[np.intp]) -> Tensor:
    rows = np.frombuffer(t.data, np.uint8).reshape(len(order), -1)
    return Tensor(t.name, t.shape, t.dtype, memoryview(rows[order].tobytes()))


# ---- metadata


def metadata(model: ModelFile, *, tokenizer: bool = True) -> dict[str, Key]:
    """The keys of the new file: those of a GGUF source in their own types, those of a directory under GGUF's names."""
    keys: dict[str, Key] = {"general.name": gguf_out.text(model.name)}
    if model.format == "gguf":
        keys |= _copied(model, tokenizer)
    elif tokenizer and model.tokenizer_spec is not None:
        keys |= _tokenizer_keys(model, model.tokenizer_spec)
    for name, value in model.hparams.items():
        known = keys.get(f"{model.family}.{name}")
        if known is None or _plain_value(known.value) != value:
            keys[f"{model.family}.{name}"] = gguf_out.key(value)
    keys["general.quantization_version"] = gguf_out.u32(2)
    return keys


def _copied(model: ModelFile, tokenizer: bool) -> dict[str, Key]:
    file = GGUFFile(model.path)
    keys: dict[str, Key] = {}
    for name, value in file.metadata.items():
        if name.startswith(_OF_THE_FILE) or (not tokenizer and name.startswith("tokenizer.")):
            continue
        kind, _, element = file.types[name].partition(" of ")
        if kind != "array":
            keys[name] = Key(value, _KINDS[kind])
        elif element in _KINDS and (values := _plain_value(value)):
            keys[name] = Key(values, GGUFValueType.ARRAY, _KINDS[element])
    return keys


def _plain_value(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _tokenizer_keys(model: ModelFile, spec: TokenizerSpec) -> dict[str, Key]:
    if spec.library_json is None:
        raise UnsupportedModelError(model.path, "tokenizer", "a directory's tokenizer without tokenizer.json")
    definition = json.loads(spec.library_json)
    pre = pre_tokenizer_name(definition)
    if pre is None:
        raise UnsupportedModelError(
            model.path, "tokenizer.json", "GGUF has no name for this pre-tokenizer; --no-tokenizer leaves it out"
        )
    texts = [spec.specials.get(i, t) or f"<unused {i}>" for i, t in enumerate(spec.tokens)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in definition["model"].get("merges") or ()]
    # GGUF's token types: 1 normal, 3 control, 5 unused.
    kinds = [3 if i in spec.specials else 1 if t else 5 for i, t in enumerate(spec.tokens)]
    keys = {
        "tokenizer.ggml.model": gguf_out.text("gpt2"),
        "tokenizer.ggml.pre": gguf_out.text(pre),
        "tokenizer.ggml.tokens": gguf_out.texts(texts),
        "tokenizer.ggml.token_type": gguf_out.i32_array(kinds),
        "tokenizer.ggml.merges": gguf_out.texts(merges),
        "tokenizer.ggml.add_bos_token": gguf_out.flag(spec.add_bos),
    }
    if spec.bos_id is not None:
        keys["tokenizer.ggml.bos_token_id"] = gguf_out.u32(spec.bos_id)
    for name, token in zip(("eos", "eot", "eom"), spec.eos_ids, strict=False):
        keys[f"tokenizer.ggml.{name}_token_id"] = gguf_out.u32(token)
    if model.chat_template is not None:
        keys["tokenizer.chat_template"] = gguf_out.text(model.chat_template)
    return keys
