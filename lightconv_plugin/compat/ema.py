"""Patches for --store-ema, the exponential moving average (EMA) of the parameters that fairseq's Trainer keeps."""

import functools
import logging
from types import SimpleNamespace
from typing import Any

from torch import nn

from lightconv_plugin.compat.registry import patch

logger = logging.getLogger(__name__)

_FINAL_NORMS = {"encoder.layer_norm.weight", "decoder.layer_norm.weight"}


@patch(versions="all versions of fairseq")
def ema_final_norm() -> None:
    """After its first update, fairseq's moving average of a model that normalises at the end has no final norms.

    It is updated by loading a state without versions. An encoder or a decoder takes that for one of the first version,
    which had no final norm, and removes it. A saved average loads without an error and translates differently.
    """
    from fairseq.models.ema import EMA

    original = EMA.restore

    @functools.wraps(original)
    def restore(self: Any, state_dict: dict, build_fp32_params: bool = False) -> None:
        for name, value in self.model.state_dict().items():
            if name.rpartition(".")[2] == "version":
                state_dict[name] = value  # an average that has lost its norms says that it is of the first version
            elif name not in state_dict and name in _FINAL_NORMS:
                logger.warning("the moving average has no %s: it starts from the model's", name)
        original(self, state_dict, build_fp32_params)

    EMA.restore = restore


@patch(versions="all versions of fairseq")
def ema_once() -> None:
    """fairseq averages a parameter once for each of its names: shared embeddings with the decay squared, or cubed."""
    from fairseq.models.ema import EMA

    original = EMA._step_internal

    @functools.wraps(original)
    def step(self: Any, new_model: nn.Module, updates: int | None = None) -> None:
        averages = self.fp32_params if self.config.ema_fp32 else self.model.state_dict()
        # In float16, averages in float32 are copies, one for each name.
        first = {(average.data_ptr(), average.shape): name for name, average in reversed(averages.items())}
        kept = set(first.values())
        state = {name: value for name, value in new_model.state_dict().items() if name in kept or name not in averages}
        original(self, SimpleNamespace(state_dict=lambda: state), updates)

    EMA._step_internal = step


@patch(versions="all versions of fairseq")
def ema_interval() -> None:
    """With --ema-update-freq a resumed training averages other updates than one without interruption.

    fairseq counts the updates since the last average, and starts from 0 when a training is resumed.
    """
    from fairseq.models.ema import EMA

    original = EMA.step

    @functools.wraps(original)
    def step(self: Any, new_model: nn.Module, updates: int | None = None) -> None:
        if updates is not None and self.config.ema_update_freq > 1:
            self.update_freq_counter = (updates - 1) % self.config.ema_update_freq
        original(self, new_model, updates)

    EMA.step = step


@patch(versions="all versions of fairseq")
def ema_of_a_checkpoint_without() -> None:
    """fairseq fails with KeyError: 'model' if a training with --store-ema starts from a checkpoint without an average.

    It means to start the average from the checkpoint's parameters, but has dropped them by then to save memory. With
    this patch it starts from the model that has loaded them.
    """
    from fairseq.trainer import Trainer

    original = Trainer.load_checkpoint

    @functools.wraps(original)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> dict | None:
        settings = self.cfg.ema
        if not settings.store_ema:
            return original(self, *args, **kwargs)
        settings.store_ema = False
        try:
            state = original(self, *args, **kwargs)
        finally:
            settings.store_ema = True
        if state is None:
            return None
        if "ema" in state:
            self.ema.restore(state["ema"])
        else:
            logger.warning(
                "the checkpoint has no moving average of the parameters (EMA): it starts from the parameters"
            )
            self.ema.restore(self.get_model().state_dict())
        if settings.ema_fp32:
            self.ema.build_fp32_params(state.get("ema_fp32_params"))
        return state

    Trainer.load_checkpoint = load_checkpoint
