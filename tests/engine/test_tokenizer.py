"""The tokenizer against reference ids, the `tokenizers` library's own reading of a definition, and hostile text."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ds4.engine.demo import demo_model_path
from ds4.engine.encoding import well_formed
from ds4.engine.model_file import open_model_file
from ds4.engine.tokenizer import (
    PRE_TOKENIZERS,
    Tokenizer,
    TokenizerSpec,
    pre_tokenizer_name,
    spec_from_gguf,
    spec_from_json,
)
from ds4.errors import ModelFileError, UnsupportedModelError

SEED = 20261130
REFERENCE = json.loads((Path(__file__).parents[1] / "data/smollm2/reference.json").read_text())


@dataclass(frozen=True)
class Special:
    text: str
    optional: bool = False


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return open_model_file(demo_model_path()).tokenizer()


def byte_chars() -> list[str]:
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def small(pre: str = "gpt-2", merges: list[str] | None = None, specials: dict[int, str] | None = None) -> Tokenizer:
    """Bytes, a few merged tokens and two special tokens."""
    merges = ["h i", "\u0120 hi"] if merges is None else merges
    tokens = [*byte_chars(), *(m.replace(" ", "") for m in merges), "<|end|>", "<|endoftext|>"]
    n = len(tokens)
    specials = {n - 2: "<|end|>", n - 1: "<|endoftext|>"} if specials is None else specials
    return Tokenizer(TokenizerSpec(Path("x.gguf"), tokens, specials, merges, pre, eos_ids=(n - 1,)))


@pytest.mark.parametrize("vector", REFERENCE["tokenizer_vectors"], ids=lambda v: repr(v["text"]))
def test_reference_vectors(demo: Tokenizer, vector: dict[str, Any]) -> None:
    assert demo.encode_with_specials(vector["text"]) == vector["ids"]
    assert demo.decode(vector["ids"]).decode() == vector["text"]


@pytest.mark.parametrize("case", sorted(REFERENCE["cases"]))
def test_reference_prompts(demo: Tokenizer, case: str) -> None:
    c = REFERENCE["cases"][case]
    assert demo.encode_with_specials(c["text"]) == c["prompt_ids"]
    assert demo.decode(c["greedy_ids"]).decode() == c["greedy_text"]


def test_text_never_becomes_a_special_token(demo: Tokenizer) -> None:
    text = "".join(demo.special_ids) + " x<|im_end|>\n"
    ids = demo.encode(text)
    assert not set(ids) & set(demo.special_ids.values())
    assert demo.decode(ids).decode() == text
    assert demo.encode_segments([text]) == ids
    assert demo.encode_with_specials("a<|im_end|>b") == [*demo.encode("a"), 2, *demo.encode("b")]


def test_whole_words_first_does_not_let_specials_in() -> None:
    """Llama 3's rule takes a piece that is a vocabulary entry as it is; a special token must not be one."""
    tokens = [*byte_chars(), "Special", "hi"]
    spec = TokenizerSpec(Path("x.gguf"), tokens, {256: "Special"}, ["h i"], "llama-bpe")
    tokenizer = Tokenizer(spec)
    assert tokenizer.encode("hi") == [257]
    assert 256 not in tokenizer.encode("Special") and tokenizer.decode(tokenizer.encode("Special")) == b"Special"


def test_segments(demo: Tokenizer) -> None:
    text = "What is the capital of France?"
    segments = [Special("<|im_start|>"), "user", "\n", text, Special("<|im_end|>"), "\n"]
    expected = demo.encode_with_specials("<|im_start|>user\n" + text + "<|im_end|>\n")
    assert demo.encode_segments(segments) == expected
    assert demo.encode_segments([]) == [] and demo.encode_segments(["", ""]) == []
    with pytest.raises(ValueError, match=r"no special token '<\|nobody\|>'"):
        demo.encode_segments([Special("<|nobody|>")])
    with pytest.raises(ValueError, match=r"<\|nobody\|>"):
        demo.key_bytes([Special("<|nobody|>")])


def test_an_optional_special_is_text_where_the_vocabulary_lacks_it(demo: Tokenizer) -> None:
    def segments(*texts: str) -> list[str | Special]:
        return ["a", *(Special(text, optional=True) for text in texts), "b"]

    assert demo.encode_segments(segments("<tool>")) == demo.encode("a<tool>b")
    assert demo.key_bytes(segments("<tool>", "</tool>")) == b"a<tool></tool>b"
    assert demo.encode_segments(segments("<|im_end|>")) == [*demo.encode("a"), 2, *demo.encode("b")]


def test_key_bytes(demo: Tokenizer) -> None:
    segments = [Special("<|im_start|>"), "us", "er\n\u00e9", Special("<|im_end|>")]
    key = b"\xff\x01\0\0\0user\n\xc3\xa9\xff\x02\0\0\0"
    assert demo.key_bytes(segments) == key
    assert demo.key_bytes_of_ids(demo.encode_segments(segments)) == key
    assert demo.key_bytes(["<|im_start|>"]) == b"<|im_start|>"
    assert demo.key_bytes(["\ud800"]) == "\ufffd".encode()


def test_remembered_texts_give_the_same_ids(demo: Tokenizer) -> None:
    text = "A text that is long enough to be remembered, with digits 12345 and \u4e2d\u6587. " * 3
    first = demo.encode_segments([text, Special("<|im_end|>")])
    first.append(7)
    assert demo.encode_segments([text, Special("<|im_end|>")]) == first[:-1] == [*demo.encode(text), 2]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [("\ud83d\ude00", "\U0001f600"), ("a\ud800b", "a\ufffdb"), ("\udc00", "\ufffd"), ("\ude00\ud83d", "\ufffd\ufffd")],
)
def test_surrogates(demo: Tokenizer, text: str, meaning: str) -> None:
    assert well_formed(text) == meaning
    assert demo.encode(text) == demo.encode(meaning)
    assert demo.encode_with_specials(text) == demo.encode(meaning)
    assert demo.encode_segments([text]) == demo.encode(meaning)


def test_round_trip_of_random_text(demo: Tokenizer) -> None:
    print("seed", SEED)
    rng = random.Random(SEED)
    ranges = [(0x20, 0x7E), (0x20, 0x7E), (0xC0, 0x24F), (0x400, 0x4FF), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF)]
    for _ in range(300):
        chars = [chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(0, 60))]
        text = "".join(c if rng.random() < 0.8 else rng.choice(" \n\t\r  ") for c in chars)
        assert demo.decode(demo.encode(text)).decode() == text


def test_token_bytes_is_a_table_of_all_tokens(demo: Tokenizer) -> None:
    assert demo.vocab_size == 49152
    assert demo.token_bytes(198) == b"\n" and demo.token_bytes(1) == b"<|im_start|>"
    assert demo.token_bytes(49152) == b"" and demo.token_bytes(10**9) == b""
    with pytest.raises(ValueError, match="token id -1"):
        demo.token_bytes(-1)
    spelled = {demo.token_bytes(i) for i in range(demo.vocab_size)}
    assert len(spelled) == demo.vocab_size and b"" not in spelled


def test_facts(demo: Tokenizer) -> None:
    assert demo.eos_ids == (0, 2) and demo.bos_id == 1
    assert demo.special_id("<|im_end|>") == 2 and demo.special_id("the") is None
    assert demo.is_special(2) and not demo.is_special(198)
    assert len(demo.special_ids) == 17


def test_longer_special_wins() -> None:
    tokens = [*byte_chars(), "<a>", "<a>b"]
    tokenizer = Tokenizer(TokenizerSpec(Path("x"), tokens, {256: "<a>", 257: "<a>b"}, [], "gpt-2"))
    assert tokenizer.encode_with_specials("<a>b<a>") == [257, 256]


# Pieces as the published patterns cut them; a merge can never cross a border of pieces.
PIECES = {
    "gpt-2": ("it's 1234  x\n\n", ["it", "'s", " 1234", " ", " x", "\n\n"]),
    "smollm": ("it's 1234  x\n\n", ["it", "'s", " ", "1", "2", "3", "4", " ", " x", "\n\n"]),
    "llama-bpe": ("It'S 1234  x!\n\n", ["It", "'S", " ", "123", "4", " ", " x", "!\n\n"]),
    "qwen2": ("It's 12  x!\n", ["It", "'s", " ", "1", "2", " ", " x", "!\n"]),
    "glm4": ("a 1234", ["a", " ", "123", "4"]),
    "joyai-llm": (
        "n=12345 \u4e2d\u6587\u30ab .foo(bar) \u00e9\u0301x\n y",
        ["n", "=", "123", "45", " ", "\u4e2d\u6587\u30ab", " .", "foo", "(bar", ")", " \u00e9\u0301x", "\n", " y"],
    ),
}


@pytest.mark.parametrize("pre", sorted(PIECES))
def test_pieces(pre: str) -> None:
    text, pieces = PIECES[pre]
    tokenizer = small(pre)
    cut = tokenizer._encoder.pre_tokenizer.pre_tokenize_str(text)
    data = text.encode()
    spelled = [bytes(small().decode([byte_chars().index(c) for c in piece])) for piece, _ in cut]
    assert [s.decode() for s in spelled] == pieces
    assert b"".join(spelled) == data
    assert tokenizer.decode(tokenizer.encode(text)).decode() == text


def test_every_known_pre_tokenizer_builds() -> None:
    for pre in PRE_TOKENIZERS:
        assert small(pre).decode(small(pre).encode("Hi there, 42!")) == b"Hi there, 42!"


def test_unknown_pre_tokenizer_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"unknown pre-tokenizer 'klingon', known are: .*smollm"):
        small("klingon")


def test_inconsistent_vocabulary_is_an_error() -> None:
    with pytest.raises(ModelFileError, match=r"entry 0 is 'hi', expected two tokens"):
        small(merges=["hi"])
    tokens = [*byte_chars()]
    with pytest.raises(ModelFileError, match="inconsistent"):
        Tokenizer(TokenizerSpec(Path("x"), tokens, {}, ["h i"], "gpt-2"))  # the merge makes a token that is not there


def gguf_keys(**changes: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": byte_chars(),
        "tokenizer.ggml.merges": [],
    }
    return keys | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model: tokenizer model 'llama'"),
        ({"tokens": []}, "tokenizer.ggml.tokens: missing, empty"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens"),
        ({"merges": None}, "tokenizer.ggml.merges: missing"),
        ({"token_type": [1, 2]}, "tokenizer.ggml.token_type"),
        ({"pre": 7}, "tokenizer.ggml.pre: not a string"),
    ],
)
def test_bad_gguf_keys_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelFileError, match=text):
        spec_from_gguf(Path("x.gguf"), gguf_keys(**changes), (), None)


def library_definition() -> dict[str, Any]:
    """A trained `tokenizer.json` with special and ordinary added tokens."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=byte_chars(), special_tokens=["<eos>"], show_progress=False
    )
    library.train_from_iterator(["the cat sat on the mat and the hat " * 20, "caf\u00e9 na\u00efve 2024 " * 9], trainer)
    library.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    result: dict[str, Any] = json.loads(library.to_str())
    return result


def test_library_definition_gives_the_library_ids() -> None:
    definition = library_definition()
    library = tokenizers.Tokenizer.from_str(json.dumps(definition))
    tokenizer = Tokenizer(spec_from_json(Path("tokenizer.json"), definition, (0,), None, False))
    text = "the cat<tool> sat 42<eos>\n caf\u00e9 \U0001f600"
    assert tokenizer.encode_with_specials(text) == library.encode(text, add_special_tokens=False).ids
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_ids.values())
    assert tokenizer.decode(ids).decode() == text
    assert tokenizer.vocab_size == library.get_vocab_size(with_added_tokens=True)
    assert [tokenizer.token_bytes(tokenizer.special_ids[t]) for t in ("<eos>", "<tool>")] == [b"<eos>", b"<tool>"]


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("model", "vocab"), [], "model.vocab: missing"),
        (("model", "vocab"), {"a": -1}, "has id -1"),
        (("model", "vocab"), {"a": True}, "has id True"),
        (("model", "vocab"), {"a": 10_000_000}, "largest id 10000000"),
        (("model", "type"), "Unigram", "'Unigram'"),
        (("model", "merges"), [["zzz", "q"]], "inconsistent"),
        (("added_tokens",), [{"id": "x", "content": "y"}], r"added_tokens\[0\].id"),
        (("added_tokens",), [{"id": 5, "content": ""}], r"added_tokens\[0\].content"),
        (("added_tokens",), 5, r"added_tokens\[0\]"),
        (("pre_tokenizer",), {"type": "Nonsense"}, "inconsistent"),
    ],
)
def test_bad_definitions_are_named(path: tuple[str, ...], value: Any, text: str) -> None:
    definition = library_definition()
    target = definition
    for member in path[:-1]:
        target = target[member]
    target[path[-1]] = value
    with pytest.raises(ModelFileError, match=text):
        Tokenizer(spec_from_json(Path("tokenizer.json"), definition, (), None, False))


@pytest.mark.parametrize("pre", list(PRE_TOKENIZERS))
def test_names_of_pre_tokenizers(pre: str) -> None:
    """A definition that the library writes is recognised; names of one rule are one."""
    built = Tokenizer(TokenizerSpec(Path("x"), ["a", "b", "ab"], {}, ("a b",), pre))
    definition = json.loads(built._encoder.to_str())
    assert PRE_TOKENIZERS[str(pre_tokenizer_name(definition))] == PRE_TOKENIZERS[pre]
    assert pre_tokenizer_name(definition | {"pre_tokenizer": {"type": "Whitespace"}}) is None
    assert pre_tokenizer_name(definition | {"normalizer": {"type": "Lowercase"}}) is None
    assert pre_tokenizer_name({}) is None
