"""Compiles the native kernels ahead of their first use: for `lightconv build`, and for wheels that contain them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightconv_plugin.ops import artifacts, compilation, instructions
from lightconv_plugin.ops.artifacts import BuildRecipe, NativeError

_LOAD = """
import sys
from pathlib import Path
from lightconv_plugin.ops import backends

unusable = {}
backends.opened([Path(sys.argv[1])], unusable)
print(*unusable.values())
sys.exit(3 if unusable else 0)
"""


@dataclass(frozen=True)
class Outcome:
    """The result of building one library.

    `error` says why there is no library. CUDA kernels that cannot be compiled are not a failure unless they were
    requested, by name or with architectures. `seconds` is the time the build took; None for a library that existed
    already.
    """

    kind: str
    library: Path | None = None
    seconds: float | None = None
    error: NativeError | None = None
    failed: bool = False


def build_all(
    kinds: Sequence[str] = (),
    architectures: tuple[str, ...] | None = None,
    say: Callable[[str], None] = lambda message: None,
    *,
    portable: bool = False,
) -> Iterator[Outcome]:
    """Build the libraries, one after the other.

    Args:
        kinds: "cpu", "cuda" or both. Empty: cpu, and cuda if it can be compiled or architectures are named.
        architectures: GPU architectures as returned by `artifacts.parse_architectures`. None: those in
            TORCH_CUDA_ARCH_LIST, otherwise those of this machine's GPUs.
        say: receives the progress, such as "cpu: compiling 4 files".
        portable: build the CPU library for every instruction set, also for those that this CPU lacks, so that it can
            be copied to other machines; otherwise only for the best one that runs here.

    Raises:
        ValueError: TORCH_CUDA_ARCH_LIST is not a list of architectures.
    """
    for kind in artifacts.KINDS:
        if kinds and kind not in kinds:
            continue
        required = kind == "cpu" or bool(kinds) or bool(architectures or artifacts.listed_architectures())
        try:
            recipes = [_cuda_recipe(architectures)] if kind == "cuda" else _cpu_recipes(portable)
        except NativeError as error:
            yield Outcome(kind, error=error, failed=required)
            continue
        for recipe in recipes:
            try:
                yield _build(recipe, say)
            except NativeError as error:
                yield Outcome(kind, error=error, failed=required)


def _cpu_recipes(portable: bool) -> list[BuildRecipe]:
    sets = instructions.compilable() if portable else (instructions.compiled_for(),)
    return [artifacts.recipe("cpu", simd=simd) for simd in sets]


def _cuda_recipe(architectures: tuple[str, ...] | None) -> BuildRecipe:
    try:
        return artifacts.recipe("cuda", architectures or artifacts.chosen_architectures())
    except NativeError:
        compilation.toolkit()  # a missing toolkit is a better explanation than a missing GPU
        raise


def _build(recipe: BuildRecipe, say: Callable[[str], None]) -> Outcome:
    began, worked = time.perf_counter(), False

    def tell(message: str) -> None:
        nonlocal worked
        worked = True
        say(f"{recipe.kind}: {message}")

    targets = recipe.architectures or ((recipe.simd,) if recipe.simd else ())
    target = f" for {';'.join(targets)}" if targets else ""
    unusable = _unusable(recipe)
    for path, cause in unusable.items():
        say(f"{recipe.kind}: cannot load {path}: {cause}")
    library = compilation.build(
        recipe,
        started=lambda: tell(f"compiling {len(recipe.sources)} files{target}"),
        waiting=lambda: tell("waiting for another process that is compiling it"),
        progress=tell,
        unusable=unusable,
    )
    return Outcome(recipe.kind, library, time.perf_counter() - began if worked else None)


def _unusable(recipe: BuildRecipe) -> dict[Path, str]:
    """Why those of the finished libraries that come before the first good one cannot be loaded.

    Each is loaded in another process: a damaged one may kill it, and one for other instructions would take the place
    of what is loaded here.
    """
    unusable: dict[Path, str] = {}
    for library in artifacts.finished(recipe) if recipe.runs_here else ():
        command = [sys.executable, "-c", _LOAD, str(library)]
        environment = {**os.environ, **compilation.same_modules()}
        # Python would import modules of the working directory. What else may fail says nothing about the library.
        done = subprocess.run(
            command, cwd=library.parent, env=environment, stdin=subprocess.DEVNULL, capture_output=True
        )
        if done.returncode == 3:
            unusable[library] = done.stdout.decode(errors="replace").strip()
        elif done.returncode < 0:
            unusable[library] = f"it ends the process by signal {-done.returncode}"
        else:
            break
    return unusable
