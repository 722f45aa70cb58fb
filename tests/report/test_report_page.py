"""The page of `lightconv report`: all text is escaped, nothing is fetched, the papers' numbers are in their place."""

from html.parser import HTMLParser

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: report)")

from lightconv_plugin.report import loading, page, runs, scores, translate
from tests.records.test_fairseq_log import Writer
from tests.report.test_report_parts import layer_of

# ------------------------------------------------------------------------------------------------ escaping

EVIL = "<script>alert('1')</script>&\"><img src=x onerror=alert(2)>$x_1$]]>-->"


class Tags(HTMLParser):
    """Collects what a browser would take for elements, attributes and text."""

    VOID = ("meta", "br", "img", "input", "link", "hr")

    def __init__(self, text: str):
        super().__init__()
        self.open, self.names, self.attributes, self.text = [], set(), [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.names.add(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.names.add(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


def test_nothing_of_a_run_becomes_markup(tmp_path):
    log = Writer().head().inner(20, 9).valid(20, 8, subset="valid").inner(40, 7)
    (training,) = log.parse().trainings
    training.stretches[0].head.update(gpus=[EVIL], texts={EVIL: 3})
    run = runs.Run(EVIL, tmp_path, training=training, problems=[EVIL], checkpoint=tmp_path / f"{EVIL[-9:]}.pt")
    run.settings = runs.TrainingSettings(
        model={"_name": EVIL, "encoder_layers": 1, "encoder_conv_type": EVIL, "decoder_layers": 1},
        task={"data": EVIL, "source_lang": EVIL, "target_lang": EVIL},
        common={"seed": EVIL},
        dataset={"max_tokens": EVIL},
    )
    run.averaged_from, run.checkpoint_updates = [EVIL], 3
    run.scores = [scores.Score(EVIL, EVIL, {"bleu": 1.0}, [EVIL])]
    group = translate.Group(EVIL, [translate.Sample(EVIL, EVIL, {EVIL: f"{EVIL} {EVIL}"})], {EVIL: EVIL})
    layer = layer_of(np.eye(4), maps=[np.eye(3)[None].repeat(4, 0)])
    sentence = loading.Sentence({}, {"encoder": [EVIL, "$a$", "\\frac"]})
    shown = page.Shown([layer], [sentence], EVIL)
    text = page.build([run], {EVIL: shown}, [group], EVIL)
    tags = Tags(text)
    assert tags.open == []
    assert not tags.names & {"script", "img", "iframe", "object", "link", "a:script"}
    assert not any(name.startswith("on") for name, _ in tags.attributes)
    assert tags.text.count(EVIL) >= 12
    assert "$a$" in tags.text


def test_nothing_on_the_page_is_fetched_from_elsewhere(tmp_path):
    run = runs.Run("run", tmp_path)
    text = page.build([run], {"run": page.Shown([layer_of(np.eye(3))])}, [], "test")
    attributes = Tags(text).attributes
    for name, value in attributes:
        if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert value.startswith(("#", "data:")), (name, value)
    assert "url(http" not in text and "@import" not in text
    assert ("http-equiv", "Content-Security-Policy") in attributes
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in attributes


# ------------------------------------------------------------------------------------------------ the papers' rows


def test_the_papers_number_stands_below_the_runs(tmp_path):
    run = runs.Run("mine", tmp_path)
    kernels = {f"{side}_kernel_size_list": [3, 7] for side in ("encoder", "decoder")}
    run.settings = runs.TrainingSettings(
        model={"_name": "dynamicconv_iwslt_de_en", "encoder_layers": 7, "decoder_layers": 6, **kernels},
        task={"data": "data/iwslt14_de_en/data-bin", "source_lang": "de", "target_lang": "en"},
    )
    run.scores = [scores.Score("average10", "valid", {"bleu": 36.0}), scores.Score("average10", "test", {"bleu": 35.0})]
    text = Tags(page.build([run], {}, [], "test")).text
    assert "paper: DynamicConv" in text and "35.2" in text and "Wu et al. 2019" in text
    run.scores = run.scores[:1]
    assert "35.2" not in Tags(page.build([run], {}, [], "test")).text, "a test score stands beside a test score only"
    run.scores = [scores.Score("average10", "test", {"bleu": 35.0})]
    run.settings = runs.TrainingSettings(model=run.settings.model, task={"data": "data/multi30k_en_de/data-bin"})
    assert "paper:" not in Tags(page.build([run], {}, [], "test")).text


def test_a_row_of_the_ablation_stands_below_the_validation_score(tmp_path):
    run = runs.Run("mine", tmp_path)
    model = {"_name": "lightweightconv_wmt_en_de_big", "encoder_layers": 7, "decoder_layers": 6, "encoder_glu": False}
    run.settings = runs.TrainingSettings(
        model={**model, "encoder_embed_dim": 1024, "weight_dropout": 0.1},
        task={"data": "data/wmt16_en_de/data-bin", "source_lang": "en", "target_lang": "de"},
    )
    run.scores = [scores.Score("average10", "valid", {"bleu": 26.0})]
    text = Tags(page.build([run], {}, [], "test")).text
    assert "26.6 ± 0.2" in text and "secondary source" in text
