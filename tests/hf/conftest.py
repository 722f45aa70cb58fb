"""Nothing here may ask Hugging Face's hub, or anybody else: every file is on the disk."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import socket

import pytest

from tests.hf.models import export_seq2seq


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(self, address):
        raise AssertionError(f"a test connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def _no_progress_bars(monkeypatch):
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """An exported translation model: German words in BPE with Moses' tokens, English words; two dictionaries."""
    return export_seq2seq(tmp_path_factory.mktemp("hf") / "model")
