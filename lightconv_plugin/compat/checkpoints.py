"""Patches for loading fairseq's checkpoints while torch.load is restricted to data, as it should be."""

import functools
import io
import pickle
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightconv_plugin.checkpoints.layouts import EMBEDDING_FILES
from lightconv_plugin.checkpoints.safe_globals import allow, allowed, checkpoint_globals
from lightconv_plugin.checkpoints.safe_globals import meters as old_meters
from lightconv_plugin.compat.registry import patch
from lightconv_plugin.released import fetch
from lightconv_plugin.released.models import MODELS


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


@patch(
    versions="torch 2.6 and later",
    needed=lambda: _load_refuses([Namespace(), np.zeros(1), np.float64(0)]),
)
def safe_checkpoint_loading() -> None:
    """torch.load reads plain data only and refuses fairseq's checkpoints (Namespace, numpy statistics).

    Loading is still restricted: the types added to torch's list can only hold data (safe_globals.py). They include the
    three meters of fairseq 0.6 to 0.9, which are in the checkpoints released in 2019. OmegaConf objects are still
    refused; no released fairseq writes them to checkpoints.

    For numpy they are stand-ins, because a file could make numpy's own functions read any address (numpy_data.py).
    These are only in the list while fairseq loads: a program that adds numpy's own, as transformers does, would get
    some of both.
    """
    from fairseq import checkpoint_utils
    from fairseq.logging import meters

    allow([Namespace, *old_meters(vars(meters))])

    def with_numpy(load: Callable) -> Callable:
        @functools.wraps(load)
        def loading(*args: Any, **kwargs: Any) -> Any:
            with allowed(checkpoint_globals()):
                return load(*args, **kwargs)

        return loading

    for name in ("load_checkpoint_to_cpu", "load_ema_from_checkpoint"):
        if hasattr(checkpoint_utils, name):  # the latter only in later versions
            setattr(checkpoint_utils, name, with_numpy(getattr(checkpoint_utils, name)))


@patch(versions="all versions of fairseq")
def pretrained_embeddings() -> None:
    """fairseq cannot load a model trained with --encoder-embed-path where that file is gone, as on another machine.

    It reads the embeddings from the file to build the model, and then replaces them with the checkpoint's. With this
    patch, the settings of a loaded checkpoint name no such file.
    """
    from fairseq import checkpoint_utils

    original = checkpoint_utils.load_checkpoint_to_cpu

    @functools.wraps(original)
    def load_checkpoint_to_cpu(*args: Any, **kwargs: Any) -> dict[str, Any]:
        state = original(*args, **kwargs)
        for settings in (state.get("args"), (state.get("cfg") or {}).get("model")):
            for name in EMBEDDING_FILES:
                if getattr(settings, name, None) is not None:
                    setattr(settings, name, None)
        return state

    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu


@patch(versions="all versions of fairseq")
def own_architectures() -> None:
    """fairseq cannot open a checkpoint whose architecture is registered by code that is not imported.

    If the checkpoint is from before 2021, all that it says is `KeyError`. With this patch, one with the options of
    LightConv is opened as one of this package's architectures, and an old one of another model is refused by its name.
    """
    from fairseq import checkpoint_utils

    original = checkpoint_utils._upgrade_state_dict

    def _upgrade_state_dict(state: dict[str, Any]) -> dict[str, Any]:
        from lightconv_plugin.models import architectures  # it registers them, after the patches

        architectures.use_registered_architecture(state)
        try:
            return original(state)
        except KeyError:
            architectures.check_architecture(state)
            raise

    checkpoint_utils._upgrade_state_dict = _upgrade_state_dict


@patch(versions="all versions of fairseq")
def released_models() -> None:
    """from_pretrained(NAME) unpacks the archive of a released model wherever its members lead, and never resumes.

    With this patch, released models come from the cache of `lightconv released`, which gets them if necessary.
    """
    from fairseq import file_utils

    original = file_utils.load_archive_file
    models = {model.archive: model for model in MODELS.values() if model.archive}

    @functools.wraps(original)
    def load_archive_file(archive_file: Any) -> Any:
        if archive_file not in models:
            return original(archive_file)
        return str(fetch.get(models[archive_file]))

    file_utils.load_archive_file = load_archive_file


def _broadcast_is_refused() -> bool:
    from fairseq.distributed import utils

    return _load_refuses(utils._TensorPlaceholder(0))


@patch(versions="torch 2.6 and later", needed=_broadcast_is_refused)
def checkpoint_broadcast() -> None:
    """torch.load refuses the configuration that rank 0 sends to the other ranks when several processes resume.

    The message comes from a process of the same training over its own process group, not from a file. It is therefore
    trusted: torch.distributed's broadcast of objects replaces fairseq's.
    """
    from fairseq.distributed import utils

    def _broadcast_object_slow(obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
        box = [obj]
        dist.broadcast_object_list(box, src=src_rank, group=group, device=dist_device)
        return box[0]

    utils._broadcast_object_slow = _broadcast_object_slow
