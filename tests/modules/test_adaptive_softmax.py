"""The adaptive softmax in training, against fairseq's with its criterion's loss."""

import pytest
import torch
import torch.nn.functional as F

from lightconv_plugin.modules.config import AdaptiveInputConfig, AdaptiveSoftmaxConfig
from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.modules.embeddings import AdaptiveInput
from lightconv_plugin.modules.outputs import AdaptiveSoftmax

modules = pytest.importorskip("fairseq.modules")


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_where_fairseq_has_it(training, monkeypatch):
    """Both on the input and in the tails; here it takes the same elements in both."""

    def dropped(x, p=0.5, training=True, inplace=False):
        return x * (torch.arange(x.shape[-1]) % 3 > 0) / (1 - p) if training else x

    monkeypatch.setattr(F, "dropout", dropped)
    monkeypatch.setattr(Dropout, "_native", lambda self, x: False)
    torch.manual_seed(1)
    theirs = modules.AdaptiveSoftmax(30, 16, [8, 20], dropout=0.4, factor=2.0).train(training)
    ours = AdaptiveSoftmax(30, 16, AdaptiveSoftmaxConfig((8, 20), 2.0, dropout=0.4), 16).train(training)
    ours.load_state_dict({name: value for name, value in theirs.state_dict().items() if name != "version"})
    x, target = torch.randn(50, 16), torch.arange(50) % 30
    outputs, targets = theirs(x[:, None], target)
    expected = sum(
        F.cross_entropy(scores, wanted, reduction="sum")
        for scores, wanted in zip(outputs, targets, strict=True)
        if wanted is not None
    )
    found = -ours(x).gather(-1, target[:, None]).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.losses(x, target).sum(), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_losses_and_their_gradients_are_those_of_the_log_probabilities(tied):
    """Also of a band without a label: processes add the gradients up, so each needs all of them."""
    config = AdaptiveSoftmaxConfig((8, 20, 26), 2.0, tie_weights=tied, tie_proj=tied)
    softmax = AdaptiveSoftmax(30, 16, config, 16).double()
    inputs = AdaptiveInput(30, 16, 16, 1, AdaptiveInputConfig((8, 20, 26), 2.0)).double() if tied else None
    labels = torch.tensor([0, 8, 19, -100, 29, 7, 28, 9])  # none in 20 … 25
    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    weights = [x, *softmax.parameters()]
    if tied:  # to all but the first projection
        weights += [weight for name, weight in inputs.named_parameters() if name != "embeddings.0.1.weight"]
    expected = F.nll_loss(softmax(x, inputs), labels, reduction="none")
    found = softmax.losses(x, labels, inputs)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(losses.square().sum(), weights) for losses in (found, expected)]
    torch.testing.assert_close(*gradients)
