"""The block: the paper's figure written out, pads, decoding in chunks, and the keys of other people's files."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("fairseq")

from lightconv_plugin.models.token_mixers import FairseqConvBlock as ConvBlock
from lightconv_plugin.modules import DepthwiseConv, DynamicConv, LightweightConv


def block(kind=DynamicConv, *, glu=True, causal=True, kernel_size=5, **options):
    conv = kind(24, kernel_size, kernel_size - 1 if causal else kernel_size // 2, 4)
    return ConvBlock(16, conv, glu=glu, **options).eval()


@pytest.mark.parametrize("glu", [True, False])
@pytest.mark.parametrize("kind", [LightweightConv, DynamicConv])
@torch.no_grad()
def test_it_is_the_papers_figure(kind, glu):
    b = block(kind, glu=glu)
    x = torch.randn(9, 2, 16)
    h = F.linear(x, b.linear1.weight, b.linear1.bias)
    if glu:
        h = h[..., :24] * torch.sigmoid(h[..., 24:])
    expected = F.linear(b.conv(h), b.linear2.weight, b.linear2.bias)
    out, attention = b(x, x, x)
    assert attention is None
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("causal", [True, False])
def test_gates_before_and_after_the_convolution(causal):
    """The definition token by token, its gradient, and the state between steps: the convolution's inputs."""
    b = ConvBlock(6, DepthwiseConv(4, 3, 2 if causal else 1), glu=True, gates_output=True).double()
    assert b.linear1.weight.shape == (12, 6) and b.conv.weight.shape == (4, 1, 3)
    x = torch.randn(5, 2, 6, dtype=torch.float64)
    before, after, values = F.linear(x, b.linear1.weight, b.linear1.bias).split(4, dim=-1)
    u = torch.cat([torch.zeros(2, 2, 4).double(), before * values, torch.zeros(2, 2, 4).double()])
    first = 0 if causal else 1
    mixed = [sum(u[t + first + k] * b.conv.weight[:, 0, k] for k in range(3)) for t in range(5)]
    expected = F.linear(after * torch.stack(mixed), b.linear2.weight, b.linear2.bias)
    torch.testing.assert_close(b(x)[0], expected)
    parameters = list(b.parameters())
    ours, theirs = (torch.autograd.grad(y.square().sum(), parameters) for y in (b(x)[0], expected))
    torch.testing.assert_close(ours, theirs)
    if causal:
        y, state = b.step(x[:3], None)
        torch.testing.assert_close((y, state), (expected[:3], u[3:5]))


@pytest.mark.parametrize("gates", [{}, {"gates_output": True}], ids=["glu", "both"])
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@torch.no_grad()
def test_what_stands_at_a_pad_is_never_read(left, gates):
    b = block(causal=False, **gates)
    x = torch.randn(9, 2, 16)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    pads = slice(0, 3) if left else slice(6, 9)
    mask[1, pads] = True
    noisy = x.clone()
    noisy[pads, 1] = float("nan")
    words = ~mask.t()
    torch.testing.assert_close(b(noisy, key_padding_mask=mask)[0][words], b(x, key_padding_mask=mask)[0][words])
    alone = x[3:, 1:] if left else x[:6, 1:]
    torch.testing.assert_close(b(x, key_padding_mask=mask)[0][words[:, 1], 1], b(alone)[0][:, 0])


@torch.no_grad()
def test_reorder_and_the_names_fairseq_calls():
    b = block()
    x = torch.randn(6, 3, 16)
    order = torch.tensor([1, 1, 0])
    assert b._get_input_buffer(None) == {}
    state = {}
    b(x[:5], incremental_state=state)
    b.reorder_incremental_state(state, order)
    last = torch.randn(1, 3, 16)
    expected = b(torch.cat([x[:5, order], last]))[0][-1:]
    torch.testing.assert_close(b(last, incremental_state=state)[0], expected, atol=1e-6, rtol=1e-5)


def test_upstreams_keys_become_ours():
    b = block(LightweightConv)
    names = dict.fromkeys([f"{k}.{p}" for k in ("linear1", "linear2", "conv_layer_norm") for p in ("weight", "bias")])
    state = {f"decoder.layers.10.{k}": torch.zeros(1) for k in names}
    state["decoder.layers.10.conv.weight"] = torch.zeros(4, 5)
    state["decoder.layers.10.conv.conv_bias"] = torch.zeros(1, 1, 24)
    state["decoder.layers.1.linear1.weight"] = torch.zeros(1)
    b.upgrade_state_dict_named(state, "decoder.layers.10.self_attn")
    assert set(state) == {
        *(f"decoder.layers.10.self_attn.{k}.{p}" for k in ("linear1", "linear2") for p in ("weight", "bias")),
        "decoder.layers.10.self_attn_layer_norm.weight",
        "decoder.layers.10.self_attn_layer_norm.bias",
        "decoder.layers.10.self_attn.conv.weight",
        "decoder.layers.1.linear1.weight",
    }
    assert state["decoder.layers.10.self_attn.conv.weight"].shape == (4, 1, 5)
