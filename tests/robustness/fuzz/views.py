"""Random views of memory, as a caller may have them: permuted, with gaps, misaligned, expanded, overlapping."""

from __future__ import annotations

import math
import random

from torch import Tensor

KINDS = ("permuted", "stepped", "expanded", "overlapping")


def random_view(dense: Tensor, rng: random.Random, *, keep: bool = False) -> Tensor:
    """A tensor of dense's shape somewhere in memory of its own, which is NaN between the elements.

    `keep`: it has dense's values; otherwise some of them, as its elements may share memory.
    """
    if dense.numel() == 0:
        return dense
    kind = rng.choice(KINDS[:2] if keep else KINDS)
    strides = [1] * dense.dim()
    if kind == "overlapping":
        # As unfold makes them; rows mostly, as others are copied before a kernel sees them.
        strides = [rng.choice((0, 1, 1, 2, 3, size, size + 1)) for size in dense.shape]
        strides[-1] = rng.choice((1, 1, 1, 2))
    else:
        last_is_innermost, running = rng.random() < 0.6, 1
        order = list(range(dense.dim() - last_is_innermost))
        rng.shuffle(order)
        for d in [dense.dim() - 1] * last_is_innermost + order:
            if kind == "expanded" and rng.random() < 0.5:
                strides[d] = 0
                continue
            step = rng.randint(1, 3) if kind == "stepped" and running > 1 else 1
            strides[d] = running * step
            running *= dense.shape[d] * step
            if kind == "stepped":
                running += rng.randint(0, 3)
    first = rng.randint(0, 5)
    count = first + 1 + sum((size - 1) * stride for size, stride in zip(dense.shape, strides, strict=True))
    if kind in ("expanded", "overlapping"):
        memory = dense.flatten().repeat(math.ceil(count / dense.numel()))[:count].clone()
        return memory.as_strided(dense.shape, strides, first)
    memory = dense.new_full((count,), math.nan if dense.is_floating_point() else -(10**6))
    view = memory.as_strided(dense.shape, strides, first)
    view.copy_(dense)
    return view
