"""The products of cpu/search for every instruction set that can be compiled and run here; Arm's by emulation."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from lightconv_plugin.ops import artifacts
from lightconv_plugin.ops.instructions import LEVELS, instruction_set

SOURCES = [Path(__file__).with_name("products.cpp")] + [
    artifacts.SOURCES["cpu"] / "search" / name
    for name in ("linear.cpp", "products.cpp", "products_vnni.cpp", "products_bfloat16.cpp")
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
# Name → compiler, its flags, what runs the program, whether it may use more instructions, what the CPU must have.
CASES = {
    "plain": ("g++", [], [], False, ""),
    "avx2": ("g++", AVX2, [], False, "AVX2"),
    "avx512": ("g++", AVX512, [], False, "AVX-512"),
    "avx512-vnni-bf16": ("g++", AVX512, [], True, "AVX-512 VNNI BF16"),
    "arm": ("aarch64-linux-gnu-g++", ["-static"], ["qemu-aarch64"], False, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_products(case, tmp_path):
    compiler, flags, emulator, instructions, needed = CASES[case]
    for tool in (compiler, *emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if not emulator and case != "plain" and platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("needs an x86 CPU")
    levels = ["", *LEVELS.values()]
    if levels.index(needed) > levels.index(instruction_set() or ""):
        pytest.skip(f"needs a CPU with {needed}")
    program = tmp_path / "products"
    include = f"-I{artifacts.SOURCES['cpu']}"
    command = [compiler, "-std=c++17", "-O2", *flags, include, *map(str, SOURCES), "-o", str(program), "-pthread"]
    subprocess.run(command, check=True, timeout=300)
    done = subprocess.run(
        [*emulator, str(program), str(int(instructions))], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.stdout.startswith("0 mismatches")
