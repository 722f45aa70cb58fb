"""What the user sees of the progress, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


def say(message: str) -> None:
    """Print one line of progress to stderr, unbuffered (stdout stays free for results)."""
    print(message, file=sys.stderr, flush=True)


def progress(iterable: Iterable[Any] | None = None, **settings: Any) -> tqdm:
    """A progress bar, which is removed at the end; a log file gets few lines of it."""
    from tqdm import tqdm

    return tqdm(iterable, mininterval=0.2 if sys.stderr.isatty() else 10, leave=False, **settings)
