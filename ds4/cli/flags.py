"""Command-line flags as data: one table per program, the same rules for all of them.

A value comes from the command line, else from the environment (`--kv-disk-dir` is `DS4_KV_DISK_DIR`; a switch takes
1/0, true/false, yes/no or on/off; a repeatable flag takes a comma-separated list), else it is the default. Every
mistake is a `ConfigError` of one line that names the flag or the variable, the value found and what is allowed.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds4.engine.types import AUTO_CTX
from ds4.errors import ConfigError

Value = str | int | float | bool | Path | tuple[str, ...] | None
Parse = Callable[[str], Value]

_COLUMN = 30


class HelpWanted(Exception):
    """The command line asks for help on `topic` ("" is the short help)."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        super().__init__(topic)


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. Each of its long names gives an environment variable.

    `metavar` is empty for a switch, which stores `stores` into `field`. `shown` replaces the default in the help.
    """

    names: tuple[str, ...]
    field: str
    help: str
    metavar: str = ""
    parse: Parse = str
    default: Value = None
    topic: str = "runtime"
    repeat: bool = False
    stores: Value = True
    shown: str = ""

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple("DS4_" + n[2:].upper().replace("-", "_") for n in self.names if n.startswith("--"))


# ---- value parsers ----------------------------------------------------------------------------------------------


def integer(low: int, high: int | None = None) -> Parse:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"expected an integer, got {text!r}") from None
        if value < low or (high is not None and value > high):
            raise ValueError(f"expected an integer {_range(low, high)}, got {value}")
        return value

    return parse


def number(low: float, high: float | None = None) -> Parse:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"expected a number, got {text!r}") from None
        if not math.isfinite(value) or value < low or (high is not None and value > high):
            raise ValueError(f"expected a number {_range(low, high)}, got {text}")
        return value

    return parse


def _range(low: float, high: float | None) -> str:
    return f">= {low:g}" if high is None else f"from {low:g} to {high:g}"


def choice(*allowed: str) -> Parse:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}, got {text!r}")
        return text

    return parse


def nonempty(text: str) -> str:
    if not text.strip():
        raise ValueError("expected a value, got an empty one")
    return text


def path(text: str) -> Path:
    return Path(nonempty(text)).expanduser()


# ---- tables that programs share ---------------------------------------------------------------------------------

ENGINE_FLAGS = (
    Flag(
        ("--model", "-m"),
        "model",
        "GGUF file or safetensors directory",
        "FILE",
        path,
        shown="the SmolLM2 demo model",
    ),
    Flag(
        ("--backend",),
        "backend",
        "auto (a GPU where there is one), cpu, cuda, reference",
        "NAME",
        choice("auto", "cpu", "cuda", "reference"),
        "auto",
    ),
    Flag(("--cpu",), "backend", "same as --backend cpu", stores="cpu"),
    Flag(("--cuda",), "backend", "same as --backend cuda", stores="cuda"),
    Flag(
        ("--ctx", "-c"),
        "ctx",
        "context of each session in tokens, taken exactly",
        "N",
        integer(0),
        0,
        shown=f"what the model was trained on, at most {AUTO_CTX}",
    ),
    Flag(
        ("--threads", "-t"),
        "threads",
        "CPU worker threads of the engine",
        "N",
        integer(0, 1024),
        0,
        shown="all usable cores",
    ),
    Flag(
        ("--prefill-chunk",),
        "prefill_chunk",
        "prompt tokens per prefill step",
        "N",
        integer(0, 65536),
        0,
        shown="2048 on a GPU, else 512",
    ),
    Flag(
        ("--isa",),
        "isa",
        "best instruction set of the CPU to use: auto, avx512, avx2, scalar",
        "NAME",
        choice("auto", "avx512", "avx2", "scalar"),
        "auto",
    ),
    Flag(("--warm-weights",), "warm_weights", "touch all weights at start", default=False),
    Flag(
        ("--no-memory-check",),
        "check_memory",
        "start even if the memory plan does not fit",
        default=True,
        stores=False,
        shown="off",
    ),
)

# `draft_timing` and `mtp_exact` are no fields of an engine's configuration.
DRAFT_FLAGS = (
    Flag(
        ("--mtp",),
        "mtp",
        "guess tokens ahead with the model's multi-token prediction head",
        default=False,
        topic="drafts",
    ),
    Flag(
        ("--mtp-model",),
        "mtp_model",
        "file with the layers that guess, beside the model",
        "FILE",
        path,
        None,
        "drafts",
        shown="the model's own",
    ),
    Flag(
        ("--mtp-draft",), "mtp_draft", "most tokens that --mtp guesses for one step", "N", integer(1, 16), 1, "drafts"
    ),
    Flag(
        ("--mtp-margin",),
        "mtp_margin",
        "a guess whose logit leads the second best by less is the last one of a step",
        "F",
        number(0, 1000),
        3.0,
        "drafts",
    ),
    Flag(
        ("--mtp-exact-sampling",),
        "mtp_exact",
        "always so: sampled tokens are those of a run without guesses",
        default=True,
        topic="drafts",
    ),
    Flag(("--mtp-timing",), "draft_timing", "tell what guessing took and gained", default=False, topic="drafts"),
    Flag(("--dspark",), "dspark", "guess with the model's DSpark block drafter", default=False, topic="drafts"),
    Flag(
        ("--dspark-confidence",),
        "dspark_confidence",
        "a block ends before the first guess that is less sure",
        "F",
        number(0, 1),
        0.8,
        "drafts",
    ),
    Flag(
        ("--dspark-strict", "--mtp-spec-disable"),
        "speculate",
        "load what guesses, but decode without it",
        default=True,
        stores=False,
        topic="drafts",
        shown="off",
    ),
)

SAMPLING_FLAGS = (
    Flag(
        ("--temp", "--default-temperature"),
        "temperature",
        "temperature; 0 is greedy",
        "F",
        number(0, 100),
        1.0,
        "sampling",
    ),
    Flag(("--top-p",), "top_p", "nucleus sampling", "F", number(0, 1), 1.0, "sampling"),
    Flag(("--top-k",), "top_k", "keep the N best tokens; 0 is off", "N", integer(0), 0, "sampling"),
    Flag(("--min-p",), "min_p", "cut below F times the best probability", "F", number(0, 1), 0.05, "sampling"),
    Flag(
        ("--repetition-penalty",),
        "repetition_penalty",
        "divides logits of tokens seen before; 1 is off",
        "F",
        number(0.01, 100),
        1.0,
        "sampling",
    ),
    Flag(("--presence-penalty",), "presence_penalty", "OpenAI's presence penalty", "F", number(-2, 2), 0.0, "sampling"),
    Flag(
        ("--frequency-penalty",),
        "frequency_penalty",
        "OpenAI's frequency penalty",
        "F",
        number(-2, 2),
        0.0,
        "sampling",
    ),
)


# ---- parsing ----------------------------------------------------------------------------------------------------


def parse_flags(flags: Sequence[Flag], argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, Value]:
    """Values by field name. Raises ConfigError, and HelpWanted for -h and --help [TOPIC]."""
    by_name = {name: flag for flag in flags for name in flag.names}
    values: dict[str, Value] = {}
    repeated: dict[str, list[str]] = {}
    words = list(argv)
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word in ("-h", "--help"):
            topic = words[position] if position < len(words) and not words[position].startswith("-") else ""
            raise HelpWanted(topic)
        name, given, inline = word.partition("=") if word.startswith("--") else (word, "", "")
        flag = by_name.get(name)
        if flag is None:
            raise ConfigError(_unknown(word, name, by_name))
        if not flag.metavar:
            if given:
                raise ConfigError(f"{name} takes no value, got {inline!r}")
            values[flag.field] = flag.stores
            continue
        if given:
            text = inline
        elif position < len(words):
            text = words[position]
            position += 1
        else:
            raise ConfigError(f"{name} needs a value: {name} {flag.metavar}")
        if flag.repeat:
            repeated.setdefault(flag.field, []).append(str(_parsed(flag, name, text)))
        else:
            values[flag.field] = _parsed(flag, name, text)
    for field, items in repeated.items():
        values[field] = tuple(items)
    # A switch and a valued flag may share a field (--cpu, --backend): the command line beats both variables.
    on_command_line = set(values)
    for flag in flags:
        variable = next((name for name in flag.variables if environ.get(name)), None)
        if variable is not None and flag.field not in on_command_line:
            found = _from_environment(flag, variable, environ[variable])
            if found is not None:
                values[flag.field] = found
    for flag in flags:
        if flag.metavar or flag.default is not None:
            values.setdefault(flag.field, () if flag.repeat else flag.default)
    return values


def _parsed(flag: Flag, source: str, text: str) -> Value:
    try:
        return flag.parse(text)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def _from_environment(flag: Flag, variable: str, text: str) -> Value:
    if flag.metavar:
        if not flag.repeat:
            return _parsed(flag, variable, text)
        return tuple(str(_parsed(flag, variable, item.strip())) for item in text.split(",") if item.strip())
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return flag.stores
    if lowered in ("0", "false", "no", "off"):
        return None
    raise ConfigError(f"{variable}: expected 1/0, true/false, yes/no or on/off, got {text!r}")


def _unknown(word: str, name: str, by_name: Mapping[str, Flag]) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    from difflib import get_close_matches

    near = get_close_matches(name, by_name, n=1, cutoff=0.75)
    return f"unknown option {name}" + (f" (did you mean {near[0]}?)" if near else "")


# ---- help -------------------------------------------------------------------------------------------------------


def help_text(usage: str, intro: str, flags: Sequence[Flag], topics: Mapping[str, str], topic: str) -> str:
    """Help for people. `topics` maps a topic to its heading; topic "" and "all" show every flag of the table.

    Raises ConfigError for a topic that does not exist.
    """
    if topic not in ("", "all") and topic not in topics:
        raise ConfigError(f"no help topic {topic!r} (topics: all, {', '.join(topics)})")
    lines = [f"usage: {usage}", "", intro] if topic in ("", "all") else []
    for name, heading in topics.items():
        if topic in ("", "all", name):
            lines += ["", f"{heading}:"] if lines else [f"{heading}:"]
            for flag in flags:
                if flag.topic == name:
                    lines += _help_of(flag)
    if topic in ("", "all"):
        lines += [
            "",
            f"--help TOPIC shows one of: all, {', '.join(topics)}.",
            "Every flag can be given as an environment variable: --some-flag is DS4_SOME_FLAG.",
        ]
    return "\n".join(lines) + "\n"


def _help_of(flag: Flag) -> list[str]:
    head = ", ".join(sorted(flag.names, key=len)) + (f" {flag.metavar}" if flag.metavar else "")
    note = flag.shown or _default_text(flag)
    text = flag.help + (f" [{note}]" if note else "") + (" (repeatable)" if flag.repeat else "")
    width = max(40, min(shutil.get_terminal_size().columns, 110))
    if len(head) + 2 > _COLUMN:
        return [f"  {head}", *_wrapped(text, width, 6)]
    first, *rest = _wrapped(text, width, _COLUMN + 2)
    return ["  " + head.ljust(_COLUMN) + first.lstrip(), *rest]


def _default_text(flag: Flag) -> str:
    if not flag.metavar or flag.default in (None, ()):
        return ""
    return f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default)


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    from textwrap import wrap

    return wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent) or [""]
