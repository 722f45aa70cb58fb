"""Builds the page from the folders of trainings, step by step."""

import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import lightconv_plugin
from lightconv_plugin.errors import InputError
from lightconv_plugin.paths import short
from lightconv_plugin.report import kernels, loading, page, plots, translate
from lightconv_plugin.report.page import Shown
from lightconv_plugin.report.runs import Run, check_folder, names_of, read_run


@dataclass
class Report:
    """page: the HTML. problems: the number of notes on it about something missing. kernels: by run name."""

    page: str
    problems: int
    kernels: dict[str, Shown]


def make_report(
    run_dirs: Sequence[Path], data_bin: Path | None = None, number: int = 8, checkpoint: str | None = None
) -> Report:
    """Make the report about the trainings in these folders.

    Args:
        run_dirs: fairseq's save_dir of each training.
        data_bin: binarised data to use instead of those named in the checkpoints.
        number: how many sample translations to show.
        checkpoint: file name, in each folder, of the checkpoint whose kernels are shown; None: see
            `runs.choose_checkpoint`.

    Raises:
        InputError: a folder does not exist, does not hold a training, or is given twice, or none has the checkpoint.
    """
    from tqdm import tqdm

    run_dirs = [short(folder) for folder in run_dirs]
    for folder in run_dirs:
        check_folder(folder)
    if data_bin is not None and not data_bin.is_dir():
        raise InputError(f"`data_bin`: there is no folder {data_bin}")
    if checkpoint is not None and not any((folder / checkpoint).is_file() for folder in run_dirs):
        raise InputError(f"`checkpoint`: no RUN_DIR has a file {checkpoint}")
    runs = [read_run(folder, name, checkpoint) for folder, name in zip(run_dirs, names_of(run_dirs), strict=True)]
    groups = translate.group_logs(runs, number)
    shown: dict[str, Shown] = {}
    for run in tqdm(runs, desc="reading checkpoints", unit="run"):
        if run.checkpoint is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch and fairseq warn about each other
                _read_model(run, run.checkpoint, data_bin, number, shown, groups)
    # Without the time: the same trainings give the same page.
    made = f"lightconv report {lightconv_plugin.__version__}"
    return Report(page.build(runs, shown, groups, made), sum(len(run.problems) for run in runs), shown)


def _read_model(
    run: Run,
    checkpoint: Path,
    data_bin: Path | None,
    number: int,
    shown: dict[str, Shown],
    groups: list[translate.Group],
) -> None:
    """Add the run's kernels to `shown` and, if no log has its translations, translations to `groups`.

    An unexpected kind of model must not prevent the page: any failure becomes one of the run's problems.
    """
    opened = dataset = None
    with _noting(run.problems, "The model cannot be built, so there are no kernels"):
        opened = loading.open_model(checkpoint, data_bin)
    if opened is None:
        return
    _add_languages(run, opened.task)
    subset = loading.split_of(opened.folder, opened.task)
    missing = [opened.missing] if opened.missing else []
    if opened.task is not None:
        with _noting(missing, f"the data's subset {subset} cannot be read"):
            dataset = loading.load_dataset(opened.task, subset)
    with _noting(run.problems, "The kernels cannot be shown"):
        shown[run.name] = _kernels(run, opened, dataset, subset, missing)
    if run.settings.language_model or any(run.name in group.origins for group in groups):
        return
    if dataset is None:
        run.problems.append(f"No translations: no log of fairseq-generate is in the folder, and {missing[0]}.")
        return
    with _noting(run.problems, "Nothing can be translated"):
        _translate(run, opened, subset, number, groups)


@contextmanager
def _noting(problems: list[str], what: str) -> Iterator[None]:
    """Turn any exception into a problem, "what: why"."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())[:400]
        problems.append(f"{what}: {text if isinstance(error, InputError) else f'{type(error).__name__}: {text}'}")


def _add_languages(run: Run, task) -> None:
    """Add to the settings the languages that fairseq inferred from the names of the data files."""
    cfg = getattr(task, "cfg", None)
    if not run.settings.pair and cfg and cfg.get("source_lang") and cfg.get("target_lang"):
        languages = {name: cfg[name] for name in ("source_lang", "target_lang")}
        run.settings = replace(run.settings, task={**run.settings.task, **languages})


def _kernels(run: Run, opened: loading.Opened, dataset, subset: str, missing: Sequence[str]) -> Shown:
    sentences = loading.sentences(opened.task, dataset) if dataset is not None else []
    chosen = loading.choose_shown(sentences)
    layers = kernels.gather(opened.model, [sentence.inputs for sentence in sentences], chosen)
    if not layers:
        run.problems.append("The model has no layers with known token mixers.")
    if lacking := sorted({layer.kind for layer in layers if layer.mean is None}):
        run.problems.append(f"No kernels of {', '.join(lacking)}, which depend on the text: {missing[0]}.")
    origin = opened.checkpoint
    if sentences and any(layer.kind not in kernels.FIXED for layer in layers):
        pieces = "blocks" if run.settings.language_model else "sentences"
        origin += f"; what depends on the text is measured on {len(sentences)} {pieces} of {subset}"
    return Shown(layers, [sentences[i] for i in chosen], origin)


def _translate(run: Run, opened: loading.Opened, subset: str, number: int, groups: list[translate.Group]) -> None:
    """Beam search on the sentences shown for other runs if they use the same data, otherwise on its own."""
    options = Namespace(beam=translate.BEAM, lenpen=1.0, max_len_a=2, max_len_b=20)
    torch.manual_seed(1)
    translations = translate.search(opened.model, opened.task, options, subset, number)
    origin = f"beam search, beam {translate.BEAM}, with {opened.checkpoint}"
    for group in groups:
        same = [sample.reference for sample in group.samples] == [reference for _, reference, _ in translations]
        if group.subset == subset and same:
            for sample, (source, _, hypothesis) in zip(group.samples, translations, strict=True):
                sample.source = sample.source or source
                sample.hypotheses[run.name] = hypothesis
            group.origins[run.name] = origin
            return
    samples = [translate.Sample(source, reference, {run.name: text}) for source, reference, text in translations]
    groups.append(translate.Group(subset, samples, {run.name: origin}))


def kernel_figure(report: Report, form: str) -> bytes:
    """The runs' kernels side by side, from their encoders (language models: decoders), as "png", "svg" or "pdf".

    Raises:
        InputError: none of the runs has kernels that can be shown.
    """
    columns = []
    for name, shown in report.kernels.items():
        for side, layers in list(shown.sides().items())[:1]:
            tokens = shown.sentences[0].tokens[side][: kernels.LONGEST_SHOWN] if shown.sentences else []
            columns.append((f"{name}: {side}", layers, tokens))
    if not columns:
        raise InputError("there are no kernels to draw: the page says why")
    return plots.kernel_figure(columns, form)
