"""benchmarks.host_time: every operator beside F.linear, with and without what records calls in C++."""

import json

import torch

from benchmarks import host_time


def test_it_measures_every_call_in_every_mode(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(host_time, "_CALLS", 2)
    host_time.main(["--quick", "--json", str(tmp_path / "out.json")])
    measured = json.loads((tmp_path / "out.json").read_text())["calls"]
    assert {"F.linear", "lightconv", "dynamicconv", "talkconv"} <= measured.keys()
    for name, modes in measured.items():
        assert list(modes) == ["forward", "forward, recorded", "forward + backward"]
        for mode, times in modes.items():
            assert times["native"]["median_s"] > 0
            assert ("in_python" in times) == (name != "F.linear" and mode != "forward")
    assert capsys.readouterr().out.count("\n| ") == 1 + len(measured)


def test_what_is_said_to_be_recorded_in_python_is():
    call = host_time.calls(torch.device("cpu"))["dynamicconv"]
    x, weight = (tensor.requires_grad_() for tensor in call[1])
    assert "Recorded" in call[0](x, weight).grad_fn.name()
    with host_time.recorded_in_python(torch.device("cpu")):
        assert "Recorded" not in call[0](x, weight).grad_fn.name()
    assert "Recorded" in call[0](x, weight).grad_fn.name()
