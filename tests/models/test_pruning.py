"""Models of some layers of a trained one, as by --model-overrides "{'encoder_layers_to_keep': '0,2'}"."""

import dataclasses
from argparse import Namespace

import pytest
import torch
from fairseq import checkpoint_utils, models
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

from lightconv_plugin.generation import FastGenerator
from lightconv_plugin.models.config import transformer_config
from lightconv_plugin.models.language_model_config import language_model_config
from lightconv_plugin.models.plain import plain_model

from .language_model_toys import build_lm, configuration, lm_task, scramble
from .language_model_toys import tokens as words
from .test_checkpoints import released_2019, upstream_model
from .toys import SMALL, batch, build, dictionary, task

# Layers that differ in each of the options with an entry per layer.
MIXED = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {
        "conv_type": "lightweight,dynamic,dynamic",
        "kernel_size_list": [3, 5, 9],
        "dynamic_rank": [0, 0, 4],
    }.items()
}
KEPT = {"encoder": [0, 2], "decoder": [2]}
OVERRIDES = {f"{side}_layers_to_keep": ",".join(map(str, layers)) for side, layers in KEPT.items()}


def settings(architecture="dynamicconv", **options):
    """The configuration of a model, as fairseq reads it from a checkpoint."""
    config = models.MODEL_DATACLASS_REGISTRY[architecture]()
    config = dataclasses.replace(config, **{**SMALL, **options})
    config._name = architecture
    return OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True))


def by_hand(whole, kept=KEPT):
    """A model built with the layers that are kept, with their parameters."""
    options = {}
    for side, layers in kept.items():
        options[f"{side}_layers"] = len(layers)
        options[f"{side}_conv_type"] = ",".join(MIXED[f"{side}_conv_type"].split(",")[layer] for layer in layers)
        for name in ("kernel_size_list", "dynamic_rank"):
            options[f"{side}_{name}"] = [MIXED[f"{side}_{name}"][layer] for layer in layers]
    model = build(**{**MIXED, **options}) if hasattr(whole, "encoder") else build_lm(**options)
    for side in kept:
        stack, theirs = getattr(model, side), getattr(whole, side)
        state = {k: v for k, v in theirs.state_dict().items() if not k.startswith("layers.")}
        for number, layer in enumerate(kept[side]):
            state |= {f"layers.{number}.{k}": v for k, v in theirs.layers[layer].state_dict().items()}
        stack.load_state_dict(state)
    return model.eval()


@pytest.fixture
def checkpoint(tmp_path):
    """(a model, its checkpoint's file)."""
    torch.manual_seed(1)
    whole = scramble(build(**MIXED))
    state = {
        "args": None,
        "cfg": {"model": OmegaConf.to_container(settings(**MIXED)), "task": {"_name": "translation"}},
        "model": whole.state_dict(),
        "optimizer_history": [{"num_updates": 7, "criterion_name": "CrossEntropyCriterion", "lr_scheduler_state": {}}],
        "extra_state": {"train_iterator": {"epoch": 1}},
        "last_optimizer_state": None,
    }
    torch.save(state, tmp_path / "model.pt")
    return whole, tmp_path / "model.pt"


def opened(file, **overrides):
    translation = task()
    translation.build_model = lambda cfg: models.build_model(cfg, translation)
    found, cfg, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(file)], arg_overrides=overrides, task=translation
    )
    return found[0].eval(), cfg


def searched(generator_class, model):
    source, lengths, _ = batch()
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    generator = generator_class([model], dictionary(30), beam_size=3, max_len_b=8)
    return [
        [(h["tokens"].tolist(), round(float(h["score"]), 4)) for h in b] for b in generator.generate([model], sample)
    ]


@pytest.mark.parametrize("generator", [SequenceGenerator, FastGenerator])
@torch.no_grad()
def test_generation_with_the_layers_that_are_kept(generator, checkpoint):
    whole, file = checkpoint

    def search(model):
        torch.manual_seed(2)
        return searched(generator, model)

    pruned, _ = opened(file, **OVERRIDES)
    assert search(pruned) == search(by_hand(whole)) != search(whole)


@torch.no_grad()
def test_one_side_alone(checkpoint):
    whole, file = checkpoint
    pruned, _ = opened(file, decoder_layers_to_keep="2,0")
    expected = by_hand(whole, {"encoder": [0, 1, 2], "decoder": [0, 2]})
    torch.testing.assert_close(pruned.state_dict(), expected.state_dict())


@torch.no_grad()
def test_the_configuration_describes_the_pruned_model(checkpoint):
    """A training that starts from a pruned model saves it; its checkpoints are opened, and resumed with the option."""
    _, file = checkpoint
    pruned, cfg = opened(file, **OVERRIDES)
    again = models.build_model(cfg.model, task())
    again.load_state_dict(pruned.state_dict(), model_cfg=cfg.model)
    resumed = settings(**MIXED, **OVERRIDES)
    model = models.build_model(resumed, task())
    model.load_state_dict(pruned.state_dict(), model_cfg=resumed)
    source, lengths, previous = batch((7, 4, 9), (6, 6, 6))
    expected = pruned(source, lengths, previous)[0]
    for other in (again, model):
        torch.testing.assert_close(other.eval()(source, lengths, previous)[0], expected)
    torch.testing.assert_close(plain_model(pruned)(source, previous).logits, expected)


@torch.no_grad()
def test_an_old_layout_is_pruned():
    types = {"encoder_conv_type": "lightweight", "decoder_conv_type": "dynamic"}
    theirs = upstream_model(task(), **types)
    state = released_2019(theirs.state_dict(), tied=False)
    wanted = settings("lightconv", **types, **OVERRIDES)
    ours = models.build_model(wanted, task())
    ours.load_state_dict(state, model_cfg=wanted)
    for side, layers in KEPT.items():
        for number, layer in enumerate(layers):
            torch.testing.assert_close(
                getattr(ours, side).layers[number].fc1.weight, getattr(theirs, side).layers[layer].fc1.weight
            )


@torch.no_grad()
def test_a_language_model():
    of_lm = {name: value for name, value in MIXED.items() if name.startswith("decoder")}
    small = {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_attention_heads": 4, "decoder_layers": 3}
    whole = scramble(build_lm(**of_lm))
    wanted = OmegaConf.structured(configuration(**small, **of_lm, decoder_layers_to_keep="0,2"))
    pruned = models.build_model(wanted, lm_task()).eval()
    pruned.load_state_dict(whole.state_dict(), model_cfg=wanted)
    previous = words(2, 7)
    expected = by_hand(whole, {"decoder": [0, 2]})(previous)[0]
    torch.testing.assert_close(pruned(previous)[0], expected)
    torch.testing.assert_close(plain_model(pruned)(previous).logits, expected)
    assert not torch.equal(whole(previous)[0], expected)


@pytest.mark.parametrize("option", [{"dynamic_rank": [4]}, {"attention_conv": "q,k"}], ids=["rank", "attention"])
@torch.no_grad()
def test_options_of_layers_that_are_not_kept_go_with_them(option):
    """A single entry for all layers, of which none is left that it is for."""
    ours = {"conv_type": "dynamic,attention,attention"} | option
    trained = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in ours.items()}
    trained["dynamic_residual"] = True
    whole = build(**trained)
    kept = "1,2" if "dynamic_rank" in option else "0"
    wanted = settings(**trained, encoder_layers_to_keep=kept, decoder_layers_to_keep=kept)
    pruned = models.build_model(wanted, task())
    pruned.load_state_dict(whole.state_dict(), model_cfg=wanted)
    models.build_model(wanted, task()).load_state_dict(pruned.state_dict(), model_cfg=wanted)
    assert wanted.dynamic_residual == (kept == "0")


@pytest.mark.parametrize("given", ["3", "-1", "0,0", "first", 7])
def test_layers_that_do_not_exist_are_named(given):
    with pytest.raises(ValueError, match=f"--encoder-layers-to-keep .* layers 0 to 2, each once, .* got {given!r}"):
        transformer_config(Namespace(**SMALL | MIXED, encoder_layers_to_keep=given))
    with pytest.raises(ValueError, match="--decoder-layers-to-keep"):
        language_model_config(configuration(decoder_layers_to_keep="6"))
