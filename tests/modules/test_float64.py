"""A model in float64 computes in float64, its loss too: derivatives agree with differences."""

import pytest
import torch

from lightconv_plugin.mixers import MIXERS
from tests.modules.plain_models import model_of, words


@pytest.mark.parametrize("kind", MIXERS)
def test_derivatives_are_the_limits_of_differences(kind):
    model, source, target = model_of(kind, activation="gelu").double().eval(), words("cpu", 7), words("cpu")
    model(source, target, target, label_smoothing=0.1).loss.backward()
    directions = [torch.randn_like(parameter) for parameter in model.parameters()]
    slope = sum((p.grad * d).sum() for p, d in zip(model.parameters(), directions, strict=True))
    losses = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for parameter, direction in zip(model.parameters(), directions, strict=True):
                parameter.add_(direction, alpha=step)
        losses.append(model(source, target, target, label_smoothing=0.1).loss)
    assert losses[0].dtype == torch.float64
    torch.testing.assert_close((losses[0] - losses[1]) / 2e-6, slope, rtol=1e-5, atol=1e-7)
