"""Compiling a library: once for all processes, whole or not at all, with a cause where it fails."""

import ctypes
import json
import multiprocessing
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightconv_plugin.ops import artifacts, compilation, instructions
from lightconv_plugin.ops.artifacts import NativeError
from lightconv_plugin.ops.instructions import compiled_for
from tests import programs
from tests.warm_python import PYTHON

from .toy_libraries import BROKEN, PLAIN, script

BUILD = "print(compilation.build(artifacts.recipe('cpu'), lambda: print('started'), lambda: print('waiting')))"


def build(calls=None):
    """Build the library of kind "cpu" here, keeping which of the callbacks were called."""
    calls = [] if calls is None else calls
    return compilation.build(
        artifacts.recipe("cpu"), lambda: calls.append("started"), lambda: calls.append("waiting"), calls.append
    )


# ------------------------------------------------------------------------------------------------ it works


@pytest.mark.parametrize("runnable", [(), ("AVX2",)], ids=["not-here", "here"])
def test_a_library_for_other_cpus_is_compiled_but_not_loaded(runnable, plain, monkeypatch):
    """Its initialisers may use instructions that this CPU lacks."""
    plain.write("#include <cstdlib>\nnamespace { struct Loaded { Loaded() { abort(); } } loaded; }\n" + PLAIN)
    monkeypatch.setattr(instructions, "runnable", lambda: runnable)
    recipe = artifacts.recipe("cpu", simd="AVX2")
    if runnable:
        with pytest.raises(NativeError):
            compilation.build(recipe)
    else:
        assert compilation.build(recipe).is_file()


def test_without_a_compiler_a_torch_with_prebuilt_kernels_is_named(plain, tmp_path, monkeypatch):
    for number, version in enumerate(("2.12.1", "2.13.0+cpu", "2.13.0+cpu")):
        library = tmp_path / "prebuilt" / "lightconv_cpu" / str(number) / "lightconv_cpu.so"
        library.parent.mkdir(parents=True)
        library.touch()
        library.with_name("build.json").write_text(json.dumps({"torch": version}))
    monkeypatch.setattr(artifacts, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeError, match="no C\\+\\+ compiler was found") as error:
        build()
    assert "or install torch 2.12.1 or 2.13.0, for which this package contains" in error.value.remedy


def test_a_library_is_built_once(plain, monkeypatch):
    calls = []
    path = build(calls)
    assert calls[0] == "started" and calls[-1] == "2/2 lightconv_cpu.so"
    name = artifacts.recipe("cpu").name
    assert path == plain.cache / "lightconv_cpu" / name / "lightconv_cpu.so"
    files = [f"/{name}.lock", f"/{name}", *(f"/{name}/{file}" for file in ("build.log", "build.json", path.name))]
    assert plain.built() == sorted("lightconv_cpu" + file for file in ["", *files])
    assert ctypes.CDLL(str(path)).lightconv_answer() == 42
    about = artifacts.information(path)
    assert about["torch"] == torch.__version__ and about["sources"] == ["toy.cpp"]
    assert about["capability"] == (compiled_for() or platform.machine()) and "-O3" in about["flags"]
    assert "toy.cpp" in path.with_name("build.log").read_text()

    monkeypatch.setenv("PATH", "")  # nothing is needed now
    assert build(calls) == path and calls.count("started") == 1


def test_sources_in_folders_include_each_other_from_the_root(plain):
    plain.write("#pragma once\n#define ANSWER 43\n", "common/answer.h")
    plain.write('#include "common/answer.h"\nextern "C" int lightconv_other() { return ANSWER; }\n', "folder/other.cpp")
    path = build()
    assert ctypes.CDLL(str(path)).lightconv_other() == 43
    assert artifacts.information(path)["sources"] == ["toy.cpp", "folder/other.cpp"]


def test_the_sources_of_a_folder_are_compiled_together(plain):
    plain.write("#pragma once\ntemplate <class F> int call(F f) { return f(); }\n", "folder/call.h")
    plain.write('#include "folder/call.h"\nextern "C" int lightconv_one() { return 1; }\n', "folder/one.cpp")
    # GCC warns about such types in what it takes for a header.
    unnamed = "namespace { struct Unnamed { int n = 2; }; }\ntemplate <class T> struct Holder { T t; };\n"
    unnamed += 'struct Holds { Holder<Unnamed> held; };\nextern "C" int lightconv_two() { return Holds().held.t.n; }\n'
    plain.write('#include "folder/call.h"\n' + unnamed, "folder/two.cpp")
    calls = []
    path = build(calls)
    assert {step.split()[1] for step in calls[1:]} == {"toy.o", "folder.o", "lightconv_cpu.so"}
    library = ctypes.CDLL(str(path))
    assert (library.lightconv_one(), library.lightconv_two()) == (1, 2)
    assert artifacts.information(path)["sources"] == ["toy.cpp", "folder/one.cpp", "folder/two.cpp"]
    assert "warning" not in path.with_name("build.log").read_text()


def test_a_prebuilt_library_needs_no_cache(plain, monkeypatch):
    path = build()
    prebuilt = artifacts.PREBUILT / path.parent.parent.name / path.parent.name
    prebuilt.parent.mkdir(parents=True)
    path.parent.rename(prebuilt)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/dev/null/nowhere")
    monkeypatch.setenv("PATH", "")
    assert artifacts.find("cpu") == build() == prebuilt / path.name


def test_an_edited_source_is_compiled_again(plain):
    first = build()
    plain.write(PLAIN.replace("42", "43"))
    second = build()
    assert [ctypes.CDLL(str(path)).lightconv_answer() for path in (first, second)] == [42, 43]


def test_ninja_of_this_environment_is_found_without_path(plain, monkeypatch):
    ninja = pytest.importorskip("ninja")
    tools = plain.folder / "tools"
    tools.mkdir()
    for name in ("c++", "g++", "sh", "ld", "as"):
        if found := compilation.shutil.which(name):
            (tools / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    assert compilation._ninja().parent in (Path(sys.prefix, "bin"), Path(sys.executable).parent, Path(ninja.BIN_DIR))
    assert build().is_file()


def test_a_compiler_with_options(plain, monkeypatch):
    """CXX="ccache g++" is what many people have."""
    wrapper = plain.folder / "a wrapper"
    wrapper.write_text('#!/bin/sh\necho "$1" >"$(dirname "$0")/called"\nshift\nexec "$@"\n')
    wrapper.chmod(0o755)
    plain.write(PLAIN.replace("42", "ANSWER"))
    monkeypatch.setenv("CXX", f"{shlex.quote(str(wrapper))} first c++ '-DANSWER=40 + 4'")
    path = build()
    assert ctypes.CDLL(str(path)).lightconv_answer() == 44
    assert (plain.folder / "called").read_text() == "first\n"
    assert artifacts.information(path)["compiler"] == os.environ["CXX"]


def test_compilers_write_their_intermediate_files_into_the_cache(plain, monkeypatch):
    """A node without a disk has a small /tmp."""
    wrapper = script(plain.folder / "wrapper", 'echo "$TMPDIR" >"$(dirname "$0")/used"\nexec c++ "$@"\n')
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    path = build()
    used = Path((plain.folder / "used").read_text().strip())
    assert used.parent == path.parents[1] and not used.exists()


def test_torch_in_a_path_with_spaces(plain):
    folder = plain.folder / "site packages"
    folder.mkdir()
    (folder / "torch").symlink_to(Path(torch.__file__).parent)
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    out, _ = plain.run(f"print(torch.__file__); {BUILD}", python=PYTHON, PYTHONPATH=path)
    assert "site packages" in out.splitlines()[0] and Path(out.splitlines()[-1]).is_file()


def test_nothing_is_written_into_the_package(plain):
    package = plain.folder / "installed" / "lightconv_plugin"
    subprocess.run(["cp", "-r", str(artifacts.PACKAGE), plain.folder], check=True)
    package.parent.mkdir()
    (plain.folder / "lightconv_plugin").rename(package)
    subprocess.run(["chmod", "-R", "a-w", str(package)], check=True)
    before = {str(path): path.stat().st_mtime_ns for path in package.rglob("*")}
    out, _ = plain.run(
        f"print(artifacts.PACKAGE); {BUILD}",
        root=package.parent,
        PYTHONPATH=str(package.parent),
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert out.splitlines() == [str(package), "started", str(artifacts.recipe("cpu").folder / "lightconv_cpu.so")]
    assert {str(path): path.stat().st_mtime_ns for path in package.rglob("*")} == before
    subprocess.run(["chmod", "-R", "u+w", str(package)], check=True)


# ------------------------------------------------------------------------------------------------ it fails


def test_a_failed_build_has_a_cause_and_a_log(broken):
    for _ in range(2):  # the next process, or the next call, tries again
        calls = []
        with pytest.raises(NativeError) as failed:
            build(calls)
        assert calls[0] == "started"
    name = artifacts.recipe("cpu").name
    assert failed.value.cause.endswith("error: ‘three’ was not declared in this scope") or "three" in failed.value.cause
    assert failed.value.log == broken.cache / "lightconv_cpu" / f"{name}.log"
    assert str(failed.value.log) in str(failed.value)
    assert "-fopenmp" in failed.value.log.read_text()
    assert broken.built() == ["lightconv_cpu", *(f"lightconv_cpu/{name}.{end}" for end in ("failed", "lock", "log"))]

    broken.write(PLAIN)
    broken.write(BROKEN, "notes.txt")
    assert build().is_file()


def test_a_failure_is_forgotten_when_the_same_sources_compile(broken, monkeypatch):
    # As when a compiler was mended: the sources, and so the name, are the same.
    recipe = artifacts.recipe("cpu")
    with pytest.raises(NativeError):
        compilation.build(recipe)
    monkeypatch.setattr(artifacts, "recipe", lambda kind, architectures=(), simd=None: recipe)
    broken.write(PLAIN)
    compilation.build(recipe)
    assert not [name for name in broken.built() if name.endswith((".failed", f"{recipe.name}.log"))]


def test_a_library_that_cannot_be_loaded_is_not_finished(plain):
    plain.write('extern "C" void __kmpc_barrier();\nvoid wait() { __kmpc_barrier(); }\n')
    with pytest.raises(NativeError, match=r"undefined symbol: __kmpc_barrier; use g\+\+ \(CXX=g\+\+\)"):
        build()
    assert artifacts.find("cpu") is None


@pytest.mark.skipif(
    shutil.which("readelf") is None, reason="readelf, which shows what a library needs, is not installed"
)
def test_a_library_needs_nothing_of_pythons(plain, monkeypatch, tmp_path):
    """With a linker that keeps libraries of which nothing is used, as most distributions' do."""
    linker, compiler = tmp_path / "linker", os.environ.get("CXX", "g++")
    linker.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) set -- -Wl,--no-as-needed "$@" ;; esac\nexec {compiler} "$@"\n'
    )
    linker.chmod(0o755)
    monkeypatch.setenv("CXX", str(linker))
    shown = subprocess.run(["readelf", "-d", build()], capture_output=True, text=True, check=True).stdout
    assert "Dynamic section" in shown and "libtorch_python" not in shown


def test_sources_that_change_meanwhile_do_not_get_the_name_of_the_old_ones(plain, monkeypatch):
    run = compilation._run

    def run_and_edit(*arguments):
        plain.write(PLAIN.replace("42", "43"))
        return run(*arguments)

    monkeypatch.setattr(compilation, "_run", run_and_edit)
    with pytest.raises(NativeError, match="the sources changed while they were being compiled"):
        build()
    assert not [name for name in plain.built() if name.endswith(".so")]


def test_no_compiler(plain, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(NativeError, match=r"no C\+\+ compiler was found \(looked for no-such-compiler -x\); install g"):
        build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(plain.folder))
    with pytest.raises(NativeError, match=r"looked for c\+\+ and g\+\+"):
        build()
    assert not plain.cache.exists()


@pytest.mark.parametrize("where", ["/dev/null/cache", "/proc/cache"], ids=["no-folder", "read-only"])
def test_a_cache_that_cannot_be_written(where, plain, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", where)
    with pytest.raises(NativeError, match=f"cannot build in {where}/lightconv_cpu: .*; set TORCH_EXTENSIONS_DIR"):
        build()


@pytest.mark.parametrize(
    ("log", "cause", "remedy"),
    [
        ("[1/2] c++ error: x\na.cpp:3:1: error: no\nb.cpp:1:1: error: never\n", "a.cpp:3:1: error: no", ""),
        ("g++: fatal error: Killed signal terminated program cc1plus\n", "g++: fatal error: Killed", "MAX_JOBS=1"),
        ("a.cpp:1:10: fatal error: Python.h: No such file\n", "a.cpp:1:10: fatal error: Python.h", "Python headers"),
        ("as: out.o: No space left on device\n", "as: out.o: No space left", "free disk space"),
        ("ld: final link failed: Disk quota exceeded\n", "ld: final link failed: Disk quota", "free disk space"),
        ("OSError: x.so: failed to map segment from shared object\nOSError: no\n", "OSError: x.so: failed", "noexec"),
        ("/bin/sh: 1: ./compiler.sh: Permission denied\nninja: build stopped\n", "/bin/sh: 1: ./comp", "noexec"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_20'\n", "nvcc fatal", "TORCH_CUDA_ARCH_LIST"),
        ("/usr/bin/ld: cannot find -lc10_cuda\ncollect2: error: ld returned 1\n", "/usr/bin/ld: cannot find", ""),
        ("Traceback …\nModuleNotFoundError: No module named 'setuptools'\n", "ModuleNotFoundError: No module", ""),
        ("", "the compiling process ended with status -9", ""),
    ],
)
def test_the_line_that_tells(log, cause, remedy):
    got = compilation._cause(log, -9)
    assert got[0].startswith(cause) and remedy in got[1] and bool(remedy) == bool(got[1])


# ------------------------------------------------------------------------------------------------ several processes


def _in_a_child(queue, barrier):
    barrier.wait()
    calls = []
    try:
        queue.put((str(build(calls)), "", calls))
    except NativeError as error:
        queue.put((error.cause, str(error.log), calls))


def at_once(number):
    """What forked processes get that build at once: the result or cause, the log, and which callbacks were called."""
    context = multiprocessing.get_context("fork")
    queue, barrier = context.Queue(), context.Barrier(number)
    processes = [context.Process(target=_in_a_child, args=(queue, barrier)) for _ in range(number)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    return results


def test_processes_at_once_build_once(plain):
    results = at_once(8)
    assert {result for result, _, _ in results} == {str(artifacts.find("cpu"))}
    assert sorted(calls[0] for _, _, calls in results) == ["started", *["waiting"] * 7]


def test_who_waited_for_a_build_that_failed_takes_its_failure(broken):
    results = at_once(4)
    assert len({(cause, log) for cause, log, _ in results}) == 1
    assert "three" in results[0][0] and Path(results[0][1]).is_file()
    assert sorted(calls[0] for _, _, calls in results) == ["started", "waiting", "waiting", "waiting"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_a_killed_build_leaves_nothing_that_is_used(how, plain):
    slow = plain.slow_compiler()
    process = plain.start(
        f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {BUILD}", CXX=str(slow)
    )
    programs.wait_until((plain.folder / "begun").exists)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert artifacts.find("cpu") is None
    left = [name for name in plain.built() if "/." in name and name.count("/") == 1]
    assert len(left) == (0 if how == signal.SIGINT else 1)
    calls = []
    assert build(calls).is_file() and calls[0] == "started"  # nobody holds the lock
    (plain.folder / "go").touch()  # ends the compiler, if it is still there
    assert not [name for name in plain.built() if "/." in name and name.count("/") == 1]


def test_who_waits_for_a_build_that_is_killed_builds(plain):
    first = plain.start(BUILD, CXX=str(plain.slow_compiler()))
    programs.wait_until((plain.folder / "begun").exists)
    second = plain.start(f"import sys; sys.stdout.reconfigure(line_buffering=True); {BUILD}")
    assert second.stdout.readline() == "waiting\n"
    first.kill()
    first.communicate(timeout=60)
    out, err = second.communicate(timeout=60)
    (plain.folder / "go").touch()
    assert out.splitlines() == ["started", str(artifacts.find("cpu"))], err
