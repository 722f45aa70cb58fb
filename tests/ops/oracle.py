"""The operators once more, written independently of the package: two ways, in float64.

`band` is differentiable: it lays each filter out as a row of a T×T matrix and multiplies. `loops` is the sum of the
docstring in plain Python, number by number; it watches over `band`. Both take already drawn dropout factors, which
`dropout_factors` computes from the published definition of Philox-4x32-10 with Python's integers.
"""

import itertools
import math

import torch

EPSILON = 1e-6


def philox(counter, key):
    """Ten rounds of Philox-4x32 on four and two Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def dropout_factors(seed, shape, p):
    """0 or 1/(1-p) for each weight, float64."""
    key = (seed % 2**32, seed // 2**32)
    factors = []
    for flat in range(math.prod(shape)):
        word = philox((flat // 4 % 2**32, flat // 4 // 2**32, 0, 0), key)[flat % 4]
        factors.append(1 / (1 - p) if word >= p * 2**32 else 0.0)
    return torch.tensor(factors, dtype=torch.float64).view(shape)


def segments(steps, batch, lengths=None, cu_seqlens=None):
    """The first row and the row after the last of the sequence that row t of sentence b belongs to."""
    table = {}
    for t in range(steps):
        for b in range(batch):
            first, last = 0, steps
            if lengths is not None:
                last = int(lengths[b])
            if cu_seqlens is not None:
                edges = [int(edge) for edge in cu_seqlens]
                first, last = next((i, j) for i, j in itertools.pairwise(edges) if i <= t < j)
            table[t, b] = first, last
    return table


def band(
    x,
    weight,
    padding_l,
    *,
    normalize="softmax",
    factors=None,
    bias=None,
    lengths=None,
    cu_seqlens=None,
    renorm_padding=False,
    glu=False,
):
    """(T, B, C) by T×T matrices; x and weight float64, weight (H, K) or (T, B, H, K)."""
    if glu:
        half = x.shape[2] // 2
        x = x[:, :, :half] * torch.sigmoid(x[:, :, half:])
    steps, batch, channels = x.shape
    heads, size = weight.shape[-2:]
    weight = weight.expand(steps, batch, heads, size)
    if factors is not None:
        factors = factors.expand(steps, batch, heads, size)

    where = segments(steps, batch, lengths, cu_seqlens)
    spans = torch.tensor([[where[t, b] for b in range(batch)] for t in range(steps)]).view(steps, batch, 2)
    first, last = spans.split(1, -1)
    # reads[t, b, k, s]: tap k of row t reads row s
    rows = torch.arange(steps)
    sources = (rows.view(-1, 1) - padding_l + torch.arange(size)).view(steps, 1, size)
    reads = (((first <= sources) & (sources < last)).unsqueeze(-1) & (sources.unsqueeze(-1) == rows)).double()
    readable = (first <= rows.view(-1, 1, 1)) & (rows.view(-1, 1, 1) < last)
    x = torch.where(readable, x, 0.0)

    inside = reads.sum(-1)[:, :, None, :] > 0 if renorm_padding else torch.ones(1, 1, 1, size, dtype=torch.bool)
    filters = _normalized(weight, normalize, inside.expand(steps, batch, heads, size))
    if factors is not None:
        filters = filters * factors
    matrix = torch.einsum("tbhk,tbks->bhts", filters, reads)
    out = torch.einsum("bhts,sbhr->tbhr", matrix, x.reshape(steps, batch, heads, channels // heads))
    out = out.reshape(steps, batch, channels)
    return out if bias is None else out + bias


def _normalized(weight, kind, inside):
    kept = torch.where(inside, weight, 0.0)
    if kind == "softmax":
        powers = torch.where(inside, kept.exp(), 0.0)
        total = powers.sum(-1, keepdim=True)
        return powers / torch.where(total > 0, total, 1.0)
    if kind in ("l2", "abs_l2"):
        squares = kept.square().sum(-1, keepdim=True)
        norm = torch.where(squares > 0, squares.clamp_min(1e-300).sqrt(), 0.0)
        return (kept if kind == "l2" else kept.abs()) / (norm + EPSILON)
    if kind == "l1":
        return kept / (kept.abs().sum(-1, keepdim=True) + EPSILON)
    return torch.where(
        inside,
        {
            "none": lambda w: w,
            "sigmoid": lambda w: 1 / (1 + (-w).exp()),
            "tanh": lambda w: 2 / (1 + (-2 * w).exp()) - 1,
            "abs": lambda w: w.abs(),
            "square": lambda w: w * w,
        }[kind](kept),
        0.0,
    )


def loops(x, weight, padding_l, *, factors=None, bias=None, lengths=None, cu_seqlens=None, renorm_padding=False):
    """The softmax convolution, one multiplication at a time (no glu)."""
    x, weight = x.detach(), weight.detach()
    bias = None if bias is None else bias.detach()
    steps, batch, channels = x.shape
    heads, size = weight.shape[-2:]
    where = segments(steps, batch, lengths, cu_seqlens)
    out = torch.zeros(steps, batch, channels, dtype=torch.float64)
    for t in range(steps):
        for b in range(batch):
            first, last = where[t, b]
            sources = [t - padding_l + k for k in range(size)]
            allowed = [first <= s < last for s in sources]
            for c in range(channels):
                h = c * heads // channels
                logits = weight[h] if weight.dim() == 2 else weight[t, b, h]
                powers = [
                    math.exp(float(v)) if ok or not renorm_padding else 0.0
                    for v, ok in zip(logits, allowed, strict=True)
                ]
                total, value = sum(powers), 0.0 if bias is None else float(bias[c])
                for k in range(size):
                    if allowed[k]:
                        factor = (
                            1.0
                            if factors is None
                            else float(factors[h, k] if factors.dim() == 2 else factors[t, b, h, k])
                        )
                        value += powers[k] / total * factor * float(x[sources[k], b, c])
                out[t, b, c] = value
    return out
