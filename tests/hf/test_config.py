"""Configurations from options, and what they answer transformers."""

import copy
import json

import pytest

from lightconv_plugin.hf import LightConvConfig, LightConvForConditionalGeneration
from lightconv_plugin.modules import ModelConfig
from tests.hf.models import ONE_OF_EACH, config


def test_options_describe_a_model():
    known = LightConvConfig(
        vocab_size=100, source_vocab_size=90, d_model=32, num_heads=8, encoder_layers=5, decoder_layers=2, mixer="talk"
    )
    model = known.model_config()
    assert [mixer.kernel_size for mixer in model.encoder.mixers] == [3, 7, 15, 31, 31]
    assert {mixer.kind for mixer in model.encoder.mixers + model.decoder.mixers} == {"talk"}
    assert all(mixer.causal for mixer in model.decoder.mixers)
    assert not any(mixer.causal for mixer in model.encoder.mixers)
    assert (model.encoder.vocab_size, model.decoder.vocab_size, model.decoder.encoder_dim) == (90, 100, 32)
    assert model.encoder.embed_scale == pytest.approx(32**0.5) and model.encoder.ffn_dim == 128
    assert LightConvConfig().model_config().encoder is not None
    assert config(normalize_before=True).model_config().encoder.final_norm


def test_one_mixer_for_each_layer():
    known = config(encoder_layers=3, decoder_layers=4, mixer=ONE_OF_EACH[:7]).model_config()
    kinds = [mixer.kind for mixer in known.encoder.mixers + known.decoder.mixers]
    assert kinds == ONE_OF_EACH[:7]


def test_an_option_of_one_mixer_is_left_to_its_layers():
    conv = {"projections": ["q"]}
    known = config(mixer=["dynamic", "talk", "attention", "conv"], dynamic_rank=3, attention_conv=conv).model_config()
    layers = known.encoder.mixers + known.decoder.mixers
    assert [layer.dynamic_rank for layer in layers] == [3, 0, 0, 0]
    assert [layer.attention_conv is not None for layer in layers] == [False, False, True, False]


def test_a_language_model_has_no_encoder():
    known = config(is_encoder_decoder=False)
    assert known.encoder_stack is None and not known.is_encoder_decoder and known.max_source_positions is None
    assert known.model_config().decoder.encoder_dim is None


def test_what_transformers_asks_for():
    known = config(encoder_layers=3)
    assert (known.hidden_size, known.d_model, known.num_hidden_layers, known.num_attention_heads) == (16, 16, 3, 4)
    assert (known.encoder_layers, known.decoder_layers, known.vocab_size) == (3, 2, 29)
    assert known.get_text_config() is known.get_text_config(decoder=True) is known.get_text_config(encoder=True)
    assert known.decoder_start_token_id == known.eos_token_id == 2
    assert known.keys_to_ignore_at_inference == ["past_key_values", "cache"]
    assert config(is_encoder_decoder=False).num_hidden_layers == 2
    assert config(max_target_positions=77).max_position_embeddings == 77


@pytest.mark.parametrize(
    "name, source",
    [
        ("hidden_size", "d_model or the stacks"),
        ("num_hidden_layers", "encoder_layers and decoder_layers or the stacks"),
        ("num_attention_heads", "num_heads or the stacks"),
        ("max_position_embeddings", "max_target_positions"),
        ("d_model", "the stacks"),
        ("mixer", "the stacks"),
        ("activation_dropout", "the stacks"),
    ],
)
def test_what_follows_from_other_arguments_cannot_be_set(name, source, tmp_path):
    config().save_pretrained(tmp_path)
    message = f"^{name} cannot be set, got 2: it follows from {source}$"
    with pytest.raises(ValueError, match=message):
        setattr(LightConvConfig.from_pretrained(tmp_path), name, 2)
    if hasattr(LightConvConfig, name):
        with pytest.raises(ValueError, match=message):
            LightConvConfig.from_pretrained(tmp_path, **{name: 2})
    if source != "the stacks":
        with pytest.raises(ValueError, match=message):
            LightConvConfig(**{name: 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocab_size", 30), ("is_encoder_decoder", False), ("tie_word_embeddings", False), ("share_embeddings", True)],
)
def test_what_the_weights_depend_on_stays(name, value):
    known = config()
    setattr(known, name, getattr(known, name))
    with pytest.raises(ValueError, match=f"^{name} must stay {getattr(known, name)}, got {value}: the weights depend"):
        setattr(known, name, value)


@pytest.mark.parametrize("name", ["dropout", "weight_dropout", "attention_dropout"])
def test_dropout_is_changed_as_in_bart(name, tmp_path):
    """As an attribute, by from_pretrained, and by hand in config.json."""
    options = {"mixer": ["dynamic", "attention", "attention", "dynamic"]}
    config(**options).save_pretrained(tmp_path)
    known = LightConvConfig.from_pretrained(tmp_path)
    assert getattr(known, name) == 0.1
    setattr(known, name, 0.3)
    expected = config(**options, **{name: 0.3}).model_config()
    assert known.model_config() == expected != config(**options).model_config() and getattr(known, name) == 0.3
    assert LightConvConfig.from_pretrained(tmp_path, **{name: 0.3}).model_config() == expected
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: 0.3}))
    known = LightConvConfig.from_pretrained(tmp_path)
    assert known.model_config() == expected and name not in known.to_diff_dict()
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\), got 1"):
        setattr(known, name, 1.0)
    assert known.model_config() == expected


def test_a_configuration_survives_json(tmp_path):
    known = config(mixer=ONE_OF_EACH[:4], source_lang="de", target_lang="en")
    known.save_pretrained(tmp_path)
    again = LightConvConfig.from_pretrained(tmp_path)
    assert again.model_config() == known.model_config()
    assert {**again.to_dict(), "_name_or_path": ""} == {**known.to_dict(), "_name_or_path": ""}
    assert copy.deepcopy(known).to_diff_dict() == known.to_diff_dict()
    language = config(is_encoder_decoder=False)
    language.save_pretrained(tmp_path)
    assert LightConvConfig.from_pretrained(tmp_path).model_config() == language.model_config()
    assert language.to_diff_dict()["is_encoder_decoder"] is False


def test_other_symbols_change_no_architecture(tmp_path):
    """Trainers put the tokenizer's symbols into the configuration, and callers of from_pretrained their own."""
    known = config()
    architecture, written = known.model_config(), known.to_diff_dict()
    known.pad_token_id, known.bos_token_id = 2, 3
    assert known.model_config() == architecture and known.to_diff_dict() == written
    known.save_pretrained(tmp_path)
    again = LightConvConfig.from_pretrained(tmp_path, pad_token_id=0)
    assert again.pad_token_id == 0 and again.model_config() == architecture


WRONG = {
    "attention_conv.kernel_size must be at least 2, got 1": {
        "mixer": "attention",
        "attention_conv": {"projections": ["q"], "kernel_size": 1},
    },
    "cross_attention_conv.projections must be a list": {"cross_attention_conv": {"projections": "q"}},
    "kind must be one of lightweight, dynamic": {"mixer": "static"},
    "mixer must be one name, or one for each of the 4 layers, got 3": {"mixer": ["talk"] * 3},
    "encoder_layers must be at least 1, got 0": {"encoder_layers": 0},
    "decoder_layers must be at least 1, got 'two'": {"decoder_layers": "two"},
    "d_model must be a whole number of at least 1, got 0": {"d_model": 0},
    "num_heads must divide": {"num_heads": 3},
    "encoder_kernel_sizes must be a list of sizes, got 3": {"encoder_kernel_sizes": 3},
    "decoder_kernel_sizes must be a list of sizes": {"decoder_kernel_sizes": ()},
    "share_embeddings needs tables of the same size": {"share_embeddings": True, "source_vocab_size": 30},
    "eos must be an index of the decoder's 29 words, got 29": {"eos_token_id": 29},
    "format_version must be 1, got 7": {"format_version": 7},
    "dropout must be in": {"dropout": 1.5},
    "dynamic_rank needs a layer of type dynamic: got mixer='lightweight'": {"mixer": "lightweight", "dynamic_rank": 3},
    "dynamic_residual needs a layer of type dynamic": {"mixer": "talk", "dynamic_residual": True},
    "attention_conv needs a layer of type attention or window_attention: got mixer='dynamic'": {
        "attention_conv": {"projections": ["q"]},
    },
    "ffn_dim must be a whole number of at least 1, got 0": {"ffn_dim": 0},
    "^source_vocab_size must be a whole number of at least 1, got 0": {"source_vocab_size": 0},
    "^vocab_size must be a whole number of at least 1, got 0": {"vocab_size": 0},
    "encoder_dynamic_rank, layerdrop: not allowed; the options are d_model, ffn_dim, ": {
        "encoder_dynamic_rank": 3,
        "layerdrop": 0.1,
    },
    "decoder_stack is required with encoder_stack": {"encoder_stack": {}},
    "tie_word_embeddings must be False as share_input_output, got True": {
        "share_input_output": False,
        "tie_word_embeddings": True,
    },
    "max_target_positions must be a whole number of at least 1, got 0": {"max_target_positions": 0},
    "max_source_positions must be a whole number of at least 1, got 'x'": {"max_source_positions": "x"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_named(message):
    with pytest.raises(ValueError, match=message):
        config(**WRONG[message])


def test_options_of_an_encoder_need_one():
    with pytest.raises(ValueError, match="encoder_layers: not allowed for a language model"):
        LightConvConfig(is_encoder_decoder=False, encoder_layers=3)
    stacks = ModelConfig.as_json(config().model_config())
    with pytest.raises(ValueError, match="d_model, mixer: not allowed with decoder_stack"):
        LightConvConfig(**stacks, mixer="talk", d_model=8)


def test_learned_positions_are_as_many_as_the_longest_text():
    known = config(positions="learned", max_source_positions=2000, max_target_positions=50)
    assert (known.encoder_stack["max_positions"], known.decoder_stack["max_positions"]) == (2000, 50)
    assert (known.max_source_positions, known.max_target_positions) == (2000, 50)
    assert LightConvForConditionalGeneration(known).decoder.embed_positions.weight.shape[0] >= 50
    stacks = ModelConfig.as_json(known.model_config())
    again = LightConvConfig(**stacks)
    assert (again.max_source_positions, again.max_target_positions) == (1024, 50)
    with pytest.raises(ValueError, match="max_target_positions must be at most the 50 learned positions, got 51"):
        LightConvConfig(**stacks, max_target_positions=51)
    with pytest.raises(ValueError, match="max_source_positions must be at most the 2000 learned positions, got 3000"):
        LightConvConfig(**stacks, max_source_positions=3000)


def test_the_output_layer_is_tied_as_asked():
    assert config(tie_word_embeddings=False).decoder_stack["share_input_output"] is False
    assert config(tie_word_embeddings=True).decoder_stack["share_input_output"] is True
    stacks = ModelConfig.as_json(config().model_config())
    assert LightConvConfig(**stacks, tie_word_embeddings=True).tie_word_embeddings is True
    with pytest.raises(ValueError, match="tie_word_embeddings must be True as share_input_output, got False"):
        LightConvConfig(**stacks, tie_word_embeddings=False)
