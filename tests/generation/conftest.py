"""The search in torch where the native one would be taken."""

import functools

import pytest

from lightconv_plugin.generation import batch_search, native
from lightconv_plugin.generation.graphs import CapturedSearch
from lightconv_plugin.ops import backends
from tests.generation.recordings import Recordings


@pytest.fixture
def no_kernels(monkeypatch):
    """Searches find no CPU kernels; the reason that they are given."""
    decided = backends.Decision("reference", reason="there is no compiler")
    monkeypatch.setattr(native.backends, "decision", lambda device_type: decided)
    return decided.reason


@pytest.fixture(params=["native", "torch", "recorded"])
def search(request, monkeypatch):
    """The searches in turn: both of the CPU, and the one with CUDA graphs, for which recordings stand in."""
    if request.param != "native":
        request.getfixturevalue("no_kernels")
    if request.param == "recorded":
        recorded = functools.partial(CapturedSearch, recorder=Recordings())
        monkeypatch.setattr(batch_search, "TorchSearch", recorded)
    return request.param
