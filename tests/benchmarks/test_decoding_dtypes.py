"""benchmarks.decoding_dtypes: one instruction set's process measures every type that this CPU has."""

import json

import torch

from benchmarks import decoding_dtypes
from lightconv_plugin.generation import dtypes


def test_the_process_of_one_instruction_set(capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    decoding_dtypes.main(["--here", "--quick", "--levels", "avx2", "--sentences", "1", "2"])
    measured = json.loads(capsys.readouterr().out)
    assert [(row["size"], row["sentences"]) for row in measured] == [(32, 1), (32, 2)]
    assert all(row["seconds"].keys() == {"float32", "bfloat16", "int8"} for row in measured)
    assert all(min(row["seconds"].values()) > 0 for row in measured)


def test_its_instruction_sets_are_those_of_the_table():
    assert list(decoding_dtypes.LEVELS.values()) == list(dtypes.TABLE)
