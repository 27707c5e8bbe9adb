"""The process in which atheris drives one target: `python -m tests.fuzz.guided TARGET SEED [libFuzzer options]`.

libFuzzer ends its process, hence one for each target; `run.py` starts them and reads what they print. What guides it:

* the Python side (target, oracle) by atheris' instrumentation;
* the native side where the modules were built with DS4_COVERAGE: `coverage.c` counts their blocks, and `attach` hands
  the counters and comparisons of every loaded module to libFuzzer.

An input in sixteen is a fresh example and three more are bent by the built-in mutator, which knows the boundaries of
the formats; the rest is libFuzzer's.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import random
import sys

from tests.fuzz.run import load, mutated

FUNCTIONS = (
    "__sanitizer_cov_8bit_counters_init",
    "__sanitizer_cov_pcs_init",
    "__sanitizer_cov_trace_cmp1",
    "__sanitizer_cov_trace_cmp2",
    "__sanitizer_cov_trace_cmp4",
    "__sanitizer_cov_trace_cmp8",
    "__sanitizer_cov_trace_switch",
)


def attach() -> list[str]:
    """Gives libFuzzer the counters of the loaded native modules; the names of those that have some."""
    spec = importlib.util.find_spec("atheris.core_with_libfuzzer")
    assert spec is not None and spec.origin is not None
    fuzzer = ctypes.CDLL(spec.origin)
    functions = (ctypes.c_void_p * len(FUNCTIONS))(
        *(ctypes.cast(getattr(fuzzer, name), ctypes.c_void_p) for name in FUNCTIONS)
    )
    found = []
    for name in ("_core", "_json", "_dsml", "_rax"):
        module = sys.modules.get(f"ds4.{name}")
        library = ctypes.CDLL(module.__file__) if module is not None else None
        if library is not None and hasattr(library, "ds4_coverage"):
            library.ds4_coverage(functions)
            found.append(name)
    return found


def main() -> None:
    import atheris

    name, seed, options = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    with atheris.instrument_imports(include=["tests.fuzz", "tests.support"], enable_loader_override=False):
        target, example = load(name)

    def mutate(data: bytes, longest: int, number: int) -> bytes:
        rng = random.Random(number)
        kind = rng.randrange(16)
        if kind == 0:
            return example(rng)[:longest]
        if kind < 4:
            return mutated(rng, data, example(rng))[:longest]
        return atheris.Mutate(data, longest)

    atheris.Setup(
        [sys.argv[0], f"-seed={seed % ((1 << 32) - 1) + 1}", *options],
        target,
        internal_libfuzzer=True,
        custom_mutator=mutate,
    )
    print("guided by the native code of", ", ".join(attach()) or "no module", file=sys.stderr, flush=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
