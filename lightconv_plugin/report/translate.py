"""Sample translations side by side, from the logs in the runs' folders or by beam search."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightconv_plugin.report.loading import load_dataset, spread
from lightconv_plugin.report.runs import Run
from lightconv_plugin.report.scores import Translations
from lightconv_plugin.scoring.bleu import join_subwords

BEAM = 5


@dataclass
class Sample:
    """One sentence with its translations by run name."""

    source: str
    reference: str
    hypotheses: dict[str, str] = field(default_factory=dict)


@dataclass
class Group:
    """Samples of one test set. origins: for each run, where its translations come from."""

    subset: str
    samples: list[Sample]
    origins: dict[str, str]


def choose_log(run: Run) -> Translations | None:
    """The log to show: preferably for the test set, and then preferably for the checkpoint shown in the report."""
    stem = run.checkpoint.stem if run.checkpoint else ""
    return max(run.translations, key=lambda log: (log.subset == "test", log.checkpoint == stem), default=None)


def group_logs(runs: Sequence[Run], number: int) -> list[Group]:
    """The runs' logs, grouped by their references; `number` sentences of each group, evenly spaced."""
    chosen = {run.name: log for run in runs if (log := choose_log(run))}
    groups: dict[tuple, list[str]] = {}
    for name, log in chosen.items():
        groups.setdefault((log.subset, *log.references), []).append(name)
    made = []
    for names in groups.values():
        first = chosen[names[0]]
        samples = []
        for i in spread(len(first.references), number):
            source = next((s for name in names if (s := chosen[name].sources[i])), "")
            samples.append(Sample(source, first.references[i], {name: chosen[name].hypotheses[i] for name in names}))
        origins = {name: f"the log of {chosen[name].checkpoint or 'fairseq-generate'}" for name in names}
        made.append(Group(first.subset, samples, origins))
    return made


def search(model, task, cfg_generation, subset: str, number: int) -> list[tuple[str, str, str]]:
    """Beam search on `number` sentences of a subset, evenly spaced: (source, reference, hypothesis) of each."""
    dataset = load_dataset(task, subset)
    generator = task.build_generator([model], cfg_generation)
    translations = []
    for index in spread(len(dataset), number):
        sample = dataset.collater([dataset[index]])
        with torch.no_grad():
            best = task.inference_step(generator, [model], sample)[0][0]["tokens"]
        pad = task.target_dictionary.pad()
        source, reference = sample["net_input"]["src_tokens"][0], sample["target"][0]
        texts = (
            join_subwords(task.source_dictionary.string(source[source != task.source_dictionary.pad()])),
            # As fairseq-generate prints references, so that they are recognised in its logs.
            join_subwords(task.target_dictionary.string(reference[reference != pad], escape_unk=True)),
            join_subwords(task.target_dictionary.string(best[best != pad])),
        )
        translations.append(texts)
    return translations


def differences(reference: str, hypothesis: str) -> list[tuple[str, bool]]:
    """The hypothesis in pieces: (words, whether the reference differs there).

    Joined by spaces, the pieces are the hypothesis. Case is ignored.
    """
    words, expected = hypothesis.split(), reference.lower().split()
    matcher = difflib.SequenceMatcher(None, expected, [word.lower() for word in words], autojunk=False)
    return [
        (" ".join(words[begin:end]), kind != "equal") for kind, _, _, begin, end in matcher.get_opcodes() if begin < end
    ]
