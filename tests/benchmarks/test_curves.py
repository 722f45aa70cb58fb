"""benchmarks.curves: a line for each seed, and what cannot be drawn."""

import json

import pytest

from benchmarks import curves
from tests.benchmarks.conftest import ran

pytest.importorskip("matplotlib")


def written(folder, system, seeds=(1,), task="pairs/small", curve=((100, 5.0), (200, 2.5), (300, 2.0))):
    """A row as `lightconv reproduce` writes it, as far as it is read here."""
    runs = [{"seed": seed, "curve": [list(point) for point in curve]} for seed in seeds]
    row = {"task": task, "system": system, "system_title": system.title(), "title": "Pairs", "runs": runs}
    path = folder / task / f"{system}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row), encoding="utf-8")
    return row


def test_a_line_for_each_seed_and_a_look_for_each_system(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    names = [f"system{number}" for number in range(11)]
    curves.draw({name: written(tmp_path, name, (1, 2)) for name in names}, "title", tmp_path / "a.png")
    (axis,) = drawn[0].axes
    lines = axis.get_lines()
    assert [line.get_gid() for line in lines] == [f"{name} {seed}" for name in names for seed in (1, 2)]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(names)
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [name.title() for name in names]
    assert list(lines[0].get_xdata()) == [100, 200, 300] and list(lines[0].get_ydata()) == [5.0, 2.5, 2.0]
    assert axis.get_ylim() == pytest.approx((1.9, 3.0)), "the first updates are above the picture"


def test_a_picture_of_the_systems_that_are_named(capsys, tmp_path):
    for name in ("first", "second"):
        written(tmp_path / "rows", name)
    (tmp_path / "rows/pairs/small/third.json").write_text(
        json.dumps({"task": "pairs/small", "system": "third", "runs": [{"seed": 1}]}), encoding="utf-8"
    )
    arguments = ("pairs/small", "--results", tmp_path / "rows", "--out", tmp_path / "a.png")
    out, _ = ran(curves.main, capsys, *arguments, "--systems", "second", "first")
    assert out == f"{tmp_path}/a.png\n"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    _, error = ran(curves.main, capsys, *arguments, status=2)
    assert "rows of an older version, without curves: third" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["other"], "has no rows of other"),
        (["pairs/small", "--systems", "first", "nobody"], "has no row of pairs/small/nobody"),
        (["pairs/small", "--out", "/nowhere/a.png"], "--out: must be a .png in a folder that exists"),
        (["pairs/small", "--out", "a.svg"], "--out: must be a .png in a folder that exists, got a.svg"),
    ],
)
def test_what_cannot_be_drawn(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "rows", "first")
    out, error = ran(curves.main, capsys, *arguments, "--results", tmp_path / "rows", status=2)
    assert not out and message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("*.png"))
