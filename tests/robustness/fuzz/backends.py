"""Who computes: the native kernels, the reference, the CUDA sources on the host under the sanitizers, a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from lightconv_plugin.ops import backends, reference
from tests.cuda import host
from tests.cuda.operators import Operators
from tests.ops.conftest import by_reference
from tests.robustness.fuzz.case import DTYPES

BACKENDS = ("cpu", "reference", "cuda-on-host", "cuda")
# What the CUDA kernels take.
_HALVES_AND_FLOAT = ("float32", "bfloat16", "float16")


def dtypes_of(backend: str) -> tuple[str, ...]:
    return _HALVES_AND_FLOAT if backend.startswith("cuda") else tuple(DTYPES)


def available() -> tuple[str, ...]:
    """Those that can run here."""
    return BACKENDS if torch.cuda.is_available() else BACKENDS[:-1]


@contextlib.contextmanager
def computing(backend: str) -> Iterator[str]:
    """Inside, the public operators are computed by this backend; the value is the device of its tensors.

    Raises:
        RuntimeError: the backend cannot be had.
    """
    if backend == "reference":
        with by_reference():
            yield "cpu"
    elif backend == "cuda-on-host":
        with _on_host():
            yield "cpu"
    else:
        decided = backends.decision(backend)
        if decided.backend != backend:
            raise RuntimeError(f"the backend {backend} cannot be had: {decided.reason}")
        yield backend


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """The .cu sources as kernels for CPU tensors (tests/cuda), each call twice under ASan and UBSan."""
    runner = host.Runner(host.build_runner())
    operators = Operators(runner)
    library = torch.library.Library("lightconv", "IMPL")

    def kernel(name: str):
        on_host, on_nothing = getattr(operators, name), getattr(reference, name)

        def run(*args):
            # As cuda/common/binding.h: an empty batch is no launch.
            sentences = next(arg for arg in args if isinstance(arg, torch.Tensor)).shape[1]
            return on_host(*args) if sentences else on_nothing(*args)

        return run

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name in backends.OPERATORS:
                library.impl(name, kernel(name), "CPU")
        yield
    finally:
        library._destroy()
        runner.close()
