"""benchmarks.pareto: which ways are measured, what is written and drawn."""

import json

import pytest

pytest.importorskip("fairseq")

from benchmarks import pareto, searches
from tests.benchmarks.conftest import ran
from tests.benchmarks.test_generation import data  # noqa: F401 (a fixture)
from tests.generation import translation_toys as toys

ENGINES = [searches.CTRANSLATE2, searches.PYMARIAN]
pytestmark = pytest.mark.usefixtures("warm_processes")


def names(*arguments):
    return [way.name for way in pareto.points(*arguments)]


def test_every_way_is_there(tmp_path):
    assert names(["a"], [], [1, 4], None, ENGINES) == [
        f"a, ours, {dtype}, beam {beam}" for dtype in ("float32", "int8") for beam in (1, 4)
    ]
    listed = names(["a", "t"], ["t"], [1], tmp_path, ENGINES)
    assert len(listed) == 4 + 12 and "t, CTranslate2, int8, beam 1, shortlist" in listed
    assert len(set(listed)) == len(listed) and "t, Marian, float32, beam 1" in listed
    assert names(["t"], ["t"], [1], None, []) == ["t, ours, float32, beam 1", "t, ours, int8, beam 1"]


def test_engines_that_are_not_installed_are_left_out(capsys, monkeypatch):
    monkeypatch.setattr(pareto, "installed", lambda engine: engine == searches.CTRANSLATE2)
    assert pareto._engines() == [searches.CTRANSLATE2]
    assert capsys.readouterr().err == "Marian is left out: the package pymarian is not installed\n"


def test_the_front_is_what_nothing_surpasses():
    found = [{"sentences_per_s": speed, "bleu": bleu} for speed, bleu in [(1, 30), (2, 30), (3, 20), (2.5, 19), (9, 5)]]
    assert [point["bleu"] for point in pareto.front(found)] == [5, 20, 30]
    assert pareto.front(found)[-1]["sentences_per_s"] == 2


def test_a_vocabulary_map_is_the_same_table(tmp_path):
    pytest.importorskip("ctranslate2")
    from benchmarks.ctranslate2_peer import vocabulary_map

    table = tmp_path / "table.txt"
    table.write_text("x a 0.5\ny a 0.25\n10\u00a0000 b 1\n. NULL 1\n", encoding="utf-8")
    assert vocabulary_map(table, tmp_path / "vmap.txt").read_text(encoding="utf-8") == "a\tx y\nb\t10\u00a0000\n\t.\n"


def test_measured_and_drawn(capsys, tmp_path, data):  # noqa: F811
    pytest.importorskip("matplotlib")
    paths = {
        "student": toys.make_checkpoint(tmp_path / "dynamic.pt", data, seed=1),
        "other": toys.make_checkpoint(tmp_path / "transformer.pt", data, "transformer", seed=4),
    }
    dictionaries = [
        [line.split()[0] for line in (data / f"dict.{lang}.txt").read_text(encoding="utf-8").splitlines()]
        for lang in ("de", "en")
    ]
    table = tmp_path / "table.txt"
    pairs = [f"{target} {source} 0.5\n" for source in dictionaries[0] for target in dictionaries[1]]
    table.write_text("".join(pairs), encoding="utf-8")
    chosen = [
        "student, ours, float32, beam 2",
        "student, ours, float32, beam 2, shortlist",
        "other, ours, int8, beam 2",
    ]
    if searches.installed(searches.CTRANSLATE2):
        chosen.append("other, CTranslate2, float32, beam 2, shortlist")
    if searches.installed(searches.PYMARIAN):
        chosen.append("other, Marian, float32, beam 2")
    given = [f"{name}={path}" for name, path in paths.items()]
    file, picture = tmp_path / "pareto.json", tmp_path / "pareto.png"
    options = ["--beam", 2, "--threads", 1, 2, "--json", file, "--out", picture, "--systems", *chosen]
    out, _ = ran(pareto.main, capsys, "--quick", "--data", data, "--path", *given, "--shortlist", table, *options)
    content = json.loads(file.read_text(encoding="utf-8"))
    found = {(pareto.named(point), point["threads"]): point for point in content["points"]}
    assert set(found) == {(name, threads) for name in chosen for threads in (1, 2)}
    # A table of all words changes nothing; nor does the number of threads.
    assert len({found[name, threads]["bleu"] for name in chosen[:2] for threads in (1, 2)}) == 1
    for point in found.values():
        assert point["sentences_per_s"] == pytest.approx(9 / point["median_s"]) and point["calls"] == 2
    assert all(name in out for name in chosen)
    before = picture.read_bytes()
    assert before.startswith(b"\x89PNG")
    picture.unlink()
    ran(pareto.main, capsys, "--draw", file, "--out", picture)
    assert picture.read_bytes() == before


def test_the_line_does_not_promise_more_than_was_measured(tmp_path, monkeypatch):
    """Wherever it is, some point is as fast and as good."""
    pytest.importorskip("matplotlib")
    from matplotlib.cbook import STEP_LOOKUP_MAP

    shared = {"model": "a", "engine": "ours", "dtype": "int8", "shortlist": False, "threads": 1}
    measured = [(100.0, 20.0), (50.0, 25.0), (10.0, 30.0), (9.0, 22.0)]
    found = [{**shared, "sentences_per_s": speed, "bleu": bleu, "beam": 1} for speed, bleu in measured]
    figures, figure_of = [], pareto.figure_of
    monkeypatch.setattr(pareto, "figure_of", lambda size: figures.append(figure_of(size)) or figures[-1])
    pareto.draw({"points": found}, tmp_path / "picture.png")
    (line,) = (line for line in figures[-1].axes[0].lines if line.get_drawstyle().startswith("steps"))
    corners = list(zip(*STEP_LOOKUP_MAP[line.get_drawstyle()](*line.get_data()), strict=True))
    assert set(measured[:3]) < set(corners)
    for corner in corners:
        assert any(speed >= corner[0] and bleu >= corner[1] for speed, bleu in measured), corner


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--data and --path are needed"),
        ("--draw x.json", "--draw needs --out"),
        ("--data x --path a=b --json /nowhere/p.json", "--json: /nowhere is not a folder"),
        ("--data x --path a=b --shortlist nowhere", "--shortlist: no such file: nowhere"),
        ("--data x --path a=nowhere.pt", "no such file: nowhere.pt"),
    ],
)
def test_refuses(capsys, arguments, message):
    out, error = ran(pareto.main, capsys, *arguments.split(), status=2)
    assert not out and message in error


@pytest.mark.parametrize("content", [None, "text", "[]", "{}", '{"benchmark": "bars", "points": [{}]}'])
def test_draws_only_what_it_has_measured(capsys, tmp_path, content):
    file = tmp_path / "found.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    out, error = ran(pareto.main, capsys, "--draw", file, "--out", tmp_path / "picture.png", status=2)
    assert not out and error == f"error: --draw: {file} is not a file that --json has written\n"
