"""Every model that FastGenerator covers gives the hypotheses and scores of fairseq's SequenceGenerator."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.models.transformer import TransformerModel, transformer_legacy
from fairseq.modules.fairseq_dropout import FairseqDropout

from lightconv_plugin.generation import StepModel, UnsupportedModelError
from lightconv_plugin.generation.native import describe
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.models.plain import plain_model
from lightconv_plugin.ops import NORMALIZATIONS
from tests.checkpoints import exports
from tests.generation import toys
from tests.generation.recordings import SEARCHES
from tests.models.toys import VARIANTS, dictionary, task

HYBRIDS = {
    "dynamic-attention-talk": "dynamic,attention,talk",
    "window-conv-depthwise": "window_attention,conv,depthwise",
    "lightweight-attention-dynamic": "lightweight,attention,dynamic",
}


def check(models, seeds=range(2), searches=("native", "torch"), **options):
    """The native search for every seed, the others for the first one."""
    found_lengths = set()
    for seed in seeds:
        torch.manual_seed(seed)
        sample, given = toys.batch(left_pad=seed % 2 == 0), {"min_len": 1 + 7 * seed, **options}
        theirs = toys.check(models, sample, searches=searches if seed == 0 else ("native",), **given)
        found_lengths |= toys.lengths(theirs)
    assert len(found_lengths) > 1  # hypotheses end at different steps, and sentences leave the batch one by one


@pytest.mark.parametrize("glu", [False, True], ids=["plain-pre-norm", "glu-post-norm"])
@pytest.mark.parametrize("mixer", [*MIXERS, *VARIANTS])
def test_mixers(mixer, glu):
    check([toys.ours(mixer, decoder_glu=glu, decoder_normalize_before=not glu, encoder_normalize_before=not glu)])


@pytest.mark.parametrize("types", HYBRIDS.values(), ids=HYBRIDS)
def test_hybrids(types):
    check([toys.ours(types)], seeds=range(3), searches=SEARCHES)


@pytest.mark.parametrize("kind", NORMALIZATIONS)
def test_normalisations(kind):
    model = toys.ours("lightweight,dynamic,dynamic", weight_normalization=kind, weight_softmax=kind == "softmax")
    check([model], seeds=range(1), searches=("native",))


@pytest.mark.parametrize("mixer", MIXERS)
def test_kernel_sizes(mixer):
    """Kernels of one tap, even ones, and longer ones than any hypothesis."""
    check([toys.ours(mixer, decoder_kernel_size_list=[1, 40, 4])], seeds=range(1), searches=("native",))


OURS = {
    "conv-dim": {"decoder_conv_dim": 32},
    "output-dim": {"decoder_output_dim": 12},
    "no-cross-attention": {"no_cross_attention": True},
    "learned-positions": {"decoder_learned_pos": True, "encoder_learned_pos": True, "max_target_positions": 40},
    "no-positions": {"no_token_positional_embeddings": True},
    "no-scale": {"no_scale_embedding": True},
    "layernorm-embedding": {"layernorm_embedding": True},
    "gelu": {"activation_fn": "gelu"},
    "swish": {"activation_fn": "swish"},
    "tied": {"share_decoder_input_output_embed": True},
    "all-tied": {"share_all_embeddings": True},
    "wide-encoder": {"encoder_embed_dim": 24},
    "layerdrop": {"decoder_layerdrop": 0.3, "encoder_layerdrop": 0.3},
}


@pytest.mark.parametrize("options", OURS.values(), ids=OURS)
def test_options_of_our_models(options):
    check([toys.ours("dynamic,attention,dynamic", **options)])


TRANSFORMERS = {
    "plain": {},
    "pre-norm": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "pre-norm-no-final": {"decoder_normalize_before": True, "no_decoder_final_norm": True},
    "learned": {"decoder_learned_pos": True, "encoder_learned_pos": True},
    "no-positions": {"no_token_positional_embeddings": True},
    "layernorm-embedding": {"layernorm_embedding": True, "no_scale_embedding": True},
    "dims": {"decoder_input_dim": 20, "decoder_output_dim": 12},
    "wide-encoder": {"encoder_embed_dim": 32, "encoder_attention_heads": 2},
    "tied": {"share_decoder_input_output_embed": True},
    "no-cross-attention": {"no_cross_attention": True},
    "activation": {"activation_fn": "gelu_accurate"},
    "tanh": {"activation_fn": "tanh"},
}


@pytest.mark.parametrize("options", TRANSFORMERS.values(), ids=TRANSFORMERS)
def test_fairseqs_transformer(options):
    check([toys.fairseqs(**options)])


def test_fairseqs_transformer_base():
    check([toys.fairseqs_base()])


def test_ensemble_of_different_models():
    models = [toys.ours("dynamic"), toys.fairseqs(), toys.ours("talk", decoder_layers=1, decoder_kernel_size_list=[4])]
    check(models)
    check(models[:2], temperature=0.7)


def test_long_hypotheses():
    """Rings turn over several times, and tables and caches grow."""
    torch.manual_seed(2)
    model = toys.ours("dynamic,attention,window_attention")
    toys.check([model], toys.batch(3), searches=SEARCHES, min_len=70, max_len_b=90, beam_size=3)


def test_double_precision():
    torch.manual_seed(4)
    for mixer in MIXERS:
        toys.check([toys.ours(mixer).double()], toys.batch(3), beam_size=3, tolerance=1e-6)


def test_after_preparation_for_inference():
    """As fairseq-generate prepares its models."""
    models = [toys.fairseqs(), toys.ours("dynamic,attention,talk")]
    generation = Namespace(beam=5, no_beamable_mm=False, print_alignment=False, retain_dropout=False)
    for model in models:
        model.prepare_for_inference_(Namespace(generation=generation))
        check([model], searches=("native",), beam_size=5)


REFUSED = {
    "adaptive softmax": {"adaptive_softmax_cutoff": "20,40"},
    "cross_self_attention": {"cross_self_attention": True, "no_cross_attention": True},
    "an encoder without layers": {"encoder_layers": 0},
    "a decoder without layers": {"decoder_layers": 0},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_transformers(reason):
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in toys.SIDE.items()}
    arguments = Namespace(**{**sizes, "max_source_positions": 64, "max_target_positions": 64, **REFUSED[reason]})
    transformer_legacy.base_architecture(arguments)
    model = TransformerModel.build_model(arguments, task(dictionary(toys.VOCABULARY))).eval()
    with pytest.raises(UnsupportedModelError, match=reason):
        StepModel(plain_model(model))


def test_refuses_dropout_that_stays_on():
    model = toys.ours(dropout=0.1)
    for module in model.modules():
        if isinstance(module, FairseqDropout):
            module.make_generation_fast_(name="", retain_dropout=True)
    with pytest.raises(UnsupportedModelError, match="retain_dropout"):
        StepModel(plain_model(model))


@pytest.mark.parametrize("kind", ["dynamic", "talk", "attention"])
def test_refuses_decoders_that_look_ahead(kind):
    config = exports.pair(kind)
    ahead = replace(config.decoder, mixers=tuple(replace(mixer, causal=False) for mixer in config.decoder.mixers))
    model = exports.build_model(replace(config, decoder=ahead))
    assert "ahead" in str(describe([model]))
    with pytest.raises(UnsupportedModelError, match="ahead"):
        StepModel(model)


def test_refuses_dynamic_convolutions_that_normalise_over_taps_inside_alone():
    model = exports.build_model(exports.pair("dynamic"))
    model.decoder.layers[1].self_attn.conv.renorm_padding = True
    assert "renorm_padding" in str(describe([model]))
    with pytest.raises(UnsupportedModelError, match="renorm_padding"):
        StepModel(model)


def test_refuses_other_layers():
    model = toys.ours()
    model.decoder.layers[1].fc1 = torch.nn.Sequential(model.decoder.layers[1].fc1)
    with pytest.raises(UnsupportedModelError, match="Sequential"):
        StepModel(plain_model(model))
    with pytest.raises(UnsupportedModelError, match="Linear"):
        plain_model(torch.nn.Linear(2, 2))
