"""Code for an instruction set beyond the baseline stays in the functions of its own source file."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ds4 import _cpu

LABEL = re.compile(r"^[0-9a-f]+ <(.+)>:$")
# AVX and later; other names with a v are of system code.
BEYOND = re.compile(r"\tv(?!err|erw|m[cx]|mlaunch)[a-z]\w*\s")


def functions_beyond_baseline(path: Path) -> set[str]:
    listing = subprocess.run(
        ["objdump", "--disassemble", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
    )
    name, found = "", set()
    for line in listing.stdout.splitlines():
        if label := LABEL.match(line):
            name = label[1]
        elif BEYOND.search(line):
            found.add(name)
    return found


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 instructions")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
def test_only_functions_of_one_file_use_an_instruction_set_that_may_be_missing() -> None:
    # Of inline functions with one name the linker keeps any body: of a header's, the one compiled for AVX-512 perhaps,
    # and then a machine without it stops there. Functions of an unnamed namespace have no second body.
    found = functions_beyond_baseline(Path(_cpu.__file__))
    if found == {""} or not any("_GLOBAL__N_" in name for name in found):
        pytest.skip("a stripped module, or one built without kernels for AVX")
    assert {name for name in found if "_GLOBAL__N_" not in name} == set()
