"""Sessions and the step: exactness over batch composition and chunking, rewind, fork, sync, failures.

Every comparison of logits is of all bits, on every backend.
"""

from __future__ import annotations

import io
import itertools
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from ds4 import _cpu
from ds4.engine.sampler import new_sampler
from ds4.engine.session import ModelHandle, Session
from ds4.engine.types import SamplingParams
from ds4.errors import Cancelled, ContextLengthError, EngineError, SessionInvalidError
from tests.support.native_model import BACKENDS, open_model, step
from tests.support.tiny_llama import TinyLlama

CTX = 256


def tiny(**options: Any) -> TinyLlama:
    return TinyLlama.make(**{"qtype": GGMLQuantizationType.Q4_1, "layers": 2} | options)


@pytest.fixture(scope="module", params=BACKENDS)
def model(request: pytest.FixtureRequest) -> ModelHandle:
    return open_model(tiny(), request.param)[0]


def random_tokens(n: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 320, n)]


def fresh(model: ModelHandle, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Logits after `tokens`, computed alone, one prefill."""
    session = Session(model, CTX)
    step(model, (session, tokens))
    return session.logits()


def same(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    return bool(np.isfinite(a).all()) and np.array_equal(a.view(np.uint32), b.view(np.uint32))


# ---- exactness


@pytest.mark.parametrize("width", [2, 3, 4, 8, 16])
def test_rows_do_not_depend_on_the_batch(model: ModelHandle, width: int) -> None:
    """Decode in a batch of `width`, in three orders, beside a prefill chunk, equals decode alone, over 6 steps."""
    seed = 100 + width
    print("seed", seed)
    rng = np.random.default_rng(seed)
    prompts = [random_tokens(int(rng.integers(1, 60)), seed * 31 + i) for i in range(width)]
    script = rng.integers(0, 320, (6, width))

    alone: list[list[npt.NDArray[np.float32]]] = []
    for i, prompt in enumerate(prompts):
        session = Session(model, CTX)
        step(model, (session, prompt))
        out = []
        for token in script[:, i]:
            step(model, (session, [int(token)]))
            out.append(session.logits())
        alone.append(out)

    for order in (list(range(width)), list(range(width))[::-1], [int(i) for i in rng.permutation(width)]):
        sessions = [Session(model, CTX) for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.sync(prompt)
        guest = Session(model, CTX)
        guest_tokens: list[int] = []
        for number, tokens in enumerate(script):
            chunk = random_tokens(7 + 5 * number, seed + number)
            guest_tokens += chunk
            rows: list[tuple[Session, Any]] = [(sessions[i], [int(tokens[i])]) for i in order]
            rows.insert(int(rng.integers(0, width + 1)), (guest, chunk))
            step(model, *rows)
            for i in range(width):
                assert same(sessions[i].logits(), alone[i][number]), (order, number, i)
        assert same(guest.logits(), fresh(model, guest_tokens))


@pytest.mark.parametrize("isa", _cpu.cpu_isas())
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "BF16", "F32"])
def test_exact_on_every_instruction_set(isa: str, name: str) -> None:
    """One session in 1, 3 and 9 rows of a step and in three chunkings: the same bits."""
    model = open_model(tiny(qtype=GGMLQuantizationType[name]), "cpu", isa=isa)[0]
    tokens = random_tokens(70, 21)
    expected = fresh(model, tokens)
    for width, cut in ((1, 1), (3, 64), (9, 33)):
        sessions = [Session(model, CTX) for _ in range(width)]
        others = [random_tokens(10 + i, 50 + i) for i in range(width)]
        step(model, *((s, tokens[:cut] if i == width // 2 else others[i]) for i, s in enumerate(sessions)))
        step(model, *((s, tokens[cut:] if i == width // 2 else [7]) for i, s in enumerate(sessions)))
        assert same(sessions[width // 2].logits(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_types_may_differ_within_one_stacked_matrix(backend: str) -> None:
    """Published files mix: value rows of a better type beside query and key rows, gate beside up."""
    small = tiny(layers=1)
    tensors = small.tensors()
    for name in ("blk.0.attn_v.weight", "blk.0.ffn_up.weight"):
        better = quantize(small.gguf_weights()[name], GGMLQuantizationType.Q8_0)
        tensors[name] = (memoryview(better.view(np.uint8).reshape(-1)), tensors[name][1], 8)
    native = _cpu.Model(_cpu.Backend(backend), "llama", small.params(), tensors)
    native.load()
    mixed = ModelHandle(native, "llama", "mixed", 16)
    tokens = random_tokens(20, 22)
    got, expected = fresh(mixed, tokens), fresh(open_model(small, "reference")[0], tokens)
    assert np.sqrt(np.mean((got - expected) ** 2)) / np.std(expected) < 5e-2
    alone = Session(mixed, CTX)
    for token in tokens:
        step(mixed, (alone, [token]))
    assert same(alone.logits(), got)


def test_prefill_chunking_is_exact(model: ModelHandle) -> None:
    tokens = random_tokens(150, 5)
    whole = fresh(model, tokens)
    for cuts in ([1, 2, 7], [64], [63, 65, 128], [149], list(range(1, 150))):
        session = Session(model, CTX)
        for first, last in itertools.pairwise([0, *cuts, 150]):
            step(model, (session, tokens[first:last]))
        assert same(session.logits(), whole), cuts


@pytest.mark.parametrize("threads", [2, 3])
def test_rows_that_go_apart_equal_those_that_go_together(threads: int) -> None:
    """Many sessions decode, forks of one base that share its last page. Their rows go through the model in parts, a
    core each, in every second of the first eight steps, and together in the others.
    """
    seed = 500 + threads
    print("seed", seed)
    rng = np.random.default_rng(seed)
    base, alone = random_tokens(70, seed), open_model(tiny(), "cpu", threads=1)[0]
    for width in (4 * threads, 17):
        model = open_model(tiny(), "cpu", threads=threads)[0]
        root = Session(model, CTX)
        step(model, (root, base))
        sessions = [Session(model, CTX) for _ in range(width)]
        for session in sessions:
            session.fork_from(root)
        script = rng.integers(0, 320, (5, width))
        for at, tokens in enumerate(script):
            step(model, *[(s, [int(t)]) for s, t in zip(sessions, tokens, strict=True)])
            for i in (0, width // threads - 1, width // threads, width - 1):
                ids = [*base, *(int(t) for t in script[: at + 1, i])]
                assert list(sessions[i].tokens) == ids
                assert same(sessions[i].logits(), fresh(alone, ids))
        assert same(root.logits(), fresh(alone, base))


@pytest.mark.parametrize("isa", ["auto", "scalar"])
def test_thread_counts_are_equal(isa: str) -> None:
    tokens = random_tokens(70, 6)
    results = [fresh(open_model(tiny(), "cpu", threads=n, isa=isa)[0], tokens) for n in (1, 2, 3)]
    assert same(results[0], results[1]) and same(results[0], results[2])


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_cpu_backend_is_close_to_the_reference(name: str) -> None:
    """Int8 activations: about 0.5 % relative error per matrix; bounded over the logits of 24 positions."""
    small = tiny(qtype=GGMLQuantizationType[name], seed=3)
    tokens = random_tokens(24, 7)
    cpu, reference = (open_model(small, backend)[0] for backend in ("cpu", "reference"))
    got, expected = fresh(cpu, tokens), fresh(reference, tokens)
    error = float(np.sqrt(np.mean((got - expected) ** 2)) / np.std(expected))
    print(f"{name}: rms error {error:.2e} of the logits' deviation")
    assert error < {"F32": 1e-4, "F16": 2e-3, "BF16": 3e-2}.get(name, 5e-2)


# ---- rewind, fork


def test_rewind_equals_a_fresh_run(model: ModelHandle) -> None:
    tokens, other = random_tokens(100, 8), random_tokens(40, 9)
    session = Session(model, CTX)
    session.sync(tokens)
    for n in (99, 65, 64, 63, 1, 0):
        assert session.can_rewind(n)
        session.rewind(n)
        assert session.n_tokens == n and session.tokens.tolist() == tokens[:n]
        with pytest.raises(SessionInvalidError):
            session.logits()
        step(model, (session, other))
        assert same(session.logits(), fresh(model, tokens[:n] + other))
        session.rewind(n)
        if n:
            session.sync(tokens[:n])
    with pytest.raises(ValueError, match="rewind to 5 tokens of a session of 0"):
        session.rewind(5)
    assert not session.can_rewind(-1)


def test_rewind_to_the_end_keeps_the_logits(model: ModelHandle) -> None:
    session = Session(model, CTX)
    session.sync([1, 2, 3])
    session.rewind(3)
    assert same(session.logits(), fresh(model, [1, 2, 3]))


@pytest.mark.parametrize("cut", [None, 120, 100, 64, 63, 1])
def test_fork_equals_a_fresh_run_and_shares_nothing(model: ModelHandle, cut: int | None) -> None:
    tokens = random_tokens(130, 10)
    source, copy = Session(model, CTX), Session(model, CTX)
    source.sync(tokens)
    copy.sync(random_tokens(90, 11))
    before = source.logits()
    copy.fork_from(source, cut)
    kept = tokens if cut is None else tokens[:cut]
    assert copy.tokens.tolist() == kept and copy.has_logits == (cut is None)
    left, right = random_tokens(70, 12), random_tokens(70, 13)
    step(model, (copy, right), (source, left))
    assert same(copy.logits(), fresh(model, kept + right))
    assert same(source.logits(), fresh(model, tokens + left))
    assert not same(before, source.logits())
    # The source goes first, the copy lives on.
    source.close()
    step(model, (copy, [7]))
    assert same(copy.logits(), fresh(model, [*kept, *right, 7]))


def test_fork_refusals_and_self(model: ModelHandle) -> None:
    session, small = Session(model, CTX), Session(model, 8)
    session.sync(random_tokens(20, 14))
    with pytest.raises(ContextLengthError):
        small.fork_from(session)
    with pytest.raises(ValueError, match="21 tokens of a session of 20"):
        small.fork_from(session, 21)
    small.fork_from(session, 8)
    assert small.n_tokens == 8
    stranger = Session(open_model(tiny(), "reference")[0], CTX)
    with pytest.raises(ValueError, match="another model"):
        stranger.fork_from(session)
    session.fork_from(session, 12)
    assert session.tokens.tolist() == random_tokens(20, 14)[:12]
    step(model, (session, [3]))
    assert same(session.logits(), fresh(model, [*random_tokens(20, 14)[:12], 3]))


# ---- sync


def test_sync_reuses_the_common_prefix(model: ModelHandle) -> None:
    session = Session(model, CTX)
    a = random_tokens(50, 15)
    assert session.sync(a) == 0
    assert session.sync(a) == 50
    assert session.sync([*a, 1, 2]) == 50
    b = [*a[:30], *random_tokens(30, 16)]
    common = next(i for i, (x, y) in enumerate(zip([*a, 1, 2], b, strict=False)) if x != y)
    assert session.sync(b) == common == session.common_prefix(a)
    assert same(session.logits(), fresh(model, b))
    # A shorter prompt: its last token is evaluated again, for the logits.
    assert session.sync(b[:40]) == 39
    assert same(session.logits(), fresh(model, b[:40]))
    # Logits that a step did not keep are made again.
    model.native.step([(session.native, [5], None, False)])
    assert not session.has_logits
    assert session.sync([*b[:40], 5]) == 40
    assert same(session.logits(), fresh(model, [*b[:40], 5]))


def test_sync_chunks_end_at_absolute_multiples(model: ModelHandle) -> None:
    tokens = random_tokens(60, 17)
    session = Session(model, CTX)
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        assert session.n_tokens == done and session.tokens.tolist() == tokens[:done]

    session.sync(tokens[:21])
    assert session.sync(tokens, progress=progress) == 21
    assert seen == [(32, 60), (48, 60), (60, 60)]
    assert same(session.logits(), fresh(model, tokens))


def test_cancel_leaves_the_finished_prefix(model: ModelHandle) -> None:
    tokens = random_tokens(60, 18)
    for polls in range(4):
        session = Session(model, CTX)
        answers = iter([False] * polls + [True])
        with pytest.raises(Cancelled):
            session.sync(tokens, cancel=lambda answers=answers: next(answers))  # type: ignore[misc]
        assert session.n_tokens == 16 * polls
        assert session.tokens.tolist() == tokens[: session.n_tokens]
        session.sync(tokens)
        assert same(session.logits(), fresh(model, tokens))


def test_cancel_before_anything_changes_nothing(model: ModelHandle) -> None:
    session = Session(model, CTX)
    session.sync([1, 2, 3])
    with pytest.raises(Cancelled):
        session.sync([9, 9], cancel=lambda: True)
    assert session.tokens.tolist() == [1, 2, 3] and session.has_logits


def test_exception_in_progress_keeps_the_prefix(model: ModelHandle) -> None:
    session = Session(model, CTX)

    def progress(done: int, total: int) -> None:
        if done == 32:
            raise KeyboardInterrupt

    tokens = random_tokens(60, 19)
    with pytest.raises(KeyboardInterrupt):
        session.sync(tokens, progress=progress)
    assert session.tokens.tolist() == tokens[:32]


def test_sync_refusals_change_nothing(model: ModelHandle) -> None:
    session = Session(model, 32)
    session.sync([1, 2, 3])
    for bad, error in (
        ([], ValueError),
        ([1, 320], ValueError),
        ([1, -1], ValueError),
        ([1, 2**40], ValueError),
        ([1, 2**80], ValueError),
        (random_tokens(33, 1), ContextLengthError),
    ):
        with pytest.raises(error):
            session.sync(bad)
        assert session.tokens.tolist() == [1, 2, 3] and session.has_logits
    session.sync(random_tokens(32, 1))
    assert session.n_tokens == session.ctx


# ---- the step's own refusals and failures


def test_bad_arguments_change_nothing(model: ModelHandle) -> None:
    a, b = Session(model, CTX), Session(model, 4)
    step(model, (a, [1, 2]), (b, [3]))
    before = a.logits(), b.logits()
    sampler = new_sampler(SamplingParams(seed=1), 320)
    native = model.native
    stranger = Session(open_model(tiny(), "reference")[0], CTX)
    good = (a.native, [5], None, False)
    cases: list[tuple[list[Any], type[Exception], str]] = [
        ([], ValueError, "without rows"),
        ([good, (b.native, [], None, False)], ValueError, "without tokens"),
        ([good, (b.native, [320], None, False)], ValueError, "token 320 at index 0"),
        ([good, (b.native, [1, -7], None, False)], ValueError, "token -7 at index 1"),
        ([good, (b.native, [2**40], None, False)], ValueError, "1099511627776"),
        ([good, (b.native, [1.5], None, False)], TypeError, "float"),
        ([good, (a.native, [6], None, False)], ValueError, "two rows"),
        ([(a.native, [5], sampler, False), (b.native, [5], sampler, False)], ValueError, "two rows"),
        ([good, (stranger.native, [6], None, False)], ValueError, "another model"),
        ([good, (b.native, [6], new_sampler(SamplingParams(), 321), False)], ValueError, "321"),
        ([good, (b.native, [1, 2, 3, 4], None, False)], ContextLengthError, "5 tokens"),
    ]
    for rows, error, message in cases:
        with pytest.raises(error, match=message):
            native.step(rows)
        assert a.tokens.tolist() == [1, 2] and b.tokens.tolist() == [3]
        assert same(a.logits(), before[0]) and same(b.logits(), before[1])
    step(model, (a, [5]))
    assert same(a.logits(), fresh(model, [1, 2, 5]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_failure_clears_every_member_and_nobody_else(backend: str) -> None:
    """Walks every operation of a step: each one fails once. Afterwards the same sessions work again."""
    model, device = open_model(tiny(layers=1), backend, faulty=True)
    a, b, outsider = (Session(model, CTX) for _ in range(3))
    outsider.sync([4, 5])
    expected = outsider.logits()
    survived = 0
    for operation in range(200):
        a.sync([1, 2, 3])
        b.sync([7])
        device.fail_after(operation)
        try:
            step(model, (a, [9]), (b, random_tokens(5, 1)))
        except EngineError:
            assert a.n_tokens == b.n_tokens == 0 and not a.has_logits and not b.has_logits
            assert outsider.tokens.tolist() == [4, 5] and same(outsider.logits(), expected)
        else:
            survived = operation
            break
        finally:
            device.fail_after(-1)
    assert survived > 10  # the plan reached past the step's last operation
    step(model, (outsider, [6]))
    plain = open_model(tiny(layers=1), backend)[0]
    assert same(a.logits(), fresh(plain, [1, 2, 3, 9]))
    assert same(outsider.logits(), fresh(plain, [4, 5, 6]))


def test_failure_in_sync_clears(model: ModelHandle) -> None:
    faulty, device = open_model(tiny(), "reference", faulty=True)
    session = Session(faulty, CTX)
    session.sync([1, 2])
    device.fail_after(5)
    with pytest.raises(EngineError, match=r"injected failure|bad_alloc"):
        session.sync([1, 2, 3])
    assert session.n_tokens == 0
    session.sync([1, 2, 3])


# ---- sampling in the step


def test_sampling_in_the_step_equals_sampling_its_logits(model: ModelHandle) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=11, logprobs=3, repetition_penalty=1.1)
    a, b = Session(model, CTX), Session(model, CTX)
    inside, outside = new_sampler(params, 320), new_sampler(params, 320)
    tokens: list[int] = [1, 2, 3]
    for _ in range(6):
        [(token, logprobs), (nothing, none)] = model.native.step(
            [(a.native, tokens, inside, False), (b.native, tokens, None, True)]
        )
        assert (nothing, none) == (None, None) and not a.has_logits
        assert (token, logprobs) == outside.sample(b.logits())
        assert token is not None and logprobs is not None and len(logprobs[1]) == 3
        tokens = [token]
    everything = np.zeros(10, np.uint32)
    inside.set_mask(everything)
    assert model.native.step([(a.native, tokens, inside, True)]) == [(-1, None)]
    assert a.has_logits


# ---- memory and lifetime


def test_memory_grows_with_use_and_is_given_back(model: ModelHandle) -> None:
    session = Session(model, 100_000)
    empty = session.resident_bytes
    full = model.native.state_bytes(100_000)
    assert empty < full / 20
    session.sync(random_tokens(200, 20))
    assert empty < session.resident_bytes < full / 10
    session.clear()
    assert session.resident_bytes <= empty + 64 * model.native.state_bytes(1) + 4 * 1024


def test_a_closed_session_says_so(model: ModelHandle) -> None:
    session = Session(model, CTX)
    session.close()
    session.close()
    with pytest.raises(SessionInvalidError, match="closed"):
        session.sync([1])


def test_sessions_outlive_their_model() -> None:
    model, device = open_model(tiny(), "reference")
    session = Session(model, CTX)
    native = model.native
    del model, device
    native.step([(session.native, [1, 2], None, True)])
    del native
    session.clear()
    with pytest.raises(ValueError, match="a context of 0"):
        _cpu.Session(open_model(tiny(), "reference")[0].native, 0)


# ---- threads


def test_the_gil_is_released_in_a_step() -> None:
    model, _ = open_model(tiny(), "reference")
    session = Session(model, CTX)
    tokens = random_tokens(200, 23)
    entered, left = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        step(model, (session, tokens))
        left.set()

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait()
    seen = 0
    while not left.is_set():
        seen += session.n_tokens == 0  # readable beside the running step
    thread.join()
    assert seen > 20 and session.n_tokens == 200


def test_other_threads_may_use_other_sessions(model: ModelHandle) -> None:
    """The backend's lock keeps a step and the copies and saves of other sessions apart."""
    tokens = random_tokens(50, 24)
    expected = fresh(model, tokens)
    source = Session(model, CTX)
    source.sync(tokens)
    errors: list[BaseException] = []

    def copy_and_save() -> None:
        try:
            for _ in range(20):
                copy, file = Session(model, CTX), io.BytesIO()
                copy.fork_from(source)
                copy.save(file)
                file.seek(0)
                other = Session(model, CTX)
                other.load(file)
                assert same(other.logits(), expected)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=copy_and_save) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        assert same(fresh(model, tokens), expected)
    for thread in threads:
        thread.join()
    assert not errors
