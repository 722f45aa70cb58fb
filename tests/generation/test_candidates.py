"""The choice of continuations against torch's own log_softmax and topk."""

import pytest
import torch

from lightconv_plugin.generation.candidates import best_continuations, log_normalisers


@pytest.mark.parametrize("scored", [False, True])
def test_best_continuations(scored):
    sentences, beam, vocabulary, count = 3, 4, 1500, 8
    logits = torch.randn(sentences * beam, vocabulary) * 4
    scores = -10 * torch.rand(sentences, beam) if scored else None
    every = logits.log_softmax(1).view(sentences, beam, vocabulary)
    if scored:
        every = every + scores.unsqueeze(2)
    expected = every.flatten(1).topk(count)
    found, words, parents = best_continuations(logits, log_normalisers(logits), scores, sentences, count)
    torch.testing.assert_close(found, expected.values, rtol=0, atol=2e-5)
    assert torch.equal(parents * vocabulary + words, expected.indices)


def test_broken_rows_have_no_probability():
    logits = torch.randn(5, 30)
    logits[1, 3], logits[2, 4], logits[3], logits[4, 7] = torch.nan, torch.inf, -torch.inf, -torch.inf
    whole = logits.clone()
    normalisers = log_normalisers(logits)
    assert torch.equal(normalisers.isposinf(), torch.tensor([False, True, True, True, False]))
    found, words, _ = best_continuations(logits, normalisers, None, 5, 6)
    assert found[1:4].eq(-torch.inf).all()
    expected = whole[[0, 4]].log_softmax(1).topk(6)
    torch.testing.assert_close(found[[0, 4]], expected.values)
    assert torch.equal(words[[0, 4]], expected.indices)
