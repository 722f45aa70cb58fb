"""What the sub-commands share: the error that ends a command, writing a file whole or not at all, loading safely."""

import argparse
import contextlib
import os
import re
import secrets
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


class CommandError(Exception):
    """Bad input of a command. Its text is what the user reads, in one line, before exit status 2."""


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


@contextlib.contextmanager
def atomic_write(path: Path, binary: bool = False) -> Iterator[IO]:
    """Open a temporary file beside `path` that takes its name only when the block ends without an error.

    Whoever reads `path` sees the old content or all of the new one, and a failure leaves no file behind. What a process
    that was killed has left goes at the next write of the same file. Text is UTF-8 with "\\n" line ends.
    """
    path = Path(path)
    if path.is_dir():
        raise CommandError(f"{path} is a folder: name a file to write")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"cannot write {path}: there is no folder {path.absolute().parent}")
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    how: dict[str, Any] = {"mode": "xb"} if binary else {"mode": "x", "encoding": "utf-8", "newline": "\n"}
    try:
        with temporary.open(**how) as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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


def _lock(file: IO) -> bool:
    """Lock a file for as long as it is open; whether it is locked now. Not where neither system nor place has locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary files of `path` whose writers were killed: no such process is here, and nobody locks them.

    The lock tells of writers on other machines that share the folder.
    """
    pattern = re.compile(re.escape(f".{path.name}.") + r"(\d+)\.[0-9a-f]{8}\.tmp")
    with contextlib.suppress(OSError):  # what cannot be removed stays
        for entry in path.absolute().parent.iterdir():
            if (match := pattern.fullmatch(entry.name)) and not _is_running(int(match[1])):
                with entry.open("rb") as file:
                    if _lock(file):
                        entry.unlink()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file without their ends; only "\\n" and "\\r\\n" end a line, as for `wc -l`."""
    if not path.is_file():
        raise CommandError(f"no such file: {path}")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CommandError(f"{path} is not UTF-8: byte {content[error.start]:#04x} in line {line}") from error
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise CommandError(f"{path} is empty")
    return [line.removesuffix("\r") for line in lines]


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
    # What fairseq_patches.py has allowed for this process stays: torch takes all of its list back afterwards.
    before = torch.serialization.get_safe_globals()
    names = {entry[1] for entry in before if isinstance(entry, tuple)}
    allowed = [
        entry for entry in allowed if (entry[1] not in names if isinstance(entry, tuple) else entry not in before)
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
