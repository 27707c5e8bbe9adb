"""`ds4-server`: flags to configuration, an open engine, a running server, an exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ds4.cli.flags import (
    DRAFT_FLAGS,
    ENGINE_FLAGS,
    SAMPLING_FLAGS,
    Flag,
    HelpWanted,
    choice,
    help_text,
    integer,
    nonempty,
    number,
    parse_flags,
    path,
)
from ds4.cli.program import run_program
from ds4.cli.terminal import work_bar
from ds4.engine.types import EngineConfig, SamplingParams
from ds4.errors import ConfigError
from ds4.prompt.registry import TEMPLATES
from ds4.server.config import ServerConfig
from ds4.server.kvpolicy import KvConfig

PROGRAM = "ds4-server"

_INTRO = """Serves a local model to clients of OpenAI (/v1/chat/completions, /v1/completions, /v1/responses) and of
Anthropic (/v1/messages); /openapi.json describes all endpoints. With no --model it serves a small demo model."""

TOPICS = {
    "runtime": "Model and engine",
    "drafts": "Guessing ahead (speculative decoding)",
    "api": "HTTP and API",
    "kv-cache": "Checkpoints on disk",
    "sampling": "Sampling defaults of requests",
}

KV_FLAGS = (
    Flag(
        ("--kv-disk-dir",),
        "kv_directory",
        "keep checkpoints of sessions in this directory",
        "DIR",
        path,
        None,
        "kv-cache",
        shown="none are kept",
    ),
    Flag(
        ("--kv-cache-budget-mb", "--kv-disk-space-mb"),
        "kv_budget_mib",
        "most space for checkpoints, in MiB",
        "N",
        integer(0, 1 << 30),
        4096,
        "kv-cache",
    ),
    Flag(
        ("--kv-disk-read-only",),
        "kv_read_only",
        "use the checkpoints of another server's directory, write none",
        default=False,
        topic="kv-cache",
    ),
    Flag(
        ("--kv-cache-min-tokens",),
        "kv_min_tokens",
        "shorter sessions are neither stored nor loaded",
        "N",
        integer(1, 1 << 30),
        512,
        "kv-cache",
    ),
    Flag(
        ("--kv-cache-cold-max-tokens",),
        "kv_cold_max",
        "longest new prompt that is stored before its answer; 0: none",
        "N",
        integer(0, 1 << 30),
        30000,
        "kv-cache",
    ),
    Flag(
        ("--kv-cache-continued-interval-tokens",),
        "kv_continued_interval",
        "store a growing session about this often; 0: never",
        "N",
        integer(0, 1 << 30),
        10000,
        "kv-cache",
    ),
    Flag(
        ("--kv-cache-boundary-trim-tokens",),
        "kv_boundary_trim",
        "tokens at the end of a prompt that are not stored",
        "N",
        integer(0, 1 << 30),
        32,
        "kv-cache",
    ),
    Flag(
        ("--kv-cache-boundary-align-tokens",),
        "kv_boundary_align",
        "store multiples of this many tokens; 0: any number",
        "N",
        integer(0, 1 << 30),
        2048,
        "kv-cache",
    ),
    Flag(
        ("--kv-cache-reject-different-quant",),
        "kv_reject_quant",
        "always so: checkpoints of other weights are never used",
        default=True,
        topic="kv-cache",
    ),
)

SERVER_FLAGS = (
    *ENGINE_FLAGS,
    Flag(
        ("--batched-session",), "slots", "resident sessions that are served at the same time", "N", integer(1, 4096), 1
    ),
    Flag(
        ("--snapshots",),
        "snapshots",
        "copies that a session keeps of itself where its family cannot be cut back; 0: none",
        "N",
        integer(0, 64),
        4,
    ),
    Flag(
        ("--mixed-prefill-quantum",),
        "mixed_prefill_quantum",
        "most prompt tokens per step while something decodes",
        "N",
        integer(0, 65536),
        0,
        shown="a quarter of a prefill chunk",
    ),
    Flag(("--chdir",), "chdir", "change to this directory before anything else", "DIR", path),
    Flag(("--log-format",), "log_format", "text or json", "NAME", choice("text", "json"), "text"),
    Flag(
        ("--trace",),
        "trace",
        "write all requests, prompts and outputs to this file, which is emptied",
        "FILE",
        path,
    ),
    Flag(("--host",), "host", "address to listen on; 0.0.0.0 for the network", "HOST", nonempty, "127.0.0.1", "api"),
    Flag(("--port",), "port", "port to listen on; 0 takes a free one", "N", integer(0, 65535), 8000, "api"),
    Flag(("--api-key",), "api_keys", "accept only requests with this key", "KEY", nonempty, (), "api", repeat=True),
    Flag(("--api-key-file",), "api_key_file", "file with one key per line", "FILE", path, None, "api"),
    Flag(
        ("--allowed-host",),
        "allowed_hosts",
        "a further Host name that a loopback server answers to",
        "NAME",
        nonempty,
        (),
        "api",
        repeat=True,
    ),
    Flag(("--cors",), "cors", "allow requests from web pages", default=False, topic="api"),
    Flag(("--alias",), "alias", "model id shown to clients", "NAME", nonempty, None, "api", shown="the model's own"),
    Flag(
        ("--tokens", "-n"),
        "max_output_tokens",
        "most output tokens when the client gives no limit",
        "N",
        integer(1, 2**31 - 1),
        393216,
        "api",
    ),
    Flag(("--timings",), "timings", "put timings into every usage object", default=False, topic="api"),
    Flag(
        ("--tool-memory-max-ids",),
        "tool_memory_ids",
        "tool calls whose exact text is remembered",
        "N",
        integer(1, 10**8),
        100_000,
        "api",
    ),
    Flag(
        ("--disable-exact-tool-replay", "--disable-exact-dsml-tool-replay"),
        "exact_tool_replay",
        "render calls of the history anew",
        default=True,
        topic="api",
        stores=False,
    ),
    Flag(
        ("--template",),
        "template",
        "prompts as ds4 or as the model's maker (official) draws them",
        "NAME",
        choice(*TEMPLATES),
        "ds4",
        "api",
    ),
    Flag(
        ("--allow-special-in-text",),
        "allow_special_in_text",
        "let message text produce control tokens (unsafe)",
        default=False,
        topic="api",
    ),
    Flag(
        ("--keepalive-seconds",),
        "keepalive_seconds",
        "longest silence of a waiting stream",
        "F",
        number(0.1, 3600),
        5.0,
        "api",
    ),
    Flag(
        ("--drain-seconds",),
        "drain_seconds",
        "what running requests get at shutdown",
        "F",
        number(0, 86400),
        30.0,
        "api",
    ),
    *DRAFT_FLAGS,
    *KV_FLAGS,
    *SAMPLING_FLAGS,
)


def read_config(argv: Sequence[str], environ: Mapping[str, str]) -> ServerConfig:
    """The configuration of a command line. Changes the directory where --chdir says so. Raises ConfigError."""
    values: dict[str, Any] = parse_flags(SERVER_FLAGS, argv, environ)
    directory: Path | None = values.pop("chdir")
    if directory is not None:
        try:
            os.chdir(directory)
        except OSError as error:
            raise ConfigError(f"--chdir {directory}: {error.strerror}") from None
    model: Path | None = values["model"]
    if model is not None and not model.exists():
        raise ConfigError(f"--model {model}: no such file or directory")
    key_file: Path | None = values.pop("api_key_file")
    if key_file is not None:
        values["api_keys"] = (*values["api_keys"], *_read_keys(key_file))
    values.pop("mtp_exact")
    kv = _kv_config(values)
    return ServerConfig(
        kv=kv,
        engine=EngineConfig(**_taken(values, EngineConfig)),
        sampling=SamplingParams(**_taken(values, SamplingParams)),
        **values,
    )


def _taken(values: dict[str, Any], target: type[Any]) -> dict[str, Any]:
    """The values that are fields of a dataclass, removed from `values`."""
    return {field.name: values.pop(field.name) for field in fields(target) if field.name in values}


def _kv_config(values: dict[str, Any]) -> KvConfig | None:
    """Takes the checkpoint flags out of `values`."""
    taken = {name.removeprefix("kv_"): values.pop(name) for name in list(values) if name.startswith("kv_")}
    if not taken.pop("reject_quant"):
        raise ConfigError("--kv-cache-reject-different-quant: cannot be off, expected 1")
    # 0 is the default too, as in older command lines.
    budget = (taken.pop("budget_mib") or 4096) << 20
    directory: Path | None = taken.pop("directory")
    return None if directory is None else KvConfig(directory, budget, **taken)


def _read_keys(file: Path) -> tuple[str, ...]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--api-key-file {file}: {reason}") from None
    keys = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {file}: no key in it")
    return keys


async def _serve(config: ServerConfig) -> None:
    from ds4.server import process
    from ds4.server.bind import check_address

    check_address(config.host, config.port)
    if config.trace is not None:
        from ds4.server.trace import check_file

        check_file(config.trace)
    with work_bar("loading weights") as bar:
        from ds4.engine.engine import Engine

        def opened() -> Engine:
            # The backend's threads are made here.
            process.compute()
            return Engine.open(config.engine, bar)

        # At once, where a coroutine would wait for this one. The weights leave the interpreter to the imports below.
        opening = asyncio.get_running_loop().run_in_executor(None, opened)
        from ds4.server.app import App

        engine = await opening
    try:
        app = App(engine, config)
        await app.start()
        process.settle()
        app.handle_signals()
        for line in app.startup_lines():
            log.info("%s", line)
        await app.serve()
    finally:
        engine.close()


log = logging.getLogger("ds4.server")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 after a normal shutdown or help, 1 when running failed, 2 for a mistake in the configuration."""
    return run_program(PROGRAM, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    try:
        config = read_config(argv, os.environ)
    except HelpWanted as wanted:
        sys.stdout.write(help_text(f"{PROGRAM} [--model FILE] [options]", _INTRO, SERVER_FLAGS, TOPICS, wanted.topic))
        return 0
    import uvloop

    from ds4.server.log import setup

    setup(config.log_format, no_color=os.environ.get("NO_COLOR"))
    uvloop.run(_serve(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
