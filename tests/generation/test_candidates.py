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


def test_normalisers_of_broken_rows():
    logits = torch.randn(5, 30)
    logits[1, 3], logits[2, 4], logits[3] = torch.nan, torch.inf, -torch.inf
    whole = logits.clone()
    normalisers = log_normalisers(logits)
    broken = [1, 2, 3]
    assert torch.equal(logits[broken] - normalisers[broken].unsqueeze(1), torch.full((3, 30), -torch.inf))
    torch.testing.assert_close(logits[[0, 4]] - normalisers[[0, 4], None], whole[[0, 4]].log_softmax(1))
