"""Shared fixtures. Threads are capped: several workers of pytest-xdist with a full OpenMP team each would crawl."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20190429)


@pytest.fixture(scope="session")
def repository():
    """The checkout's root folder."""
    from pathlib import Path

    return Path(__file__).resolve().parent.parent
