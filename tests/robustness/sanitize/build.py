"""Compile cpu/ with a sanitizer and put the library where the plugin looks for its own.

The library lies in a folder as in a cache: with TORCH_EXTENSIONS_DIR set to it a process finds it as it finds any. That
process must have the sanitizer's runtime loaded before all else (LD_PRELOAD), which is why the plugin's own builder,
which loads what it made and whose compilers would have the runtime too, is not used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch.utils import cpp_extension

from lightconv_plugin.ops import artifacts

HERE = Path(__file__).resolve().parent
GXX = os.environ.get("CXX", "g++")
# TSan's threads are the standard library's (threads/).
FLAGS = {
    "address": ("-fsanitize=address", "-fno-omit-frame-pointer"),
    "undefined": ("-fsanitize=undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread", f"-I{HERE / 'threads'}"),
}
# What a process under each is started with: a report ends it, and Python's own memory, kept to the end, is no leak.
OPTIONS = {
    # gcc before 13.3 misaligns vectors of 64 bytes in the frames that use after return is found by (its bug 110027).
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:exitcode=98",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
}
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}


def build(kind: str, folder: Path) -> Path:
    """Compile and link, unless it is there; the library.

    Raises:
        subprocess.CalledProcessError: the compiler failed; what it wrote is on standard error.
    """
    recipe = artifacts.recipe("cpu")
    target = folder / recipe.library / recipe.name / recipe.file
    if target.is_file():
        return target
    scratch = target.with_name("objects")
    scratch.mkdir(parents=True, exist_ok=True)
    flags = [*(flag for flag in recipe.cflags if flag != "-O3"), *(f"-I{path}" for path in recipe.include_paths)]
    libs = [option for path in cpp_extension.library_paths() for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    made = link(kind, recipe.sources, scratch / recipe.file, flags, [*libs, "-lc10", "-ltorch", "-ltorch_cpu"])
    made.replace(target)
    shutil.rmtree(scratch)
    return target


def link(kind: str, sources: Iterable[Path], target: Path, flags: Sequence[str] = (), libs: Sequence[str] = ()) -> Path:
    """Compile sources with a sanitizer into a shared library, which is returned; objects lie beside it."""
    included = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    objects = []
    for source in sources:
        objects.append(str(target.with_name(f"{source.stem}.o")))
        options = [*FLAGS[kind], "-std=c++20", "-O1", "-g1", "-fPIC", *flags, *included]
        subprocess.run([GXX, *options, "-c", str(source), "-o", objects[-1]], check=True)
    subprocess.run([GXX, FLAGS[kind][0], "-shared", *objects, *libs, "-o", str(target)], check=True)
    return target


def environment(kind: str) -> dict[str, str]:
    """Of a process that is to use a library of this kind."""
    # Python itself is not linked with C++'s library, whose exceptions the sanitizers look for when they start.
    preloaded = [_library(RUNTIMES[kind]), _library("libstdc++.so.6")]
    return {**os.environ, **OPTIONS, "LD_PRELOAD": ":".join(map(str, preloaded))}


def _library(name: str) -> Path:
    """A library of the compiler's.

    Raises:
        FileNotFoundError: this compiler has none.
    """
    found = subprocess.run([GXX, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    if not path.is_absolute():
        raise FileNotFoundError(f"{GXX} has no {name}: install gcc's sanitizers (libasan, libubsan, libtsan)")
    return path.resolve()
