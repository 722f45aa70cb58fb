"""Checkpoints of strangers: those that would run a command when they are loaded, and those of other dictionaries.

A command by pickle, as os.system in the place of a number; and by a setting that fairseq hands to Python's eval when it
builds the model, which torch's safe loading does not see. Every tool and command refuses it, and it has not been run.
"""

import contextlib
import importlib
import shutil
import sys
import traceback
from argparse import Namespace

import pytest
import torch

pytest.importorskip("fairseq")

from lightconv_plugin.checkpoints.loading import safe_torch_load
from lightconv_plugin.cli import main
from lightconv_plugin.errors import InputError
from tests import ROOT
from tests.checkpoints.export_damage import RunsACommand
from tests.fairseq_cli import RECIPE, SIZE, USER_DIR
from tests.generation import translation_toys as toys


def command_of(marker):
    """What a setting would say to run the same."""
    return f"__import__('os').system({f'touch {marker}'!r})"


@pytest.fixture(scope="module")
def world(toy_data, tmp_path_factory):
    """(data-bin, a good checkpoint of a DynamicConv for it)."""
    folder = tmp_path_factory.mktemp("hostile")
    data = shutil.copytree(toy_data, folder / "data-bin")
    shutil.copy(data / "dict.en.txt", data / "dict.txt")  # for a language model
    return data, toys.make_checkpoint(folder / "good.pt", data)


def with_a_command(world, tmp_path, form="zip"):
    """(a checkpoint with os.system in its pickle, the file that shows that it ran)."""
    state = torch.load(world[1], weights_only=False)
    marker, path = tmp_path / "executed", tmp_path / "run" / "checkpoint1.pt"
    path.parent.mkdir()
    state["extra_state"]["epoch"] = RunsACommand(marker)
    if form == "plain-pickle":
        import pickle

        path.write_bytes(pickle.dumps(state, protocol=2))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip")
    return path, marker


def of_fconv(marker, task):
    sizes = dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim", "decoder_out_embed_dim"), 16)
    others = dict.fromkeys(("encoder_embed_path", "decoder_embed_path", "share_input_output_embed"))
    others |= {"dropout": 0.1, "max_source_positions": 64, "max_target_positions": 64, "decoder_attention": "True"}
    return Namespace(arch="fconv", encoder_layers=command_of(marker), decoder_layers="[]", **sizes, **others, **task)


def of_transformer(marker, task):
    return Namespace(arch="transformer", adaptive_softmax_cutoff=command_of(marker), **toys.SIZE, **task)


def set_to_run(world, tmp_path, settings=of_transformer):
    """The same with the command in a setting: a Namespace may have a text wherever somebody likes."""
    state = torch.load(world[1], weights_only=False)
    marker, path = tmp_path / "executed", tmp_path / "run" / "checkpoint1.pt"
    path.parent.mkdir()
    task = {"task": "translation", "data": str(world[0]), "source_lang": "de", "target_lang": "en"}
    task |= {"left_pad_source": True, "left_pad_target": False, "eval_bleu": False}
    state |= {"args": settings(marker, task), "cfg": None}
    torch.save(state, path)
    safe_torch_load(path)  # there is nothing in it that torch would refuse
    return path, marker


@pytest.mark.parametrize("form", ["zip", "legacy", "plain-pickle"])
def test_the_files_do_what_they_are_said_to_do(form, world, tmp_path):
    path, marker = with_a_command(world, tmp_path, form)
    with contextlib.suppress(RuntimeError):  # of a plain pickle, once it has been run: it is no file of torch's
        torch.load(path, weights_only=False)
    assert marker.exists()
    marker.unlink()
    eval(command_of(marker))
    assert marker.exists()


def lightconv(*arguments):
    return main.main([str(argument) for argument in arguments])


def fairseq(monkeypatch, command, *arguments):
    """A command of fairseq in this process, as its own entry point starts it."""
    monkeypatch.setattr(sys, "argv", [command, *map(str, arguments)])
    importlib.import_module(f"fairseq_cli.{command}").cli_main()


PLUGIN = ("--user-dir", USER_DIR)
TRANSLATION = ("--task", "translation", "-s", "de", "-t", "en")
TRAINING = ("--arch", "dynamicconv", *SIZE, *RECIPE, "--max-update", "1", "--no-save")
# What reads a checkpoint, as (name, a function of the fixture's values); each must end in an error.
TOOLS = {
    "average": lambda m, data, path: lightconv("average", "--inputs", path, "--output", path.parent / "a.pt"),
    "average of a folder": lambda m, data, path: lightconv(
        "average", "--inputs", path.parent, "--num-last-checkpoints", 1, "--output", path.parent / "a.pt"
    ),
    "tune": lambda m, data, path: lightconv("tune", data, path.parent, "--average", 1, "--lenpen", 1),
    "convert": lambda m, data, path: lightconv("convert", path, path.parent / "c.pt", "--to", "fairseq"),
    "export": lambda m, data, path: lightconv("export", path, path.parent / "e.pt"),
    "translate": lambda m, data, path: lightconv("translate", path, "--data", data, "--input", ROOT / "setup.py"),
    "score": lambda m, data, path: lightconv(
        *("score", "--sys", data.parent / "test.en", "--ref", data.parent / "test.en", "--lang", "en"),
        *("--checkpoint", path),
    ),
    "fairseq-generate": lambda m, data, path: fairseq(m, "generate", data, "--path", path, "--cpu", *PLUGIN),
    "fairseq-interactive": lambda m, data, path: fairseq(
        m, "interactive", data, "--path", path, "--cpu", "--input", data.parent / "test.de", *PLUGIN
    ),
    "fairseq-validate": lambda m, data, path: fairseq(
        m, "validate", data, "--path", path, "--cpu", *TRANSLATION, "--max-tokens", 99, *PLUGIN
    ),
    "fairseq-eval-lm": lambda m, data, path: fairseq(
        m, "eval_lm", data, "--path", path, "--cpu", "--task", "language_modeling", *PLUGIN
    ),
    "fairseq-train --restore-file": lambda m, data, path: fairseq(
        m, "train", data, *TRAINING, *PLUGIN, "--restore-file", path, "--save-dir", path.parent / "new"
    ),
    "fairseq-train --finetune-from-model": lambda m, data, path: fairseq(
        m, "train", data, *TRAINING, *PLUGIN, "--finetune-from-model", path, "--save-dir", path.parent / "new"
    ),
}

# The other forms with each of the two functions that load: ours, and the one that fairseq's commands share.
FORMS = [(tool, "zip") for tool in TOOLS]
FORMS += [(tool, form) for tool in ("convert", "fairseq-generate") for form in ("legacy", "plain-pickle")]


@pytest.mark.parametrize("tool, form", FORMS)
def test_a_pickle_that_runs_a_command_is_refused(tool, form, world, tmp_path, monkeypatch, capsys):
    path, marker = with_a_command(world, tmp_path, form)
    try:
        status = TOOLS[tool](monkeypatch, world[0], path)
    except (Exception, SystemExit) as error:
        status = error
    assert not marker.exists(), "the command was run"
    if isinstance(status, int):
        said = capsys.readouterr().err
        assert status == 2 and str(path) in said and (form == "plain-pickle" or "posix.system" in said)
    else:
        text = f"{type(status).__name__} {status} {capsys.readouterr().err}"
        assert "Weights only load failed" in text or "UnpicklingError" in text, text
    assert sorted(p.name for p in path.parent.glob("*.pt")) == ["checkpoint1.pt"]


def test_a_report_says_that_it_does_not_load_it(world, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: report)")
    path, marker = with_a_command(world, tmp_path)
    assert lightconv("report", path.parent, "-o", path.parent / "page.html") in (0, 2)
    page = path.parent / "page.html"
    assert "The checkpoint cannot be loaded" in (page.read_text() if page.exists() else capsys.readouterr().err)
    assert not marker.exists()


def test_what_recipes_read_themselves_is_loaded_safely(world, tmp_path):
    from lightconv_plugin.recipes.reproduce.training import head

    path, marker = with_a_command(world, tmp_path)
    with pytest.raises(InputError, match=r"checkpoint1\.pt"):
        head(path)
    assert lightconv("perplexity", world[0], path) == 2
    assert not marker.exists()


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    "tool, settings",
    [
        *(
            (tool, of_transformer)
            for tool in ("translate", "fairseq-generate", "fairseq-interactive", "fairseq-validate")
        ),
        *((tool, of_fconv) for tool in ("translate", "fairseq-generate")),
    ],
)
def test_a_setting_that_runs_a_command_is_refused(tool, settings, world, tmp_path, monkeypatch, capsys):
    path, marker = set_to_run(world, tmp_path, settings)
    try:
        status = TOOLS[tool](monkeypatch, world[0], path)
    except (Exception, SystemExit) as error:
        status = error
    assert not marker.exists(), "the command was run"
    said = f"{status} {capsys.readouterr().err}"
    assert status == 2 or not isinstance(status, int)
    assert "is refused" in said and "is code" in said


def test_with_pythons_own_eval_the_setting_does_run(world, tmp_path, monkeypatch):
    """settings_without_eval is needed: fairseq by itself runs the command, although it loads the file safely."""
    from fairseq import checkpoint_utils, utils

    path, marker = set_to_run(world, tmp_path)
    with pytest.raises(ValueError, match="is code"):
        checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert not marker.exists()
    monkeypatch.setattr(utils, "eval", eval)
    with contextlib.suppress(Exception):  # whatever comes of the command's status as a list of numbers
        checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert marker.exists()


# ------------------------------------------------------------------------------------------------ dictionaries


@pytest.mark.parametrize(
    "tool, lang, side",
    [
        ("fairseq-generate", "de", "encoder"),
        ("fairseq-generate", "en", "decoder"),
        ("fairseq-interactive", "de", "encoder"),
        ("fairseq-validate", "en", "decoder"),
        ("fairseq-train --restore-file", "de", "encoder"),
        ("tune", "en", "decoder"),
    ],
)
def test_dictionaries_of_another_training_are_named(tool, lang, side, world, tmp_path, monkeypatch, capsys):
    """Before anything is translated or trained. (translate: tests/generation/test_translator_finding.py.)"""
    data = shutil.copytree(world[0], tmp_path / "data-bin")
    path = tmp_path / "run/checkpoint1.pt"
    path.parent.mkdir()
    shutil.copy(world[1], path)
    with (data / f"dict.{lang}.txt").open("a") as dictionary:
        dictionary.write("neu 1\n")
    with pytest.raises(Exception) if tool != "tune" else contextlib.nullcontext() as caught:
        assert TOOLS[tool](monkeypatch, data, path) == 2
    error = caught and caught.value
    said = capsys.readouterr().err + "".join(traceback.format_exception(error) if error else [])
    assert f"embeddings in its {side}, but its dictionary here has" in said
