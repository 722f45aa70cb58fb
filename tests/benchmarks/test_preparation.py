"""benchmarks/preparation.py: made-up text, and what it says of the steps that prepare it."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks import preparation
from benchmarks.report import BenchmarkError


def test_words_are_different_and_frequent_ones_short():
    made = preparation.words(5000, np.random.default_rng(0))
    assert len(set(made)) == len(made) == 5000
    assert np.mean([len(word) for word in made[:100]]) < np.mean([len(word) for word in made[-100:]])


def test_a_text_is_a_sentence_a_line_and_the_same_every_time(tmp_path):
    for name in "ab":
        preparation.write_text(tmp_path / name, 12_345, 1000, seed=1)
    text = (tmp_path / "a").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert (tmp_path / "b").read_text(encoding="utf-8") == text
    assert len(lines) == 12_345 and all(line.endswith(".") and ", " in line for line in lines)
    assert 20 < np.mean([len(line.split()) for line in lines]) < 30
    counts = [count for _, count in Counter(text.lower().split()).most_common()]
    assert counts[0] > 20 * counts[200]  # as in Zipf's law


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_every_step_is_measured(tmp_path, capsys):
    pytest.importorskip("fairseq", reason="fairseq is not installed")
    found = tmp_path / "found.json"
    options = ["--pairs", "4000", "--types", "500", "--bpe", "100", "--workers", "1", "--folder", str(tmp_path)]
    assert preparation.main([*options, "--json", str(found)]) == 0
    result = json.loads(found.read_text(encoding="utf-8"))
    steps = {step["title"]: step for step in result["steps"]}
    assert list(steps) == ["raw text", "tokenise", "learn 100 BPE merges", "apply BPE", "binarise"]
    assert all(step["peak_bytes"] > 2**20 for step in steps.values())
    assert 0.3 < steps["binarise"]["processor_s"] / steps["binarise"]["seconds"] < 1.5 * len(os.sched_getaffinity(0))
    assert result["pairs"] == 4000 and result["workers"] == 1
    assert "| binarise" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]  # the text is gone


def test_a_preparation_that_fails_is_said(tmp_path):
    with pytest.raises(BenchmarkError, match=r"lightconv prepare failed: .*--data"):
        preparation.measure(tmp_path, ["parallel"])
