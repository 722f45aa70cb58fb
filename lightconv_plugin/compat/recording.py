"""The patch that writes the records of a training (records/)."""

from __future__ import annotations

import functools
import logging
import os
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightconv_plugin.compat.registry import patch
from lightconv_plugin.ops import backends
from lightconv_plugin.records.fairseq_log import numbers
from lightconv_plugin.records.file import append
from lightconv_plugin.records.trainings import IN_EPOCH, PER_EPOCH

logger = logging.getLogger(__name__)

_texts: dict[str, int] = {}  # the number of sentences of each file that this process has loaded
_recorder: Recorder | None = None  # of the training in this process, if it is the first of its processes


@patch(versions="all versions of fairseq")
def training_records() -> None:
    """fairseq writes what a training did as text only, in a log whose form depends on --log-format.

    With this patch the first process of a training that saves checkpoints also appends it to records.jsonl in
    --save-dir: when it has loaded its checkpoint, with every line of statistics, and at its end. Under stock
    fairseq-hydra-train, which imports the plugin too late, the end is missing.
    """
    from fairseq import checkpoint_utils
    from fairseq.data import data_utils
    from fairseq.distributed import utils
    from fairseq.logging import progress_bar

    data_utils.load_indexed_dataset = _counting(data_utils.load_indexed_dataset)
    checkpoint_utils.load_checkpoint = _starting(checkpoint_utils.load_checkpoint)
    progress_bar.progress_bar = _recording(progress_bar.progress_bar)
    call_main = utils.call_main

    def call_main_and_record(cfg: Any, main: Callable, **kwargs: Any) -> None:
        call_main(cfg, functools.partial(_run, main), **kwargs)  # started processes receive it by its name

    utils.call_main = call_main_and_record


class Recorder:
    """Appends the records of one training; a failure to write is logged, and the training continues."""

    def __init__(self, trainer: Any) -> None:
        self._folder = Path(trainer.cfg.checkpoint.save_dir)
        self._device = trainer.device.type
        self._backend: str | None = None
        self.write({"record": "start", "update": trainer.get_num_updates(), **_facts(trainer)})

    def statistics(self, part: str, epoch: int, update: int, stats: dict[str, Any]) -> None:
        """Add statistics, with the digits that fairseq logs; before the first ones, the operators' backend."""
        from fairseq.logging.progress_bar import format_stat

        if self._backend is None and (backend := backends.chosen(self._device)):
            self._backend = backend
            self.write({"record": "operators", "backend": backend})
        values = numbers((name, format_stat(value)) for name, value in stats.items() if name != "num_updates")
        self.write({"record": "statistics", "part": part, "epoch": epoch, "update": update, "values": values})

    def write(self, record: dict[str, Any]) -> None:
        try:
            append(self._folder, record | {"time": round(time.time(), 3)})
        except OSError as error:
            logger.error("the training continues, but a record of it could not be written: %s", error)


def _facts(trainer: Any) -> dict[str, Any]:
    """What a start tells about the settings, the sizes and the machine."""
    from omegaconf import OmegaConf

    settings = OmegaConf.to_container(trainer.cfg) if OmegaConf.is_config(trainer.cfg) else vars(trainer.cfg)
    groups = {name: vars(of) if isinstance(of, Namespace) else of for name, of in settings.items()}
    return {
        "settings": groups,
        "parameters": sum(p.numel() for p in trainer.get_model().parameters() if not getattr(p, "expert", False)),
        "dictionaries": _dictionaries(trainer.task),
        "texts": dict(_texts),
        "processes": trainer.cfg.distributed_training.distributed_world_size,
        "threads": torch.get_num_threads(),
        "gpus": [gpu.name for gpu in trainer.cuda_env_arr or ()],
    }


def _dictionaries(task: Any) -> dict[str, int]:
    """{language: number of entries}; the language is "" where a task has a single dictionary."""
    languages = [getattr(task.cfg, f"{side}_lang", None) for side in ("source", "target")]
    try:
        sides = [task.source_dictionary, task.target_dictionary]
    except Exception:  # a task with other dictionaries, or none
        return {}
    if None in languages:
        sides = sides[:1]
    return {lang or "": len(words) for lang, words in zip(languages, sides, strict=False) if words is not None}


def _counting(load: Callable) -> Callable:
    @functools.wraps(load)
    def load_indexed_dataset(path: str, *args: Any, **kwargs: Any) -> Any:
        dataset = load(path, *args, **kwargs)
        if dataset is not None:
            _texts[os.path.basename(path)] = len(dataset)
        return dataset

    return load_indexed_dataset


def _starting(load: Callable) -> Callable:
    @functools.wraps(load)
    def load_checkpoint(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
        from fairseq.distributed.utils import is_master

        global _recorder
        loaded = load(cfg, trainer, **kwargs)
        first = is_master(trainer.cfg.distributed_training) and not cfg.no_save
        _recorder = Recorder(trainer) if first else None
        return loaded

    return load_checkpoint


def _recording(make_bar: Callable) -> Callable:
    """Bars whose statistics are recorded before they are shown."""

    @functools.wraps(make_bar)
    def progress_bar(*args: Any, **kwargs: Any) -> Any:
        bar, recorder = make_bar(*args, **kwargs), _recorder
        if recorder is None:
            return bar
        in_training = kwargs.get("prefix") is None

        def recorded(show: Callable, part: str) -> Callable:
            def record(stats: Any, tag: str = "", step: int = 0) -> None:
                recorder.statistics(part if in_training else tag, kwargs["epoch"], step, stats)
                show(stats, tag=tag, step=step)

            return record

        bar.log, bar.print = recorded(bar.log, IN_EPOCH), recorded(bar.print, PER_EPOCH)
        return bar

    return progress_bar


def _run(main: Callable, cfg: Any, **kwargs: Any) -> None:
    """Run a command's main function in this process; record the end if it is a training."""
    global _recorder
    end = {"record": "end"}
    try:
        main(cfg, **kwargs)
    except BaseException as error:
        end["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if _recorder is not None:
            _recorder.write(end)
        _recorder = None
