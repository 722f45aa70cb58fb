"""What the sub-commands share: the error that ends a command, writing a file whole or not at all, loading safely."""

import contextlib
import os
import re
import secrets
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


class CommandError(Exception):
    """Bad input of a command. Its text is what the user reads, in one line, before exit status 2."""


@contextlib.contextmanager
def atomic_write(path: Path, binary: bool = False) -> Iterator[IO]:
    """Open a temporary file beside `path` that takes its name only when the block ends without an error.

    Whoever reads `path` sees the old content or all of the new one, and a failure leaves no file behind.
    Text is UTF-8 with "\\n" line ends.
    """
    path = Path(path)
    if path.is_dir():
        raise CommandError(f"{path} is a folder: name a file to write")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"cannot write {path}: there is no folder {path.absolute().parent}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    how: dict[str, Any] = {"mode": "xb"} if binary else {"mode": "x", "encoding": "utf-8", "newline": "\n"}
    try:
        with temporary.open(**how) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def safe_torch_load(path: Path) -> Any:
    """Load a file of torch.save to the CPU without running anything that it may hold.

    Allowed beyond tensors and plain containers is only what fairseq itself writes into checkpoints (safe_globals.py).
    Anything else is a CommandError that names it. The meters of old files stand for training statistics that no command
    here needs: they become empty objects, so that fairseq need not be imported.
    """
    import pickle

    import torch

    from lightconv_plugin import safe_globals

    allowed = [
        *safe_globals.checkpoint_globals(),
        *safe_globals.meters({n: type(n, (), {}) for n in safe_globals.METERS}),
    ]

    path = Path(path)
    if not path.is_file():
        raise CommandError(f"no such checkpoint: {path}")
    try:
        # torch warns about the pickle protocol of a file that it then refuses: the refusal says enough.
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        if wanted:
            raise CommandError(
                f"{path} is refused: loading it would run or create {wanted[1]}, which is not among what a checkpoint "
                "of fairseq holds; only tensors and settings are loaded, never code"
            ) from error
        raise CommandError(f"{path} is not a file of torch.save, or not one that can be loaded safely") from error
    except Exception as error:
        # torch reports a truncated or foreign file as OSError, RuntimeError, EOFError, KeyError …, as it comes.
        raise CommandError(
            f"{path} cannot be read as a checkpoint: is it cut off or something else? ({type(error).__name__}: {error})"
        ) from error
