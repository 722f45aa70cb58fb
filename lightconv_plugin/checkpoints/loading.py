"""Reads and writes checkpoints safely: nothing in a file is executed, and files are written atomically."""

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightconv_plugin.checkpoints import safe_globals
from lightconv_plugin.checkpoints.contents import check_contents
from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_write

# Entries that fairseq saves besides the parameters (the second one in 0.12.2, an empty tensor that holds the device).
NOT_PARAMETERS = ("version", "_float_tensor")


def torch_save(value: Any, path: Path) -> None:
    """Write a file by torch.save and `atomic_write`.

    Raises OSError with `path` if it cannot be written (for a full disk, torch itself only reports file positions).
    """
    import torch

    with atomic_write(path, binary=True) as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            if isinstance(cause := error.__context__, OSError):
                raise OSError(cause.errno, cause.strerror, str(path)) from error
            raise


def is_cut_short(checkpoint: Path) -> bool:
    """Whether a torch.save file is truncated: an archive without its index, which is written last.

    Files from torch before 1.6 are not archives: for them the answer is always no.
    """
    with checkpoint.open("rb") as file:
        begin = file.read(2)
    return begin in (b"", b"P", b"PK", b"\0\0") and not zipfile.is_zipfile(checkpoint)


def check_checkpoint(path: Path) -> None:
    """Raise InputError if there is no such file; for a folder, it says what to do."""
    if path.is_dir():
        from lightconv_plugin.checkpoints.exported import is_exported

        if is_exported(path):
            command = f"lightconv convert {path} FILE.pt --to plugin"
            raise InputError(f"{path} is an exported model: make a checkpoint of it by {command}")
        raise InputError(f"{path} is a folder: name a checkpoint in it")
    if not path.is_file():
        raise InputError(f"no such checkpoint: {path}")


def safe_torch_load(path: Path, *, mapped: bool = False) -> Any:
    """Load a torch.save file to the CPU without running anything in it.

    Besides tensors and plain containers, only types that fairseq itself writes into checkpoints are allowed
    (safe_globals.py); anything else raises InputError with its name. The meters of old files hold training statistics
    that no command here needs: they become empty objects, so that fairseq need not be imported. Threads load one after
    another.

    mapped: read only those tensors that are used, when they are used. The file must not be written to before that.
    """
    import torch

    from lightconv_plugin.checkpoints.numpy_data import NotPlainData

    meters = safe_globals.meters({name: type(name, (), {}) for name in safe_globals.METERS})
    path = Path(path)
    check_checkpoint(path)
    try:
        # torch warns about the pickle protocol of files that it then refuses; the refusal is enough.
        with safe_globals.allowed(safe_globals.checkpoint_globals(), meters), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and _can_be_mapped(path))
    except pickle.UnpicklingError as error:
        if isinstance(error.__context__, NotPlainData):
            raise InputError(f"{path} is refused: {error.__context__}") from error
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted:
            raise InputError(
                f"{path} is refused: loading it would run or create {wanted[1]}, which fairseq does not write into "
                "checkpoints; only tensors and settings are loaded, never code"
            ) from error
        raise InputError(f"{path} was not written by torch.save, or cannot be loaded safely") from error
    except Exception as error:
        # torch reports a truncated or foreign file as OSError, RuntimeError, EOFError, KeyError …
        raise InputError(
            f"{path} cannot be read as a checkpoint: it is truncated or another kind of file "
            f"({type(error).__name__}: {error})"
        ) from error


def _can_be_mapped(path: Path) -> bool:
    """By torch, whose own files from before 1.6 are not archives, and which takes names in UTF-8 only."""
    return zipfile.is_zipfile(path) and str(path).encode(errors="ignore").decode() == str(path)


def load_model_checkpoint(path: Path, *, mapped: bool = False) -> dict:
    """A fairseq checkpoint, loaded by `safe_torch_load`; its parameters are the tensors under "model".

    Raises InputError if there are none, or if a part of the file that is read here has the wrong type (contents.py).
    """
    state = safe_torch_load(path, mapped=mapped)
    check_contents(path, state)
    return state


def load_checkpoint(path: Path) -> dict:
    """A fairseq checkpoint without its optimizer state, two thirds of a file; its parameters are under "model".

    The file is mapped, and so must not be overwritten while they are used; what fairseq overwrites is read at once.
    """
    state = load_model_checkpoint(path, mapped=not path.name.startswith(("checkpoint_best", "checkpoint_last")))
    state.pop("last_optimizer_state", None)
    for entry in state.get("optimizer_history") or []:
        entry.pop("optimizer", None)  # its place in files from 2018 and before
    for key in ("ema", "ema_fp32_params", "train_meters"):
        (state.get("extra_state") or {}).pop(key, None)
    return state


def search_settings(task: Iterable[str]) -> list[str]:
    """Of the settings of a task, those that translation_fast has for its search."""
    return [name for name in task if name.startswith("generation_")]


def count_parameters(checkpoint: Path) -> int:
    """The number of model parameters in a fairseq checkpoint, each counted once: "shared model params" in its log.

    A checkpoint has tied matrices under each of their names, and an averaging tool may have copied them, so matrices
    with equal content count once. A constant matrix, as before any training, may equal another by chance and always
    counts.

    Raises InputError for a file that is not a checkpoint of a model, or that cannot be loaded safely.
    """
    import torch

    total = 0
    seen: dict[tuple, list[torch.Tensor]] = {}
    for key, value in load_model_checkpoint(checkpoint)["model"].items():
        if key.rpartition(".")[2] in NOT_PARAMETERS:
            continue
        if value.dim() > 1 and value.numel() > 1 and bool((value != value.flatten()[0]).any()):
            begin = value.flatten()[:8].tolist()
            same = seen.setdefault((tuple(value.shape), value.dtype, *begin), [])
            if any(torch.equal(value, other) for other in same):
                continue
            same.append(value)
        total += value.numel()
    return total
