"""The papers' scores, each with its source, and how they are matched with a run.

Only numbers that were read in a source are listed. A run is matched by its data and languages (the task), its token
mixer (the system), and in the ablation by the options that define the row.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightconv_plugin.mixers import OUR_OPTIONS, TALK, WU

OTT = "Ott et al. 2018, Scaling Neural Machine Translation"
BAEVSKI = "Baevski & Auli 2019, Adaptive Input Representations for Neural Language Modeling"


@dataclass(frozen=True)
class PaperTask:
    """A task of the papers. data: a pattern for the path of a run's data. pair: (source, target) language. how: how
    the papers score."""

    name: str
    data: str
    pair: tuple[str, str] | None
    how: str


@dataclass(frozen=True)
class Fact:
    """A published test score. values: by measure (as in report/scores.py)."""

    task: str
    system: str
    values: Mapping[str, str]
    source: str
    note: str = ""


TASKS = (
    # The papers call it WMT14 En-De after its test set. The raw corpora of WMT14 are other training text.
    PaperTask("WMT16 En-De", r"wmt16.*en.?de", ("en", "de"), "newstest2014, tokenised BLEU, compounds split"),
    PaperTask(
        "WMT14 En-Fr", r"wmt14.*en.?fr", ("en", "fr"), "newstest2014, tokenised BLEU, compounds split by the tokeniser"
    ),
    PaperTask("WMT17 Zh-En", r"wmt17.*zh.?en", ("zh", "en"), "newstest2017, BLEU"),
    PaperTask("IWSLT14 De-En", r"iwslt14", ("de", "en"), "tokenised BLEU, lower-cased"),
    PaperTask("Billion Word", r"gbw|billion", None, "test perplexity"),
    PaperTask("WikiText-103", r"wikitext.?103|wiki103", None, "test perplexity"),
    PaperTask("CNN-DailyMail", r"cnn.?dm|cnn.?dailymail", None, "ROUGE F1"),
)


def _rouge(one: str, two: str, longest: str) -> dict[str, str]:
    # Their ROUGE-L is computed sentence by sentence.
    return {"rouge1": one, "rouge2": two, "rougeLsum": longest}


FACTS = (
    Fact("WMT16 En-De", "LightConv", {"bleu": "28.9"}, WU),
    Fact("WMT16 En-De", "DynamicConv", {"bleu": "29.7"}, WU, "213M parameters"),
    Fact("WMT16 En-De", "TaLK", {"bleu": "29.6"}, TALK),
    Fact("WMT16 En-De", "self-attention", {"bleu": "29.3"}, OTT),
    Fact("WMT14 En-Fr", "LightConv", {"bleu": "43.1"}, WU),
    Fact("WMT14 En-Fr", "DynamicConv", {"bleu": "43.2"}, WU),
    Fact("WMT14 En-Fr", "TaLK", {"bleu": "43.2"}, TALK),
    Fact("WMT14 En-Fr", "self-attention", {"bleu": "43.2"}, OTT),
    Fact("WMT17 Zh-En", "LightConv", {"bleu": "24.3"}, WU, "how it was computed was not verified"),
    Fact("WMT17 Zh-En", "DynamicConv", {"bleu": "24.4"}, WU, "how it was computed was not verified"),
    Fact("IWSLT14 De-En", "LightConv", {"bleu": "34.8"}, WU),
    Fact("IWSLT14 De-En", "DynamicConv", {"bleu": "35.2"}, WU),
    Fact("IWSLT14 De-En", "TaLK", {"bleu": "35.5"}, TALK),
    Fact("IWSLT14 De-En", "self-attention", {"bleu": "34.4"}, WU),
    Fact("Billion Word", "DynamicConv", {"perplexity": "26.67"}, WU),
    Fact("WikiText-103", "DynamicConv", {"perplexity": "25.0"}, TALK, "255M parameters; in a secondary source"),
    Fact("WikiText-103", "TaLK", {"perplexity": "23.3"}, TALK, "240M parameters"),
    Fact("WikiText-103", "self-attention", {"perplexity": "18.7"}, BAEVSKI, "247M parameters"),
    Fact("CNN-DailyMail", "LightConv", _rouge("39.52", "15.97", "36.51"), WU),
    Fact("CNN-DailyMail", "DynamicConv", _rouge("39.84", "16.25", "36.73"), WU),
    Fact("CNN-DailyMail", "TaLK", _rouge("40.03", "18.45", "36.13"), TALK),
    Fact("CNN-DailyMail", "TaLK, deep", _rouge("40.59", "18.97", "36.81"), TALK, "10 + 10 layers"),
)

ABLATION_SOURCE = f"{WU}, table 3 (read in a secondary source)"
# Row → BLEU on newstest2013 of the WMT16 En-De models. The row without softmax diverged.
ABLATION = {
    "self-attention": "26.9 ± 0.1",
    "self-attention, windows": "26.9 ± 0.3",
    "CNN": "25.9 ± 0.2",
    "depthwise": "26.1 ± 0.2",
    "+ increasing kernel": "26.4 ± 0.2",
    "+ DropConnect": "26.5 ± 0.2",
    "+ weight sharing": "26.5 ± 0.1",
    "+ softmax (LightConv)": "26.6 ± 0.2",
    "+ dynamic (DynamicConv)": "26.9 ± 0.2",
    "DynamicConv without softmax": "diverges",
}


def find_task(data: str, pair: tuple[str, str] | None) -> PaperTask | None:
    """The papers' task that matches this data path and these languages; None if there is none.

    The whole path is searched; a task with languages matches only its own direction.
    """
    for task in TASKS:
        if re.search(task.data, data.lower()) and (task.pair is None or task.pair == pair):
            return task
    return None


_DEEP = 20  # layers


def find_fact(task: PaperTask | None, system: str | None, layers: int = 0) -> Fact | None:
    """The published score of the system on the task. layers: of encoder and decoder; some systems have a deep model."""
    if layers >= _DEEP and (deep := find_fact(task, f"{system}, deep")):
        return deep
    return next((fact for fact in FACTS if task and (fact.task, fact.system) == (task.name, system)), None)


def ablation_row(mixers: Sequence[str], options: Mapping) -> str | None:
    """The row of the paper's ablation for a model; None unless it has the size for WMT16 En-De and no GLU.

    mixers: of all layers. options: the model's, under fairseq's names.
    """
    kinds = set(mixers)
    glu = options.get("encoder_glu") or options.get("decoder_glu")
    if len(kinds) != 1 or options.get("encoder_embed_dim") != 1024:
        return None
    if any(options.get(name, usual) not in (None, usual) for name, usual in OUR_OPTIONS.items()):
        return None
    kind = kinds.pop()
    if kind == "attention":
        return "self-attention"
    if kind == "window_attention":
        return "self-attention, windows"
    if glu:
        return None
    sizes = {int(k) for side in ("encoder", "decoder") for k in options.get(f"{side}_kernel_size_list") or ()}
    if kind == "conv":
        return "CNN" if sizes == {3} else None
    dropped = bool(options.get("weight_dropout"))
    softmax = options.get("weight_softmax", True) and options.get("weight_normalization") in (None, "softmax")
    if kind == "depthwise":
        if sizes == {3}:
            return None if dropped else "depthwise"
        return "+ DropConnect" if dropped else "+ increasing kernel"
    if kind == "lightweight":
        return "+ softmax (LightConv)" if softmax else "+ weight sharing"
    if kind == "dynamic":
        return "+ dynamic (DynamicConv)" if softmax else "DynamicConv without softmax"
    return None
