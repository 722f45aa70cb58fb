"""One initialisation, in one place: fairseq's CUDA and PyTorch layers each had their own."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("fairseq")

from lightconv_plugin.modules import DynamicConv, LightweightConv, Linear
from tests.models.toys import build


def test_xavier_uniform_and_zero_biases():
    linear = Linear(300, 500)
    bound = math.sqrt(6 / (300 + 500))
    assert linear.weight.abs().max() <= bound and linear.weight.std().item() > 0.95 * bound / math.sqrt(3)
    assert not linear.bias.any()


def test_every_linear_of_the_model_has_it():
    """But attention's and the output projection's, which fairseq initialises."""
    for name, module in build().named_modules():
        if isinstance(module, nn.Linear) and "encoder_attn" not in name and not name.endswith("output_projection"):
            bound = math.sqrt(6 / (module.in_features + module.out_features))
            assert module.weight.abs().max() <= bound, name
            assert module.bias is None or not module.bias.any(), name


def test_filters():
    dynamic = DynamicConv(64, 7, 6, 16)
    assert isinstance(dynamic.weight_linear, Linear)
    light = LightweightConv(64, 7, 6, 16)
    expected = torch.empty_like(light.weight)
    torch.manual_seed(3)
    nn.init.xavier_uniform_(expected)
    torch.manual_seed(3)
    assert torch.equal(LightweightConv(64, 7, 6, 16).weight, expected)
