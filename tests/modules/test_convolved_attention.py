"""Convolutions of queries, keys and values: their definition written out, pads, decoding in chunks, initialisation."""

import pytest
import torch
import torch.nn.functional as F

from lightconv_plugin.modules import EncoderAttention, SelfAttention
from lightconv_plugin.modules.attention import CONV_KINDS, AttentionConv
from lightconv_plugin.modules.mixers import MixerSpec, build_mixer

ALL = ("q", "k", "v")


def attention(convolved, *, causal=False, window=None) -> SelfAttention:
    module = SelfAttention(24, 4, left=window, right=0 if causal else window, convolved=convolved).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def plain(module, x):
    """(T,1,d): each projection padded with zeros and convolved by torch, then attention over everything."""
    kernel_size, parts = module.convolved.kernel_size, {}
    before = kernel_size - 1 if module.right == 0 else (kernel_size - 1) // 2
    for name in ALL:
        y = getattr(module, f"{name}_proj")(x)
        if (conv := getattr(module, f"{name}_conv")) is not None:
            padded = F.pad(y.permute(1, 2, 0), (before, kernel_size - 1 - before))
            y = F.conv1d(padded, conv.weight, groups=24).permute(2, 0, 1)
        parts[name] = y.unflatten(2, (4, 6)).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(*parts.values(), is_causal=module.right == 0)
    return module.out_proj(out.permute(2, 0, 1, 3).flatten(2))


@pytest.mark.parametrize("projections", [ALL, ("q",), ("k", "v")], ids="".join)
@pytest.mark.parametrize("kernel_size", [2, 4, 5])
@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_the_definition(causal, kernel_size, projections):
    module = attention(AttentionConv(projections, kernel_size), causal=causal)
    x = torch.randn(9, 2, 24)
    torch.testing.assert_close(module(x), plain(module, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("kind", CONV_KINDS)
@torch.no_grad()
def test_what_stands_at_a_pad_is_never_read(kind, left):
    module = attention(AttentionConv(ALL, 4, kind))
    x, mask = torch.randn(9, 2, 24), torch.zeros(2, 9, dtype=torch.bool)
    mask[1, :3] = left
    mask[1, 6:] = not left
    alone = x[3:, 1:] if left else x[:6, 1:]
    torch.testing.assert_close(module(x, mask)[~mask[1], 1], module(alone)[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunks", [[1] * 11, [4, 1, 6], [11], [2, 2, 7]])
@pytest.mark.parametrize("window", [None, 0, 2])
@pytest.mark.parametrize("kind", CONV_KINDS)
@torch.no_grad()
def test_any_chunks_equal_the_full_pass(kind, window, chunks):
    """With pads before one of the sentences, and rows that change places on the way."""
    module = attention(AttentionConv(("q", "v"), 4, kind), causal=True, window=window)
    x, pads = torch.randn(11, 3, 24), torch.zeros(3, 11, dtype=torch.bool)
    pads[2, :3] = True
    order, state, out = torch.tensor([2, 0, 1]), None, []
    for piece, at in zip(x.split(chunks), pads.split(chunks, dim=1), strict=True):
        y, state = module.step(piece, state, at)
        out.append(y)
        assert [part.shape[0] for part in state[3:]] == [min(3, sum(map(len, out)))] * 2
    whole, words = module(x, pads), ~pads.t()
    torch.testing.assert_close(torch.cat(out)[words], whole[words], atol=1e-5, rtol=1e-5)
    last = torch.randn(1, 3, 24)
    expected = module(torch.cat([x[:, order], last]), F.pad(pads[order], (0, 1)))
    found, _ = module.step(last, module.reorder(state, order))
    torch.testing.assert_close(found[0], expected[-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal, before", [(True, 4), (False, 2)], ids=["decoder", "encoder"])
def test_convolutions_in_a_window_of_one_token_follow_the_side(causal, before):
    options = {"glu": False, "normalize": "none", "input_dropout": 0.0, "weight_dropout": 0.0, "attention_dropout": 0.0}
    conv = AttentionConv(("v",), 5)
    spec = MixerSpec("window_attention", 1, 24, 4, causal=causal, attention_conv=conv, **options)
    assert build_mixer(spec, 24).v_conv.padding_l == before


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_depthwise_begins_as_attention_without(causal):
    torch.manual_seed(3)
    convolved = SelfAttention(24, 4, left=None, right=0 if causal else None, convolved=AttentionConv(ALL, 4))
    plain = SelfAttention(24, 4, left=None, right=0 if causal else None)
    assert sum(p.numel() for p in convolved.parameters()) == sum(p.numel() for p in plain.parameters()) + 3 * 24 * 4
    plain.load_state_dict({name: p for name, p in convolved.state_dict().items() if "_conv" not in name})
    x = torch.randn(9, 2, 24)
    torch.testing.assert_close(convolved(x), plain(x))


@torch.no_grad()
def test_queries_over_an_encoder_in_chunks():
    module = EncoderAttention(24, 4, encoder_dim=16, convolved=AttentionConv(("q",), 4)).eval()
    module.q_conv.weight.normal_()
    keys, values = module.project(torch.randn(5, 2, 16))
    x, pads = torch.randn(9, 2, 24), torch.zeros(2, 5, dtype=torch.bool)
    pads[1, 3:] = True
    query_pads = torch.zeros(2, 9, dtype=torch.bool)
    query_pads[0, :2] = True
    whole = module(x, keys, values, pads, query_pads)
    torch.testing.assert_close(whole[2:, :1], module(x[2:, :1], keys[:1], values[:1], pads[:1]), atol=1e-6, rtol=1e-5)
    state, out = None, []
    for piece, at in zip(x.split([1, 4, 4]), query_pads.split([1, 4, 4], dim=1), strict=True):
        y, state = module.step(piece, state, keys, values, pads, at)
        out.append(y)
    torch.testing.assert_close(torch.cat(out), whole, atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="of the queries alone, got q,k"):
        EncoderAttention(24, 4, encoder_dim=16, convolved=AttentionConv(("q", "k")))
