"""The operators for a step of beam search find on a GPU what the reference finds, also when a graph replays them."""

import itertools
import math

import pytest
import torch

from lightconv_plugin import ops
from lightconv_plugin.ops import reference

TYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def ring_arguments(taps, heads, per_head, now, dtype, sentences=5, beams=4):
    generator = torch.Generator().manual_seed(taps + now)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    count, channels = sentences * beams, heads * per_head
    ring, weight = normal(taps, sentences + 1, beams, channels), normal(count, heads, taps)
    ring[now:] = math.nan
    ancestors = torch.randint(beams, (sentences, beams, 64), generator=generator)
    ancestors[:, :, now] = torch.arange(beams)
    return normal(count, channels), ring, weight, normal(channels), ancestors, torch.tensor([now])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("taps", "heads", "per_head"), [(31, 16, 64), (3, 512, 1), (15, 5, 12), (100, 1, 8)])
def test_ring_steps(taps, heads, per_head, dtype, device):
    for now, softmax in itertools.product((0, 2, 40), (False, True)):
        given = ring_arguments(taps, heads, per_head, now, dtype)
        on_device = [tensor.to(device) for tensor in given]
        found = torch.ops.lightconv.ring_step(*on_device, softmax)
        want = reference.ring_step(*given, softmax)
        scale = want.double().square().mean().sqrt()
        torch.testing.assert_close(found.cpu().double(), want.double(), rtol=TYPES[dtype], atol=TYPES[dtype] * scale)
        assert torch.equal(on_device[1].cpu().nan_to_num(7), given[1].nan_to_num(7))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("words", "count"), [(41, 8), (8368, 10), (32768, 8), (50001, 100)])
def test_best_words(words, count, dtype, device):
    generator = torch.Generator().manual_seed(words)
    logits = 3 * torch.randn(20, words, generator=generator).to(dtype)
    logits[3, 7], logits[4] = math.nan, -math.inf
    options = {"penalties": {1: math.inf, 3: -5.0}}
    scores = -torch.rand(20, generator=generator)
    want, _ = ops.best_words(logits, count, scores=scores, **options)
    found, best = ops.best_words(logits.to(device), count, scores=scores.to(device), **options)
    torch.testing.assert_close(found.cpu(), want, rtol=1e-5, atol=1e-5)
    whole, every = ops.best_words(logits, words, scores=scores, **options)
    # Of equal words either may be found: each has the log-probability that it was found with, and is found once.
    exact = torch.empty_like(whole).scatter_(1, every, whole)
    torch.testing.assert_close(exact.gather(1, best.cpu()), want, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == count for row in best.tolist())


def test_a_graph_replays_later_steps(cuda):
    """The time and the ancestors are read from the device; the ring stays in place."""
    x, ring, weight, bias, ancestors, now = (tensor.to(cuda) for tensor in ring_arguments(7, 4, 16, 0, torch.float32))
    ring.zero_()
    torch.ops.lightconv.ring_step(x, ring, weight, bias, ancestors, now, True)  # compiles
    kept, steps = ring.cpu(), torch.randint(4, (5, 4, 64))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.lightconv.ring_step(x, ring, weight, bias, ancestors, now, True)
    for time in range(1, 20):
        steps[:, :, time] = torch.arange(4)
        for tensor, value in ((x, torch.randn(20, 64)), (now, torch.tensor([time])), (ancestors, steps)):
            tensor.copy_(value)
        graph.replay()
        given = (x.cpu(), kept, weight.cpu(), bias.cpu(), steps, now.cpu())
        torch.testing.assert_close(out.cpu(), reference.ring_step(*given, True), rtol=1e-5, atol=1e-5)
