"""The minimum time of a pass: required bytes divided by the bandwidth, or operations divided by the arithmetic rate.

Each input is read once and each output is written once. With K taps, there is one multiply-add per output element and
tap in the forward pass, one for the gradient of x and one for that of the filters. The normalisation, the GLU and
dropout are not counted. talkconv has two additions per window (a running sum, a difference) and a multiply-add for each
of its ends, the same for the gradient of x, and a multiply-add for the gradient of each offset. The rates are measured
in the same run: a copy much larger than the caches (bytes read + bytes written), and a square matrix product in the
operators' type, or in float32 if that is faster (float32 without TF32).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from benchmarks import timing
from benchmarks.shapes import Case


@dataclass(frozen=True)
class Rates:
    """Rates measured on the machine: bytes/s (read + written) and floating-point operations/s."""

    bytes_per_s: float
    flops_per_s: float

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Work:
    """The minimum work of a pass."""

    bytes: int
    flops: int

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def seconds(self, rates: Rates) -> float:
        return max(self.bytes / rates.bytes_per_s, self.flops / rates.flops_per_s)

    def bound(self, rates: Rates) -> str:
        by_bytes = self.bytes / rates.bytes_per_s >= self.flops / rates.flops_per_s
        return "bytes" if by_bytes else "operations"


def measure(device: torch.device, dtype: torch.dtype, *, quick: bool, timer) -> Rates:
    """The best of many runs: a copy of 256 MiB (CPU) or 2 GiB (GPU), and a product of 2048² or 8192² matrices."""
    cuda = device.type == "cuda"
    bandwidth = _copy(2**20 if quick else 2**29 if cuda else 2**26, device, 3 if quick else 20, timer)
    size = 256 if quick else 8192 if cuda else 2048
    flops = max(_product(size, kind, device, 3 if quick else 8, timer) for kind in {dtype, torch.float32})
    return Rates(bandwidth, flops)


def _copy(count: int, device: torch.device, repeats: int, timer) -> float:
    source = torch.ones(count, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timing.best(lambda: target.copy_(source), repeats, timer)


def _product(size: int, dtype: torch.dtype, device: torch.device, repeats: int, timer) -> float:
    if dtype == torch.float16 and device.type == "cpu":
        return 0.0  # computed in float32, after a conversion
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / timing.best(lambda: torch.mm(left, right, out=out), repeats, timer)


def work(operator: str, case: Case, itemsize: int) -> dict[str, Work]:
    """The minimum work of each pass: "forward", "backward", and "both"."""
    tokens = case.steps * case.batch
    out = tokens * case.channels
    inputs = out * (2 if case.glu else 1)
    if operator == "talkconv":
        sides = 2 if case.reach[1] else 1
        offsets = tokens * case.heads * sides
        forward = Work((2 * out + offsets) * itemsize, (2 + 2 * sides) * out)
        backward = Work((3 * out + 2 * offsets) * itemsize, (2 + 4 * sides) * out)
        return {"forward": forward, "backward": backward, "both": forward + backward}
    filters = case.heads * case.kernel_size * (tokens if operator == "dynamicconv" else 1)
    forward = Work((inputs + out + filters) * itemsize, 2 * case.kernel_size * out)
    # Reads the output's gradient, x and the filters; writes the gradients of x and the filters.
    backward = Work((out + 2 * inputs + 2 * filters) * itemsize, 4 * case.kernel_size * out)
    return {"forward": forward, "backward": backward, "both": forward + backward}
