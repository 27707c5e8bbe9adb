"""One face for a model on disk, whatever its format: a GGUF file or a safetensors directory.

Hyper-parameters and tensors have GGUF's names (GGUF specification), whichever format they come from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ds4.engine import deepseek4, drafts, hf_deepseek4, hf_llama
from ds4.engine.gguf import GGUFFile
from ds4.engine.safetensors import read_directory, read_json_file
from ds4.engine.tensors import DType, Tensor
from ds4.engine.tokenizer import Tokenizer, TokenizerSpec, spec_from_gguf, spec_from_json
from ds4.errors import ModelFileError, UnsupportedModelError

__all__ = ["DType", "HParams", "ModelFile", "Tensor", "check_model_file", "open_model_file", "read_model_file"]

HValue = bool | int | float | str | list[Any]

_SYNTAX_OF_FAMILY = {
    "deepseek4": "deepseek4",
    "deepseek41": "deepseek41",
    "glm-dsa": "glm",
    "glm5-next": "glm",
    "glm5next": "glm",
    "qwen4exp": "qwen",
}
# Tokens that end a turn in some published vocabulary, looked up by text among the special tokens.
_END_TEXTS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
_NAMED = 8
"""So many missing tensors are named in an error."""
_GLM_END_TEXTS = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


def _no_drafts() -> None:
    return None


class HParams(Mapping[str, HValue]):
    """Hyper-parameters by GGUF key without the family's prefix ("attention.head_count").

    The getters convert by stored type and raise ModelFileError, naming the key, for a missing key without a default,
    another type or a value outside [low, high].
    """

    def __init__(self, path: Path, family: str, values: Mapping[str, HValue]) -> None:
        self._path, self._family, self._values = path, family, dict(values)

    def __getitem__(self, key: str) -> HValue:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 1 << 40) -> int:
        value = self._get(key, default)
        if type(value) is not int:
            raise self.error(key, f"is {value!r}, expected an integer")
        if not low <= value <= high:
            raise self.error(key, f"is {value}, allowed are {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float):
            raise self.error(key, f"is {value!r}, expected a number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.error(key, f"is {value!r}, expected a boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if type(value) is not str:
            raise self.error(key, f"is {value!r}, expected a string")
        return value

    def integers(self, key: str) -> list[Any]:
        """A list of integers; a single integer is a list of one."""
        value = self._get(key, None)
        values = value if isinstance(value, list) else [value]
        if not all(type(v) is int for v in values):
            raise self.error(key, "expected integers")
        return values

    def numbers(self, key: str) -> list[Any]:
        """A list of numbers; a single number is a list of one."""
        value = self._get(key, None)
        values = value if isinstance(value, list) else [value]
        if not all(type(v) in (int, float) for v in values):
            raise self.error(key, "expected numbers")
        return [float(v) for v in values]

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise self.error(key, "the key is missing")
        return value

    def error(self, key: str, message: str) -> ModelFileError:
        """An error about this key, to raise."""
        return ModelFileError(self._path, f"{self._family}.{key}", message)


@dataclass(frozen=True)
class ModelFile:
    """An open model. Tensors are views into the mapped file and stay valid while they are referenced."""

    path: Path
    format: str
    """"gguf" or "safetensors"."""
    family: str
    """GGUF's architecture name ("llama", "deepseek4", ...)."""
    name: str
    id: str
    """Name for the API: the file's or directory's name in lower case, without the quantisation suffix."""
    hparams: HParams
    tensors: dict[str, Tensor]
    rope_kind: str
    """Which columns rotate together: "interleaved" (2i, 2i + 1) or "half_split" (i, i + d/2)."""
    syntax: str
    """Prompt syntax: "chatml", "deepseek4", ...; "raw" when none is known."""
    chat_template: str | None
    tokenizer_spec: TokenizerSpec | None
    file_bytes: int
    metadata: Mapping[str, Any] = field(repr=False)
    """All metadata as stored: GGUF keys, or the members of config.json."""
    draft_source: Callable[[], drafts.DraftFile | None] = field(repr=False, default=_no_drafts)

    def draft_layers(self) -> drafts.DraftFile | None:
        """Those behind the model's, None where the file has none. Raises ModelFileError and UnsupportedModelError."""
        return self.draft_source()

    @property
    def n_params(self) -> int:
        return sum(t.n_elements for t in self.tensors.values())

    @property
    def type_bytes(self) -> dict[str, int]:
        """Element type name -> bytes in the file, largest first."""
        totals: dict[str, int] = {}
        for t in self.tensors.values():
            totals[t.dtype.name] = totals.get(t.dtype.name, 0) + t.nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation, ascending; empty without a tokenizer."""
        return self.tokenizer_spec.eos_ids if self.tokenizer_spec else ()

    def tokenizer(self) -> Tokenizer:
        """A new tokenizer. Raises ModelFileError when the file has none, UnsupportedModelError for an unknown kind."""
        if self.tokenizer_spec is None:
            raise ModelFileError(self.path, "tokenizer", "the model has no tokenizer")
        return Tokenizer(self.tokenizer_spec)


def open_model_file(path: str | Path) -> ModelFile:
    """Opens a model to run it: reads it and checks its hyper-parameters against its tensors.

    Raises ModelFileError (damaged or contradictory; names the key or tensor and both values) and
    UnsupportedModelError. Whether a family is implemented is the backend's to say.
    """
    model = read_model_file(path)
    check_model_file(model)
    return model


def check_model_file(model: ModelFile) -> None:
    """Raises ModelFileError where hyper-parameters, tensors and tokenizer contradict each other."""
    _check_embedding(model)
    if model.family == "llama":
        _check_llama(model)
    elif model.family == "deepseek4":
        _check_deepseek4(model)
    elif model.family == "deepseek41":
        raise UnsupportedModelError(
            model.path, "general.architecture", "'deepseek41' (DeepSeek V4.1) is another graph than DeepSeek V4"
        )
    elif model.family == "deepseek4":
        _check_deepseek4(model)
    elif model.family == "deepseek41":
        raise UnsupportedModelError(
            model.path, "general.architecture", "'deepseek41' (DeepSeek V4.1) is another graph than DeepSeek V4"
        )


def read_model_file(path: str | Path) -> ModelFile:
    """Reads a model of any family without `check_model_file`: enough to look at it."""
    path = Path(path).expanduser()
    return _from_directory(path) if path.is_dir() else _from_gguf(path)


def slug(name: str) -> str:
    """A name for the API: lower case, without a quantisation suffix, other characters as "-"."""
    name = re.sub(r"[.-](I?Q\d\w*|[BF]*F?16|F32|MXFP4|NVFP4)$", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-") or "model"


# ---- GGUF


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _from_gguf(path: Path) -> ModelFile:
    file = GGUFFile(path)
    metadata = file.metadata
    family = _gguf_text(file, "general.architecture")
    if family is None:
        raise ModelFileError(path, "general.architecture", "the key is missing")
    if (parts := metadata.get("split.count", 0)) not in (0, 1):
        raise UnsupportedModelError(path, "split.count", f"the model is split into {parts} files; merge them first")
    prefix = family + "."
    values = {k[len(prefix) :]: _plain(v) for k, v in metadata.items() if k.startswith(prefix)}
    embedding = file.tensors.get("token_embd.weight")
    if "vocab_size" not in values and embedding is not None:
        values["vocab_size"] = embedding.shape[0]
    tensors = file.tensors
    draft_source: Callable[[], drafts.DraftFile | None] = _no_drafts
    if family == "deepseek4":
        values, tensors = deepseek4.completed(values, tensors)
        if type(layers := values.get("block_count")) is int:
            draft_source = partial(drafts.from_gguf, file, layers)
    template = _gguf_text(file, "tokenizer.chat_template")
    spec = None
    if "tokenizer.ggml.model" in metadata:
        size = len(t) if isinstance(t := metadata.get("tokenizer.ggml.tokens"), list) else 0
        ids = {
            name: _token_id(path, f"tokenizer.ggml.{name}_token_id", metadata, size)
            for name in ("bos", "eos", "eot", "eom")
        }
        eos = {i for name in ("eos", "eot", "eom") if (i := ids[name]) is not None}
        spec = spec_from_gguf(path, metadata, tuple(sorted(eos)), ids["bos"])
    return _model(
        path=path,
        format="gguf",
        family=family,
        name=_gguf_text(file, "general.name") or path.stem,
        id=slug(path.stem),
        values=values,
        tensors=tensors,
        rope_kind="interleaved" if family in ("llama", "deepseek4", "deepseek41") else "half_split",
        template=template,
        spec=spec,
        file_bytes=file.size,
        metadata=metadata,
        draft_source=draft_source,
    )


def _gguf_text(file: GGUFFile, key: str) -> str | None:
    value = file.metadata.get(key)
    if value is None or isinstance(value, str):
        return value
    raise ModelFileError(file.path, key, f"is of type {file.types[key]}, expected string")


def _token_id(path: Path, key: str, values: Mapping[str, Any], size: int) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < size:
        raise ModelFileError(path, key, f"token id {value!r}, the vocabulary has {size} tokens")
    return value


# ---- safetensors


@dataclass(frozen=True)
class _Directory:
    """How checkpoints of one `model_type` become a family under GGUF's names."""

    family: str
    rope_kind: str
    hparams: Callable[[Path, Mapping[str, Any]], dict[str, Any]]
    tensors: Callable[[Path, Mapping[str, Any], Mapping[str, Tensor]], dict[str, Tensor]]


_DIRECTORIES = {
    "llama": _Directory("llama", "half_split", hf_llama.hparams, hf_llama.tensors),
    "deepseek_v4": _Directory("deepseek4", "interleaved", hf_deepseek4.hparams, hf_deepseek4.tensors),
}


def _from_directory(path: Path) -> ModelFile:
    config, tensors, size = read_directory(path)
    kind = config.get("model_type")
    name = path.resolve().name
    if (cached := re.fullmatch(r"models--.*--(.*)", path.resolve().parent.parent.name)) is not None:
        name = cached[1]
    reader = _DIRECTORIES.get(kind) if isinstance(kind, str) else None
    if reader is None:
        known = "'deepseek_v41' (DeepSeek V4.1) is another graph than DeepSeek V4" if kind == "deepseek_v41" else ""
        known = known or "known: " + ", ".join(map(repr, _DIRECTORIES))
        raise UnsupportedModelError(
            path / "config.json", "model_type", f"{kind!r} is not implemented as a safetensors directory, {known}"
        )
    template, spec = _directory_tokenizer(path, config)
    return _model(
        path=path,
        format="safetensors",
        family=reader.family,
        name=name,
        id=slug(name),
        values=reader.hparams(path / "config.json", config),
        tensors=reader.tensors(path, config, tensors),
        rope_kind=reader.rope_kind,
        template=template,
        spec=spec,
        file_bytes=size,
        metadata=config,
        draft_source=partial(drafts.from_directory, path, config, tensors),
    )


def _directory_tokenizer(path: Path, config: Mapping[str, Any]) -> tuple[str | None, TokenizerSpec | None]:
    settings_path = path / "tokenizer_config.json"
    settings = read_json_file(settings_path) if settings_path.exists() else {}
    template = _template(path, settings)
    tokenizer_path = path / "tokenizer.json"
    if not tokenizer_path.exists():
        return template, None
    generation_path = path / "generation_config.json"
    generation = read_json_file(generation_path) if generation_path.exists() else {}
    spec = spec_from_json(
        tokenizer_path, read_json_file(tokenizer_path), (), None, settings.get("add_bos_token") is True
    )
    ids_of = {text: i for i, text in spec.specials.items()}

    def named(member: str) -> list[Any]:
        value = settings.get(member)
        text = value.get("content") if isinstance(value, dict) else value
        return [ids_of[text]] if isinstance(text, str) and text in ids_of else []

    eos: set[int] = set(named("eos_token"))
    for source, values in ((path / "config.json", config), (generation_path, generation)):
        listed = values.get("eos_token_id")
        for value in listed if isinstance(listed, list) else [listed]:
            if value is not None:
                eos.add(_token_id(source, "eos_token_id", {"eos_token_id": value}, len(spec.tokens)) or 0)
    bos = named("bos_token") or [_token_id(path / "config.json", "bos_token_id", config, len(spec.tokens))]
    return template, _with_ids(spec, tuple(sorted(eos)), bos[0])


def _template(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file() and file.stat().st_size <= 1 << 20:
        return file.read_text("utf-8", "replace")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


# ---- what both formats share


def _with_ids(spec: TokenizerSpec, eos_ids: tuple[int, ...], bos_id: int | None) -> TokenizerSpec:
    return replace(spec, eos_ids=eos_ids, bos_id=bos_id)


def _model(
    *, family: str, values: Mapping[str, HValue], template: str | None, spec: TokenizerSpec | None, **rest: Any
) -> ModelFile:
    syntax = _SYNTAX_OF_FAMILY.get(family, "raw")
    if spec is not None:
        ids_of = {text: i for i, text in spec.specials.items()}
        if syntax == "raw" and ("<|im_start|>" in (template or "") or "<|im_start|>" in ids_of):
            syntax = "chatml"
        texts = _END_TEXTS + (_GLM_END_TEXTS if syntax == "glm" else ())
        ends = {ids_of[t] for t in texts if t in ids_of} | set(spec.eos_ids)
        spec = _with_ids(spec, tuple(sorted(ends)), spec.bos_id)
    hparams = HParams(rest["path"], family, values)
    return ModelFile(family=family, hparams=hparams, syntax=syntax, chat_template=template, tokenizer_spec=spec, **rest)


# ---- consistency of hyper-parameters and tensors


def _expect(model: ModelFile, name: str, shape: tuple[int, ...], keys: str, *, optional: bool = False) -> None:
    tensor = model.tensors.get(name)
    if tensor is None:
        if not optional:
            raise ModelFileError(model.path, name, "the tensor is missing")
    elif tensor.shape != shape:
        raise ModelFileError(
            model.path, name, f"shape {list(tensor.shape)}, but {keys} of {model.family} ask for {list(shape)}"
        )


def _check_embedding(model: ModelFile) -> None:
    h = model.hparams
    h.integer("block_count", low=1, high=1 << 14)
    h.integer("context_length", low=1)
    shape = h.integer("vocab_size", low=1), h.integer("embedding_length", low=1)
    _expect(model, "token_embd.weight", shape, "vocab_size and embedding_length")
    if (spec := model.tokenizer_spec) is not None and len(spec.tokens) > shape[0]:
        raise ModelFileError(
            model.path, "tokenizer", f"{len(spec.tokens)} tokens, but token_embd.weight has {shape[0]} rows"
        )


def _check_deepseek4(model: ModelFile) -> None:
    expected = deepseek4.layout(model.hparams).tensors()
    stored = {name: _slabs(model, name, shape) for name, shape in expected.items()}
    if missing := [name for name, parts in stored.items() if not parts]:
        more = f", and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        count = "the tensor is missing" if len(missing) == 1 else f"{len(missing)} tensors are missing"
        raise ModelFileError(model.path, ", ".join(missing[:_NAMED]) + more, count)
    for parts in stored.values():
        for name, shape in parts.items():
            _expect(model, name, shape, "the hyper-parameters")


def _slabs(model: ModelFile, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A tensor, or the matrices that a directory has in its place; nothing when there are neither."""
    if name in model.tensors:
        return {name: shape}
    stem, _, end = name.rpartition(".")
    if len(shape) == 3 and f"{stem}.0.{end}" in model.tensors:
        return {f"{stem}.{i}.{end}": shape[1:] for i in range(shape[0])}
    return {}


def _check_llama(model: ModelFile) -> None:
    h = model.hparams
    width, ff, vocab = h.integer("embedding_length"), h.integer("feed_forward_length", low=1), h.integer("vocab_size")
    heads = h.integer("attention.head_count", low=1)
    kv_heads = h.integer("attention.head_count_kv", heads, low=1)
    if heads % kv_heads:
        raise ModelFileError(
            model.path,
            "llama.attention.head_count_kv",
            f"{kv_heads} does not divide llama.attention.head_count {heads}",
        )
    head_dim = h.integer("attention.key_length", width // heads, low=1)
    if "attention.key_length" not in h and width % heads:
        raise ModelFileError(
            model.path, "llama.attention.head_count", f"{heads} does not divide llama.embedding_length {width}"
        )
    rotated = h.integer("rope.dimension_count", head_dim, low=2)
    if rotated > head_dim or rotated % 2:
        raise ModelFileError(
            model.path, "llama.rope.dimension_count", f"{rotated}, expected an even number up to the head's {head_dim}"
        )
    h.number("attention.layer_norm_rms_epsilon")
    if (experts := h.integer("expert_count", 0)) > 0:
        raise UnsupportedModelError(model.path, "llama.expert_count", f"{experts} experts; only dense models run")
    q, kv = heads * head_dim, kv_heads * head_dim
    _expect(model, "output_norm.weight", (width,), "embedding_length")
    _expect(model, "output.weight", (vocab, width), "vocab_size and embedding_length", optional=True)
    _expect(model, "rope_freqs.weight", (rotated // 2,), "rope.dimension_count", optional=True)
    for i in range(h.integer("block_count")):
        for name, shape, keys in (
            ("attn_norm", (width,), "embedding_length"),
            ("attn_q", (q, width), "attention.head_count and embedding_length"),
            ("attn_k", (kv, width), "attention.head_count_kv and embedding_length"),
            ("attn_v", (kv, width), "attention.head_count_kv and embedding_length"),
            ("attn_output", (width, q), "attention.head_count and embedding_length"),
            ("ffn_norm", (width,), "embedding_length"),
            ("ffn_gate", (ff, width), "feed_forward_length and embedding_length"),
            ("ffn_up", (ff, width), "feed_forward_length and embedding_length"),
            ("ffn_down", (width, ff), "feed_forward_length and embedding_length"),
        ):
            _expect(model, f"blk.{i}.{name}.weight", shape, keys)
        for name, size in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
            _expect(model, f"blk.{i}.{name}.bias", (size,), "attention.head_count", optional=True)
