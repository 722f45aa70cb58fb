"""The language models' architectures and options, as typed on fairseq's command line."""

from argparse import Namespace

import pytest
import torch
from fairseq import models, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.lightconv_lm import LightConvLanguageModel, base_lm_architecture

from lightconv_plugin.models.language_model_config import language_model_architectures, language_model_config

from .language_model_toys import build_lm, configuration, lm_task
from .toys import options_of, tiny

D = [3, 7, 15, 31, 31, 31]
BILLION = [15] * 2 + [31] * 4 + [63] * 11
WIKI103 = [3, 5, 7, 15, 31] + [63] * 12
CONV, TALK = ("lightweightconv", "dynamicconv", "lightconv"), ("talkconv",)
# families, suffix: d, ffn, heads, kernels, dropout, attention, weight, relu, softmax's dropout, cutoff
TABLE = [
    (CONV + TALK, "_lm", 512, 2048, 8, D, 0.1, 0.0, 0.0, 0.0, 0.0, None),
    (CONV[:2], "_lm_gbw", 512, 4096, 16, D, 0.1, 0.1, 0.1, 0.0, 0.0, None),
    # As fairseq-train runs upstream's: the 0.0 of its parser comes before the architecture's 0.1.
    (CONV[2:], "_lm_gbw", 512, 4096, 16, D, 0.1, 0.0, 0.0, 0.0, 0.0, None),
    (CONV, "_lm_billion_word", 1024, 4096, 16, BILLION, 0.1, 0.1, 0.1, 0.0, 0.0, [60000, 160000]),
    (TALK, "_lm_big", 1024, 4096, 16, [3, 7, 15] + [31] * 9, 0.1, 0.0, 0.0, 0.0, 0.0, None),
    (CONV + TALK, "_lm_wiki103", 1024, 4096, 16, WIKI103, 0.3, 0.1, 0.2, 0.1, 0.2, [20000, 60000]),
]
ROWS = [pytest.param(f + row[1], *row[2:], id=f + row[1]) for row in TABLE for f in row[0]]
MIXER = {"lightweightconv": "lightweight", "dynamicconv": "dynamic", "lightconv": "dynamic", "talkconv": "talk"}


def parse(*arguments: str):
    """The model's configuration that fairseq-train makes of a command line."""
    parser = options.get_training_parser(default_task="language_modeling")
    args = options.parse_args_and_arch(parser, ["data", "--task", "language_modeling", *arguments])
    return convert_namespace_to_omegaconf(args).model


@pytest.mark.parametrize("name, d, ffn, heads, kernels, dropout, attention, weight, relu, softmax, cutoff", ROWS)
def test_table(name, d, ffn, heads, kernels, dropout, attention, weight, relu, softmax, cutoff):
    cfg = language_model_config(configuration(name))
    decoder = cfg.decoder
    assert (decoder.embed_dim, decoder.ffn_embed_dim, decoder.attention_heads) == (d, ffn, heads)
    assert (decoder.input_dim, decoder.output_dim, decoder.layers) == (d, d, len(kernels))
    assert [m.kernel_size for m in decoder.mixers] == kernels
    for m in decoder.mixers:
        assert (m.kind, m.conv_dim, m.num_heads, m.glu) == (MIXER[name.split("_")[0]], d, heads, True)
        assert (m.weight_dropout, m.input_dropout, m.normalize) == (weight, 0.1, "softmax")
        assert m.causal and not m.zero_pads
    assert (cfg.dropout, cfg.attention_dropout, cfg.activation_dropout) == (dropout, attention, relu)
    assert (cfg.adaptive_softmax_cutoff, cfg.adaptive_softmax_dropout) == (cutoff, softmax)
    assert cfg.adaptive_input_cutoff == cutoff
    assert (cfg.adaptive_input, cfg.tie_adaptive_weights, cfg.tie_adaptive_proj) == (cutoff is not None,) * 3
    assert cfg.activation_fn == ("swish" if name.startswith("talkconv") else "relu")
    assert decoder.normalize_before and cfg.no_decoder_final_norm


def test_every_architecture_is_registered():
    names = {row.values[0] for row in ROWS}
    assert set(language_model_architectures()) == names <= set(models.ARCH_MODEL_REGISTRY)
    for name in names:
        assert models.ARCH_MODEL_REGISTRY[name].__module__.startswith("lightconv_plugin.")


def users(args):
    """A user's architecture that calls upstream's, which reads what upstream's parser has set."""
    tiny(args)
    args.relu_dropout = getattr(args, "relu_dropout", 0.3)
    args.input_dropout = getattr(args, "input_dropout", 0.2)
    base_lm_architecture(args)


@pytest.mark.parametrize("arguments", ["", "--attention-dropout 0.4 --decoder-ffn-embed-dim 32 --decoder-glu 1"])
def test_an_architecture_registered_on_lightconv_lm_is_upstreams_model(registered, arguments):
    registered("lightconv_lm", users)
    cfg = parse("--arch", "a_tiny_model", *arguments.split())
    given = options_of(LightConvLanguageModel, *arguments.split())
    users(given)
    upstreams = LightConvLanguageModel.build_model(Namespace(**vars(given), tokens_per_sample=64), lm_task())
    names = ("dropout", "attention_dropout", "relu_dropout", "input_dropout", "weight_dropout", "decoder_conv_type")
    assert {name: cfg[name] for name in names} == {name: getattr(given, name) for name in names}
    sizes = [p.numel() for name, p in upstreams.named_parameters() if not name.endswith("conv_bias")]
    assert sum(p.numel() for p in models.build_model(cfg, lm_task()).parameters()) == sum(sizes)


def test_an_architecture_registered_on_another_model_can_change_everything(registered):
    def function(args):
        tiny(args)
        args.dropout = getattr(args, "dropout", 0.3)
        args.decoder_conv_type = getattr(args, "decoder_conv_type", "talk")

    registered("dynamicconv_lm_wiki103", function)
    cfg = language_model_config(parse("--arch", "a_tiny_model", "--decoder-ffn-embed-dim", "32"))
    assert (cfg.decoder.embed_dim, cfg.decoder.ffn_embed_dim, cfg.dropout) == (16, 32, 0.3)
    assert {m.kind for m in cfg.decoder.mixers} == {"talk"}
    assert (cfg.adaptive_input_cutoff, cfg.adaptive_softmax_dropout) == ([20000, 60000], 0.2)  # the model's defaults


def test_upstream_flags_run_unchanged():
    cfg = parse(
        *"--arch lightconv_lm_gbw --dropout 0.2 --attention-dropout 0.15 --relu-dropout 0.05 --input-dropout 0.25"
        " --decoder-embed-dim 64 --decoder-output-dim 64 --decoder-input-dim 64 --decoder-ffn-embed-dim 128"
        " --decoder-layers 3 --decoder-attention-heads 4 --decoder-normalize-before --adaptive-softmax-cutoff 10,20"
        " --adaptive-softmax-dropout 0.1 --adaptive-softmax-factor 2 --no-token-positional-embeddings"
        " --adaptive-input --adaptive-input-factor 2 --adaptive-input-cutoff 10,20 --tie-adaptive-weights"
        " --tie-adaptive-proj --decoder-learned-pos --decoder-kernel-size-list [3,7,15] --decoder-glu 0"
        " --decoder-conv-type lightweight --weight-softmax 0 --weight-dropout 0.3 --tokens-per-sample 77".split()
    )
    resolved = language_model_config(cfg)
    decoder = resolved.decoder
    assert (resolved.dropout, resolved.attention_dropout, resolved.activation_dropout) == (0.2, 0.15, 0.05)
    assert (decoder.embed_dim, decoder.ffn_embed_dim, decoder.layers, decoder.attention_heads) == (64, 128, 3, 4)
    assert (decoder.input_dim, decoder.output_dim, decoder.learned_pos) == (64, 64, True)
    assert (resolved.adaptive_softmax_cutoff, resolved.adaptive_input_cutoff) == ([10, 20], [10, 20])
    assert (resolved.adaptive_softmax_factor, resolved.adaptive_input_factor) == (2, 2)
    assert resolved.adaptive_softmax_dropout == 0.1
    assert resolved.adaptive_input and resolved.tie_adaptive_weights and resolved.tie_adaptive_proj
    assert resolved.no_token_positional_embeddings and resolved.max_target_positions == 77
    assert [m.kernel_size for m in decoder.mixers] == [3, 7, 15]
    for m in decoder.mixers:
        assert (m.kind, m.glu, m.normalize) == ("lightweight", False, "none")
        assert (m.weight_dropout, m.input_dropout) == (0.3, 0.25)


def test_upstream_flags_of_the_embeddings():
    cfg = parse(
        *"--arch lightconv_lm --character-embeddings --character-embedding-dim 8"
        " --char-embedder-highway-layers 1 --max-target-positions 50".split(),
        "--character-filters",
        "[(1, 8), (3, 16)]",
    )
    resolved = language_model_config(cfg)
    assert resolved.character_embeddings and resolved.character_filters == [(1, 8), (3, 16)]
    assert (resolved.character_embedding_dim, resolved.char_embedder_highway_layers) == (8, 1)
    assert resolved.max_target_positions == 50
    assert language_model_config(
        parse("--arch", "lightconv_lm", "--share-decoder-input-output-embed")
    ).share_decoder_input_output_embed


@pytest.mark.parametrize("name", ["lightweightconv_lm_billion_word", "talkconv_lm_wiki103"])
def test_the_command_line_gives_an_architecture_its_numbers(name):
    parsed, made = language_model_config(parse("--arch", name)), language_model_config(configuration(name))
    assert parsed.decoder.mixers == made.decoder.mixers
    for key in ("dropout", "activation_fn", "adaptive_input_cutoff", "adaptive_softmax_cutoff", "tie_adaptive_proj"):
        assert getattr(parsed, key) == getattr(made, key)


@pytest.mark.parametrize("written", ["8,20", "[8, 20]", [8, 20]], ids=str)
def test_forms_of_a_cutoff(written):
    given = language_model_config(configuration(adaptive_softmax_cutoff=written, adaptive_input_cutoff=written))
    assert given.adaptive_softmax_cutoff == given.adaptive_input_cutoff == [8, 20]


def test_offloaded_activations_are_recomputed():
    """As in every encoder-decoder, --offload-activations means --checkpoint-activations too."""
    layers = build_lm(offload_activations=True).decoder.layers
    assert all("forward" in vars(layer) for layer in layers)  # fairseq's checkpoint_wrapper replaces it


def test_one_mixer_per_layer():
    types = "lightweight,dynamic,talk,attention"
    cfg = configuration(decoder_layers=4, decoder_kernel_size_list=[5], decoder_conv_type=types)
    assert [m.kind for m in language_model_config(cfg).decoder.mixers] == types.split(",")


ADAPTIVE = {"adaptive_input": True, "adaptive_input_cutoff": [8, 20], "adaptive_softmax_cutoff": [8, 20]}
TIED = {**ADAPTIVE, "tie_adaptive_weights": True}
SHARED = {"share_decoder_input_output_embed": True}
WRONG = {
    "kernels": ({"decoder_kernel_size_list": [3, 7]}, ["--decoder-kernel-size-list", "6 layers", "got 2"]),
    "dropout": ({"dropout": 1.5}, ["--dropout", "[0, 1)", "1.5"]),
    "input-dim": ({"decoder_input_dim": 0}, ["--decoder-input-dim", "at least 1", "got 0"]),
    "no-cutoff": ({"adaptive_input": True}, ["--adaptive-input needs --adaptive-input-cutoff"]),
    "cutoff": ({"adaptive_softmax_cutoff": "many"}, ["--adaptive-softmax-cutoff", "increasing", "many"]),
    "factor": (ADAPTIVE | {"adaptive_input_factor": 100.0}, ["--adaptive-input-factor", "100", "512", "[8, 20]"]),
    "zero-factor": (ADAPTIVE | {"adaptive_softmax_factor": 0.0}, ["--adaptive-softmax-factor", "0"]),
    "proj-alone": (ADAPTIVE | {"tie_adaptive_proj": True}, ["--tie-adaptive-proj needs --tie-adaptive-weights"]),
    "tied-alone": ({"tie_adaptive_weights": True}, ["--tie-adaptive-weights", "--adaptive-input"]),
    "tied-cutoffs": (TIED | {"adaptive_input_cutoff": [8, 21]}, ["--adaptive-input-cutoff", "[8, 21] and [8, 20]"]),
    "tied-factors": (TIED | {"adaptive_input_factor": 2.0}, ["--adaptive-softmax-factor", "2.0 and 4.0"]),
    "tied-dims": (TIED | {"decoder_output_dim": 64}, ["--decoder-output-dim", "512, 512, 64"]),
    "two-inputs": (ADAPTIVE | {"character_embeddings": True}, ["--adaptive-input", "--character-embeddings"]),
    "shared-adaptive": (ADAPTIVE | SHARED, ["--share-decoder-input-output-embed", "--adaptive-input"]),
    "shared-dims": (SHARED | {"decoder_input_dim": 8}, ["--decoder-input-dim", "8 and 512"]),
    "layerdrop": ({"decoder_layerdrop": 1.0}, ["--decoder-layerdrop", "[0, 1)"]),
    "filters": ({"character_filters": "3,4"}, ["--character-filters", "(width, channels)", "3,4"]),
    "no-channels": ({"character_filters": "[(1,0)]"}, ["--character-filters", "[(1,0)]"]),
}


@pytest.mark.parametrize("options, words", WRONG.values(), ids=WRONG)
def test_wrong_options_are_named(options, words):
    with pytest.raises(ValueError) as error:
        language_model_config(configuration(**options))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "sizes, given, words",
    [
        ((30, None), {"adaptive_softmax_cutoff": [8, 31]}, ["--adaptive-softmax-cutoff", "30 entries", "[8, 31]"]),
        (
            (30, None),
            {"adaptive_input": True, "adaptive_input_cutoff": [31]},
            ["--adaptive-input-cutoff", "30 entries", "[31]"],
        ),
        (
            (30, None),
            {"adaptive_input": True, "adaptive_input_cutoff": [8, 29]},
            ["--adaptive-input-cutoff", "two words to each band", "[8, 29] of 30 entries"],
        ),
        (
            (30, 24),
            {**TIED, "decoder_embed_dim": 64},
            ["--tie-adaptive-weights", "--output-dictionary-size", "30 and 24"],
        ),
        ((30, 24), SHARED, ["--share-decoder-input-output-embed", "30 and 24"]),
    ],
)
def test_what_does_not_fit_the_dictionaries_is_named(sizes, given, words):
    with pytest.raises(ValueError) as error:
        build_lm(task=lm_task(*sizes), **given)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("given", [{}, {"adaptive_softmax_cutoff": [8]}], ids=["plain", "adaptive"])
def test_a_smaller_output_dictionary(given):
    model = build_lm(task=lm_task(30, 24), **given)
    with torch.no_grad():
        scores = model.get_normalized_probs(model(torch.arange(30).view(2, 15)), log_probs=False)
    assert scores.shape == (2, 15, 24)
    torch.testing.assert_close(scores.sum(-1), torch.ones(2, 15))
