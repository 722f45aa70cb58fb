"""Keeps libraries quiet: fairseq logs a lot while it is imported and while it loads."""

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quietly(level: int = logging.INFO, *, user_warnings: bool = True) -> Iterator[None]:
    """Suppress log messages up to this level and, with `user_warnings=False`, also UserWarnings such as hydra's.

    Afterwards everything is shown that was shown before.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        with contextlib.nullcontext() if user_warnings else warnings.catch_warnings():
            if not user_warnings:
                warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logging.disable(before)
