"""benchmarks.bars, benchmarks.seeds and benchmarks.diagram: what they draw, and what cannot be drawn."""

import json

import pytest
import torch

from benchmarks import bars, diagram, report, seeds
from benchmarks.tables import Form, Table, cell
from benchmarks.tables_like_for_like import like_for_like

pytest.importorskip("matplotlib")

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would have been saved."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: figures.append(self))
    return figures


def run(main, *arguments):
    return report.run(lambda: main([str(argument) for argument in arguments]))


# ------------------------------------------------------------------------------------------------ bars


def test_a_panel_for_each_row_that_compares(drawn, tmp_path):
    def row(name, *speeds):
        return [f"**{name}**, tokens/s: a CPU; float32; `small` sizes, 3 × 4 tokens", *speeds, "`a command`"]

    speeds = [cell(speed, Form(0)) for speed in (30.0, 1234.0, 0.5)]
    rows = [row("training", *speeds, "–"), row("translation", speeds[0], *["not measured"] * 3)]
    bars.draw(Table("x.json", ["", "ours", "b", "c", "d", "command"], rows), tmp_path / "a.png")
    (axis, *others) = drawn[0].axes
    assert not any(other.patches for other in others), "one speed compares with nothing"
    assert [bar.get_width() for bar in axis.patches] == [30.0, 1234.0, 0.5, 0]
    assert axis.get_title(loc="left") == "training, tokens/s"
    shown = [text.get_text().strip() for text in axis.texts]
    assert shown == ["a CPU\nfloat32; small sizes, 3 × 4 tokens", "30", "1,234", "0", "no search"]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["ours", "b", "c", "d"]


def test_the_bars_of_the_table_in_the_readme(drawn, tmp_path, capsys):
    assert run(bars.main, "--out", tmp_path / "a.png") == 0
    widths = {bar.get_width() for axis in drawn[0].axes for bar in axis.patches}
    values = [[entry.value for entry in row if not isinstance(entry, str)] for row in like_for_like().rows]
    assert widths - {0} == {value for row in values if len(row) > 1 for value in row}


# ------------------------------------------------------------------------------------------------ seeds


@pytest.fixture
def rows(tmp_path):
    """Rows of two tasks, as far as they are read here."""
    for task, system, scores in (("a", "one", (1.0, 3.0)), ("a", "two", (5.0,)), ("b", "two", (2.0, 2.5))):
        runs = [{"seed": seed, "test": {"bleu_tok": score, "chrf": 0.0}} for seed, score in enumerate(scores)]
        row = {"task": task, "system": system, "system_title": system.title(), "title": f"Task {task}"}
        row |= {"measure": "BLEU", "by": "bleu_tok", "runs": runs}
        path = tmp_path / "rows" / task / f"{system}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row), encoding="utf-8")
    return tmp_path / "rows"


def test_a_dot_for_each_seed_and_a_line_at_the_mean(rows, drawn, tmp_path):
    assert run(seeds.main, "a", "b", "--results", rows, "--out", tmp_path / "a.png") == 0
    first, second = drawn[0].axes
    lines = [(line.get_gid(), list(line.get_xdata())) for line in first.get_lines()]
    assert [x for gid, x in lines if gid is None] == [[2.0, 2.0], [5.0, 5.0]]
    assert [(gid, x) for gid, x in lines if gid in ("one", "two")] == [("one", [1.0, 3.0]), ("two", [5.0])]
    assert [label.get_text() for label in first.get_yticklabels()] == ["One", "Two"]
    assert [list(line.get_ydata()) for line in second.get_lines() if line.get_gid() == "two"] == [[1, 1]]
    assert [axis.get_title() for axis in (first, second)] == ["Task a", "Task b"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["c"], "has no rows of c"),
        (["b", "--systems", "one"], "has no row of b/one"),
        (["a", "--out", "/nowhere/a.png"], "must be a .png in a folder that exists, got /nowhere/a.png"),
        (["a", "--out", "a.svg"], "must be a .png in a folder that exists, got a.svg"),
    ],
)
def test_what_cannot_be_drawn(rows, arguments, said, capsys):
    assert run(seeds.main, *arguments, "--results", rows) == 2
    assert said in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ diagram


def band(matrix):
    """The distances t − s at which positions in the middle read something."""
    middle = range(diagram._K, diagram._T - diagram._K)
    return {t - s for t in middle for s in range(diagram._T) if matrix[t, s] != 0}


def test_the_matrices_are_what_the_captions_say():
    attention, light, dynamic, talk = (mixer.weights() for mixer in diagram.MIXERS)
    half, middle = diagram._K // 2, diagram._T // 2
    assert (attention > 0).all()
    torch.testing.assert_close(attention.sum(1), torch.ones(diagram._T))
    for matrix in (light, dynamic):
        assert band(matrix) == set(range(-half, half + 1))
        torch.testing.assert_close(matrix[middle].sum(), torch.tensor(1.0))
    same = [matrix.diagonal(1)[1:-1].unique().numel() == 1 for matrix in (light, dynamic)]
    assert same == [True, False], "only LightConv has the same weights at every position"
    inner = talk[talk > 0].unique()
    assert talk.diagonal().unique().numel() == 1 and inner.max() == talk.diagonal()[0]
    assert len({tuple((row > 0).tolist()) for row in talk}) > half, "the windows differ"


def test_the_picture_of_the_block(tmp_path, capsys):
    assert run(diagram.main, "--out", tmp_path / "a.png") == 0
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert capsys.readouterr().out == f"{tmp_path}/a.png\n"
