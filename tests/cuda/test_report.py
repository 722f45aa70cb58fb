"""The .cu sources compiled by nvcc: for real devices, without one."""

import json
import os
import re
import shutil
import subprocess

import pytest

from lightconv_plugin.files import atomic_write

from . import host
from .speed import report as speed

# One architecture takes about 40 s on two cores. LIGHTCONV_TEST_CUDA_ARCHS="75 80 86 90 100 120" takes all.
ARCHITECTURES = os.environ.get("LIGHTCONV_TEST_CUDA_ARCHS", "90").split()


def report(repository, *arguments):
    command = [repository / "scripts" / "dev" / "cuda_report.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800)


@pytest.fixture
def nvcc():
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc: the kernels cannot be compiled for a device")


def table_of(repository, architecture):
    """What the script prints for the kernels. As the host's objects, it is made once for sources, script and nvcc."""
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    files = [*(path for path in host.SOURCES.rglob("*") if path.is_file()), repository / "scripts/dev/cuda_report.sh"]
    content = [part for path in sorted(files) for part in (path.name, path.read_bytes())]
    kept = host.cache() / (host.digest(version, architecture, *content) + ".table")
    with host.locked(kept.with_suffix(".lock")):
        if not kept.exists():
            result = report(repository, "--arch", architecture)
            assert result.returncode == 0, result.stderr + result.stdout
            with atomic_write(kept) as file:
                file.write(result.stdout)
        os.utime(kept)
        return kept.read_text(encoding="utf-8")


@pytest.mark.long  # four minutes of nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_without_spills_or_stack(repository, nvcc, architecture):
    table = [line.split(maxsplit=5) for line in table_of(repository, architecture).splitlines()[1:]]
    assert all(row[0] == architecture and 0 < int(row[1]) <= 255 and row[2:4] == ["0", "0"] for row in table)
    named = ("forward_kernel<float", "input_gradient_kernel<__half", "band::forward_kernel<__nv_bfloat16")
    for kernel in (*named, "talk_forward_kernel<float", "talk_dx_kernel<__half", "band::talk_kernel<__nv_bfloat16"):
        assert any(row[5].startswith(kernel) for row in table), f"no {kernel} among the kernels"


@pytest.mark.parametrize(
    ("source", "complaint"),
    {
        "__global__ void broken(int* p) { *p = missing; }": "does not compile: 90.kernel",
        # Sixty-four sums for which a thread may have 32 registers.
        "__global__ void __launch_bounds__(1024, 2) greedy(float* p) {\n"
        "  float sums[64];\n"
        "  for (int i = 0; i < 64; ++i) sums[i] = p[i * 7 + threadIdx.x];\n"
        "  for (int n = 0; n < 99; ++n)\n"
        '    _Pragma("unroll") for (int i = 0; i < 64; ++i) sums[i] = sums[i] * p[n] + sums[(i + 1) % 64];\n'
        "  for (int i = 0; i < 64; ++i) p[i * 9 + threadIdx.x] = sums[i];\n"
        "}": "1 of 1 kernels spill registers",
        # Which element is read is known at run time only: the array cannot be in registers.
        "__global__ void indexed(int* p) {\n"
        "  int values[32];\n"
        "  for (int i = 0; i < 32; ++i) values[i] = p[i];\n"
        "  for (int i = 0; i < 32; ++i) p[i] = values[p[i] & 31];\n"
        "}": "1 of 1 kernels have a stack",
    }.items(),
    ids=["broken", "greedy", "indexed"],
)
def test_reports_what_is_wrong(repository, nvcc, tmp_path, source, complaint):
    (tmp_path / "kernel.cu").write_text(source)
    result = report(repository, "--arch", "90", "--sources", str(tmp_path))
    assert result.returncode == 1
    assert complaint in result.stderr


def test_reports_wrong_arguments(repository, tmp_path):
    assert re.search(r'--arch must be numbers such as "80 90", got "x"', report(repository, "--arch", "x").stderr)
    empty = report(repository, "--sources", str(tmp_path))
    assert empty.returncode == 1 and "no .cu files in" in empty.stderr


def test_the_readme_has_what_was_counted(repository):
    counts = json.loads(speed.COUNTS.read_text(encoding="utf-8"))
    assert list(counts) == list(speed.CALLS)
    page = (repository / "cuda" / "README.md").read_text(encoding="utf-8")
    for name, counted in counts.items():
        shown = " | ".join(speed.row(name, counted))
        assert f"| {shown} |" in page, f"not in cuda/README.md: {shown}"
