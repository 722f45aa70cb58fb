"""Patches for fairseq (0.12.2 and fairseq-fixed 0.12.3.1), applied in memory when the plugin is imported.

Each file holds the patches of one topic. Each patch states the bug in fairseq, the affected versions, and how to check
whether the installed version has it (registry.py). If it does not, nothing is changed. Nothing under site-packages is
changed either. `applied()` and `lightconv doctor` list the active patches; docs/fairseq_bugs.md explains them.
LIGHTCONV_SKIP_PATCHES="swish_activation,last_batch" skips patches, which shows fairseq's own behaviour.

`fairseq-train`, `-generate`, `-interactive`, `-validate` and `-eval-lm` import the user directory while they build
their argument parser, early enough for every patch. `fairseq-hydra-train` imports it in `fairseq_cli.train.main`, after
`call_main` has chosen the processes, which is too late for `processes_without_gpu`. To apply that patch too, import the
plugin first (it must be installed, or its parent folder must be on PYTHONPATH), as `lightconv train` does:

    python -c "import lightconv_plugin, fairseq_cli.hydra_train as h; h.cli_main()" common.user_dir=… task.data=…

or start the processes yourself and set distributed_no_spawn=true, distributed_init_method, distributed_world_size,
distributed_rank and, without a GPU, distributed_backend=gloo in the distributed_training group.
"""

import os

import torch

from lightconv_plugin.compat import (
    checkpoints,
    command_line,
    cpu_training,
    criterions,
    dictionaries,
    ema,
    generation,
    layers,
    nan_report,
    numpy_versions,
    optimizing,
    preprocessing,
    reading,
    recording,
    residuals,
    resuming,
    settings,
    step_graphs,
    tasks,
)
from lightconv_plugin.compat.registry import Patch, patches_of
from lightconv_plugin.errors import VariableError

# Applied in this order. settings comes last: it patches every fairseq module that is loaded by then.
PATCHES: dict[str, Patch] = patches_of(
    numpy_versions,
    checkpoints,
    command_line,
    cpu_training,
    layers,
    generation,
    optimizing,
    criterions,
    reading,
    resuming,
    ema,
    recording,
    nan_report,
    residuals,
    step_graphs,
    dictionaries,
    preprocessing,
    tasks,
    settings,
)
"""All patches by name, whether the installed fairseq needs them or not."""

_applied: dict[str, Patch] = {}


def apply() -> None:
    """Apply every patch that the installed versions need and that is not active yet.

    Raises:
        VariableError: LIGHTCONV_SKIP_PATCHES names a patch that does not exist.
    """
    skipped = {name.strip() for name in os.environ.get("LIGHTCONV_SKIP_PATCHES", "").split(",")} - {""}
    if unknown := skipped - PATCHES.keys():
        raise VariableError(
            f"LIGHTCONV_SKIP_PATCHES: there is no patch {', '.join(sorted(unknown))}; allowed: {', '.join(PATCHES)}"
        )
    with torch.random.fork_rng(devices=[]):  # to look for a bug in a module, some initialise one
        for name, patch in PATCHES.items():
            if name not in skipped and name not in _applied and patch.needed():
                patch.apply()
                _applied[name] = patch


def applied() -> list[Patch]:
    """The active patches, in the order in which they were applied."""
    return list(_applied.values())
