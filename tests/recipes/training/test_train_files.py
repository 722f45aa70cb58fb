"""Files and folders of a training: relative paths, what fairseq and hydra get of them."""

import pytest
import yaml

from lightconv_plugin.paths import package_dir
from lightconv_plugin.recipes.training.launch import hydra_config
from lightconv_plugin.recipes.training.overrides import quote
from lightconv_plugin.recipes.training.plan import (
    file_paths,
    read_config,
    tensorboard,
    user_dir,
)
from lightconv_plugin.recipes.training.worker import resume_own


def test_files_of_overrides_and_of_the_configuration(tmp_path):
    """fairseq changes to save_dir/hydra: there it finds no relative path, and trains from scratch without a word."""
    for name in ("root/conf.pt", "here/given.pt", "here/vectors, é.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    places = tmp_path / "root", tmp_path / "here"
    config = {"checkpoint": {"restore_file": "conf.pt"}, "model": {"encoder_embed_path": None}}
    root, here = (f"{place}" for place in places)
    assert file_paths(config, ["common.seed=2"], *places) == [
        "common.seed=2",
        f"checkpoint.restore_file='{root}/conf.pt'",
    ]
    given = ["checkpoint.restore_file=given.pt", "+model.decoder_embed_path='vectors, é.txt'"]
    assert file_paths(config, given, *places) == [
        f"checkpoint.restore_file='{here}/given.pt'",
        f"+model.decoder_embed_path='{here}/vectors, é.txt'",
    ]
    kept = [
        "checkpoint.restore_file=checkpoint_last.pt",  # fairseq's default: in save_dir
        "checkpoint.finetune_from_model=null",
        "model.encoder_embed_path=s3://place/vectors",
        "model.decoder_embed_path=${task.data}/vectors",
    ]
    assert file_paths(config, kept, *places) == kept


@pytest.mark.parametrize(
    "key",
    [
        "checkpoint.restore_file",
        "checkpoint.finetune_from_model",
        "checkpoint.continue_once",
        "ema.ema_seed_model",
        "model.decoder_embed_path",
        "task.generation_shortlist",
    ],
)
def test_a_file_that_does_not_exist_is_named(key, tmp_path):
    group, option = key.split(".")
    with pytest.raises(ValueError, match=rf"{key}: there is no file {tmp_path}/here/gone\.pt"):
        file_paths({}, [f"{key}=gone.pt"], tmp_path / "root", tmp_path / "here")
    with pytest.raises(ValueError, match=rf"{key}: there is no file {tmp_path}/root/gone\.pt"):
        file_paths({group: {option: "gone.pt"}}, [], tmp_path / "root", tmp_path / "here")


def test_a_user_dir_of_the_configuration_or_an_override(tmp_path):
    for name in ("root/mine", "here/mine"):
        (tmp_path / name).mkdir(parents=True)
    places = tmp_path / "root", tmp_path / "here"
    of_config = {"common": {"user_dir": "mine"}}
    assert user_dir({}, ["common.seed=2"], *places) == ["common.seed=2", f"common.user_dir='{package_dir()}'"]
    assert user_dir(of_config, [], *places) == [f"common.user_dir='{places[0]}/mine'"]
    assert user_dir(of_config, ["common.user_dir=mine"], *places) == [f"common.user_dir='{places[1]}/mine'"]
    with pytest.raises(ValueError, match=rf"common\.user_dir: there is no folder {tmp_path}/here/gone"):
        user_dir({}, ["common.user_dir=gone"], *places)


def test_a_training_resumes_from_its_own_checkpoint_instead_of_restore_file(tmp_path, capsys):
    """And its own configuration, which is stored in the next checkpoints, still says from which one it began."""
    from omegaconf import OmegaConf

    given = {"restore_file": "/elsewhere/a.pt", "save_dir": str(tmp_path), "reset_optimizer": True}
    checkpoint = OmegaConf.create({"checkpoint": given | {"reset_dataloader": True, "reset_meters": False}}).checkpoint
    assert resume_own(checkpoint) == checkpoint
    (tmp_path / "checkpoint_last.pt").touch()
    loading = resume_own(checkpoint)
    assert loading.restore_file == "checkpoint_last.pt"
    assert not (loading.reset_optimizer or loading.reset_dataloader)
    assert "not from checkpoint.restore_file=/elsewhere/a.pt" in capsys.readouterr().err
    assert checkpoint.restore_file == "/elsewhere/a.pt" and checkpoint.reset_optimizer
    checkpoint.restore_file = "checkpoint_last.pt"  # then it is the user's wish for this very checkpoint
    assert resume_own(checkpoint).reset_optimizer


@pytest.mark.parametrize("text", ["/plain", "/with space", "/a'b", "/a,b=c", "/{x}[y]:z", "/ümlaut"])
def test_hydra_reads_a_quoted_path_as_it_is(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert OverridesParser.create().parse_override(f"task.data={quote(text)}").value() == text


@pytest.mark.parametrize(
    "common, override, expected",
    [
        ({}, None, "'{0}/run/tensorboard'"),
        ({"tensorboard_logdir": "logs"}, None, "'{0}/root/logs'"),
        ({"tensorboard_logdir": "logs"}, "common.tensorboard_logdir=mine", "'{0}/here/mine'"),
        ({"tensorboard_logdir": None}, None, "null"),
        ({"tensorboard_logdir": "logs"}, "common.tensorboard_logdir=null", "null"),
    ],
    ids=["default", "configured", "given", "configured-off", "given-off"],
)
def test_where_tensorboard_writes(tmp_path, monkeypatch, capsys, common, override, expected):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    overrides = ["common.seed=2", *filter(None, [override])]
    places = tmp_path / "run", tmp_path / "root", tmp_path / "here"
    wanted = f"common.tensorboard_logdir={expected.format(tmp_path)}"
    assert tensorboard({"common": common}, overrides, *places) == ["common.seed=2", wanted]

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert tensorboard({"common": common}, overrides, *places) == ["common.seed=2", "common.tensorboard_logdir=null"]
    said = capsys.readouterr().err
    assert said.count("the package tensorboard is not installed") == (expected != "null")


HEAD = "# @package _global_\n"


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("model.yaml", HEAD + "model: {_name: x}\n", "NAME not one of bmuf, "),
        ("a.yml", HEAD + "model: {_name: x}\n", "a configuration must be called NAME.yaml"),
        ("a.yaml", "model: {_name: x}\n", "must begin with the line '# @package _global_'"),
        ("a.yaml", "\ufeff" + HEAD + "model: {_name: x}\n", "begins with a byte order mark (BOM)"),
        ("a.yaml", HEAD + "modle: {_name: x}\n", "a.yaml: there is no group modle, only bmuf, "),
        ("a.yaml", HEAD + "model: dynamicconv\n", "a.yaml: model must hold options, got: 'dynamicconv'"),
        ("a.yaml", HEAD + "- model\n", "must hold groups of options, as those in configs/ do, got: list"),
        ("a.yaml", "", "got: NoneType"),
        ("a.yaml", HEAD + "model: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("a.yaml", HEAD + "model: [\n", "while parsing"),
    ],
)
def test_a_file_that_is_no_configuration(name, text, said, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises((ValueError, yaml.YAMLError)) as refused:
        read_config(path)
    assert said in str(refused.value)


def test_hydra_gets_a_configuration_under_a_name_that_fairseq_does_not_have(tmp_path):
    """hydra would take fairseq's own config.yaml; files that `defaults` names are next to the configuration."""
    mine, given = tmp_path / "mine", tmp_path / "given"
    mine.mkdir()
    given.mkdir()
    for name in ("config.yaml", "base.yaml", "config_yaml.yaml"):
        (mine / name).write_text(name)
    assert hydra_config(mine / "base.yaml", given) == mine / "base.yaml" and not list(given.iterdir())
    found = hydra_config(mine / "config.yaml", given)
    assert found.stem not in ("config", "base", "config_yaml") and found.read_text() == "config.yaml"
    assert (found.parent / "base.yaml").read_text() == "base.yaml"
