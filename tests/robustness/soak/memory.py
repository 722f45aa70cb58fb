"""A process's memory over a long run, and whether it grows."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

_MIB = 2**20
# Growth that is allowed from the middle of a run to its end, MiB: the C library's own to and fro.
ALLOWED = 8.0


class GrowthError(AssertionError):
    """A run's memory grew more than allowed."""


class Memory:
    """Samples of the resident memory of a process, this one or another's.

    `growth` compares the level at the run's end with that at its middle, both as the median of a tenth of the samples:
    neither a single batch counts, nor what is kept for good after the first ones.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._statm = Path(f"/proc/{pid or os.getpid()}/statm")
        self.samples: list[float] = []

    def sample(self) -> float:
        """MiB that are resident now; also kept."""
        pages = int(self._statm.read_text().split()[1])
        self.samples.append(pages * os.sysconf("SC_PAGE_SIZE") / _MIB)
        return self.samples[-1]

    @property
    def growth(self) -> float:
        """MiB from the middle of the run to its end.

        Raises:
            ValueError: fewer than 20 samples.
        """
        count = len(self.samples)
        if count < 20:
            raise ValueError(f"a run must have at least 20 samples, got {count}")
        tenth = count // 10
        middle = self.samples[count // 2 - tenth // 2 :][: max(tenth, 1)]
        return statistics.median(self.samples[-tenth:]) - statistics.median(middle)

    def check(self, what: str, allowed: float = ALLOWED) -> str:
        """A line that says how it went.

        Raises:
            GrowthError: the memory grew by more than `allowed` MiB.
        """
        levels = (self.samples[0], self.samples[len(self.samples) // 2], self.samples[-1])
        line = "{}: {:.0f} MiB at the beginning, {:.0f} in the middle, {:.0f} at the end; ".format(what, *levels)
        line += f"grew by {self.growth:+.1f} MiB in the second half ({allowed:g} allowed)"
        if self.growth > allowed:
            raise GrowthError(line)
        return line
