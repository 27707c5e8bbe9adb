"""Builds the extension modules: four in Cython, one pybind11 module per backend that the machine can build.

Everything declarative is in pyproject.toml. What needs code is here:

* `ds4._cpu` holds the same kernels for several instruction sets. Each `native/cpu/*_<isa>.cpp` is compiled with
  its own flags, all others with the baseline, so that one wheel runs on every CPU of the architecture.
* Objects are compiled in parallel (`DS4_BUILD_JOBS`, default: all cores).
* `DS4_ONLY=_json,_cpu` builds just these modules; `DS4_SANITIZE=address,undefined` builds all of them with those
  sanitizers.
"""

from __future__ import annotations

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from Cython.Build import cythonize
from pybind11 import get_include as pybind11_include
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
MACHINE = platform.machine().lower()
X86 = MACHINE in ("x86_64", "amd64")

SANITIZE = os.environ.get("DS4_SANITIZE", "")
CXX_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-ffp-contract=off",
]
C_FLAGS = ["-O3", "-Wno-unused-function"]
LINK_FLAGS: list[str] = ["-pthread"]
if SANITIZE:
    extra = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-g1", "-O1"]
    CXX_FLAGS += [*extra, "-D_GLIBCXX_ASSERTIONS"]
    C_FLAGS += extra
    LINK_FLAGS += [f"-fsanitize={SANITIZE}"]

# Flags of the per-ISA translation units, by file-name suffix. `-ffp-contract=off` everywhere: where a fused
# multiply-add is wanted the kernel says so, and two kernels that must agree bit for bit then do.
ISA_FLAGS = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
    "_avx512": [
        "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16",
        "-mavx2", "-mfma", "-mf16c", "-mbmi2",
    ],
    "_neon": ["-march=armv8.2-a+dotprod+fp16"],
    # Wide generic vectors are passed between static functions only; GCC notes that their ABI is not stable.
    "_scalar": ["-Wno-psabi"],
}  # fmt: skip


def native_sources() -> list[str]:
    """Sources of `ds4._cpu`; files of an instruction set that this architecture lacks are left out."""
    foreign = ("_neon",) if X86 else ("_avx2", "_avx512")
    folders = ("quant", "reference", "cpu", "session", "model", "bindings")
    found = [p for folder in folders for p in sorted((ROOT / "native" / folder).glob("*.cpp"))]
    return [str(p.relative_to(ROOT)) for p in found if not p.stem.endswith(foreign)]


def extensions() -> list[Extension]:
    only = {name for name in os.environ.get("DS4_ONLY", "").split(",") if name}
    text_headers = sorted((ROOT / "native" / "text").glob("*.h"))
    modules = [
        Extension(
            f"ds4.{name}",
            [f"ds4/{name}.pyx"],
            depends=[str(p.relative_to(ROOT)) for p in [*(ROOT / "ds4").glob(f"{name}_*.pxi"), *text_headers]],
            extra_compile_args=C_FLAGS,
            extra_link_args=LINK_FLAGS,
        )
        for name in ("_core", "_json", "_dsml", "_rax")
        if (ROOT / "ds4" / f"{name}.pyx").exists() and (not only or name in only)
    ]
    modules = list(cythonize(modules, language_level=3, quiet=True)) if modules else []
    if not only or "_cpu" in only:
        modules.append(
            Extension(
                "ds4._cpu",
                native_sources(),
                include_dirs=["native", pybind11_include()],
                depends=[str(p.relative_to(ROOT)) for p in (ROOT / "native").rglob("*.h")],
                extra_compile_args=CXX_FLAGS,
                extra_link_args=LINK_FLAGS,
                language="c++",
            )
        )
    return modules


class BuildExt(build_ext):
    """Per-file ISA flags and parallel compilation, which setuptools has no declaration for."""

    def build_extensions(self) -> None:
        jobs = int(os.environ.get("DS4_BUILD_JOBS", "0")) or os.cpu_count() or 1
        compiler = self.compiler
        compile_one = compiler._compile

        def with_isa_flags(obj: str, src: str, ext: str, cc_args: Any, extra: list[str], pp_opts: Any) -> None:
            flags = [f for suffix, fs in ISA_FLAGS.items() if Path(src).stem.endswith(suffix) for f in fs]
            if SANITIZE and flags:
                # The unrolled vector kernels become gigabytes of assembly with undefined-behaviour checks. Their source
                # is checked in its scalar build; here the address checks stay.
                flags.append("-fno-sanitize=undefined")
            compile_one(obj, src, ext, cc_args, [*extra, *flags], pp_opts)

        def compile_all(
            sources: list[str], output_dir: str | None = None, macros: Any = None, include_dirs: Any = None,
            debug: bool = False, extra_preargs: Any = None, extra_postargs: Any = None, depends: Any = None,
        ) -> list[str]:  # fmt: skip
            macros, objects, extra, pp_opts, build = compiler._setup_compile(
                output_dir, macros, include_dirs, sources, depends, extra_postargs
            )
            cc_args = compiler._get_cc_args(pp_opts, debug, extra_preargs)
            # distutils rebuilds every object of an out-of-date extension; the ones newer than their source and
            # all headers are kept, which makes an incremental build seconds instead of minutes.
            newest = max((os.path.getmtime(h) for h in depends or []), default=0.0)
            with ThreadPoolExecutor(jobs) as pool:
                todo = [
                    pool.submit(with_isa_flags, obj, *build[obj], cc_args, extra, pp_opts)
                    for obj in objects
                    if obj in build and not self._fresh(obj, build[obj][0], newest)
                ]
                for t in todo:
                    t.result()
            return objects

        compiler.compile = compile_all  # type: ignore[method-assign]
        super().build_extensions()

    @staticmethod
    def _fresh(obj: str, src: str, newest_header: float) -> bool:
        try:
            return os.path.getmtime(obj) > max(os.path.getmtime(src), newest_header)
        except OSError:
            return False


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt})
