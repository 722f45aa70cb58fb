"""Checkpoints read and written safely: nothing in a file is executed, and a file is written whole or not at all."""

import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.files import atomic_write


def torch_save(value: Any, path: Path) -> None:
    """Write a file of torch.save by `atomic_write`.

    Raises OSError, with `path`, where that cannot be written: of a full disk, torch itself tells nothing but positions.
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
    """Whether a file of torch.save was not written to its end: an archive without its index, which comes last.

    Files of torch before 1.6 are no archives: of them this cannot be told, and the answer is no.
    """
    with checkpoint.open("rb") as file:
        begin = file.read(2)
    return begin in (b"", b"P", b"PK", b"\0\0") and not zipfile.is_zipfile(checkpoint)


def safe_torch_load(path: Path) -> Any:
    """Load a file of torch.save to the CPU without running anything that it may hold.

    Allowed beyond tensors and plain containers is only what fairseq itself writes into checkpoints (safe_globals.py).
    Anything else is a InputError that names it. The meters of old files stand for training statistics that no command
    here needs: they become empty objects, so that fairseq need not be imported.
    """
    import pickle

    import torch

    from lightconv_plugin.checkpoints import safe_globals

    allowed = [
        *safe_globals.checkpoint_globals(),
        *safe_globals.meters({n: type(n, (), {}) for n in safe_globals.METERS}),
    ]
    # What compat/checkpoints.py has allowed for this process stays: torch takes all of its list back afterwards.
    before = torch.serialization.get_safe_globals()
    names = {entry[1] for entry in before if isinstance(entry, tuple)}
    allowed = [
        entry for entry in allowed if (entry[1] not in names if isinstance(entry, tuple) else entry not in before)
    ]

    path = Path(path)
    if not path.is_file():
        raise InputError(f"no such checkpoint: {path}")
    try:
        # torch warns about the pickle protocol of a file that it then refuses: the refusal says enough.
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted:
            raise InputError(
                f"{path} is refused: loading it would run or create {wanted[1]}, which is not among what a checkpoint "
                "of fairseq holds; only tensors and settings are loaded, never code"
            ) from error
        raise InputError(f"{path} is not a file of torch.save, or not one that can be loaded safely") from error
    except Exception as error:
        # torch reports a truncated or foreign file as OSError, RuntimeError, EOFError, KeyError …, as it comes.
        raise InputError(
            f"{path} cannot be read as a checkpoint: is it cut off or something else? ({type(error).__name__}: {error})"
        ) from error
