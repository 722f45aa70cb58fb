"""What the tests of `lightconv doctor` share."""

import functools
import sys
from importlib import metadata

import pytest

from lightconv_plugin.ops import backends


@pytest.fixture(autouse=True, scope="module")
def _compiled():
    """The kernels, before a test takes the compiler away."""
    backends.backend("cpu")


@pytest.fixture(autouse=True, scope="module")
def _packages_are_listed_once():
    """Which takes longer than all other checks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "packages_distributions", functools.cache(metadata.packages_distributions))
        yield


@pytest.fixture
def no_fairseq(monkeypatch):
    """In this process, `import fairseq` says that there is none; the operators' part is quick to look at alone."""
    monkeypatch.setitem(sys.modules, "fairseq", None)
