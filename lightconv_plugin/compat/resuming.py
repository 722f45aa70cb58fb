"""Patches for resuming a training: the same updates as without an interruption, or an error that names the cause."""

import functools
import inspect
import itertools
import logging
import math
import re
import sys
import time
import types
from collections.abc import Iterable
from typing import Any

import torch

from lightconv_plugin.checkpoints.optimizer_order import CannotReorder, parameter_order, reorder
from lightconv_plugin.compat.optimizing import as_parameters
from lightconv_plugin.compat.registry import patch

logger = logging.getLogger(__name__)

# In the place of the epochs of a training that has ended. fairseq trains `while epochs.next_epoch_idx <= max_epoch`,
# which may be infinity.
_NO_EPOCHS = types.SimpleNamespace(next_epoch_idx=math.nan)


@patch(versions="all versions of fairseq")
def finished_training() -> None:
    """fairseq trains one more update each time a training that has reached --max-update is started again.

    It checks the limit only after an update. Rerunning the command therefore changes the model. A training that dies
    between its last checkpoint and its end, and is restarted, ends in a different state.
    """
    from fairseq import checkpoint_utils

    original = checkpoint_utils.load_checkpoint

    def load_checkpoint(cfg: Any, trainer: Any, **kwargs: Any) -> tuple[dict | None, Any]:
        from fairseq.trainer import Trainer

        extra_state, epochs = original(cfg, trainer, **kwargs)
        if extra_state is None or not isinstance(trainer, Trainer):
            return extra_state, epochs
        done, last = trainer.get_num_updates(), trainer.cfg.optimization.max_update
        if 0 < last <= done:
            logger.info("the training already has %d updates (max_update: %d)", done, last)
            epochs = _NO_EPOCHS
        return extra_state, epochs

    checkpoint_utils.load_checkpoint = load_checkpoint


def _batches_depend_on_the_epoch() -> bool:
    from fairseq.tasks import fairseq_task

    return "numpy_seed(seed + epoch)" in inspect.getsource(fairseq_task.FairseqTask.get_batch_iterator)


@patch(
    versions="fairseq's main branch, fairseq-fixed",
    needed=_batches_depend_on_the_epoch,
)
def resumed_batches() -> None:
    """fairseq makes different batches when a training is resumed in a later epoch than the first.

    A training makes its batches once, from sentences in an order seeded with seed + epoch, and shuffles the batches in
    every epoch. A training that is resumed in epoch N uses seed + N: it continues in the middle of different batches,
    sees some sentences of the epoch twice and others not at all, and ends in a different state. With this patch the
    order is that of epoch 1 whenever batches are kept. (fairseq 0.12.2 uses the seed alone.)
    """
    from fairseq.data import data_utils
    from fairseq.tasks import fairseq_task

    original = fairseq_task.FairseqTask.get_batch_iterator

    @functools.wraps(original)
    def get_batch_iterator(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(self, dataset, *args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        kept = not options["disable_iterator_cache"] and not options["update_epoch_batch_itr"]
        if not kept or not self.can_reuse_epoch_itr(dataset):
            return original(self, dataset, *args, **kwargs)
        order, first = dataset.ordered_indices, options["seed"] + 1

        def ordered_indices() -> Any:
            with data_utils.numpy_seed(first):
                return order()

        dataset.ordered_indices = ordered_indices  # on this object only, while its batches are made
        try:
            return original(self, dataset, *args, **kwargs)
        finally:
            del dataset.ordered_indices

    fairseq_task.FairseqTask.get_batch_iterator = get_batch_iterator


@patch(versions="all versions of fairseq")
def end_of_the_curriculum() -> None:
    """With --curriculum fairseq shuffles the batches of no epoch, unless the training is resumed after the curriculum.

    It uses the sampler of the first epoch again, and with it whether batches are shuffled.
    """
    from fairseq.data.iterators import EpochBatchIterator

    original = EpochBatchIterator._get_iterator_for_epoch

    @functools.wraps(original)
    def _get_iterator_for_epoch(self: Any, epoch: int, shuffle: bool, *args: Any, **kwargs: Any) -> Any:
        if self.dataloader is not None:
            self.dataloader.batch_sampler.shuffle = shuffle
        return original(self, epoch, shuffle, *args, **kwargs)

    EpochBatchIterator._get_iterator_for_epoch = _get_iterator_for_epoch


@patch(versions="all versions of fairseq")
def resumed_place() -> None:
    """fairseq resumes an epoch after as many batches as before, even if they are larger or smaller now.

    With another --max-tokens or another number of processes, a batch is another part of the epoch: sentences are seen
    twice or not at all, or the training fails ("Cannot resume training due to dataloader mismatch"). With this patch
    the number of batches in the epoch is saved too, and the training resumes after the same part of them.
    """
    from fairseq.data.iterators import EpochBatchIterator

    key = "batches_in_epoch"
    save, load = EpochBatchIterator.state_dict, EpochBatchIterator.load_state_dict

    def state_dict(self: Any) -> dict:
        return save(self) | {key: len(self)}

    def load_state_dict(self: Any, state: dict) -> None:
        done, batches = state.get("iterations_in_epoch", 0), state.get(key, len(self))
        if batches != len(self):
            state = state | {"iterations_in_epoch": done * len(self) // batches}
        load(self, state)

    EpochBatchIterator.state_dict, EpochBatchIterator.load_state_dict = state_dict, load_state_dict


@patch(versions="all versions of fairseq")
def optimizer_state() -> None:
    """fairseq counts the parameters of a saved optimizer but does not check that they are those of the model.

    If they are others, or in another order, the first update fails with a misleading error ("The size of tensor a (24)
    must match"), or moments of the same shape are assigned to the wrong parameters.
    """
    from fairseq.optim import FairseqOptimizer

    original = FairseqOptimizer.load_state_dict

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        ours = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        theirs = [number for group in state_dict["param_groups"] for number in group["params"]]
        cause = None
        if len(ours) != len(theirs):
            cause = f"for {len(theirs)} parameters, but the model has {len(ours)}"
        else:
            for place, (parameter, number) in enumerate(zip(ours, theirs, strict=True), 1):
                for name in ("exp_avg", "momentum_buffer"):  # these have the parameter's shape in every optimizer
                    saved = state_dict["state"].get(number, {}).get(name)
                    if cause is None and torch.is_tensor(saved) and saved.shape != parameter.shape:
                        shapes = f"{tuple(saved.shape)}, but the model's is {tuple(parameter.shape)}"
                        cause = f"for other parameters: the shape of its parameter {place} is {shapes}"
        if cause is not None:
            raise ValueError(
                f"the checkpoint's optimizer state is {cause}; use --reset-optimizer to continue without that state"
            )
        return original(self, state_dict, *args, **kwargs)

    FairseqOptimizer.load_state_dict = load_state_dict


@patch(versions="all versions of fairseq")
def optimizer_order() -> None:
    """A training that fairseq's own LightConv began continues with the optimizer's state of other parameters.

    fairseq 0.12.2 has an untied output before the decoder's other parameters, and later versions have in each dynamic
    convolution one that is not used. With --fp16 all are in one row, whose length is the same in any order. With this
    patch the state is put into the model's order when the checkpoint is read.
    """
    from fairseq import checkpoint_utils
    from fairseq.trainer import Trainer

    original = Trainer.load_checkpoint

    @functools.wraps(original)
    def load_checkpoint(self: Any, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any) -> Any:
        read = checkpoint_utils.load_checkpoint_to_cpu

        def load_checkpoint_to_cpu(*args: Any, **kwargs: Any) -> dict[str, Any]:
            state = read(*args, **kwargs)
            if state.get("last_optimizer_state") and not reset_optimizer:
                # `self.model` would wrap the model for several processes, and only the first one is here.
                _into_order_of(itertools.chain(*(m.named_parameters() for m in (self._model, self._criterion))), state)
            return state

        checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu  # while this trainer reads its checkpoint
        try:
            return original(self, filename, reset_optimizer, *args, **kwargs)
        finally:
            checkpoint_utils.load_checkpoint_to_cpu = read

    Trainer.load_checkpoint = load_checkpoint


def _into_order_of(parameters: Iterable[tuple[str, torch.Tensor]], state: dict[str, Any]) -> None:
    """Put the optimizer state of a checkpoint, in place, into the order of these parameters of the model that loads it.

    Raises ValueError if that is another order, and the state has another form.
    """
    ours = dict(parameters)
    renamed = state["model"].keys() - ours.keys()
    if "decoder.embed_out" in renamed:
        layout = "fairseq-0.12.2"
    elif any(re.fullmatch(r"\w+\.layers\.\d+\.conv\.conv_bias", name) for name in renamed):
        layout = "fairseq"
    else:
        return
    trained = [(name, parameter) for name, parameter in ours.items() if parameter.requires_grad]
    saved_order, order = (parameter_order(name, trained) for name in (layout, "plugin"))
    if saved_order == order:  # of another model than ours, which has another place for what is renamed
        return
    try:
        state["last_optimizer_state"] = reorder(state["last_optimizer_state"], saved_order, order)
    except CannotReorder as error:
        raise ValueError(
            f"the checkpoint's optimizer state is for parameters in another order, and cannot be reordered: {error}; "
            "give the model's options if they are others in the checkpoint; otherwise use --reset-optimizer to "
            "continue without that state"
        ) from error


@patch(versions="all versions of fairseq")
def float32_parameters() -> None:
    """With --fp16 or --bf16 fairseq saves the parameters in half precision only, and resumes with the rounded ones.

    Updates are made to float32 copies of the parameters. They are not in the checkpoint, so a training that is resumed
    differs from one without interruption, at first by less than a rounding of each parameter. With this patch they are
    saved with the state of the optimizer, 4 bytes for each parameter, and used where their rounded values are those of
    the model.
    """
    from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin as Mixin

    key = "fp32_params"
    save, load = Mixin.state_dict, Mixin.load_state_dict

    def state_dict(self: Any) -> dict:
        return save(self) | {key: [full.detach() for full in as_parameters(self)]}

    def load_state_dict(self: Any, state: dict, *args: Any, **kwargs: Any) -> None:
        saved = state.get(key, [])
        load(self, {name: value for name, value in state.items() if name != key}, *args, **kwargs)
        ours = as_parameters(self)
        if [full.shape for full in ours] != [full.shape for full in saved]:
            return  # the checkpoint is older, or saved in parts
        with torch.no_grad():
            for half, full, exact in zip(self.fp16_params, ours, saved, strict=True):
                exact = exact.to(full.device)
                full.copy_(torch.where(exact.to(half.dtype) == half, exact, full))

    Mixin.state_dict, Mixin.load_state_dict = state_dict, load_state_dict


@patch(versions="all versions of fairseq")
def resumed_clock() -> None:
    """fairseq's `wall`, the time since the start, is 0 in every line of a training that has been resumed.

    A stopwatch that is restored from a checkpoint is stopped, and nothing starts this one again. With this patch it
    counts from the resumption.
    """
    from fairseq.logging.meters import StopwatchMeter

    original = StopwatchMeter.load_state_dict

    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        self.start_time = time.perf_counter()

    StopwatchMeter.load_state_dict = load_state_dict


@patch(versions="all versions of fairseq")
def time_of_a_finetuning() -> None:
    """With --finetune-from-model fairseq counts the hours of that model's training: --stop-time-hours ends the new one.

    So it does with --reset-meters, which leaves out all other statistics of the checkpoint.
    """
    from fairseq.trainer import Trainer

    original = Trainer.load_checkpoint

    @functools.wraps(original)
    def load_checkpoint(
        self: Any,
        filename: str,
        reset_optimizer: bool = False,
        reset_lr_scheduler: bool = False,
        optimizer_overrides: dict | None = None,
        reset_meters: bool = False,
    ) -> Any:
        extra_state = original(self, filename, reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters)
        if reset_meters:
            self._previous_training_time = 0
        return extra_state

    Trainer.load_checkpoint = load_checkpoint


@patch(versions="all versions of fairseq")
def resumed_plateau() -> None:
    """With --lr-scheduler reduce_lr_on_plateau a training that is resumed forgets what it knows about the plateau.

    fairseq saves a checkpoint before the scheduler gets the score of its epoch, and not how many epochs there were
    without a better one. A training that is resumed in every epoch never has a smaller learning rate.
    """
    from fairseq import checkpoint_utils
    from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule as Schedule

    key = "num_bad_epochs"
    load_checkpoint, save, load = checkpoint_utils.load_checkpoint, Schedule.state_dict, Schedule.load_state_dict

    def state_dict(self: Any) -> dict:
        return save(self) | {key: self.lr_scheduler.num_bad_epochs}

    def load_state_dict(self: Any, state: dict) -> None:
        load(self, state)
        self.lr_scheduler.num_bad_epochs = state.get(key, 0)

    def load_and_step(cfg: Any, trainer: Any, **kwargs: Any) -> tuple[dict | None, Any]:
        extra_state, epochs = load_checkpoint(cfg, trainer, **kwargs)
        resumed = extra_state is not None and isinstance(getattr(trainer, "lr_scheduler", None), Schedule)
        if resumed and trainer.get_num_updates() and not cfg.reset_lr_scheduler:
            place, score = extra_state["train_iterator"], extra_state.get("val_loss")
            if not place.get("iterations_in_epoch") and score is not None:
                trainer.lr_step(place["epoch"] - 1, score)
        return extra_state, epochs

    Schedule.state_dict, Schedule.load_state_dict = state_dict, load_state_dict
    checkpoint_utils.load_checkpoint = load_and_step


@patch(versions="all versions of fairseq")
def best_scores() -> None:
    """fairseq counts --patience anew when a training is resumed, and counts on in the next training of a process.

    The best score is there too. With hydra's --multirun, a training therefore writes no checkpoint_best.pt until it is
    better than those before it. With this patch both begin anew with each training, and are resumed with it; a training
    that --patience has ended trains no further epoch when it is started again.
    """
    from fairseq import checkpoint_utils
    from fairseq.trainer import Trainer

    key = "early_stop"
    load, save = checkpoint_utils.load_checkpoint, Trainer.save_checkpoint

    def load_checkpoint(cfg: Any, trainer: Any, **kwargs: Any) -> tuple[dict | None, Any]:
        best = vars(checkpoint_utils.save_checkpoint)
        best.pop("best", None)
        _patience().clear()
        extra_state, epochs = load(cfg, trainer, **kwargs)
        if extra_state is not None and "best" in best:
            _patience().update(extra_state.get(key, {}))
            if 0 < cfg.patience <= (runs := _patience().get("num_runs", 0)):
                logger.info("the training has ended: %d scores are no better (patience: %d)", runs, cfg.patience)
                epochs = _NO_EPOCHS
        return extra_state, epochs

    @functools.wraps(save)
    def save_checkpoint(self: Any, filename: str, extra_state: dict) -> Any:
        return save(self, filename, extra_state | {key: dict(_patience())})

    checkpoint_utils.load_checkpoint, Trainer.save_checkpoint = load_checkpoint, save_checkpoint


def _patience() -> dict[str, Any]:
    """The best score and the number of validations since, which fairseq keeps as attributes of a function."""
    for name in ("__main__", "fairseq_cli.train"):  # of `python -m fairseq_cli.train`, and of all other commands
        function = getattr(sys.modules.get(name), "should_stop_early", None)
        if function is not None:
            return vars(function)
    return {}
