"""Caches and environments in which nothing can be compiled: one cause with a remedy, and then the reference."""

import ctypes
import errno
import fcntl
import logging
import os
import pwd
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lightconv_plugin import allocator
from lightconv_plugin.diagnostics import machine
from lightconv_plugin.files import locked
from lightconv_plugin.ops import artifacts, backends, compilation, instructions
from lightconv_plugin.ops.artifacts import NativeError

from .toy_libraries import PLAIN


def build(calls=None):
    started = (lambda: None) if calls is None else (lambda: calls.append("started"))
    return compilation.build(artifacts.recipe("cpu"), started)


def falls_back(caplog):
    """The only warning, although two operators ask for the backend."""
    caplog.set_level(logging.WARNING)
    assert backends.backend("cpu") == backends.backend("cpu") == "reference"
    (record,) = (record for record in caplog.records if record.name == "lightconv_plugin")
    assert record.getMessage().endswith("Falling back to the reference, which is slower")
    return record.getMessage()


@pytest.fixture
def no_home(plain, monkeypatch):
    """A user without HOME and without an entry in the system's list of users."""

    def getpwuid(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    return plain


# ------------------------------------------------------------------------------------------------ cache folders


@pytest.fixture
def unreadable(plain, monkeypatch):
    """A cache whose files the system refuses to look up.

    The name is too long, because permissions do not hold for root. Path.is_file raises in both cases on Python 3.11.
    """
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(plain.folder / ("x" * 300)))
    return plain


def test_a_cache_that_cannot_be_read_is_a_failure_to_build(unreadable):
    assert artifacts.find("cpu") is None and not any(artifacts.find_lesser())
    with pytest.raises(NativeError, match=r"cannot build in .*xxx/lightconv_cpu: .*; set TORCH_EXTENSIONS_DIR"):
        build()


def test_a_cache_that_cannot_be_read_leaves_the_reference(unreadable, caplog):
    assert "; set TORCH_EXTENSIONS_DIR to a writable folder" in falls_back(caplog)


def test_libraries_for_gpus_in_a_cache_that_cannot_be_read(unreadable, monkeypatch):
    (unreadable.sources / "toy.cu").touch()
    monkeypatch.setitem(artifacts.SOURCES, "cuda", unreadable.sources)
    monkeypatch.setattr(artifacts, "capabilities", lambda: [(9, 0)])
    assert artifacts.find("cuda") is None


def test_without_a_home_folder_nothing_is_compiled(no_home, caplog):
    with pytest.raises(NativeError, match=r"^this user has no home folder .*; set TORCH_EXTENSIONS_DIR"):
        build()
    assert "set TORCH_EXTENSIONS_DIR" in falls_back(caplog)


def test_without_a_home_folder_doctor_can_look_at_the_cache(no_home):
    folder = artifacts.cache_folder()
    machine.room(folder)
    with pytest.raises(OSError):
        folder.mkdir(parents=True)


def test_without_a_home_folder_other_caches_serve(no_home, monkeypatch):
    recipe = artifacts.recipe("cpu")
    prebuilt = artifacts.PREBUILT / recipe.library / recipe.name / recipe.file
    prebuilt.parent.mkdir(parents=True)
    prebuilt.touch()
    assert artifacts.find("cpu") == build() == prebuilt
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_home.folder))
    assert artifacts.cache_folder() == no_home.folder / "torch_extensions"


@pytest.mark.parametrize("character", ["$", ":", "|"])
@pytest.mark.parametrize("what", ["cache", "sources"])
def test_characters_that_ninja_cannot_read(what, character, plain, monkeypatch):
    plain.write(PLAIN, "folder/other.cpp")
    folder = plain.folder / f"one{character}two"
    if what == "cache":
        remedy = "set TORCH_EXTENSIONS_DIR to another folder"
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    else:
        remedy = "install the package in another folder"
        monkeypatch.setitem(artifacts.SOURCES, "cpu", plain.sources.rename(folder))
    with pytest.raises(NativeError) as failed:
        build()
    assert failed.value.cause.startswith(f"ninja cannot read a path with '{character}' in it: {folder}")
    assert failed.value.remedy == remedy and not plain.cache.exists()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSYS, "this file system has no locks: set TORCH_EXTENSIONS_DIR to a folder on another"),
        (errno.ENOLCK, "this file system has no locks: set TORCH_EXTENSIONS_DIR to a folder on another"),
        (errno.ENOSPC, "free disk space, or set TORCH_EXTENSIONS_DIR to a folder on another disk"),
        (errno.EACCES, "set TORCH_EXTENSIONS_DIR to a writable folder"),
    ],
    ids=["no-locks", "no-more-locks", "full", "forbidden"],
)
def test_a_cache_that_cannot_be_locked(number, remedy, plain, monkeypatch):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(NativeError) as failed:
        build()
    assert failed.value.cause.endswith(f"/lightconv_cpu: [Errno {number}] {os.strerror(number)}")
    assert failed.value.remedy == remedy


# ------------------------------------------------------------------------------------------------ damaged libraries


@pytest.mark.parametrize("change", [-1000, 1], ids=["truncated", "longer"])
def test_a_library_of_another_size_is_compiled_again(change, plain):
    path = build()
    size = path.stat().st_size
    assert artifacts.information(path)["size"] == size and artifacts.find("cpu") == path
    os.truncate(path, size + change)
    assert artifacts.find("cpu") is None
    calls = []
    assert build(calls) == path and calls == ["started"]
    assert path.stat().st_size == size and ctypes.CDLL(str(path)).lightconv_answer() == 42


def test_a_truncated_library_in_a_cache_that_cannot_be_written(plain):
    path = build()
    os.truncate(path, 1000)
    lock = path.parent.with_suffix(".lock")
    lock.unlink()
    lock.symlink_to("/no/such/folder/lock")  # cannot be opened, not even by root
    with pytest.raises(NativeError) as failed:
        build()
    assert failed.value.cause.startswith(f"{path} is damaged: 1000 bytes, ")
    assert failed.value.remedy == f"delete {path.parent}, or set TORCH_EXTENSIONS_DIR to a writable folder"


def test_a_library_without_a_recorded_size_is_used(plain):
    path = build()
    for content in ("{}", "[]", "{"):
        path.with_name("build.json").write_text(content)
        assert artifacts.information(path) == {} and artifacts.find("cpu") == path


def test_files_are_on_the_disk_before_they_are_renamed(plain, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def synced(fd):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def replaced(source, target):
        events.append("renamed")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    build()
    assert sorted(events[: events.index("renamed")]) == ["build.json", "lightconv_cpu.so"]


# ------------------------------------------------------------------------------------------------ of another system

FOREIGN = b"of a newer system"
NOT_FOUND = "/lib64/libc.so.6: version `GLIBC_2.99' not found"


@pytest.fixture
def foreign(plain, monkeypatch):
    """Puts a library that needs a newer C library than there is into a folder; any other passes for the kernels."""

    def load(path):
        if Path(path).read_bytes() == FOREIGN:
            raise OSError(NOT_FOUND)

    def put(root, simd=None):
        recipe = artifacts.recipe("cpu", simd=simd)
        path = root / recipe.library / recipe.name / recipe.file
        path.parent.mkdir(parents=True)
        path.write_bytes(FOREIGN)
        return path

    monkeypatch.setattr(torch.ops, "load_library", load)
    monkeypatch.setattr(backends, "has_kernel", lambda operator, device: True)
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: None)
    return put


def test_a_cached_library_of_a_newer_system_is_compiled_again_in_its_place(plain, foreign, capsys):
    path = foreign(plain.cache)
    assert backends.decision("cpu").library == path and ctypes.CDLL(str(path)).lightconv_answer() == 42
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"lightconv_plugin: cannot load {path}: {NOT_FOUND}"
    assert second.startswith("lightconv_plugin: compiling the CPU kernels")


def test_who_waited_while_it_was_compiled_again_does_not_compile_it(plain, foreign):
    path, calls, waiting = foreign(plain.cache), [], threading.Event()
    recipe, started = artifacts.recipe("cpu"), lambda: calls.append("started")
    with ThreadPoolExecutor() as pool:
        with locked(path.parent.with_suffix(".lock")):
            second = pool.submit(compilation.build, recipe, started, waiting.set, unusable={path})
            assert waiting.wait(30)
            path.write_bytes(b"of this system")
        assert second.result() == path and not calls


def test_a_prebuilt_library_of_a_newer_system_gives_way_to_the_cache(plain, foreign, monkeypatch):
    prebuilt = foreign(artifacts.PREBUILT)
    cached = backends.decision("cpu").library
    assert plain.cache in cached.parents and prebuilt.read_bytes() == FOREIGN
    monkeypatch.setattr(backends, "_decided", {})
    monkeypatch.setenv("PATH", "")  # nothing is compiled now
    assert backends.decision("cpu").library == cached


@pytest.mark.skipif(not instructions.compiled_for(), reason="this CPU has one set of instructions only")
def test_a_library_of_fewer_instructions_serves_where_the_best_cannot_be_loaded(plain, foreign, monkeypatch, caplog):
    path = foreign(plain.cache)
    foreign(artifacts.PREBUILT, "")
    lesser = foreign(plain.cache, "")
    lesser.write_bytes(b"of this system")
    monkeypatch.setenv("PATH", "")
    decided = backends.decision("cpu")
    assert decided.library == lesser and path.read_bytes() == FOREIGN
    assert decided.backend == "cpu" and decided.error.cause.startswith(f"cannot load {path}: {NOT_FOUND}; nor compile")
    assert "which are slower: those for this CPU fail: cannot load" in caplog.text


def test_what_can_be_neither_loaded_nor_compiled_has_both_causes(plain, foreign, monkeypatch):
    path = foreign(artifacts.PREBUILT)
    monkeypatch.setenv("PATH", "")
    error = backends.decision("cpu").error
    assert error.cause.startswith(f"cannot load {path}: {NOT_FOUND}; nor compile it: no C++ compiler was found")
    assert error.remedy.startswith("install g++")


def test_what_the_cache_cannot_run_is_not_what_an_installation_cannot_run(plain, foreign, monkeypatch):
    path = foreign(artifacts.PREBUILT)
    monkeypatch.setitem(globals(), "NOT_FOUND", f"{path}: failed to map segment from shared object")
    monkeypatch.setenv("PATH", "")
    assert "object; nor compile it: no C++ compiler" in backends.decision("cpu").error.cause


@pytest.mark.skipif(not instructions.compiled_for(), reason="this CPU has one set of instructions only")
def test_where_programs_cannot_run_nothing_is_compiled(plain, foreign, monkeypatch):
    """A cache that another machine has filled, mounted without exec."""
    path, lesser = foreign(plain.cache), foreign(plain.cache, "")
    monkeypatch.setitem(globals(), "NOT_FOUND", f"{path}: failed to map segment from shared object")
    monkeypatch.setattr(compilation, "build", lambda *arguments, **options: pytest.fail("compiled"))
    error = backends.decision("cpu").error
    assert error.cause == f"cannot load {path}: {path}: failed to map segment from shared object"
    assert error.remedy.startswith("programs cannot run from this file system (noexec): set TORCH_EXTENSIONS_DIR")
    lesser.write_bytes(b"in an installation")
    monkeypatch.setattr(backends, "_decided", {})
    assert backends.decision("cpu").library == lesser


# ------------------------------------------------------------------------------------------------ the environment


def test_a_compiler_with_an_open_quote(plain, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "g++ 'x")
    with pytest.raises(NativeError, match=r"^CXX must be a command .*: No closing quotation; correct CXX"):
        build()
    assert "CXX must be a command" in falls_back(caplog)


@pytest.mark.parametrize("name", [".#toy.h", "common/.#toy.h", ".checkpoints/toy.cpp"])
def test_hidden_files_are_no_sources(name, plain):
    before = artifacts.recipe("cpu")
    path = plain.sources / name
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("user@host.1234:1")  # how Emacs locks a file: the target does not exist
    assert artifacts.recipe("cpu") == before
