"""A straightforward fused loop (naive.cpp), as a peer of our dynamicconv on a CPU, in float32."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.candidates import Arguments, Candidate, as_it_is, leaf
from benchmarks.report import BenchmarkError

NAME = "fused loop, no blocking"
_SOURCE = Path(__file__).with_name("naive.cpp")
_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC")


def fused_loop(a: Arguments) -> Iterator[Candidate]:
    """The loop as a candidate; none for other types, devices, operators or normalisations, or with GLU or dropout.

    Raises:
        BenchmarkError: the C++ compiler (CXX, or g++) failed.
    """
    case = a.case
    plain = case.normalize == "softmax" and not case.glu and not case.dropout
    if not a.dynamic or a.x.dtype != torch.float32 or a.x.device.type != "cpu" or not plain:
        return
    x, weight = leaf(a.x), leaf(a.weight)
    shape = (case.steps, case.batch, case.channels, case.heads, case.kernel_size, case.padding_l)
    yield Candidate(NAME, lambda: _FusedLoop.apply(x, weight, shape), (x, weight), a.grad.contiguous(), as_it_is)


class _FusedLoop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shape = shape
        out = torch.empty_like(x)
        _call(_library().naive_forward, shape, x, weight, out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        _call(_library().naive_backward, ctx.shape, grad, x, weight, dx, dweight)
        return dx, dweight, None


def _call(function, shape: tuple[int, ...], *tensors: Tensor) -> None:
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    function((ctypes.c_int64 * len(shape))(*shape), *pointers, ctypes.c_int(torch.get_num_threads()))


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "naive.so")
        command = [os.environ.get("CXX") or "g++", *_FLAGS, str(_SOURCE), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchmarkError(f"{' '.join(command)} failed: {done.stderr.strip()}")
        return ctypes.CDLL(str(library))
