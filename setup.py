"""Builds the extension modules: four in Cython, one pybind11 module per backend that the machine can build.

Everything declarative is in pyproject.toml. What needs code is here:

* `ds4._cuda` is built where nvcc is found, for the architectures in `DS4_CUDA_ARCHS` (default: 90a). It shares all
  objects but the kernels with `ds4._cpu`. `DS4_CUDA=0` leaves it out, `DS4_CUDA=1` makes a missing nvcc an error.
* `ds4._cpu` holds the same kernels for several instruction sets. Each `native/cpu/*_<isa>.cpp` is compiled with
  its own flags, all others with the baseline, so that one wheel runs on every CPU of the architecture.
* Objects are compiled in parallel (`DS4_BUILD_JOBS`, default: all cores).
* `DS4_ONLY=_json,_cpu` builds just these modules; `DS4_SANITIZE=address,undefined` builds all of them with those
  sanitizers; `DS4_COVERAGE=1` lets the Cython modules tell a fuzzer where they went (GCC only).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
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
COVERAGE_SOURCES: list[str] = []
if os.environ.get("DS4_COVERAGE", "0") != "0":
    C_FLAGS.append("-fsanitize-coverage=trace-pc,trace-cmp")
    COVERAGE_SOURCES.append("tests/fuzz/coverage.c")

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


# What only one of the modules is linked from.
CPU_ONLY = ("native/cpu/", "native/bindings/cpu_module", "native/bindings/ops_bind")
CUDA_ONLY = ("native/cuda/", "native/bindings/cuda_module")


def native_sources(foreign: tuple[str, ...]) -> list[str]:
    """Sources of a module: all but those of `foreign` paths and of instruction sets that this architecture lacks."""
    absent = ("_neon",) if X86 else ("_avx2", "_avx512")
    folders = ("", "quant", "reference", "cpu", "cuda", "session", "model", "bindings")
    found = [p for folder in folders for p in sorted((ROOT / "native" / folder).glob("*.c*"))]
    paths = [p.relative_to(ROOT).as_posix() for p in found if not p.stem.endswith(absent)]
    return [p for p in paths if not p.startswith(foreign)]


def native_headers(foreign: tuple[str, ...] = ()) -> list[str]:
    paths = [p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "native").rglob("*.h"))]
    return [p for p in paths if not p.startswith(foreign)]


def find_nvcc() -> str | None:
    """The compiler of `ds4._cuda`, or None when that module is not to be built here."""
    wish = os.environ.get("DS4_CUDA", "")
    if wish == "0" or SANITIZE:
        return None
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None and wish:
        raise SystemExit(
            f"DS4_CUDA={wish}, but nvcc is neither on PATH nor in {home}/bin (CUDA_HOME names the toolkit)"
        )
    return nvcc


def cuda_libraries(nvcc: str) -> list[str]:
    """Folders of the toolkit that hold the runtime library, by the compiler's own account."""
    report = subprocess.run(
        [nvcc, "--dryrun", "-c", "native/cuda/devices.cu"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stderr
    line = re.search(r"^#\$ LIBRARIES=(.*)$", report, re.MULTILINE)
    return re.findall(r'-L([^"\s]+)', line[1]) if line else []


NVCC = find_nvcc()
NVCC_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fmad=false",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off",
    *(
        f"-gencode=arch=compute_{arch},code=sm_{arch}"
        for arch in os.environ.get("DS4_CUDA_ARCHS", "90a").replace(",", " ").split()
    ),
]


def extensions() -> list[Extension]:
    only = {name for name in os.environ.get("DS4_ONLY", "").split(",") if name}
    text_headers = sorted((ROOT / "native" / "text").glob("*.h"))
    modules = [
        Extension(
            f"ds4.{name}",
            [f"ds4/{name}.pyx", *COVERAGE_SOURCES],
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
                native_sources(CUDA_ONLY),
                include_dirs=["native", pybind11_include()],
                depends=native_headers(CUDA_ONLY),
                extra_compile_args=CXX_FLAGS,
                extra_link_args=LINK_FLAGS,
                language="c++",
            )
        )
    if NVCC and (not only or "_cuda" in only):
        modules.append(
            Extension(
                "ds4._cuda",
                native_sources(CPU_ONLY),
                include_dirs=["native", pybind11_include()],
                depends=native_headers(),
                extra_compile_args=CXX_FLAGS,
                # Static, and not visible to others: the module loads without a driver and beside other runtimes.
                library_dirs=cuda_libraries(NVCC),
                libraries=["cudart_static", "dl", "rt"],
                extra_link_args=[*LINK_FLAGS, "-Wl,--exclude-libs,libcudart_static.a"],
                language="c++",
            )
        )
    return modules


def newest_of(paths: list[str]) -> float:
    return max((os.path.getmtime(p) for p in paths), default=0.0)


class BuildExt(build_ext):
    """Per-file ISA flags, nvcc and parallel compilation, which setuptools has no declaration for."""

    def build_extensions(self) -> None:
        jobs = int(os.environ.get("DS4_BUILD_JOBS", "0")) or os.cpu_count() or 1
        compiler = self.compiler
        compile_one = compiler._compile
        compiler.src_extensions = [*compiler.src_extensions, ".cu"]

        def with_isa_flags(obj: str, src: str, ext: str, cc_args: Any, extra: list[str], pp_opts: Any) -> None:
            if ext == ".cu":
                includes = [word for word in pp_opts if word.startswith("-I")]
                self.spawn([NVCC, *NVCC_FLAGS, *includes, "-c", src, "-o", obj])
                return
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
            # Objects that both native modules are linked from do not wait for the kernels' headers.
            newest = newest_of(depends or [])
            shared = newest_of([h for h in depends or [] if not h.startswith(CUDA_ONLY)])
            with ThreadPoolExecutor(jobs) as pool:
                todo = [
                    pool.submit(with_isa_flags, obj, *build[obj], cc_args, extra, pp_opts)
                    for obj in objects
                    if obj in build
                    and not self._fresh(obj, src := build[obj][0], newest if src.startswith(CUDA_ONLY) else shared)
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
