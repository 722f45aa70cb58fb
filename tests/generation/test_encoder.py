"""The encoder of a search against that of the model."""

import pytest
import torch

pytest.importorskip("fairseq")

from lightconv_plugin.generation.steps import encode
from lightconv_plugin.generation.sublayers import in_bfloat16
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.models.plain import plain_model
from lightconv_plugin.ops import NORMALIZATIONS
from tests.generation import toys
from tests.models.toys import VARIANTS

OPTIONS = {
    "gated": {"encoder_glu": True},
    "pre-norm": {"encoder_normalize_before": True},
    "channels": {"encoder_conv_dim": 32, "encoder_kernel_size_list": [2, 9, 40]},
    "embedding": {"layernorm_embedding": True, "encoder_learned_pos": True, "activation_fn": "gelu"},
}
EVERYTHING = {name: value for options in OPTIONS.values() for name, value in options.items()}
CASES = [
    *(pytest.param("dynamic", options, id=name) for name, options in OPTIONS.items()),
    *(pytest.param(mixer, options, id=f"{mixer}-{'everything' if options else 'plain'}")
      for mixer in (*MIXERS, *VARIANTS, "dynamic,window_attention,attention") for options in ({}, EVERYTHING)),
]  # fmt: skip


def check(model, sample, tolerance: float = 1e-5):
    encoder = model.encoder
    with torch.no_grad():
        expected = encoder(**sample)["encoder_out"][0]
        output, pads = encode(plain_model(model).encoder, sample["src_tokens"])
    words = ~pads.t()
    assert output.shape == expected.shape
    torch.testing.assert_close(output[words], expected[words], rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("mixer, options", CASES)
def test_our_encoders(mixer, options):
    options = {"encoder_glu": False, **options}
    if mixer == "conv":
        options.pop("encoder_conv_dim", None)
    model = toys.ours(encoder_conv_type=mixer, prepare=toys.stirred, **options)
    check(model, toys.batch(7, left_pad=True)["net_input"])
    check(model, toys.batch(3, left_pad=False)["net_input"])
    tokens = torch.randint(4, toys.VOCABULARY, (3, 6))  # no pads
    check(model, {"src_tokens": tokens, "src_lengths": torch.full((3,), 6)})


@pytest.mark.parametrize("kind", NORMALIZATIONS)
def test_normalisations(kind):
    model = toys.ours(weight_normalization=kind, weight_softmax=kind == "softmax", prepare=toys.stirred)
    check(model, toys.batch()["net_input"])


@pytest.mark.parametrize("before", [False, True])
def test_fairseqs_encoder(before):
    check(toys.fairseqs(encoder_normalize_before=before, prepare=toys.stirred), toys.batch(7)["net_input"])


@torch.no_grad()
def test_bfloat16_is_close():
    model = toys.ours(encoder_conv_type="dynamic,attention,talk", prepare=toys.stirred)
    tokens = toys.batch(7)["net_input"]["src_tokens"]
    encoder = plain_model(model).encoder
    expected, pads = encode(encoder, tokens)
    error = (encode(in_bfloat16(encoder), tokens)[0] - expected)[~pads.t()]
    assert 1e-5 < float(error.square().mean().sqrt() / expected[~pads.t()].std()) < 0.03
