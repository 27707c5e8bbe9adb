"""The `ds4` program from its command line: flags, prompts, exit codes, logits."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ds4.cli import main as program
from ds4.cli.flags import parse_flags
from ds4.cli.main import FLAGS, chat_config, effort_for, main, read_prompt, system_text
from ds4.cli.terminal import TerminalOutput, progress_line
from ds4.errors import ConfigError
from ds4.prompt.registry import MAX_EFFORT_CONTEXT, SYNTAXES


def values(*argv: str) -> dict[str, object]:
    return dict(parse_flags(FLAGS, argv, {}))


def test_defaults_and_flags_reach_the_configuration() -> None:
    config = chat_config(values("-p", "hi"))
    assert (config.prompt, config.system, config.max_tokens, config.raw, config.effort) == (
        "hi",
        None,
        50_000,
        False,
        "high",
    )
    config = chat_config(
        values("-p", "x", "--temp", "0", "--seed", "7", "-c", "100", "-t", "1", "--nothink", "--raw", "-n", "5")
    )
    assert (config.sampling.temperature, config.sampling.seed, config.engine.ctx, config.engine.threads) == (
        0.0,
        7,
        100,
        1,
    )
    assert (config.effort, config.raw, config.max_tokens) == ("none", True, 5)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nope"], "unknown option --nope"),
        (["-n", "0"], ">= 1, got 0"),
        (["--temp", "200"], "from 0 to 100"),
        (["--prompt"], "needs a value"),
        (["--help", "nothing"], "no help topic 'nothing'"),
        (["-m", "/does/not/exist.gguf", "-p", "x"], "/does/not/exist.gguf"),
        (["logits", "/does/not/exist.gguf", "--tokens", "/none.npy", "--out", "/tmp/x.npy"], "/none.npy"),
    ],
)
def test_mistakes_are_one_line_and_a_status(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) in (1, 2)
    out = capsys.readouterr()
    assert out.out == "" and out.err.startswith("ds4: ") and said in out.err and out.err.count("\n") == 1


def test_help_names_every_flag_and_backends_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for flag in FLAGS for name in flag.names)
    assert main(["--backends"]) == 0
    text = capsys.readouterr().out
    assert "cpu    usable" in text and "\ncuda   " in text and "\nmetal  missing" in text
    assert main(["--version"]) == 0


def test_prompt_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p.txt"
    file.write_text("from file\n")
    assert read_prompt(values("--prompt-file", str(file))) == "from file\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    assert read_prompt(values()) == "from stdin"
    with pytest.raises(ConfigError, match="exclude each other"):
        read_prompt(values("-p", "x", "--prompt-file", str(file)))
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="byte 0"):
        read_prompt(values("--prompt-file", str(file)))


def test_efforts(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, effort in (
        ([], "high"),
        (["--think"], "high"),
        (["--think-max"], "max"),
        (["--nothink"], "none"),
        (["--think-level", "0"], 0),
        (["--think-level", "42"], 42),
    ):
        assert chat_config(values("-p", "x", *argv)).effort == effort
    for level in ("101", "-1", "x"):
        with pytest.raises(ConfigError, match="--think-level: expected an integer"):
            values("--think-level", level)
    levels = {name for name, syntax in SYNTAXES.items() if syntax.levels}
    assert levels == {"deepseek41"}
    for name, syntax in SYNTAXES.items():
        if name in levels:
            assert (effort_for(42, syntax, 100), effort_for(0, syntax, 100)) == (42, 0)
        else:
            with pytest.raises(ConfigError, match="--think-level: this model takes no numeric effort"):
                effort_for(42, syntax, 100)
        assert effort_for("high", syntax, 100) == ("high" if syntax.thinking else "none")
    assert capsys.readouterr().err == ""
    assert effort_for("max", SYNTAXES["deepseek4"], MAX_EFFORT_CONTEXT) == "max"
    assert effort_for("max", SYNTAXES["deepseek4"], MAX_EFFORT_CONTEXT - 1) == "high"
    assert capsys.readouterr().err == "ds4: --think-max is served as --think: context 393215 is below 393216\n"


def test_system_text_of_a_syntax() -> None:
    assert system_text(None, "chatml") == "" and system_text(None, "deepseek4") == program.DEFAULT_SYSTEM
    assert system_text("", "deepseek4") == "" and system_text("S", "chatml") == "S"


def test_one_shot_on_the_demo_model() -> None:
    """In a process of its own: stdout is the answer alone, stderr the cost."""
    command = [sys.executable, "-m", "ds4.cli.main", "-p", "Say hello.", "--temp", "0", "-n", "8", "-c", "512"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "\x1b" not in done.stdout + done.stderr
    assert done.stderr.startswith("ds4: prefill: ") and done.stderr.endswith("t/s\n")


def test_logits_are_the_same_in_any_chunking(tmp_path: Path) -> None:
    from ds4.engine.demo import demo_model_path

    ids = np.array([1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511], dtype=np.int64)
    np.save(tmp_path / "ids.npy", ids)
    outs = []
    for chunk in (1, 4, 512):
        out = tmp_path / f"{chunk}.npy"
        argv = ["logits", str(demo_model_path()), "--tokens", str(tmp_path / "ids.npy"), "--out", str(out)]
        assert main([*argv, "--chunk", str(chunk)]) == 0
        outs.append(np.load(out))
    assert outs[0].shape == (len(ids), 49152) and outs[0].dtype == np.float32 and np.isfinite(outs[0]).all()
    assert (outs[0] == outs[1]).all() and (outs[0] == outs[2]).all()


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.int32), np.zeros(3, np.float32), np.zeros(0, np.int32)])
def test_logits_refuse_other_arrays(array: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "ids.npy", array)
    assert main(["logits", "x.gguf", "--tokens", str(tmp_path / "ids.npy"), "--out", str(tmp_path / "o.npy")]) == 2
    assert "one-dimensional integer array" in capsys.readouterr().err


def test_progress_line() -> None:
    assert progress_line(0, 100, 1.0).count("█") == 1
    half = progress_line(50, 100, 2.0)
    assert half.count("█") == 16 and " 25 t/s " in half and half.endswith("50.0%")
    assert progress_line(100, 100, 1.0).count("█") == 32


def test_redirected_output_has_no_reasoning_and_no_codes() -> None:
    out, err = io.StringIO(), io.StringIO()
    terminal = TerminalOutput(out, err)
    terminal.begin()
    terminal.prefill(1, 10)
    terminal.reasoning("hidden")
    terminal.content("shown")
    terminal.end()
    assert out.getvalue() == "shown\n" and err.getvalue() == ""
