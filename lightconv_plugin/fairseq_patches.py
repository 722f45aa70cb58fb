"""Mends what of fairseq (0.12.2 and fairseq-fixed 0.12.3.1) does not run on today's torch and numpy, in memory.

`apply()` is called when the plugin is imported, and looks at each breakage in turn: where the condition that breaks
fairseq is not there, nothing is touched. Nothing under site-packages is written. `applied()` lists what was done.
LIGHTCONV_SKIP_PATCHES="A,E" leaves patches out, which shows fairseq's own failure (for debugging, and for the tests).

`fairseq-train`, `-generate`, `-interactive`, `-validate` and `-eval-lm` import the user directory while they build
their argument parser, early enough for every patch. `fairseq-hydra-train` imports it in `fairseq_cli.train.main`, after
`call_main` has chosen the processes: there every patch but F holds. To have F too, import the plugin first (it must be
installed, or its parent folder on PYTHONPATH):

    python -c "import lightconv_plugin, fairseq_cli.hydra_train as h; h.cli_main()" common.user_dir=… task.data=…

(scripts/train.sh does), or start the processes yourself and give the distributed_training group
distributed_no_spawn=true, distributed_init_method, distributed_world_size, distributed_rank and, without a GPU,
distributed_backend=gloo.
"""

import importlib.util
import inspect
import io
import logging
import math
import os
import pickle
import socket
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightconv_plugin import fairseq_batches, fairseq_guards
from lightconv_plugin.checkpoints.safe_globals import checkpoint_globals
from lightconv_plugin.checkpoints.safe_globals import meters as old_meters

logger = logging.getLogger(__name__)

PATCHES: dict[str, Callable[[], bool]] = {}
"""Letter -> function that mends one breakage; it returns False where there was nothing to mend."""

_applied: dict[str, tuple[str, str]] = {}

_LAUNCHER_VARIABLES = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}


def apply() -> None:
    """Apply every patch that is needed here and has not been applied yet.

    Raises:
        ValueError: LIGHTCONV_SKIP_PATCHES names a patch that does not exist.
    """
    skipped = {letter.strip() for letter in os.environ.get("LIGHTCONV_SKIP_PATCHES", "").split(",")} - {""}
    if unknown := skipped - PATCHES.keys():
        raise ValueError(f"LIGHTCONV_SKIP_PATCHES: {', '.join(sorted(unknown))} is not one of {', '.join(PATCHES)}")
    for letter, patch in PATCHES.items():
        if letter not in skipped and letter not in _applied and patch():
            _applied[letter] = (f"{letter} {patch.__name__}", (patch.__doc__ or "").partition("\n")[0])


def applied() -> list[tuple[str, str]]:
    """The patches in force: (letter and name, reason) of each, in the order in which they were applied."""
    return list(_applied.values())


def _patch(letter: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    def register(function: Callable[[], bool]) -> Callable[[], bool]:
        PATCHES[letter] = function
        return function

    return register


def _load_refuses(sample: Any) -> bool:
    """Whether torch.load, called the way fairseq calls it, refuses what torch.save wrote."""
    buffer = io.BytesIO()
    torch.save(sample, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu")
    except pickle.UnpicklingError:
        return True
    return False


@_patch("A")
def safe_globals() -> bool:
    """torch >= 2.6 loads with weights_only=True and refuses fairseq's checkpoints (Namespace, numpy statistics).

    Loading stays restricted: what is added to torch's list can only hold data (safe_globals.py), and the three meters
    of fairseq 0.6 to 0.9, the time of the files released in 2019. OmegaConf objects are in no checkpoint of a released
    fairseq and stay refused.
    """
    from fairseq.logging import meters

    if not _load_refuses([Namespace(), np.zeros(1), np.float64(0)]):
        return False
    torch.serialization.add_safe_globals([*checkpoint_globals(), *old_meters(vars(meters))])
    return True


@_patch("B")
def broadcast_object() -> bool:
    """torch >= 2.6 refuses the configuration that rank 0 sends to the others when several processes resume.

    The message comes from a process of the same training over its own process group, not from a file: it is trusted as
    torch.distributed trusts it, whose broadcast of objects takes the place of fairseq's.
    """
    from fairseq.distributed import utils

    if not _load_refuses(utils._TensorPlaceholder(0)):
        return False

    def _broadcast_object_slow(obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
        box = [obj]
        dist.broadcast_object_list(box, src=src_rank, group=group, device=dist_device)
        return box[0]

    utils._broadcast_object_slow = _broadcast_object_slow
    return True


@_patch("C")
def numpy_compat() -> bool:
    """numpy >= 2 has no `numpy.compat`, whose `long` fairseq uses (language models by sentence, batch buckets)."""
    if hasattr(np, "compat"):
        return False
    np.compat = types.SimpleNamespace(long=int)
    return True


@_patch("D")
def get_buckets() -> bool:
    """numpy >= 2.4 has no `interpolation` argument of percentile, which --num-batch-buckets uses."""
    from fairseq.data import data_utils

    if "interpolation" in inspect.signature(np.percentile).parameters:
        return False
    original = data_utils.get_buckets

    def get_buckets(sizes: np.ndarray, num_buckets: int) -> np.ndarray:
        bounds = np.percentile(sizes, np.linspace(0, 100, num_buckets + 1), method="lower")
        return np.unique(bounds[1:])

    for module in _modules_binding("get_buckets", original):
        module.get_buckets = get_buckets
    return True


def _modules_binding(name: str, value: Any) -> Iterator[types.ModuleType]:
    """fairseq's loaded modules in which `name` is `value`: `from … import …` copies a function's binding."""
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in {"fairseq", "fairseq_cli"} and vars(module).get(name) is value:
            yield module


@_patch("E")
def bf16_without_xla() -> bool:
    """fairseq takes --bf16 for a TPU and fails without torch_xla, on a GPU too.

    The option parser sets `tpu`, and may be running already when the plugin is imported. So the flag is cleared one
    step later, where every command turns its arguments into a configuration. (Hydra's own commands do not set it.)
    """
    from fairseq.dataclass import utils

    if importlib.util.find_spec("torch_xla") is not None:
        return False
    original = utils.override_module_args

    def override_module_args(args: Namespace) -> tuple[list[str], list[str]]:
        if getattr(args, "bf16", False):
            args.tpu = False
        return original(args)

    utils.override_module_args = override_module_args
    return True


@_patch("F")
def processes_without_gpu() -> bool:
    """fairseq counts CUDA devices to start processes: without any, data parallel training fails or does nothing.

    `--distributed-world-size N` stops at an assertion; with an init method it starts 0 workers and exits 0; torchrun's
    workers train apart, each as if it were alone, because the world size defaults to the number of GPUs and torchrun's
    is read only where that is above 1 (so also with one GPU on each of several machines; fairseq 0.12.2 reads it, but
    then wants NCCL). Here N workers are started with gloo, and a training under torchrun joins it. SLURM's variables
    serve fairseq on GPUs only.
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
        # Only a training has a model in its configuration: evaluating is not split unless asked for.
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
    return True


def _spawn(distributed_main: Callable, cfg: Any, main: Callable, kwargs: dict[str, Any]) -> None:
    """Run `main(cfg, **kwargs)` in as many local processes as the world is large, ranks counted from 0."""
    parallel = cfg.distributed_training
    if parallel.distributed_rank != 0 or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise ValueError(
            f"without a GPU one command starts all {parallel.distributed_world_size} workers, on this machine. "
            "For one command per worker use torchrun, or give each --distributed-no-spawn, "
            "--distributed-init-method and --distributed-rank."
        )
    if parallel.distributed_init_method is None:
        port = parallel.distributed_port
        if port <= 0:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
        parallel.distributed_init_method = f"tcp://localhost:{port}"
    # Every worker would take all cores, and each waits for the slowest: shared out, as torchrun does.
    share = (os.cpu_count() or 1) // parallel.distributed_world_size
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    parallel.distributed_rank = None  # each worker adds its number to start_rank
    torch.multiprocessing.spawn(
        distributed_main, (main, cfg, {**kwargs, "start_rank": 0}), nprocs=parallel.distributed_world_size
    )


@_patch("G")
def gather_without_gpu() -> bool:
    """fairseq gathers statistics through CUDA tensors only: several processes cannot validate on the CPU.

    Used by fairseq-validate and by the criterions whose statistics are not plain sums.
    """
    from fairseq.distributed import utils
    from fairseq.utils import move_to_cpu

    if torch.cuda.is_available():
        return False

    def all_gather_list(data: Any, group: Any = None, max_size: int = 16384) -> list[Any]:
        group = utils.get_global_group() if group is None else group
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, move_to_cpu(data), group=group)
        return gathered

    utils.all_gather_list = all_gather_list
    return True


@_patch("H")
def pytorch_ddp_without_gpu() -> bool:
    """fairseq gives its default --ddp-backend pytorch_ddp a CUDA device number, which torch refuses for a CPU model."""
    from fairseq.models import distributed_fairseq_model as wrappers

    original = wrappers.DistributedDataParallel

    def distributed_data_parallel(module: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            kwargs.update(device_ids=None, output_device=None)
        return original(module, **kwargs)

    wrappers.DistributedDataParallel = distributed_data_parallel
    return True


@_patch("I")
def encoder_layer_without_copies() -> bool:
    """fairseq 0.12.2 keeps a second copy of every encoder layer's weights for a fused kernel that torch >= 2 refuses.

    Its TransformerEncoderLayerBase fills the copies when a checkpoint is loaded and then calls the kernel the wrong way
    (`Mask Type should be defined`). The copies get no gradient, which --ddp-backend pytorch_ddp refuses, they double
    the layer's count of parameters, and they are read off `self_attn.q_proj`, which only one kind of token mixer has.
    Without them the layer is the one of every other fairseq. Files written with the copies still load; to resume
    training from one, --reset-optimizer.
    """
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase as Layer

    if "_load_from_state_dict" not in vars(Layer):
        return False
    copies = [f"{part}_{kind}" for part in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")]
    original = Layer.__init__

    def __init__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        build = self.build_self_attention
        lent = []

        def build_and_lend_projections(*args: Any, **kwargs: Any) -> torch.nn.Module:
            mixer = build(*args, **kwargs)
            for name in ("q_proj", "out_proj"):
                if not hasattr(mixer, name):
                    mixer.__dict__[name] = types.SimpleNamespace(weight=torch.empty(0, 0), bias=torch.empty(0))
                    lent.append((mixer, name))
            return mixer

        self.__dict__["build_self_attention"] = build_and_lend_projections
        original(self, *args, **kwargs)
        del self.__dict__["build_self_attention"]
        for mixer, name in lent:
            del mixer.__dict__[name]
        for name in copies:
            delattr(self, name)

    def _load_from_state_dict(self: torch.nn.Module, state_dict: dict, prefix: str, *args: Any) -> None:
        for name in copies:
            state_dict.pop(prefix + name, None)
        super(Layer, self)._load_from_state_dict(state_dict, prefix, *args)

    Layer.__init__ = __init__
    Layer._load_from_state_dict = _load_from_state_dict
    return True


@_patch("J")
def whole_epochs() -> bool:
    """fairseq-fixed drops the last batch unless its size is a multiple of --required-batch-size-multiple, 8 by default.

    `fairseq-generate` then translates, and computes BLEU over, fewer sentences than the test set has, without a word;
    validation and training lose the same batch, that of the longest sentences. (In fairseq's main branch since
    December 2022.) Here it is put back.
    """
    from fairseq.data import data_utils

    original = data_utils.batch_by_size
    if sum(map(len, original(np.arange(3), None, np.ones(3, dtype=np.int64), None, 2, 2))) == 3:
        return False

    def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> list[np.ndarray]:
        indices = indices if isinstance(indices, np.ndarray) else np.fromiter(indices, dtype=np.int64)
        batches = list(original(indices, *args, **kwargs))
        kept = sum(map(len, batches))  # batches are consecutive slices of `indices`
        return [*batches, indices[kept:]] if kept < len(indices) else batches

    data_utils.batch_by_size = batch_by_size
    return True


@_patch("K")
def swish() -> bool:
    """fairseq returns the class SiLU for --activation-fn swish, the TaLK models' activation, instead of a function.

    A Transformer layer then builds a module of its input where it should compute, and fails.
    """
    from fairseq import utils

    original = utils.get_activation_fn
    if not inspect.isclass(original("swish")):
        return False

    def get_activation_fn(activation: str) -> Callable[..., torch.Tensor]:
        return torch.nn.functional.silu if activation == "swish" else original(activation)

    utils.get_activation_fn = get_activation_fn
    return True


@_patch("L")
def repeated_ngrams() -> bool:
    """fairseq without its CUDA extension compares padding, not words, for --no-repeat-ngram-size: nothing is blocked.

    So on the CPU, and on a GPU wherever fairseq was installed from a wheel (fairseq issues 4709 and 5206).
    """
    from fairseq.ngram_repeat_block import NGramRepeatBlock

    words = torch.tensor([[2, 4, 5, 6, 4, 5, 1, 1]])  # after "4 5 6 4 5", in a buffer for two words more
    if NGramRepeatBlock(3, use_extension=False)(words, torch.zeros(1, 8), 1, 1, 5)[0, 6] == -torch.inf:
        return False

    def _no_repeat_ngram(
        self: torch.nn.Module, tokens: torch.Tensor, lprobs: torch.Tensor, bsz: int, beam_size: int, step: int
    ) -> torch.Tensor:
        # tokens (hypotheses, length): words 1 … step are chosen; lprobs (hypotheses, vocabulary) are of the next one.
        n = self.no_repeat_ngram_size
        if step >= n:
            ngrams = tokens[:, 1 : step + 1].unfold(1, n, 1)
            repeats = (ngrams[:, :, :-1] == tokens[:, None, step + 2 - n : step + 1]).all(dim=2)
            rows, begins = repeats.nonzero(as_tuple=True)
            lprobs[rows, ngrams[rows, begins, -1]] = -torch.inf
        return lprobs

    NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram
    return True


@_patch("M")
def finished_training() -> bool:
    """fairseq trains one update more each time that a training with all its --max-update updates is started again.

    It compares the two numbers only after an update. So the same command is not harmless, and a training whose process
    dies between its last checkpoint and its end, and which is restarted, ends in another state.
    """
    from fairseq import checkpoint_utils

    original = checkpoint_utils.load_checkpoint

    def load_checkpoint(cfg: Any, trainer: Any, **kwargs: Any) -> tuple[dict | None, Any]:
        extra_state, epochs = original(cfg, trainer, **kwargs)
        last = trainer.cfg.optimization.max_update
        if extra_state is not None and 0 < last <= trainer.get_num_updates():
            logger.info("the training already has %d updates (max_update: %d)", trainer.get_num_updates(), last)
            # fairseq trains `while epochs.next_epoch_idx <= max_epoch`, which may be infinity.
            epochs = types.SimpleNamespace(next_epoch_idx=math.nan)
        return extra_state, epochs

    checkpoint_utils.load_checkpoint = load_checkpoint
    return True


_patch("N")(fairseq_guards.settings_that_run)
_patch("O")(fairseq_guards.other_dictionaries)
_patch("P")(fairseq_batches.same_batches_when_resumed)
_patch("Q")(fairseq_guards.optimizers_of_other_parameters)
_patch("R")(fairseq_guards.uninitialised_positions)
