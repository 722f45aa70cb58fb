"""docs/migration.md and docs/faq.md: what they say of names, options, settings and results is so."""

import argparse
import dataclasses
import re

import pytest
import torch

from lightconv_plugin.released.models import MODELS
from tests import ROOT
from tests.docs.pages import blocks

MIGRATION, FAQ = (ROOT / "docs" / f"{name}.md" for name in ("migration", "faq"))


def rows(page, heading):
    """The cells of the table below a heading, without its first two lines."""
    text = page.read_text(encoding="utf-8").split(f"# {heading}\n")[1].split("\n#")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def names(cell):
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def architectures():
    pytest.importorskip("fairseq")
    from lightconv_plugin.models import architectures

    return architectures


def test_upstreams_architectures_are_the_models_beside_them(architectures):
    pairs = [pair for row in rows(MIGRATION, "Models")[:-1] for pair in zip(*map(names, row), strict=True)]
    assert len(pairs) == 7
    for upstream, ours in pairs:
        theirs, mine = (dataclasses.asdict(getattr(architectures, config_of(name))()) for name in (upstream, ours))
        assert theirs == mine, (upstream, ours)


def config_of(architecture):
    return "".join(part.capitalize() for part in architecture.split("_")) + "Config"


def test_the_exception_is_one(architectures):
    theirs, mine = (getattr(architectures, config_of(f"{family}_lm_gbw"))() for family in ("lightconv", "dynamicconv"))
    theirs, mine = dataclasses.asdict(theirs), dataclasses.asdict(mine)
    assert {name for name in theirs if theirs[name] != mine[name]} == {"attention_dropout"}
    assert (theirs["attention_dropout"], mine["attention_dropout"]) == (0.0, 0.1)


@pytest.mark.parametrize("module, model", [("lightconv", "LightConvModel"), ("lightconv_lm", "LightConvLanguageModel")])
def test_every_option_of_upstream_exists(architectures, module, model):
    import importlib

    from fairseq.models import MODEL_REGISTRY

    def options(add_args):
        parser = argparse.ArgumentParser(add_help=False)
        add_args(parser)
        return {word for action in parser._actions for word in action.option_strings}

    upstream = options(getattr(importlib.import_module(f"fairseq.models.{module}"), model).add_args)
    assert len(upstream) > 20 and not upstream - options(MODEL_REGISTRY[module].add_args)


def test_beam_and_length_penalty_are_the_released_models():
    table = rows(FAQ, "Which beam and length penalty belong to which test set?")
    shown = {}
    for test, theirs, talk in table:
        task = test.split(" (")[0]
        for families, cell in ((("LightConv", "DynamicConv"), theirs), (("TaLK",), talk)):
            numbers = re.findall(r"(\d+), ([\d.]+)", cell)
            shown |= {(task, family): (int(n), float(x)) for n, x in numbers for family in families}
    assert shown == {(model.task.name, model.system): (model.beam, model.lenpen) for model in MODELS.values()}


def test_decoding_in_chunks():
    """The page's code runs; and fairseq's own module has the bug, by the same calls."""
    (block,) = [block for block in blocks(FAQ, "python") if "conv.step" in block.text]
    found = {}
    exec(compile(block.text, str(block), "exec"), found)
    pytest.importorskip("fairseq")
    from fairseq.modules.lightweight_convolution import LightweightConv1dTBC

    conv, state = LightweightConv1dTBC(8, 3, 2, num_heads=2).eval(), {}
    chunks = torch.cat([conv(chunk, incremental_state=state) for chunk in found["x"].split(10)])
    assert not torch.allclose(chunks, conv(found["x"]))
