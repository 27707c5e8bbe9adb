"""SmolLM2-135M-Instruct against the numbers of an independent f32 forward (numpy on the file's rows, and transformers).

The reference backend with f32 keys and values is held to f32 rounding and to the exact greedy continuation. The CPU
backend quantises activations to 8 bits: it is held to bounds measured once and written down here with some room, to
the top of the distribution, to the reference's greedy ids where the margin is wide, and to the
mean negative log-likelihood of a text.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ds4
from ds4 import _cpu
from ds4.engine.demo import demo_model_path
from ds4.engine.engine import build_model
from ds4.engine.model_file import ModelFile, open_model_file
from ds4.errors import ConfigError

DATA = Path(__file__).parents[1] / "data" / "smollm2"
REFERENCE: dict[str, Any] = json.loads((DATA / "reference.json").read_text())["cases"]
CASES = sorted(REFERENCE)


@pytest.fixture(scope="module")
def file() -> ModelFile:
    try:
        return open_model_file(demo_model_path())
    except ConfigError as e:
        pytest.skip(str(e))


def load(file: ModelFile, backend: str, kv_type: int = 1) -> _cpu.Model:
    device = _cpu.Backend(backend, threads=2)
    if kv_type == 1:
        model = build_model(file, device)
    else:
        tensors = {name: (t.data, t.shape, int(t.dtype)) for name, t in file.tensors.items()}
        params: dict[str, Any] = dict(file.hparams)
        model = _cpu.Model(device, file.family, params, tensors, kv_type=kv_type)
    model.load()
    return model


@pytest.fixture(scope="module")
def exact(file: ModelFile) -> _cpu.Model:
    """The reference backend with f32 keys and values."""
    return load(file, "reference", kv_type=0)


@pytest.fixture(scope="module")
def cpu(file: ModelFile) -> _cpu.Model:
    return load(file, "cpu")


def logits_after(model: _cpu.Model, tokens: list[int]) -> npt.NDArray[np.float32]:
    session = _cpu.Session(model, len(tokens))
    model.step([(session, tokens, None, True)])
    return session.logits()


def greedy(model: _cpu.Model, prompt: list[int], n: int) -> list[int]:
    session = _cpu.Session(model, len(prompt) + n)
    tokens, out = prompt, []
    for _ in range(n):
        model.step([(session, tokens, None, True)])
        out.append(int(session.logits().argmax()))
        tokens = out[-1:]
    return out


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max()
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def mean_nll(model: _cpu.Model, tokens: list[int]) -> float:
    """Mean negative log-likelihood of tokens[1:]."""
    session = _cpu.Session(model, len(tokens))
    total = 0.0
    for token, following in itertools.pairwise(tokens):
        model.step([(session, [token], None, True)])
        total -= log_softmax(session.logits().astype(np.float64))[following]
    return total / (len(tokens) - 1)


# ---- the oracle: f32 from end to end


@pytest.mark.parametrize("case", CASES)
def test_reference_logits(exact: _cpu.Model, case: str) -> None:
    expected = np.load(DATA / f"{case}_last_logits.npy")
    error = np.abs(logits_after(exact, REFERENCE[case]["prompt_ids"]) - expected).max()
    print(f"{case}: largest error {error:.1e} of logits up to {np.abs(expected).max():.1f}")
    assert error < 2e-4  # the two forwards behind the numbers differ by 1e-4


def test_reference_hidden_states(exact: _cpu.Model) -> None:
    expected = np.load(DATA / "capital_chat_hidden_lasttoken.npy")
    got = exact.hidden_states(REFERENCE["capital_chat"]["prompt_ids"])[:, -1]
    assert got.shape == expected.shape
    error = np.abs(got - expected).max(axis=1) / np.abs(expected).max(axis=1)
    print("largest relative error per layer", error)
    assert error.max() < 1e-5


@pytest.mark.parametrize("case", ["capital_chat", "plain_completion"])
def test_reference_greedy_ids(exact: _cpu.Model, case: str) -> None:
    ids = REFERENCE[case]["greedy_ids"][:12]
    assert greedy(exact, REFERENCE[case]["prompt_ids"], len(ids)) == ids


@pytest.mark.parametrize("case", CASES)
def test_reference_greedy_ids_to_the_end(exact: _cpu.Model, case: str) -> None:
    ids = REFERENCE[case]["greedy_ids"]
    assert greedy(exact, REFERENCE[case]["prompt_ids"], len(ids)) == ids


# ---- the Python API


def test_five_lines_generate_text(file: ModelFile) -> None:
    engine = ds4.load(ctx=64)
    assert engine.info.path == file.path and engine.backend_name.startswith("cpu")
    params = ds4.SamplingParams(temperature=0)
    assert "Paris" in "".join(engine.generate("The capital of France is", params, max_tokens=4))


# ---- the CPU backend: 8-bit activations, f16 keys and values


@pytest.mark.parametrize("case", CASES)
def test_cpu_logits(cpu: _cpu.Model, case: str) -> None:
    """Measured on three cases: 0.029 to 0.048 of the logits' deviation after taking away the common shift (which no
    distribution sees), KL divergence 0.004 to 0.007 nat, 9 or 10 of the top 10. The bounds leave a factor of two."""
    expected = np.load(DATA / f"{case}_last_logits.npy").astype(np.float64)
    got = logits_after(cpu, REFERENCE[case]["prompt_ids"]).astype(np.float64)
    relative = float((got - expected).std() / expected.std())
    p, q = log_softmax(expected), log_softmax(got)
    divergence = float((np.exp(p) * (p - q)).sum())
    top = set(np.argsort(-got)[:10].tolist()) & set(REFERENCE[case]["top10_ids"])
    print(f"{case}: error {relative:.3f} of the deviation, KL {divergence:.4f} nat, {len(top)} of the top 10")
    assert relative < 0.1 and divergence < 0.015 and len(top) >= 8


@pytest.mark.parametrize("case", CASES)
def test_cpu_greedy_ids_where_margins_are_wide(cpu: _cpu.Model, case: str) -> None:
    """After the reference's own tokens. The difference of two logits deviates by 0.25 (measured over 209 positions):
    a margin of 1 is four times that."""
    prompt, ids = REFERENCE[case]["prompt_ids"], REFERENCE[case]["greedy_ids"]
    session = _cpu.Session(cpu, len(prompt) + len(ids))
    wide = 0
    for fed, (expected, margin) in zip(
        [prompt, *([t] for t in ids)], zip(ids, REFERENCE[case]["greedy_margins"], strict=True), strict=False
    ):
        cpu.step([(session, fed, None, True)])
        if margin > 1:
            wide += 1
            assert int(session.logits().argmax()) == expected
    print(f"{case}: {wide} of {len(ids)} margins are wide")
    assert wide >= len(ids) // 3


@pytest.mark.parametrize("case", CASES)
def test_cpu_likelihood(cpu: _cpu.Model, case: str) -> None:
    expected = REFERENCE[case]["prompt_mean_nll"]
    got = mean_nll(cpu, REFERENCE[case]["prompt_ids"])
    print(f"{case}: mean NLL {got:.4f}, f32 {expected:.4f}")
    assert abs(got - expected) < 0.05


def test_cpu_likelihood_of_a_text(cpu: _cpu.Model, exact: _cpu.Model, file: ModelFile) -> None:
    """English prose: quantised activations must not cost likelihood."""
    text = (
        "The lighthouse keeper climbed the narrow stairs every evening before sunset. He carried oil, a cloth and a "
        "small book in which he wrote down the weather, the ships that passed, and now and then a thought that he did "
        "not want to forget. In winter the wind shook the windows and the sea broke white against the rocks below. "
        "When morning came he put out the lamp, closed the book, and went down to the village to buy bread."
    )
    tokens = file.tokenizer().encode(text)
    expected, got = mean_nll(exact, tokens[:41]), mean_nll(cpu, tokens[:41])
    print(f"mean NLL of 40 tokens {got:.4f}, f32 {expected:.4f}")
    assert abs(got - expected) < 0.03
    assert mean_nll(cpu, tokens) < 4.0


def test_cpu_rows_do_not_depend_on_the_batch(cpu: _cpu.Model) -> None:
    """Decode of 16 sequences with a prefill in the same step, bit for bit the same as each alone."""
    seed = 3
    print("seed", seed)
    rng = np.random.default_rng(seed)
    prompts = [[int(t) for t in rng.integers(17, 49152, int(rng.integers(1, 80)))] for _ in range(16)]
    script = rng.integers(17, 49152, (6, 16))
    alone: list[list[npt.NDArray[np.float32]]] = []
    for i, prompt in enumerate(prompts):
        session = _cpu.Session(cpu, 128)
        cpu.step([(session, prompt, None, True)])
        out = []
        for token in script[:, i]:
            cpu.step([(session, [int(token)], None, True)])
            out.append(session.logits())
        alone.append(out)
    sessions = [_cpu.Session(cpu, 128) for _ in prompts]
    cpu.step([(s, p, None, False) for s, p in zip(sessions, prompts, strict=True)])
    guest = _cpu.Session(cpu, 512)
    for number, tokens in enumerate(script):
        rows: list[Any] = [(sessions[i], [int(tokens[i])], None, True) for i in rng.permutation(16)]
        rows.insert(5, (guest, rng.integers(17, 49152, 40).astype(np.int32), None, False))
        cpu.step(rows)
        for i in range(16):
            assert np.array_equal(sessions[i].logits().view(np.uint32), alone[i][number].view(np.uint32))
