"""The gated short convolution is the one of LFM2's published models: transformers' implementation, with its weights."""

import pytest
import torch

pytest.importorskip("transformers")

from lightconv_plugin import hf  # noqa: F401 (hides a torchaudio that cannot be loaded)
from lightconv_plugin.modules import MixerSpec, build_mixer

lfm2 = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")

CHANNELS, KERNEL = 12, 3


@pytest.fixture
def theirs():
    torch.manual_seed(1)
    config = lfm2.Lfm2Config(hidden_size=CHANNELS, num_hidden_layers=1, conv_L_cache=KERNEL, layer_types=["conv"])
    return lfm2.Lfm2ShortConv(config, 0)


@pytest.fixture
def ours(theirs):
    spec = MixerSpec(
        "gated_short", KERNEL, CHANNELS, num_heads=1, glu=True, input_dropout=0.0, weight_dropout=0.0,
        normalize="softmax", attention_dropout=0.0, causal=True,
    )  # fmt: skip
    block = build_mixer(spec, CHANNELS)
    with torch.no_grad():
        for linear, their in (block.linear1, theirs.in_proj), (block.linear2, theirs.out_proj):
            linear.weight.copy_(their.weight)
            linear.bias.zero_()
        block.conv.weight.copy_(theirs.conv.weight)
    return block


def test_outputs_and_gradients(ours, theirs):
    """Of sentences with pads on the left, as its tokenizer batches them."""
    x = torch.randn(3, 9, CHANNELS)
    tokens = torch.ones(3, 9, dtype=torch.long)
    tokens[1, :4] = 0
    want = theirs(x, attention_mask=tokens)
    found = ours(x.transpose(0, 1), pads=tokens == 0).transpose(0, 1)
    seen = tokens.bool()
    torch.testing.assert_close(found[seen], want[seen])
    weights = torch.randn(int(seen.sum()), CHANNELS)
    for out in found, want:
        (out[seen] * weights).sum().backward()
    for mine, their in (
        (ours.linear1.weight, theirs.in_proj.weight),
        (ours.conv.weight, theirs.conv.weight),
        (ours.linear2.weight, theirs.out_proj.weight),
    ):
        torch.testing.assert_close(mine.grad, their.grad)


@torch.no_grad()
def test_steps(ours, theirs):
    x = torch.randn(2, 7, CHANNELS)
    want, state = theirs(x).transpose(0, 1), None
    for first, last in (0, 1), (1, 4), (4, 5), (5, 7):
        found, state = ours.step(x[:, first:last].transpose(0, 1), state)
        torch.testing.assert_close(found, want[first:last])
