"""What goes into a native library, and where to find a finished one.

A library is named after a hash of everything that determines its content: the sources, the flags, torch, its C++
ABI and (of CUDA kernels) CUDA version, and the machine's architecture. A stale library is therefore never loaded after
an edit or an upgrade. The compiler is not part of the hash: a library works whichever compiler built it, and a machine
without a compiler can use a library from the installation or from a shared cache. Neither is the C library: one that is
built with an older C library works with a newer one, too. Where it is the other way round, it cannot be loaded, and is
compiled again.

    lightconv_plugin/prebuilt/lightconv_cpu/HASH/lightconv_cpu.so         by LIGHTCONV_PREBUILD=1 pip install ., for
                                                                          each instruction set
    $TORCH_EXTENSIONS_DIR/lightconv_cpu/HASH/lightconv_cpu.so             at first use, or by `lightconv build`
    $TORCH_EXTENSIONS_DIR/lightconv_cuda/HASH-8.0_9.0/lightconv_cuda.so   with the GPU architectures it was built for

Next to a library are build.log (the compiler's output) and build.json (when and how it was built). This module only
finds libraries; compilation.py builds them, backends.py loads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightconv_plugin.ops import instructions
from lightconv_plugin.paths import user_caches

KINDS = ("cpu", "cuda")
PACKAGE = Path(__file__).resolve().parent.parent
PREBUILT = PACKAGE / "prebuilt"
# In a wheel the sources are inside the package; in a checkout the package is beside them.
SOURCES = {
    kind: PACKAGE / "sources" / kind if (PACKAGE / "sources").is_dir() else PACKAGE.parent / kind for kind in KINDS
}
SHARED = (PACKAGE / "ops" / "autograd.h", PACKAGE / "ops" / "boxed.h")
"""Headers that every library also includes; a flag sets the dispatch key."""

# What a user without a home folder has for a cache: no file can be there, and none can be made, not even by root.
NO_CACHE = Path(os.devnull, "no-home-folder")

_COMPILED = {"cpu": (".cpp",), "cuda": (".cpp", ".cu")}
_HASHED = (".cpp", ".cu", ".cuh", ".h")
_SIMD_FLAGS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
}
_ARCHITECTURE = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")


class NativeError(Exception):
    """Why there is no native library: the cause in one line, a remedy, and the log of the build."""

    def __init__(self, cause: str, remedy: str = "", log: Path | None = None) -> None:
        super().__init__("; ".join([cause, *([remedy] if remedy else []), *([f"log: {log}"] if log else [])]))
        self.cause, self.remedy, self.log = cause, remedy, log


@dataclass(frozen=True)
class BuildRecipe:
    """Everything that goes into one library; `name` is the name of its folder."""

    kind: str
    architectures: tuple[str, ...]
    simd: str  # one of instructions.runnable(); "" for kind "cuda"
    root: Path  # what #include "common/..." is relative to
    sources: tuple[Path, ...]
    cflags: tuple[str, ...]
    cuda_cflags: tuple[str, ...]
    key: str

    @property
    def library(self) -> str:
        return f"lightconv_{self.kind}"

    @property
    def file(self) -> str:
        return self.library + ".so"

    @property
    def name(self) -> str:
        return "-".join([self.key, *(["_".join(self.architectures)] if self.architectures else [])])

    @property
    def include_paths(self) -> list[Path]:
        """The folders of the sources' own headers."""
        return [self.root, *dict.fromkeys(path.parent for path in SHARED)]

    @property
    def source_names(self) -> list[str]:
        return [_name_of(path, self.root) for path in self.sources]

    @property
    def runs_here(self) -> bool:
        """Whether loading the library is safe: instructions that this CPU lacks could end the process."""
        return self.kind != "cpu" or self.simd in instructions.runnable()

    @property
    def folder(self) -> Path:
        """Where the library is built."""
        return cache_folder() / self.library / self.name


def cache_folder() -> Path:
    """TORCH_EXTENSIONS_DIR, or torch's own folder for compiled extensions; NO_CACHE if the user has no home folder."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen).absolute()
    try:
        return user_caches() / "torch_extensions"
    except RuntimeError:  # neither HOME nor an entry in the system's list of users
        return NO_CACHE


def recipe(kind: str, architectures: Iterable[str] = (), simd: str | None = None) -> BuildRecipe:
    """How to build the library of this kind.

    Args:
        architectures: GPU architectures, as parsed; for kind "cuda" only.
        simd: one of instructions.runnable(), for kind "cpu" only; default: the best.

    Raises:
        NativeError: there are no sources.
    """
    root = SOURCES[kind]
    # Files outside the kernels' folders come first: they take longest to compile.
    # Hidden files are an editor's: Emacs locks a file with a link to nothing, named .#tiles.h.
    hashed = (path for path in root.rglob("*") if path.suffix in _HASHED)
    shown = (path for path in hashed if not any(part.startswith(".") for part in path.relative_to(root).parts))
    files = sorted(shown, key=lambda path: (path.parent != root, path))
    sources = tuple(path for path in files if path.suffix in _COMPILED[kind])
    if not sources:
        raise NativeError(f"found no sources in {root}", "reinstall the package")
    autograd = f"-DLIGHTCONV_AUTOGRAD=Autograd{kind.upper()}"
    if kind == "cpu":
        # -O2 saves a fifth of the compile time, but 16-bit operators and the search then take 2 to 3 times as long.
        # Compiled with -fopenmp but not linked with it: the libgomp that torch has loaded is used, with its threads.
        simd = instructions.compiled_for() if simd is None else simd
        cflags: tuple[str, ...] = ("-O3", "-fopenmp", autograd, *_SIMD_FLAGS.get(simd, ()))
        cuda_cflags: tuple[str, ...] = ()
    else:
        cflags, cuda_cflags = ("-O3", autograd), ("-O3",)
    made_of = {
        "kind": kind,
        "torch": _torch_of(kind),
        "cuda": torch.version.cuda if kind == "cuda" else None,
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
        "machine": f"{sys.platform}-{platform.machine()}",
        "flags": [cflags, cuda_cflags],
    }
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode())
    for path in (*files, *SHARED):
        content = path.read_bytes()
        digest.update(f"\0{_name_of(path, root)}\0{len(content)}\0".encode() + content)
    architectures = tuple(architectures)
    cuda_cflags = (*cuda_cflags, *gencode(architectures))
    return BuildRecipe(kind, architectures, simd or "", root, sources, cflags, cuda_cflags, digest.hexdigest()[:16])


def _torch_of(kind: str) -> str:
    """The version of torch that a library is for.

    CPU libraries serve a release with and without CUDA ("2.13.0+cpu", "2.13.0+cu130"): they use the same parts of it.
    """
    release = re.fullmatch(r"(\d+\.\d+\.\d+)(\+(cpu|cu\d+))?", torch.__version__)
    return release[1] if kind == "cpu" and release else torch.__version__


def prebuilt_for() -> list[str]:
    """The versions of torch for which the installed package contains compiled CPU kernels."""
    libraries = PREBUILT.glob("lightconv_cpu/*/lightconv_cpu.so")
    return sorted({str(information(library).get("torch")).partition("+")[0] for library in libraries})


def _name_of(source: Path, root: Path) -> str:
    return source.relative_to(root).as_posix() if source.is_relative_to(root) else source.name


def find(kind: str) -> Path | None:
    """The first of `find_all`; None if the library must be built first."""
    return next(find_all(kind), None)


def find_all(kind: str) -> Iterator[Path]:
    """The finished libraries for this machine (for kind "cuda": for all its GPUs), the preferred one first.

    Raises:
        NativeError: there are no sources.
    """
    if kind == "cpu":
        yield from finished(recipe(kind))
        return
    devices = capabilities()
    wanted = recipe(kind, of_devices(devices))
    yield from finished(wanted)
    # A library for exactly these devices is preferred to others that they can run.
    for root in _roots():
        if os.path.isdir(root / wanted.library):
            for folder in sorted((root / wanted.library).glob(f"{wanted.key}-*")):
                if folder.name != wanted.name and serves(folder, devices) and is_whole(folder / wanted.file):
                    yield folder / wanted.file


def find_lesser() -> Iterator[Path]:
    """The finished CPU libraries that use fewer instructions than this CPU has, the best first."""
    for simd in instructions.runnable()[1:]:
        yield from finished(recipe("cpu", simd=simd))


def finished(wanted: BuildRecipe) -> Iterator[Path]:
    """The libraries of exactly this recipe that have been built: the installation's and the cache's."""
    paths = (root / wanted.library / wanted.name / wanted.file for root in _roots())
    return (path for path in paths if is_whole(path))


def is_whole(library: Path) -> bool:
    """Whether the library exists and has the size in build.json: loading a truncated one kills the process.

    If build.json has no size (libraries of earlier versions), any size is accepted.
    """
    try:
        size = os.path.getsize(library)
    except OSError:  # there is none, or its folder may not be read: Path.is_file raises for the latter
        return False
    return information(library).get("size", size) == size


def _roots() -> tuple[Path, Path]:
    return PREBUILT, cache_folder()


def information(library: Path) -> dict:
    """The content of build.json beside the library; empty if it cannot be read."""
    try:
        content = json.loads(library.with_name("build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# ------------------------------------------------------------------------------------------------ GPU architectures


def parse_architectures(text: str) -> tuple[str, ...]:
    """The architectures in a list such as "8.0;9.0+PTX" (or separated by spaces, as torch allows), sorted.

    Raises:
        ValueError: the list is empty or contains something that is not an architecture.
    """
    names = re.split(r"[;\s]+", text.strip(" ;\t\n"))
    for name in names:
        if not _ARCHITECTURE.fullmatch(name):
            raise ValueError(f"GPU architectures must be numbers such as '8.0;9.0' or '9.0+PTX', got {text!r}")
    return tuple(sorted(set(names), key=lambda name: (_parts(name), name)))


def chosen_architectures() -> tuple[str, ...]:
    """The default architectures: those in TORCH_CUDA_ARCH_LIST, otherwise those of this machine's GPUs.

    Raises:
        ValueError: TORCH_CUDA_ARCH_LIST cannot be parsed.
        NativeError: TORCH_CUDA_ARCH_LIST is not set and there is no GPU.
    """
    if listed := listed_architectures():
        return listed
    devices = capabilities()
    if not devices:
        raise NativeError(
            "there is no GPU to compile for",
            "name the architectures, such as TORCH_CUDA_ARCH_LIST='8.0;9.0'",
        )
    return of_devices(devices)


def listed_architectures() -> tuple[str, ...]:
    """Those in TORCH_CUDA_ARCH_LIST; () if it is not set, or is "native".

    Images of containers set the list for all that is compiled in them. Of those before 7.5, which current compilers do
    not know, only what a GPU of this machine needs is kept.

    Raises ValueError if the list cannot be parsed.
    """
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if listed in ("", "native"):
        return ()
    try:
        names = parse_architectures(listed)
    except ValueError as error:
        raise ValueError(f"TORCH_CUDA_ARCH_LIST: {error}") from None
    here = capabilities()
    kept = [name for name in names if _parts(name) >= (7, 5) or any(covers(name, device) for device in here)]
    return tuple(kept) or names


def capabilities() -> list[tuple[int, int]]:
    """The compute capabilities of the GPUs that torch sees, each once."""
    return sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})


def of_devices(devices: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    return tuple(f"{major}.{minor}" for major, minor in devices)


def serves(folder: Path, devices: Iterable[tuple[int, int]]) -> bool:
    """Whether the library in a folder (named KEY-8.0_9.0+PTX) has code for each of these devices."""
    architectures = folder.name.partition("-")[2].split("_")
    return all(any(covers(name, device) for name in architectures) for device in devices)


def covers(architecture: str, device: tuple[int, int]) -> bool:
    """Whether code for an architecture runs on a device.

    Machine code also runs on later devices of the same major version ("a": only on exactly that device). PTX runs on
    all later devices; that of before 8.0 lacks the kernels for matrix units (cuda/common/band.cuh), which devices from
    8.0 on are given.
    """
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        return False
    major, minor, only, ptx = int(match[1]), int(match[2]), match[3], match[4]
    if only == "a":
        return device == (major, minor)
    return (device[0] == major and device[1] >= minor) or (
        bool(ptx) and device >= (major, minor) and (major >= 8 or device < (8, 0))
    )


def gencode(architectures: Sequence[str]) -> tuple[str, ...]:
    """nvcc's options for a list of architectures."""
    flags = []
    for architecture in architectures:
        number = architecture.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if architecture.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return tuple(flags)


def _parts(architecture: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", architecture)
    return int(major), int(minor)
