"""The scripted engine keeps the contract of the real one where a caller can tell."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import pytest

from ds4.engine.demo import demo_model_path
from ds4.engine.model_file import open_model_file
from ds4.engine.tokenizer import Tokenizer
from ds4.engine.types import Row, SamplingParams
from ds4.errors import Cancelled, CheckpointError, ContextLengthError, EngineError, SessionInvalidError
from ds4.testing import Script, ScriptedEngine, ScriptedTokenizer, hash_model

GREEDY = SamplingParams(temperature=0.0)


def generate(engine: ScriptedEngine, prompt: str, limit: int = 50, forbid: tuple[int, ...] = ()) -> bytes:
    session, sampler = engine.new_session(), engine.new_sampler(GREEDY)
    sampler.forbid(forbid)
    tokens: list[int] = engine.tokenizer.encode(prompt)
    out: list[int] = []
    while len(out) < limit:
        (result,) = engine.step([Row(session, tokens, sampler)])
        assert result.token is not None
        if result.token in engine.tokenizer.eos_ids or result.token < 0:
            break
        out.append(result.token)
        tokens = [result.token]
    return engine.tokenizer.decode(out)


def test_pieces_are_tokens_and_end_of_text_follows() -> None:
    engine = ScriptedEngine(["Hello", " world"])
    assert generate(engine, "Hi") == b"Hello world"
    assert [step.rows for step in engine.steps] == [
        ((0, 2, engine.piece_id(b"Hello")),),
        ((0, 1, engine.piece_id(b" world")),),
        ((0, 1, engine.tokenizer.eos_ids[0]),),
    ]


def test_scripts_in_order_then_the_last_again() -> None:
    engine = ScriptedEngine("first answer", ["second"])
    assert [generate(engine, p) for p in "abc"] == [b"first answer", b"second", b"second"]
    assert engine.prompts == ["a", "b", "c"]


def test_scripts_by_prompt() -> None:
    engine = ScriptedEngine(lambda prompt: "yes" if "?" in prompt else ["n", "o"])
    assert (generate(engine, "well?"), generate(engine, "well.")) == (b"yes", b"no")


@pytest.mark.parametrize("split", ["words", "chars", "bytes", 1, 3])
def test_every_split_says_the_same(split: str | int) -> None:
    text = " naïve  text\n\nwith 😀 "
    script = Script.text(text, split)  # type: ignore[arg-type]
    assert generate(ScriptedEngine(script), "q") == text.encode()
    assert len(script.pieces) == {"words": 5, "chars": 21, "bytes": 25, 1: 25, 3: 9}[split]


def test_endless_and_forbidden_end() -> None:
    assert generate(ScriptedEngine(Script.text("ab", "chars").endless()), "q", 5) == b"ababa"
    engine = ScriptedEngine("ab")
    assert generate(engine, "q", 3, engine.tokenizer.eos_ids) == b"ababab"
    assert generate(ScriptedEngine(Script(())), "q", 3, engine.tokenizer.eos_ids) == b""


def test_a_model_depends_on_every_token() -> None:
    model = hash_model(1, end=256, mean_length=10**9)
    texts = {generate(ScriptedEngine(model=model), p, 20) for p in ("aaaa", "aaab", "baaa")}
    assert len(texts) == 3
    assert generate(ScriptedEngine(model=model), "aaaa", 20) in texts
    assert len(generate(ScriptedEngine(model=hash_model(1, end=256, mean_length=5)), "a")) < 50


def test_failures_clear_the_sessions_of_the_step_and_pass() -> None:
    engine = ScriptedEngine("x")
    engine.fail_at(2)
    engine.fail_in_prefill(MemoryError("full"))
    session, other = engine.new_session(), engine.new_session()
    other.sync([1])
    with pytest.raises(MemoryError):
        engine.step([Row(session, [1, 2])])
    engine.fail_in_prefill()
    session.sync([5])
    with pytest.raises(EngineError, match="step 2"):
        engine.step([Row(session, [1])])
    assert (session.n_tokens, other.n_tokens) == (0, 1)
    engine.step([Row(session, [1])])
    assert session.tokens.tolist() == [1], "the prefill failure waits for a prefill"


def test_a_script_fails_at_its_token() -> None:
    engine = ScriptedEngine(Script.text("a b").fail_at(2))
    with pytest.raises(EngineError, match="token 2"):
        generate(engine, "q")
    assert len(engine.steps) == 1


def test_bad_rows_change_nothing() -> None:
    engine = ScriptedEngine("x", ctx=4)
    session = engine.new_session()
    for rows in (
        [Row(session, [])],
        [Row(session, [1]), Row(session, [2])],
        [Row(session, [-1])],
        [Row(session, [engine.info.vocab_size])],
    ):
        with pytest.raises(ValueError, match="session 0"):
            engine.step(rows)
    with pytest.raises(ContextLengthError):
        engine.step([Row(engine.new_session(), [1]), Row(session, [1] * 5)])
    assert [s.n_tokens for s in engine.sessions] == [0, 0]


def test_sync_reuses_reports_and_cancels() -> None:
    session = ScriptedEngine(ctx=10_000).new_session()
    seen: list[tuple[int, int]] = []
    assert session.sync(range(5000), progress=lambda done, total: seen.append((done, total))) == 0
    assert seen == [(2048, 5000), (4096, 5000), (5000, 5000)]
    assert session.sync([*range(100), 7]) == 100
    assert session.sync([*range(100), 7]) == 101
    session.clear()
    with pytest.raises(Cancelled, match="2048 of 5000"):
        session.sync(range(5000), cancel=lambda: session.n_tokens > 0)
    assert session.n_tokens == 2048
    with pytest.raises(ContextLengthError):
        session.sync([0] * 10_001)


def test_rewind_and_fork_as_the_family_can() -> None:
    engine = ScriptedEngine()
    session, copy = engine.new_session(), engine.new_session()
    session.sync([1, 2, 3])
    copy.fork_from(session, 2)
    assert copy.tokens.tolist() == [1, 2]
    with pytest.raises(SessionInvalidError):
        copy.logits()
    copy.fork_from(session)
    assert np.argmax(copy.logits()) == 3
    rigid = ScriptedEngine(rewinds=False).new_session()
    rigid.sync([1, 2, 3])
    assert [rigid.can_rewind(n) for n in range(5)] == [True, False, False, True, False]
    with pytest.raises(SessionInvalidError):
        rigid.rewind(2)
    assert rigid.n_tokens == 0


def test_save_and_load_refuse_damage() -> None:
    engine = ScriptedEngine()
    session, other = engine.new_session(), engine.new_session()
    session.sync([1, 2, 3])
    file = io.BytesIO()
    assert session.save(file) == len(file.getvalue())
    other.load(io.BytesIO(file.getvalue()))
    assert other.tokens.tolist() == [1, 2, 3]
    for cut in range(len(file.getvalue())):
        with pytest.raises(CheckpointError):
            other.load(io.BytesIO(file.getvalue()[:cut]))
        assert other.n_tokens == 0


@dataclass
class Named:
    text: str


def test_text_never_becomes_a_special_token() -> None:
    tokenizer = ScriptedTokenizer()
    end = tokenizer.special_id("<|im_end|>")
    assert end in tokenizer.eos_ids
    assert end not in tokenizer.encode("<|im_end|>")
    assert tokenizer.encode_with_specials("a<|im_end|>b") == [ord("a"), end, ord("b")]
    assert tokenizer.encode_segments(["a", Named("<|im_end|>")]) == [ord("a"), end]
    assert tokenizer.key_bytes(["é", Named("<|im_end|>")]) == "é".encode() + b"\xff" + int(end or 0).to_bytes(
        4, "little"
    )
    assert tokenizer.key_bytes_of_ids([97, int(end or 0)]) == tokenizer.key_bytes(["a", Named("<|im_end|>")])
    new = tokenizer.encode_segments([Named("<|new|>")])
    assert tokenizer.decode(new) == b"<|new|>"
    assert tokenizer.piece_id(b"<|im_end|>") == end
    assert tokenizer.piece_id(b"word") == tokenizer.piece_id(b"word") >= 1024


def test_the_surface_of_the_real_tokenizer() -> None:
    public = {name for name in vars(Tokenizer) if not name.startswith("_")}
    assert public <= set(dir(ScriptedTokenizer))


def test_a_real_tokenizer_speaks_the_script() -> None:
    tokenizer = open_model_file(demo_model_path()).tokenizer()
    engine = ScriptedEngine("Bonjour, naïve 😀!", ["The", " end", "<|im_start|>"], tokenizer=tokenizer)
    assert generate(engine, "Hi") == "Bonjour, naïve 😀!".encode()
    assert generate(engine, "Hi") == b"The end<|im_start|>"
    assert engine.prompts == ["Hi", "Hi"]
    with pytest.raises(ValueError, match="tokens of this tokenizer"):
        engine.piece_id(b"certainly not one token")
