"""Shared fixtures. Threads are capped: several workers of pytest-xdist with a full OpenMP team each would crawl."""

import gc
import logging
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("LIGHTCONV_HOME", None)  # which scripts/test.sh sets: data/ and runs/ are those of each test

import pytest
import torch

from lightconv_plugin import cgroups
from tests import ROOT
from tests.fixtures import (  # noqa: F401  (fixtures)
    broken,
    files,
    output,
    plain,
    refusal,
    small_disk,
    their_task,
    toy_data,
    toy_training,
)  # fmt: skip

# Files of some twenty seconds of processor time and more: begun first, so that no process works on one alone in the
# end. (scripts/test.sh asks pytest-xdist to keep this order.)
LONGEST = (
    "packaging/test_packaging.py",
    "ops/test_other_cpus.py",
    "ops/test_registration.py",
    "recipes/training/test_train_distributed.py",
    "generation/test_models.py",
    "models/test_compile_blocks.py",
    "ops/test_reference.py",
    "ops/test_backends.py",
    "generation/test_graphs.py",
    "models/test_fairseq_commands.py",
    "ops/test_guarantees.py",
    "generation/test_beam_search.py",
    "checkpoints/test_convert_exported.py",
    "recipes/demo/test_demo.py",
    "compat/test_cpu_training.py",
    "recipes/data/test_prepare_parallel.py",
    "robustness/test_untrusted_checkpoints.py",
    "benchmarks/test_scripts.py",
)


def pytest_collection_modifyitems(items):
    ranks = {ROOT / "tests" / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without looking for garbage in between, which takes a quarter of the time. What is there in the end stays:
    sixteen thousand tests, torch, fairseq. No collection of garbage needs to look at it again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000)  # with the default of 700, looking for garbage takes an eighth of the tests' time


@pytest.fixture(autouse=True)
def _no_limits(monkeypatch):
    """Those of a container in which the tests run."""
    monkeypatch.setattr(cgroups, "_OWN", Path("/nowhere"))


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
