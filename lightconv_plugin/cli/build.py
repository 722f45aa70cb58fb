"""`lightconv build`: compile the native kernels now, so that their first use needs neither time nor a compiler."""

import argparse
import sys

from lightconv_plugin.errors import InputError


def run(args: argparse.Namespace) -> int:
    from lightconv_plugin.ops import artifacts, prebuild

    if wrong := [kind for kind in args.kind if kind not in artifacts.KINDS]:
        raise InputError(f"can build {' and '.join(artifacts.KINDS)}, got {wrong[0]!r}")
    if args.cuda_arch is not None and args.kind and "cuda" not in args.kind:
        raise InputError("--cuda-arch applies to the CUDA kernels, but only cpu is to be built")
    if args.portable and args.kind and "cpu" not in args.kind:
        raise InputError("--portable applies to the CPU kernels, but only cuda is to be built")
    try:
        named = artifacts.parse_architectures(args.cuda_arch) if args.cuda_arch is not None else None
    except ValueError as error:
        raise InputError(f"--cuda-arch: {error}") from None
    failed = False
    try:
        for outcome in prebuild.build_all(args.kind, named, _progress, portable=args.portable):
            failed |= outcome.failed
            if outcome.failed:
                print(f"lightconv build: error: {outcome.kind}: {outcome.error}", file=sys.stderr)
            elif outcome.error:
                print(f"{outcome.kind}: not built: {outcome.error.cause}")
            else:
                took = "already built" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
                print(f"{outcome.kind}: {outcome.library} ({took})")
    except ValueError as error:
        raise InputError(str(error)) from None
    return int(failed)


def _progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "build",
        description="Compiles the CPU and CUDA kernels into the cache (TORCH_EXTENSIONS_DIR), from where they are "
        "loaded at first use, and prints their paths. Libraries that are up to date and can be loaded are not built "
        "again. Exit status 1, with the cause and the path of the log, if a library cannot be built, "
        "of the CUDA kernels only if cuda, --cuda-arch or TORCH_CUDA_ARCH_LIST asks for them.",
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
    parser.add_argument(
        "--portable",
        action="store_true",
        help="build the CPU kernels for every instruction set, not only for the best one that this CPU has: for an "
        "image or a shared cache that is used on machines with other CPUs",
    )
