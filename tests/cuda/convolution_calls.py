"""What the kernels are asked in the tests, and what the answer must be.

A `Case` names sizes, types, options and memory layouts; its tensors follow from it. The answers are the reference's,
computed in float64 from the same numbers.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from lightconv_plugin.ops import reference

SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

# Relative to the root mean square of what is expected: the error's own, and the largest for a single element (relative
# to the element, where that is larger). Half types: one rounding of the result, of u, and of a weight in a product.
TOLERANCES = {torch.float32: (2e-6, 1e-5), torch.float16: (7e-4, 5e-3), torch.bfloat16: (4e-3, 3e-2)}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. `rows`: layout of x and of the gradients; `filters`: layout of the weight (see `lay_out`)."""

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
            "lengths": None,
            "cu_seqlens": None,
        }
        if self.seen is not None:
            made["state"] = lay_out(normal(self.seen, self.batch, self.channels), self.rows)
            kept = min(self.seen + self.steps, self.size - 1)
            made["grad_state"] = lay_out(normal(kept, self.batch, self.channels), self.rows)
        if self.lengths is not None:
            # All lengths there are: none, one, the whole.
            every = torch.randint(0, self.steps + 1, (self.batch,), generator=generator)
            every[0] = self.steps
            if self.batch > 2:
                every[1] = 0
            # Every second element of a longer tensor.
            made["lengths"] = torch.stack([every, torch.full_like(every, 10**6)], 1).to(self.lengths)[:, 0]
            x[torch.arange(self.steps).view(-1, 1) >= every] = math.nan
        if self.packed:
            edges = torch.randint(0, self.steps + 1, (3,), generator=generator).sort().values
            # One sequence is empty.
            edges = torch.cat([torch.tensor([0]), edges, edges[1:2], torch.tensor([self.steps])]).sort().values
            made["cu_seqlens"] = torch.stack([edges, torch.full_like(edges, -(10**6))], 1).int()[:, 0]
        return made | {"x": lay_out(x, self.rows), "weight": lay_out(weight, self.filters)}

    # -------------------------------------------------------------------------------------------- calls

    def forward(self, operators, made: dict[str, Tensor | None]) -> Tensor:
        """The full pass by `operators`: the reference or the kernels."""
        tensors = [made[name] for name in ("x", "weight", "bias", "lengths", "cu_seqlens", "seed")]
        return getattr(operators, self.operator)(*tensors, self.padding_l, *self._options(), self.glu)

    def backward(self, operators, made: dict[str, Tensor | None], need_x: bool = True, need_weight: bool = True):
        """dx and dweight."""
        tensors = [made[name] for name in ("grad", "x", "weight", "lengths", "cu_seqlens", "seed")]
        operator = getattr(operators, self.operator + "_backward")
        return operator(*tensors, self.padding_l, *self._options(), self.glu, need_x, need_weight)

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


def check(case: Case, what: str, operators, names: tuple[str, ...]) -> None:
    """Hold what the kernels answer against the reference in float64."""
    made = case.tensors()
    got = getattr(case, what)(operators.on(compute_capability=case.compute_capability), made)
    want = getattr(case, what)(reference, doubled(made))
    got, want = ((result,) if isinstance(result, Tensor) else result for result in (got, want))
    for name, ours, theirs in zip(names, got, want, strict=True):
        compare(name, ours, theirs)


def doubled(made: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {
        name: tensor.double() if tensor is not None and tensor.is_floating_point() else tensor
        for name, tensor in made.items()
    }


def compare(name: str, got: Tensor, want: Tensor) -> None:
    """`got` is within TOLERANCES of `want` (float64)."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    wrong = got.isnan() != want.isnan()
    assert not wrong.any(), (
        f"{name}: {wrong.sum()} of {wrong.numel()} elements are NaN and should not be, or the reverse, "
        f"first at {wrong.nonzero()[:5].tolist()}"
    )
    got, want = got.nan_to_num(), want.nan_to_num()
    if not got.numel():
        return
    scale = want.square().mean().sqrt()
    difference = (got.double() - want).abs()
    limit, single = TOLERANCES[got.dtype]
    # A single expected number may be anything near zero: what it is the sum of is about 1.
    floor = 1e-3 if want.numel() < 50 else 1e-12
    error = (difference.square().mean().sqrt() / scale.clamp_min(floor)).item()
    bad = difference > single * torch.maximum(want.abs(), scale.clamp_min(floor))
    assert not bad.any(), (
        f"{name}: {bad.sum()} of {bad.numel()} elements differ, first at {bad.nonzero()[:8].tolist()}: "
        f"{got[bad][:8].tolist()}, expected {want[bad][:8].tolist()}"
    )
    assert error < limit, f"{name}: relative RMS error {error:.2e}, allowed {limit:.0e}"


# ------------------------------------------------------------------------------------------------ memory


def lay_out(dense: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout.

    tbc, plain   as they come
    btc          batch first in memory
    sliced       columns 8 … of a wider tensor, every second row: 16-byte aligned, with gaps
    odd          columns 1 … of a wider tensor: nothing is aligned
    still        the same for every time step: stride 0 (the values of step 0)
    taps_first   (K, …) in memory
    """
    if layout in ("tbc", "plain"):
        return dense.clone()
    if layout == "btc":
        return dense.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "taps_first":
        return dense.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "still":
        return dense[:1].clone().expand_as(dense)
    first = {"sliced": 8, "odd": 1}[layout]
    wide = dense.new_full((2 * dense.shape[0], *dense.shape[1:-1], dense.shape[-1] + 16), math.nan)
    view = wide[::2, ..., first : first + dense.shape[-1]]
    view.copy_(dense)
    return view


def hash_of(text: str) -> int:
    """The same on every run, unlike hash()."""
    import zlib

    return zlib.crc32(text.encode())
