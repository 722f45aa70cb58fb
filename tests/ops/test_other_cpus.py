"""The CPU kernels for every instruction set that can be compiled and run here, other than the library's own; Arm's by
emulation.

A program without torch (kernels_alone.cpp) gets problems and returns results, which are held against the definition in
float64. A problem is: 14 int64 and a double (see Header there), B lengths, x, the filters or both offsets, and the
gradient.
"""

import itertools
import math
import platform
import random
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lightconv_plugin.ops import NORMALIZATIONS, artifacts, reference
from lightconv_plugin.ops.instructions import compiled_for, runnable
from tests.cuda import host

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
# Name → compiler, its flags, what runs the program, what the CPU must have.
CASES = {
    "plain": ("g++", [], [], ""),
    "avx2": ("g++", AVX2, [], "AVX2"),
    "avx512": ("g++", AVX512, [], "AVX512"),
    "arm": ("aarch64-linux-gnu-g++", ["-static"], ["qemu-aarch64"], ""),
}
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.float16: 5e-3, torch.bfloat16: 4e-2}
OPERATIONS = ("lightconv", "dynamicconv", "talkconv")


@dataclass
class Problem:
    operation: str
    dtype: torch.dtype
    steps: int
    batch: int
    heads: int
    per_head: int
    kernel_size: int  # of talkconv: max_left
    padding: int  # of talkconv: max_right
    glu: bool
    renorm: bool
    normalize: str
    dropout: float
    threads: int
    lengths: torch.Tensor
    seed: int

    def tensors(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        channels, shape = self.heads * self.per_head, (self.steps, self.batch)

        def normal(*size):
            return torch.randn(size, generator=generator, dtype=torch.float64)

        x, grad = normal(*shape, channels * (2 if self.glu else 1)), normal(*shape, channels)
        if self.operation == "talkconv":
            others = [normal(*shape, self.heads).sigmoid() for _ in range(2)]
        else:
            filters = (self.heads, self.kernel_size)
            others = [normal(*filters) if self.operation == "lightconv" else normal(*shape, *filters)]
        return [tensor.to(self.dtype) for tensor in (x, *others, grad)]

    def written(self) -> bytes:
        threshold = math.ceil(self.dropout * 2**32)
        numbers = (OPERATIONS.index(self.operation), TYPES.index(self.dtype), self.steps, self.batch, self.heads)
        numbers += (self.per_head, self.kernel_size, self.padding, self.glu, self.renorm)
        numbers += (NORMALIZATIONS.index(self.normalize), self.threads, self.seed, threshold)
        header = struct.pack("<14qd", *numbers, 1 / (1 - self.dropout))
        parts = [self.lengths, *self.tensors()]
        return header + b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in parts)

    def expected(self) -> list[torch.Tensor]:
        x, *others, grad = (tensor.double() for tensor in self.tensors())
        if self.operation == "talkconv":
            common = (*others, self.lengths, None, self.kernel_size, self.padding)
            return [reference.talkconv(x, *common), *reference.talkconv_backward(grad, x, *common, True, True, True)]
        seed = torch.tensor([self.seed]) if self.dropout else None
        renorm = (self.renorm,) if self.operation == "dynamicconv" else ()
        options = (self.lengths, None, seed, self.padding, self.normalize, self.dropout, *renorm, self.glu)
        out = getattr(reference, self.operation)(x, *others, None, *options)
        return [out, *getattr(reference, self.operation + "_backward")(grad, x, *others, *options, True, True)]


def problems() -> list[Problem]:
    """Every operator and type at sizes on both sides of a vector's width and of a tile's."""
    draw = random.Random(0)
    made = []
    for number, (operation, dtype, per_head) in enumerate(itertools.product(OPERATIONS, TYPES, (1, 3, 8, 24, 64))):
        for kernel_size in (1, 3, 7, 31):
            steps, batch = draw.choice(((1, 2), (5, 3), (40, 2), (150, 1)))
            talk = operation == "talkconv"
            lengths = torch.tensor([draw.choice((steps, draw.randint(0, steps))) for _ in range(batch)])
            made.append(
                Problem(
                    operation,
                    dtype,
                    steps,
                    batch,
                    draw.choice((1, 2)),
                    per_head,
                    kernel_size,
                    draw.randrange(kernel_size),
                    not talk and draw.random() < 0.3,
                    operation == "dynamicconv" and draw.random() < 0.3,
                    draw.choice(("softmax", "softmax", *NORMALIZATIONS)),
                    0.0 if talk else draw.choice((0.0, 0.25)),
                    draw.choice((1, 3)),
                    lengths,
                    number,
                )
            )
    return made


@pytest.mark.parametrize("case", CASES)
def test_kernels(case, tmp_path):
    compiler, flags, emulator, needed = CASES[case]
    for tool in (compiler, *emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if not emulator and case != "plain" and platform.machine().lower() not in ("x86_64", "amd64"):
        pytest.skip("needs an x86 CPU")
    if needed not in runnable():
        pytest.skip(f"needs a CPU with {needed}")
    if needed and needed == compiled_for():
        pytest.skip(f"this CPU's library is compiled for {needed}: test_reference.py holds it against float64")
    sources = [Path(__file__).with_name("kernels_alone.cpp")]
    for folder in ("convolution", "talk"):
        sources += sorted((artifacts.SOURCES["cpu"] / folder).glob("*.cpp"))
    program = tmp_path / "kernels"
    common = ["-std=c++17", "-O1", "-fopenmp", f"-I{artifacts.SOURCES['cpu']}"]
    objects = host.objects(compiler, [*common, *flags], sources)
    subprocess.run([compiler, *flags, "-fopenmp", *objects, "-o", program, "-pthread"], check=True, timeout=100)

    asked = problems()
    given = struct.pack("<q", len(asked)) + b"".join(problem.written() for problem in asked)
    done = subprocess.run([*emulator, program], input=given, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer, at = torch.frombuffer(bytearray(done.stdout), dtype=torch.uint8), 0
    for problem in asked:
        for name, expected in zip(("out", "dx", "first", "second"), problem.expected(), strict=False):
            size = expected.numel() * problem.dtype.itemsize
            got = answer[at : at + size].clone().view(problem.dtype).view(expected.shape).double()
            at += size
            scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
            error = (got - expected).abs().max().item() / scale if expected.numel() else 0.0
            assert error <= TOLERANCE[problem.dtype], f"{name} of {problem}: {error}"
    assert at == len(answer)
