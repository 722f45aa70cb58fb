"""The long runs, short: that they run, and that memory which grows is seen."""

import mmap

import pytest

from tests.robustness.soak import loads, run
from tests.robustness.soak.memory import GrowthError, Memory


def test_operators(capsys):
    assert run.main(["operators", "--count", "60", "--allowed", "200"]) == 0
    assert capsys.readouterr().out.startswith("60 calls: ")


def test_training(tmp_path):
    pytest.importorskip("fairseq")
    memory = loads.training(20, tmp_path)
    assert len(memory.samples) == 20 and memory.growth < 100


def test_translation(tmp_path):
    pytest.importorskip("fairseq")
    memory = loads.translation(200, tmp_path)
    assert len(memory.samples) == 20 and memory.growth < 100


def new_mebibyte() -> mmap.mmap:
    """Memory from the system, and used: the C library might hand out what the process has had for long."""
    block = mmap.mmap(-1, 2**20)
    block.write(b"x" * 2**20)
    return block


def test_what_is_kept_is_seen():
    kept, memory = [], Memory()
    for _ in range(40):
        kept.append(new_mebibyte())
        memory.sample()
    with pytest.raises(GrowthError, match=r"kept: .* grew by \+1\d\.\d MiB in the second half \(8 allowed\)"):
        memory.check("kept")
