"""The request for a reproduction: one row, checked before any work."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.paths import beside, configs_dir, find_config, short, workspace
from lightconv_plugin.recipes.data.options import as_typed
from lightconv_plugin.recipes.data.tasks import folder_of, parse
from lightconv_plugin.recipes.reproduce.protocol import (
    Protocol,
    changing,
    flatten,
    load_yaml,
    read_protocol,
    settings_of,
    split_override,
    split_words,
)
from lightconv_plugin.recipes.reproduce.table import SMOKE, default_results, default_table
from lightconv_plugin.recipes.steps import STAMPS
from lightconv_plugin.recipes.training.batch import BATCH_SIZE
from lightconv_plugin.recipes.training.overrides import expanded
from lightconv_plugin.recipes.training.plan import count_gpus, count_processes
from lightconv_plugin.scoring.measuring import Languages

SMOKE_CONFIG, SMOKE_SEEDS = f"{SMOKE}/dynamicconv", (1, 2)


@dataclass(frozen=True)
class Job:
    """One row. Paths are absolute.

    changing: the overrides that change what is computed, one of task.data with them. settings: those that determine
    what the training computes.
    folder: where the trainings go, one folder for each seed. data: the binarised data.
    languages: (source, target) of the trainings; None if the names of the data's files say it.
    prepare: a task and its options; None to take the data as it is. prepare_options: the user's that change the data.
    """

    config: Path
    system: str
    protocol: Protocol
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]
    changing: tuple[str, ...]
    settings: dict[str, str]
    folder: Path
    data: Path
    languages: Languages
    prepare: tuple[str, ...] | None
    prepare_options: str
    results: Path
    table: Path


def plan(
    config: str | Path,
    seeds: Sequence[int],
    *,
    overrides: Sequence[str] = (),
    runs: Path | None = None,
    results: Path | None = None,
    prepare: bool = True,
    prepare_options: str = "",
) -> Job:
    """Plan the work for a row.

    config: a name or a path, as for `find_config`, with a protocol.yaml next to it.
    overrides: hydra's, and named changes. One that changes what is computed needs `runs`.
    runs: trainings go to RUNS/TASK/SYSTEM instead of the configuration's save_dir.
    results: the row goes to RESULTS/TASK/SYSTEM.json and the table to RESULTS/RESULTS.md. Default: `default_results`
    and `default_table` for a published configuration, otherwise RUNS/results.
    prepare: False to take the data as it is. prepare_options: more options for the preparation. Those that change the
    data, and other data in task.data, need `runs`, too.

    Raises:
        InputError: the configuration, its protocol or an override is wrong.
    """
    path = find_config(config)
    protocol, system = read_protocol(path.parent), path.stem
    if system not in protocol.systems:
        raise InputError(f"{protocol.path}: systems has no {system}; there are: {', '.join(protocol.systems)}")
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise InputError(f"`seeds` must be different numbers from 0, got {' '.join(map(str, seeds)) or 'none'}")
    content = load_yaml(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold groups of options, as those in configs/ do, got: {type(content).__name__}")
    flat = flatten(content)
    overrides = expanded(content, overrides)
    given = dict(split_override(item) for item in overrides)
    for key, instead in (("checkpoint.save_dir", "runs"), ("common.seed", "seeds")):
        if key in given:
            raise InputError(f"{key} cannot be overridden here: use `{instead}`")
    _check_batch(content, overrides, given)
    chosen = {**flat, **given}
    for key in ("checkpoint.no_save", "checkpoint.no_last_checkpoints"):
        if chosen.get(key):
            raise InputError(f"{key} is true: whether a training is finished is read from its checkpoint_last.pt")
    most = max(protocol.tune.average)
    by_updates = chosen.get("checkpoint.no_epoch_checkpoints")  # otherwise those of epochs are averaged
    key = "checkpoint.keep_interval_updates" if by_updates else "checkpoint.keep_last_epochs"
    if isinstance(number := given.get(key), int) and 0 < number < most:
        raise InputError(f"{key}={number} keeps too few checkpoints: {protocol.path} averages up to {most} of them")
    if by_updates and not chosen.get("checkpoint.save_interval_updates"):
        raise InputError("checkpoint.no_epoch_checkpoints needs checkpoint.save_interval_updates: nothing to average")
    for key in ("checkpoint.save_dir", "task.data"):
        if not isinstance(flat.get(key), str):
            raise InputError(f"{path} has no {key}")
    if not given.get("task.data", "."):
        raise InputError("task.data must name a folder, got: nothing")
    changes, usual = changing(content, overrides), workspace() / flat["task.data"]
    data = Path(str(given["task.data"])) if "task.data" in given else usual
    if data.resolve() != usual.resolve() and protocol.task != SMOKE:
        changes.append(f"task.data={data.resolve()}")
    words = split_words(prepare_options, "`prepare_options`")
    preparing = shlex.join(without_places(words))
    published = path.is_relative_to(configs_dir()) and protocol.task != SMOKE and not changes and not preparing
    if not published and not runs:
        changed = " ".join(changes) or (preparing and f"`prepare_options` {preparing!r}")
        why = f"{changed} changes what is computed" if changed else f"{config} is not a published configuration"
        raise InputError(f"{why}: `runs` must name a folder for its trainings and its row")
    if prepare_options and not prepare:
        raise InputError(f"`prepare_options` {prepare_options!r} is not valid with `no_prepare`: give one of them")
    made, kept, settings = preparation(protocol), list(overrides), settings_of(content, overrides)
    if "task.data" in given:
        kept = [item for item in kept if split_override(item)[0] != "task.data"] + [f"task.data={data.resolve()}"]
        if prepare and data.name != "data-bin":
            raise InputError(f"task.data={data} is not named data-bin, as prepared data is: set `no_prepare`")
        made += ["--out", str(beside(data, STAMPS).parent)]
    if words and (fills := _filled(*made, *words)) != _filled(*made):
        raise InputError(
            f"`prepare_options` {prepare_options!r} fills {short(fills)}, but the training reads "
            f"{short(data.absolute())}: override task.data={short(fills)}/data-bin"
        )
    results = results or (None if published or runs is None else runs / "results")
    folder = ((runs / protocol.task / system) if runs else workspace() / flat["checkpoint.save_dir"]).resolve()
    if results and folder.is_relative_to(results.resolve()):
        raise InputError(f"`results` {results} has the trainings in it, in {folder}: give a folder for rows alone")
    return Job(
        config=path,
        system=system,
        protocol=protocol,
        seeds=tuple(seeds),
        overrides=tuple(kept),
        changing=tuple(changes),
        settings=settings,
        folder=folder,
        data=data.absolute(),  # not resolved: what was prepared with it may lie beside a link
        languages=direction_of(settings),
        prepare=(*made, *words) if prepare else None,
        prepare_options=preparing,
        results=results.resolve() if results else default_results(),
        table=results.resolve() / "RESULTS.md" if results else default_table(),
    )


def _check_batch(content: Mapping[str, Any], overrides: Sequence[str], given: Mapping[str, Any]) -> None:
    """Raise InputError for an override that is of each process, where there are several: a row does not say how many.

    The tokens per update of a configuration are divided among them.
    """
    for key in ("optimization.update_freq", BATCH_SIZE):
        if given.get(key) is None:
            continue
        try:
            processes, _ = count_processes(dict(content), list(overrides), 0, count_gpus)
        except ValueError as error:
            raise InputError(str(error)) from error
        if processes > 1:
            raise InputError(
                f"{key}={given[key]} would be that of each of {processes} GPUs, whose number no row says: use one "
                "GPU (CUDA_VISIBLE_DEVICES=0)"
            )


def direction_of(settings: Mapping[str, str]) -> Languages:
    """(source, target) of a training; fairseq takes both from the names of the data's files if one is missing."""
    source, target = (settings.get(f"task.{side}_lang", "null") for side in ("source", "target"))
    return (None, None) if "null" in (source, target) else (source, target)


def without_places(words: Sequence[str]) -> list[str]:
    """The options of a preparation that change its result."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--data", "--mirror", "--workers"):
        parser.add_argument(option, nargs="?")  # without a value: for the preparation to refuse
    return parser.parse_known_args(words)[1]


def preparation(protocol: Protocol) -> list[str]:
    """The task to prepare and its options; --out is relative to the workspace, like task.data."""
    words = split_words(protocol.prepare, f"{protocol.path}: prepare")
    return [
        str(workspace() / word) if before == "--out" else word
        for before, word in zip(["", *words], words, strict=False)
    ]


def _filled(task: str, *words: str) -> Path:
    """The folder that a preparation with these options fills."""
    try:
        return folder_of(task, parse(task, words)).resolve()
    except InputError as error:
        raise InputError(f"`prepare_options`: {as_typed(str(error))}") from error


def plan_smoke(*, overrides: Sequence[str] = (), runs: Path | None = None, **options) -> Job:
    """The plan of the miniature task that tests every step, with its own configuration, seeds and folder."""
    runs = runs or workspace() / "runs" / SMOKE
    if not any(split_override(item)[0] == "task.data" for item in overrides):
        overrides = [*overrides, f"task.data={runs.resolve()}/data/data-bin"]
    return plan(SMOKE_CONFIG, SMOKE_SEEDS, overrides=overrides, runs=runs, **options)
