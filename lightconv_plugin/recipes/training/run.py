"""Trains a configuration with fairseq-hydra-train; the same call again resumes from the last checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from lightconv_plugin import allocator
from lightconv_plugin.cgroups import cores
from lightconv_plugin.errors import need_modules
from lightconv_plugin.files import check_folder, locked
from lightconv_plugin.paths import find_config
from lightconv_plugin.progress import say
from lightconv_plugin.recipes.environment import environment, settings
from lightconv_plugin.recipes.training.launch import LaunchJob, launch
from lightconv_plugin.recipes.training.micro_batch import fitting
from lightconv_plugin.recipes.training.plan import make_plan


def train(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    processes: int = 0,
    nodes: int = 1,
    node_rank: int = 0,
    rendezvous: str | None = None,
    micro_batch: int | Literal["auto"] | None = None,
    max_restarts: int = 3,
    timeout: int = 600,
) -> int:
    """Train to the end. Returns the exit status: 0, 1 if the training failed, 128 + N if signal N ended it.

    Checkpoints, records.jsonl (see `lightconv_plugin.records`) and train.log (with several machines also
    train.nodeR.log) go to the configuration's save_dir. torchrun runs in this process until the training ends: stdout
    and stderr also go to the log, and the caller must be the main thread, which receives the signals.

    Args:
        config: a path or a name, as for `find_config`. Its relative paths are relative to the workspace.
        overrides: hydra's, such as "optimization.max_update=20", and named changes, as for `expanded`. Relative paths
            are relative to the working directory.
        processes: number on this machine; 0: one per GPU, or one without a GPU or with common.cpu=true.
        nodes: number of machines that train together.
        node_rank: number of this machine, from 0.
        rendezvous: HOST:PORT where the machines meet, HOST being machine 0; only with several machines.
        micro_batch: the largest batch in tokens; "auto": the largest that fits into memory, which trials find. The
            tokens per update stay. None: "auto" on one machine with GPUs, otherwise the configuration's max_tokens.
        max_restarts: how often all processes are restarted when one of them dies.
        timeout: seconds that processes and machines wait for a peer that does not respond.

    Raises:
        InputError: the configuration, an override or the data are wrong, or another training writes to save_dir.
        ModuleNotFoundError: fairseq is not installed.
    """
    need_modules("hydra", "fairseq_cli")  # the processes below import them
    config = find_config(config)
    plan = make_plan(config, list(overrides), processes, nodes, micro_batch, partial(fitting, config))
    check_folder(plan.save_dir)
    plan.save_dir.mkdir(parents=True, exist_ok=True)
    log = plan.save_dir / ("train.log" if nodes == 1 else f"train.node{node_rank}.log")
    job = LaunchJob(config, plan, log, nodes, node_rank, rendezvous or "", max_restarts, timeout)
    threads = max(1, cores() // plan.processes)
    lock = locked(plan.save_dir / "lock", f"another training is writing to {plan.save_dir}")
    computing = environment(threads, trains_on_cpu=plan.on_cpu)
    with lock if node_rank == 0 else contextlib.nullcontext(), computing:
        each = settings(threads)["OMP_NUM_THREADS"]
        say(f"checkpoints and log: {plan.save_dir} ({plan.processes} × {each} threads)")
        if plan.on_cpu and (advice := allocator.advice()):
            say(advice)
        return launch(job)
