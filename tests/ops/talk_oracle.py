"""TaLK convolution written three more times, independently of the package, and random arguments for it.

`band` is differentiable: the definition as a T×T matrix. `published` is the paper's own formula, global prefix sums
read at clamped positions. `taps` adds one shifted copy of x for every distance, for long sequences. All in float64.
"""

import torch

from lightconv_plugin import ops


def arguments(steps, batch, heads, per_head, left, right, *, most=1.0, dtype=torch.float64, seed=0):
    """x and the offsets, between 0 and `most`, as leaves that require gradients; offset_right None for right = 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, batch, heads * per_head, generator=generator, dtype=torch.float64)
    offsets = torch.rand(2, steps, batch, heads, generator=generator, dtype=torch.float64) * most
    x, offset_left, offset_right = (tensor.to(dtype).requires_grad_() for tensor in (x, *offsets))
    return x, offset_left, offset_right if right else None


def gradients(out, inputs, grad):
    """Gradients of `out` for the inputs that are not None."""
    return torch.autograd.grad(out, [tensor for tensor in inputs if tensor is not None], grad)


def edges(steps, batch, lengths=None, cu_seqlens=None):
    """(T, B): the first row and the row after the last of the sequence that each row belongs to."""
    first, last = torch.zeros(steps, batch, dtype=torch.long), torch.full((steps, batch), steps)
    if lengths is not None:
        last = lengths.long().expand(steps, batch)
    if cu_seqlens is not None:
        for begin, end in zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True):
            first[begin:end], last[begin:end] = begin, end
    return first, last


def _part(reach, distance):
    """How much of the row at a distance ≥ 1 is in the window; no gradient where it is all or nothing."""
    part = reach - distance + 1
    return torch.where((part > 0) & (part < 1), part, (part.detach() > 0).double())


def band(x, offset_left, offset_right, left, right, *, lengths=None, cu_seqlens=None):
    steps, batch, _ = x.shape
    t, s = torch.arange(steps).view(-1, 1, 1, 1), torch.arange(steps)
    reach_left = (offset_left.clamp(min=0) * left).unsqueeze(-1)
    reach_right = 0 if offset_right is None else (offset_right.clamp(min=0) * right).unsqueeze(-1)
    matrix = torch.where(s < t, _part(reach_left, t - s), 0) + (s == t)
    if right:
        matrix = matrix + torch.where(s > t, _part(reach_right, s - t), 0)
    first, last = (edge.view(steps, batch, 1, 1) for edge in edges(steps, batch, lengths, cu_seqlens))
    inside = (s >= first) & (s < last)
    matrix = torch.where(inside, matrix, 0) / (left + right + 1)
    readable = torch.ones(steps, batch, 1, dtype=torch.bool)
    if lengths is not None:
        readable = (torch.arange(steps).view(-1, 1) < lengths).unsqueeze(-1)
    x = torch.where(readable, x, 0)
    return torch.einsum("tbhs,sbhr->tbhr", matrix, x.unflatten(-1, (offset_left.shape[-1], -1))).flatten(-2)


def published(x, offset_left, offset_right, left, right, dtype=torch.float64):
    """The formula of the paper for whole sequences: differences of prefix sums at clamped, fractional positions."""
    steps, _, channels = x.shape
    x = x.to(dtype) / (left + right + 1)
    sums = torch.cat([torch.zeros_like(x[:1]), x.cumsum(0, dtype=dtype)])  # sums[i] = S[i − 1]
    t = torch.arange(steps, dtype=dtype).view(-1, 1, 1)
    low = (t - offset_left.to(dtype) * left).clamp(0, steps - 1)
    high = t.expand_as(low) if offset_right is None else (t + offset_right.to(dtype) * right).clamp(0, steps - 1)

    def at(position):
        index = position.long().repeat_interleave(channels // position.shape[-1], -1)
        return sums.gather(0, index)

    def wide(part):
        return part.repeat_interleave(channels // part.shape[-1], -1)

    from_low, from_high = wide(low.ceil() - low), wide(high - high.floor())
    end = (1 - from_high) * at(high.floor() + 1) + from_high * at(high.ceil() + 1)
    begin = from_low * at(low.floor()) + (1 - from_low) * at(low.ceil())
    return end - begin


def taps(x, offset_left, offset_right, left, right, furthest):
    """By distances 0 … furthest to both sides."""
    x = x.double()
    out = x.clone()
    for offset, limit, side in ((offset_left, left, 1), (offset_right, right, -1)):
        if offset is None:
            continue
        for distance in range(1, min(furthest, x.shape[0] - 1) + 1):
            part = (offset.double().clamp(min=0) * limit - distance + 1).clamp(0, 1)
            part = part.repeat_interleave(x.shape[-1] // offset.shape[-1], -1)
            if side == 1:
                out[distance:] += part[distance:] * x[:-distance]
            else:
                out[:-distance] += part[:-distance] * x[distance:]
    return out / (left + right + 1)


def check(x, offset_left, offset_right, left, right, *, atol=1e-12, **options):
    """Hold the operator's output and all its gradients against the oracle's."""
    inputs = (x, offset_left, offset_right)
    out = ops.talkconv(*inputs, left, right, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    got = gradients(out, inputs, grad)
    wide = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    want = band(*wide, left, right, **options)
    torch.testing.assert_close(out.double(), want.detach(), rtol=0, atol=atol, msg=lambda text: f"out: {text}")
    names = ("x", "offset_left", "offset_right")
    for name, ours, theirs in zip(names, got, gradients(want, wide, grad.double()), strict=False):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=atol * 10, msg=lambda text: f"d{name}: {text}")  # noqa: B023


def relative_error(got, want):
    """Root mean square of the difference over that of the expected values."""
    return ((got.double() - want).norm() / want.norm()).item()
