"""What the kernels are asked in the tests, and what the answer must be.

A `Case` names sizes, types, options and memory layouts; its tensors follow from it. The answers are the reference's,
computed in float64 from the same numbers.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from lightconv_plugin.ops import reference

from .calls import SHORT, doubled, hash_of, lay_out, surroundings


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `rows`: layout of x and of the gradients; `filters`: layout of the weight (see `calls.lay_out`)."""

    operator: str
    steps: int
    batch: int
    heads: int
    per_head: int
    size: int
    padding_l: int
    dtype: torch.dtype = torch.float32
    normalize: str = "softmax"
    dropout: float = 0.0
    bias: bool = False
    lengths: torch.dtype | None = None
    packed: bool = False
    renorm: bool = False
    glu: bool = False
    rows: str = "tbc"
    filters: str = "plain"
    compute_capability: int = 80
    seen: int | None = None

    RESULTS: ClassVar = {
        "forward": ("out",),
        "backward": ("dx", "dweight"),
        "step": ("out", "next_state"),
        "step_backward": ("dx", "dstate", "dweight"),
    }

    def __str__(self) -> str:
        parts = [
            f"{self.operator}-T{self.steps}-B{self.batch}-H{self.heads}x{self.per_head}-K{self.size}-L{self.padding_l}",
            SHORT[self.dtype],
        ]
        parts += [f"{name}" for name in ("bias", "packed", "renorm", "glu") if getattr(self, name)]
        parts += [self.normalize] * (self.normalize != "softmax") + ["dropout"] * (self.dropout > 0)
        parts += [f"lengths{str(self.lengths)[-2:]}"] * (self.lengths is not None)
        parts += [self.rows] * (self.rows != "tbc") + [self.filters] * (self.filters != "plain")
        parts += [f"sm{self.compute_capability}"] * (self.compute_capability != 80)
        parts += [f"seen{self.seen}"] * (self.seen is not None)
        return "-".join(parts)

    @property
    def channels(self) -> int:
        return self.heads * self.per_head

    @property
    def dynamic(self) -> bool:
        return self.operator == "dynamicconv"

    @property
    def by_row(self) -> tuple[str, ...]:
        """The tensors of the shape (T, B, …)."""
        return ("x", "grad", *["weight"] * self.dynamic)

    def tensors(self) -> dict[str, Tensor | None]:
        """All tensors of the call, random. x is NaN where a sequence has ended, and memory between rows is NaN."""
        generator = torch.Generator().manual_seed(hash_of(str(self)))

        def normal(*shape):
            return torch.randn(shape, generator=generator).to(self.dtype)

        x = normal(self.steps, self.batch, self.channels * (2 if self.glu else 1))
        weight = normal(*(self.steps, self.batch) * self.dynamic, self.heads, self.size)
        made = {
            "grad": lay_out(normal(self.steps, self.batch, self.channels), self.rows),
            "bias": normal(self.channels) if self.bias else None,
            "seed": torch.randint(2**63 - 1, (1,), generator=generator) if self.dropout else None,
        }
        made |= surroundings(self, x, self.size - 1, normal, generator)
        return made | {"x": lay_out(x, self.rows), "weight": lay_out(weight, self.filters)}

    def expected(self, what: str, made: dict[str, Tensor | None]) -> Tensor | tuple[Tensor, ...]:
        return getattr(self, what)(reference, doubled(made))

    # -------------------------------------------------------------------------------------------- calls

    def forward(self, operators, made: dict[str, Tensor | None]) -> Tensor:
        """The full pass by `operators`: the reference or the kernels."""
        tensors = [made[name] for name in ("x", "weight", "bias", "lengths", "cu_seqlens", "seed")]
        return getattr(operators, self.operator)(*tensors, self.padding_l, *self._options(), self.glu)

    def backward(self, operators, made: dict[str, Tensor | None], needs=(True, True)):
        """dx and dweight."""
        tensors = [made[name] for name in ("grad", "x", "weight", "lengths", "cu_seqlens", "seed")]
        operator = getattr(operators, self.operator + "_backward")
        return operator(*tensors, self.padding_l, *self._options(), self.glu, *needs)

    def step(self, operators, made: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        """out and the next state."""
        tensors = [made[name] for name in ("x", "state", "weight", "bias", "seed")]
        return getattr(operators, self.operator + "_step")(*tensors, *self._options(), self.glu)

    def step_backward(self, operators, made: dict[str, Tensor | None], needs=(True, True, True)):
        """dx, dstate and dweight."""
        tensors = [made[name] for name in ("grad", "grad_state", "x", "state", "weight", "seed")]
        return getattr(operators, self.operator + "_step_backward")(*tensors, *self._options(), self.glu, *needs)

    def _options(self) -> tuple:
        return (self.normalize, self.dropout, *[self.renorm] * self.dynamic)
