"""`lightconv convert`: each layout into the others and back, bit for bit; fairseq's own classes load what it writes."""

from argparse import Namespace
from unittest import mock

import pytest
import torch

from lightconv_plugin.checkpoints.averaging import average
from lightconv_plugin.checkpoints.loading import load_model_checkpoint

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, tasks
from fairseq.models import lightconv as upstream
from fairseq.models import lightconv_lm as upstream_lm

from tests.checkpoints.conversions import LIGHTCONVS, checkpoint, load, run, same, settings, small, with_new_fairseq
from tests.models import test_checkpoints as others
from tests.models.language_model_toys import EMBEDDINGS, build_lm, lm_task, log_probabilities, scramble, tokens
from tests.models.language_model_toys import SMALL as SMALL_LM
from tests.models.test_language_model_checkpoints import arguments as lm_arguments
from tests.models.test_language_model_checkpoints import released_2019 as lm_released_2019
from tests.models.toys import SMALL, batch, build, dictionary, task
from tests.released.archives import meters_of_2019


@with_new_fairseq
@pytest.mark.parametrize("architecture, options", LIGHTCONVS)
@torch.no_grad()
def test_fairseqs_own_class_loads_it_strictly_and_computes_the_same(
    architecture, options, their_task, tmp_path, capsys
):
    options = small(options)
    ours = scramble(build(architecture, their_task, **options))
    source = checkpoint(tmp_path / "ours.pt", ours, settings(architecture, **options))
    assert run(source, tmp_path / "theirs.pt", "--to", "fairseq") == 0
    converted = load(tmp_path / "theirs.pt")
    args = converted["cfg"]["model"]
    assert isinstance(args, Namespace) and args.arch == args._name
    assert args.arch.startswith("lightconv") and converted["cfg"]["common"]["user_dir"] is None
    theirs = upstream.LightConvModel.build_model(Namespace(**vars(args)), their_task).eval()
    theirs.load_state_dict(converted["model"], strict=True)
    inputs = batch((12, 9, 7), (9, 9, 9))
    expected = ours(*inputs)[0]
    assert expected.isfinite().all() and expected.abs().max() > 1
    torch.testing.assert_close(theirs(*inputs)[0], expected, atol=1e-5, rtol=1e-5)
    assert run(tmp_path / "theirs.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    same(load(tmp_path / "back.pt")["model"], load(source)["model"])
    assert capsys.readouterr().out.count("written to") == 2


def test_files_of_pretrained_embeddings_are_not_needed(their_task, tmp_path):
    options = small({})
    ours = build("dynamicconv", their_task, **options)
    section = settings("dynamicconv", **options, encoder_embed_path="/gone/encoder.vec")
    source = checkpoint(tmp_path / "ours.pt", ours, section)
    assert run(source, tmp_path / "theirs.pt", "--to", "fairseq") == 0
    assert load(tmp_path / "theirs.pt")["cfg"]["model"].encoder_embed_path == "/gone/encoder.vec"


@pytest.mark.parametrize("layout", ["fairseq", "fairseq-0.12.2"])
@pytest.mark.parametrize("architecture, options", LIGHTCONVS)
@torch.no_grad()
def test_there_and_back_is_the_same_model(architecture, options, layout, their_task, tmp_path):
    options = small(options)
    ours = scramble(build(architecture, their_task, **options))
    source = checkpoint(tmp_path / "ours.pt", ours, settings(architecture, **options))
    assert run(source, tmp_path / "theirs.pt", "--to", layout) == 0
    assert run(tmp_path / "theirs.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    back = load(tmp_path / "back.pt")
    same(back["model"], load(source)["model"])
    section = back["cfg"]["model"]
    name = section["_name"]
    assert name == architecture.removesuffix("_cnndm")
    rebuilt = build(name, their_task, small=False, **{k: v for k, v in section.items() if k != "_name"})
    rebuilt.load_state_dict(back["model"], strict=True)
    inputs = batch((12, 9, 7), (9, 3, 9))
    assert torch.equal(rebuilt(*inputs)[0], ours(*inputs)[0])
    for name in ("optimizer_history", "task_state", "extra_state"):
        assert back[name] == load(source)[name]


@with_new_fairseq
@pytest.mark.parametrize("kind", ["dynamic", "lightweight"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_old_layout_is_that_of_the_released_files(kind, tied, their_task, tmp_path):
    """`released_2019` of the models' tests, written from the old code, makes the same of fairseq's model of today."""
    options = {"encoder_conv_type": kind, "decoder_conv_type": kind, "share_decoder_input_output_embed": tied}
    options |= {"encoder_normalize_before": True, "decoder_normalize_before": True}
    theirs = others.upstream_model(their_task, **options)
    args = Namespace(
        **{**SMALL, "arch": "lightconv_iwslt_de_en", "weight_softmax": True, **options, "encoder_glu": True}
    )
    args.decoder_glu, args.user_dir = True, "/somewhere"
    old = others.released_2019(theirs.state_dict(), tied=tied)
    source = tmp_path / "new.pt"
    torch.save({"args": args, "cfg": None, "model": theirs.state_dict(), "optimizer_history": []}, source)
    assert run(source, tmp_path / "old.pt", "--to", "fairseq-0.12.2") == 0
    got = load(tmp_path / "old.pt")
    assert got["model"].keys() == old.keys()
    for key, value in old.items():
        assert torch.equal(got["model"][key], value), key
    assert (got["args"].arch, got["args"].user_dir, got["cfg"]) == ("lightconv_iwslt_de_en", None, None)
    # And from there to the new one again, but for what the new one never initialises.
    assert run(tmp_path / "old.pt", tmp_path / "again.pt", "--to", "fairseq") == 0
    again = load(tmp_path / "again.pt")["model"]
    assert again.keys() == theirs.state_dict().keys()
    for key, value in theirs.state_dict().items():
        assert torch.equal(again[key], value) or (key.endswith("conv_bias") and not again[key].any()), key


@pytest.mark.parametrize("layout", ["plugin", "fairseq", "fairseq-0.12.2", "talk"])
def test_the_meters_of_old_files_are_left_out(layout, their_task, tmp_path, capsys):
    """fairseq's later versions have them in another module: the converted file would name one that older ones lack."""
    name = "talkconv" if layout == "talk" else "dynamicconv"
    before = {"plugin": "fairseq-0.12.2"}.get(layout, "plugin")
    source = checkpoint(tmp_path / "ours.pt", build(name, their_task, **SMALL), settings(name, **SMALL))
    if before != "plugin":
        assert run(source, tmp_path / "theirs.pt", "--to", before) == 0
        source = tmp_path / "theirs.pt"
    content = load(source)
    with meters_of_2019() as meter:
        torch.save({**content, "extra_state": {"epoch": 3, "train_meters": {"train_loss": meter}}}, source)
    assert run(source, tmp_path / "converted.pt", "--to", layout) == 0
    assert "the meters of its training are dropped" in capsys.readouterr().out
    assert load_model_checkpoint(tmp_path / "converted.pt")["extra_state"] == {"epoch": 3}


@torch.no_grad()
def test_filters_of_the_cuda_layer_get_their_dimension(their_task, tmp_path):
    ours = scramble(build("lightweightconv", their_task, **SMALL))
    source = checkpoint(tmp_path / "ours.pt", ours, settings("lightweightconv", **SMALL))
    assert run(source, tmp_path / "old.pt", "--to", "fairseq-0.12.2") == 0
    content = load(tmp_path / "old.pt")
    content["model"] = others.cuda_trained(content["model"])
    torch.save(content, tmp_path / "cuda.pt")
    assert run(tmp_path / "cuda.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    same(load(tmp_path / "back.pt")["model"], load(source)["model"])


# ------------------------------------------------------------------------------------------------ TaLK


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@torch.no_grad()
def test_talk_there_and_back(tied, their_task, tmp_path):
    options = small({"share_decoder_input_output_embed": tied, "relu_dropout": 0.2})
    ours = scramble(build("talkconv_wmt_en_de_big", their_task, **options))
    source = checkpoint(tmp_path / "ours.pt", ours, settings("talkconv_wmt_en_de_big", **options))
    assert run(source, tmp_path / "theirs.pt", "--to", "talk") == 0
    got = load(tmp_path / "theirs.pt")
    assert got["cfg"] is None
    args = got["args"]
    assert (args.arch, args.task, args.criterion) == (
        "talkconv_wmt_en_de_big",
        "translation",
        "label_smoothed_cross_entropy",
    )
    assert (args.data, args.source_lang, args.seed, args.user_dir) == ("data-bin", "de", 1, None)
    assert (args.encoder_conv_dim, args.encoder_kernel_size_list, args.relu_dropout) == (16, [3, 5, 9], 0.2)
    published = others.published_talk(ours.state_dict(), tied=tied)
    positions = {f"{side}.embed_positions._float_tensor" for side in ("encoder", "decoder")}
    assert got["model"].keys() == published.keys() | positions
    for key, value in published.items():
        assert torch.equal(got["model"][key], value) or key.endswith(".version"), key
    assert run(tmp_path / "theirs.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    same(load(tmp_path / "back.pt")["model"], load(source)["model"])
    assert load(tmp_path / "back.pt")["args"].arch == "talkconv_wmt_en_de_big"


# ------------------------------------------------------------------------------------------------ language models


def lm_settings(architecture, **options):
    return settings(architecture, **{**SMALL_LM, "tokens_per_sample": 64, "max_target_positions": None, **options})


@with_new_fairseq
@pytest.mark.parametrize("embedding", EMBEDDINGS)
@torch.no_grad()
def test_language_models_of_fairseq(embedding, tmp_path):
    options, lm = EMBEDDINGS[embedding], lm_task()
    ours = scramble(build_lm("dynamicconv_lm_gbw", lm, dropout=0.0, **options))
    source = checkpoint(tmp_path / "ours.pt", ours, lm_settings("dynamicconv_lm_gbw", dropout=0.0, **options))
    assert run(source, tmp_path / "theirs.pt", "--to", "fairseq") == 0
    converted = load(tmp_path / "theirs.pt")
    args = converted["cfg"]["model"]
    assert args.arch == "lightconv_lm_gbw"
    theirs = upstream_lm.LightConvLanguageModel.build_model(Namespace(**vars(args)), lm).eval()
    theirs.load_state_dict(converted["model"], strict=True)
    previous = tokens(3, 12)
    torch.testing.assert_close(
        log_probabilities(theirs, previous), log_probabilities(ours, previous), atol=1e-4, rtol=1e-5
    )
    assert run(tmp_path / "theirs.pt", tmp_path / "old.pt", "--to", "fairseq-0.12.2") == 0
    tied = options.get("share_decoder_input_output_embed", False)
    expected = set(lm_released_2019(theirs.state_dict(), tied=tied))
    if embedding in ("no-positions", "learned-positions"):
        expected -= {"decoder.embed_positions._float_tensor"}
    assert load(tmp_path / "old.pt")["model"].keys() == expected
    assert run(tmp_path / "old.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    back = load(tmp_path / "back.pt")
    same(back["model"], load(source)["model"])
    assert back["cfg"]["model"]["_name"] == "dynamicconv_lm_gbw"


@pytest.mark.parametrize("embedding", ["plain", "shared", "adaptive-tied-proj"])
@torch.no_grad()
def test_language_models_of_talk(embedding, tmp_path):
    options, lm = EMBEDDINGS[embedding], lm_task()
    ours = scramble(build_lm("talkconv_lm", lm, **options))
    source = checkpoint(tmp_path / "ours.pt", ours, lm_settings("talkconv_lm", **options))
    assert run(source, tmp_path / "theirs.pt", "--to", "talk") == 0
    theirs = load(tmp_path / "theirs.pt")
    assert theirs["args"].arch == "talkconv_lm" and theirs["args"].max_target_positions == 64
    assert "decoder.layers.1.conv.offsets.weight" in theirs["model"]
    assert ("decoder.embed_out" in theirs["model"]) == (embedding == "plain")
    assert run(tmp_path / "theirs.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    same(load(tmp_path / "back.pt")["model"], load(source)["model"])


@torch.no_grad()
def test_the_arguments_of_an_old_language_model_suffice(tmp_path):
    """What the architecture's name stands for is written out."""
    lm = lm_task()
    ours = scramble(build_lm("lightweightconv_lm", lm))
    source = checkpoint(tmp_path / "ours.pt", ours, lm_settings("lightweightconv_lm"))
    assert run(source, tmp_path / "old.pt", "--to", "fairseq-0.12.2") == 0
    args = lm_arguments(arch="lightconv_lm", decoder_conv_type="lightweight", max_target_positions=None)
    torch.save({"args": args, "model": load(tmp_path / "old.pt")["model"]}, tmp_path / "2019.pt")
    assert run(tmp_path / "2019.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    back = load(tmp_path / "back.pt")
    same(back["model"], load(source)["model"])
    assert back["args"].arch == "lightweightconv_lm" and back["args"].decoder_glu is True


# ------------------------------------------------------------------------------------------------ fairseq's loader


@pytest.mark.parametrize("layout", ["fairseq", "fairseq-0.12.2", "talk"])
@torch.no_grad()
def test_fairseqs_loader_takes_every_layout_and_its_average(layout, tmp_path):
    words = dictionary(30)
    (tmp_path / "data").mkdir()
    for language in ("de", "en"):
        words.save(str(tmp_path / "data" / f"dict.{language}.txt"))
    architecture = "talkconv" if layout == "talk" else "dynamicconv_iwslt_de_en"
    ours = scramble(build(architecture, task(words), **SMALL))
    source = checkpoint(tmp_path / "ours.pt", ours, settings(architecture, **SMALL))
    content = load(source)
    content["cfg"]["task"] |= {"data": str(tmp_path / "data"), "target_lang": "en", "left_pad_source": False}
    content["cfg"]["task"] |= {"left_pad_target": False}
    torch.save(content, source)
    inputs = batch((12, 9, 7), (9, 3, 9))
    assert run(source, tmp_path / "theirs.pt", "--to", layout) == 0
    assert run(tmp_path / "theirs.pt", tmp_path / "back.pt", "--to", "plugin") == 0
    average([tmp_path / "theirs.pt"], tmp_path / "average.pt")
    for name in ("theirs", "back", "average"):
        (model,), _ = checkpoint_utils.load_model_ensemble([str(tmp_path / f"{name}.pt")], task=None)
        assert torch.equal(model.eval()(*inputs)[0], ours(*inputs)[0]), name


@pytest.mark.parametrize("layout", ["fairseq", "fairseq-0.12.2", "talk"])
def test_upstream_finds_the_task_of_a_training_with_the_fast_search(layout, tmp_path, capsys):
    words = dictionary(30)
    for language in ("de", "en"):
        words.save(str(tmp_path / f"dict.{language}.txt"))
    name = "talkconv" if layout == "talk" else "dynamicconv"
    source = checkpoint(tmp_path / "ours.pt", build(name, task(words), **SMALL), settings(name, **SMALL))
    content = load(source)
    content["cfg"]["task"] |= {"_name": "translation_fast", "data": str(tmp_path), "target_lang": "en"}
    content["cfg"]["task"] |= {"generation_dtype": "int8", "generation_shortlist": "lists"}
    torch.save(content, source)
    assert run(source, tmp_path / "theirs.pt", "--to", layout) == 0
    assert "the task translation_fast becomes translation" in capsys.readouterr().out
    assert "generation_dtype" not in str(load(tmp_path / "theirs.pt")["cfg" if layout != "talk" else "args"])
    with mock.patch.dict(tasks.TASK_REGISTRY), mock.patch.dict(tasks.TASK_DATACLASS_REGISTRY):
        for registry in (tasks.TASK_REGISTRY, tasks.TASK_DATACLASS_REGISTRY):
            del registry["translation_fast"]
        _, _, found = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "theirs.pt")])
    assert type(found) is tasks.TASK_REGISTRY["translation"]
