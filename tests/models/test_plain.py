"""The plain models against fairseq's, with the same parameters: all at once, step by step, and what they refuse."""

import dataclasses
import json

import pytest
import torch

from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.generation import FastGenerator
from lightconv_plugin.models.plain import plain_config, plain_model
from lightconv_plugin.modules import MIXERS, AdaptiveInputConfig, LanguageModel, ModelConfig, build_model
from tests.generation import toys as search_toys
from tests.models import language_model_toys, toys
from tests.models.language_model_toys import EMBEDDINGS, LM_VARIANTS

OPTIONS = {
    "post-norm": {},
    "pre-norm": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "ungated": {"encoder_glu": False, "decoder_glu": False, "weight_normalization": "l2", "weight_softmax": False},
    "shared": {"share_all_embeddings": True, "no_scale_embedding": True, "activation_fn": "gelu"},
    "tied output": {"share_decoder_input_output_embed": True, "layernorm_embedding": True, "activation_fn": "swish"},
    "learned": {"encoder_learned_pos": True, "decoder_learned_pos": True, "activation_fn": "gelu_accurate"},
    "no positions": {"no_token_positional_embeddings": True, "activation_fn": "tanh"},
    "no encoder attention": {"no_cross_attention": True},
    # In training, fairseq's list of the layers skips nearly all of them whenever it is iterated over.
    "dropped layers": {"encoder_layerdrop": 0.99, "decoder_layerdrop": 0.99},
    "other sizes": {"encoder_embed_dim": 24, "decoder_embed_dim": 16, "encoder_conv_dim": 32, "decoder_output_dim": 8},
}
LANGUAGE_MODELS = {name: options for name, options in EMBEDDINGS.items() if "character" not in name}


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def stirred(model):
    """With biases, norms and positions that show where they are left out."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def encoder_decoder(mixer, options):
    options = dict(options)
    if mixer == "conv":
        options.pop("encoder_conv_dim", None)
    if "cross" in mixer:
        options.pop("no_cross_attention", None)
    return stirred(toys.build(encoder_conv_type=mixer, decoder_conv_type=mixer, **options))


# Every option with several mixers in one model, and each mixer with the options that reach into it.
PAIRS = [("dynamic,attention,talk", name) for name in OPTIONS]
PAIRS += [(mixer, name) for mixer in (*MIXERS, *toys.VARIANTS) for name in ("pre-norm", "ungated", "other sizes")]


@pytest.mark.parametrize("mixer, options", PAIRS)
@torch.no_grad()
def test_an_encoder_decoder(mixer, options):
    torch.manual_seed(1)
    model = encoder_decoder(mixer, OPTIONS[options])
    plain = plain_model(model.train()).eval()
    model.eval()
    for left in (True, False):
        source, lengths, target = toys.batch(left_pad_source=left)
        words = target.ne(1)
        expected = model(source, lengths, target)[0]
        close(plain(source, target).logits[words], expected[words])
        state = plain.start(plain.encode(source))
        steps = []
        for piece in target.split([1, 1, 4, 2], dim=1):
            logits, state = plain.step(piece, state)
            steps.append(logits)
        close(torch.cat(steps, dim=1)[words], expected[words])


@pytest.mark.parametrize("before", [False, True])
@torch.no_grad()
def test_fairseqs_transformer(before):
    model = stirred(search_toys.fairseqs(encoder_normalize_before=before, decoder_normalize_before=before))
    source, lengths, target = toys.batch()
    words = target.ne(1)
    close(plain_model(model)(source, target).logits[words], model(source, lengths, target)[0][words])


@pytest.mark.parametrize(
    "mixer, options",
    [*(("dynamic,attention,talk", name) for name in LANGUAGE_MODELS), *((m, "plain") for m in (*MIXERS, *LM_VARIANTS))],
)
@torch.no_grad()
def test_a_language_model(mixer, options):
    torch.manual_seed(1)
    model = stirred(language_model_toys.build_lm(decoder_conv_type=mixer, **LANGUAGE_MODELS[options]))
    plain = plain_model(model)
    assert isinstance(plain, LanguageModel)
    tokens = torch.randint(4, 30, (3, 8))
    expected = language_model_toys.log_probabilities(model, tokens)
    close(plain(tokens).logits.log_softmax(dim=-1), expected)
    state, steps = plain.start(3), []
    for piece in tokens.split([3, 1, 4], dim=1):
        logits, state = plain.step(piece, state)
        steps.append(logits.log_softmax(dim=-1))
    close(torch.cat(steps, dim=1), expected)


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_fairseqs_language_model_with_adaptive_inputs(tied):
    """As fairseq loads it: its options are a DictConfig, and its own configuration has some of them."""
    options = {f"decoder_{name}": 16 for name in ("embed_dim", "input_dim", "output_dim", "ffn_embed_dim")}
    for side in "input", "softmax":
        options |= {f"adaptive_{side}_cutoff": "8,20", f"adaptive_{side}_factor": 2.0}
    options |= dict.fromkeys(["adaptive_input", "tie_adaptive_weights", "tie_adaptive_proj"][: 3 if tied else 1], True)
    options |= {"decoder_attention_heads": 4, "decoder_layers": 2, "tpu": False, "add_bos_token": False}
    model = stirred(language_model_toys.build_lm("transformer_lm", small=False, **options))
    tokens = torch.randint(4, 30, (3, 8))
    close(plain_model(model)(tokens).logits, language_model_toys.log_probabilities(model, tokens))


def check_left_pads(plain, state, *source):
    """What stands before a sentence does not change it: in one pass, and step by step."""
    words = torch.randint(4, 30, (2, 6))
    alone = plain(*source, words).logits
    padded = torch.cat([torch.full((2, 3), 1), words], dim=1)
    close(plain(*source, padded).logits[:, 3:], alone)
    steps = []
    for piece in padded.split([5, 1, 3], dim=1):
        logits, state = plain.step(piece, state)
        steps.append(logits)
    close(torch.cat(steps, dim=1)[:, 3:], alone)


@pytest.mark.parametrize("mixer", [*MIXERS, *LM_VARIANTS])
@torch.no_grad()
def test_pads_on_the_left_of_a_decoder(mixer):
    plain = plain_model(stirred(language_model_toys.build_lm(decoder_conv_type=mixer)))
    check_left_pads(plain, plain.start(2))


@pytest.mark.parametrize("mixer", [*MIXERS, *toys.VARIANTS])
@torch.no_grad()
def test_left_pads_of_a_decoder_with_an_encoder(mixer):
    """Convolutions must read them as zeros, those of attention's queries too."""
    plain, source = plain_model(encoder_decoder(mixer, {})), toys.batch()[0][:2]
    check_left_pads(plain, plain.start(plain.encode(source)), source)


@pytest.mark.parametrize("mixer", [*MIXERS, *toys.VARIANTS])
@torch.no_grad()
def test_reordered_states(mixer):
    plain = plain_model(encoder_decoder(mixer, {}))
    source, _, _ = toys.batch()
    target, order = torch.randint(4, 30, (3, 6)), torch.tensor([2, 2, 0])
    _, state = plain.step(target[:, :5], plain.start(plain.encode(source)))
    logits, _ = plain.step(target[order, 5:], state.reorder(order))
    close(logits, plain(source[order], target[order]).logits[:, 5:])


def test_the_parameters_are_the_models_own_and_train():
    model = toys.build(share_all_embeddings=True)
    plain = plain_model(model)
    source, _, target = toys.batch()
    labels = target.roll(-1, dims=1)
    loss = plain(source, target, labels, label_smoothing=0.1).loss
    loss.backward()
    assert model.decoder.embed_tokens.weight.grad is not None
    assert {id(p) for p in plain.parameters()} == {id(p) for p in model.parameters()}
    expected = torch.nn.functional.cross_entropy(
        plain(source, target).logits.transpose(1, 2), labels, ignore_index=1, label_smoothing=0.1
    )
    close(loss, expected)


def flags(module):
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("frozen", ["encoder", "decoder.embed_tokens", "decoder.layers.1", ""])
def test_frozen_parameters_stay_frozen(frozen):
    model = toys.build()
    (model.get_submodule(frozen) if frozen else model).requires_grad_(False)
    before = flags(model)
    plain = plain_model(model)
    assert flags(model) == before
    assert flags(plain) == {name: before[name] for name, _ in plain.named_parameters()}


def test_frozen_parameters_stay_frozen_after_a_search():
    model = search_toys.ours()
    model.encoder.requires_grad_(False)
    before = flags(model)
    FastGenerator([model], search_toys.dictionary(search_toys.VOCABULARY)).generate([model], search_toys.batch(2))
    assert flags(model) == before


def test_frozen_parameters_stay_frozen_in_a_model_that_is_refused():
    model = toys.build()
    model.decoder.requires_grad_(False)
    model.encoder.layers[0].extra = torch.nn.Linear(2, 2)
    before = flags(model)
    with pytest.raises(UnsupportedModelError, match=r"encoder\.layers\.0\.extra"):
        plain_model(model)
    assert flags(model) == before


@pytest.mark.parametrize(
    "encoder, decoder",
    [
        ("lightweight,dynamic,talk", "attention,window_attention,depthwise"),
        ("conv", "low-rank"),
        ("residual", "attention-qkv"),
        ("attention-dynamic-kv", "attention-dynamic-kv"),
        ("cross-attention-q", "cross-attention-q"),
    ],
)
def test_a_fresh_model_learns_a_batch_by_heart(encoder, decoder):
    torch.manual_seed(0)
    config = plain_config(toys.build(encoder_conv_type=encoder, decoder_conv_type=decoder))
    plain = build_model(config).train()
    before = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    source, _, target = toys.batch()
    labels = torch.cat([target[:, 1:], torch.full((3, 1), 2)], dim=1)
    optimizer = torch.optim.Adam(plain.parameters(), lr=2e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = plain(source, target, labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert [name for name, parameter in plain.named_parameters() if torch.equal(parameter, before[name])] == []


def test_recomputed_layers_have_the_same_gradients():
    torch.manual_seed(0)
    plain = plain_model(encoder_decoder("dynamic,attention,talk", {})).train()
    expected = _gradients(plain)
    plain.encoder.gradient_checkpointing = plain.decoder.gradient_checkpointing = True
    for name, gradient in _gradients(plain).items():
        close(gradient, expected[name])


def _gradients(plain):
    for module in plain.modules():
        if hasattr(module, "p"):
            module.p = 0.0
    plain.zero_grad()
    torch.manual_seed(5)
    source, _, target = toys.batch()
    plain(source, target, target).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in plain.named_parameters()}


def test_a_configuration_survives_json():
    for options in OPTIONS.values():
        config = plain_config(toys.build(**options))
        assert ModelConfig.of_json(config.as_json()) == config
    for variant in toys.VARIANTS:
        config = plain_config(toys.build(decoder_conv_type=variant))
        assert ModelConfig.of_json(json.loads(json.dumps(config.as_json()))) == config
    for options in LANGUAGE_MODELS.values():
        config = plain_config(language_model_toys.build_lm(**options))
        assert ModelConfig.of_json(config.as_json()) == config


def test_a_configuration_from_before_an_option_has_its_default():
    config = plain_config(toys.build())
    known = config.as_json()
    for stack in (known["encoder_stack"], known["decoder_stack"]):
        del stack["cross_attention_conv"]
        for mixer in stack["mixers"]:
            del mixer["dynamic_rank"], mixer["dynamic_residual"], mixer["attention_conv"]
    assert ModelConfig.of_json(known) == config


WRONG = {
    "decoder_stack.mixers\\[1\\].kind must be one of": ("mixers", 1, "kind", "fourier"),
    "decoder_stack.mixers\\[0\\].kernel_size must be at least 1, got 0": ("mixers", 0, "kernel_size", 0),
    "decoder_stack.mixers\\[1\\].dynamic_rank must be at least 1, or 0 for one matrix, got -2": (
        "mixers",
        1,
        "dynamic_rank",
        -2,
    ),
    "decoder_stack.mixers\\[1\\].attention_conv must be null for a layer of dynamic": (
        "mixers",
        1,
        "attention_conv",
        {"projections": ["q"]},
    ),
    "decoder_stack.cross_attention_conv.projections must be some of q,k,v, in this order: got 'v,q'": (
        "cross_attention_conv",
        {"projections": ["v", "q"]},
    ),
    "decoder_stack.cross_attention_conv.projections must be q alone, got q,k": (
        "cross_attention_conv",
        {"projections": ["q", "k"]},
    ),
    "decoder_stack.cross_attention_conv.kernel_size must be at least 2, got 1": (
        "cross_attention_conv",
        {"projections": ["q"], "kernel_size": 1},
    ),
    "decoder_stack.cross_attention_conv.kind must be one of depthwise, lightweight, dynamic": (
        "cross_attention_conv",
        {"projections": ["q"], "kind": "talk"},
    ),
    "decoder_stack.mixers\\[1\\].dynamic_residual must be true or false": ("mixers", 1, "dynamic_residual", 1),
    "decoder_stack.mixers\\[2\\].num_heads must divide conv_dim = 16, got 3": ("mixers", 2, "num_heads", 3),
    "decoder_stack.dropout must be in": ("dropout", 1.0),
    "decoder_stack.vocab_size must be at least 1, got -5": ("vocab_size", -5),
    "decoder_stack.positions must be one of": ("positions", "rotary"),
    "unknown key decoder_stack.layers": ("layers", 3),
    "decoder_stack.embed_dim must be a whole number": ("embed_dim", "16"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_configurations(message):
    known = plain_config(toys.build()).as_json()
    *path, last, value = WRONG[message]
    place = known["decoder_stack"]
    for key in path:
        place = place[key]
    place[last] = value
    with pytest.raises(ValueError, match=message):
        ModelConfig.of_json(known)


def test_sides_that_do_not_fit():
    config = plain_config(toys.build(share_all_embeddings=True))
    with pytest.raises(ValueError, match="encoder_dim must be 16 or null, got 8"):
        dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, encoder_dim=8))
    with pytest.raises(ValueError, match="share_embeddings needs tables of the same size"):
        dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, vocab_size=31))
    banded = {"share_input_output": False, "adaptive_input": AdaptiveInputConfig((8,))}
    with pytest.raises(ValueError, match="share_embeddings needs tables of the same size"):
        dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, **banded))
    with pytest.raises(ValueError, match="pad must be an index of the decoder's 30 words, got 30"):
        dataclasses.replace(config, pad=30)


def test_what_has_no_plain_model_is_named():
    model = language_model_toys.build_lm(**EMBEDDINGS["characters"])
    with pytest.raises(UnsupportedModelError, match="character_embeddings True: embeddings of type"):
        plain_model(model)
    with pytest.raises(UnsupportedModelError, match="a model of type Linear"):
        plain_model(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("option", ["add_zero_attn", "use_xformers"])
def test_other_attention_without_parameters_of_its_own_is_refused(option):
    model = search_toys.fairseqs()
    setattr(model.decoder.layers[1].encoder_attn, option, True)
    with pytest.raises(UnsupportedModelError, match=option.removeprefix("use_")):
        plain_model(model)


@pytest.mark.parametrize("part", ["attn_ln", "self_attn.bias_k"])
def test_what_fairseq_can_add_to_a_layer_is_refused_by_its_parameter(part):
    model = search_toys.fairseqs()
    owner, _, name = f"encoder.layers.1.{part}".rpartition(".")
    setattr(model.get_submodule(owner), name, torch.nn.Parameter(torch.ones(16)))
    with pytest.raises(UnsupportedModelError, match=f"a model with {owner}.{name}".replace(".", r"\.")):
        plain_model(model)


def test_learned_positions_end():
    plain = plain_model(toys.build(decoder_learned_pos=True, max_target_positions=8))
    source = toys.batch()[0]
    with pytest.raises(ValueError, match="a sequence of 9 tokens is longer than the 8 learned positions"):
        plain(source, torch.randint(4, 30, (3, 9)))
    _, state = plain.step(torch.randint(4, 30, (3, 8)), plain.start(plain.encode(source)))
    with pytest.raises(ValueError, match="a sequence of 9 tokens is longer than the 8 learned positions"):
        plain.step(torch.randint(4, 30, (3, 1)), state)


@torch.no_grad()
def test_pads_take_no_learned_positions_as_in_fairseq():
    model = toys.build(decoder_learned_pos=True, max_target_positions=8).eval()
    source, target = toys.batch()[0], torch.randint(4, 30, (3, 11))
    target[:, 8:] = 1
    lengths = source.ne(1).sum(1)
    close(plain_model(model)(source, target).logits[:, :8], model(source, lengths, target)[0][:, :8])
