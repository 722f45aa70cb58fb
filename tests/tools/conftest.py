"""Fixtures of the tests of `lightconv`."""

import pytest

from tests.ops.native_toys import broken, plain  # noqa: F401  (fixtures)
from tests.tools.corpora import write


@pytest.fixture
def output(tmp_path):
    """A file to write, alone in its folder."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "average.pt"


@pytest.fixture
def files(tmp_path):
    """Writes two sides and returns the options for them."""

    def make(hypotheses, references):
        return (
            "--sys", write(tmp_path / "sys", hypotheses), "--ref", write(tmp_path / "ref", references),
        )  # fmt: skip

    return make
