"""benchmarks.plots: which cases make a curve, what is drawn, what is refused."""

import json

import pytest
import torch

from benchmarks import plots
from benchmarks.figures import Result
from benchmarks.shapes import SETS, Case
from tests.benchmarks import synthetic
from tests.benchmarks.conftest import ran

pytest.importorskip("matplotlib")

PNG = b"\x89PNG\r\n\x1a\n"


def sweep(operator="lightconv", **peers):
    """The GPU's sweep: ours level, peers as their power of T says."""
    measured = []
    for shape in SETS["sweep"]:
        times = {"ours": 1e-4} | {name: 1e-4 * (shape.steps / 64) ** power for name, power in peers.items()}
        measured.append(synthetic.case(operator, shape, "bfloat16", times))
    return measured


def content(measured):
    return synthetic.operators(measured, gpu=True, dtype="bfloat16")


def test_a_panel_is_a_set_of_cases_that_differ_in_t_and_b():
    measured = sweep(attention=1.0) + sweep("dynamicconv")
    measured.append(synthetic.case("lightconv", Case(64, 1024, 1024, 16, 7), "bfloat16", {"ours": 1.0}))
    light, dynamic = plots.panels(Result("gpu.json", content(measured[::-1])))
    assert {light.title.split(",")[0], dynamic.title.split(",")[0]} == {"lightconv", "dynamicconv"}
    light, dynamic = sorted((light, dynamic), key=lambda panel: panel.title, reverse=True)
    assert light.steps == dynamic.steps == (64, 256, 1024, 4096, 8192, 16_384, 65_536)
    assert light.times["ours"] == pytest.approx([3e-4] * 7)
    assert light.times["attention"] == pytest.approx([3e-4 * t / 64 for t in light.steps])
    assert set(dynamic.times) == {"ours"}
    # 65,536 tokens of 1024 channels in 2 bytes: 2 and 3 tensors moved, and (16, 31) filters, 4 TB/s.
    filters = 16 * 31 * 2
    assert light.floor == pytest.approx([(5 * 2**26 * 2 + 3 * filters) / synthetic.RATES.bytes_per_s] * 7)


def test_fewer_than_three_lengths_are_no_curve():
    assert not list(plots.panels(Result("a.json", content(sweep()[:2]))))


def test_a_candidate_without_a_time_has_a_gap():
    """Out of memory at the longest: the curve ends before."""
    measured = sweep(attention=1.0)
    measured[-1]["candidates"]["attention"] = {"error": "out of memory"}
    (panel,) = plots.panels(Result("a.json", content(measured)))
    assert panel.times["attention"][-1] is None and all(panel.times["attention"][:-1])


def test_a_candidate_looks_the_same_in_every_picture():
    first = plots._looks(["fairseq unfold", "ours", "attention (flash)"])
    second = plots._looks(["attention", "another", "ours", "fairseq unfold"])
    assert next(iter(first)) == next(iter(second)) == "ours"
    assert first["ours"] == second["ours"] and first["fairseq unfold"] == second["fairseq unfold"]
    assert first["attention (flash)"] == second["attention"]
    assert len({look["color"] for look in second.values()}) == 4


def test_every_candidate_of_the_operators_benchmark_looks_its_own_way():
    names = [*plots._KNOWN, "fused loop, no blocking", "prefix sums"]
    looks = plots._looks(names)
    for kind in ("color", "marker"):
        assert len({look[kind] for look in looks.values()}) == len(set(names))


def test_pictures_of_both_kinds_of_files(capsys, tmp_path):
    cpu = [
        synthetic.case("lightconv", Case(t, 4096 // t, 512, h, 31), "float32", {"ours": 1e-3, "fairseq band": 1e-5 * t})
        for t, h in ((32, 4), (128, 4), (512, 16))
    ]
    files = {
        "cpu_operators": synthetic.operators(cpu, gpu=False, dtype="float32"),
        "gpu": {
            "benchmark": "gpu",
            "results": {
                "sweep": content(sweep(attention=1.0) + sweep("dynamicconv")),
                "main": content(sweep()[:1]),
                "training": synthetic.models("training", "wmt_en_de_big", {}, gpu=True, dtype="bfloat16"),
            },
        },
        "other": {"bleu": 1.0},
    }
    for name, one in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(one), encoding="utf-8")
    out, _ = ran(plots.main, capsys, *sorted(tmp_path.glob("*.json")), "--out", tmp_path)
    pictures = [tmp_path / "cpu_operators.png", tmp_path / "gpu_sweep.png"]
    assert out.split() == [str(picture) for picture in pictures]
    assert all(picture.read_bytes().startswith(PNG) for picture in pictures)
    assert sorted(tmp_path.glob("*.png")) == pictures
    (panel,) = plots.panels(Result("cpu_operators.json", files["cpu_operators"]))
    assert panel.title == "lightconv, K = 31\n4,096 tokens × 512 channels, H = 4, 16"


def test_the_floor_and_every_curve_are_drawn_log_log(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    (panel,) = plots.panels(Result("a.json", content(sweep(attention=1.0))))
    plots.draw([panel], "title", tmp_path / "a.png")
    (axis,) = drawn[0].axes
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["ours", "attention", "floor"]
    curves = [torch.tensor(line.get_ydata()) for line in axis.get_lines()]
    torch.testing.assert_close(curves[0], 1e3 * torch.tensor(panel.floor, dtype=curves[0].dtype))
    torch.testing.assert_close(curves[1], torch.full_like(curves[1], 0.3))


def test_labels_do_not_overlap():
    assert plots._labelled((64, 256, 1024, 4096, 8192, 16_384, 65_536)) == [64, 256, 1024, 4096, 16_384, 65_536]
    assert plots._labelled((32, 128, 512)) == [32, 128, 512]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/a.json"], "/nowhere/a.json: "),
        (["{folder}/a.json"], "no 3 cases that differ in T only in "),
        (["{folder}/broken.json"], "broken.json: "),
        (["--out", "/nowhere"], "--out: /nowhere is not a folder"),
    ],
)
def test_what_cannot_be_drawn(capsys, tmp_path, arguments, message):
    (tmp_path / "a.json").write_text(json.dumps(content(sweep()[:2])), encoding="utf-8")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    out, error = ran(plots.main, capsys, *[argument.format(folder=tmp_path) for argument in arguments], status=2)
    assert not out and message in error and error.count("\n") == 1
