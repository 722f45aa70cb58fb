"""Which rows belong to which sequence, computed on the device that holds them, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


class Sequence:
    """Where sequences begin and end, from `lengths` or `cu_seqlens`, computed on their device.

    pad     (T, B, 1): True at t ≥ lengths[b]; None without lengths
    index   (T,): the index of the packed sequence that a row belongs to; None without cu_seqlens
    """

    def __init__(self, x: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> None:
        self.pad: Tensor | None = None
        self.index: Tensor | None = None
        self.rows = torch.arange(x.shape[0], device=x.device)
        self.start: Tensor | int = 0
        self.end: Tensor | int = x.shape[0]
        if lengths is not None:
            self.end = lengths.view(1, -1)
            self.pad = (self.rows.view(-1, 1) >= self.end).unsqueeze(-1)
        elif cu_seqlens is not None:
            # The last sequence that begins at or before a row, which skips empty sequences.
            index = torch.searchsorted(cu_seqlens.contiguous(), self.rows.to(cu_seqlens.dtype), right=True) - 1
            self.index = index.clamp(0, cu_seqlens.shape[0] - 2)
            self.start = cu_seqlens[self.index].view(-1, 1)
            self.end = cu_seqlens[self.index + 1].view(-1, 1)

    def outside(self, rows: slice, sources: slice) -> Tensor | None:
        """(rows, B or 1, 1, 1): where a row would read padding or another packed sequence; None if no row can."""
        if self.index is not None:
            return (self.index[rows] != self.index[sources]).view(-1, 1, 1, 1)
        return None if self.pad is None else self.pad[sources].unsqueeze(-1)

    def inside(self, kernel_size: int, offset: int) -> Tensor:
        """(K, T, B or 1, 1): whether tap k of row t reads a row of its own sequence."""
        taps = torch.arange(kernel_size, device=self.rows.device)
        at = taps.view(-1, 1, 1) + self.rows.view(-1, 1) + offset
        return ((at >= self.start) & (at < self.end)).unsqueeze(-1)


def step_inside(x: Tensor, seen: int, history: int) -> Tensor:
    """(K, n, 1, 1): whether tap k of new row t reads a row that exists, not one before the sequence's beginning."""
    rows = torch.arange(x.shape[0], device=x.device)
    taps = torch.arange(history + 1, device=x.device)
    return taps.view(-1, 1, 1, 1) + rows.view(-1, 1, 1) >= history - seen


def state_rows(new: int, seen: int, history: int) -> tuple[int, int]:
    """How many rows of the next state, the last min(seen + new, history), come from the inputs and from the state."""
    from_inputs = min(new, history)
    return from_inputs, min(seen, history - from_inputs)
