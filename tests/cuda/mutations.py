"""Wrong kernels, on purpose: mistakes written into a copy of the sources.

All of a list are in one copy, each behind a number that says which one is being made, so that few files are compiled
anew. What is replaced must be found once: a mistake whose text has gone with a change of the kernels fails here, and
must be written anew, of the same kind.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from . import host
from .calls import check
from .convolution_calls import Case
from .operators import Operators
from .talk_calls import TalkCase


@dataclasses.dataclass(frozen=True)
class Mistake:
    """`old` becomes `new` in `file`, where MISTAKE stands for "this one is being made"; `what` of `case` must fail."""

    name: str
    file: str
    old: str
    new: str
    what: str
    case: Case | TalkCase

    def __str__(self) -> str:
        return self.name


@contextlib.contextmanager
def mistaken(folder: Path, mistakes: Sequence[Mistake], units: Sequence[str]) -> Iterator[Operators]:
    """The kernels with all mistakes in them; `on(mistake=n)` makes the n-th, from 1.

    `units` are compiled again. Only templates may be changed, which these files alone instantiate (and not functions
    that all have in common, of which the linker would take any copy).
    """
    shutil.copytree(host.SOURCES, folder)
    for number, mistake in enumerate(mistakes, 1):
        file = folder / mistake.file
        text = file.read_text()
        assert text.count(mistake.old) == 1, f"{mistake.file} has {text.count(mistake.old)} times: {mistake.old}"
        new = mistake.new.replace("MISTAKE", f"(lightconv_host::mistake == {number})")
        file.write_text(text.replace(mistake.old, new))
    runner = host.Runner(host.build_runner(folder, units))
    yield Operators(runner)
    runner.close()


def assert_noticed(
    mistake: Mistake, mistakes: Sequence[Mistake], operators: Operators, made: dict | None = None
) -> None:
    """The mistake's case passes without it, and fails with it."""
    check(mistake.case, mistake.what, operators, made)
    with pytest.raises(AssertionError):
        check(mistake.case, mistake.what, operators.on(mistake=mistakes.index(mistake) + 1), made)
