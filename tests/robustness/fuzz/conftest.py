"""The backends that the fuzzer's tests are run on."""

import pytest

from lightconv_plugin.ops import backends
from tests.robustness.fuzz.backends import computing


@pytest.fixture(scope="module", params=["cpu", "reference", "cuda-on-host"])
def backend(request):
    if request.param == "cpu" and (decided := backends.decision("cpu")).backend != "cpu":
        # Kernels that do not compile are a failure, missing tools or another wish are not.
        if decided.error is not None and not decided.error.remedy:
            pytest.fail(decided.reason)
        pytest.skip(decided.reason)
    with computing(request.param):
        yield request.param
