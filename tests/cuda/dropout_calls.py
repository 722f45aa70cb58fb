"""The calls of the kernels with dropout in the tests, and their answers, written out in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops import oracle

from .operators import Operators

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
EPSILON = 1e-3


@dataclasses.dataclass(frozen=True)
class _Dropped:
    dtype: torch.dtype = torch.float32
    dropout: float = 0.3
    seed: int = 2**40 + 5
    on_device: bool = True
    unaligned: bool = False
    compute_capability: int = 80

    def _numbers(self, **numbers: int) -> dict[str, int]:
        numbers |= {"type": TYPES[self.dtype], "drop_below": math.ceil(self.dropout * 2**32)}
        return numbers | {"host_seed": 0 if self.on_device else self.seed}

    def _fractions(self) -> dict[str, float]:
        return {"keep_scale": 1 / (1 - self.dropout), "epsilon": EPSILON}

    def _seeds(self) -> dict[str, Tensor]:
        return {"seed": torch.tensor([self.seed])} if self.on_device and self.dropout else {}

    def _normal(self, generator: torch.Generator, *shape: int) -> Tensor:
        """Random numbers; not at a multiple of 16 bytes where the case says so."""
        lead = int(self.unaligned)
        flat = torch.randn(math.prod(shape) + lead, generator=generator, dtype=torch.float64).to(self.dtype)
        return flat[lead:].view(shape)

    def factors(self, *shape: int) -> Tensor:
        if not self.dropout:
            return torch.ones(shape, dtype=torch.float64)
        return oracle.dropout_factors(self.seed, torch.Size(shape), self.dropout)


@dataclasses.dataclass(frozen=True)
class NormCase(_Dropped):
    """residual + dropout(x), normalised. wanted: the gradients that are asked for."""

    rows: int = 5
    channels: int = 40
    wanted: tuple[str, ...] = ("dx", "dresidual", "dweight", "dbias")

    RESULTS: ClassVar = {"forward": ("out",), "backward": ("dx", "dresidual", "dweight", "dbias")}

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.channels)
        rows = {name: self._normal(generator, self.rows, self.channels) for name in ("x", "residual", "grad")}
        return rows | {name: self._normal(generator, self.channels) for name in ("weight", "bias")}

    def forward(self, on_host: Operators, made: dict[str, Tensor]) -> Tensor:
        out = torch.full_like(made["x"], torch.nan)
        names = ("x", "residual", "weight", "bias")
        self._call(on_host, 0, {name: made[name] for name in names}, {"out": out})
        return out

    def backward(self, on_host: Operators, made: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Every gradient; zeros for those not wanted."""
        found = {f"d{name}": torch.full_like(made[name], torch.nan) for name in ("x", "residual", "weight", "bias")}
        inputs = {name: made[name] for name in ("x", "residual", "weight", "grad")}
        self._call(on_host, 1, inputs, {name: found[name] for name in self.wanted})
        return tuple(tensor if name in self.wanted else torch.zeros_like(tensor) for name, tensor in found.items())

    def _call(self, on_host: Operators, backward: int, inputs: dict, outputs: dict) -> None:
        numbers = self._numbers(norm_channels=self.channels, rows=self.rows, backward=backward) | on_host.device
        on_host.runner.call(numbers, self._fractions(), inputs | self._seeds(), outputs)

    def expected(self, what: str, made: dict[str, Tensor]) -> tuple[Tensor, ...]:
        leaves = [made[name].double().requires_grad_() for name in ("x", "residual", "weight", "bias")]
        x, residual, weight, bias = leaves
        total = residual + x * self.factors(self.rows, self.channels)
        out = F.layer_norm(total, (self.channels,), weight, bias, EPSILON)
        if what == "forward":
            return (out.detach(),)
        gradients = zip(self.RESULTS["backward"], torch.autograd.grad(out, leaves, made["grad"].double()), strict=True)
        return tuple(grad if name in self.wanted else torch.zeros_like(grad) for name, grad in gradients)


@dataclasses.dataclass(frozen=True)
class ReluCase(_Dropped):
    """dropout(max(x, 0))."""

    elements: int = 1000

    RESULTS: ClassVar = {"forward": ("out",), "backward": ("dx",)}

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.elements)
        x, grad = (self._normal(generator, self.elements) for _ in range(2))
        return {"x": x, "grad": grad, "out": self._out(x).to(self.dtype)}

    def _out(self, x: Tensor) -> Tensor:
        return x.double().relu() * self.factors(self.elements)

    def forward(self, on_host: Operators, made: dict[str, Tensor]) -> Tensor:
        return self._call(on_host, 0, {"x": made["x"]}, "out")

    def backward(self, on_host: Operators, made: dict[str, Tensor]) -> Tensor:
        return self._call(on_host, 1, {"out": made["out"], "grad": made["grad"]}, "dx")

    def _call(self, on_host: Operators, backward: int, inputs: dict, output: str) -> Tensor:
        made = torch.full((self.elements,), torch.nan, dtype=self.dtype)
        numbers = self._numbers(elements=self.elements, backward=backward) | on_host.device
        on_host.runner.call(numbers, self._fractions(), inputs | self._seeds(), {output: made})
        return made

    def expected(self, what: str, made: dict[str, Tensor]) -> Tensor:
        if what == "forward":
            return self._out(made["x"])
        return made["grad"].double() * (made["x"] > 0) * self.factors(self.elements)
