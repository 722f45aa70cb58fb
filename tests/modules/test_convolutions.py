"""The convolution modules against fairseq's own, where those are right, and against themselves in pieces."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("fairseq")

from fairseq.modules.dynamic_convolution import DynamicConv1dTBC
from fairseq.modules.lightweight_convolution import LightweightConv1dTBC
from torch.nn.utils import prune, spectral_norm, weight_norm

from lightconv_plugin import ops
from lightconv_plugin.modules import DepthwiseConv, DynamicConv, FullConv, LightweightConv

KINDS = [LightweightConv, DynamicConv]


def conv(kind, channels=24, kernel_size=5, padding_l=None, num_heads=4, **options):
    return kind(channels, kernel_size, kernel_size - 1 if padding_l is None else padding_l, num_heads, **options).eval()


@pytest.mark.parametrize("weight_softmax", [True, False])
@pytest.mark.parametrize("kernel_size, padding_l", [(1, 0), (3, 1), (3, 2), (7, 3), (15, 14)])
@pytest.mark.parametrize("length", [15, 40])
@torch.no_grad()
def test_fairseqs_lightweight_conv(length, kernel_size, padding_l, weight_softmax):
    theirs = LightweightConv1dTBC(24, kernel_size, padding_l, num_heads=4, weight_softmax=weight_softmax).eval()
    ours = conv(LightweightConv, 24, kernel_size, padding_l, normalize="softmax" if weight_softmax else "none")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(length, 3, 24)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("unfold", [True, False])
@pytest.mark.parametrize("kernel_size, padding_l", [(1, 0), (3, 1), (3, 2), (7, 3), (15, 14)])
@torch.no_grad()
def test_fairseqs_dynamic_conv(kernel_size, padding_l, unfold):
    theirs = DynamicConv1dTBC(24, kernel_size, padding_l, num_heads=4, weight_softmax=True).eval()
    ours = conv(DynamicConv, 24, kernel_size, padding_l)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(20, 3, 24)
    torch.testing.assert_close(ours(x), theirs(x, unfold=unfold), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel_size, padding_l", [(1, 0), (3, 1), (3, 2), (4, 1), (15, 14)])
@pytest.mark.parametrize("length", [2, 20])
def test_depthwise_is_torchs_grouped_convolution(length, kernel_size, padding_l):
    module = DepthwiseConv(24, kernel_size, padding_l)
    x = torch.randn(length, 3, 24, requires_grad=True)
    padded = F.pad(x.permute(1, 2, 0), (padding_l, kernel_size - 1 - padding_l))
    expected = F.conv1d(padded, module.weight, groups=24).permute(2, 0, 1)
    out = module(x)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, (x, module.weight), grad)
    theirs = torch.autograd.grad(expected, (x, module.weight), grad)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"conv_bias": True}, {"query_size": 10, "bias": True}, {"renorm_padding": True}, {"rank": 3, "bias": True}],
)
@pytest.mark.parametrize("length", [1, 4, 13])
@torch.no_grad()
def test_step_in_any_chunks_is_the_full_pass(length, options):
    """Several tokens at once, and sequences shorter than the kernel, are where fairseq's own modules go wrong."""
    module = conv(DynamicConv, kernel_size=7, **options)
    x = torch.randn(length, 3, 24)
    query = torch.randn(length, 3, 10) if "query_size" in options else None
    whole = module(x, query=query)
    for chunks in ([length], [1] * length, [min(3, length)] + [2] * length):
        state, out, start = None, [], 0
        for n in chunks:
            if start == length:
                break
            n = min(n, length - start)
            piece = slice(start, start + n)
            y, state = module.step(x[piece], state, query=None if query is None else query[piece])
            out.append(y)
            start += n
        torch.testing.assert_close(torch.cat(out), whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("normalize", ["softmax", "none"])
@torch.no_grad()
def test_filters_at_low_rank_and_static_ones(normalize):
    """Of the product of both matrices, plus the static filter, before the normalisation."""
    low = conv(DynamicConv, 24, 5, 2, rank=3, bias=True, normalize=normalize)
    assert {name: tuple(p.shape) for name, p in low.named_parameters()} == {
        "rank_linear.weight": (3, 24),
        "weight_linear.weight": (4 * 5, 3),
        "weight_linear.bias": (4 * 5,),
    }
    assert not low.weight_linear.bias.any()  # it begins as a DynamicConv
    low.weight_linear.bias.normal_()
    x = torch.randn(9, 2, 24)
    raw = x @ (low.weight_linear.weight @ low.rank_linear.weight).t() + low.weight_linear.bias
    torch.testing.assert_close(low(x), ops.dynamicconv(x, raw.unflatten(2, (4, 5)), 2, normalize=normalize))


def test_a_static_filter_alone_is_lightweight():
    dynamic, light = conv(DynamicConv, rank=1, bias=True), conv(LightweightConv)
    with torch.no_grad():
        dynamic.rank_linear.weight.zero_()
        dynamic.weight_linear.bias.copy_(light.weight.flatten())
        x = torch.randn(9, 2, 24)
        torch.testing.assert_close(dynamic(x), light(x))


def test_a_negative_rank_is_named():
    with pytest.raises(ValueError, match="rank must be at least 1, or 0 for one matrix, got -1"):
        conv(DynamicConv, rank=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_dropout_is_on_in_training_only(kind):
    module = conv(kind, weight_dropout=0.5)
    x = torch.randn(9, 2, 24)
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))


@pytest.mark.parametrize("kind", KINDS)
def test_retain_dropout_keeps_it_on_at_inference(kind):
    """As by fairseq-generate --retain-dropout, for Monte-Carlo dropout."""
    module = conv(kind, weight_dropout=0.5)
    module.weight_dropout_module.apply_during_inference = True
    x = torch.randn(9, 2, 24)
    assert not torch.equal(module(x), module(x))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_between_calls(kind):
    module = conv(kind).train()
    before = set(vars(module))
    module(torch.randn(9, 2, 24))
    assert set(vars(module)) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "arguments, words",
    [
        ((24, 3, 1, 5), ["num_heads", "num_heads=5", "channels=24"]),
        ((24, 0, 0, 4), ["kernel_size", "at least 1", "0"]),
        ((24, 3, 3, 4), ["padding_l", "0 … kernel_size - 1 = 2", "3"]),
    ],
)
def test_wrong_geometry_is_named(kind, arguments, words):
    with pytest.raises(ValueError) as error:
        kind(*arguments)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_only_causal_modules_step(kind):
    with pytest.raises(ValueError, match="padding_l = kernel_size - 1"):
        conv(kind, kernel_size=3, padding_l=1).step(torch.randn(1, 2, 24), None)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("computed", [lambda conv: prune.identity(conv, "weight"), weight_norm, spectral_norm])
@pytest.mark.parametrize("kind", [LightweightConv, FullConv])
@torch.no_grad()
def test_step_follows_a_weight_that_a_hook_computes(kind, computed):
    """As in training, the parameters behind the weight change after the last full pass."""
    module = FullConv(24, 5, 4).eval() if kind is FullConv else conv(kind)
    computed(module)
    for parameter in module.parameters():
        parameter.pow_(3)
    x = torch.randn(6, 2, 24)
    stepped, _ = module.step(x, None)
    torch.testing.assert_close(stepped, module(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind, bias", [(LightweightConv, "conv_bias"), (DynamicConv, "conv_bias"), (FullConv, "bias")])
@torch.no_grad()
def test_step_follows_a_pruned_bias(kind, bias):
    module = FullConv(24, 5, 4).eval() if kind is FullConv else conv(kind, conv_bias=True)
    prune.identity(module, bias)
    getattr(module, bias + "_orig").add_(1)
    x = torch.randn(6, 2, 24)
    stepped, _ = module.step(x, None)
    torch.testing.assert_close(stepped, module(x), atol=1e-5, rtol=1e-5)
