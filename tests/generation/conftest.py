"""The search in torch where the native one would be taken."""

import pytest

from lightconv_plugin.generation import native
from lightconv_plugin.ops import backends


@pytest.fixture
def no_kernels(monkeypatch):
    """Searches find no CPU kernels; the reason that they are given."""
    decided = backends.Decision("reference", reason="there is no compiler")
    monkeypatch.setattr(native.backends, "decision", lambda device_type: decided)
    return decided.reason


@pytest.fixture(params=["native", "torch"])
def search(request):
    """Both searches of the CPU in turn."""
    if request.param == "torch":
        request.getfixturevalue("no_kernels")
    return request.param
