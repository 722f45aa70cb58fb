"""The adaptive softmax in training, against fairseq's with its criterion's loss."""

import pytest
import torch
import torch.nn.functional as F

from lightconv_plugin.modules.config import AdaptiveSoftmaxConfig
from lightconv_plugin.modules.dropout import Dropout
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
