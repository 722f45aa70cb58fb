"""The table of the released models.

Names, addresses and search settings of LightConv and DynamicConv: fairseq's examples/pay_less_attention_paper/README.md
and the hub_models of its LightConvModel. Those of TaLK: the README of lioutasb/TaLKConvolutions; the names are ours.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from lightconv_plugin.errors import InputError
from lightconv_plugin.scoring.paper import TASKS, find_fact

BUCKET = "https://dl.fbaipublicfiles.com/fairseq"
TALK_PAGE = "https://github.com/lioutasb/TaLKConvolutions"
LICENCE = "MIT"  # of both repositories, which say that it applies to the models as well


@dataclass(frozen=True)
class ReleasedTask:
    """What the models of a task have in common.

    name: the papers' (scoring/paper.py). pair: source and target language. model, test: how the names of the archives
    begin. beam, lenpen: of the search whose score upstream reports. tokenizer: how the training text was tokenised.
    sacrebleu: the test set's name there, or "".
    """

    name: str
    pair: tuple[str, str]
    model: str
    test: str
    beam: int
    lenpen: float
    tokenizer: str = "moses"
    lowercase: bool = False
    compound_split: bool = False
    sacrebleu: str = ""


_EN_DE = ReleasedTask(
    *("WMT16 En-De", ("en", "de"), "wmt16.en-de.joined-dict", "wmt16.en-de.joined-dict.newstest2014", 5, 0.5),
    compound_split=True,
    sacrebleu="wmt14/full",
)
_TASKS = {
    "iwslt14.de-en": ReleasedTask(
        "IWSLT14 De-En", ("de", "en"), "iwslt14.de-en", "iwslt14.de-en.test", 4, 1.0, lowercase=True
    ),
    "wmt16.en-de": _EN_DE,
    "wmt17.en-de": _EN_DE,  # upstream gives these names to the files of wmt16.en-de
    "wmt14.en-fr": ReleasedTask(
        *("WMT14 En-Fr", ("en", "fr"), "wmt14.en-fr.joined-dict", "wmt14.en-fr.joined-dict.newstest2014", 5, 0.9),
        tokenizer="moses-a",  # as in fairseq's prepare-wmt14en2fr.sh
        sacrebleu="wmt14/full",
    ),
    # Upstream does not state the search of this one: fairseq-generate's defaults.
    "wmt17.zh-en": ReleasedTask(
        "WMT17 Zh-En", ("zh", "en"), "wmt17.zh-en", "wmt17.zh-en.newstest2017", 5, 1.0, sacrebleu="wmt17"
    ),
}


@dataclass(frozen=True)
class Model:
    """A released model.

    system: the papers' name. folder: where the cache keeps it; names of the same file share it.
    archive, test_archive: the addresses of the model and of its binarised test set, "" if they cannot be downloaded by
    a program; then they are linked from `page`.
    reported: whether the paper's score is of this model.
    """

    name: str
    system: str
    task: ReleasedTask
    beam: int
    lenpen: float
    folder: str
    archive: str
    test_archive: str
    test_folder: str
    page: str = "https://github.com/facebookresearch/fairseq/tree/main/examples/pay_less_attention_paper"
    reported: bool = True

    @property
    def bleu(self) -> str:
        """The paper's BLEU, "" if it reports none for this model."""
        task = next(task for task in TASKS if task.name == self.task.name)
        fact = find_fact(task, self.system) if self.reported else None
        return fact.values["bleu"] if fact else ""


def _convolution(kind: str, glu: bool, task_name: str) -> Model:
    task = _TASKS[task_name]
    folder = f"{task.model}.{kind}{'-glu' if glu else ''}"
    return Model(
        name=f"{kind}.{'glu' if glu else 'no_glu'}.{task_name}",
        system=_KINDS[kind],
        task=task,
        beam=task.beam,
        lenpen=task.lenpen,
        folder=folder,
        archive=f"{BUCKET}/models/dynamicconv/{folder}.tar.gz",
        test_archive=f"{BUCKET}/data/{task.test}.tar.bz2",
        test_folder=task.test,
        # Upstream's recipes for the paper's results have GLUs, except that for IWSLT14.
        reported=glu or task_name == "iwslt14.de-en",
    )


def _talk(task_name: str, beam: int, lenpen: float) -> Model:
    name = f"talkconv.{task_name}"
    return Model(name, "TaLK", _TASKS[task_name], beam, lenpen, name, "", "", f"{name}.test", TALK_PAGE)


_KINDS = {"lightconv": "LightConv", "dynamicconv": "DynamicConv"}
MODELS = {
    model.name: model
    for model in (
        *(_convolution(kind, False, task) for task in ("iwslt14.de-en", "wmt16.en-de") for kind in _KINDS),
        *(
            _convolution(kind, True, task)
            for task in ("wmt16.en-de", "wmt17.en-de", "wmt14.en-fr", "wmt17.zh-en")
            for kind in _KINDS
        ),
        _talk("iwslt14.de-en", 5, 1.6),
        _talk("wmt16.en-de", 4, 0.35),
        _talk("wmt14.en-fr", 6, 0.65),
    )
}


def find(name: str) -> Model:
    """The model of this name. InputError, with similar names, if there is none."""
    if name not in MODELS:
        alike = difflib.get_close_matches(name, MODELS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(alike)}?" if alike else "lightconv released lists them"
        raise InputError(f"there is no released model {name or repr(name)}: {hint}")
    return MODELS[name]
