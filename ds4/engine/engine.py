"""Engine: an open model that computes steps.

    engine = Engine.open(EngineConfig())
    session = engine.new_session()
    session.sync(engine.tokenizer.encode("The capital of France is"))

Opening reads the model file, checks the memory plan before any weight is touched, and hands the weights to a backend.
The serving loop calls `step`; `generate` is the loop of one sequence.
"""

from __future__ import annotations

import codecs
import dataclasses
import gc
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ds4 import _cpu
from ds4.engine.demo import demo_model_path
from ds4.engine.drafting import Decoder
from ds4.engine.drafts import DraftFile, read_draft_file
from ds4.engine.mapping import let_go
from ds4.engine.memory import HEADROOM, available_memory, check_plan
from ds4.engine.model_file import HValue, ModelFile, open_model_file
from ds4.engine.native import NativeModule, module_of, resolve
from ds4.engine.sampler import new_sampler
from ds4.engine.session import ModelHandle, Session
from ds4.engine.types import (
    AUTO_CTX,
    Described,
    EngineConfig,
    MemoryPlan,
    ModelInfo,
    Progress,
    Row,
    RowResult,
    SamplerLike,
    SamplingParams,
    TokenLogprobs,
)
from ds4.errors import ConfigError, EngineError, ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from ds4.engine.tensors import Tensor
    from ds4.engine.tokenizer import Tokenizer

MOST_DRAFTS = 16
"""Tokens that one step may evaluate ahead, as in native/model/model.h."""
_F16 = 1
# The CPU backend keeps repacked weights with wider scales; what it really holds is known after loading.
_REPACKED = 9 / 8
# Tiles on the device: IQ2_XXS takes 70 bytes for the file's 66, other types less more.
_DEVICE_REPACKED = 35 / 33
# Tokens of a prefill step where nobody says how many.
_CHUNK, _DEVICE_CHUNK = 512, 2048
# Rows of a page of state, at most: forks share whole pages.
_PAGE_ROWS = 64
# Quantised copies of activations beside the f32 ones.
_WORKSPACE = 3 / 2


class Engine(Described):
    """A model on a backend; satisfies `ds4.engine.types.EngineLike`. Made by `Engine.open` or `ds4.load`."""

    def __init__(
        self,
        config: EngineConfig,
        file: ModelFile,
        backend: _cpu.Backend,
        handle: ModelHandle,
        tokenizer: Tokenizer | None,
        plan: MemoryPlan,
    ) -> None:
        self._file = file
        self._backend = backend
        self._handle: ModelHandle | None = handle
        self._tokenizer = tokenizer
        # Models pad their vocabulary with rows that no text spells: those are never drawn.
        self._vocab = min(handle.native.vocab, tokenizer.vocab_size if tokenizer else handle.native.vocab)
        info = ModelInfo(
            id=file.id,
            name=file.name,
            family=file.family,
            syntax=file.syntax,
            path=file.path,
            ctx_train=file.hparams.integer("context_length"),
            vocab_size=handle.native.vocab,
            n_layers=handle.native.layers,
            n_params=file.n_params,
            file_bytes=file.file_bytes,
            types=file.type_bytes,
        )
        super().__init__(info, config, plan)

    @classmethod
    def open(cls, config: EngineConfig | None = None, progress: Progress | None = None) -> Engine:
        """Opens the configured model; `progress` is called with (done, total) parts of the weights.

        Raises ConfigError (backend, instruction set, sizes), ModelFileError, UnsupportedModelError and, unless
        `check_memory` is off, MemoryPlanError.
        """
        config = config or EngineConfig()
        _check_config(config)
        with _no_garbage_collection():
            return cls._open(config, progress)

    @classmethod
    def _open(cls, config: EngineConfig, progress: Progress | None) -> Engine:
        file = open_model_file(demo_model_path() if config.model is None else config.model)
        if config.ctx == 0:
            config = dataclasses.replace(config, ctx=min(AUTO_CTX, file.hparams.integer("context_length", low=1)))
        # An instruction set is a wish about the CPU.
        kind = resolve("cpu" if config.backend == "auto" and config.isa != "auto" else config.backend)
        module = module_of(kind)
        if config.prefill_chunk == 0:
            config = dataclasses.replace(config, prefill_chunk=_DEVICE_CHUNK if kind == "cuda" else _CHUNK)
        backend = _open_backend(module, kind, config)
        drafts = find_drafts(file, config)
        native = build_model(file, backend, kv_qat=config.kv_qat, module=module, drafts=drafts, config=config)
        plan = plan_memory(file, native, config, backend.free_device_memory, drafts)
        if config.check_memory:
            check_plan(plan, config.ctx, native.state_bytes(0))
        tensors = [*file.tensors.values(), *(drafts.tensors.values() if drafts else ())]
        if config.warm_weights:
            _warm(tensors)
        # The weights leave the interpreter free, and the tokenizer takes about as long as those of a small model.
        with ThreadPoolExecutor(1) as pool:
            building = pool.submit(file.tokenizer) if file.tokenizer_spec is not None else None
            with _named_errors(file, drafts, module):
                native.load(progress)
            tokenizer = building.result() if building is not None else None
        plan = dataclasses.replace(plan, weight_bytes=native.resident_bytes)
        handle = ModelHandle(native, file.family, fingerprint(file, config.kv_qat), config.prefill_chunk, module)
        let_go(t.data for t in tensors)  # the backend holds the weights now
        return cls(config, file, backend, handle, tokenizer, plan)

    @property
    def backend_name(self) -> str:
        """The backend with its instruction set and threads, for people."""
        return self._backend.name

    @property
    def fingerprint(self) -> str:
        """Identifies the weights: a saved session is only loaded into the model that made it."""
        return self._model.fingerprint

    @property
    def most_drafts(self) -> int:
        """Tokens that the engine can guess for one step; 0: it has nothing to guess with."""
        native = self._model.native
        return native.most_ahead if native.drafter and self._config.speculate else 0

    @property
    def memory_left(self) -> int | None:
        """Bytes that sessions may still take. None on a device, whose allocator keeps what was given back."""
        return None if self._plan.on_device else available_memory()

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ModelFileError when the file has none."""
        if self._tokenizer is None:
            raise ModelFileError(self._file.path, "tokenizer", "the model has no tokenizer")
        return self._tokenizer

    @property
    def _model(self) -> ModelHandle:
        if self._handle is None:
            raise EngineError("the engine is closed")
        return self._handle

    def new_session(self, ctx: int | None = None) -> Session:
        """An empty session of `ctx` tokens (default: the configured context); its memory grows with its tokens."""
        return Session(self._model, self._config.ctx if ctx is None else ctx)

    def new_sampler(self, params: SamplingParams) -> SamplerLike:
        return new_sampler(params, self._vocab, self._model.module)

    def step(self, rows: Sequence[Row], *, wake: int | None = None) -> list[RowResult]:
        """See `ds4.engine.types.EngineLike`."""
        model, module = self._model.native, self._model.module
        sessions, samplers = [], []
        for row in rows:
            session, sampler = row.session, row.sampler
            if not isinstance(session, Session) or not isinstance(session.native, module.Session):
                raise ValueError(f"a session of type {type(session).__name__} is not this engine's")
            if sampler is not None and not isinstance(sampler, module.Sampler):
                raise ValueError(f"a sampler of type {type(sampler).__name__} is not this engine's")
            sessions.append(session)
            samplers.append(sampler)
        drafts, seconds = self._drafts(rows, sessions)
        results = model.step(
            [
                (session.native, row.tokens, sampler, row.want_logits, guesses)
                for row, session, sampler, guesses in zip(rows, sessions, samplers, drafts, strict=True)
            ],
            -1 if wake is None else wake,
        )
        now = time.monotonic()
        out = []
        for session, sampler, guesses, result in zip(sessions, samplers, drafts, results, strict=True):
            session.last_used = now
            ahead = Ahead(session, sampler, len(guesses), seconds) if sampler is not None and guesses else None
            out.append(_row_result(result, ahead))
        return out

    def _drafts(self, rows: Sequence[Row], sessions: Sequence[Session]) -> tuple[list[Sequence[int]], float]:
        """What each row is to try beside its token, and the seconds that guessing took."""
        drafts: list[Sequence[int]] = []
        asked: list[tuple[_cpu.Session, int, int]] = []
        for row, session in zip(rows, sessions, strict=True):
            if row.drafts and (row.sampler is None or len(row.tokens) != 1):
                raise ValueError("drafts go with a row of one token and a sampler")
            if isinstance(row.drafts, int):
                drafts.append(())
                if row.drafts > 0:
                    asked.append((session.native, int(row.tokens[0]), row.drafts))
            else:
                drafts.append(row.drafts)
        if not asked:
            return drafts, 0.0
        started = time.perf_counter()
        found = iter(self._model.native.draft(asked))
        for i, row in enumerate(rows):
            if isinstance(row.drafts, int) and row.drafts > 0:
                drafts[i] = next(found)
        return drafts, time.perf_counter() - started

    def all_logits(self, session: Session, tokens: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Appends `tokens` to the session and returns the logits of each of their positions, [tokens, vocab].

        Raises as `step`.
        """
        return self._model.native.all_logits(session.native, tokens)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int = 256,
    ) -> Iterator[str]:
        """Continues `prompt` and yields the text as it is decoded, until an end token, `max_tokens` or the context.

        A string is encoded as plain text, so it cannot contain special tokens; for a chat prompt pass token ids, such
        as those of `tokenizer.encode_segments`. Raises what `Session.sync` and `step` raise.
        """
        tokenizer = self.tokenizer
        tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        params = params or SamplingParams()
        sampler = new_sampler(params, self._vocab, self._model.module)
        session = self.new_session()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            session.sync(tokens)
            sampler.observe(tokens, prompt=True)
            token: int | None = sampler.sample(session.logits()[: self._vocab])[0] if max_tokens > 0 else None
            next_draw = Decoder(self, session, sampler)
            for made in range(max_tokens):
                if token is None or token < 0 or token in tokenizer.eos_ids:
                    break
                if text := decoder.decode(tokenizer.token_bytes(token)):
                    yield text
                if made + 1 == max_tokens or session.n_tokens == session.ctx:
                    break
                token = next_draw.after(token, max_tokens - made - 2).token
            if text := decoder.decode(b"", final=True):
                yield text
        finally:
            session.close()

    def close(self) -> None:
        """Lets go of the weights. Open sessions stay readable; steps and new sessions raise EngineError."""
        self._handle = None


class Ahead:
    """What a step evaluated beyond a session's tokens; see `ds4.engine.types.AheadLike`."""

    __slots__ = ("_sampler", "_session", "drafted", "seconds")

    def __init__(self, session: Session, sampler: _cpu.Sampler, drafted: int, seconds: float) -> None:
        self._session = session
        self._sampler = sampler
        self.drafted = drafted
        self.seconds = seconds

    def after(self, token: int) -> RowResult | None:
        result = self._session.native.advance(token, self._sampler)
        return None if result is None else _row_result(result)


def _row_result(
    result: tuple[int | None, tuple[float, list[tuple[int, float]]] | None], ahead: Ahead | None = None
) -> RowResult:
    token, logprobs = result
    return RowResult(token, None if logprobs is None else TokenLogprobs(logprobs[0], tuple(logprobs[1])), ahead)


# ---- opening


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A vocabulary is a hundred thousand objects that all stay: looking for garbage among them, again and again while
    they become more, takes a tenth of opening a small model."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check_config(config: EngineConfig) -> None:
    for name, low in (("ctx", 0), ("slots", 1), ("snapshots", 0), ("prefill_chunk", 0), ("threads", 0)):
        value = getattr(config, name)
        if value < low:
            raise ConfigError(f"{name} is {value}, it must be at least {low}")
    if not 1 <= config.mtp_draft <= MOST_DRAFTS:
        raise ConfigError(f"mtp_draft is {config.mtp_draft}, allowed are 1 to {MOST_DRAFTS}")
    if config.mtp and config.dspark:
        raise ConfigError("mtp and dspark are two drafters, a model runs with one")
    if config.mtp_model is not None and not (config.mtp or config.dspark):
        raise ConfigError("mtp_model is a file for mtp or dspark, and neither is on")
    if config.backend == "cuda" and (config.isa != "auto" or config.threads > 0):
        raise ConfigError("isa and threads are the CPU backend's; the cuda backend has neither")


def _open_backend(module: NativeModule, kind: str, config: EngineConfig) -> _cpu.Backend:
    try:
        return module.Backend(kind, threads=config.threads, isa=config.isa)
    except (module.Unsupported, ValueError) as e:
        raise ConfigError(str(e)) from None


def find_drafts(file: ModelFile, config: EngineConfig) -> DraftFile | None:
    """The draft layers that `config` asks for. Raises ConfigError, ModelFileError and UnsupportedModelError."""
    if not (config.mtp or config.dspark):
        return None
    if file.family != "deepseek4":
        raise ConfigError(f"{file.path}: models of family {file.family} have no layers that draft")
    kind, layers = "mtp" if config.mtp else "dspark", file.hparams.integer("block_count")
    path = file.path if config.mtp_model is None else config.mtp_model
    found = file.draft_layers() if config.mtp_model is None else read_draft_file(path, layers)
    if found is None:
        raise ConfigError(f"{path} has no draft layers; --mtp-model names a file that has")
    if found.kind != kind:
        names = {"mtp": "a multi-token prediction head (--mtp)", "dspark": "a DSpark drafter (--dspark)"}
        raise ConfigError(f"{path} has {names[found.kind]}, not {names[kind]}")
    return found


def build_model(
    file: ModelFile,
    backend: _cpu.Backend,
    *,
    kv_qat: bool = True,
    module: NativeModule = _cpu,
    drafts: DraftFile | None = None,
    config: EngineConfig | None = None,
) -> _cpu.Model:
    """The model of a file on a backend of `module`, all but the weights' values checked, nothing loaded.

    `kv_qat` off leaves out the rounding of key rows that DeepSeek V4 was trained with; other families have none. With
    `drafts` the model guesses as `config` says. Raises ModelFileError and UnsupportedModelError naming the key or
    tensor.
    """
    params: dict[str, HValue] = {"rope.kind": file.rope_kind}
    for key, value in file.hparams.items():
        params[key] = value
    tensors = {name: _native_tensor(t) for name, t in file.tensors.items()}
    if file.family == "deepseek4":
        del params["rope.kind"]  # always interleaved
        params["kv_qat"] = kv_qat
    if drafts is not None:
        config = config or EngineConfig()
        params |= drafts.hparams
        params["draft.ahead"] = min(drafts.block or config.mtp_draft, MOST_DRAFTS)
        params["draft.margin"] = float(config.mtp_margin)
        params["draft.confidence"] = float(config.dspark_confidence)
        tensors |= {name: _native_tensor(t) for name, t in drafts.tensors.items()}
    with _named_errors(file, drafts, module):
        return module.Model(backend, file.family, params, tensors, kv_type=_F16)


@contextmanager
def _named_errors(file: ModelFile, drafts: DraftFile | None, module: NativeModule) -> Iterator[None]:
    """Turns what the native layer finds wrong into errors of the file that it is wrong in."""

    def where(message: str) -> tuple[Path, str, str]:
        subject, wrong = _where(file, message)
        if drafts is None or not subject.startswith(("mtp", "dspark")):
            return file.path, subject, wrong
        return drafts.path, drafts.stored.get(subject, subject), wrong

    try:
        yield
    except module.Unsupported as e:
        raise UnsupportedModelError(*where(str(e))) from None
    except ValueError as e:
        raise ModelFileError(*where(str(e))) from None


def _native_tensor(t: Tensor) -> _cpu.NativeTensor:
    plain = t.data, t.shape, int(t.dtype)
    return plain if t.scales is None else (*plain, t.scales)


def _where(file: ModelFile, message: str) -> tuple[str, str]:
    """Splits "KEY is wrong" and "TENSOR: is wrong" into what is at fault and what is wrong with it."""
    match = re.fullmatch(r"([\w.]+\.[\w.]+|[a-z]+_[a-z_]+):? (.*)", message, re.DOTALL)
    if match is None:
        return "", message
    return f"{file.family}.{match[1]}" if match[1] in file.hparams else match[1], match[2]


def plan_memory(
    file: ModelFile,
    model: _cpu.Model,
    config: EngineConfig,
    free_device_memory: int | None = None,
    drafts: DraftFile | None = None,
) -> MemoryPlan:
    """What `config` needs with this model, estimated before anything is loaded.

    With `free_device_memory`, bytes, everything is to fit there; else in this machine's memory.
    """
    tensors = [*file.tensors.values(), *(drafts.tensors.values() if drafts else ())]
    weights: float = sum(t.exact_nbytes for t in tensors)
    if config.backend == "reference":
        weights = 4 * sum(t.n_elements for t in tensors)
    else:
        weights *= _REPACKED if free_device_memory is None else _DEVICE_REPACKED
    ahead = model.most_ahead if drafts else 0
    per_session = model.state_bytes(config.ctx) + model.spare_bytes + 4 * config.ctx + 4 * model.vocab * (1 + ahead)
    wanted = config.slots + 1 + ahead
    workspace = model.workspace_bytes((config.prefill_chunk or _CHUNK) + config.slots, wanted) * _WORKSPACE
    room = available_memory() if free_device_memory is None else free_device_memory
    on_device = free_device_memory is not None
    plan = MemoryPlan(int(weights), per_session, config.slots, int(workspace), room, on_device)
    if not config.snapshots or all(kind == "append" for _, kind, *_ in model.state_specs):
        return plan
    each = _snapshot_bytes(model, config.ctx)
    # The first thing to do without.
    fit = max(0, room - HEADROOM - plan.total) // (each * config.slots)
    return dataclasses.replace(plan, snapshots=min(config.snapshots, fit), snapshot_bytes=each)


def _snapshot_bytes(model: _cpu.Model, ctx: int) -> int:
    """What a copy of a session of `ctx` tokens has for itself: rings and the like, and the last pages of the rest."""
    buffers = sum(
        _cpu.row_bytes(dtype, heads * width) * (_PAGE_ROWS if kind == "append" else capacity)
        for _, kind, dtype, heads, width, _, capacity, _ in model.state_specs
    )
    return buffers + model.spare_bytes + 4 * ctx + 4 * model.vocab


def _warm(tensors: Iterable[Tensor]) -> None:
    """Reads every page of the mapped weights once, so that no step waits for the disk."""
    for tensor in tensors:
        for part in (tensor.data,) if tensor.scales is None else (tensor.data, tensor.scales):
            np.frombuffer(part, np.uint8)[::4096].max(initial=0)


def fingerprint(file: ModelFile, kv_qat: bool = True) -> str:
    """Digest over names, types, shapes and three samples of the bytes of every tensor: 32 hexadecimal digits.

    Sessions computed without the rounding of `kv_qat` are another model's.
    """
    digest = xxhash.xxh3_128()
    if file.family == "deepseek4" and not kv_qat:
        digest.update(b"kv_qat off\0")
    for name in sorted(file.tensors):
        t = file.tensors[name]
        digest.update(f"{name}\0{t.dtype.name}\0{t.shape}\0".encode())
        for part in (t.data,) if t.scales is None else (t.data, t.scales):
            for start in (0, part.nbytes // 2, max(0, part.nbytes - 256)):
                digest.update(part[start : start + 256])
    return digest.hexdigest()
