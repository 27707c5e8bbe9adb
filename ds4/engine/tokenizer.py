"""Text to token ids and back: byte-level BPE with the vocabulary of the model file.

The merging is the `tokenizers` library's. It does not know the special tokens, so text can never become one; they enter
through segments, or through `encode_with_specials`, which looks for their names in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from ds4.engine.encoding import EncodedPrompt, PromptEncoder, SpecialSegment, special_key, well_formed
from ds4.errors import ModelFileError, UnsupportedModelError

# Token types of `tokenizer.ggml.token_type` (GGUF specification).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# The piece patterns that published tokenizers split text with before merging.
_WORDS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_QWEN2 = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """How a named pre-tokenizer cuts text: patterns applied one after the other, then bytes."""

    patterns: tuple[str, ...] = ()
    gpt2_words: bool = False
    single_digits: bool = False
    whole_words_first: bool = False
    """A piece that is a vocabulary entry is taken as it is, without merging."""
    nfc: bool = False


_DEEPSEEK3 = _Pre((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _WORDS_DEEPSEEK3))
PRE_TOKENIZERS: dict[str, _Pre] = {
    "gpt-2": _Pre(gpt2_words=True),
    "smollm": _Pre(gpt2_words=True, single_digits=True),
    "llama-bpe": _Pre((_WORDS_LLAMA3,), whole_words_first=True),
    "qwen2": _Pre((_WORDS_QWEN2,), nfc=True),
    "glm4": _Pre((_WORDS_LLAMA3,)),
    "chatglm-bpe": _Pre((_WORDS_LLAMA3,)),
    "deepseek-v3": _DEEPSEEK3,
    "deepseek-v4": _DEEPSEEK3,
    "joyai-llm": _DEEPSEEK3,
}
"""Known values of `tokenizer.ggml.pre`."""


def pre_tokenizer_name(definition: Mapping[str, Any]) -> str | None:
    """The value of `tokenizer.ggml.pre` that cuts text as a definition in the `tokenizers` library's format does."""
    outer = definition.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", []) if outer.get("type") == "Sequence" else [outer]
    normal = definition.get("normalizer") or {}
    if normal.get("type") == "Sequence" and not normal.get("normalizers"):
        normal = {}
    patterns: list[str] = []
    gpt2_words = single_digits = byte_level = False
    for step in steps:
        kind = step.get("type")
        if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            patterns.append(str((step.get("pattern") or {}).get("Regex")))
        elif kind == "Digits" and step.get("individual_digits"):
            single_digits = True
        elif kind == "ByteLevel" and not step.get("add_prefix_space", True):
            byte_level, gpt2_words = True, step.get("use_regex", True) is True
        else:
            return None
    if not byte_level or normal.get("type") not in (None, "NFC"):
        return None
    model = definition.get("model") or {}
    whole = model.get("ignore_merges") is True
    wanted = _Pre(tuple(map(_unescaped, patterns)), gpt2_words, single_digits, whole, normal.get("type") == "NFC")
    for name, known in PRE_TOKENIZERS.items():
        if replace(known, patterns=tuple(map(_unescaped, known.patterns))) == wanted:
            return name
    return None


def _unescaped(pattern: str) -> str:
    """One spelling of patterns that differ in how they write line ends and quotes."""
    return pattern.replace("\\r", "\r").replace("\\n", "\n").replace('\\"', '"')


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """What a model file says about its tokenizer. `where` is the file, for errors.

    `tokens` are texts in byte-level spelling, index = id; `specials` maps ids to the literal texts of added and control
    tokens. `library_json` is a definition in the `tokenizers` library's format without its added tokens; when None the
    encoder is built from `tokens`, `merges` and `pre`.
    """

    where: Path
    tokens: Sequence[str]
    specials: Mapping[int, str]
    merges: Sequence[str] = ()
    pre: str = ""
    library_json: str | None = None
    byte_level: bool = True
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    add_bos: bool = False
    hidden: frozenset[int] = field(default_factory=frozenset)
    """Ids that decode to nothing: unused places of the vocabulary."""


class Tokenizer:
    """Encodes and decodes with one model's vocabulary. Thread-safe.

    Bytes that the vocabulary cannot spell (some lack rare control bytes) are left out, as every BPE library does.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        """Raises ModelFileError or UnsupportedModelError naming the key at fault."""
        self.spec = spec
        self._encoder = _build_encoder(spec)
        self._bytes: list[bytes | None] = [None] * len(spec.tokens)
        self._special_ids: dict[str, int] = {}
        for token, text in spec.specials.items():
            self._special_ids.setdefault(text, token)
        names = sorted((t for t in self._special_ids if t), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._prompts = PromptEncoder(self.encode, self.special_id, spec.where)

    # ---- facts

    @property
    def vocab_size(self) -> int:
        """Number of token texts; a model's logits may be longer (padding)."""
        return len(self.spec.tokens)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation, ascending."""
        return self.spec.eos_ids

    @property
    def bos_id(self) -> int | None:
        return self.spec.bos_id

    @property
    def add_bos(self) -> bool:
        """The model was trained on texts that begin with `bos_id`."""
        return self.spec.add_bos

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Text of every special token -> id."""
        return self._special_ids

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this text."""
        return self._special_ids.get(text)

    def is_special(self, token: int) -> bool:
        return token in self.spec.specials

    # ---- text to ids

    def encode(self, text: str) -> list[int]:
        """Ids of a text; never a special token. Unpaired surrogates count as U+FFFD."""
        if not text:
            return []
        ids: list[int] = self._encoder.encode_batch_fast([well_formed(text)], add_special_tokens=False)[0].ids
        return ids

    def encode_with_specials(self, text: str) -> list[int]:
        """Ids of a text in which the name of a special token stands for that token; of two names the longer wins."""
        ids: list[int] = []
        start = 0
        for match in self._special_pattern.finditer(text) if self._special_pattern else ():
            ids += self.encode(text[start : match.start()])
            ids.append(self._special_ids[match.group()])
            start = match.end()
        return ids + self.encode(text[start:])

    def encode_prompt(self, segments: Iterable[str | SpecialSegment]) -> EncodedPrompt:
        """Ids and cache key of a rendered prompt. Adjacent texts are one text. Prompts are remembered by content.

        Raises ValueError for a special token that the vocabulary does not have.
        """
        return self._prompts(segments)

    def encode_prompt_within(self, segments: Iterable[str | SpecialSegment], characters: int) -> EncodedPrompt | None:
        """As `encode_prompt`, when at most about so many characters of it are new. None: there are more."""
        return self._prompts.within(segments, characters)

    def encode_segments(self, segments: Iterable[str | SpecialSegment]) -> list[int]:
        """The ids alone, as `encode_prompt` finds them."""
        ids: list[int] = self._prompts(segments).ids.tolist()
        return ids

    # ---- ids to bytes

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token: the literal text of a special token, nothing for ids that have no text.

        Raises ValueError for a negative id.
        """
        if token < 0:
            raise ValueError(f"token id {token} is negative")
        if token >= len(self._bytes):
            return b""
        data = self._bytes[token]
        if data is None:
            data = self._bytes[token] = self._spell(token)
        return data

    def _spell(self, token: int) -> bytes:
        if token in self.spec.hidden:
            return b""
        if (special := self.spec.specials.get(token)) is not None:
            return special.encode("utf-8", "replace")
        text = self.spec.tokens[token]
        if self.spec.byte_level:
            try:
                return text.translate(_BYTE_OF_CHAR).encode("latin-1")
            except UnicodeEncodeError:
                pass  # not in byte-level spelling: a literal text
        return text.encode("utf-8", "replace")

    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes of a sequence; a UTF-8 character may be cut at the ends."""
        return b"".join(map(self.token_bytes, ids))

    # ---- cache keys

    def key_bytes(self, segments: Iterable[str | SpecialSegment]) -> bytes:
        """The prompt as a cache key: text as UTF-8, a special token as 0xFF and its id in 4 bytes, little endian.

        Raises ValueError for a special token that the vocabulary does not have.
        """
        return self._prompts(segments).key

    def key_bytes_of_ids(self, ids: Iterable[int]) -> bytes:
        """The cache key of a sequence of tokens, as `key_bytes` writes it."""
        specials = self.spec.specials
        return b"".join(special_key(i) if i in specials else self.token_bytes(i) for i in ids)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others for U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


# Characters outside the alphabet that Latin-1 could encode map to U+FFFF, which it cannot: they are no spelling.
_BYTE_OF_CHAR = dict.fromkeys(range(256), "\uffff") | {ord(c): chr(b) for b, c in _byte_alphabet().items()}


# ---- building the encoder


def _build_encoder(spec: TokenizerSpec) -> Any:
    try:
        if spec.library_json is not None:
            return tokenizers.Tokenizer.from_str(spec.library_json)
        return _byte_level_bpe(spec)
    except ModelFileError:
        raise
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as e:  # the library raises bare Exception, and its panics are not Exceptions
        raise ModelFileError(spec.where, "tokenizer", f"the vocabulary or the merges are inconsistent: {e}") from e


def _byte_level_bpe(spec: TokenizerSpec) -> Any:
    pre = PRE_TOKENIZERS.get(spec.pre)
    if pre is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModelError(
            spec.where, "tokenizer.ggml.pre", f"unknown pre-tokenizer {spec.pre!r}, known are: {known}"
        )
    merges = [merge.partition(" ")[::2] for merge in spec.merges]
    wrong = (i for i, (left, right) in enumerate(merges) if not left or not right or " " in right)
    if (i := next(wrong, None)) is not None:
        raise ModelFileError(
            spec.where, "tokenizer.ggml.merges", f"entry {i} is {spec.merges[i]!r}, expected two tokens"
        )
    vocab = {token: i for i, token in enumerate(spec.tokens)}
    if pre.whole_words_first:
        made = {left + right for left, right in merges}
        for i, text in spec.specials.items():
            if text not in made:
                vocab.pop(spec.tokens[i], None)
    encoder = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.whole_words_first))
    if pre.nfc:
        encoder.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.single_digits else []
    steps += [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2_words))
    encoder.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return encoder


# ---- specifications


def spec_from_gguf(
    where: Path, metadata: Mapping[str, Any], eos_ids: tuple[int, ...], bos_id: int | None
) -> TokenizerSpec:
    """The tokenizer in a GGUF file's metadata. Raises ModelFileError or UnsupportedModelError naming the key."""

    def bad(key: str, message: str, error: type[ModelFileError] = ModelFileError) -> ModelFileError:
        return error(where, f"tokenizer.ggml.{key}", message)

    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise bad("model", f"tokenizer model {model!r}, implemented is 'gpt2' (byte-level BPE)", UnsupportedModelError)
    tokens = _string_list(metadata.get("tokenizer.ggml.tokens"))
    if not tokens:
        raise bad("tokens", "missing, empty or not an array of strings")
    merges = _string_list(metadata.get("tokenizer.ggml.merges"))
    if merges is None:
        raise bad("merges", "missing or not an array of strings")
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = [_NORMAL] * len(tokens) if types is None else _int_list(types)
    if kinds is None or len(kinds) != len(tokens):
        found = "not an array of integers" if kinds is None else f"{len(kinds)} entries"
        raise bad("token_type", f"{found}, the vocabulary has {len(tokens)} tokens")
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if not isinstance(pre, str):
        raise bad("pre", "not a string")
    special = {i for i, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)}
    return TokenizerSpec(
        where=where,
        tokens=tokens,
        specials={i: tokens[i] for i in sorted(special)},
        merges=merges,
        pre=pre,
        eos_ids=eos_ids,
        bos_id=bos_id,
        add_bos=metadata.get("tokenizer.ggml.add_bos_token") is True,
        hidden=frozenset(i for i, kind in enumerate(kinds) if kind == _UNUSED),
    )


def _string_list(value: Any) -> list[str] | None:
    return value if isinstance(value, list) and all(isinstance(v, str) for v in value) else None


def _int_list(value: Any) -> list[int] | None:
    return value.tolist() if getattr(value, "dtype", None) is not None and value.dtype.kind in "iu" else None


def spec_from_json(
    where: Path, definition: Mapping[str, Any], eos_ids: tuple[int, ...], bos_id: int | None, add_bos: bool
) -> TokenizerSpec:
    """The tokenizer of a `tokenizer.json` (the `tokenizers` library's format), already parsed.

    Its added tokens become special tokens. Raises ModelFileError naming the member at fault.
    """

    def bad(member: str, message: str, error: type[ModelFileError] = ModelFileError) -> ModelFileError:
        return error(where, member, message)

    model = definition.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise bad("model.vocab", "missing or not an object")
    if (kind := model.get("type", "BPE")) != "BPE":
        raise bad("model.type", f"tokenizer model {kind!r}, implemented is 'BPE'", UnsupportedModelError)
    texts: dict[int, str] = {}
    for text, token in model["vocab"].items():
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 1 << 24:
            raise bad("model.vocab", f"{text!r} has id {token!r}, expected an integer from 0 to {(1 << 24) - 1}")
        texts[token] = text
    specials: dict[int, str] = {}
    added = definition.get("added_tokens") or []
    for i, entry in enumerate(added if isinstance(added, list) else [None]):
        token, text = (entry.get("id"), entry.get("content")) if isinstance(entry, dict) else (None, None)
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 1 << 24:
            raise bad(f"added_tokens[{i}].id", f"{token!r}, expected an integer from 0 to {(1 << 24) - 1}")
        if not isinstance(text, str) or not text:
            raise bad(f"added_tokens[{i}].content", f"{text!r}, expected a text")
        specials[token] = texts[token] = text
    size = max(texts, default=-1) + 1
    if size > 2 * len(texts) + 4096:
        raise bad("model.vocab", f"largest id {size - 1}, but there are only {len(texts)} tokens")
    bare = {**definition, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    if model.get("ignore_merges"):
        merges = model.get("merges") or []
        made = {m.replace(" ", "", 1) if isinstance(m, str) else "".join(m) for m in merges}
        drop = {t for t in specials.values() if t not in made}
        bare["model"] = {**model, "vocab": {t: i for t, i in model["vocab"].items() if t not in drop}}
    return TokenizerSpec(
        where=where,
        tokens=[texts.get(i, "") for i in range(size)],
        specials=specials,
        library_json=json.dumps(bare),
        byte_level='"ByteLevel"' in json.dumps(definition.get("pre_tokenizer")),
        eos_ids=eos_ids,
        bos_id=bos_id,
        add_bos=add_bos,
    )
