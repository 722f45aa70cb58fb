"""Every configuration is one that fairseq-hydra-train takes: known groups, known options, values of the right type."""

import json
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
from tests import ROOT, programs
from tests.models.toys import dictionary
from tests.warm_python import warm_python

CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.name != "protocol.yaml")
PLAIN_GROUPS = ("common", "dataset", "optimization", "checkpoint", "distributed_training", "generation")
SYSTEMS = ("dynamicconv", "lightweightconv", "talkconv", "transformer")
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


# What fairseq-hydra-train makes of each configuration: its model's class, parameters, and longest source and target.
BUILD = """
import json, pathlib, sys, torch
from argparse import Namespace
from types import SimpleNamespace
from fairseq import models, utils
from fairseq.dataclass.initialize import add_defaults, hydra_init
from hydra.experimental import compose, initialize_config_dir
utils.import_user_module(Namespace(user_dir=sys.argv[1]))
class Entries:
    def __init__(self, size): self.size = size
    def __len__(self): return self.size
    def pad(self): return 1
built = {}
for path, sizes in json.load(sys.stdin).items():
    folder, name = pathlib.Path(path).parent, pathlib.Path(path).stem
    hydra_init(name)
    with initialize_config_dir(str(folder)):
        config = compose(name)
    add_defaults(config)
    dictionaries = [Entries(size) for size in sizes]
    task = SimpleNamespace(source_dictionary=dictionaries[0], target_dictionary=dictionaries[-1])
    with torch.device("meta"):
        model = models.build_model(config.model, task)
    count = sum(p.numel() for p in model.parameters())
    built[path] = type(model).__name__, count, model.max_positions()
print(json.dumps(built))
"""
TOTAL = re.compile(r"^#.* total +([\d,]+)$", re.MULTILINE)
# These are another configuration's models but for a few options, or miniatures.
UNCOUNTED = {"ablation", "hybrid", "kernels", "bpe_dropout", "rdrop", "simcut", "demo", "smoke"}
CLAIMING = [path for path in CONFIGS if not UNCOUNTED.intersection(path.parts)]
OF_DYNAMICCONV = dict.fromkeys(("attention", "gated", "hybrid"), "dynamicconv")


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.fixture(scope="module")
def built():
    """What BUILD prints, with dictionaries of the sizes for which a configuration adds up its parameters."""
    sizes = {}
    for path in CLAIMING:
        text = path.read_text(encoding="utf-8")
        sizes[str(path)] = [*map(number, MATRIX.findall(text) or re.findall(r"the ([\d,]+) entries", text))]
    done = programs.run(warm_python(), "-c", BUILD, ROOT / "lightconv_plugin", input=json.dumps(sizes))
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("config", CLAIMING, ids=name_of)
def test_a_model_has_the_parameters_that_its_configuration_adds_up(config, built):
    """With every option applied, to fairseq's own argparse-based Transformer too."""
    text = config.read_text(encoding="utf-8")
    total, content = TOTAL.search(text), yaml.safe_load(text)
    assert total, "it does not add up its parameters: # … total N"
    model, parameters, positions = built[str(config)]
    assert model == models.ARCH_MODEL_REGISTRY[content["model"]["_name"]].__name__
    system = config.stem.split("_")[0]
    assert system not in {*SYSTEMS, *OF_DYNAMICCONV} or model.lower().startswith(OF_DYNAMICCONV.get(system, system))
    assert parameters == number(total[1])
    terms = re.findall(r"^# .* = +([\d,]+)$", text[text.index("# Parameters") : total.start()], re.MULTILINE)
    assert sum(map(number, terms)) == parameters
    if content["task"]["_name"] == "language_modeling":
        assert positions == content["task"]["tokens_per_sample"]
    else:
        assert positions == [content["model"].get(f"max_{side}_positions", 1024) for side in ("source", "target")]


@pytest.mark.parametrize("folder", ["multi30k_en_de", "demo"])
def test_fairseqs_transformer_is_given_all_its_defaults(folder):
    """Under hydra, fairseq 0.12.2 reads a missing option as None: it then builds another model, or fails late."""
    base_architecture(defaults := Namespace())
    given = {name for name, value in vars(defaults).items() if value is not None and value is not False}
    config = yaml.safe_load((ROOT / f"configs/{folder}/transformer.yaml").read_text(encoding="utf-8"))
    needed = {"encoder_embed_dim", "decoder_input_dim", "activation_fn", "quant_noise_pq_block_size"}
    assert needed <= given <= set(config["model"])
