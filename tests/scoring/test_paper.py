"""The papers' numbers: which of them stand beside which run, and that nothing unverified is among them."""

import pytest

from lightconv_plugin.mixers import MIXERS, system_of
from lightconv_plugin.report.scores import MEASURES
from lightconv_plugin.scoring import paper

BIG = {"encoder_embed_dim": 1024, "encoder_glu": False, "decoder_glu": False, "weight_dropout": 0.0}
KERNELS = {"encoder_kernel_size_list": [3, 7, 15, 31], "decoder_kernel_size_list": [3, 7, 15, 31]}
THREE = {"encoder_kernel_size_list": [3], "decoder_kernel_size_list": [3]}


def test_every_fact_is_of_a_task_and_a_measure_that_exist_and_names_its_source():
    tasks = {task.name for task in paper.TASKS}
    seen = set()
    for fact in paper.FACTS:
        assert fact.task in tasks and fact.source and set(fact.values) <= set(MEASURES)
        assert fact.system.removesuffix(", deep") in {mixer.system for mixer in MIXERS.values()}
        assert (fact.task, fact.system) not in seen
        seen.add((fact.task, fact.system))


@pytest.mark.parametrize("value", ["23.8", "26.73", "39.26", "41.02"])
def test_figures_that_nobody_has_read_in_a_source_are_not_there(value):
    assert all(value not in fact.values.values() for fact in paper.FACTS)


@pytest.mark.parametrize(
    "data, pair, task",
    [
        ("data/wmt16_en_de/data-bin", ("en", "de"), "WMT16 En-De"),
        ("data/wmt14_en_de/data-bin", ("en", "de"), None),  # other training text than the papers'
        ("data-bin/wmt14.en-fr", ("en", "fr"), "WMT14 En-Fr"),
        ("/corpora/IWSLT14.tokenized.de-en", ("de", "en"), "IWSLT14 De-En"),
        ("data-bin/iwslt14.tokenized.de-en", ("en", "de"), None),
        ("data-bin/wikitext-103", None, "WikiText-103"),
        ("data/wikitext2/data-bin", None, None),
        ("data/cnndm/data-bin", ("article", "summary"), "CNN-DailyMail"),
        ("data/multi30k_en_de/data-bin", ("en", "de"), None),
        ("", None, None),
    ],
)
def test_a_task_is_known_by_its_data_and_its_direction(data, pair, task):
    found = paper.find_task(data, pair)
    assert (found and found.name) == task


def test_a_number_is_of_the_system_and_mixtures_have_none():
    task = paper.find_task("iwslt14", ("de", "en"))
    assert paper.find_fact(task, system_of(["dynamic"] * 13)).values == {"bleu": "35.2"}
    assert paper.find_fact(task, system_of(["talk"] * 13)).values == {"bleu": "35.5"}
    summaries = paper.find_task("data/cnndm/data-bin", None)
    for layers, rouge1 in ((7 + 6, "40.03"), (10 + 10, "40.59")):
        assert paper.find_fact(summaries, system_of(["talk"] * layers), layers).values["rouge1"] == rouge1
    assert paper.find_fact(summaries, "DynamicConv", 20).values["rouge1"] == "39.84"
    for mixers in (["dynamic", "attention"], ["depthwise"], []):
        assert paper.find_fact(task, system_of(mixers)) is None
    assert paper.find_fact(None, "DynamicConv") is None
    assert paper.find_fact(paper.find_task("gbw", None), "self-attention") is None


@pytest.mark.parametrize(
    "kind, options, row",
    [
        ("attention", {}, "self-attention"),
        ("window_attention", KERNELS, "self-attention, windows"),
        ("conv", THREE, "CNN"),
        ("depthwise", THREE, "depthwise"),
        ("depthwise", KERNELS, "+ increasing kernel"),
        ("depthwise", {**KERNELS, "weight_dropout": 0.1}, "+ DropConnect"),
        ("depthwise", {**THREE, "weight_dropout": 0.1}, None),
        ("lightweight", {**KERNELS, "weight_softmax": False}, "+ weight sharing"),
        ("lightweight", {**KERNELS, "weight_normalization": "none"}, "+ weight sharing"),
        ("lightweight", KERNELS, "+ softmax (LightConv)"),
        ("dynamic", KERNELS, "+ dynamic (DynamicConv)"),
        ("dynamic", {**KERNELS, "weight_softmax": False}, "DynamicConv without softmax"),
        ("dynamic", {**KERNELS, "encoder_glu": True}, None),
        ("dynamic", {**KERNELS, "decoder_glu": True}, None),
        ("dynamic", {**KERNELS, "encoder_embed_dim": 512}, None),
        ("dynamic", {**KERNELS, "dynamic_residual": True}, None),
        ("dynamic", {**KERNELS, "encoder_dynamic_rank": [0], "decoder_dynamic_rank": [32]}, None),
        ("dynamic", {**KERNELS, "encoder_dynamic_rank": [0], "decoder_dynamic_rank": [0]}, "+ dynamic (DynamicConv)"),
        ("talk", KERNELS, None),
        ("conv", KERNELS, None),
    ],
)
def test_a_row_of_the_ablation_is_known_by_its_options(kind, options, row):
    assert paper.ablation_row([kind] * 13, {**BIG, **options}) == row
    assert row is None or row in paper.ABLATION


def test_every_row_of_the_ablation_can_be_reached():
    # By the parametrisation above; a mixture is no row.
    assert paper.ablation_row(["dynamic", "attention"], {**BIG, **KERNELS}) is None
    assert len(paper.ABLATION) == 10
