"""Compiles a native library into the cache, once, however many processes need it.

The lock is a kernel lock (flock), so it is released when the process that holds it ends. A build runs in a temporary
folder next to the result. Its files are then written to the disk and renamed into place, the library last. The remains
of a killed build are never used, and the next build removes them. If a build fails, the processes that waited for it
report the same failure without trying again; a process that starts later tries again.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from lightconv_plugin.files import NO_LOCKS, locked, sync
from lightconv_plugin.ops import artifacts
from lightconv_plugin.ops.artifacts import BuildRecipe, NativeError

_RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
_STEP = re.compile(r"^\[(\d+/\d+)\] .*? -o (\S+)", re.MULTILINE)
_ERROR = re.compile(
    r"\berror\b.*:|undefined (reference|symbol)|cannot find|No space left|quota exceeded|Killed|Unsupported gpu"
    r"|failed to map segment|compiler\.sh: Permission denied",
    re.IGNORECASE,
)
_NO_SPACE = "free disk space, or set TORCH_EXTENSIONS_DIR to a folder on another disk"
NO_EXEC = "programs cannot run from this file system (noexec): set TORCH_EXTENSIONS_DIR to a folder on another"
# What to do about an error with the cache's folder, and about what a failed build's log may contain.
_REMEDIES_BY_ERROR: dict[int | None, str] = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    **dict.fromkeys(NO_LOCKS, "this file system has no locks: set TORCH_EXTENSIONS_DIR to a folder on another"),
}
_REMEDIES = (
    ("No space left", _NO_SPACE),
    ("quota exceeded", _NO_SPACE),
    ("failed to map segment", NO_EXEC),
    ("compiler.sh: Permission denied", NO_EXEC),
    ("__kmpc_", "use g++ (CXX=g++): this torch has GNU's OpenMP, and this compiler generates code for another"),
    ("Python.h", "install the Python headers (on Debian and Ubuntu: apt install python3-dev)"),
    ("Killed", "out of memory: use fewer compiler processes (MAX_JOBS=1)"),
    ("Unsupported gpu architecture", "choose architectures that this nvcc supports (TORCH_CUDA_ARCH_LIST)"),
)


def build(
    recipe: BuildRecipe,
    started: Callable[[], None] = lambda: None,
    waiting: Callable[[], None] = lambda: None,
    progress: Callable[[str], None] = lambda step: None,
    unusable: Collection[Path] = (),
) -> Path:
    """Return the library, compiling it first if necessary.

    `started` is called before compiling, `waiting` before waiting for another process that is compiling it, and
    `progress` with a text such as "2/3 dynamicconv.o" after each step. Libraries that are `unusable` do not count as
    finished; that in the cache is replaced.

    Raises:
        NativeError: tools are missing, the cache cannot be written, or the build failed (with its log).
    """
    for found in artifacts.finished(recipe):
        if found not in unusable:
            return found
    if os.name != "posix":
        raise NativeError("compiling native kernels is supported on Linux only")
    _check_folders(recipe)
    environment = _environment(recipe)
    result = recipe.folder / recipe.file
    root = recipe.folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        record = root / f"{recipe.name}.failed"
        before, useless = _stamp(record), _stamp(result) if result in unusable else None
        # Processes that compile at once would remove each other's folders.
        with locked(root / f"{recipe.name}.lock", waiting=waiting, needed=True) as waited:
            if not artifacts.is_whole(result) or _stamp(result) == useless:
                if waited and _stamp(record) not in (None, before):
                    failure = json.loads(record.read_text(encoding="utf-8"))
                    raise NativeError(failure["cause"], failure["remedy"], Path(failure["log"]))
                started()
                _compile(recipe, environment, record, progress)
    except OSError as error:
        cause = f"cannot build in {root}: {error}"
        remedy = _REMEDIES_BY_ERROR.get(error.errno, "set TORCH_EXTENSIONS_DIR to a writable folder")
        if os.path.isfile(result) and not artifacts.is_whole(result):
            expected = artifacts.information(result).get("size")
            cause = f"{result} is damaged: {os.path.getsize(result)} bytes, {expected} in build.json; {cause}"
            remedy = f"delete {result.parent}, or {remedy}"
        raise NativeError(cause, remedy) from error
    return result


def _check_folders(recipe: BuildRecipe) -> None:
    """NativeError if there is no cache, or for a path that torch writes into ninja's file without escaping it."""
    if artifacts.cache_folder() == artifacts.NO_CACHE:
        raise NativeError(
            "this user has no home folder to keep compiled kernels in", "set TORCH_EXTENSIONS_DIR to a writable folder"
        )
    remedies = {
        recipe.folder: "set TORCH_EXTENSIONS_DIR to another folder",
        recipe.root: "install the package in another folder",
    }
    for folder, remedy in remedies.items():
        if found := re.search(r"[$:|\n]", str(folder)):
            raise NativeError(f"ninja cannot read a path with {found[0]!r} in it: {folder}", remedy)


def toolkit() -> tuple[Path, str]:
    """The folder of the CUDA toolkit and its version, such as "13.0".

    Raises:
        NativeError: there is no nvcc, or torch cannot use its output.
    """
    cuda = torch.version.cuda
    if cuda is None:
        raise NativeError(
            f"torch {torch.__version__} is built without CUDA, which CUDA kernels need",
            "install torch with CUDA",
        )
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = Path(home, "bin", "nvcc") if home else Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    remedy = f"install the CUDA toolkit {cuda} (nvcc) and put it on PATH, or set CUDA_HOME to its folder"
    if not nvcc.is_file():
        raise NativeError(f"nvcc was not found: {f'there is no {nvcc}' if home else 'it is not on PATH'}", remedy)
    if not (release := re.search(r"release (\d+)\.(\d+)", _output([nvcc, "--version"]))):
        raise NativeError(f"{nvcc} --version prints no version", remedy)
    if release[1] != cuda.split(".")[0]:
        raise NativeError(f"{nvcc} is CUDA {release[1]}.{release[2]}, but torch was built with CUDA {cuda}", remedy)
    # nvcc may be a script or a link outside its toolkit; nvcc itself knows where its headers are.
    top = re.search(r"^#\$ TOP=(.+)$", _output([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]), re.MULTILINE)
    folder = Path(top[1]).resolve() if top else nvcc.resolve().parent.parent
    return folder, f"{release[1]}.{release[2]}"


def _output(command: list) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def _environment(recipe: BuildRecipe) -> dict[str, str]:
    """The environment of the compiling process: tools on PATH, and the same Python modules."""
    environment = dict(os.environ)
    environment["CXX"] = _compiler()
    if recipe.kind == "cuda":
        environment["CUDA_HOME"] = str(toolkit()[0])
    environment["PATH"] = os.pathsep.join([environment.get("PATH", os.defpath), str(_ninja().parent)])
    return environment | same_modules()


def same_modules() -> dict[str, str]:
    """What gives another process of this Python the same modules, in its environment."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path and os.path.exists(path))}


def _compiler() -> str:
    """The command of the C++ compiler: CXX, or the first of the usual ones that exists."""
    chosen = os.environ.get("CXX", "").strip()
    for command in [chosen] if chosen else ["c++", "g++"]:
        try:
            words = shlex.split(command)
        except ValueError as error:
            cause = f"CXX must be a command in shell syntax, got {command!r}: {error}"
            raise NativeError(cause, "correct CXX, or unset it") from None
        if shutil.which(words[0]):
            return command
    remedy = "install g++ (on Debian and Ubuntu: apt install g++), or set CXX to a compiler"
    if versions := artifacts.prebuilt_for():
        remedy += f", or install torch {' or '.join(versions)}, for which this package contains compiled CPU kernels"
    raise NativeError(f"no C++ compiler was found (looked for {chosen or 'c++ and g++'})", remedy)


def _ninja() -> Path:
    """ninja from PATH, or from this Python's environment, whether it is activated or not."""
    folders = [Path(sys.prefix, "bin"), Path(sys.executable).parent]
    with contextlib.suppress(ImportError):
        import ninja

        folders.append(Path(ninja.BIN_DIR))
    if found := shutil.which("ninja") or shutil.which("ninja", path=os.pathsep.join(map(str, folders))):
        return Path(found).absolute()
    raise NativeError("ninja was not found", "pip install ninja")


def _stamp(path: Path) -> tuple[int, int] | None:
    """A value that changes whenever the file is replaced; None if it does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ino


def _compile(recipe: BuildRecipe, environment: dict[str, str], record: Path, progress: Callable[[str], None]) -> None:
    """Build the library and move it into place; the caller holds the lock."""
    folder = recipe.folder
    for left in folder.parent.glob(f".{folder.name}.*"):  # left by killed builds
        shutil.rmtree(left, ignore_errors=True)
    temporary = folder.parent / f".{folder.name}.{os.getpid()}-{secrets.token_hex(3)}"
    temporary.mkdir()
    try:
        began = time.time()
        status = _run(recipe, temporary, environment, progress)
        unchanged = artifacts.recipe(recipe.kind, recipe.architectures, recipe.simd) == recipe
        if status or not unchanged:
            log = folder.parent / f"{folder.name}.log"
            os.replace(temporary / "build.log", log)
            cause, remedy = _cause(log.read_text(encoding="utf-8", errors="replace"), status)
            if not unchanged:
                cause, remedy = "the sources changed while they were being compiled", "try again"
            failure = {"cause": cause, "remedy": remedy, "log": str(log)}
            _write(temporary / "failed", failure)
            os.replace(temporary / "failed", record)
            raise NativeError(cause, remedy, log)
        information = {
            "built": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(began)),
            "seconds": round(time.time() - began, 1),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "capability": (recipe.simd or platform.machine()) if recipe.kind == "cpu" else None,
            "architectures": recipe.architectures,
            "flags": [*recipe.cflags] if recipe.kind == "cpu" else [*recipe.cuda_cflags],
            "compiler": environment["CXX"],
            "sources": recipe.source_names,
            "size": (temporary / recipe.file).stat().st_size,
        }
        _write(temporary / "build.json", information)
        for name in ("build.json", recipe.file):
            sync(temporary / name)
        folder.mkdir(exist_ok=True)
        for name in ("build.log", "build.json", recipe.file):
            os.replace(temporary / name, folder / name)
        record.unlink(missing_ok=True)
        record.with_suffix(".log").unlink(missing_ok=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _run(recipe: BuildRecipe, folder: Path, environment: dict[str, str], progress: Callable[[str], None]) -> int:
    """Compile into `folder`, with all output in its build.log; returns the exit status."""
    arguments = {
        "name": recipe.library,
        "sources": _translation_units(recipe, folder),
        "extra_cflags": list(recipe.cflags),
        "extra_cuda_cflags": list(recipe.cuda_cflags),
        # As Debian's linker does: torch names all its libraries; an unused one would tie the result to Python.
        "extra_ldflags": ["-Wl,--as-needed"],
        "extra_include_paths": [str(path) for path in recipe.include_paths],
        "with_cuda": recipe.kind == "cuda",
        "build_directory": str(folder),
    }
    script = str(Path(__file__).with_name("compile_worker.py"))
    log, seen = folder / "build.log", 0
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, script, json.dumps(arguments), json.dumps(recipe.runs_here)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            # Compilers write tens of megabytes into TMPDIR; /tmp is small where it is in memory.
            env={**environment, "TMPDIR": str(folder)},
            start_new_session=True,
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
                steps = _STEP.findall(log.read_text(encoding="utf-8", errors="replace"))
                for number, target in steps[seen:]:
                    progress(f"{number} {Path(target).name}")
                seen = len(steps)
                if process.returncode is not None:
                    return process.returncode
        finally:
            if process.poll() is None:  # interrupted: also end the compilers that it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _translation_units(recipe: BuildRecipe, folder: Path) -> list[str]:
    """The files to compile. For the CPU this writes one file per folder, which includes all sources of the folder.

    Headers and template instances that they share are then compiled only once, which saves a third of their time.
    """
    if recipe.kind != "cpu":
        return [str(path) for path in recipe.sources]
    units: list[str] = []
    for parent, sources in itertools.groupby(recipe.sources, key=lambda path: path.parent):
        if parent == recipe.root:
            units += map(str, sources)
            continue
        unit = folder / f"{'_'.join(parent.relative_to(recipe.root).parts)}.cpp"
        # The warning is about anonymous namespaces in included files; nothing else includes these files.
        lines = ['#pragma GCC diagnostic ignored "-Wsubobject-linkage"']
        lines += (f'#include "{path.relative_to(recipe.root).as_posix()}"' for path in sources)
        unit.write_text("\n".join([*lines, ""]), encoding="utf-8")
        units.append(str(unit))
    return units


def _cause(log: str, status: int) -> tuple[str, str]:
    """The most informative line of a failed build's log, and a remedy if one is known."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if _ERROR.search(line) and not line.startswith("[")]  # "[1/2] c++ ...": a command
    cause = telling[0] if telling else lines[-1] if lines else f"the compiling process ended with status {status}"
    remedy = next((remedy for sign, remedy in _REMEDIES if sign in log), "")
    return cause[:300], remedy
