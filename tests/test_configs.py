"""Every configuration is one that fairseq-hydra-train takes: known groups, known options, values of the right type."""

from argparse import ArgumentParser
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq import models
from fairseq.dataclass.configs import FairseqConfig
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY

import lightconv_plugin.models  # noqa: F401 (registers the architectures)

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
PLAIN_GROUPS = ("common", "dataset", "optimization", "checkpoint", "distributed_training", "generation")


def schema(group: str, name: str | None):
    """The dataclass that fairseq reads `group` with when its _name is `name`."""
    if name is None:
        return FairseqConfig.__dataclass_fields__[group].type
    if group == "model":
        return models.MODEL_DATACLASS_REGISTRY[name]
    if group == "task":
        return TASK_DATACLASS_REGISTRY[name]
    return REGISTRIES[group]["dataclass_registry"][name]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
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
    used = "scripts/demo.sh" if config.parent.name == "demo" else f"scripts/train.sh {config.relative_to(ROOT)}"
    assert used in text, f"its comment must say how to run it: {used}"
