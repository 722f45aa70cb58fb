"""A patch that trains with CUDA graphs."""

import functools
import os
from typing import Any

import torch

from lightconv_plugin.compat.registry import patch
from lightconv_plugin.errors import InputError, VariableError
from lightconv_plugin.modules.recorder import CudaGraphs
from lightconv_plugin.ops.backends import on_gpu


def _asked_for() -> bool:
    value = os.environ.get("LIGHTCONV_GRAPHS") or "0"
    if value not in ("0", "1"):
        raise VariableError(f"LIGHTCONV_GRAPHS must be 0, 1 or unset, got {value!r}")
    return value == "1"


@patch(versions="all versions of fairseq, with LIGHTCONV_GRAPHS=1", needed=_asked_for)
def steps_in_graphs() -> None:
    """fairseq launches every kernel of a training step by itself: small batches keep the host busier than the GPU.

    Forward and backward pass are one launch for a batch whose size has been seen (models/step_graphs.py). Tasks with a
    train_step of their own and trainings without a GPU stay as they are.
    """
    from fairseq.tasks.fairseq_task import FairseqTask

    original = FairseqTask.train_step

    @functools.wraps(original)
    def train_step(
        self: Any,
        sample: dict,
        model: torch.nn.Module,
        criterion: torch.nn.Module,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
    ) -> Any:
        # With forward hooks, fairseq looks for the operation that made a NaN: a graph would not call them.
        if ignore_grad or model._forward_hooks or not on_gpu(next(model.parameters())):
            return original(self, sample, model, criterion, optimizer, update_num, ignore_grad)
        graphs = vars(criterion).get("step_graphs") or _graphs(self, model, criterion)
        model.train()
        model.set_num_updates(update_num)  # type: ignore[operator]  # fairseq's models have it
        results = graphs.step(sample, optimizer)
        if results is not None:
            return results
        try:
            return original(self, sample, model, criterion, optimizer, update_num)
        except torch.OutOfMemoryError:
            graphs.stop()  # fairseq leaves out this batch; the next one of its size has the memory of the recordings
            raise

    FairseqTask.train_step = train_step


def _graphs(task: Any, model: torch.nn.Module, criterion: torch.nn.Module) -> Any:
    from lightconv_plugin.models.step_graphs import StepGraphs  # it knows fairseq's models

    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise InputError(
            "LIGHTCONV_GRAPHS=1 is for one GPU: processes that train together exchange gradients in between"
        )
    sides = {name: bool(getattr(task.cfg, name, False)) for name in ("left_pad_source", "left_pad_target")}
    recorder = CudaGraphs(next(model.parameters()).device)
    graphs = vars(criterion)["step_graphs"] = StepGraphs(
        model, criterion, recorder=recorder, pad=task.target_dictionary.pad(), **sides
    )
    return graphs
