"""Every configuration is one that fairseq-hydra-train takes: known groups, known options, values of the right type."""

import re
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from omegaconf import OmegaConf

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq import models
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models.transformer import TransformerModel, base_architecture
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY

import lightconv_plugin.models  # noqa: F401 (registers the architectures)
from lightconv_plugin.recipes.data import wmt, wmt_sources
from lightconv_plugin.recipes.reproduce.protocol import flatten, read_protocol, settings_of
from lightconv_plugin.recipes.reproduce.training import differences
from tests import ROOT
from tests.models.toys import dictionary

CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.name != "protocol.yaml")
PLAIN_GROUPS = ("common", "dataset", "optimization", "checkpoint", "distributed_training", "generation")
SYSTEMS = ("dynamicconv", "lightweightconv", "talkconv", "transformer")
TRANSLATION = [
    path for path in CONFIGS if path.parent.parent.name == "configs" or path.parent.name in ("small", "student")
]
TRANSLATION = [
    path for path in TRANSLATION if re.match("(multi30k|iwslt|tatoeba|wmt|small|student|parallel)", path.parent.name)
]
MATRIX = re.compile(r"^#   .*?(?:embeddings|projection)\b.*? ([\d,]+)·\d+ ", re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "configs"))


def schema(group: str, name: str | None):
    """The dataclass that fairseq reads `group` with when its _name is `name`."""
    if name is None:
        return FairseqConfig.__dataclass_fields__[group].type
    if group == "model":
        return models.MODEL_DATACLASS_REGISTRY[name]
    if group == "task":
        return TASK_DATACLASS_REGISTRY[name]
    return REGISTRIES[group]["dataclass_registry"][name]


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_fairseq_knows_every_option(config):
    text = config.read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n"), "hydra merges it at the top only with this first line"
    content = yaml.safe_load(text)
    for group, options in content.items():
        name = None if group in PLAIN_GROUPS else options.pop("_name")
        if (group, name) == ("model", "transformer"):  # its options are of the older kind, argparse's
            parser = ArgumentParser()
            models.MODEL_REGISTRY[name].add_args(parser)
            assert set(options) <= {*vars(parser.parse_args([])), "decoder_input_dim", "decoder_output_dim"}
        else:
            OmegaConf.merge(OmegaConf.structured(schema(group, name)), OmegaConf.create(options))
    save_dir = Path(content["checkpoint"]["save_dir"])
    assert save_dir.is_relative_to(Path("runs", config.relative_to(ROOT / "configs").parent))
    assert save_dir.name == config.stem
    others = {"demo": "scripts/demo.sh", "smoke": "scripts/reproduce.sh --smoke"}
    used = others.get(config.parent.name, f"scripts/train.sh {config.relative_to(ROOT)}")
    assert used in text, f"its comment must say how to run it: {used}"


def test_a_task_of_a_paper_has_all_four_systems():
    tasks = {path.parent for path in (ROOT / "configs").glob("*/protocol.yaml")}
    tasks -= {ROOT / "configs/smoke", ROOT / "configs/tatoeba_de_en"}  # no paper's: one system, and two
    wanted = {task / f"{system}.yaml" for task in tasks for system in SYSTEMS}
    assert len(tasks) == 12 and wanted <= set(CONFIGS)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("wmt*/protocol.yaml")), ids=name_of)
def test_compounds_are_split_once(path):
    """By the tokeniser of the raw corpora, or by the scorer; Google's WMT16 text is not tokenised here and has a-b."""
    protocol = read_protocol(path.parent)
    pair = wmt_sources.TASKS.get(protocol.prepare)
    tokens = wmt.recipe(pair.tgt).tokenise()("a well-known x-y") if pair else "a well-known x-y"
    [scored] = replace(protocol.measuring(), detok="none").measures([tokens], [tokens])["bleu_tok"].references
    assert scored.split() in (
        "a well @-@ known x @-@ y".split(),
        "a well ##AT##-##AT## known x ##AT##-##AT## y".split(),
    )
    assert protocol.score.compound_split == (pair is None)
    assert ("compounds split by the tokeniser" in protocol.measure) == (pair is not None)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_the_last_update_is_saved_where_updates_are(config):
    """Tuning averages what is saved every so many updates: the end of the training must be among it."""
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    if every := settings["checkpoint"].get("save_interval_updates"):
        assert settings["optimization"]["max_update"] % every == 0


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_training_by_hand_is_taken_over(config):
    """What fairseq stores of it has no setting that a reproduction would take for another one's."""
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    groups = {}
    for group in {*PLAIN_GROUPS, *content}:
        options, name = content.get(group, {}), content.get(group, {}).get("_name")
        if name == "transformer":  # its options are of the older kind, and complete once it is built
            words = dictionary(10)
            with torch.device("meta"):
                arguments = Namespace(**options)
                TransformerModel.build_model(
                    arguments, SimpleNamespace(source_dictionary=words, target_dictionary=words)
                )
            known = OmegaConf.create(vars(arguments))
        else:
            known = OmegaConf.structured(schema(group, name))
        groups[group] = OmegaConf.merge(known, OmegaConf.create(options))
    stored = OmegaConf.to_container(OmegaConf.create(groups), resolve=True, enum_to_str=True)
    assert differences(settings_of(content, []), flatten(stored)) == []


@pytest.mark.parametrize("config", TRANSLATION, ids=name_of)
def test_a_model_has_the_parameters_that_its_configuration_adds_up(config):
    text = config.read_text(encoding="utf-8")
    claimed = re.search(r"^#.* total +([\d,]+)$", text, re.MULTILINE)[1]
    sizes = [int(size.replace(",", "")) for size in MATRIX.findall(text)]
    options = yaml.safe_load(text)["model"]
    source = dictionary(sizes[0])
    target = source if options.get("share_all_embeddings") else dictionary(sizes[1])
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target)
    name = options.pop("_name")
    with torch.device("meta"):
        if name == "transformer":
            arguments = Namespace(**options, max_source_positions=1024, max_target_positions=1024)
            base_architecture(arguments)
            model = TransformerModel.build_model(arguments, task)
        else:
            cfg = OmegaConf.merge(OmegaConf.structured(schema("model", name)), OmegaConf.create(options))
            model = models.MODEL_REGISTRY[name].build_model(cfg, task)
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,}" == claimed
