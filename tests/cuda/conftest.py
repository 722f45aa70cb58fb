"""The kernels, built for the host once a session, and asked as the registered operators are."""

import pytest

from . import host
from .operators import Operators


@pytest.fixture(scope="session")
def on_host():
    runner = host.Runner(host.build_runner())
    yield Operators(runner)
    runner.close()
