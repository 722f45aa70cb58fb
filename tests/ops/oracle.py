"""The operators once more, written independently of the package, in float64.

`convolution` and `talk` are differentiable: the definitions as T×T matrices. Others watch over them: `loops` is the
convolutions' sum in plain Python, number by number; `published` is the TaLK paper's own formula, global prefix sums
read at clamped positions; `shifts` adds one shifted copy of x for every distance, for long sequences. The convolutions
take already drawn dropout factors, which `dropout_factors` computes from the published definition of Philox-4x32-10
with Python's integers.
"""

import math

import torch

EPSILON = 1e-6


def label_smoothed(logits, target, epsilon, ignored):
    """fairseq's label_smoothed_nll_loss for each token: the loss and nll, from probabilities, differentiable."""
    losses = -torch.log_softmax(logits.double(), dim=-1)
    share = epsilon / (logits.shape[-1] - 1)
    nll = losses.gather(-1, target[..., None])[..., 0]
    loss = (1 - epsilon - share) * nll + share * losses.sum(-1)
    return tuple(numbers.masked_fill(target == ignored, 0) for numbers in (loss, nll))


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
    """(T, B): the first row and the row after the last of the sequence that each row belongs to."""
    first, last = torch.zeros(steps, batch, dtype=torch.long), torch.full((steps, batch), steps)
    if lengths is not None:
        last = lengths.long().expand(steps, batch)
    if cu_seqlens is not None:
        for begin, end in zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True):
            first[begin:end], last[begin:end] = begin, end
    return first, last


def convolution(
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

    first, last = (edge.unsqueeze(-1) for edge in segments(steps, batch, lengths, cu_seqlens))
    # reads[t, b, k, s]: tap k of row t reads row s
    rows = torch.arange(steps)
    sources = (rows.view(-1, 1) - padding_l + torch.arange(size)).view(steps, 1, size)
    reads = (((first <= sources) & (sources < last)).unsqueeze(-1) & (sources.unsqueeze(-1) == rows)).double()
    x = torch.where(rows.view(-1, 1, 1) < last, x, 0.0)

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
    first_rows, last_rows = segments(steps, batch, lengths, cu_seqlens)
    out = torch.zeros(steps, batch, channels, dtype=torch.float64)
    for t in range(steps):
        for b in range(batch):
            first, last = int(first_rows[t, b]), int(last_rows[t, b])
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


def _part(reach, distance):
    """How much of the row at a distance ≥ 1 is in the window; no gradient where it is all or nothing."""
    part = reach - distance + 1
    return torch.where((part > 0) & (part < 1), part, (part.detach() > 0).double())


def talk(x, offset_left, offset_right, max_left, max_right, *, lengths=None, cu_seqlens=None):
    steps, batch, _ = x.shape
    t, s = torch.arange(steps).view(-1, 1, 1, 1), torch.arange(steps)
    reach_left = (offset_left.clamp(min=0) * max_left).unsqueeze(-1)
    reach_right = 0 if offset_right is None else (offset_right.clamp(min=0) * max_right).unsqueeze(-1)
    matrix = torch.where(s < t, _part(reach_left, t - s), 0) + (s == t)
    if max_right:
        matrix = matrix + torch.where(s > t, _part(reach_right, s - t), 0)
    first, last = (edge.view(steps, batch, 1, 1) for edge in segments(steps, batch, lengths, cu_seqlens))
    inside = (s >= first) & (s < last)
    matrix = torch.where(inside, matrix, 0) / (max_left + max_right + 1)
    x = torch.where(t.view(-1, 1, 1) < last.view(steps, batch, 1), x, 0)
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


def shifts(x, offset_left, offset_right, left, right, furthest):
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


def ring_step(x, ring, weight, ancestors, now, bias=None, softmax=False):
    """ops.ring_step row by row and head by head → its result, and the ring after it."""
    slots, beams, (heads, taps) = ring.shape[0], ancestors.shape[1], weight.shape[-2:]
    kept, out = ring.double(), torch.zeros(x.shape, dtype=torch.float64)
    for n in range(len(x)):
        kept[now % slots, n // beams, n % beams] = x[n].double()
    for n in range(len(x)):
        sentence, beam = divmod(n, beams)
        for h in range(heads):
            tap = (weight[h] if weight.dim() == 2 else weight[n, h]).double()
            if softmax:
                tap = tap.exp() / tap.exp().sum()
            channels = slice(h * x.shape[1] // heads, (h + 1) * x.shape[1] // heads)
            for k in range(min(taps, now + 1)):
                ancestor = ancestors[sentence, beam, now - k]
                out[n, channels] += tap[k] * kept[(now - k) % slots, sentence, ancestor, channels]
    return (out if bias is None else out + bias.double()), kept


def best_words(logits, count, normalisers=None, scores=None, penalties=None):
    """ops.best_words → log-probabilities and words; of equally good words the first comes first."""
    values = logits.double()
    if normalisers is None:
        normalisers = values.logsumexp(1)
    values = values.clone()
    for word, penalty in (penalties or {}).items():
        values[:, word] -= penalty
    words = values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    found = values.gather(1, words) - normalisers.double().unsqueeze(1)
    return (found if scores is None else found + scores.double().unsqueeze(1)), words
