"""The Llama forward pass: the reference backend against a plain numpy forward, and what the family refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4 import _cpu
from tests.support.native_model import F32, open_model
from tests.support.tiny_llama import TinyLlama

SHAPES: list[dict[str, Any]] = [
    {},
    {"tied": False, "biases": True, "rope_factors": True},
    {"kv_heads": 1, "theta": 500000.0},
    {"kv_heads": 4, "eps": 1e-6, "layers": 1},
]


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["interleaved", "half_split"])
def test_reference_backend_equals_numpy(options: dict[str, Any], kind: str) -> None:
    """Both row orders, with f32 keys and values: only f32 rounding between operations separates the two (2e-5)."""
    tiny = TinyLlama.make(**options)
    model, _ = open_model(tiny, "reference", kind=kind, kv_type=F32)
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, tiny.vocab, 40)]
    expected = tiny.logits(tokens)
    assert np.abs(expected).max() > 5  # logits of a size where errors would show
    session = _cpu.Session(model.native, 64)
    for position, token in enumerate(tokens):
        model.native.step([(session, [token], None, True)])
        assert np.abs(session.logits() - expected[position]).max() < 5e-5


def test_hidden_states_frame_the_layers() -> None:
    tiny = TinyLlama.make()
    model, _ = open_model(tiny, "reference", kv_type=F32)
    tokens = [5, 9, 300]
    hidden = model.native.hidden_states(tokens)
    assert hidden.shape == (tiny.layers + 1, 3, tiny.width)
    assert np.array_equal(hidden[0], tiny.weights["token_embd.weight"][tokens])
    logits = hidden[-1] @ tiny.weights["token_embd.weight"].T
    assert np.abs(logits - tiny.logits(tokens)).max() < 1e-4


def scaled(**scaling: Any) -> _cpu.Session:
    tiny = TinyLlama.make(layers=1)
    params = tiny.params() | {f"rope.scaling.{k}": v for k, v in scaling.items()}
    native = _cpu.Model(_cpu.Backend("reference"), "llama", params, tiny.tensors(), kv_type=F32)
    native.load()
    session = _cpu.Session(native, 64)
    native.step([(session, list(range(3, 43)), None, True)])
    return session


def with_divisors(divisors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    tiny = TinyLlama.make(layers=1, rope_factors=True)
    tiny.weights["rope_freqs.weight"][:] = divisors
    plain = TinyLlama.make(layers=1)
    for name, value in plain.weights.items():
        tiny.weights[name][...] = value
    return tiny.logits(list(range(3, 43)))[-1]


def test_linear_and_llama3_scaling() -> None:
    linear = scaled(type="linear", factor=4.0).logits()
    assert np.abs(linear - with_divisors(np.full(16, 4.0))).max() < 1e-4

    # Llama 3 (arXiv:2407.21783): wavelengths below orig/high stay, above orig/low divide by the factor.
    rule = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context_length": 256}
    freq = 10000.0 ** (-2.0 * np.arange(16) / 32)
    wavelength = 2 * np.pi / freq
    smooth = (256 / wavelength - 1.0) / 3.0
    ramp = (1 - smooth) / 8 + smooth
    scale = np.where(wavelength < 256 / 4, 1.0, np.where(wavelength > 256, 1 / 8, ramp))
    assert len({round(float(s), 6) for s in scale}) > 3  # all three branches occur
    got = scaled(type="llama3", **rule).logits()
    assert np.abs(got - with_divisors(1 / scale)).max() < 1e-4
    assert np.abs(got - linear).max() > 1e-2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rope.scaling.type": "yarn"}, _cpu.Unsupported, "rope.scaling.type 'yarn'"),
        ({"expert_count": 8}, _cpu.Unsupported, "expert_count 8 is not implemented"),
        ({"attention.scale": 0.5}, _cpu.Unsupported, "attention.scale is not implemented"),
        ({"rope.scaling.type": "linear"}, ValueError, "rope.scaling.factor is missing"),
        ({"attention.value_length": 16}, _cpu.Unsupported, "attention.value_length 16"),
        ({"block_count": 4}, ValueError, "blk.3.attn_norm.weight: tensor is missing"),
        ({"block_count": 2}, _cpu.Unsupported, "blk.2.attn_k.weight: this tensor is not implemented"),
        ({"block_count": 2**40}, ValueError, "block_count is 1099511627776, allowed are 1 to 4096"),
        ({"block_count": "3"}, ValueError, "block_count is not an integer"),
        ({"attention.head_count": 3}, ValueError, "attention.head_count_kv is 2, which does not divide"),
        ({"attention.head_count": 0}, ValueError, "attention.head_count is 0"),
        ({"feed_forward_length": 191}, ValueError, r"blk.0.ffn_gate.weight: shape \[192, 128\].*ask for \[191, 128\]"),
        ({"vocab_size": 321}, ValueError, r"token_embd.weight: shape \[320, 128\].*ask for \[321, 128\]"),
        ({"rope.dimension_count": 33}, ValueError, "rope.dimension_count is 33"),
        ({"rope.freq_base": float("nan")}, ValueError, "rope.freq_base"),
        ({"attention.layer_norm_rms_epsilon": -1.0}, ValueError, "layer_norm_rms_epsilon"),
    ],
    ids=lambda x: str(x)[:60] if isinstance(x, dict) else "",
)
def test_refusals_name_the_key(change: dict[str, Any], error: type[Exception], message: str) -> None:
    tiny = TinyLlama.make()
    with pytest.raises(error, match=message):
        _cpu.Model(_cpu.Backend("reference"), "llama", tiny.params() | change, tiny.tensors())


def test_refuses_other_families_and_lying_tensors() -> None:
    tiny = TinyLlama.make()
    backend = _cpu.Backend("reference")
    with pytest.raises(_cpu.Unsupported, match=r"general\.architecture 'mamba'"):
        _cpu.Model(backend, "mamba", tiny.params(), tiny.tensors())
    with pytest.raises(_cpu.Unsupported, match="backend 'tpu'"):
        _cpu.Backend("tpu")
    tensors = tiny.tensors()
    data, _, kind = tensors["output_norm.weight"]
    for shape in [(tiny.width + 1,), (2, tiny.width), (2**62, 2**62)]:
        with pytest.raises(ValueError, match=r"output_norm\.weight"):
            _cpu.Model(backend, "llama", tiny.params(), tensors | {"output_norm.weight": (data, shape, kind)})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight: entry 0"):
        zeros = memoryview(np.zeros(16, np.float32).view(np.uint8))
        _cpu.Model(backend, "llama", tiny.params(), tensors | {"rope_freqs.weight": (zeros, (16,), 0)})


def test_the_mapping_is_held_while_the_model_lives() -> None:
    tiny = TinyLlama.make(layers=1)
    data = {name: bytearray(bytes(view)) for name, (view, _, _) in tiny.tensors().items()}
    tensors = {n: (memoryview(data[n]), shape, kind) for n, (_, shape, kind) in tiny.tensors().items()}
    native = _cpu.Model(_cpu.Backend("reference"), "llama", tiny.params(), tensors)
    del tensors
    with pytest.raises(BufferError):
        data["output_norm.weight"].clear()
    del native
    data["output_norm.weight"].clear()
