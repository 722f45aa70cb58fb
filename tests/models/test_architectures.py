"""Names, numbers and options of the architectures, as typed on fairseq's command line."""

import re

import pytest
import torch
import yaml
from fairseq import models, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.models.lightconv import LightConvModel
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from lightconv_plugin import ops
from lightconv_plugin.models.architectures import ARCHITECTURES, LANGUAGE_MODELS
from lightconv_plugin.models.config import transformer_config
from lightconv_plugin.modules import MIXERS
from lightconv_plugin.modules.attention import AttentionConv
from tests import ROOT, programs
from tests.warm_python import warm_python

from .toys import batch, build, dictionary, options_of, task, tiny

FAMILIES = ("lightweightconv", "dynamicconv", "lightconv")
E, D = [3, 7, 15, 31, 31, 31, 31], [3, 7, 15, 31, 31, 31]
# suffix: d, ffn, heads, glu, dropout, attention, weight, input
TABLE = {
    "": (512, 2048, 8, True, 0.1, 0.0, 0.0, 0.1),
    "_wmt_en_de": (512, 2048, 8, True, 0.1, 0.0, 0.0, 0.1),
    "_iwslt_de_en": (512, 1024, 4, False, 0.1, 0.1, 0.1, 0.0),
    "_wmt_en_de_big": (1024, 4096, 16, True, 0.3, 0.1, 0.1, 0.1),
    "_wmt_en_fr_big": (1024, 4096, 16, True, 0.1, 0.1, 0.1, 0.1),
    "_wmt_zh_en_big": (1024, 4096, 16, True, 0.2, 0.2, 0.2, 0.1),
    "_cnndm": (512, 2048, 8, True, 0.3, 0.1, 0.1, 0.1),
}
BASE_REACH = [1, 3, 7, 15, 15, 15, 15], [1, 3, 7, 15, 15, 15]
# suffix: as TABLE, and what the windows of encoder and decoder reach.
TALK = {
    "": (512, 2048, 8, True, 0.1, 0.0, 0.0, 0.1, *BASE_REACH),
    "_wmt_en_de": (512, 2048, 8, True, 0.1, 0.0, 0.0, 0.1, *BASE_REACH),
    "_iwslt_de_en": (512, 1024, 4, False, 0.1, 0.1, 0.1, 0.0, *BASE_REACH),
    "_wmt_en_de_big": (1024, 4096, 16, True, 0.3, 0.1, 0.1, 0.1, E, D),
    "_wmt_en_fr_big": (1024, 4096, 16, True, 0.1, 0.1, 0.1, 0.1, E, D),
    "_cnndm_std": (512, 2048, 8, True, 0.3, 0.1, 0.1, 0.1, E, D),
    "_cnndm_deep": (512, 2048, 8, True, 0.3, 0.1, 0.1, 0.1, [3, 7, 15] + [31] * 7, [3, 7] + [31] * 8),
}


def read(*arguments: str):
    """What fairseq-train's parser reads."""
    return options.parse_args_and_arch(options.get_training_parser(), ["data", *arguments])


def parse(*arguments: str):
    """The model's configuration that fairseq-train makes of a command line."""
    return convert_namespace_to_omegaconf(read(*arguments)).model


def model_options(*arguments: str):
    """The same without hydra, which takes a third of a second and changes no value."""
    args = read(*arguments)
    config = MODEL_DATACLASS_REGISTRY[args.arch].from_namespace(args)
    config._name = args.arch
    return OmegaConf.structured(config)


NAMES = [(f, s) for f in FAMILIES for s in TABLE if (f, s) != ("lightconv", "_cnndm")]  # which upstream never had


@pytest.mark.parametrize("family, suffix", [*NAMES, *(("talkconv", suffix) for suffix in TALK)])
def test_table(family, suffix):
    cfg = transformer_config(model_options("--arch", family + suffix))
    kind = {"lightweightconv": "lightweight", "talkconv": "talk"}.get(family, "dynamic")
    row = TALK[suffix] if kind == "talk" else (*TABLE[suffix], E, D)
    d, ffn, heads, glu, dropout, attention, weight, input_, encoder, decoder = row
    for side, kernels in (cfg.encoder, encoder), (cfg.decoder, decoder):
        assert (side.embed_dim, side.ffn_embed_dim, side.attention_heads) == (d, ffn, heads)
        assert [m.kernel_size for m in side.mixers] == kernels
        assert side.layers == len(kernels)
        for m in side.mixers:
            assert (m.kind, m.conv_dim, m.num_heads, m.glu) == (kind, d, heads, glu)
            assert (m.weight_dropout, m.input_dropout, m.normalize) == (weight, input_, "softmax")
            assert m.padding_l == (m.kernel_size - 1 if side is cfg.decoder else (m.kernel_size - 1) // 2)
        assert not side.normalize_before
    assert (cfg.dropout, cfg.attention_dropout) == (dropout, attention)
    assert cfg.activation_fn == ("swish" if kind == "talk" else "relu")


def test_talk_reaches_to_both_sides_in_the_encoder_only():
    model = build("talkconv", encoder_kernel_size_list=[1, 5, 9], decoder_kernel_size_list=[1, 5, 9])
    reach = {
        side: [(layer.self_attn.conv.max_left, layer.self_attn.conv.max_right) for layer in layers]
        for side, layers in (("encoder", model.encoder.layers), ("decoder", model.decoder.layers))
    }
    assert reach == {"encoder": [(1, 1), (5, 5), (9, 9)], "decoder": [(1, 0), (5, 0), (9, 0)]}


def test_every_architecture_is_registered():
    assert set(ARCHITECTURES) == {f + s for f, s in NAMES} | {"talkconv" + s for s in TALK}
    assert set(ARCHITECTURES) <= set(models.ARCH_MODEL_REGISTRY)
    for name in [*ARCHITECTURES, *LANGUAGE_MODELS]:
        assert models.ARCH_MODEL_REGISTRY[name].__module__.startswith("lightconv_plugin.")


ABLATION = sorted((ROOT / "configs" / "wmt16_en_de").glob("*/*.yaml"))


@pytest.mark.parametrize("config", ABLATION, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_parameter_counts_of_the_ablation(config):
    """Beside the paper's own in its comment. The joined dictionary has 32,768 entries."""
    text = config.read_text(encoding="utf-8")
    options = yaml.safe_load(text)["model"]
    with torch.device("meta"):
        model = build(options.pop("_name"), task(dictionary(32768)), small=False, **options)
    said = re.search(r"# ([\d.]+)M here", text)
    assert said and float(said[1]) == round(sum(p.numel() for p in model.parameters()) / 1e6, 1)


UPSTREAM_FLAGS = (
    "--arch lightconv_iwslt_de_en --dropout 0.3 --attention-dropout 0.1 --weight-dropout 0.2 --relu-dropout 0.05"
    " --input-dropout 0.15 --encoder-glu 0 --decoder-glu True --encoder-conv-type dynamic"
    " --decoder-conv-type lightweight --weight-softmax 1 --encoder-kernel-size-list [3,7,15] --encoder-layers 3"
    " --decoder-kernel-size-list 31 --decoder-layers 2 --encoder-conv-dim 256 --decoder-conv-dim 128"
    " --adaptive-softmax-cutoff 10,20 --adaptive-softmax-dropout 0.1 --encoder-normalize-before"
    " --decoder-learned-pos --share-decoder-input-output-embed"
)


def test_upstream_flags_run_unchanged():
    cfg = parse(*UPSTREAM_FLAGS.split())
    resolved = transformer_config(cfg)
    assert [m.kernel_size for m in resolved.encoder.mixers] == [3, 7, 15]
    assert [m.kernel_size for m in resolved.decoder.mixers] == [31, 31]
    assert not resolved.encoder.mixers[0].glu and resolved.decoder.mixers[0].glu
    assert resolved.encoder.mixers[0].kind == "dynamic" and resolved.decoder.mixers[0].kind == "lightweight"
    assert (resolved.encoder.mixers[0].conv_dim, resolved.decoder.mixers[0].conv_dim) == (256, 128)
    assert resolved.encoder.mixers[0].weight_dropout == 0.2 and resolved.encoder.mixers[0].input_dropout == 0.15
    assert (resolved.dropout, resolved.activation_dropout) == (0.3, 0.05)
    assert list(resolved.adaptive_softmax_cutoff) == [10, 20]
    assert resolved.encoder.normalize_before and resolved.decoder.learned_pos
    assert resolved.share_decoder_input_output_embed and not resolved.share_all_embeddings


@pytest.mark.parametrize(
    "arguments",
    [UPSTREAM_FLAGS, "--arch lightweightconv_cnndm --weight-normalization abs", "--arch talkconv_cnndm_deep"],
)
def test_hydra_changes_no_option(arguments):
    assert parse(*arguments.split()) == model_options(*arguments.split())


@pytest.mark.parametrize(
    "written, kernels",
    [("3,7,15", [3, 7, 15]), ("[3, 7, 15]", [3, 7, 15]), ("[3]+[7]*2", [3, 7, 7]), ("(5,)*3", [5] * 3), ("9", [9])],
)
def test_a_kernel_list_may_be_any_expression_of_lists(written, kernels):
    for model in models.ARCH_MODEL_REGISTRY["dynamicconv"], LightConvModel:
        assert options_of(model, "--encoder-kernel-size-list", written).encoder_kernel_size_list == kernels


@pytest.mark.parametrize("written", ["", "3.5", "a", "[3]*7,", "[3]*10**9", "__import__('os').getcwd()", "[print(3)]"])
def test_a_kernel_list_is_integers_and_never_code(written, capsys):
    with pytest.raises(SystemExit):
        options_of(models.ARCH_MODEL_REGISTRY["dynamicconv_lm"], "--decoder-kernel-size-list", written)
    said = capsys.readouterr().err
    assert f"--decoder-kernel-size-list: must be integers, as in 3,7,15 or [31]*3: got {written!r}" in said


def parameters(model) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if not name.endswith("conv_bias"))


@pytest.mark.parametrize("arguments", ["", "--encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-glu 1"])
def test_an_architecture_registered_on_lightconv_is_upstreams_model(registered, arguments):
    """As many parameters as fairseq's own class has, which also has an unused bias in each dynamic layer."""
    registered("lightconv", tiny)
    model = models.build_model(parse("--arch", "a_tiny_model", *arguments.split()), task(dictionary()))
    assert isinstance(model, models.ARCH_MODEL_REGISTRY["lightconv"])
    given = options_of(LightConvModel, *arguments.split())
    tiny(given)
    assert parameters(model) == parameters(LightConvModel.build_model(given, task(dictionary())))


@pytest.mark.parametrize("model", ["dynamicconv", "lightweightconv_iwslt_de_en", "talkconv_wmt_en_de_big"])
def test_what_a_registered_architecture_leaves_unset_is_the_models(registered, model):
    registered(model, tiny)
    cfg = transformer_config(
        parse("--arch", "a_tiny_model", "--decoder-layers", "1", "--decoder-kernel-size-list", "9")
    )
    assert (cfg.encoder.embed_dim, cfg.decoder.ffn_embed_dim) == (16, 24)
    assert [m.kernel_size for m in cfg.encoder.mixers] == [3, 5] and cfg.decoder.mixers[0].kernel_size == 9
    defaults = transformer_config(model_options("--arch", model))
    assert {m.kind for m in cfg.encoder.mixers} == {m.kind for m in defaults.encoder.mixers}
    assert (cfg.dropout, cfg.attention_dropout) == (defaults.dropout, defaults.attention_dropout)


def test_what_is_not_given_follows_from_what_is():
    cfg = transformer_config(parse(*"--arch dynamicconv --encoder-embed-dim 64 --attention-dropout 0.2".split()))
    assert (cfg.encoder.mixers[0].conv_dim, cfg.decoder.embed_dim, cfg.decoder.mixers[0].conv_dim) == (64, 64, 64)
    assert (cfg.decoder.input_dim, cfg.decoder.output_dim, cfg.decoder.ffn_embed_dim) == (64, 64, 2048)
    assert cfg.decoder.mixers[0].weight_dropout == 0.2


def test_one_mixer_per_layer():
    cfg = transformer_config(
        parse(
            *"--arch dynamicconv --encoder-layers 3 --encoder-kernel-size-list 5"
            " --encoder-conv-type lightweight,dynamic,attention".split()
        )
    )
    assert [m.kind for m in cfg.encoder.mixers] == ["lightweight", "dynamic", "attention"]


@pytest.mark.parametrize(
    "arguments, normalize",
    [("", "softmax"), ("--weight-softmax 0", "none")]
    + [(f"--weight-normalization {n}", n) for n in ops.NORMALIZATIONS],
)
def test_every_normalisation_of_the_filter_is_a_flag(arguments, normalize):
    cfg = transformer_config(model_options("--arch", "dynamicconv", *arguments.split()))
    assert {m.normalize for m in [*cfg.encoder.mixers, *cfg.decoder.mixers]} == {normalize}
    model = build("dynamicconv", weight_normalization=normalize)
    assert {layer.self_attn.conv.normalize for layer in model.encoder.layers} == {normalize}


def test_how_filters_are_predicted_is_a_flag():
    """Ranks for each layer; layers of other types have none."""
    cfg = transformer_config(
        parse(
            *"--arch dynamicconv --encoder-layers 3 --encoder-kernel-size-list 5"
            " --encoder-conv-type dynamic,dynamic,talk --encoder-dynamic-rank 0,16,32 --decoder-dynamic-rank 8"
            " --dynamic-residual".split()
        )
    )
    assert [m.dynamic_rank for m in cfg.encoder.mixers] == [0, 16, 0]
    assert [m.dynamic_residual for m in cfg.encoder.mixers] == [True, True, False]
    assert [m.dynamic_rank for m in cfg.decoder.mixers] == [8] * 6


def test_convolutions_in_attention_are_flags():
    cfg = transformer_config(
        parse(
            *"--arch dynamicconv --encoder-layers 2 --encoder-kernel-size-list 5 --encoder-conv-type attention,dynamic"
            " --encoder-attention-conv v,q --decoder-cross-attention-conv q --attention-conv-kernel-size 3"
            " --attention-conv-type lightweight".split()
        )
    )
    assert [m.attention_conv for m in cfg.encoder.mixers] == [AttentionConv(("q", "v"), 3, "lightweight"), None]
    assert cfg.decoder.convolved == AttentionConv(("q",), 3, "lightweight")
    with pytest.raises(ValueError, match="--decoder-cross-attention-conv cannot be used with --left-pad-target"):
        transformer_config(parse("--arch", "dynamicconv", "--decoder-cross-attention-conv", "q"), left_pad_target=True)


def test_attention_needs_no_kernel_sizes():
    """The defaults' list is for 7 layers; no layer reads it here."""
    cfg = transformer_config(parse(*"--arch dynamicconv --encoder-layers 2 --encoder-conv-type attention".split()))
    assert [m.kind for m in cfg.encoder.mixers] == ["attention", "attention"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--encoder-kernel-size-list 3,7", ["--encoder-kernel-size-list", "7 layers", "got 2"]),
        ("--decoder-kernel-size-list 0", ["--decoder-kernel-size-list", "at least 1"]),
        ("--encoder-conv-type fast", ["--encoder-conv-type", "'fast'", ", ".join(MIXERS)]),
        ("--decoder-conv-type dynamic,lightweight", ["--decoder-conv-type", "6 layers", "got 2"]),
        ("--encoder-attention-heads 7", ["--encoder-attention-heads", "7 heads", "512 channels"]),
        ("--dropout 1.5", ["--dropout", "[0, 1)", "1.5"]),
        ("--weight-dropout -0.1", ["--weight-dropout", "[0, 1)"]),
        ("--weight-softmax 0 --weight-normalization softmax", ["--weight-softmax 0", "contradicts"]),
        ("--encoder-conv-type conv --encoder-conv-dim 256", ["--encoder-conv-dim", "512", "got 256"]),
        ("--encoder-dynamic-rank 8,16", ["--encoder-dynamic-rank", "7 layers", "got 2"]),
        ("--decoder-dynamic-rank -4", ["--decoder-dynamic-rank", "at least 1, or 0 for one matrix", "-4"]),
        (
            "--decoder-dynamic-rank 4 --decoder-conv-type talk",
            ["--decoder-dynamic-rank needs a layer of type dynamic", "--decoder-conv-type talk"],
        ),
        (
            "--dynamic-residual --encoder-conv-type talk --decoder-conv-type attention",
            ["--dynamic-residual needs a layer of type dynamic", "--decoder-conv-type attention"],
        ),
        ("--encoder-attention-conv q,k,o", ["--encoder-attention-conv", "'q,k,o'", "q, k, v, each once"]),
        ("--decoder-attention-conv q", ["--decoder-attention-conv needs a layer of type attention", "dynamic"]),
        ("--decoder-cross-attention-conv k", ["--decoder-cross-attention-conv: got 'k'", "allowed is q"]),
        (
            "--decoder-cross-attention-conv q --no-cross-attention",
            ["--decoder-cross-attention-conv cannot be used with --no-cross-attention"],
        ),
        ("--attention-conv-kernel-size 1", ["--attention-conv-kernel-size must be at least 2, got 1"]),
        ("--decoder-layers 0", ["--decoder-layers", "at least 1", "got 0"]),
        ("--decoder-output-dim 0", ["--decoder-output-dim", "at least 1", "got 0"]),
        ("--adaptive-softmax-cutoff 20,8", ["--adaptive-softmax-cutoff", "increasing", "[20, 8]"]),
        ("--adaptive-softmax-cutoff 0,8", ["--adaptive-softmax-cutoff", "increasing", "[0, 8]"]),
        (
            "--adaptive-softmax-cutoff 8,20 --adaptive-softmax-factor 100",
            ["--adaptive-softmax-factor", "100", "512", "[8, 20]"],
        ),
        ("--adaptive-softmax-dropout 1", ["--adaptive-softmax-dropout", "[0, 1)"]),
        (
            "--share-all-embeddings --decoder-output-dim 64",
            ["--share-all-embeddings needs --decoder-output-dim equal to --decoder-embed-dim", "64 and 512"],
        ),
        (
            "--share-decoder-input-output-embed --decoder-output-dim 64",
            ["--share-decoder-input-output-embed needs --decoder-output-dim", "64 and 512"],
        ),
        ("--encoder-layerdrop 1", ["--encoder-layerdrop", "[0, 1)"]),
        (
            "--decoder-attention-heads 6 --decoder-conv-dim 516",
            ["--decoder-attention-heads", "--decoder-embed-dim", "over the encoder", "6 heads, 512 features"],
        ),
        (
            "--encoder-conv-type attention --encoder-attention-heads 6",
            ["--encoder-attention-heads", "--encoder-embed-dim", "self-attention", "6 heads, 512 features"],
        ),
        (
            "--quant-noise-scalar 0.1 --encoder-conv-type talk",
            ["--quant-noise-scalar", "type dynamic", "--decoder-conv-type dynamic"],
        ),
        (
            "--quant-noise-scalar 0.1 --encoder-conv-type talk --decoder-conv-type attention --decoder-attention-conv q"
            " --attention-conv-type dynamic",
            ["--quant-noise-scalar cannot be used with --attention-conv-type dynamic"],
        ),
        (
            "--quant-noise-scalar 0.1 --encoder-conv-type talk --decoder-conv-type talk --encoder-learned-pos",
            ["--quant-noise-scalar cannot be used with --encoder-learned-pos"],
        ),
    ],
)
def test_wrong_options_are_named(arguments, words):
    with pytest.raises(ValueError) as error:
        transformer_config(model_options("--arch", "dynamicconv", *arguments.split()))
    for word in words:
        assert word in str(error.value)


def test_what_does_not_fit_the_dictionary_is_named():
    with pytest.raises(ValueError, match=r"--adaptive-softmax-cutoff .* 30 entries, got \[8, 31\]"):
        build(adaptive_softmax_cutoff=[8, 31])


def test_heads_need_not_divide_what_nothing_attends_over():
    arguments = "--arch dynamicconv --decoder-attention-heads 6 --decoder-conv-dim 516 --no-cross-attention"
    assert transformer_config(parse(*arguments.split())).decoder.mixers[0].num_heads == 6


def test_an_adaptive_softmax_may_have_another_dimension_than_shared_embeddings():
    adaptive = {"adaptive_softmax_cutoff": [8, 20], "adaptive_softmax_factor": 2.0}
    model = build(share_all_embeddings=True, decoder_output_dim=8, **adaptive)
    source, lengths, previous = batch()
    assert model(source, lengths, previous)[0].shape == (3, 8, 8)


def test_upstream_names_can_be_left_alone():
    script = (
        "import lightconv_plugin, fairseq\n"
        "from fairseq.models import ARCH_MODEL_REGISTRY as r\n"
        "assert r['lightconv_wmt_en_de_big'].__module__ == 'fairseq.models.lightconv'\n"
        "assert r['dynamicconv_wmt_en_de_big'].__module__.startswith('lightconv_plugin.')\n"
    )
    programs.run(warm_python(), "-c", script, LIGHTCONV_KEEP_UPSTREAM=1)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *LANGUAGE_MODELS])
def test_hydra_gets_a_configuration_of_its_own_each_time(name):
    """It is built when it is asked for; a change to one is not a change to the next."""
    store = ConfigStore.instance()
    expected = OmegaConf.structured(MODEL_DATACLASS_REGISTRY[name](_name=name))
    first = store.load(f"model/{name}.yaml")
    assert (first.name, first.group, first.provider) == (f"{name}.yaml", "model", "fairseq")
    assert first.node == expected and OmegaConf.get_type(first.node) is OmegaConf.get_type(expected)
    first.node.dropout = 0.7
    assert first.node.dropout == 0.7
    assert store.load(f"model/{name}.yaml").node == expected
    assert "store" not in vars(store)
