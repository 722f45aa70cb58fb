"""Adaptive input against a float64 formula for every pad and several bands, and against fairseq's class."""

import pytest
import torch
import torch.nn.functional as F

from lightconv_plugin.modules.config import AdaptiveInputConfig
from lightconv_plugin.modules.embeddings import AdaptiveInput

WORDS = 20


def adaptive(cutoff, pad):
    torch.manual_seed(pad)
    return AdaptiveInput(WORDS, 16, 6, pad, AdaptiveInputConfig(cutoff, 2.0))


def ran(module, tokens, grad):
    """The vectors, and the gradients of all parameters."""
    out = module(tokens)
    return [out, *torch.autograd.grad(out, list(module.parameters()), grad)]


@pytest.mark.parametrize("cutoff", [(5,), (19,), (20,), (1, 2, 11), (4, 8, 12, 16, 20)], ids=str)
@pytest.mark.parametrize("pad", range(WORDS))
def test_one_row_is_the_pads(cutoff, pad):
    module = adaptive(cutoff, pad)
    tokens = torch.stack([torch.randperm(WORDS), torch.arange(WORDS)])
    grad = torch.randn(2, WORDS, 6)
    exact = [parameter.detach().double().requires_grad_() for parameter in module.parameters()]
    # One table of all words: a lookup with padding_idx gives the pad's row no gradient.
    table = torch.cat([vectors @ projection.t() for vectors, projection in zip(exact[::2], exact[1::2], strict=True)])
    assert table.eq(0).all(dim=1).nonzero().flatten().tolist() == [pad]
    out = F.embedding(tokens, table, padding_idx=pad)
    expected = [out, *torch.autograd.grad(out, exact, grad.double())]
    for ours, theirs in zip(ran(module, tokens, grad), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cutoff", [(5,), (20,), (5, 12)], ids=str)
@pytest.mark.parametrize("pad", [0, 1, 4])  # fairseq's class needs a pad below the number of words of every band
def test_fairseqs_class_computes_the_same(cutoff, pad):
    modules = pytest.importorskip("fairseq.modules")
    module = adaptive(cutoff, pad)
    theirs = modules.AdaptiveInput(WORDS, pad, 16, 2.0, 6, [*cutoff])
    theirs.load_state_dict({**module.state_dict(), "_float_tensor": torch.zeros(1)})
    tokens, grad = torch.stack([torch.randperm(WORDS), torch.arange(WORDS)]), torch.randn(2, WORDS, 6)
    for got, expected in zip(ran(module, tokens, grad), ran(theirs, tokens, grad), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
