"""TaLK convolution in plain PyTorch: the definition of talkconv and talkconv_step, and the backend that always works.

Time-aware large kernel convolution (Lioutas and Guo 2020, section 3) sums a window around each position. Each head has
its own reach to both sides, and a fraction of one more row is added at both ends. With n + f = offset · max, n whole:

    out[t, c] = (x[t − n_l] + … + x[t + n_r] + f_l · x[t − n_l − 1] + f_r · x[t + n_r + 1]) / (max_left + max_right + 1)

Rows outside the sequence read zero. A window's reach is relative to t and in the sums' type, so long sequences lose no
precision. The paper subtracts prefix sums that run from the sequence's beginning, which loses precision by
cancellation. Here no sum is ever subtracted: rows lie in blocks of 1, 2, 4, … rows, each with sums from its own edges,

    before[i] = block's first row + … + x[i],        after[i] = x[i] + … + block's last row,

and the window lo … hi is after[lo] + before[hi] in the largest blocks that divide it. These are two neighbours; their
size is the highest bit in which lo and hi differ. NaN and ±inf therefore reach only the windows that contain them. The
backward pass is the transpose, step by step. Both make log₂ T passes over tensors of x's size for windows of any size.

The signatures are those of the registered operators (registration.py). checks.py has already checked the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .filters import widen
from .sequences import Sequence, state_rows

# How far an infinite offset reaches: beyond any sequence, and exact in float32.
_FAR = 2**40

# ------------------------------------------------------------------------------------------------ the operators


def talkconv(
    x: Tensor,
    offset_left: Tensor,
    offset_right: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    max_left: int,
    max_right: int,
) -> Tensor:
    """talkconv's forward pass: x (T, B, C), offsets (T, B, H) → (T, B, C), in the layout of x."""
    sequence = Sequence(x, lengths, cu_seqlens)
    windows = _windows(offset_left, offset_right, max_left, max_right, sequence.start, sequence.end, 0)
    out = torch.empty_like(x)
    return out if x.numel() == 0 else out.copy_(_forward(_source(x, sequence, offset_left), windows))


def talkconv_backward(
    grad: Tensor,
    x: Tensor,
    offset_left: Tensor,
    offset_right: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    max_left: int,
    max_right: int,
    need_x: bool,
    need_left: bool,
    need_right: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of talkconv for x and the offsets; those not needed are empty tensors."""
    sequence = Sequence(x, lengths, cu_seqlens)
    windows = _windows(offset_left, offset_right, max_left, max_right, sequence.start, sequence.end, 0)
    grad = _heads(widen(grad), offset_left)
    dx, dleft, dright = x.new_empty(0), offset_left.new_empty(0), x.new_empty(0)
    if need_x:
        dsource = _source_gradient(grad, windows, x.shape[0])
        if sequence.pad is not None:
            dsource = dsource.masked_fill(sequence.pad, 0)
        dx = torch.empty_like(x).copy_(dsource)
    if need_left or need_right:
        source = _source(x, sequence, offset_left)
        if need_left:
            dleft = torch.empty_like(offset_left).copy_(_offset_gradient(grad, source, windows, windows.left))
        if need_right and offset_right is not None and windows.right is not None:
            dright = torch.empty_like(offset_right).copy_(_offset_gradient(grad, source, windows, windows.right))
    return dx, dleft, dright


def talkconv_step(x: Tensor, state: Tensor, offset_left: Tensor, max_left: int) -> tuple[Tensor, Tensor]:
    """n more tokens of a causal talkconv: x (n, B, C), state (r, B, C), offset_left (n, B, H) → (out, next state)."""
    new, seen = x.shape[0], state.shape[0]
    rows = torch.cat([state, x])
    windows = _windows(offset_left, None, max_left, 0, 0, seen + new, seen)
    out = torch.empty_like(x)
    if x.numel():
        out.copy_(_forward(_heads(widen(rows), offset_left), windows))
    return out, rows[max(seen + new - max_left, 0) :].clone(memory_format=torch.contiguous_format)


def talkconv_step_backward(
    grad: Tensor | None,
    grad_state: Tensor | None,
    x: Tensor,
    state: Tensor,
    offset_left: Tensor,
    max_left: int,
    need_x: bool,
    need_state: bool,
    need_left: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of talkconv_step for x, state and the offset; those not needed are empty tensors."""
    new, seen = x.shape[0], state.shape[0]
    rows = torch.cat([state, x])
    windows = _windows(offset_left, None, max_left, 0, 0, seen + new, seen)
    dx, dstate, dleft = x.new_empty(0), state.new_empty(0), offset_left.new_empty(0)
    grad = None if grad is None else _heads(widen(grad), offset_left)
    if need_x or need_state:
        drows = torch.zeros_like(rows, dtype=torch.promote_types(rows.dtype, torch.float32))
        if grad is not None:
            drows = _source_gradient(grad, windows, seen + new)
        if grad_state is not None:
            drows[seen + new - sum(state_rows(new, seen, max_left)) :] += grad_state
        dx = torch.empty_like(x).copy_(drows[seen:]) if need_x else dx
        dstate = torch.empty_like(state).copy_(drows[:seen]) if need_state else dstate
    if need_left:
        dleft = torch.zeros_like(offset_left)
        if grad is not None:
            dleft.copy_(_offset_gradient(grad, _heads(widen(rows), offset_left), windows, windows.left))
    return dx, dstate, dleft


# ------------------------------------------------------------------------------------------------ windows


@dataclass
class _Edge:
    """The row beyond a window's end on one side: (T, B, H) each."""

    row: Tensor
    part: Tensor  # the fraction of it that is in the window, 0 … 1
    slope: int  # d (part) / d (offset)

    @property
    def read(self) -> Tensor:
        return self.part > 0


@dataclass
class _Windows:
    """The whole rows `low` … `high` of each output's window (T, B, H), and the fractions of the rows beyond them.

    `low` may be negative and `high` beyond the last row (such rows read zero), but neither leaves a packed sequence.
    """

    low: Tensor
    high: Tensor
    left: _Edge
    right: _Edge | None
    scale: float
    unknown: Tensor  # where an offset is NaN: the output is NaN too; in the gradients the offset counts as 0

    @property
    def edges(self) -> tuple[_Edge, ...]:
        return (self.left,) if self.right is None else (self.left, self.right)


def _windows(
    offset_left: Tensor,
    offset_right: Tensor | None,
    max_left: int,
    max_right: int,
    start: Tensor | int,
    end: Tensor | int,
    first: int,
) -> _Windows:
    """Output row i stands at row `first` + i; its sequence has the rows `start` … `end` − 1 (as in Sequence)."""
    start, end = (edge.unsqueeze(-1) if isinstance(edge, Tensor) else edge for edge in (start, end))
    count = first + offset_left.shape[0]
    end = end.clamp(max=count) if isinstance(end, Tensor) else end  # lengths may be unchecked
    at = torch.arange(first, count, device=offset_left.device).view(-1, 1, 1)

    def side(offset: Tensor, limit: int, direction: int) -> tuple[Tensor, _Edge]:
        reach = widen(offset).clamp(min=0).mul(limit)
        reach = reach.nan_to_num(nan=0, posinf=_FAR).clamp(max=_FAR)  # NaN: a NaN offset, or ∞·0
        whole = reach.floor()
        last = at + direction * whole.long()
        inside = (last + direction >= start) & (last + direction < end)
        return last, _Edge(last + direction, (reach - whole).masked_fill(~inside, 0), limit)

    low, left = side(offset_left, max_left, -1)
    high, right = at.expand_as(low), None
    unknown = offset_left.isnan()
    if offset_right is not None:
        high, right = side(offset_right, max_right, 1)
        unknown = unknown | offset_right.isnan()
    if isinstance(start, Tensor) and isinstance(end, Tensor):
        low, high = torch.maximum(low, start), torch.minimum(high, end - 1)
    return _Windows(low, high, left, right, 1 / (max_left + max_right + 1), unknown)


def _heads(rows: Tensor, offset: Tensor) -> Tensor:
    """(T, B, C) as (T, B, H, C/H), without a copy."""
    return rows.unflatten(-1, (offset.shape[-1], rows.shape[-1] // offset.shape[-1]))


def _source(x: Tensor, sequence: Sequence, offset: Tensor) -> Tensor:
    source = widen(x)
    return _heads(source if sequence.pad is None else source.masked_fill(sequence.pad, 0), offset)


# ------------------------------------------------------------------------------------------------ sums


def _forward(source: Tensor, windows: _Windows) -> Tensor:
    """The outputs (T, B, C) in the sums' type, from the rows (T or more, B, H, C/H)."""
    total = _window_sums(source, windows.low, windows.high)
    for edge in windows.edges:
        beyond = _rows_at(source, edge.row).masked_fill_(~edge.read.unsqueeze(-1), 0)
        total.addcmul_(beyond, edge.part.unsqueeze(-1))
    return total.mul_(windows.scale).masked_fill_(windows.unknown.unsqueeze(-1), torch.nan).flatten(-2)


def _offset_gradient(grad: Tensor, source: Tensor, windows: _Windows, edge: _Edge) -> Tensor:
    """The gradient for an offset (T, B, H): that of the fractional row beyond its end of the window."""
    along = (grad * _rows_at(source, edge.row)).sum(-1) * (edge.slope * windows.scale)
    return along.masked_fill_(~edge.read, 0)


def _source_gradient(grad: Tensor, windows: _Windows, count: int) -> Tensor:
    """The gradient for the `count` rows of the source (count, B, C)."""
    total = _window_sums_backward(grad, windows.low, windows.high, count)
    for edge in windows.edges:
        beyond = (grad * edge.part.unsqueeze(-1)).masked_fill_(~edge.read.unsqueeze(-1), 0)
        _add_rows_at(total, edge.row, beyond)
    return total.mul_(windows.scale).flatten(-2)


def _window_sums(source: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Σ source[low … high]; the windows belong to the last rows of the source."""
    levels = (source.shape[0] - 1).bit_length()
    before = source.new_zeros((1 << levels, *source.shape[1:]))
    before[: source.shape[0]] = source
    after = before.clone()
    total = source[source.shape[0] - low.shape[0] :].clone()  # final for windows of one row
    for level in range(levels):
        divided = _divided_at(level, low, high).unsqueeze(-1)
        total = torch.where(divided, _rows_at(after, low).add_(_rows_at(before, high)), total)
        left, right = before.unflatten(0, (-1, 2, 1 << level)).unbind(1)
        right += left[:, -1:]
        left, right = after.unflatten(0, (-1, 2, 1 << level)).unbind(1)
        left += right[:, :1]
    # Windows that reach beyond the blocks on the right, or on the left.
    total = torch.where((high >= 1 << levels).unsqueeze(-1), _rows_at(after, low), total)
    return torch.where((low < 0).unsqueeze(-1), _rows_at(before, high), total)


def _window_sums_backward(grad: Tensor, low: Tensor, high: Tensor, count: int) -> Tensor:
    """The transpose of _window_sums, its steps reversed: adds each grad[t] to the rows low … high of `count` rows."""
    levels = (count - 1).bit_length()
    before = grad.new_zeros((1 << levels, *grad.shape[1:]))
    after = torch.zeros_like(before)

    def add(to: Tensor, row: Tensor, where: Tensor) -> None:
        _add_rows_at(to, row, grad.masked_fill(~where.unsqueeze(-1), 0))

    add(after, low, (high >= 1 << levels) & (low >= 0))
    add(before, high, low < 0)
    for level in reversed(range(levels)):
        left, right = before.unflatten(0, (-1, 2, 1 << level)).unbind(1)
        left[:, -1] += _sum_of_rows(right)
        left, right = after.unflatten(0, (-1, 2, 1 << level)).unbind(1)
        right[:, 0] += _sum_of_rows(left)
        divided = _divided_at(level, low, high)
        add(after, low, divided)
        add(before, high, divided)
    total = after.add_(before)[:count]
    total[count - low.shape[0] :] += grad.masked_fill((low != high).unsqueeze(-1), 0)
    return total


def _divided_at(level: int, low: Tensor, high: Tensor) -> Tensor:
    """Where neighbouring blocks of 2^level rows, and none larger, divide a window into two."""
    return ((low ^ high) >> level) == 1


def _sum_of_rows(blocks: Tensor) -> Tensor:
    """(blocks, rows, …) → (blocks, …) for 2^n rows, by halving: torch's own sum may depend on the batch."""
    while blocks.shape[1] > 1:
        half = blocks.shape[1] // 2
        blocks = blocks[:, :half] + blocks[:, half:]
    return blocks[:, 0]


def _rows_at(source: Tensor, row: Tensor) -> Tensor:
    """source[row[t, b, h], b, h] as a new tensor (T, B, H, C/H); an arbitrary row where `row` is out of range."""
    row = row.clamp(0, source.shape[0] - 1)
    return source.gather(0, row.unsqueeze(-1).expand(*row.shape, source.shape[-1]))


def _add_rows_at(target: Tensor, row: Tensor, rows: Tensor) -> None:
    """target[row[t, b, h], b, h] += rows[t, b, h], in the order of t; `rows` must be 0 where `row` is out of range."""
    row = row.clamp(0, target.shape[0] - 1)
    if target.device.type == "cpu":
        target.scatter_add_(0, row.unsqueeze(-1).expand_as(rows), rows)
        return
    # scatter_add_ on a GPU adds in any order; index_put_ sorts first.
    _, batch, heads, channels = target.shape
    column = torch.arange(batch * heads, device=row.device).view(batch, heads)
    flat = (row * (batch * heads) + column).flatten()
    target.view(-1, channels).index_put_((flat,), rows.reshape(-1, channels), accumulate=True)
