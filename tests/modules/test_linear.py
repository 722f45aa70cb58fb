"""One initialisation, in one place: fairseq's CUDA and PyTorch layers each had their own."""

import math

import torch
from torch import nn

from lightconv_plugin.modules import DynamicConv, LightweightConv, Linear
from tests.models.toys import build


def test_xavier_uniform_and_zero_biases():
    linear = Linear(300, 500)
    bound = math.sqrt(6 / (300 + 500))
    assert linear.weight.abs().max() <= bound and linear.weight.std().item() > 0.95 * bound / math.sqrt(3)
    assert not linear.bias.any()


def test_every_linear_of_the_model_has_it():
    """But attention's and the output projection's, which are fairseq's own."""
    model = build()
    plain = [name for name, m in model.named_modules() if type(m) is nn.Linear]
    assert all("encoder_attn" in name or name.endswith("output_projection") for name in plain)


def test_filters():
    dynamic = DynamicConv(64, 7, 6, 16)
    assert isinstance(dynamic.weight_linear, Linear)
    light = LightweightConv(64, 7, 6, 16)
    expected = torch.empty_like(light.weight)
    torch.manual_seed(3)
    nn.init.xavier_uniform_(expected)
    torch.manual_seed(3)
    assert torch.equal(LightweightConv(64, 7, 6, 16).weight, expected)
