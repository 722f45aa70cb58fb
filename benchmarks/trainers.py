"""fairseq's Trainer for a model, set up as by `fairseq-train`, and its batches."""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Iterator

import torch
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer
from torch import nn

from benchmarks import systems
from benchmarks.report import BenchmarkError

# Warnings about fairseq's use of old torch interfaces.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"fairseq\.")

WARM_UP = 2
# The recipe of the paper's small models. The architecture named here is not built, since the Trainer is given a model.
_RECIPE = (
    "--arch transformer --task translation --optimizer adam --adam-betas (0.9,0.98) --weight-decay 0.0001"
    " --lr 1e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 --criterion label_smoothed_cross_entropy"
    " --label-smoothing 0.1 --max-tokens 4096 --clip-norm 0 --seed 1"
).split()


def task_and_batches(
    options: argparse.Namespace, preset: systems.Preset, count: int
) -> tuple[TranslationTask, list[dict]]:
    """A translation task and its first batches in the random order of training: from --data, or of random tokens."""
    if options.data is None:
        words = systems.dictionary(preset.vocabulary)
        return systems.task(words), systems.random_batches(preset, words, count)
    try:
        task = TranslationTask.setup_task(_configuration("cpu", options.dtype, str(options.data)).task)
        task.load_dataset("train")
    except Exception as error:  # fairseq raises bare Exceptions
        raise BenchmarkError(f"--data: {options.data}: {error}") from error
    iterator = task.get_batch_iterator(
        task.dataset("train"),
        max_tokens=options.max_tokens,
        max_positions=(1024, 1024),
        ignore_invalid_inputs=True,
        required_batch_size_multiple=8,
        seed=1,
    )
    batches = list(itertools.islice(iterator.next_epoch_itr(shuffle=True), count))
    return task, batches


def steps(
    model: nn.Module, task: TranslationTask, device: torch.device, dtype: str, batches: Iterator[dict]
) -> Callable[[], None]:
    """A function that makes one update of the model with the next batch."""
    updating = trainer(model, task, device, dtype)

    def step() -> None:
        if updating.train_step([next(batches)]) is None:
            raise BenchmarkError("a training step failed: out of memory, or gradients overflowed")

    return step


def trainer(model: nn.Module, task: TranslationTask, device: torch.device, dtype: str) -> Trainer:
    """fairseq's Trainer for the model, with the recipe's criterion and optimizer."""
    config = _configuration(device.type, dtype, "data")
    return Trainer(config, task, model, task.build_criterion(config.criterion))


def _configuration(device: str, dtype: str, data: str):
    """The complete configuration of fairseq-train with the recipe's options."""
    arguments = [data, *_RECIPE, *["--cpu"] * (device == "cpu"), *["--bf16"] * (dtype == "bfloat16")]
    parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # hydra's warnings about how fairseq uses it
        return convert_namespace_to_omegaconf(parsed)
