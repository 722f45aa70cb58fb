"""Sizes beyond 2³¹ and 2³² elements: strides that long in memory of which few pages exist, and indices computed alone.

With 32-bit arithmetic anywhere on an element's way each of these would read other memory, or other numbers, than asked.
"""

import ctypes
import math
import mmap
import shutil
import subprocess

import pytest
import torch

from lightconv_plugin.ops import artifacts, philox
from tests import programs
from tests.robustness.fuzz.running import drawn

from ..cuda import host
from ..cuda.test_guarantees import STRIDES
from .operators import assert_same_bits, pairwise, random_call

# Indices of weights: beyond 2³¹, 2³², and beyond 2³⁴, where Philox' counter has an upper half.
FIRST = [0, 2**31 - 3, 2**32 + 2, 2**34 - 5, 2**34 + 1, 2**40 + 7, 2**61 + 2]
SEEDS = [5, 2**32 + 9, 2**63 - 2]


def far(values, strides):
    """The same values in memory of which only their pages exist, `strides` (for T and B) apart."""
    strides = (*strides, *values.stride()[2:])
    span = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, span * values.element_size(), flags=flags)
    tensor = torch.frombuffer(memory, dtype=values.dtype, count=span).as_strided(values.shape, strides)
    return tensor.copy_(values.detach()).requires_grad_()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "kind, per_head, strides, dtype",
    pairwise(
        ("lightconv-glu", "dynamicconv-glu", "talkconv"), (1, 3, 32), STRIDES.values(), (torch.float32, torch.bfloat16)
    ),
)
def test_rows_far_apart(kind, per_head, strides, dtype):
    call = random_call(kind, 3, 2, 2, per_head, 2, 1 if kind == "talkconv" else 0, dtype=dtype)
    there = call.replace(**{name: far(call.tensors[name], strides) for name in call.by_row if name != "out"})
    grad = call.randn_like_out()
    want = call.everything(grad)
    want.pop("bias", None)  # its gradient is torch's sum of `grad`, in an order that depends on the strides
    assert_same_bits(there.everything(far(grad, strides).detach()), want)
    state = torch.randn(2, 2, 2 * per_head).to(dtype)
    for ours, theirs in zip(there.step(far(state, strides)), call.step(state), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("seed", SEEDS, ids=hex)
@pytest.mark.parametrize("first", FIRST)
def test_dropout_masks_of_the_reference(first, seed):
    quads = torch.arange(first // 4, first // 4 + 10)
    words = torch.stack(philox.words_at(quads, torch.tensor([seed])), -1).flatten()[first % 4 :][:33]
    want = drawn(seed, (33,), 0.3, first) > 0
    assert torch.equal(words >= math.ceil(0.3 * 2**32), want)


@pytest.fixture(scope="module")
def cpu_masks(tmp_path_factory):
    """cpu/common/philox.h's mask of n weights from one on, compiled for this processor as the library is."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    recipe, target = artifacts.recipe("cpu"), tmp_path_factory.mktemp("philox") / "philox.so"
    source = host.HERE.parent / "ops" / "philox_at.cpp"
    command = ["g++", "-std=c++20", "-shared", "-fPIC", *recipe.cflags, f"-I{artifacts.SOURCES['cpu']}", source]
    subprocess.run([*map(str, command), "-o", str(target)], check=True)
    function = ctypes.CDLL(str(target)).factors_at
    unsigned, signed, real = ctypes.c_uint64, ctypes.c_int64, ctypes.c_double
    function.argtypes = (unsigned, unsigned, signed, unsigned, real, ctypes.POINTER(real))
    function.restype = None

    def masks(seed, first, count):
        factors = (real * count)()
        function(seed, first, count, math.ceil(0.3 * 2**32), 1.0, factors)
        return torch.tensor(list(factors)) > 0

    return masks


@pytest.mark.parametrize("seed", SEEDS, ids=hex)
@pytest.mark.parametrize("first", FIRST)
def test_dropout_masks_of_the_cpu_kernels(cpu_masks, first, seed):
    assert torch.equal(cpu_masks(seed, first, 101), drawn(seed, (101,), 0.3, first) > 0)


@pytest.fixture(scope="module")
def cuda_indices():
    return host.build(host.HERE / "indices.cu", *host.EMULATOR, folders=(host.SOURCES,))


@pytest.mark.parametrize(
    ("batch", "heads", "size", "at"),
    [(3, 4, 7, (2, 1, 3)), (2, 16, 31, (2**31 + 5, 1, 9)), (2**20, 8, 15, (2**14, 2**19, 7)), (1, 1, 1, (2**61, 0, 0))],
    ids=str,
)
def test_indices_and_dropout_masks_of_the_cuda_kernels(cuda_indices, batch, heads, size, at):
    t, b, h = at
    seed, first = 2**32 + 9, ((t * batch + b) * heads + h) * size
    arguments = [batch, heads, size, seed, math.ceil(0.3 * 2**32), t, b, h]
    index, *factors = programs.run(cuda_indices, *arguments, env=host.environment()).stdout.split()
    assert int(index) == first
    assert torch.equal(torch.tensor([float(f) for f in factors]) > 0, drawn(seed, (size,), 0.3, first) > 0)
