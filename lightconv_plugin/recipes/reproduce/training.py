"""Training of one seed: whether it is done, whether an existing one matches, and what it took.

A training is finished if its checkpoint_last.pt has the requested number of updates, or if fairseq ended it (max_epoch,
patience, stop_min_lr). A training started or continued by hand is taken over if the settings stored in its checkpoint
match the configuration and its records have data of the same size; otherwise it is left alone.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightconv_plugin.checkpoints.loading import is_cut_short, safe_torch_load
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import locked
from lightconv_plugin.paths import workspace
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.data.data_bin import count_sentences
from lightconv_plugin.recipes.data.text_pool import count_lines
from lightconv_plugin.recipes.reproduce.protocol import canonical, flatten, is_machine
from lightconv_plugin.recipes.training.batch import samples_in, samples_of
from lightconv_plugin.recipes.training.plan import FILES
from lightconv_plugin.records.file import read_folder
from lightconv_plugin.records.trainings import Training, is_finished, last_start, trainings

NUMBERED = re.compile(r"checkpoint(\d+|_\d+_\d+)\.pt")
SIZE = ("dataset.max_tokens", "optimization.update_freq")
# What is fairseq's default unless a configuration says otherwise, and changes what is computed.
DEFAULTS = re.compile(
    r"common\.\w*(fp16|bf16|amp)\w*|(criterion|lr_scheduler|optimization|optimizer)\.\w+"
    r"|checkpoint\.(restore_file|finetune_from_model|reset_(dataloader|lr_scheduler|optimizer))"
    r"|dataset\.(batch_size|curriculum|required_batch_size_multiple|train_subset)"
    # Not what only saves memory, finds the data or scores the validation set.
    r"|model\.(?!(checkpoint|offload)_activations|compile_blocks|min_params_to_wrap)\w+"
    r"|task\.(?!data$|(source|target)_lang$|eval_)\w+"
)


def identity(path: Path) -> list[int] | None:
    """[size, modification time] of a file that is too large to hash each time; None if it does not exist."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return [about.st_size, about.st_mtime_ns]


def numbered(folder: Path) -> dict[str, list[int] | None]:
    """{name: [size, modification time]} of the numbered checkpoints."""
    return {
        path.name: identity(path) for path in sorted(folder.glob("checkpoint*.pt")) if NUMBERED.fullmatch(path.name)
    }


def head(checkpoint: Path) -> tuple[dict[str, Any], int]:
    """(settings by full key, updates) of a checkpoint of fairseq-hydra-train."""
    state = safe_torch_load(checkpoint)
    history = state.get("optimizer_history") or [{}]
    cfg = {key: vars(value) if hasattr(value, "__dict__") else value for key, value in (state.get("cfg") or {}).items()}
    return flatten(cfg), int(history[-1].get("num_updates", 0))


def progress(folder: Path, settings: Mapping[str, str]) -> tuple[bool, int, dict[str, Any]]:
    """(whether the training is finished, its updates, its settings), read from its last checkpoint."""
    last = folder / "checkpoint_last.pt"
    if not last.is_file() or is_cut_short(last):
        return False, 0, {}
    stored, updates = head(last)
    limit = float(settings.get("optimization.max_update", 0))
    finished = updates >= limit > 0 or is_finished(read_folder(folder).records)
    return finished, updates, stored


def defaults(settings: Mapping[str, str]) -> dict[str, str]:
    """fairseq's and the architecture's defaults for DEFAULTS, except those that follow from other settings."""
    from fairseq.dataclass import configs
    from fairseq.models import MODEL_DATACLASS_REGISTRY
    from fairseq.models.transformer import base_architecture
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    of = {
        "checkpoint": configs.CheckpointConfig,
        "common": configs.CommonConfig,
        "dataset": configs.DatasetConfig,
        "optimization": configs.OptimizationConfig,
    }
    chosen = {group: REGISTRIES[group]["dataclass_registry"] for group in ("criterion", "lr_scheduler", "optimizer")}
    chosen |= {"model": MODEL_DATACLASS_REGISTRY, "task": TASK_DATACLASS_REGISTRY}
    for group, registry in chosen.items():
        if known := registry.get(settings.get(f"{group}._name")):
            of[group] = known
    flat = flatten({group: vars(known()) for group, known in of.items()})
    if settings.get("model._name") == "transformer":
        # fairseq's own is of the older kind: a function has its defaults, and building it changes one.
        options = {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")}
        base_architecture(completed := argparse.Namespace(**options))
        if options.get("share_all_embeddings") == "true":
            completed.share_decoder_input_output_embed = True
        flat |= {f"model.{name}": value for name, value in vars(completed).items()}
    return {
        key: canonical(value)
        for key, value in flat.items()
        if DEFAULTS.fullmatch(key) and not key.endswith("._name") and not re.match(r"\$\{|\?\?\?", str(value))
    }


def differences(settings: Mapping[str, str], stored: Mapping[str, Any]) -> list[str]:
    """Settings of a configuration that differ in a checkpoint, one line each; those it does not store are skipped."""
    lines = []
    for key, wanted in (defaults(settings) | dict(settings)).items():
        if key not in stored or is_machine(key) or (found := canonical(stored[key])) == wanted:
            continue
        if FILES.fullmatch(key) and found in (str((base / wanted).resolve()) for base in (Path.cwd(), workspace())):
            continue  # a checkpoint has the absolute path
        if key not in SIZE or "null" in (found, wanted):
            lines.append(f"{key} {found} instead of {wanted}")
    if all(settings.get(key, "null") != "null" and stored.get(key) is not None for key in SIZE):
        sample, multiple = samples_of({}, {key: value.removesuffix(".0") for key, value in settings.items()})

        def tokens_of(values: Mapping[str, Any]) -> float:
            batch = sample * samples_in(int(float(values[SIZE[0]])), sample, multiple)
            return batch * float(canonical(values[SIZE[1]]).split(",")[0])

        processes = int(stored.get("distributed_training.distributed_world_size") or 1)
        tokens, used = tokens_of(settings), tokens_of(stored) * processes
        # Batch divides the tokens over the processes and their batches, and rounds down.
        batches = processes * float(canonical(stored[SIZE[1]]).split(",")[0])
        if not tokens - batches * sample < used <= tokens:
            lines.append(f"tokens per update {used:.0f} instead of {tokens:.0f}")
    return lines


def data_differences(start: Mapping[str, Any], data: Path) -> list[str]:
    """How the data in the record of a start differ from `data`: sizes of dictionaries and numbers of sentences."""
    lines = []
    for lang, types in start.get("dictionaries", {}).items():
        path = data / (f"dict.{lang}.txt" if lang else "dict.txt")
        # fairseq adds four special symbols to those of the file.
        here = count_lines(path) + 4 if path.is_file() else None
        if here != types:
            lines.append(f"a dictionary of {types:,} entries instead of {path.name}'s {here}")
    for name, number in start.get("texts", {}).items():
        here = count_sentences(data / f"{name}.idx")
        if here is not None and here != number:
            lines.append(f"{name} with {number:,} sentences instead of {here}")
    return sorted(lines)


def check_same(folder: Path, settings: Mapping[str, str], seed: int, stored: Mapping[str, Any], data: Path) -> None:
    """Check that the training in a folder is the one asked for. InputError lists the differences."""
    lines = differences(settings, stored)
    if stored.get("common.seed", seed) != seed:
        lines.append(f"common.seed {stored['common.seed']} instead of {seed}")
    lines += data_differences(last_start(read_folder(folder).records), data)
    if lines:
        raise InputError(
            f"{folder} has another training, with {'; '.join(lines)}: move it away, or set `runs` to another folder"
        )


def move_aside(folder: Path) -> Path:
    """Rename a folder to the first free name FOLDER.old1, FOLDER.old2 …: a training takes too long to delete."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def wait_for_training(folder: Path) -> None:
    """Wait for a training that writes to this folder: one started by hand, or left over from a killed run."""
    if (folder / "lock").is_file():
        with locked(folder / "lock", waiting=lambda: say(f"waiting: a training is writing to {folder}")):
            pass


def facts(folder: Path, updates: int) -> dict[str, Any]:
    """Facts about a finished training from its records, such as time and speed; None where unknown.

    curve: [[update, validation loss in bits per token, without label smoothing], …].
    """
    records = read_folder(folder).records
    start, training = last_start(records), (trainings(records) or [Training()])[-1]
    speed, seconds = training.epoch_speed, training.update_seconds
    losses = ((one.update, one.values.get("nll_loss", one.values.get("loss"))) for one in training.part("valid"))
    return {
        "updates": updates,
        "tokens_per_second": None if speed is None else round(speed, 1),
        "train_seconds": None if seconds is None else round(seconds, 1),
        "gpus": list(start.get("gpus", ())),
        "threads": start["processes"] * start["threads"] if {"processes", "threads"} <= start.keys() else None,
        "curve": [[update, loss] for update, loss in losses if loss is not None],
    }
