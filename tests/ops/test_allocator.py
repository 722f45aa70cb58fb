"""The CPU kernels have malloc keep what is freed, unless the environment says otherwise."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lightconv_plugin import allocator
from lightconv_plugin.errors import InputError
from lightconv_plugin.ops import backends
from lightconv_plugin.recipes.environment import environment, settings

# Faults of fresh pages while 64 MiB are allocated, written and freed again and again.
FAULTS = """
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
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
PAGES = 5 * (64 << 20) // 4096
OWN = (
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
    "LIGHTCONV_KEEP_MALLOC",
    "LIGHTCONV_BACKEND",
)


# What is decided, without the second that importing torch takes.
DECISION = """
import json
from lightconv_plugin import allocator
state = allocator.keep_freed_memory()
print(json.dumps([state.keeps, state.why]))
"""
FIRST_CALL = "import torch; from lightconv_plugin import ops; ops.lightconv(torch.ones(3, 1, 4), torch.ones(2, 3), 1)"


def run(program, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in OWN}
    return subprocess.run(
        [sys.executable, "-c", program], env=clean | environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(autouse=True)
def _native():
    if backends.decision("cpu").backend != "cpu":
        pytest.skip(backends.decision("cpu").reason)
    if not sys.platform.startswith("linux") or os.confstr("CS_GNU_LIBC_VERSION") is None:
        pytest.skip("the C library is not glibc")


def test_freed_memory_is_kept_once_the_kernels_are_loaded():
    before, after, keeps, why = json.loads(run(FAULTS).stdout)
    assert keeps and "is kept" in why
    assert after <= 2 * PAGES / 5 < before


def test_malloc_stays_as_it_is_where_the_user_wants_that():
    _, after, keeps, why = json.loads(run(FAULTS, LIGHTCONV_KEEP_MALLOC="1").stdout)
    assert not keeps and "LIGHTCONV_KEEP_MALLOC" in why
    assert after > 2 * PAGES / 5


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_settings_of_malloc_are_the_users_choice(variable, value):
    keeps, why = json.loads(run(DECISION, **{variable: value}).stdout)
    assert not keeps and variable in why


def test_an_unknown_value_is_an_error():
    done = run(FIRST_CALL, LIGHTCONV_KEEP_MALLOC="yes")
    assert done.returncode
    assert "LIGHTCONV_KEEP_MALLOC must be 0, 1 or unset, got 'yes'" in done.stderr


# ------------------------------------------------------------------------------------------------ another allocator


def compiled(folder, name, source):
    """A library made of one function."""
    path = folder / name
    command = [os.environ.get("CXX") or "c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


@pytest.mark.parametrize(
    ("function", "name"), [("tc_malloc", "tcmalloc"), ("mallctl", "jemalloc"), ("mi_malloc", "mimalloc")]
)
def test_another_allocator_is_recognised(function, name, tmp_path):
    library = compiled(tmp_path, "other.so", f'extern "C" void* {function}() {{ return nullptr; }}')
    keeps, why = json.loads(run(DECISION, LD_PRELOAD=str(library)).stdout)
    assert not keeps and why == f"{name}, which is preloaded"


def test_a_malloc_with_a_largest_threshold_gets_that(monkeypatch):
    """As older versions of glibc do."""
    for name in OWN:
        monkeypatch.delenv(name, raising=False)
    asked = {}

    def mallopt(parameter, value):
        if parameter == M_MMAP_THRESHOLD and value > 32 << 20:
            return 0
        asked[parameter] = value
        return 1

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    monkeypatch.setattr(allocator, "_state", None)
    state = allocator.keep_freed_memory()
    assert asked == {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: (1 << 31) - 1}
    assert state.keeps and "freed memory is kept, in blocks of up to 32 MiB" in state.why


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """A Python environment without tcmalloc, on a system without it; nothing is said about malloc."""
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(allocator.ctypes.util, "find_library", lambda name: None)
    for name in (*OWN, "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_tcmalloc_of_the_environment_comes_before_that_of_the_system(prefix, monkeypatch):
    assert allocator.find_tcmalloc() is None and allocator.preload() == {}
    assert "apt install libtcmalloc-minimal4" in allocator.advice()
    monkeypatch.setattr(allocator.ctypes.util, "find_library", lambda name: f"lib{name}.so.4")
    assert allocator.find_tcmalloc() == "libtcmalloc_minimal.so.4"
    (prefix / "lib" / "libtcmalloc_minimal.so.4").touch()
    assert allocator.find_tcmalloc() == str(prefix / "lib" / "libtcmalloc_minimal.so.4")
    assert allocator.preload()["LD_PRELOAD"] == allocator.find_tcmalloc() and not allocator.advice()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("LD_PRELOAD", "libanother.so"),
        ("LIGHTCONV_KEEP_MALLOC", "1"),
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_nothing_is_preloaded_against_the_environment(variable, value, prefix, monkeypatch):
    with monkeypatch.context() as without:
        without.setenv(variable, value)
        assert not allocator.advice()
    (prefix / "lib" / "libtcmalloc.so").touch()
    assert "LD_PRELOAD" in settings(1, trains_on_cpu=True) and "LD_PRELOAD" not in settings(1)
    monkeypatch.setenv(variable, value)
    assert allocator.preload() == {}
    with environment(1, trains_on_cpu=True):
        assert os.environ.get("LD_PRELOAD") == (value if variable == "LD_PRELOAD" else None)


def test_a_training_is_not_started_with_an_unknown_value(prefix, monkeypatch):
    monkeypatch.setenv("LIGHTCONV_KEEP_MALLOC", "yes")
    with pytest.raises(InputError, match="LIGHTCONV_KEEP_MALLOC must be 0, 1 or unset, got 'yes'"):
        settings(1, trains_on_cpu=True)


@pytest.mark.parametrize("name", ["with space", "with:colon"])
def test_a_library_whose_path_the_loader_would_split_is_skipped(name, tmp_path, monkeypatch):
    """LD_PRELOAD is split at spaces and colons: every program would print that its parts cannot be preloaded."""
    monkeypatch.setattr(allocator.ctypes.util, "find_library", lambda library: None)
    for folder in ("plain", name):
        (tmp_path / folder / "lib").mkdir(parents=True)
        (tmp_path / folder / "lib/libtcmalloc_minimal.so.4").touch()
        monkeypatch.setattr(sys, "prefix", str(tmp_path / folder))
        found = allocator.find_tcmalloc()
        assert found == (str(tmp_path / "plain/lib/libtcmalloc_minimal.so.4") if folder == "plain" else None)
