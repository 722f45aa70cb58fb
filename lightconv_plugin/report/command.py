"""What `lightconv report` does, step by step."""

import warnings
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch
from tqdm import tqdm

import lightconv_plugin
from lightconv_plugin.errors import InputError
from lightconv_plugin.report import kernels, loading, page, translate
from lightconv_plugin.report.runs import Run, Settings, check_folder, names_of, read_run


def make_report(folders: Sequence[Path], data_bin: Path | None, number: int, checkpoint: str | None) -> tuple[str, int]:
    """The page about these runs, and how many problems it names.

    data_bin: binarised data instead of what the checkpoints name. number: sample translations. checkpoint: name of the
    file to look into. Raises InputError for folders that are none of a training.
    """
    for folder in folders:
        check_folder(folder)
    if data_bin is not None and not data_bin.is_dir():
        raise InputError(f"--data-bin: there is no folder {data_bin}")
    runs = [read_run(folder, name, checkpoint) for folder, name in zip(folders, names_of(folders), strict=True)]
    groups = translate.group_logs(runs, number)
    shown = {}
    for run in tqdm(runs, desc="looking into checkpoints", unit="run"):
        if run.checkpoint is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's and fairseq's about each other
                _look_into(run, data_bin, number, shown, groups)
    made = f"lightconv report {lightconv_plugin.__version__}, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    return page.build(runs, shown, groups, made), sum(len(run.problems) for run in runs)


def _look_into(
    run: Run, data_bin: Path | None, number: int, shown: dict[str, page.Shown], groups: list[translate.Group]
) -> None:
    """Add the run's kernels to `shown` and, where no log has its translations, translations to `groups`.

    A model of another kind than expected must not lose the page: whatever fails becomes one of the run's problems.
    """
    try:
        opened = loading.open_model(run.checkpoint, data_bin)
    except Exception as error:
        run.problems.append(_failed("The model could not be built, so there are no kernels", error))
        return
    run.settings = _with_languages(run.settings, opened.task)
    subset = ""
    dataset = None
    if opened.task is not None:
        try:
            subset = loading.split_of(opened.folder)
            dataset = loading.load_dataset(opened.task, subset)
        except Exception as error:
            opened.missing = _failed(f"the data's subset {subset or 'test'} could not be read", error)
    try:
        shown[run.name] = _kernels(run, opened, dataset, subset)
    except Exception as error:
        run.problems.append(_failed("The kernels could not be gathered", error))
    if run.settings.language_model or any(run.name in group.origins for group in groups):
        return
    if dataset is None:
        run.problems.append(f"No translations: no log of fairseq-generate is in the folder, and {opened.missing}.")
        return
    try:
        _translate(run, opened, subset, number, groups)
    except Exception as error:
        run.problems.append(_failed("Nothing could be translated", error))


def _with_languages(settings: Settings, task) -> Settings:
    """The settings with the languages that fairseq found by the names of the data's files."""
    found = getattr(task, "cfg", None)
    if settings.pair or not (found and found.get("source_lang") and found.get("target_lang")):
        return settings
    languages = {name: found[name] for name in ("source_lang", "target_lang")}
    return replace(settings, task={**settings.task, **languages})


def _failed(what: str, error: Exception) -> str:
    text = " ".join(str(error).split())[:400]
    return f"{what}: {text if isinstance(error, InputError) else f'{type(error).__name__}: {text}'}"


def _kernels(run: Run, opened: loading.Opened, dataset, subset: str) -> page.Shown:
    found = loading.sentences(opened.task, dataset) if dataset is not None else []
    chosen = loading.choose_shown(found)
    layers = kernels.gather(opened.model, [sentence.inputs for sentence in found], chosen)
    if not layers:
        run.problems.append("The model has no layers with token mixers that are known here.")
    if lacking := sorted({layer.kind for layer in layers if layer.mean is None}):
        run.problems.append(f"No kernels of {', '.join(lacking)}, which depend on the text: {opened.missing}.")
    return page.Shown(layers, [found[i] for i in chosen], len(found), subset)


def _translate(run: Run, opened: loading.Opened, subset: str, number: int, groups: list[translate.Group]) -> None:
    """Beam search on the sentences that other runs show, where they are of the same data, else on some of its own."""
    options = Namespace(beam=translate.BEAM, lenpen=1.0, max_len_a=2, max_len_b=20)
    torch.manual_seed(1)
    found = translate.search(opened.model, opened.task, options, subset, number)
    origin = f"beam search, beam {translate.BEAM}, with {run.checkpoint.name}"
    for group in groups:
        same = [sample.reference for sample in group.samples] == [reference for _, reference, _ in found]
        if group.subset == subset and same:
            for sample, (source, _, hypothesis) in zip(group.samples, found, strict=True):
                sample.source = sample.source or source
                sample.hypotheses[run.name] = hypothesis
            group.origins[run.name] = origin
            return
    samples = [translate.Sample(source, reference, {run.name: text}) for source, reference, text in found]
    groups.append(translate.Group(subset, samples, {run.name: origin}))
