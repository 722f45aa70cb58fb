"""benchmarks.apart: a pass beside a copy, a walk and the caches."""

import json

import pytest
import torch

from benchmarks import apart, floors
from benchmarks.report import BenchmarkError
from benchmarks.shapes import Case


def test_every_pass_has_every_part(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(apart, "_CALLS", 2)
    operators = ["lightconv", "dynamicconv", "talkconv"]
    apart.main(["--quick", "--operators", *operators, "--json", str(tmp_path / "out.json")])
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["machine"]["threads"] >= 1 and {case["operator"] for case in content["cases"]} == set(operators)
    for case in content["cases"]:
        assert list(case["seconds"]) == ["forward", "both"]
        for seconds in case["seconds"].values():
            assert list(seconds) == ["whole", "linear", "walk", "in caches"] and min(seconds.values()) > 0
    assert capsys.readouterr().out.count("\n| ") == 1 + len(content["cases"])


def test_what_stands_beside_a_pass_is_scaled_to_its_bytes_and_tokens():
    case = Case(256, 64, 64, 4, 7)
    calls = apart.parts("dynamicconv", case, torch.float32)
    few = apart.cached(case, 4)
    assert few.batch == 16 and few.steps == case.steps
    for name in ("forward", "both"):
        scale = floors.work("dynamicconv", case, 4)[name].bytes / (2 * 256 * 64 * 64 * 4)
        assert calls[name, "linear"][1] == calls[name, "walk"][1] == scale > 1
        assert calls[name, "in caches"][1] * apart._CALLS == case.batch / few.batch == 4
        assert calls[name, "whole"][1] == 1


def test_a_sentence_is_never_cut():
    assert apart.cached(Case(4096, 2, 1024, 16, 3), 4).batch == 1


def test_it_is_about_a_cpu():
    with pytest.raises(BenchmarkError, match="--device cuda"):
        apart.main(["--device", "cuda"])
