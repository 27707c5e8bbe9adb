"""Both formats behind one face: facts of the demo model and of tiny ones, and contradictions that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ds4.engine.demo import demo_model_path
from ds4.engine.model_file import HParams, ModelFile, open_model_file, read_model_file, slug
from ds4.engine.tensors import DType, Tensor
from ds4.errors import ModelFileError, UnsupportedModelError
from tests.support.tiny_llama import TinyLlama


@pytest.fixture(scope="module")
def tiny() -> TinyLlama:
    return TinyLlama.make(layers=2)


@pytest.fixture
def hf(tmp_path: Path, tiny: TinyLlama) -> Path:
    return tiny.write_hf(tmp_path / "Tiny-Llama")


def write_gguf(
    path: Path, keys: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]], family: str = "llama"
) -> Path:
    writer = gguf.GGUFWriter(path, family)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_of(tiny: TinyLlama) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    keys = {f"llama.{k}": v for k, v in tiny.params().items() if k != "rope.kind"} | {"llama.context_length": 512}
    return keys, dict(tiny.gguf_weights())


def test_demo_model() -> None:
    m = open_model_file(demo_model_path())
    assert (m.format, m.family, m.syntax, m.rope_kind) == ("gguf", "llama", "chatml", "interleaved")
    assert m.id == "smollm2-135m-instruct" and m.name.startswith("Smollm2 135M")
    assert m.hparams.integer("block_count") == 30 and m.hparams.number("rope.freq_base") == 100000.0
    assert m.n_params == 134_515_008 and sum(m.type_bytes.values()) == 96_576_768
    assert list(m.type_bytes) == ["Q4_1", "Q8_0", "F32"]
    assert m.stop_ids == (0, 2) and m.chat_template is not None and "SmolLM" in m.chat_template
    assert m.tensors["token_embd.weight"].shape == (49152, 576)
    assert m.file_bytes == demo_model_path().stat().st_size


def test_both_formats_say_the_same(tmp_path: Path, tiny: TinyLlama, hf: Path) -> None:
    a, b = open_model_file(tiny.write_gguf(tmp_path / "tiny-Q8_0.gguf")), open_model_file(hf)
    assert (a.rope_kind, b.rope_kind) == ("interleaved", "half_split")
    assert (a.id, b.id, b.name) == ("tiny", "tiny-llama", "Tiny-Llama")
    assert a.tensors.keys() == b.tensors.keys() and a.n_params == b.n_params
    for key in set(a.hparams) & set(b.hparams):
        assert a.hparams[key] == pytest.approx(b.hparams[key])
    assert len(set(a.hparams) & set(b.hparams)) >= 9
    for name, t in b.tensors.items():
        assert np.array_equal(np.frombuffer(t.data, "f4").reshape(t.shape), tiny.weights[name])
    assert a.tokenizer().encode("the") == [259, 104]
    assert b.tokenizer_spec is None and b.stop_ids == ()
    with pytest.raises(ModelFileError, match="tokenizer: the model has no tokenizer"):
        b.tokenizer()


def test_directory_tokenizer(hf: Path) -> None:
    from tests.engine.test_tokenizer import library_definition

    definition = library_definition()
    big = definition | {"added_tokens": [*definition["added_tokens"], {"id": 320, "content": "<big>"}]}
    (hf / "tokenizer.json").write_text(json.dumps(big))
    with pytest.raises(ModelFileError, match=r"321 tokens, but token_embd.weight has 320 rows"):
        open_model_file(hf)
    (hf / "tokenizer.json").write_text(json.dumps(definition))
    (hf / "tokenizer_config.json").write_text(
        json.dumps(
            {"eos_token": {"content": "<eos>"}, "bos_token": "<tool>", "chat_template": "T", "add_bos_token": True}
        )
    )
    (hf / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    m = read_model_file(hf)
    assert m.tokenizer_spec is not None and m.tokenizer_spec.add_bos
    tokenizer = m.tokenizer()
    assert tokenizer.eos_ids == (0, 2, 5) and tokenizer.bos_id == tokenizer.special_id("<tool>")
    assert (m.chat_template, m.syntax) == ("T", "raw")
    (hf / "chat_template.jinja").write_text("<|im_start|>")
    assert read_model_file(hf).syntax == "chatml"
    (hf / "generation_config.json").write_text('{"eos_token_id": 999999}')
    with pytest.raises(ModelFileError, match="eos_token_id: token id 999999"):
        read_model_file(hf)


def edited(hf: Path, **changes: Any) -> Path:
    config = json.loads((hf / "config.json").read_text()) | changes
    (hf / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return hf


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "mamba"}, "model_type: 'mamba' is not implemented"),
        ({"model_type": None}, "model_type: None"),
        ({"hidden_size": "absent"}, "hidden_size: the member is missing"),
        ({"hidden_size": "128"}, "hidden_size: is '128', expected a number"),
        ({"hidden_size": 127}, r"token_embd.weight: shape \[320, 128\], but .* ask for \[320, 127\]"),
        ({"hidden_size": 128.5}, "llama.embedding_length: is 128.5, expected an integer"),
        ({"vocab_size": 10**12}, "vocab_size: is 1000000000000|ask for"),
        ({"num_hidden_layers": 3}, "blk.2.attn_norm.weight: the tensor is missing"),
        ({"num_hidden_layers": 0}, "block_count: is 0"),
        ({"num_hidden_layers": 10**9}, "block_count: is 1000000000, allowed are 1 to 16384"),
        ({"num_key_value_heads": 3}, "head_count_kv: 3 does not divide llama.attention.head_count 4"),
        ({"num_key_value_heads": 0}, "head_count_kv: is 0"),
        ({"num_attention_heads": 8}, r"blk.0.attn_q.weight: shape \[128, 128\], but .* ask for \[256, 128\]"),
        ({"intermediate_size": 7}, r"blk.0.ffn_gate.weight: shape \[192, 128\], but .* ask for \[7, 128\]"),
        ({"head_dim": 31}, "rope.dimension_count: 31, expected an even number"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not implemented"),
        ({"rope_theta": "x"}, "rope_theta: is 'x'"),
        ({"rope_scaling": 5}, "rope_scaling: is 5"),
        ({"rope_scaling": {"type": 5}}, "rope_type: is 5"),
        ({"tie_word_embeddings": False}, "lm_head.weight: the tensor is missing"),
        ({"max_position_embeddings": 0}, "context_length: is 0"),
    ],
)
def test_config_that_lies(hf: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelFileError, match=text):
        open_model_file(edited(hf, **changes))


def test_rope_scaling_keeps_its_names(hf: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    old = open_model_file(edited(hf, rope_scaling={"rope_type": "llama3", **scaling}, rope_theta=5e5)).hparams
    new = open_model_file(
        edited(hf, rope_scaling="absent", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    ).hparams
    assert dict(old) == dict(new)
    assert old["rope.scaling.type"] == "llama3" and old["rope.scaling.original_context_length"] == 256
    assert old["rope.freq_base"] == 5e5 and old["rope.scaling.low_freq_factor"] == 1.0


def test_tensors_that_llama_does_not_have(hf: Path, tiny: TinyLlama) -> None:
    from safetensors.numpy import load_file, save_file

    path = hf / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, "f4")}, path)
    assert open_model_file(hf).tensors.keys() == tiny.weights.keys()
    save_file(tensors | {"lm_head.weight": np.ones((320, 128), "f4")}, path)
    assert open_model_file(hf).tensors.keys() == tiny.weights.keys()  # tied: the head is the embedding
    save_file(tensors | {"model.layers.0.self_attn.q_norm.weight": np.ones(4, "f4")}, path)
    with pytest.raises(UnsupportedModelError, match=r"q_norm.weight: this tensor is not part of a Llama model"):
        open_model_file(hf)


@pytest.mark.parametrize(
    ("keys", "drop", "text"),
    [
        ({"llama.block_count": 2.0}, (), "llama.block_count: is 2.0, expected an integer"),
        ({"llama.block_count": "2"}, (), "llama.block_count: is '2'"),
        ({}, ("llama.block_count",), "llama.block_count: the key is missing"),
        ({}, ("llama.attention.layer_norm_rms_epsilon",), "layer_norm_rms_epsilon: the key is missing"),
        ({}, ("output_norm.weight",), "output_norm.weight: the tensor is missing"),
        ({}, ("token_embd.weight",), "token_embd.weight: the tensor is missing"),
        ({"llama.attention.head_count_kv": [2, 2]}, (), "head_count_kv: is .2, 2., expected an integer"),
        ({"llama.expert_count": 8}, (), "llama.expert_count: 8 experts"),
        ({"split.count": 2}, (), "split.count: the model is split into 2 files"),
        ({"general.name": 7}, (), "general.name: is of type u32, expected string"),
    ],
)
def test_gguf_that_lies(
    tmp_path: Path, tiny: TinyLlama, keys: dict[str, Any], drop: tuple[str, ...], text: str
) -> None:
    all_keys, tensors = gguf_of(tiny)
    kept = {k: v for k, v in (all_keys | keys).items() if k not in drop}
    path = write_gguf(tmp_path / "x.gguf", kept, {k: v for k, v in tensors.items() if k not in drop})
    with pytest.raises(ModelFileError, match=text):
        open_model_file(path)


def test_gguf_facts_that_may_be_missing(tmp_path: Path, tiny: TinyLlama) -> None:
    keys, tensors = gguf_of(tiny)
    for key in ("vocab_size", "attention.key_length", "rope.dimension_count"):
        del keys[f"llama.{key}"]
    m = open_model_file(write_gguf(tmp_path / "My Model.Q4_K_M.gguf", keys, tensors))
    assert m.hparams.integer("vocab_size") == 320
    assert (m.name, m.id, m.syntax, m.tokenizer_spec) == ("My Model.Q4_K_M", "my-model", "raw", None)


@pytest.mark.parametrize("key", ["eos", "bos", "eot", "eom"])
def test_token_ids_outside_the_vocabulary(tmp_path: Path, tiny: TinyLlama, key: str) -> None:
    keys, tensors = gguf_of(tiny)
    tokenizer = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], f"{key}_token_id": 2}
    path = write_gguf(tmp_path / "x.gguf", keys | {f"tokenizer.ggml.{k}": v for k, v in tokenizer.items()}, tensors)
    with pytest.raises(ModelFileError, match=f"tokenizer.ggml.{key}_token_id: token id 2, the vocabulary has 2 tokens"):
        read_model_file(path)


def test_other_families_can_be_looked_at(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "clip")
    writer.add_tensor("v.patch_embd.weight", np.ones((2, 4), "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_model_file(tmp_path / "x.gguf").family == "clip"
    with pytest.raises(ModelFileError, match=r"clip.block_count: the key is missing"):
        open_model_file(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("llama", {"<own>", "<|im_end|>", "<|endoftext|>"}),
        ("deepseek4", {"<own>", "<|im_end|>", "<|endoftext|>"}),
        (
            "glm-dsa",
            {"<own>", "<|im_end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"},
        ),
        ("qwen4exp", {"<own>", "<|im_end|>", "<|endoftext|>"}),
    ],
)
def test_what_ends_a_turn(tmp_path: Path, family: str, ends: set[str]) -> None:
    """The file's own end of text, known ends of turns, and GLM's roles: the next one begins where a turn ends."""
    specials = ["<own>", "<|im_end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    tokens = ["a", *specials, "<think>", "<|user|>x"]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, *(3 for _ in specials), 3, 1],
        "tokenizer.ggml.merges": ["a a"],
        "tokenizer.ggml.eos_token_id": tokens.index("<own>"),
    }
    file = write_gguf(tmp_path / "x.gguf", keys, {"token_embd.weight": np.ones((len(tokens), 32), "f4")}, family)
    assert {tokens[i] for i in read_model_file(file).stop_ids} == ends


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="No such file"):
        open_model_file(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match=r"config.json"):
        open_model_file(tmp_path)
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(ModelFileError, match="not a GGUF file: begins with b'hell'"):
        open_model_file(tmp_path / "x.txt")


def test_cache_directory_gives_the_repository_name(tmp_path: Path, hf: Path) -> None:
    snapshot = tmp_path / "models--Org--Some-Model-1B/snapshots/0123abcd"
    snapshot.parent.mkdir(parents=True)
    shutil.move(hf, snapshot)
    assert open_model_file(snapshot).id == "some-model-1b"


def test_getters() -> None:
    h = HParams(Path("f"), "x", {"i": 3, "f": 0.5, "b": True, "s": "t", "l": [1, 2], "m": [1, 0.5]})
    assert (h.integer("i"), h.number("i"), h.number("f"), h.flag("b"), h.text("s")) == (3, 3.0, 0.5, True, "t")
    assert (h.integers("l"), h.integers("i"), h.numbers("m"), h.numbers("f")) == ([1, 2], [3], [1.0, 0.5], [0.5])
    assert (h.integer("z", 4), h.number("z", 1.5), h.flag("z", False), h.text("z", "d")) == (4, 1.5, False, "d")
    wrong = [
        (h.integer, "b"),
        (h.integer, "f"),
        (h.number, "b"),
        (h.flag, "i"),
        (h.text, "i"),
        (h.integers, "m"),
        (h.numbers, "s"),
    ]
    for getter, key in wrong:
        with pytest.raises(ModelFileError, match=f"f: x.{key}: .*expected"):
            getter(key)
    with pytest.raises(ModelFileError, match=r"x.i: is 3, allowed are 4 to 9"):
        h.integer("i", low=4, high=9)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct"),
        ("Model-IQ2_XXS", "model"),
        ("Model-bf16", "model"),
        ("A b/c", "a-b-c"),
        ("\u4e2d", "model"),
        ("DeepSeek-V4-Flash", "deepseek-v4-flash"),
    ],
)
def test_slug(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_type_bytes_counts_by_type() -> None:
    data = memoryview(bytes(8))
    tensors = {n: Tensor(n, (2,), DType.F32, data) for n in "ab"} | {"c": Tensor("c", (4,), DType.F16, data)}
    x = Path("x")
    h = HParams(x, "llama", {})
    m = ModelFile(x, "gguf", "llama", "n", "n", h, tensors, "interleaved", "raw", None, None, 0, {})
    assert m.type_bytes == {"F32": 16, "F16": 8} and m.n_params == 8
