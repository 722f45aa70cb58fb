"""Shared fixtures. Threads are capped: several workers of pytest-xdist with a full OpenMP team each would crawl."""

import logging
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("LIGHTCONV_HOME", None)  # which scripts/test.sh sets: data/ and runs/ are those of each test

import pytest
import torch

from tests import ROOT
from tests.fixtures import broken, files, output, plain, their_task, toy_data, toy_training  # noqa: F401  (fixtures)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20190429)


@pytest.fixture(autouse=True)
def _no_logging_outlives_its_test():
    """Programs that run in this process log to their standard error, which is the test's, and closed after it."""
    loggers = [logging.getLogger(), logging.getLogger("lightconv_plugin")]
    before = [(logger.handlers[:], logger.level) for logger in loggers]
    yield
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        logger.handlers[:] = [h for h in logger.handlers if h in handlers or type(h) is not logging.StreamHandler]
        logger.setLevel(level)


@pytest.fixture(scope="session")
def repository():
    """The checkout's root folder."""
    return ROOT
