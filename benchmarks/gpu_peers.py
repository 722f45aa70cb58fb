"""Other projects' GPU kernels, compiled or imported from given folders; this repository has none of their code.

    --fairseq-source DIR    a checkout of fairseq: its CUDA layers fairseq/modules/{lightconv,dynamicconv}_layer
    --dynamic-conv1d DIR    a checkout of dynamic-conv1d (Sieberling et al. 2026): headwise.py
    --jet-nemotron DIR      a checkout of Jet-Nemotron: jetai/modeling/hf/dconv_fwdbwd.py

`python -m benchmarks.gpu_peers` with these options compiles everything in parallel processes and keeps it in the
caches: fairseq's layers take minutes, and Triton tries dozens of variants of each kernel.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import candidates as our_candidates
from benchmarks.candidates import Arguments, Candidate, as_it_is, leaf
from benchmarks.report import BenchmarkError
from benchmarks.report import run as run_main
from benchmarks.shapes import SETS

FAIRSEQ, DYNAMIC_CONV1D, JET_NEMOTRON = "fairseq CUDA", "dynamic-conv1d", "Jet-Nemotron"
LAYERS = ("lightconv", "dynamicconv")
_FAIRSEQ_KERNELS = (3, 5, 7, 15, 31, 63, 127, 255)
# fairseq's headers use SHFL_MASK and std::cout before they are defined (its issue 4277). Compiling only for float16,
# the only half type it supports, takes a third of the time.
_MEND = """\
#pragma once
#include <iostream>
#include <ATen/Dispatch.h>
#define SHFL_MASK 0xffffffff
#undef AT_DISPATCH_FLOATING_TYPES_AND_HALF
#define AT_DISPATCH_FLOATING_TYPES_AND_HALF(TYPE, NAME, ...) \\
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fairseq-source", type=Path, metavar="DIR", help="compile fairseq's CUDA layers from there")
    parser.add_argument("--dynamic-conv1d", type=Path, metavar="DIR", help="Sieberling et al.'s Triton kernels")
    parser.add_argument("--jet-nemotron", type=Path, metavar="DIR", help="Jet-Nemotron's Triton kernels")


def check(options: argparse.Namespace) -> None:
    """Check that each given folder has the expected files, and that there is a GPU."""
    expected = {
        "fairseq_source": [f"fairseq/modules/{layer}_layer/cuda_function_gen.py" for layer in LAYERS],
        "dynamic_conv1d": ["headwise.py"],
        "jet_nemotron": ["jetai/modeling/hf/dconv_fwdbwd.py"],
    }
    for name, files in expected.items():
        folder = getattr(options, name)
        if folder is None:
            continue
        option = "--" + name.replace("_", "-")
        for file in files:
            if not (folder / file).is_file():
                raise BenchmarkError(f"{option}: {folder} has no {file}")
        if getattr(options, "device", "cuda") != "cuda":
            raise BenchmarkError(f"{option} needs --device cuda")


def named(a: Arguments, options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Candidate]]]:
    """For each peer whose folder is given: a function that makes its candidate if it can compute this case."""
    makers = {
        FAIRSEQ: (_fairseq_layers, options.fairseq_source),
        DYNAMIC_CONV1D: (_dynamic_conv1d, options.dynamic_conv1d),
        JET_NEMOTRON: (_jet_nemotron, options.jet_nemotron),
    }
    return {name: partial(make, a, folder) for name, (make, folder) in makers.items() if folder is not None}


# ------------------------------------------------------------------------------------------------ fairseq


def build_fairseq_layer(layer: str, source: Path) -> ModuleType:
    """Compile a layer in torch's extensions folder and load it; later calls find it there.

    This works on copies of the sources, because fairseq's generator writes included files next to them.
    """
    from torch.utils import cpp_extension

    modules = source / "fairseq" / "modules"
    folder = modules / f"{layer}_layer"
    files = sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".cu", ".cuh", ".py"))
    digest = hashlib.sha256(f"{torch.__version__} {torch.version.cuda} {_MEND}".encode())
    for path in (*files, modules / "cuda_utils.cu"):
        digest.update(path.read_bytes())
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    build = root / f"lightconv_benchmarks_{layer}_{digest.hexdigest()[:12]}"
    if not build.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            copy = Path(scratch) / "copy"
            (copy / "layer").mkdir(parents=True)
            for path in files:
                shutil.copy(path, copy / "layer")
            shutil.copy(modules / "cuda_utils.cu", copy)
            (copy / "mend.h").write_text(_MEND, encoding="utf-8")
            subprocess.run([sys.executable, "cuda_function_gen.py"], cwd=copy / "layer", check=True)
            os.replace(copy, build)
    # Without the CPU file next to them, which does not compile and is not needed.
    return cpp_extension.load(
        f"{layer}_cuda",
        [str(build / "layer" / name) for name in (f"{layer}_cuda.cpp", f"{layer}_cuda_kernel.cu")],
        extra_cuda_cflags=["-O3", "-w", "-include", str(build / "mend.h")],
        build_directory=str(build),
    )


_fairseq_layer = cache(build_fairseq_layer)


class _FairseqFunction(torch.autograd.Function):
    """A layer's forward and backward under autograd; x (B,C,T), filters (H,K) or (B,H,K,T), already normalised."""

    @staticmethod
    def forward(ctx, x, filters, padding_l, layer):
        ctx.save_for_backward(x, filters)
        ctx.padding_l, ctx.layer = padding_l, layer
        return layer.forward(x, filters, padding_l)[0]

    @staticmethod
    def backward(ctx, grad):
        dx, dfilters = ctx.layer.backward(grad.contiguous(), ctx.padding_l, *ctx.saved_tensors)
        return dx, dfilters, None, None


def _fairseq_layers(a: Arguments, source: Path) -> Iterator[Candidate]:
    """The layers as used in fairseq: (T,B,C) in and out, with the transpositions included."""
    case = a.case
    if (
        a.operator not in LAYERS
        or a.x.dtype != torch.float16
        or case.kernel_size not in _FAIRSEQ_KERNELS
        or case.padding_l not in (case.kernel_size // 2, case.kernel_size - 1)
        or case.normalize not in ("softmax", "none")
    ):
        return
    layer = _fairseq_layer(a.operator, source.resolve())
    x, weight = leaf(a.x), leaf(a.weight)

    def run() -> Tensor:
        filters = a.normalized(weight)
        if a.dynamic:
            filters = filters.permute(1, 2, 3, 0).contiguous()
        inputs = (F.glu(x, -1) if case.glu else x).permute(1, 2, 0).contiguous()
        return _FairseqFunction.apply(inputs, filters, case.padding_l, layer).permute(2, 0, 1)

    yield Candidate(FAIRSEQ, run, (x, weight), a.grad.contiguous(), as_it_is)


# ------------------------------------------------------------------------------------------------ Triton kernels


@cache
def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"lightconv_benchmarks_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Triton looks up a kernel's module by name
    spec.loader.exec_module(module)
    return module


def _takes_short_convolution(a: Arguments) -> bool:
    case = a.case
    return a.dynamic and case.causal and case.normalize == "none" and not case.glu and not case.dropout


def _batch_first(tensor: Tensor) -> Tensor:
    return leaf(tensor.transpose(0, 1))


def _swap(out: Tensor) -> Tensor:
    return out.transpose(0, 1)


def _dynamic_conv1d(a: Arguments, folder: Path) -> Iterator[Candidate]:
    """x (B,T,C), weight (B,T,H,K), where tap w multiplies x[t − w]: the reverse of our order."""
    per_head = a.case.channels // a.case.heads
    # Its blocks are 32 to 128 channels wide and hold whole heads; its ranges are powers of two.
    if not _takes_short_convolution(a) or per_head > 32 or per_head & (per_head - 1):
        return
    convolve = _import_file((folder / "headwise.py").resolve()).headwise_dynamic_convolution
    x, weight = _batch_first(a.x), _batch_first(a.weight.flip(-1))
    yield Candidate(DYNAMIC_CONV1D, lambda: convolve(x, weight), (x, weight), _batch_first(a.grad).detach(), _swap)


def _jet_nemotron(a: Arguments, folder: Path) -> Iterator[Candidate]:
    """x (B,T,C), one filter per channel (B,T,C,K), K ≤ 4 a power of two; heads' filters are repeated beforehand."""
    case = a.case
    if not _takes_short_convolution(a) or case.kernel_size not in (1, 2, 4):
        return
    if "einops" not in sys.modules and importlib.util.find_spec("einops") is None:
        # The file imports `rearrange` but does not use it.
        sys.modules["einops"] = types.ModuleType("einops")
        sys.modules["einops"].rearrange = None
    convolve = _import_file((folder / "jetai/modeling/hf/dconv_fwdbwd.py").resolve()).dynamic_conv_triton_autograd
    x = _batch_first(a.x)
    weight = _batch_first(a.weight.repeat_interleave(case.channels // case.heads, 2))
    yield Candidate(JET_NEMOTRON, lambda: convolve(x, weight), (x, weight), _batch_first(a.grad).detach(), _swap)


def _prepare(task: tuple[str, int, argparse.Namespace]) -> str:
    """Compile one kernel in its own process; returns a message."""
    kind, number, options = task
    if kind == FAIRSEQ:
        build_fairseq_layer(LAYERS[number], options.fairseq_source)
        return f"fairseq's {LAYERS[number]} layer is compiled"
    case = SETS["short"][number]
    a = our_candidates.arguments("dynamicconv", case, torch.device("cuda"), torch.bfloat16)
    for peer in named(a, options)[kind]():
        peer.both()
    torch.cuda.synchronize()
    return f"{kind} is compiled for {case.name}"


def main(arguments: list[str] | None = None) -> None:
    """Compile everything; BenchmarkError for wrong options, and at the end if anything did not compile."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_peers", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    options = parser.parse_args(arguments)
    check(options)
    tasks = [(FAIRSEQ, number, options) for number in range(len(LAYERS))] if options.fairseq_source else []
    for kind, folder in ((DYNAMIC_CONV1D, options.dynamic_conv1d), (JET_NEMOTRON, options.jet_nemotron)):
        tasks += [(kind, number, options) for number in range(len(SETS["short"]))] if folder else []
    if not tasks:
        raise BenchmarkError("nothing to compile: name a folder (--help)")
    failed = []
    with ProcessPoolExecutor(len(tasks), mp_context=get_context("spawn")) as pool:
        kinds = {pool.submit(_prepare, task): task[0] for task in tasks}
        for done in as_completed(kinds):
            if error := done.exception():
                failed.append(kinds[done])
                print(f"{kinds[done]}: {type(error).__name__}: {error}", flush=True)
            else:
                print(done.result(), flush=True)
    if failed:
        raise BenchmarkError(f"did not compile: {', '.join(sorted(set(failed)))}")


if __name__ == "__main__":
    sys.exit(run_main(main))
