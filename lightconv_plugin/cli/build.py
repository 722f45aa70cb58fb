"""`lightconv build`: compile the native kernels now, so that no first use has to wait, or needs a compiler."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lightconv_plugin.errors import InputError


def run(args: argparse.Namespace) -> int:
    from lightconv_plugin.ops import artifacts

    if wrong := [kind for kind in args.kind if kind not in artifacts.KINDS]:
        raise InputError(f"can build {' and '.join(artifacts.KINDS)}, got {wrong[0]!r}")
    if args.cuda_arch is not None and args.kind and "cuda" not in args.kind:
        raise InputError("--cuda-arch is for the CUDA kernels, and only cpu is to be built")
    try:
        named = artifacts.parse_architectures(args.cuda_arch) if args.cuda_arch is not None else None
    except ValueError as error:
        raise InputError(f"--cuda-arch: {error}") from None
    _, failed = build(args.kind, named)
    return 1 if failed else 0


def build(kinds: Sequence[str] = (), architectures: tuple[str, ...] | None = None) -> tuple[list[Path], bool]:
    """Build artifacts, saying so; setup.py calls it too.

    Args:
        kinds: of "cpu" and "cuda"; empty: cpu, and cuda where that is possible, or if `architectures` are given.
        architectures: of GPUs, as parsed; None: TORCH_CUDA_ARCH_LIST, or those of the GPUs here.

    Returns:
        The artifacts, and whether one that was asked for could not be built (stderr says why).
    """
    from lightconv_plugin.ops import artifacts

    paths, failed = [], False
    for kind in artifacts.KINDS:
        if kinds and kind not in kinds:
            continue
        try:
            paths.append(_build(_cuda_recipe(architectures) if kind == "cuda" else artifacts.recipe(kind)))
        except _Impossible as error:
            if kinds or architectures:
                failed = _failed(kind, error)
            else:
                print(f"cuda: not built: {error.__cause__.cause}")
        except artifacts.NativeError as error:
            failed = _failed(kind, error)
    return paths, failed


class _Impossible(Exception):
    """CUDA kernels cannot be compiled here at all; caused by a NativeError."""


def _cuda_recipe(named: tuple[str, ...] | None):
    from lightconv_plugin.ops import artifacts, compilation

    try:
        try:
            recipe = artifacts.recipe("cuda", named or artifacts.chosen_architectures())
        except artifacts.NativeError:
            compilation.toolkit()  # that there is no toolkit says more than that there is no GPU
            raise
        if artifacts.finished(recipe) is None:
            compilation.toolkit()
    except artifacts.NativeError as error:
        raise _Impossible(str(error)) from error
    except ValueError as error:
        raise InputError(str(error)) from None
    return recipe


def _failed(kind: str, error: Exception) -> bool:
    print(f"lightconv build: error: {kind}: {error}", file=sys.stderr)
    return True


def _build(recipe) -> Path:
    from lightconv_plugin.ops import compilation

    began, said = time.perf_counter(), []

    def say(what: str) -> None:
        said.append(what)
        print(f"{recipe.kind}: {what}", file=sys.stderr, flush=True)

    target = f" for {';'.join(recipe.architectures)}" if recipe.architectures else ""
    path = compilation.build(
        recipe,
        started=lambda: say(f"compiling {len(recipe.sources)} files{target}"),
        waiting=lambda: say("waiting for another process that compiles it"),
        progress=say,
    )
    took = f"{time.perf_counter() - began:.1f} s" if said else "was there already"
    print(f"{recipe.kind}: {path} ({took})")
    return path


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "build",
        description="Compiles the CPU and CUDA kernels into the cache (TORCH_EXTENSIONS_DIR), from where the first use "
        "loads them, and prints where they are. Nothing is done again that is there. "
        "Exit status 1, with the cause and the log's path, if a library cannot be built.",
    )
    parser.add_argument(
        "kind",
        nargs="*",
        metavar="cpu|cuda",
        help="what to build (default: cpu, and cuda if torch has CUDA, nvcc is found and the architectures are known)",
    )
    parser.add_argument(
        "--cuda-arch",
        metavar="LIST",
        help="GPU architectures, such as '8.0;9.0'; no GPU is needed then "
        "(default: TORCH_CUDA_ARCH_LIST, else those of the GPUs here)",
    )
    parser.set_defaults(run=run)
