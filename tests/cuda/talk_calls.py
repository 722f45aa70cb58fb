"""talkconv's calls in the tests, and their answers: written out as a matrix of coefficients, in float64.

`Oracle` has the signatures of the registered operators and shares no code with them. Offsets count as the kernels take
them: multiplied by the largest reach in float32.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import ClassVar

import torch
from torch import Tensor

from .calls import SHORT, hash_of, lay_out, surroundings

# Heads and channels per head: one channel, vectors of four, the matrix units' in half types.
WIDTHS = [(3, 1), (4, 4), (2, 64)]


@dataclasses.dataclass(frozen=True)
class TalkCase:
    """One call. `top`: offsets are drawn from 0 … top; `rows`, `offsets`: layouts (see `calls.lay_out`)."""

    steps: int
    batch: int
    heads: int
    per_head: int
    left: int
    right: int
    dtype: torch.dtype = torch.float32
    top: float = 1.0
    lengths: torch.dtype | None = None
    packed: bool = False
    rows: str = "tbc"
    offsets: str = "plain"
    compute_capability: int = 80
    seen: int | None = None

    RESULTS: ClassVar = {
        "forward": ("out",),
        "backward": ("dx", "dleft", "dright"),
        "step": ("out", "next_state"),
        "step_backward": ("dx", "dstate", "dleft"),
    }

    def __str__(self) -> str:
        size = f"T{self.steps}-B{self.batch}-H{self.heads}x{self.per_head}-L{self.left}-R{self.right}"
        parts = [size, SHORT[self.dtype]]
        parts += [f"top{self.top:g}"] * (self.top != 1) + ["packed"] * self.packed
        parts += [f"lengths{str(self.lengths)[-2:]}"] * (self.lengths is not None)
        parts += [self.rows] * (self.rows != "tbc") + [self.offsets] * (self.offsets != "plain")
        parts += [f"sm{self.compute_capability}"] * (self.compute_capability != 80)
        parts += [f"seen{self.seen}"] * (self.seen is not None)
        return "-".join(parts)

    @property
    def channels(self) -> int:
        return self.heads * self.per_head

    @property
    def by_row(self) -> tuple[str, ...]:
        """The tensors of the shape (T, B, …)."""
        return ("x", "grad", "offset_left", *["offset_right"] * bool(self.right))

    def tensors(self) -> dict[str, Tensor | None]:
        """All tensors of the call, random. x is NaN where a sequence has ended, and memory between rows is NaN."""
        generator = torch.Generator().manual_seed(hash_of(str(self)))
        steps, batch, channels = self.steps, self.batch, self.channels

        def normal(*shape):
            return torch.randn(shape, generator=generator).to(self.dtype)

        def offset():
            drawn = torch.rand((steps, batch, self.heads), generator=generator) * self.top
            # Windows that end with a row, and none.
            kind = torch.randint(0, 12, drawn.shape, generator=generator)
            drawn[kind == 0], drawn[kind == 1], drawn[kind == 2] = 0, 1, -0.25
            return lay_out(drawn.to(self.dtype), self.offsets)

        x = normal(steps, batch, channels)
        made = {
            "grad": lay_out(normal(steps, batch, channels), self.rows),
            "offset_left": offset(),
            "offset_right": offset() if self.right else None,
        }
        made |= surroundings(self, x, self.left, normal, generator)
        return made | {"x": lay_out(x, self.rows)}

    def expected(self, what: str, made: dict[str, Tensor | None]) -> Tensor | tuple[Tensor, ...]:
        return getattr(self, what)(Oracle(), made)

    def forward(self, operators, made: dict[str, Tensor | None]) -> Tensor:
        tensors = [made[name] for name in ("x", "offset_left", "offset_right", "lengths", "cu_seqlens")]
        return operators.talkconv(*tensors, self.left, self.right)

    def backward(self, operators, made: dict[str, Tensor | None], needs=(True, True, True)):
        """dx, dleft and dright."""
        tensors = [made[name] for name in ("grad", "x", "offset_left", "offset_right", "lengths", "cu_seqlens")]
        return operators.talkconv_backward(*tensors, self.left, self.right, *needs)

    def step(self, operators, made: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
        return operators.talkconv_step(made["x"], made["state"], made["offset_left"], self.left)

    def step_backward(self, operators, made: dict[str, Tensor | None], needs=(True, True, True)):
        """dx, dstate and dleft."""
        tensors = [made[name] for name in ("grad", "grad_state", "x", "state", "offset_left")]
        return operators.talkconv_step_backward(*tensors, self.left, *needs)


class Oracle:
    """The operators in float64, each number the sum that defines it."""

    def talkconv(self, x, left, right, lengths, cu_seqlens, max_left, max_right):
        return _Matrix(x, left, right, spans(x, lengths, cu_seqlens), max_left, max_right).out()

    def talkconv_backward(self, grad, x, left, right, lengths, cu_seqlens, max_left, max_right, *needs):
        matrix = _Matrix(x, left, right, spans(x, lengths, cu_seqlens), max_left, max_right)
        dright = x.new_empty(0).double() if right is None else matrix.doffset(grad, 1)
        return matrix.dx(grad), matrix.doffset(grad, -1), dright

    def talkconv_step(self, x, state, left, max_left):
        rows = torch.cat([state, x])
        out = self._steps(rows, x, left, max_left).out()
        return out[len(state) :], rows[max(len(rows) - max_left, 0) :].double()

    def talkconv_step_backward(self, grad, grad_state, x, state, left, max_left, *needs):
        rows, seen = torch.cat([state, x]), len(state)
        matrix = self._steps(rows, x, left, max_left)
        grad = torch.zeros_like(x) if grad is None else grad
        grad = torch.cat([torch.zeros_like(state), grad])
        drows = matrix.dx(grad)
        if grad_state is not None:
            drows[len(rows) - len(grad_state) :] += grad_state.double()
        return drows[seen:], drows[:seen], matrix.doffset(grad, -1)[seen:]

    def _steps(self, rows, x, left, max_left):
        left = torch.cat([left.new_zeros(len(rows) - len(x), *left.shape[1:]), left])
        return _Matrix(rows, left, None, spans(rows, None, None), max_left, 0)


def spans(x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """(T, B, 2): the first row and the one after the last of each row's sequence."""
    steps, batch = x.shape[:2]
    table = torch.tensor([0, steps]).repeat(steps, batch, 1)
    if lengths is not None:
        table[..., 1] = lengths
    if cu_seqlens is not None:
        edges = cu_seqlens.tolist()
        for begin, end in itertools.pairwise(edges):
            table[begin:end] = torch.tensor([begin, end])
    return table


class _Matrix:
    """coef(t, s) as (T, S, B, H, 1), and sums with it that leave out what it is 0 for."""

    def __init__(self, x, left, right, spans, max_left, max_right):
        steps, _, channels = x.shape
        self.heads = left.shape[-1]
        self.rows = x.double().unflatten(-1, (self.heads, channels // self.heads))
        t = torch.arange(steps).view(-1, 1, 1, 1)
        s = torch.arange(steps).view(1, -1, 1, 1)
        begin, end = spans[..., 0].view(steps, 1, -1, 1), spans[..., 1].view(steps, 1, -1, 1)
        self.unknown = left.isnan()
        coefficients = (s == t).double().expand(steps, steps, *left.shape[1:])
        self.sides = {}
        for offset, most, direction in ((left, max_left, -1), (right, max_right, 1)):
            if offset is None:
                continue
            self.unknown = self.unknown | offset.isnan()
            reach = (offset.float() * most).clamp(min=0).nan_to_num(0, posinf=2.0 * steps).double()
            away = (s - t) * direction
            within = (reach.unsqueeze(1) - away + 1).clamp(0, 1)
            coefficients = torch.where(away > 0, within, coefficients)
            self.sides[direction] = (reach, most)
        coefficients = torch.where((s >= begin) & (s < end), coefficients, 0.0)
        self.coefficients = coefficients.unsqueeze(-1)
        self.spans = spans
        self.scale = 1 / (max_left + max_right + 1)

    def out(self) -> Tensor:
        terms = torch.where(self.coefficients > 0, self.coefficients * self.rows.unsqueeze(0), 0.0)
        return (terms.sum(1) * self.scale).masked_fill(self.unknown.unsqueeze(-1), math.nan).flatten(-2)

    def dx(self, grad: Tensor) -> Tensor:
        grad = grad.double().unflatten(-1, (self.heads, -1)).unsqueeze(1)
        return (torch.where(self.coefficients > 0, self.coefficients * grad, 0.0).sum(0) * self.scale).flatten(-2)

    def doffset(self, grad: Tensor, direction: int) -> Tensor:
        reach, most = self.sides[direction]
        grad = grad.double().unflatten(-1, (self.heads, -1))
        whole = reach.floor()
        row = torch.arange(len(reach)).view(-1, 1, 1) + direction * (whole.long() + 1)
        read = (reach > whole) & (row >= self.spans[..., :1]) & (row < self.spans[..., 1:])
        row = row.clamp(0, len(reach) - 1).unsqueeze(-1).expand_as(grad)
        return torch.where(read, (grad * self.rows.gather(0, row)).sum(-1) * most * self.scale, 0.0)
