"""Patches for training and validating without a GPU, with one process or several."""

import functools
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightconv_plugin import allocator
from lightconv_plugin.cgroups import cores
from lightconv_plugin.compat.registry import patch
from lightconv_plugin.ops.instructions import bf16_advice

_logger = logging.getLogger(__name__)
_LAUNCHER_VARIABLES = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}


@patch(versions="all versions of fairseq")
def processes_without_gpu() -> None:
    """fairseq counts CUDA devices to start processes: without any, data parallel training fails or does nothing.

    - `--distributed-world-size N` fails an assertion; with an init method it starts 0 workers and exits with status 0.
    - torchrun's workers train independently: the world size defaults to the number of GPUs, and torchrun's is read only
      if that is above 1. Several machines with one GPU each fail in the same way. fairseq 0.12.2 reads torchrun's world
      size, but then requires NCCL.

    With this patch N workers are started with gloo, and torchrun's workers train together. fairseq still reads SLURM's
    variables on GPUs only.
    """
    from fairseq.distributed import utils

    original = utils.call_main

    def call_main(cfg: Any, main: Callable, **kwargs: Any) -> None:
        parallel = cfg.distributed_training
        launched = (
            parallel.distributed_init_method is None
            and os.environ.keys() >= _LAUNCHER_VARIABLES
            and int(os.environ["WORLD_SIZE"]) > 1
        )
        # Only a training has a model in its configuration; an evaluation is not split unless requested.
        if launched and parallel.distributed_world_size == 1 and cfg.model is not None:
            parallel.distributed_world_size = int(os.environ["WORLD_SIZE"])
        on_cpu = cfg.common.cpu or not torch.cuda.is_available()
        if not on_cpu or cfg.common.tpu:
            return original(cfg, main, **kwargs)
        if parallel.distributed_world_size == 1 and parallel.distributed_init_method is None:
            return main(cfg, **kwargs)
        if parallel.distributed_backend == "nccl":
            parallel.distributed_backend = "gloo"
        if launched:
            parallel.distributed_init_method = "env://"
            parallel.distributed_world_size = int(os.environ["WORLD_SIZE"])
            parallel.distributed_rank = int(os.environ["RANK"])
            parallel.distributed_no_spawn = True
        if parallel.distributed_no_spawn:
            if parallel.distributed_init_method is None:
                raise ValueError("--distributed-no-spawn needs --distributed-init-method, such as tcp://localhost:PORT")
            return original(cfg, main, **kwargs)
        return _spawn(utils.distributed_main, cfg, main, kwargs)

    utils.call_main = call_main


def _spawn(distributed_main: Callable, cfg: Any, main: Callable, kwargs: dict[str, Any]) -> None:
    """Run `main(cfg, **kwargs)` in one local process per rank, with ranks counted from 0."""
    parallel = cfg.distributed_training
    if parallel.distributed_rank != 0 or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise ValueError(
            f"without a GPU one command starts all {parallel.distributed_world_size} workers, on this machine. "
            "For one command per worker use torchrun, or pass --distributed-no-spawn, "
            "--distributed-init-method and --distributed-rank to each."
        )
    if parallel.distributed_init_method is None:
        port = parallel.distributed_port
        if port <= 0:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
        parallel.distributed_init_method = f"tcp://localhost:{port}"
    # Every worker would use all cores and wait for the slowest, so the cores are divided.
    share = cores() // parallel.distributed_world_size
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    parallel.distributed_rank = None  # each worker adds its index to start_rank
    torch.multiprocessing.spawn(
        distributed_main, (main, cfg, {**kwargs, "start_rank": 0}), nprocs=parallel.distributed_world_size
    )


@patch(versions="all versions of fairseq", needed=lambda: not torch.cuda.is_available())
def gather_without_gpu() -> None:
    """fairseq gathers statistics through CUDA tensors only: several processes cannot validate on the CPU.

    fairseq-validate uses this, and so do the criterions whose statistics are not plain sums.
    """
    from fairseq.distributed import utils
    from fairseq.utils import move_to_cpu

    def all_gather_list(data: Any, group: Any = None, max_size: int = 16384) -> list[Any]:
        group = utils.get_global_group() if group is None else group
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, move_to_cpu(data), group=group)
        return gathered

    utils.all_gather_list = all_gather_list


@patch(versions="all versions of fairseq")
def ddp_without_gpu() -> None:
    """fairseq passes a CUDA device to its default --ddp-backend pytorch_ddp, which torch rejects for a CPU model."""
    from fairseq.models import distributed_fairseq_model as wrappers

    original = wrappers.DistributedDataParallel

    def distributed_data_parallel(module: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            kwargs.update(device_ids=None, output_device=None)
        return original(module, **kwargs)

    wrappers.DistributedDataParallel = distributed_data_parallel


@patch(versions="all versions of fairseq", needed=lambda: not torch.cuda.is_available())
def fp16_without_gpu() -> None:
    """fairseq asks for the current CUDA device in a training with --fp16, and says nothing else without a GPU.

    --bf16 does train on a CPU. So do --memory-efficient-fp16 and --fp16-no-flatten-grads, until the first overflow.
    """
    from fairseq.optim.fp16_optimizer import FP16Optimizer

    original = FP16Optimizer.build_fp32_params.__func__

    def build_fp32_params(cls: type, args: Any, params: Any, flatten: bool = True) -> Any:
        if flatten:
            raise ValueError(
                "common.fp16 (--fp16) needs a GPU, and torch sees none: leave it out, or use common.bf16 (--bf16) if "
                "the processor computes in bfloat16"
            )
        return original(cls, args, params, flatten)

    FP16Optimizer.build_fp32_params = classmethod(build_fp32_params)


@patch(versions="all versions of fairseq", needed=lambda: bf16_advice() is not None)
def bf16_without_avx512() -> None:
    """fairseq does not warn of --bf16 on a CPU with AVX2 alone, where it is more than ten times as slow as float32."""
    from fairseq.trainer import Trainer

    original = Trainer.__init__

    @functools.wraps(original)
    def __init__(self: Any, cfg: Any, *args: Any, **kwargs: Any) -> None:
        original(self, cfg, *args, **kwargs)
        if cfg.common.bf16 and self.device.type == "cpu":
            _logger.warning(bf16_advice())

    Trainer.__init__ = __init__


@patch(versions="all versions of fairseq", needed=lambda: not torch.cuda.is_available())
def freed_memory_without_gpu() -> None:
    """fairseq's own models train slower than necessary on a CPU: each step returns its memory to the system.

    Loading this plugin's CPU kernels keeps freed memory already, but a Transformer of fairseq's does not load them.
    """
    allocator.keep_freed_memory()
