"""What `Case` and `TalkCase` share: sequences and states, memory layouts, and how answers are compared."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

# Relative to the root mean square of what is expected: the error's own, and the largest for a single element (relative
# to the element, where that is larger). Half types: one rounding of the result, of u, and of a weight in a product.
TOLERANCES = {torch.float32: (2e-6, 1e-5), torch.float16: (7e-4, 5e-3), torch.bfloat16: (4e-3, 3e-2)}


def surroundings(case, x: Tensor, history: int, normal, generator: torch.Generator) -> dict[str, Tensor | None]:
    """State and sequences of a case, random. x becomes NaN where a sequence has ended.

    history: rows of a full state. normal: draws a tensor of a shape.
    """
    steps, batch, channels = case.steps, case.batch, case.channels
    made = {"lengths": None, "cu_seqlens": None}
    if case.seen is not None:
        made["state"] = lay_out(normal(case.seen, batch, channels), case.rows)
        made["grad_state"] = lay_out(normal(min(case.seen + steps, history), batch, channels), case.rows)
    if case.lengths is not None:
        # All lengths there are: none, one, the whole.
        every = torch.randint(0, steps + 1, (batch,), generator=generator)
        every[0] = steps
        if batch > 2:
            every[1] = 0
        # Every second element of a longer tensor.
        made["lengths"] = torch.stack([every, torch.full_like(every, 10**6)], 1).to(case.lengths)[:, 0]
        x[torch.arange(steps).view(-1, 1) >= every] = math.nan
    if case.packed:
        edges = torch.randint(0, steps + 1, (3,), generator=generator).sort().values
        # One sequence is empty.
        edges = torch.cat([torch.tensor([0]), edges, edges[1:2], torch.tensor([steps])]).sort().values
        made["cu_seqlens"] = torch.stack([edges, torch.full_like(edges, -(10**6))], 1).int()[:, 0]
    return made


def check(case, what: str, operators, made: dict[str, Tensor | None] | None = None) -> None:
    """Hold what the kernels answer against `case.expected`."""
    made = case.tensors() if made is None else made
    got = results(getattr(case, what)(operators.on(compute_capability=case.compute_capability), made))
    for name, ours, theirs in zip(case.RESULTS[what], got, results(case.expected(what, made)), strict=True):
        compare(name, ours, theirs)


def check_both(case, operators, made: dict[str, Tensor | None]) -> None:
    """`check` the full pass, forward and backward."""
    check(case, "forward", operators, made)
    check(case, "backward", operators, made)


def results(answer: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (answer,) if isinstance(answer, Tensor) else answer


def doubled(made: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {
        name: tensor.double() if tensor is not None and tensor.is_floating_point() else tensor
        for name, tensor in made.items()
    }


def compare(name: str, got: Tensor, want: Tensor) -> None:
    """`got` is within TOLERANCES of `want` (float64), and infinite where that is."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    infinite = want.isinf()
    assert torch.equal(got.double()[infinite], want[infinite]), f"{name}: other infinities"
    got, want = got.masked_fill(infinite, 0), want.masked_fill(infinite, 0)
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
    return zlib.crc32(text.encode())
