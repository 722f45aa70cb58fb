"""The CPU kernels have malloc keep what is freed, unless the environment says otherwise."""

import json
import os
import subprocess
import sys

import pytest

from lightconv_plugin.ops import backends

# Faults of fresh pages while 64 MiB are allocated, written and freed again and again.
PROGRAM = """
import json, resource
import torch
from lightconv_plugin import allocator, ops

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
faults()
before = faults()
ops.lightconv(torch.ones(3, 1, 4), torch.ones(2, 3), 1)
# An aligned block is cut from one a little larger: the next does not fit into it until some lie side by side.
for _ in range(10):
    faults()
state = allocator.keep_freed_memory()
print(json.dumps([before, faults(), state.keeps, state.why]))
"""
PAGES = 5 * (64 << 20) // 4096
OWN = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
    "LIGHTCONV_KEEP_MALLOC",
    "LIGHTCONV_BACKEND",
)


def run(**environment):
    clean = {name: value for name, value in os.environ.items() if name not in OWN}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean | environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(autouse=True)
def _native():
    if backends.decision("cpu").backend != "cpu":
        pytest.skip(backends.decision("cpu").reason)
    if not sys.platform.startswith("linux") or os.confstr("CS_GNU_LIBC_VERSION") is None:
        pytest.skip("the C library is not glibc")


def test_freed_memory_is_kept_once_the_kernels_are_loaded():
    before, after, keeps, why = json.loads(run().stdout)
    assert keeps and "is kept" in why
    assert after <= 2 * PAGES / 5 < before


@pytest.mark.parametrize(
    ("variable", "value"),
    [("LIGHTCONV_KEEP_MALLOC", "1"), ("MALLOC_TRIM_THRESHOLD_", "131072"), ("MALLOC_MMAP_THRESHOLD_", "131072")],
)
def test_malloc_stays_as_the_user_has_it(variable, value):
    _, after, keeps, why = json.loads(run(**{variable: value}).stdout)
    assert not keeps and variable in why
    assert after > 2 * PAGES / 5


def test_tunables_of_glibc_are_the_users_choice():
    _, _, keeps, why = json.loads(run(GLIBC_TUNABLES="glibc.malloc.trim_threshold=131072").stdout)
    assert not keeps and "GLIBC_TUNABLES" in why


def test_an_unknown_value_is_an_error():
    done = run(LIGHTCONV_KEEP_MALLOC="yes")
    assert done.returncode
    assert "LIGHTCONV_KEEP_MALLOC must be 0, 1 or unset, got 'yes'" in done.stderr
