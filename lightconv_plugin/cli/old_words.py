"""Words of the commands that have a new name: they work for one version, and say so in one line on standard error."""

from __future__ import annotations

import sys

UNTIL = "0.3"  # the version without them


def warn(command: str, old: str, new: str) -> None:
    """Say that `old` was typed and what to type instead."""
    print(f"lightconv {command}: {old} is now {new}; the old word is gone in version {UNTIL}", file=sys.stderr)
