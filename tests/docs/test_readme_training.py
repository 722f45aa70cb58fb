"""README.md's fairseq-train command is the training of configs/iwslt14_de_en/dynamicconv.yaml, and it trains."""

import re

import pytest
import torch
import yaml

pytest.importorskip("fairseq")

from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from lightconv_plugin.models.architectures import DynamicconvIwsltDeEnModel
from tests import ROOT, fairseq_cli
from tests.docs.pages import blocks, commands_of
from tests.models.toys import dictionary, task

CONFIG = ROOT / "configs/iwslt14_de_en/dynamicconv.yaml"
# The folder of checkpoints is another one, and fairseq finds the languages by itself.
ELSEWHERE = {"checkpoint.save_dir", "task.source_lang", "task.target_lang"}


@pytest.fixture(scope="module")
def words():
    """The arguments of the command."""
    commands = [command for block in blocks(ROOT / "README.md", "sh") for command in commands_of(block)]
    (command,) = [command for command in commands if command.words[0] == "fairseq-train"]
    assert command.words[1] == "data/iwslt14_de_en/data-bin"
    return list(command.words[1:])


@pytest.fixture(scope="module")
def parsed(words):
    """fairseq's configuration from the command."""
    words = [str(fairseq_cli.USER_DIR) if word == "lightconv_plugin" else word for word in words]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), words))


def test_it_has_the_recipes_settings(parsed):
    settings = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    differ = {}
    for group, values in settings.items():
        for name, value in values.items():
            typed = OmegaConf.to_container(parsed[group]).get(name, "missing")
            if f"{group}.{name}" not in ELSEWHERE and typed != value:
                differ[f"{group}.{name}"] = (typed, value)
    assert not differ, "on the page, and in the recipe"


def test_what_the_command_sets_is_in_the_recipe(words, parsed):
    """Nothing is set besides: an option that the recipe lacks would make it another training."""
    named = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    known = {name for values in named.values() for name in values}
    typed = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    groups = {"arch", "criterion", "optimizer", "lr_scheduler"}  # `_name` there
    assert typed - known - groups == {"user_dir"}


def test_it_builds_the_recipes_model(parsed):
    claimed = re.search(r"^#.* total +([\d,]+)$", CONFIG.read_text(encoding="utf-8"), re.MULTILINE)[1]
    pair = task(dictionary(8848), dictionary(6632))
    with torch.device("meta"):
        model = DynamicconvIwsltDeEnModel.build_model(parsed.model, pair)
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,}" == claimed


def test_it_trains(words, toy_data, tmp_path):
    """The command itself, on a corpus of a few dozen lines and for two updates."""
    arguments = [str(toy_data), *words[1:], "--save-dir", tmp_path, "--max-update", 2, "--cpu", "--log-interval", 1]
    log = fairseq_cli.run("train", *arguments, "--num-workers", 0, "--log-format", "json")
    assert len(fairseq_cli.logged(log)) == 2 and (tmp_path / "checkpoint_last.pt").is_file()
