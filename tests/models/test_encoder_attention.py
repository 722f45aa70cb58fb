"""Attention over the encoder by torch's fused kernels: fairseq's results, where fairseq computes no weights."""

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.modules import MultiheadAttention

from benchmarks.launches import Counter, as_on_cuda
from lightconv_plugin.models.token_mixers import FusedEncoderAttention
from tests.models.toys import batch, build

OPTIONS = {"kdim": 12, "vdim": 12, "encoder_decoder_attention": True}
PADS = torch.arange(5) >= torch.tensor([[5], [3], [1]])


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((4, 3, 8), (5, 3, 12))]


def run(attention, call):
    """The output, and all gradients."""
    query, encoded = (tensor.requires_grad_() for tensor in tensors())
    attention.zero_grad()
    out = call(query, encoded)
    out.square().sum().backward()
    return [out, query.grad, encoded.grad, *(parameter.grad for parameter in attention.parameters())]


@pytest.mark.parametrize("pads", [None, PADS], ids=["full", "pads"])
def test_the_kernels_compute_what_fairseq_does(pads):
    attention = FusedEncoderAttention(8, 2, **OPTIONS).double()
    fused = run(attention, lambda query, encoded: attention.fused(query, encoded, encoded, pads))
    options = {"key_padding_mask": pads, "need_weights": False, "static_kv": True}
    theirs = run(attention, lambda query, x: MultiheadAttention.forward(attention, query, x, x, **options)[0])
    for one, other in zip(fused, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # fairseq's softmax is in float32


@torch.no_grad()
def test_pads_that_changed_in_place_and_other_types():
    """Layers share the mask of a batch's pads."""
    attention = FusedEncoderAttention(8, 2, **OPTIONS).double()
    query, encoded = tensors()
    pads = torch.zeros_like(PADS)
    attention.fused(query, encoded, encoded, pads)
    pads |= PADS
    expected = attention.fused(query, encoded, encoded, PADS.clone())
    torch.testing.assert_close(attention.fused(query, encoded, encoded, pads), expected)
    found = attention.float().fused(query.float(), encoded.float(), encoded.float(), pads)
    torch.testing.assert_close(found, expected.float())


def test_dropout_of_the_weights():
    attention = FusedEncoderAttention(8, 2, dropout=0.5, **OPTIONS).double()
    query, encoded = tensors()
    one, other = (attention.fused(query, encoded, encoded, PADS) for _ in range(2))
    assert not torch.equal(one, other)
    attention.dropout_module.p = 0
    one, other = (attention.fused(query, encoded, encoded, PADS) for _ in range(2))
    assert torch.equal(one, other)


def launches(attention, **options):
    query, encoded = (tensor.to("meta", torch.float32) for tensor in tensors())
    pads = PADS.to("meta")
    with as_on_cuda(), Counter() as counter:
        attention(query, encoded, encoded, key_padding_mask=pads, static_kv=True, **options)
    return counter.counts.launches


def test_training_on_a_gpu_takes_the_kernels():
    attention = FusedEncoderAttention(8, 2, dropout=0.1, **OPTIONS).to("meta")
    fused = launches(attention, need_weights=False)
    assert fused["aten._scaled_dot_product_efficient_attention"] == 1 and fused.total() <= 10
    asked = launches(attention, need_weights=True)
    assert not asked["aten._scaled_dot_product_efficient_attention"] and asked["aten._softmax"] == 1
    theirs = MultiheadAttention(8, 2, dropout=0.1, **OPTIONS).to("meta").eval()
    assert launches(attention.eval(), need_weights=False) == launches(theirs, need_weights=False)


def test_the_dropout_keeps_its_name():
    """--retain-dropout-modules selects it by fairseq's class."""
    model = build(attention_dropout=0.2)
    model.make_generation_fast_(retain_dropout=True, retain_dropout_modules=["MultiheadAttention"])
    dropouts = [layer.encoder_attn.dropout_module for layer in model.decoder.layers]
    assert all(dropout.apply_during_inference for dropout in dropouts)


def test_the_criterion_of_alignments_still_gets_weights():
    model = build().train()
    source, lengths, previous = batch()
    _, extra = model.decoder(previous, model.encoder(source, lengths))
    assert extra["attn"][0].shape == (*previous.shape, source.shape[1])
