"""The choice of continuations against torch's own log_softmax and topk."""

import math

import pytest
import torch

from lightconv_plugin.generation.candidates import best_continuations
from lightconv_plugin.ops.reference_decoding import log_normalisers


@pytest.mark.parametrize("given", [False, True], ids=["own normalisers", "given normalisers"])
@pytest.mark.parametrize("scored", [False, True])
def test_best_continuations(scored, given):
    sentences, beam, vocabulary, count = 3, 4, 1500, 8
    logits = torch.randn(sentences * beam, vocabulary) * 4
    scores = -10 * torch.rand(sentences, beam) if scored else None
    every = logits.log_softmax(1).view(sentences, beam, vocabulary)
    if scored:
        every = every + scores.unsqueeze(2)
    expected = every.flatten(1).topk(count)
    normalisers = log_normalisers(logits) if given else None
    found, words, parents = best_continuations(logits, normalisers, {}, scores, sentences, count)
    torch.testing.assert_close(found, expected.values, rtol=0, atol=2e-5)
    assert torch.equal(parents * vocabulary + words, expected.indices)


def test_penalties_change_the_choice_and_not_the_normalisers():
    logits = torch.randn(6, 40)
    kept = logits.clone()
    every = logits.log_softmax(1)
    best, worst = every[0].argmax().item(), every[0].argmin().item()
    every[:, best], every[:, worst] = -torch.inf, every[:, worst] + 20
    expected = every.view(3, 80).topk(7)
    found, words, parents = best_continuations(logits, None, {best: math.inf, worst: -20.0}, None, 3, 7)
    torch.testing.assert_close(found, expected.values)
    assert torch.equal(parents * 40 + words, expected.indices)
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("given", [False, True], ids=["own normalisers", "given normalisers"])
def test_broken_rows_have_no_probability(given):
    logits = torch.randn(5, 30)
    logits[1, 3], logits[2, 4], logits[3], logits[4, 7] = torch.nan, torch.inf, -torch.inf, -torch.inf
    normalisers = log_normalisers(logits)
    assert torch.equal(normalisers.isposinf(), torch.tensor([False, True, True, True, False]))
    found, words, _ = best_continuations(logits, normalisers if given else None, {}, None, 5, 6)
    assert found[1:4].eq(-torch.inf).all()
    expected = logits[[0, 4]].log_softmax(1).topk(6)
    torch.testing.assert_close(found[[0, 4]], expected.values)
    assert torch.equal(words[[0, 4]], expected.indices)
