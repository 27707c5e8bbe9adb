"""Flags of ds4-server: every mistake is one line and exit 2; environment, files and help."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4.cli.flags import Flag, HelpWanted, help_text, parse_flags
from ds4.cli.server import SERVER_FLAGS, TOPICS, main, read_config
from ds4.engine.types import EngineConfig, SamplingParams
from ds4.errors import ConfigError
from ds4.server.config import ServerConfig
from ds4.server.kvpolicy import KvConfig


def test_defaults_are_those_of_the_dataclasses() -> None:
    assert read_config([], {}) == ServerConfig()


def test_every_flag_reaches_the_configuration(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    argv = (
        f"-m {model} --backend reference -c 4096 -t 3 --prefill-chunk 64 --isa avx2 --warm-weights --no-memory-check "
        "--batched-session 16 --snapshots 2 --mixed-prefill-quantum 32 --log-format json --host 0.0.0.0 --port 9000 "
        "--api-key a --api-key b --allowed-host box --cors --alias tiny -n 100 --timings --allow-special-in-text "
        "--template official --tool-memory-max-ids 5 --disable-exact-dsml-tool-replay "
        "--trace t.txt --keepalive-seconds 2 --drain-seconds 3 --temp 0.5 --top-p 0.9 --top-k 40 --min-p 0 "
        "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3"
    )
    assert read_config(argv.split(), {}) == ServerConfig(
        engine=EngineConfig(
            model=model,
            backend="reference",
            ctx=4096,
            slots=16,
            snapshots=2,
            threads=3,
            prefill_chunk=64,
            isa="avx2",
            warm_weights=True,
            check_memory=False,
        ),
        host="0.0.0.0",
        port=9000,
        cors=True,
        api_keys=("a", "b"),
        allowed_hosts=("box",),
        alias="tiny",
        max_output_tokens=100,
        mixed_prefill_quantum=32,
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.0,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
        ),
        timings=True,
        tool_memory_ids=5,
        exact_tool_replay=False,
        allow_special_in_text=True,
        template="official",
        keepalive_seconds=2.0,
        drain_seconds=3.0,
        log_format="json",
        trace=Path("t.txt"),
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mtp-draft", "17"], "--mtp-draft: expected an integer from 1 to 16, got 17"),
        (["--mtp-margin", "-1"], "--mtp-margin: expected a number from 0 to 1000, got -1"),
        (["--dspark-confidence", "2"], "--dspark-confidence: expected a number from 0 to 1, got 2"),
        (["--port", "99999"], "--port: expected an integer from 0 to 65535, got 99999"),
        (["--port=x"], "--port: expected an integer, got 'x'"),
        (["--port"], "--port needs a value: --port N"),
        (["--cors=1"], "--cors takes no value, got '1'"),
        (["--prot", "1"], "unknown option --prot (did you mean --port?)"),
        (["model.gguf"], "unexpected argument 'model.gguf'"),
        (["--ctx", "-1"], "--ctx: expected an integer >= 0, got -1"),
        (["--temp", "nan"], "--temp: expected a number from 0 to 100, got nan"),
        (["--backend", "metal"], "--backend: expected one of auto, cpu, cuda, reference, got 'metal'"),
        (["--model", "/no/such.gguf"], "--model /no/such.gguf: no such file or directory"),
        (["--chdir", "/no/such"], "--chdir /no/such: No such file or directory"),
        (["--api-key-file", "/no/such"], "--api-key-file /no/such: No such file or directory"),
        (["--api-key", " "], "--api-key: expected a value, got an empty one"),
        (["--help", "nonsense"], "no help topic 'nonsense' (topics: all, runtime, drafts, api, kv-cache, sampling)"),
    ],
)
def test_mistakes(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"ds4-server: {message}\n")


def test_drafts() -> None:
    argv = "--mtp --mtp-model head.gguf --mtp-draft 4 --mtp-margin 1.5 --mtp-timing --mtp-exact-sampling"
    config = read_config(argv.split(), {})
    assert config.engine == EngineConfig(mtp=True, mtp_model=Path("head.gguf"), mtp_draft=4, mtp_margin=1.5)
    assert config.draft_timing
    config = read_config(["--dspark-strict"], {"DS4_DSPARK": "1", "DS4_DSPARK_CONFIDENCE": "0.5"})
    assert config.engine == EngineConfig(dspark=True, dspark_confidence=0.5, speculate=False)
    assert not read_config(["--mtp", "--mtp-spec-disable"], {}).engine.speculate


def test_environment_gives_defaults_and_flags_win() -> None:
    environ = {"DS4_PORT": "9001", "DS4_CORS": "yes", "DS4_API_KEY": "a, b", "DS4_TEMP": "0.1", "DS4_CTX": ""}
    config = read_config(["--port", "9002"], environ)
    assert (config.port, config.cors, config.api_keys) == (9002, True, ("a", "b"))
    assert config.sampling.temperature == 0.1
    assert config.engine.ctx == 0


def test_every_long_name_is_a_variable() -> None:
    for name in ("DS4_KV_DISK_SPACE_MB", "DS4_KV_CACHE_BUDGET_MB"):
        kv = read_config(["--kv-disk-dir", "d"], {name: "5"}).kv
        assert kv is not None and kv.budget_bytes == 5 << 20
    assert read_config([], {"DS4_DEFAULT_TEMPERATURE": "0.25"}).sampling.temperature == 0.25
    assert not read_config([], {"DS4_DISABLE_EXACT_DSML_TOOL_REPLAY": "yes"}).exact_tool_replay
    with pytest.raises(ConfigError, match=r"^DS4_KV_DISK_SPACE_MB: expected an integer, got 'x'"):
        read_config([], {"DS4_KV_DISK_SPACE_MB": "x"})
    variables = [variable for flag in SERVER_FLAGS for variable in flag.variables]
    assert len(set(variables)) == len(variables)


def test_a_flag_beats_the_variable_of_another_flag_for_the_same_field() -> None:
    assert read_config(["--cpu"], {"DS4_BACKEND": "reference"}).engine.backend == "cpu"
    assert read_config([], {"DS4_BACKEND": "reference"}).engine.backend == "reference"
    assert read_config([], {"DS4_CORS": "0"}).cors is False


@pytest.mark.parametrize("environ", [{"DS4_PORT": "x"}, {"DS4_CORS": "maybe"}])
def test_mistakes_in_the_environment_name_the_variable(environ: dict[str, str]) -> None:
    (name,) = environ
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        read_config([], environ)


def test_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\n one \n\ntwo\n")
    assert read_config(["--api-key-file", str(file), "--api-key", "zero"], {}).api_keys == ("zero", "one", "two")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no key in it"):
        read_config(["--api-key-file", str(file)], {})


def test_chdir_comes_before_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())
    (tmp_path / "m.gguf").touch()
    assert read_config(["--model", "m.gguf", "--chdir", str(tmp_path)], {}).engine.model == Path("m.gguf")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("usage: ds4-server")
    for flag in SERVER_FLAGS:
        assert flag.names[0] in out
        assert flag.topic in TOPICS
    assert "  --port N                      port to listen on; 0 takes a free one [8000]\n" in out
    assert main(["-h", "sampling"]) == 0
    out, _ = capsys.readouterr()
    assert "--top-k" in out
    assert "--port" not in out


def test_names_and_variables_are_unique() -> None:
    names = [name for flag in SERVER_FLAGS for name in flag.names]
    assert len(set(names)) == len(names)


def test_help_after_other_flags_and_as_last_word() -> None:
    for argv, topic in ((["--port", "1", "-h"], ""), (["--help", "api"], "api"), (["-h", "--port"], "")):
        with pytest.raises(HelpWanted) as wanted:
            parse_flags(SERVER_FLAGS, argv, {})
        assert wanted.value.topic == topic


def test_long_names_wrap() -> None:
    flag = Flag(("--a-very-long-flag-name-indeed",), "x", "text", "NUMBER", topic="t")
    assert help_text("p", "i", [flag], {"t": "T"}, "t") == "T:\n  --a-very-long-flag-name-indeed NUMBER\n      text\n"


def test_web_pages_do_not_open_the_address() -> None:
    config = read_config(["--cors"], {})
    assert (config.host, config.port, config.cors) == ("127.0.0.1", 8000, True)


def test_loopback() -> None:
    hosts = {"127.0.0.1": True, "localhost": True, "::1": True, "[::1]": True, "0.0.0.0": False, "box": False}
    assert {host: ServerConfig(host=host).loopback for host in hosts} == hosts


def test_checkpoints_on_disk(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_config([], {}).kv is None
    assert read_config(["--kv-cache-min-tokens", "100"], {}).kv is None, "nothing without a directory"
    kv = read_config(["--kv-disk-dir", "/d"], {}).kv
    assert kv == KvConfig(Path("/d"), 4096 << 20, 512, 30000, 10000, 32, 2048, False)
    kv = read_config(
        ["--kv-disk-dir", "/d", "--kv-disk-space-mb", "7", "--kv-disk-read-only", "--kv-cache-cold-max-tokens", "0"],
        {"DS4_KV_CACHE_BOUNDARY_ALIGN_TOKENS": "0"},
    ).kv
    assert kv == KvConfig(Path("/d"), 7 << 20, cold_max=0, boundary_align=0, read_only=True)
    assert main(["--kv-disk-dir", "/d", "--kv-cache-cold-max-tokens", "100"]) == 2
    assert "expected 0 or at least the minimum of 512, got 100" in capsys.readouterr().err
    assert main(["--kv-cache-min-tokens", "0"]) == 2
