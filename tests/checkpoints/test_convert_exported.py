"""`lightconv convert` of exported models: fairseq's models with the same parameters, to train on from and to search."""

import dataclasses
import itertools
import shlex

import pytest
import torch

from lightconv_plugin.checkpoints.exported import open_exported
from lightconv_plugin.checkpoints.saving import Side, save_exported
from lightconv_plugin.modules import MIXERS, build_model
from lightconv_plugin.text.recipe import Recipe
from lightconv_plugin.text.sides import TextSide

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils

from lightconv_plugin.checkpoints.exporting import export_checkpoint
from lightconv_plugin.checkpoints.to_fairseq import fairseq_model
from lightconv_plugin.models.plain import plain_config, plain_model
from tests import fairseq_cli
from tests.checkpoints.conversions import load, run, with_new_fairseq
from tests.generation import toys as search_toys
from tests.models import toys
from tests.models.language_model_toys import LM_VARIANTS, build_lm, log_probabilities, tokens
from tests.models.test_plain import LANGUAGE_MODELS, OPTIONS, encoder_decoder, stirred

MIXTURE = "dynamic,attention,talk"
PAIRS = [*itertools.product((*MIXERS, *toys.VARIANTS), ("other sizes",)), *itertools.product((MIXTURE,), OPTIONS)]
LM_PAIRS = [
    *itertools.product((*MIXERS, *LM_VARIANTS), ("shared-narrow",)),
    *itertools.product(("dynamic",), LANGUAGE_MODELS),
]
UNREAD = ("._float_tensor", "adaptive_softmax.buffer")  # buffers without content


def side(lang, entries=30):
    words = "".join(f"w{i} 1\n" for i in range(entries - 4)).encode()
    return Side(lang, words, TextSide(Recipe("none", lang or ""), "words", None))


def export(plain, directory, **options):
    config = plain.config
    sides = {"target": side("en" if config.encoder else None, config.decoder.vocab_size)}
    if config.encoder:
        sides |= {"source": side("de", config.encoder.vocab_size), "max_source_positions": 60}
    save_exported(directory, plain, **sides, max_target_positions=62, **options)
    return directory


def same(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        if not name.endswith(UNREAD):
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("mixer, options", PAIRS)
@torch.no_grad()
def test_an_encoder_decoder_there_and_back(mixer, options, tmp_path):
    model = encoder_decoder(mixer, OPTIONS[options])
    found, parameters = fairseq_model(open_exported(export(plain_model(model), tmp_path / "model")))
    same(parameters, model.state_dict())
    again = toys.build(found.architecture, small=False, **found.options)
    again.load_state_dict(parameters)
    batch = toys.batch()
    assert torch.equal(again(*batch)[0], model(*batch)[0])
    if mixer == "dynamic":  # which reads all of its settings, so that all of them must be the same: dropout too
        assert plain_config(again) == plain_config(model)


@pytest.mark.parametrize("mixer, embedding", LM_PAIRS)
@torch.no_grad()
def test_a_language_model_there_and_back(mixer, embedding, tmp_path):
    model = stirred(build_lm(decoder_conv_type=mixer, **LANGUAGE_MODELS[embedding]))
    found, parameters = fairseq_model(open_exported(export(plain_model(model), tmp_path / "model")))
    same(parameters, model.state_dict())
    again = build_lm(found.architecture, small=False, **found.options)
    again.load_state_dict(parameters)
    words = tokens(3, 8)
    assert torch.equal(log_probabilities(again, words), log_probabilities(model, words))


@pytest.mark.parametrize("mixer, options", [(MIXTURE, "shared"), ("lightweight", "other sizes")])
@torch.no_grad()
def test_fairseqs_loader_takes_it_and_exports_it_again(mixer, options, tmp_path, capsys):
    model = encoder_decoder(mixer, OPTIONS[options])
    export(plain_model(model), tmp_path / "model")
    assert run(tmp_path / "model", tmp_path / "back.pt", "--to", "plugin") == 0
    (loaded,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "back.pt")])
    source, lengths, target = toys.batch()
    assert torch.equal(loaded.eval()(source, lengths, target)[0], model(source, lengths, target)[0])
    assert (task.cfg.source_lang, task.cfg.target_lang, task.max_positions()) == ("de", "en", (60, 62))
    assert cfg.criterion._name == "label_smoothed_cross_entropy"
    export_checkpoint(tmp_path / "back.pt", tmp_path / "again")
    for name in ("model.safetensors", "text.json", "dict.de.txt"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    assert open_exported(tmp_path / "again").settings == open_exported(tmp_path / "model").settings
    assert "written to" in capsys.readouterr().out


def test_a_shortlist_is_dropped_and_said(tmp_path, capsys):
    lists = tmp_path / "lists.txt"
    lists.write_text("w9 w3 0.5\n")
    export(plain_model(toys.build()), tmp_path / "model", shortlist=lists)
    assert run(tmp_path / "model", tmp_path / "back.pt", "--to", "plugin") == 0
    said = f"the shortlist is dropped: to translate with it, give {tmp_path / 'model' / 'shortlist.txt'} as --shortlist"
    assert said in capsys.readouterr().out.splitlines()
    export_checkpoint(tmp_path / "back.pt", tmp_path / "again")
    assert open_exported(tmp_path / "again").shortlist is None
    export(plain_model(toys.build()), tmp_path / "without")
    assert run(tmp_path / "without", tmp_path / "other.pt", "--to", "plugin") == 0
    assert "the shortlist" not in capsys.readouterr().out


@torch.no_grad()
def test_a_language_model_by_fairseqs_loader(tmp_path):
    model = stirred(build_lm(**LANGUAGE_MODELS["adaptive-tied"]))
    export(plain_model(model), tmp_path / "model")
    assert run(tmp_path / "model", tmp_path / "back.pt", "--to", "plugin") == 0
    (loaded,), cfg, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "back.pt")])
    assert cfg.criterion._name == "adaptive_loss" and cfg.task.tokens_per_sample == 64
    words = tokens(3, 8)
    assert torch.equal(log_probabilities(loaded.eval(), words), log_probabilities(model, words))
    export_checkpoint(tmp_path / "back.pt", tmp_path / "again")
    again, first = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("again", "model"))
    assert again == first


@pytest.mark.parametrize("before", [False, True])
@torch.no_grad()
def test_fairseqs_transformer_becomes_the_plugins_with_attention(before, tmp_path):
    theirs = stirred(search_toys.fairseqs(encoder_normalize_before=before, decoder_normalize_before=before))
    theirs.decoder.output_projection.bias = None
    found, parameters = fairseq_model(open_exported(export(plain_model(theirs), tmp_path / "model")))
    assert (found.architecture, found.options["encoder_conv_type"]) == ("dynamicconv", "attention")
    ours = toys.build("dynamicconv", toys.task(toys.dictionary(search_toys.VOCABULARY)), small=False, **found.options)
    ours.load_state_dict(parameters)
    batch = toys.batch()
    torch.testing.assert_close(ours(*batch)[0], theirs(*batch)[0], rtol=1e-5, atol=1e-5)


@with_new_fairseq
@torch.no_grad()
def test_the_other_layouts(tmp_path, capsys):
    model = encoder_decoder("lightweight", {})
    export(plain_model(model), tmp_path / "model", weights="bfloat16")
    assert run(tmp_path / "model", tmp_path / "theirs.pt", "--to", "fairseq") == 0
    assert "keep the rounding of the export to bfloat16" in capsys.readouterr().out
    assert load(tmp_path / "theirs.pt")["cfg"]["model"].arch == "lightconv"
    assert run(tmp_path / "theirs.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    back = load(tmp_path / "back.pt")["model"]
    same(back, {n: v.bfloat16().float() if v.dim() else v for n, v in model.state_dict().items()} | {
        n: v for n, v in model.state_dict().items() if n.endswith("version")
    })  # fmt: skip


def test_8_bit_weights_become_what_they_stand_for(tmp_path):
    model = stirred(toys.build(encoder_ffn_embed_dim=2048))
    export(plain_model(model), tmp_path / "model", weights="int8")
    _, parameters = fairseq_model(open_exported(tmp_path / "model"))
    name = "encoder.layers.0.fc1.weight"
    weight, expected = parameters[name], model.state_dict()[name]
    assert not torch.equal(weight, expected)
    torch.testing.assert_close(weight, expected, atol=float(expected.abs().max()) / 200, rtol=0)


CANNOT = {
    "decoder_stack.mixers[1].conv_dim 8 cannot be expressed": ("decoder", "mixers", {"conv_dim": 8}),
    "decoder_stack.mixers[1].input_dropout 0.25 cannot": ("decoder", "mixers", {"input_dropout": 0.25}),
    "encoder_stack.mixers[1].normalize l1 cannot": ("encoder", "mixers", {"normalize": "l1"}),
    "decoder_stack.final_norm true cannot be expressed by the options of fairseq's models, in which it would be false":
        ("decoder", "final_norm", True),
    "encoder_stack.embed_scale 3.0 cannot": ("encoder", "embed_scale", 3.0),
    "decoder_stack.output_bias true cannot": ("decoder", "output_bias", True),
    "decoder_stack.input_dim 12 cannot": ("decoder", "input_dim", 12),
    "encoder_stack.activation tanh cannot": ("encoder", "activation", "tanh"),
    "encoder_stack.embedding_norm true cannot": ("encoder", "embedding_norm", True),
}  # fmt: skip


@pytest.mark.parametrize("message", CANNOT)
def test_what_the_options_cannot_express_is_named(message, tmp_path, capsys):
    which, name, value = CANNOT[message]
    config = plain_config(toys.build())
    stack = getattr(config, which)
    if name == "mixers":
        first, second, *others = stack.mixers
        value = (first, dataclasses.replace(second, **value), *others)
    config = dataclasses.replace(config, **{which: dataclasses.replace(stack, **{name: value})})
    export(build_model(config), tmp_path / "model")
    assert run(tmp_path / "model", tmp_path / "out.pt", "--to", "plugin") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and "config.json" in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_that_is_no_exported_model(tmp_path, capsys):
    assert run(tmp_path, tmp_path / "out.pt", "--to", "plugin") == 2
    assert "config.json" in capsys.readouterr().err


def test_two_dictionaries_over_one_table(tmp_path, capsys):
    plain = plain_model(toys.build(share_all_embeddings=True))
    export(plain, tmp_path / "model")
    words = (tmp_path / "model" / "dict.de.txt").read_text()
    (tmp_path / "model" / "dict.de.txt").write_text(words.replace("w3 ", "other "))
    assert run(tmp_path / "model", tmp_path / "out.pt", "--to", "plugin") == 2
    assert "they must be the same" in capsys.readouterr().err


def test_fairseq_trains_on_and_translates_the_same(toy_data, toy_training, tmp_path, capsys):
    """With the options that the command prints and nothing else."""
    export_checkpoint(toy_training / "checkpoint_last.pt", tmp_path / "model")
    assert run(tmp_path / "model", tmp_path / "back.pt", "--to", "plugin") == 0
    out = capsys.readouterr().out
    options = shlex.split(out.partition("for it: ")[2].splitlines()[0])
    generate = ("generate", toy_data, "--user-dir", fairseq_cli.USER_DIR, "--cpu", "--batch-size", 6, "--beam", 3)
    texts = [
        [line for line in fairseq_cli.run(*generate, "--path", path).splitlines() if line.startswith(("H-", "P-"))]
        for path in (toy_training / "checkpoint_last.pt", tmp_path / "back.pt")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 24
    log = fairseq_cli.run(
        *("train", toy_data, "--user-dir", fairseq_cli.USER_DIR, *options, *fairseq_cli.RECIPE, "--lr", "0.01"),
        *("--finetune-from-model", tmp_path / "back.pt", "--save-dir", tmp_path / "tuned", "--max-epoch", 1),
    )
    assert "loading pretrained model from" in log
    before, after = (load(path)["model"] for path in (tmp_path / "back.pt", tmp_path / "tuned" / "checkpoint_last.pt"))
    assert before.keys() == after.keys()
    moved = (before["encoder.layers.0.fc1.weight"] - after["encoder.layers.0.fc1.weight"]).abs().max()
    assert 0 < moved < 0.5
