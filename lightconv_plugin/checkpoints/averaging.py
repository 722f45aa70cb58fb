"""Averages several checkpoints of one training into one, and chooses them.

Sums are in float64, and only one checkpoint is in memory at a time. Settings (cfg, args, task state …) are those of the
newest input. The optimizer state and the exponential moving average belong to one training step, not to the mean, and
are left out (as are the meters of old files). The names, sizes and times of the inputs are kept in "averaged_files".
"""

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lightconv_plugin.checkpoints.layouts import as_mapping
from lightconv_plugin.checkpoints.loading import is_cut_short, load_checkpoint, safe_torch_load, torch_save
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import check_new_file

EPOCH_NAME = re.compile(r"checkpoint(\d+)\.pt")
UPDATE_NAME = re.compile(r"checkpoint_\d+_(\d+)\.pt")
BEST_NAME = re.compile(r"checkpoint\.best_(.+)_(-?\d+(?:\.\d+)?)\.pt")

# Whether higher is better, for checkpoints that do not say it themselves.
HIGHER_IS_BETTER = {"accuracy", "bleu", "chrf", "f1", "sacrebleu", "rouge"}
LOWER_IS_BETTER = {"loss", "nll_loss", "ppl", "ter", "wer", "cer", "uer"}

# Integer entries that count steps and therefore differ between checkpoints: the newest one is kept.
COUNTERS = ("num_batches_tracked",)


def candidates(inputs: Sequence[Path]) -> list[Path]:
    """The files to choose from: the given files, or all files of the given folder."""
    folders = [path for path in inputs if path.is_dir()]
    if folders and len(inputs) > 1:
        raise InputError(
            f"`inputs` must be files or one folder, got {len(inputs)} entries with the folder {folders[0]}"
        )
    if folders:
        return sorted(path for path in folders[0].iterdir() if path.is_file() and not _left_out(path))
    for path in inputs:
        if not path.is_file():
            raise InputError(f"no such checkpoint: {path}")
    return list(inputs)


def _left_out(path: Path) -> bool:
    """Whether a checkpoint in a folder is incomplete, after a kill or a full disk; earlier ones are used instead."""
    cut = path.match("checkpoint*.pt") and is_cut_short(path)
    if cut:
        print(f"{path} is incomplete: skipped", file=sys.stderr)
    return cut


def last_checkpoints(
    files: Sequence[Path], number: int, update_based: bool, upper_bound: int | None = None
) -> list[Path]:
    """The `number` latest checkpointE.pt (or checkpoint_E_U.pt when `update_based`), the newest first.

    `upper_bound` is the last epoch (or update) to include.
    """
    pattern, kind = (UPDATE_NAME, "checkpoint_EPOCH_UPDATE.pt") if update_based else (EPOCH_NAME, "checkpointEPOCH.pt")
    found = [(int(match[1]), path) for path in files if (match := pattern.fullmatch(path.name))]
    within = sorted(((n, path) for n, path in found if upper_bound is None or n <= upper_bound), reverse=True)
    if len(within) < number:
        bound = "" if upper_bound is None else f" up to {upper_bound}"
        raise InputError(
            f"need {number} checkpoints named {kind}{bound}, found {_listing([path for _, path in within])}"
            + (f"; without the bound: {_listing([path for _, path in found])}" if len(found) > len(within) else "")
        )
    return [path for _, path in within[:number]]


def only_by_updates(files: Sequence[Path]) -> bool:
    """Whether a training kept no epoch checkpoints, so that its last ones are numbered by updates."""
    return not any(EPOCH_NAME.fullmatch(path.name) for path in files)


def checkpoints_in_order(folder: Path) -> list[Path]:
    """The checkpoints that a training has kept, newest first: epoch checkpoints or, without any, those by updates."""
    files = candidates([folder])
    pattern = UPDATE_NAME if only_by_updates(files) else EPOCH_NAME
    checkpoints = [path for path in files if pattern.fullmatch(path.name)]
    return last_checkpoints(checkpoints, len(checkpoints), only_by_updates(checkpoints))


def best_checkpoints(files: Sequence[Path], number: int, maximize: bool | None = None) -> list[Path]:
    """The `number` best checkpoint.best_METRIC_VALUE.pt, best first, in fairseq's own order.

    `maximize`: whether a higher metric is better; None: as in a checkpoint's settings (if they are about this metric),
    otherwise by the metric's name.
    """
    found = [(match[1], float(match[2]), path) for path in files if (match := BEST_NAME.fullmatch(path.name))]
    metrics = sorted({metric for metric, _, _ in found})
    if len(metrics) > 1:
        raise InputError(
            f"found best checkpoints by {len(metrics)} metrics ({', '.join(metrics)}): name the files of one of them"
        )
    if len(found) < number:
        raise InputError(
            f"need {number} checkpoints named checkpoint.best_METRIC_VALUE.pt, found "
            f"{_listing([path for _, _, path in found])} (fairseq-train writes them with --keep-best-checkpoints)"
        )
    if maximize is None:
        maximize = _maximize(metrics[0], found[0][2])
    ranked = sorted(((value, path.name, path) for _, value, path in found), reverse=maximize)
    return [path for _, _, path in ranked[:number]]


def _maximize(metric: str, checkpoint: Path) -> bool:
    state = load_checkpoint(checkpoint)
    cfg = state.get("cfg")
    settings = as_mapping(cfg.get("checkpoint") if cfg else state.get("args"))
    if settings.get("best_checkpoint_metric") == metric:
        return bool(settings.get("maximize_best_checkpoint_metric", False))
    if metric in HIGHER_IS_BETTER:
        return True
    if metric in LOWER_IS_BETTER:
        return False
    raise InputError(f"{checkpoint} does not say whether a higher {metric} is better: `maximize` must be given")


class Mean:
    """The mean of the parameters of checkpoints that are added one by one; sums are in float64."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self._sums: dict = {}  # owner -> float64 sum
        self._kept: dict = {}  # integers: equal in all files, or the newest file's counter
        self._first: dict = {}  # key -> (shape, dtype) in the first file
        self._owner: dict[str, str] = {}  # key -> the key of the tensor it has shared memory with in every file so far
        self._newest: dict = {}
        self._updates = -math.inf

    def add(self, path: Path, state: dict) -> None:
        """Add what `load_checkpoint` returned for `path`; the parameters are removed from `state`.

        Raises InputError if keys, shapes or types differ from those of the first file, if integers other than counters
        differ, or if a parameter is not finite.
        """
        model = state.pop("model")
        if not self.files:
            self._first = {key: (tuple(value.shape), value.dtype) for key, value in model.items()}
        self._check(path, model)
        self._regroup(_shared_memory(model))
        updates = (state.get("optimizer_history") or [{}])[-1].get("num_updates", -1)
        newer = updates > self._updates
        for key, value in model.items():
            if not value.is_floating_point():
                self._keep(path, key, value, newer)
            elif self._owner[key] == key:
                self._sums[key] = self._sums.get(key, 0) + _finite(path, key, value.double())
        if newer:
            self._updates, self._newest = updates, state
        self.files.append(path)

    def result(self) -> dict:
        """The averaged checkpoint: settings of the newest file, parameters in their own types, tied ones still tied."""
        means = {key: (total / len(self.files)).to(self._first[key][1]) for key, total in self._sums.items()}
        values = {**means, **self._kept}
        model = {key: values[self._owner[key]] for key in self._first}
        return {**self._newest, "model": model, "averaged_from": [path.name for path in self.files]}

    def _check(self, path: Path, model: dict) -> None:
        first = self.files[0] if self.files else path
        missing, unknown = sorted(self._first.keys() - model.keys()), sorted(model.keys() - self._first.keys())
        if missing or unknown:
            parts = [f"lacks {_some(missing)}"] if missing else []
            parts += [f"also has {_some(unknown)}"] if unknown else []
            raise InputError(f"{path} does not have the same parameters as {first}: it {' and '.join(parts)}")
        for key, value in model.items():
            shape, dtype = self._first[key]
            if tuple(value.shape) != shape:
                raise InputError(f"{path}: {key} has shape {tuple(value.shape)}, but {shape} in {first}")
            if value.dtype != dtype:
                raise InputError(f"{path}: {key} is {value.dtype}, but {dtype} in {first}")

    def _regroup(self, shared: dict[str, str]) -> None:
        """Keys stay tied only while they share memory in every file; a key that no longer does gets its own sum."""
        owner: dict[str, str] = {}
        groups: dict[tuple, str] = {}
        for key in sorted(shared):
            owner[key] = groups.setdefault((self._owner.get(key), shared[key]), key)
        for key in set(owner.values()) - self._sums.keys():
            if self._owner.get(key) in self._sums:
                self._sums[key] = self._sums[self._owner[key]]
        self._owner = owner

    def _keep(self, path: Path, key: str, value, newer: bool) -> None:
        import torch

        if key not in self._kept or (newer and key.endswith(COUNTERS)):
            self._kept[key] = value.clone()
        elif not key.endswith(COUNTERS) and not torch.equal(self._kept[key], value):
            raise InputError(
                f"{path}: {key} ({value.dtype}) differs from {self.files[0]}, and integers cannot be averaged"
            )


def _shared_memory(model: dict) -> dict[str, str]:
    """For each key, the alphabetically first key of the same tensor in memory, possibly itself."""
    first: dict[tuple, str] = {}
    owner = {}
    for key in sorted(model):
        value = model[key]
        place = value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
        owner[key] = first.setdefault(place, key)
    return owner


def _finite(path: Path, key: str, value):
    """`value` (float64); InputError if it has NaN or infinite values."""
    finite = value.isfinite()
    if finite.all():
        return value
    if key.endswith(".conv.conv_bias") and value.dim() == 3:
        # fairseq's own DynamicConv saves this bias of shape (1, 1, C), but never initialises or uses it.
        return value.where(finite, 0)
    bad = int((~finite).sum())
    raise InputError(f"{path}: {bad} of {value.numel()} values of {key} are NaN or infinite: leave this checkpoint out")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _listing(paths: Sequence[Path]) -> str:
    return f"{len(paths)}" + (f": {', '.join(path.name for path in paths)}" if paths else "")


def average_once(files: Sequence[Path], output: Path, *, force: bool) -> bool:
    """`average`, unless `output` is already the mean of these files in their current state; returns whether it ran.

    Sizes and modification times are compared, not the contents, which may be many gigabytes. Another file of that name
    is replaced only with `force`.
    """
    if output.is_file():
        try:
            state = safe_torch_load(output, mapped=True)
        except InputError:
            state = None  # truncated or another kind of file: written again
        if isinstance(state, dict) and state.get("averaged_files") == _stamps(files):
            return False
    average(files, output, force=force)
    return True


def _stamps(files: Sequence[Path]) -> list[list]:
    """Name, size in bytes and modification time of each file."""
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def average(files: Sequence[Path], output: Path, *, force: bool = False) -> dict:
    """Write the mean of the checkpoints `files` to `output` and return it.

    Raises InputError for anything that would make the result wrong, and without `force` if `output` exists; nothing is
    written in that case.
    """
    from tqdm import tqdm

    seen: dict[Path, Path] = {}
    for path in files:
        if path.resolve() in seen:
            raise InputError(f"`inputs`: {path} is given twice")
        seen[path.resolve()] = path
    if output.resolve() in seen:
        raise InputError(f"`output` {output} is one of the checkpoints to average: choose another name")
    check_new_file(output, force)
    mean = Mean()
    stamps = _stamps(files)  # before reading, so that changes while reading are noticed next time
    for path in tqdm(files, desc="averaging", unit="file"):
        mean.add(path, load_checkpoint(path))
    result = mean.result() | {"averaged_files": stamps}
    torch_save(result, output)
    return result
