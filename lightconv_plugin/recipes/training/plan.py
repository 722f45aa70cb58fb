"""Completes a configuration for training: makes paths absolute and divides the batch over the processes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from lightconv_plugin.checkpoints.loading import is_cut_short
from lightconv_plugin.diagnostics import machine
from lightconv_plugin.errors import InputError
from lightconv_plugin.ops.instructions import bf16_advice
from lightconv_plugin.paths import package_dir, workspace
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.data.data_bin import check_data, count_longer
from lightconv_plugin.recipes.training.batch import BATCH_SIZE, MAX_TOKENS, Batch, whole_number
from lightconv_plugin.recipes.training.overrides import (
    expanded,
    for_hydra,
    get,
    given_values,
    is_set,
    quote,
    replaced,
    setting,
)
from lightconv_plugin.scoring.measuring import check_binarised

# fairseq's groups. hydra takes a file with such a name for that group and rejects all other groups in it.
GROUPS = (
    "bmuf bpe checkpoint common common_eval criterion dataset distributed_training ema eval_lm generation interactive"
    " lr_scheduler model optimization optimizer scoring task tokenizer"
).split()

# The options that name a file to read.
FILES = re.compile(
    r"checkpoint\.(restore_file|finetune_from_model|continue_once)|ema\.ema_seed_model|model\.\w*embed_path"
    r"|task\.generation_shortlist"
)

# The options that give fairseq's last checkpoint another name.
_OTHER_LAST = ("checkpoint.checkpoint_suffix", "distributed_training.use_sharded_state")


def read_config(path: Path) -> dict[str, Any]:
    """The option groups of a configuration, checked as far as possible without fairseq.

    Raises:
        OSError, ValueError, yaml.YAMLError: the file is not a configuration; the message names the file and the key.
    """
    if path.suffix != ".yaml" or path.stem in GROUPS:
        raise ValueError(f"{path}: a configuration must be called NAME.yaml, NAME not one of {', '.join(GROUPS)}")
    text = path.read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold groups of options, as those in configs/ do, got: {type(config).__name__}")
    for key, value in config.items():
        if key not in (*GROUPS, "hydra", "defaults"):
            raise ValueError(f"{path}: there is no group {key}, only {', '.join(GROUPS)}")
        if key != "defaults" and not isinstance(value, dict):
            raise ValueError(f"{path}: {key} must hold options, got: {value!r}")
    if text.startswith("\ufeff"):
        raise ValueError(f"{path} begins with a byte order mark (BOM), which hydra does not read: save it without")
    if not re.match(r"(#.*\n|\s*\n)*#\s*@package\s+_global_\s*\n", text):
        raise ValueError(
            f"{path} must begin with the line '# @package _global_', which tells hydra that its groups are at the top"
        )
    return config


Fitting = Callable[[Batch, Path, list[str]], int]


def plan(
    config: dict[str, Any],
    overrides: list[str],
    processes: int,
    root: Path,
    cwd: Path,
    fitting: Fitting | None = None,
) -> tuple[Path, list[str]]:
    """The save_dir and the overrides to pass on.

    Relative paths in a configuration are relative to `root`, those in an override to `cwd`.

    Args:
        fitting: returns the largest batch for a training, given the configured one, save_dir and the overrides so far
    """
    given = given_values(overrides)
    result = []

    def value_of(key: str) -> tuple[Path, str]:
        base, value = (cwd, given[key].strip("'\"")) if key in given else (root, get(config, key))
        if not isinstance(value, str) or value in ("", "null"):  # the working directory is .
            raise ValueError(f"the configuration has no {key}: add it, or give {key}=PATH")
        return base, value

    base, places = value_of("task.data")
    folders = [(base / place).resolve() for place in places.split(":")]  # fairseq uses several in turn, by epoch
    base, place = value_of("checkpoint.save_dir")
    save_dir = (base / place).resolve()
    for key in _OTHER_LAST:
        if str(value := setting(config, given, key)).lower() not in ("none", "false"):
            raise ValueError(f"{key} is not supported, got: {value}; a training resumes from checkpoint_last.pt")
    subset = setting(config, given, "dataset.train_subset") or "train"
    for data in folders:
        if not data.is_dir():
            raise ValueError(f"no folder {data} with binarised data: prepare it first, or give task.data=DATA-BIN")
        if not any("raw" in str(setting(config, given, f"{group}.dataset_impl")) for group in ("task", "dataset")):
            check_binarised(data, subset)
        check_data(data)
    result += for_hydra(config, [f"task.data={quote(':'.join(map(str, folders)))}"])
    result.append(f"checkpoint.save_dir={quote(save_dir)}")
    if batch := Batch.of(config, given, processes):
        most, validation = batch.max_tokens, f"{MAX_TOKENS}_valid"
        if fitting:
            batch = replace(batch, max_tokens=fitting(batch, save_dir, replaced(overrides, result)))
        told = batch.overrides()
        # fairseq's default is the max_tokens of a process. Less would not hold the longest sentence.
        if f"{MAX_TOKENS}={most}" not in told and validation not in given and not get(config, validation):
            result.append(f"{validation}={most}")
        result += told
        largest, configured = batch.divided()[0], whole_number(MAX_TOKENS, get(config, MAX_TOKENS))
        if largest < configured:
            languages = {setting(config, given, f"task.{side}_lang") for side in ("source", "target")}
            counts = [count_longer(folder, subset, languages, largest, configured) for folder in folders]
            _say_what_is_left_out(counts, largest)
    return save_dir, replaced(overrides, result)


def _say_what_is_left_out(counts: list[tuple[int, int]], max_tokens: int) -> None:
    """Say how many pairs are skipped by fairseq because they only fit into the larger batches of the configuration."""
    longer, pairs = (sum(column) for column in zip(*counts, strict=True))
    if longer:
        say(
            f"{longer:,} of {pairs:,} training pairs are left out: a side has more than {max_tokens} tokens, "
            "the largest batch of a process"
        )


def file_paths(config: dict[str, Any], overrides: list[str], root: Path, cwd: Path) -> list[str]:
    """The overrides with absolute paths of the files that a training reads: checkpoints, embeddings and a shortlist.

    fairseq would look for them in save_dir/hydra. Relative paths are relative to the same folders as in `plan`.

    Raises:
        ValueError: such a file does not exist.
    """
    given = given_values(overrides)

    def absolute(key: str, value: Any, base: Path) -> str | None:
        text = value.strip("'\"") if isinstance(value, str) else ""
        # fairseq itself looks for this name, its default, in save_dir. An address or a variable is not a path.
        if text in ("", "null", "checkpoint_last.pt") or "://" in text or "${" in text:
            return None
        path = (base / text).resolve()
        if not path.is_file():
            raise ValueError(f"{key}: there is no file {path}")
        return quote(path)

    result = []
    for item in overrides:
        key = item.lstrip("+").partition("=")[0]
        path = absolute(key, given[key], cwd) if key in given and FILES.fullmatch(key) else None
        result.append(item if path is None else f"{item.partition('=')[0]}={path}")
    for group, options in config.items():
        for option, value in options.items() if isinstance(options, dict) else ():
            key = f"{group}.{option}"
            if FILES.fullmatch(key) and key not in given and (path := absolute(key, value, root)) is not None:
                result.append(f"{key}={path}")
    return result


def tensorboard(config: dict[str, Any], overrides: list[str], save_dir: Path, root: Path, cwd: Path) -> list[str]:
    """The overrides with an absolute common.tensorboard_logdir: `save_dir`/tensorboard by default."""
    key = "common.tensorboard_logdir"
    given = given_values(overrides)
    if key in given:
        value, base = given[key].strip("'\""), cwd
    else:
        value, base = get(config, key), root
        if not isinstance(config.get("common"), dict) or "tensorboard_logdir" not in config["common"]:
            value = str(save_dir / "tensorboard")
    if value in ("null", "", None):
        return replaced(overrides, [f"{key}=null"])
    if not any(importlib.util.find_spec(name) for name in ("tensorboard", "tensorboardX")):
        say("no TensorBoard files: the package tensorboard is not installed")
        return replaced(overrides, [f"{key}=null"])
    return replaced(overrides, [f"{key}={quote((base / value).resolve())}"])


def user_dir(config: dict[str, Any], overrides: list[str], root: Path, cwd: Path) -> list[str]:
    """The overrides with an absolute common.user_dir: this package, which is always imported, if none is given.

    Raises:
        ValueError: the folder does not exist.
    """
    key = "common.user_dir"
    given = given_values(overrides)
    base, value = (cwd, given[key].strip("'\"")) if key in given else (root, get(config, key))
    folder = package_dir() if value in (None, "", "null") else Path(os.path.abspath(base / value))
    if not folder.exists():
        raise ValueError(f"{key}: there is no folder {folder}")
    return replaced(overrides, [f"{key}={quote(folder)}"])


def count_processes(
    config: dict[str, Any], overrides: list[str], asked: int, count_gpus: Callable[[], int]
) -> tuple[int, bool]:
    """(number of processes on this machine, whether they train on the CPU). 0 asked for: one per GPU, or one without.

    Raises:
        ValueError: there are fewer GPUs than processes, or fairseq's own options set the number.
    """
    given = given_values(overrides)
    for key in ("distributed_training.distributed_world_size", "distributed_training.distributed_num_procs"):
        if key in given or get(config, key) is not None:
            raise ValueError(f"{key} follows from `processes` and `nodes`: give these")
    on_cpu = is_set("common.cpu", config, overrides)
    gpus = 0 if on_cpu else count_gpus()
    if gpus and asked > gpus:
        raise ValueError(
            f"`processes` is {asked}: this machine has {gpus} GPUs; to train on its CPU add common.cpu=true"
        )
    return asked or max(1, gpus), not gpus


def repair_last_checkpoint(save_dir: Path) -> None:
    """Replace a truncated checkpoint_last.pt, left by a killed run, with the newest complete checkpoint.

    fairseq copies the checkpoint to this name, so a kill can truncate it. A checkpoint is a zip archive with its index
    at the end.
    """
    last = save_dir / "checkpoint_last.pt"
    if not last.is_file() or not is_cut_short(last):
        return
    whole = [path for path in save_dir.glob("checkpoint*.pt") if path != last and not is_cut_short(path)]
    if whole:
        newest = max(whole, key=lambda path: path.stat().st_mtime)
        temporary = last.with_name(last.name + ".tmp")
        shutil.copyfile(newest, temporary)
        os.replace(temporary, last)  # never removed first: without the file, training would start from scratch
    else:
        last.unlink()
    say(f"{last} was cut short: resuming from {newest.name if whole else 'the start'}")


def count_gpus() -> int:
    """The GPUs that torch can use.

    Raises:
        ValueError: torch can use none although the machine has a GPU driver. Days of training on the CPU are surely
            not what the user wants.
    """
    import torch

    if (problem := machine.gpu_problem()) is not None:
        raise ValueError(f"{problem[0]}: {problem[1]}, or train on the CPU: common.cpu=true")
    return torch.cuda.device_count()


@dataclass(frozen=True)
class Plan:
    """Where a training writes, its processes on this machine, and the overrides for fairseq-hydra-train."""

    save_dir: Path
    processes: int
    on_cpu: bool
    overrides: tuple[str, ...]


def largest_batch(
    asked: int | Literal["auto"] | None,
    config: Mapping[str, Any],
    given: Mapping[str, str],
    nodes: int,
    on_cpu: bool,
    fitting: Fitting,
) -> Fitting | None:
    """How to find the largest batch: as `asked`, by default with `fitting` on one machine with GPUs.

    None: it is the configuration's, or an override's; always where batches are limited in sentences as well.

    Raises:
        ValueError: what is asked for contradicts an override or that limit, or is trials on several machines.
    """
    fixed = {key: given[key] for key in (MAX_TOKENS, "optimization.update_freq") if key in given}
    if sentences := setting(config, given, BATCH_SIZE):
        fixed[BATCH_SIZE] = sentences
    if asked is not None and fixed:
        key, value = next(iter(fixed.items()))
        raise ValueError(f"`micro_batch` {asked} is not valid with {key}={value}: give one of them")
    if asked == "auto" and nodes > 1:
        raise ValueError(f"`micro_batch` auto tries batches on one machine: for {nodes}, give a number of tokens")
    if isinstance(asked, int):
        return lambda batch, save_dir, overrides: asked
    return fitting if asked == "auto" or (not on_cpu and nodes == 1 and not fixed) else None


def make_plan(
    path: Path,
    overrides: list[str],
    processes: int,
    nodes: int,
    micro_batch: int | Literal["auto"] | None,
    fitting: Fitting,
) -> Plan:
    """The plan for a configuration file on `nodes` machines with `processes` processes each (0: one per GPU).

    Args:
        micro_batch, fitting: see `largest_batch`

    Raises:
        InputError: the configuration, an override or the data are wrong.
    """
    root, cwd = workspace(), Path.cwd()
    try:
        config = read_config(path)
        overrides = expanded(config, overrides)
        if micro_batch is not None and not get(config, MAX_TOKENS):
            raise ValueError(f"`micro_batch` {micro_batch} needs a configuration with {MAX_TOKENS}")
        processes, on_cpu = count_processes(config, overrides, processes, count_gpus)
        world = processes * nodes
        if on_cpu and is_set("common.bf16", config, overrides) and (advice := bf16_advice()):
            say(advice)
        overrides = user_dir(config, file_paths(config, overrides, root, cwd), root, cwd)
        find = largest_batch(micro_batch, config, given_values(overrides), nodes, on_cpu, fitting)
        save_dir, overrides = plan(config, overrides, world, root, cwd, find)
        overrides = tensorboard(config, overrides, save_dir, root, cwd)
        own = f"hydra.run.dir={quote(save_dir / 'hydra')}"
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(str(error)) from error
    return Plan(save_dir, processes, on_cpu, (own, *overrides, f"distributed_training.distributed_world_size={world}"))
