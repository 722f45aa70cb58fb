"""Tries how large the batches of a training may be. micro_batch.py starts it:

    lightconv_plugin.recipes.training.trial FOLDER [arguments of fairseq-hydra-train …]

FOLDER has request.json, with the sizes to try and what was found earlier; trial.json is written there. The updates are
those of fairseq's Trainer, with real sentences; nothing of the training's folder is read or written.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from lightconv_plugin.cgroups import memory_limit
from lightconv_plugin.diagnostics import machine
from lightconv_plugin.recipes.training.errors import MEMORY
from lightconv_plugin.recipes.training.micro_batch import PART, Trial, largest
from lightconv_plugin.recipes.training.worker import train

STATUS = Path("/proc/self/status")
LOOKED_AT = 1000  # of the batches, to find those that need the most memory


class Gpu:
    """Memory of the first GPU, in bytes."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self.name, self.size = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory

    def free(self) -> int:
        return self._cuda.mem_get_info(0)[0] + self._cuda.memory_reserved(0)

    def start(self) -> None:
        """Begin to look for the largest use."""
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(0)

    def most(self) -> int:
        """The largest use since `start`."""
        return self._cuda.max_memory_reserved(0)


class Host:
    """Memory of this machine, in bytes."""

    name = "this machine"

    def __init__(self) -> None:
        there = _known(machine.MEMORY, "MemTotal")
        self.size = min(there, memory_limit() or there)

    def free(self) -> int:
        available = _known(machine.MEMORY, "MemAvailable")
        return min(available, machine.available_memory() or 0) + _known(STATUS, "VmRSS")

    def start(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel resets VmHWM

    def most(self) -> int:
        return _known(STATUS, "VmHWM")


def _known(path: Path, name: str) -> int:
    if (size := machine.kernel_bytes(path, name)) is None:
        raise RuntimeError(f"{path} does not tell {name}: give a number of tokens instead of trials")
    return size


class Updates:
    """Updates of a training with batches of any size."""

    def __init__(self, cfg: Any, memory: Gpu | Host, processes: int) -> None:
        from fairseq import tasks
        from fairseq.trainer import Trainer
        from fairseq.utils import import_user_module

        self.memory, self._cfg = memory, cfg
        import_user_module(cfg.common)
        task = tasks.setup_task(cfg.task)
        model = task.build_model(cfg.model)
        task.load_dataset(cfg.dataset.train_subset, combine=False, epoch=1)
        self.trainer = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
        self.dataset = task.dataset(cfg.dataset.train_subset)
        # Several processes exchange their gradients through a second copy.
        self._exchanged = sum(4 * p.numel() for p in model.parameters()) if processes > 1 else 0

    def needed(self, max_tokens: int) -> float:
        """The bytes that updates with batches of so many tokens take; infinity if there are fewer."""
        vars(self.trainer.criterion).pop("step_graphs", None)  # of another size: they take memory, or are given up
        self.memory.start()
        try:
            for batch in 2 * self.demanding(max_tokens):  # the optimizer's state exists after the first update
                self.trainer.train_step([batch], raise_oom=True)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not any(sign in str(error).lower() for sign in MEMORY):
                raise
            return math.inf
        return self.memory.most() + self._exchanged

    def demanding(self, max_tokens: int) -> list[Any]:
        """The batch with the most tokens of both sides, padding included, and the one with the longest sentence."""
        self._cfg.dataset.max_tokens = max_tokens
        batches = self.trainer.get_train_iterator(1, load_dataset=False, disable_iterator_cache=True).frozen_batches
        some = [batches[i] for i in sorted(set(np.linspace(0, len(batches) - 1, LOOKED_AT, dtype=int)))]
        longest = [np.array([self.dataset.size(i) for i in batch]).reshape(len(batch), -1).max(0) for batch in some]
        cells = [len(batch) * sides.sum() for batch, sides in zip(some, longest, strict=True)]
        chosen = {int(np.argmax(cells)), int(np.argmax([sides.max() for sides in longest]))}
        return [self.dataset.collater([self.dataset[i] for i in some[number]]) for number in chosen]


def digest(cfg: Any) -> str:
    """Identifies what the memory of an update depends on, apart from its batches."""
    from omegaconf import OmegaConf

    groups = OmegaConf.to_container(cfg)
    precision = {key: value for key, value in groups["common"].items() if re.search("fp16|bf16|amp", key)}
    spread = {key: groups["distributed_training"][key] for key in ("ddp_backend", "zero_sharding")}
    variables = {name: os.environ.get(name) for name in ("LIGHTCONV_BACKEND", "LIGHTCONV_GRAPHS")}
    whole = [groups[name] for name in ("task", "model", "criterion", "optimizer", "ema")]
    computed = [precision, spread, variables, *whole]
    return hashlib.sha256(json.dumps(computed, sort_keys=True, default=str).encode()).hexdigest()[:16]


def find(cfg: Any, folder: Path) -> None:
    """Write trial.json."""
    import torch

    cfg.checkpoint.save_dir = str(folder)  # where Trainer saves a model whose loss is not a number
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    memory = Host() if cfg.common.cpu or not torch.cuda.is_available() else Gpu()
    here: dict[str, Any] = {"device": memory.name, "memory": memory.size, "training": digest(cfg)}
    earlier = request["earlier"]
    if earlier and earlier.items() >= here.items():
        trial = Trial(**earlier)
    else:
        updates, room = Updates(cfg, memory, request["processes"]), PART * memory.free()
        tokens = largest(request["sizes"], lambda size: updates.needed(size) <= room)
        trial = Trial(**here, max_tokens=tokens)
    (folder / "trial.json").write_text(json.dumps(asdict(trial)), encoding="utf-8")


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ.setdefault("RANK", "0")  # for messages
    import_module("lightconv_plugin")
    from fairseq.distributed import utils
    from fairseq_cli import hydra_train

    utils.call_main = lambda cfg, main, **kwargs: find(cfg, folder)
    sys.argv[:] = [hydra_train.__file__, *sys.argv[2:]]
    train(hydra_train.cli_main, timeout=0)


if __name__ == "__main__":
    main()
