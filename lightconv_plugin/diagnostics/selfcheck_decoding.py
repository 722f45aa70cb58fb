"""The self-check of the operators for a step of beam search; selfcheck.py says how results are checked."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightconv_plugin import ops

# The filter is longer than the sequence is so far.
SENTENCES, BEAMS, CHANNELS, HEADS, KERNEL_SIZE, NOW = 2, 2, 12, 3, 7, 4
ROWS, WORDS, BEST, FORBIDDEN = 5, 21, 6, 3


def expected_ring(x: Tensor, ring: Tensor, logits: Tensor, ancestors: Tensor) -> Tensor:
    """A dynamic convolution (N,C) of step NOW in float64: x (N,C), ring (K,S,BEAMS,C), logits (N,H,K), ancestors."""
    weight = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x).unflatten(1, (HEADS, -1))
    for row in range(x.shape[0]):
        sentence, beam = divmod(row, BEAMS)
        for k in range(min(KERNEL_SIZE, NOW + 1)):
            ancestor = int(ancestors[sentence, beam, NOW - k])
            source = x[row] if k == 0 else ring[NOW - k, sentence, ancestor]
            out[row] += weight[row, :, k, None] * source.unflatten(0, (HEADS, -1))
    return out.flatten(1)


def compare_ring(compare: Callable[[Tensor | None, Tensor], None], device: torch.device, dtype: torch.dtype) -> None:
    x, ring, weight, ancestors = _ring(dtype, torch.Generator().manual_seed(35))
    kept, now = ring.to(device, dtype), torch.tensor([NOW], device=device)
    weight_on_device = weight.to(device, dtype)
    found = ops.ring_step(x.to(device, dtype), kept, weight_on_device, ancestors.to(device), now, softmax=True)
    compare(found, expected_ring(x, ring, weight, ancestors))
    ring[NOW] = x.view(SENTENCES, BEAMS, CHANNELS)
    compare(kept, ring)


def _ring(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, ring, filters and ancestors of a step of beam search; the ring is zero where nothing has been written."""
    x, weight = (
        torch.randn(SENTENCES * BEAMS, *shape, generator=generator).to(dtype).double()
        for shape in ((CHANNELS,), (HEADS, KERNEL_SIZE))
    )
    ring = torch.randn(KERNEL_SIZE, SENTENCES, BEAMS, CHANNELS, generator=generator).to(dtype).double()
    ring[NOW:] = 0
    ancestors = torch.randint(BEAMS, (SENTENCES, BEAMS, NOW + 1), generator=generator)
    ancestors[:, :, NOW] = torch.arange(BEAMS)
    return x, ring, weight, ancestors


def compare_best(compare: Callable[[Tensor | None, Tensor], None], device: torch.device, dtype: torch.dtype) -> None:
    # Numbers that every type has, and no two alike in a row: the words are known without doubt.
    generator = torch.Generator().manual_seed(36)
    logits = torch.stack([torch.randperm(WORDS, generator=generator) for _ in range(ROWS)]).double() / 4
    found, words = ops.best_words(logits.to(device, dtype), BEST, penalties={FORBIDDEN: torch.inf})
    for row in range(ROWS):
        ranked = sorted(range(WORDS), key=lambda word: -logits[row, word].item())
        ranked = [word for word in ranked if word != FORBIDDEN][:BEST]
        compare(words[row], torch.tensor(ranked).double())
        compare(found[row], logits[row, ranked] - logits[row].exp().sum().log())


def ring_calls(normal: Callable[..., Tensor], device: torch.device) -> dict[str, tuple]:
    x, ring, _, ancestors = _ring(torch.float64, torch.Generator().manual_seed(37))
    like = normal(CHANNELS)  # the bias, too
    weight, now = normal(*x.shape[:1], HEADS, KERNEL_SIZE), torch.tensor([NOW], device=device)
    given = (x.to(like), ring.to(like), weight, like, ancestors.to(device), now)
    return {"ring_step": (*given, True)}


def best_calls(normal: Callable[..., Tensor], device: torch.device) -> dict[str, tuple]:
    # Whole numbers that differ within a row, so that there is one order.
    logits = torch.stack([torch.arange(WORDS).roll(3 * row) for row in range(ROWS)]).to(normal(1))
    normalisers, scores = normal(2, ROWS).float()
    return {"best_words": (logits, normalisers, scores, BEST, [FORBIDDEN, 2], [torch.inf, -0.5])}
