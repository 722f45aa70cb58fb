"""The backends that the operators' tests are run on, and fixtures for those of building native libraries."""

import contextlib
import warnings

import pytest
import torch

from benchmarks.host_time import recorded_in_python
from lightconv_plugin.ops import backends, reference

from .toy_libraries import broken, plain  # noqa: F401  (fixtures)

BACKENDS = ("native", "reference")


@contextlib.contextmanager
def by_reference():
    """Inside, the operators compute by the reference on the CPU, and are recorded in Python, whatever is loaded."""
    library = torch.library.Library("lightconv", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name in backends.OPERATORS + backends.CPU_OPERATORS:
                library.impl(name, getattr(reference, name), "CPU")
        with recorded_in_python(torch.device("cpu")):
            yield
    finally:
        library._destroy()


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    """Both backends of the CPU in turn; a module asks for it by `pytestmark`.

    "native" is skipped where it was not asked for or the tools are missing; kernels that do not compile are a failure.
    """
    if request.param == "reference":
        with by_reference():
            yield request.param
    else:
        decided = backends.decision("cpu")
        if decided.error is not None and not decided.error.remedy:
            pytest.fail(decided.reason)
        if decided.backend != "cpu":
            pytest.skip(decided.reason)
        yield request.param
