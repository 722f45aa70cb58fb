"""Reads the folder of a run: its settings, its records, its scores, and the checkpoint to show."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightconv_plugin.checkpoints.averaging import EPOCH_NAME, UPDATE_NAME
from lightconv_plugin.checkpoints.layouts import as_mapping
from lightconv_plugin.checkpoints.loading import count_parameters, load_checkpoint
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import is_older
from lightconv_plugin.mixers import mixer_of
from lightconv_plugin.paths import short
from lightconv_plugin.records.file import FILE, LOGS, read_folder
from lightconv_plugin.records.trainings import Training, trainings
from lightconv_plugin.report.scores import (
    Score,
    Translations,
    checkpoint_of,
    generate_logs,
    generated_score,
    read_score,
    read_translations,
    score_files,
)

_AVERAGE = re.compile(r"average(\d+)\.pt")


@dataclass(frozen=True)
class TrainingSettings:
    """A training's configuration as plain dictionaries, by fairseq's names; empty where unknown."""

    model: Mapping = field(default_factory=dict)
    task: Mapping = field(default_factory=dict)
    common: Mapping = field(default_factory=dict)
    dataset: Mapping = field(default_factory=dict)
    optimization: Mapping = field(default_factory=dict)

    @property
    def architecture(self) -> str | None:
        return self.model.get("_name") or self.model.get("arch")

    @property
    def data(self) -> str:
        """The folders of binarised data, as fairseq's `data` lists them."""
        folders = filter(None, str(self.task.get("data") or "").split(":"))
        return ":".join(str(short(Path(folder))) for folder in folders)

    @property
    def pair(self) -> tuple[str, str] | None:
        source, target = self.task.get("source_lang"), self.task.get("target_lang")
        return (source, target) if source and target else None

    @property
    def language_model(self) -> bool:
        return "language_modeling" in str(self.task.get("_name") or self.task.get("task") or "")

    @property
    def mixers(self) -> dict[str, list[str]]:
        """The token mixer of each layer: {"encoder": […], "decoder": […]}; a language model has no encoder."""
        found = {}
        for side in ("decoder",) if self.language_model else ("encoder", "decoder"):
            try:
                layers = int(self.model[f"{side}_layers"])
            except (KeyError, TypeError, ValueError):  # unknown, or a list of convolutions, as fairseq's fconv has it
                continue
            names = str(self.model.get(f"{side}_conv_type") or self._family()).split(",")
            names = [name.strip() for name in names]
            found[side] = names * layers if len(names) == 1 else names
        return found

    def _family(self) -> str:
        return mixer_of(self.architecture or "") or "unknown"

    @staticmethod
    def read(content: Mapping) -> "TrainingSettings":
        """Settings from the `cfg` of a checkpoint or hydra configuration, or from the flat `args` of an old one.

        fairseq stores the `model` of its older architectures as a Namespace.
        """
        if "model" not in content:
            return TrainingSettings(*[content] * 5)
        parts = ("model", "task", "common", "dataset", "optimization")
        return TrainingSettings(*(as_mapping(content.get(part)) for part in parts))


@dataclass
class Run:
    """The contents of a run's folder. problems: sentences for the page about what cannot be read and why."""

    name: str
    folder: Path
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    training: Training | None = None
    earlier: list[Training] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    translations: list[Translations] = field(default_factory=list)
    checkpoint: Path | None = None
    checkpoint_updates: int | None = None
    averaged_from: list[str] = field(default_factory=list)
    parameters: int | None = None
    problems: list[str] = field(default_factory=list)


def check_folder(folder: Path) -> None:
    """Raise InputError unless the folder is the save_dir of a training."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise InputError(f"`run_dirs`: {folder} {found}: expected the folder of a training (fairseq's save_dir)")
    known = [folder / name for name in (FILE, *LOGS)]
    if not any(path.is_file() for path in known) and not list(folder.glob("*.pt")) and not list(folder.glob("*.log")):
        raise InputError(
            f"`run_dirs`: {folder} is not the folder of a training: it has neither checkpoints (*.pt) nor a log "
            f"({', '.join((FILE, *LOGS))} or *.log)"
        )


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: the last part of its path, and as many parts before it as are needed for uniqueness."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    twice = next(folder for folder, part in zip(folders, parts, strict=True) if parts.count(part) > 1)
    raise InputError(f"`run_dirs`: {twice} is given twice")


def read_run(folder: Path, name: str, checkpoint: str | None = None) -> Run:
    """Read everything about a run except its model. Anything unreadable becomes one of the run's problems."""
    run = Run(name, folder)
    _read_records(run)
    _read_checkpoint(run, checkpoint)
    _read_settings(run)
    _read_scores(run)
    run.parameters = run.training.parameters if run.training else None
    if run.parameters is None and run.checkpoint:
        run.parameters = count_parameters(run.checkpoint)
    return run


def _read_records(run: Run) -> None:
    found = read_folder(run.folder)
    known = trainings(found.records)
    if not known:
        searched = ", ".join(found.searched)
        what = f"no training statistics in {searched}" if searched else "there is no training log"
        run.problems.append(f"No learning curve: {what}.")
        return
    *run.earlier, run.training = known
    if found.broken:
        run.problems.append(f"{found.file}: {found.broken} truncated lines of statistics were left out.")
    if run.earlier:
        ends = ", ".join(f"{training.updates:,}" for training in run.earlier)
        run.problems.append(
            f"{found.file} holds {len(known)} trainings, each started at update 0; the last one is shown. "
            f"The others ended at update {ends}."
        )


def choose_checkpoint(folder: Path) -> Path | None:
    """The checkpoint to show: the newest average, otherwise the best, otherwise the last one written."""
    files = sorted(path for path in folder.glob("*.pt") if path.is_file())  # not links to deleted files
    averages = [path for path in files if _AVERAGE.fullmatch(path.name)]
    if averages:
        return max(averages, key=lambda path: (path.stat().st_mtime, path.name))
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        if (folder / name).is_file():
            return folder / name
    for pattern in (EPOCH_NAME, UPDATE_NAME):
        numbered = [(int(match[1]), path) for path in files if (match := pattern.fullmatch(path.name))]
        if numbered:
            return max(numbered)[1]
    return next(iter(files), None)


def _read_checkpoint(run: Run, name: str | None) -> None:
    run.checkpoint = run.folder / name if name else choose_checkpoint(run.folder)
    if run.checkpoint is None:
        run.problems.append("There is no checkpoint (*.pt), so there are no kernels, and only translations from a log.")
        return
    try:
        state = load_checkpoint(run.checkpoint)
    except InputError as error:
        run.problems.append(f"The checkpoint cannot be loaded: {error}.")
        run.checkpoint = None
        return
    history = state.get("optimizer_history") or [{}]
    run.checkpoint_updates = history[-1].get("num_updates")
    run.averaged_from = state.get("averaged_from") or []
    content = state.get("cfg") or (vars(state["args"]) if state.get("args") else None)
    if content:
        run.settings = TrainingSettings.read(content)


def _read_settings(run: Run) -> None:
    """Read the records' settings, or hydra's copy of the configuration, if there are none from a checkpoint."""
    if not run.settings.architecture and run.training and (recorded := run.training.known("settings")):
        run.settings = TrainingSettings.read(recorded)
    path = run.folder / "hydra" / ".hydra" / "config.yaml"
    if run.settings.architecture or not path.is_file():
        return
    import yaml

    try:
        run.settings = with_defaults(TrainingSettings.read(yaml.safe_load(path.read_text(encoding="utf-8"))))
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        run.problems.append(f"hydra/.hydra/config.yaml cannot be read: {type(error).__name__}.")


def with_defaults(settings: TrainingSettings) -> TrainingSettings:
    """The settings of a configuration file, completed by the architecture's defaults."""
    from fairseq.models import MODEL_DATACLASS_REGISTRY

    import lightconv_plugin.models  # noqa: F401  (registers the architectures)

    architecture = MODEL_DATACLASS_REGISTRY.get(settings.architecture)
    return replace(settings, model={**vars(architecture()), **settings.model}) if architecture else settings


def _read_scores(run: Run) -> None:
    for path in score_files(run.folder):
        try:
            run.scores.append(read_score(path))
        except (InputError, OSError) as error:
            run.problems.append(f"{error}.")
    for path in (*score_files(run.folder), *generate_logs(run.folder)):
        if is_older(path, checkpoint := checkpoint_of(path)):
            run.problems.append(
                f"{path.name} is older than {checkpoint.name}: it may be of an earlier checkpoint of that name."
            )
    scored = {(score.checkpoint, score.subset) for score in run.scores}
    for path in generate_logs(run.folder):
        try:
            run.translations.append(read_translations(path))
            score = generated_score(path)
        except (InputError, OSError) as error:
            run.problems.append(f"{error}.")
            continue
        if score and (score.checkpoint, score.subset) not in scored:
            run.scores.append(score)
