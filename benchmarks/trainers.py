"""fairseq's Trainer for a model, set up as by `fairseq-train`, and its batches."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer
from torch import nn

from benchmarks import systems
from benchmarks.report import BenchmarkError
from lightconv_plugin.compat import step_graphs

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
    model: nn.Module,
    task: TranslationTask,
    device: torch.device,
    dtype: str,
    batches: Iterator[dict],
    *,
    update_freq: int = 1,
    graphs: bool = False,
) -> Callable[[], None]:
    """A function that updates the model once with the next `update_freq` batches, with CUDA graphs or without."""
    updating = trainer(model, task, device, dtype)

    def step() -> None:
        with in_graphs() if graphs else contextlib.nullcontext():
            results = updating.train_step([next(batches) for _ in range(update_freq)])
        if results is None and dtype != "float16":  # whose loss scale is found by overflows
            raise BenchmarkError("a training step failed: out of memory, or gradients overflowed")

    return step


@contextlib.contextmanager
def in_graphs() -> Iterator[None]:
    """Inside, training steps are CUDA graphs, as with LIGHTCONV_GRAPHS=1."""
    with mock.patch.object(FairseqTask, "train_step", FairseqTask.train_step):
        step_graphs.steps_in_graphs.apply()
        yield


def trainer(model: nn.Module, task: TranslationTask, device: torch.device, dtype: str) -> Trainer:
    """fairseq's Trainer for the model, with the recipe's criterion and optimizer."""
    config = _configuration(device.type, dtype, "data")
    return Trainer(config, task, model, task.build_criterion(config.criterion))


def _configuration(device: str, dtype: str, data: str):
    """The complete configuration of fairseq-train with the recipe's options."""
    half = {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(dtype, [])
    arguments = [data, *_RECIPE, *["--cpu"] * (device == "cpu"), *half]
    parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # hydra's warnings about how fairseq uses it
        return convert_namespace_to_omegaconf(parsed)
