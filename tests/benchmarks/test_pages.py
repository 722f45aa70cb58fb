"""benchmarks/pages.py: the figures of README.md and docs/ are those of benchmarks/results."""

import importlib
import json
import re
import shutil

import pytest

pytest.importorskip("yaml")
pytest.importorskip("tabulate")

from benchmarks import pages, tables
from benchmarks.report import BenchmarkError

# A measurement in running text, as opposed to a size or a setting.
MEASURED = re.compile(r"\d (?:tokens/s|sentences/s|updates/s|BLEU\b|GB/s|TB/s|GFLOP/s|times as fast|times faster)")
# What these pages say was measured stands in a generated table or carries a mark.
MARKED = (
    *("README.md", "index.md", "tutorial.md", "models.md", "decoding.md", "evaluation.md"),
    *("choose.md", "faq.md", "migration.md", "performance.md", "performance_cpu.md", "performance_gpu.md"),
)


def names(page):
    return page.relative_to(pages.ROOT).as_posix()


def test_no_figure_is_stale():
    stale = pages.renew(write=False)
    assert not stale, "\n".join(map(str, stale)) + "\n`python -m benchmarks.pages` writes them"


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page of its own, in place of all others."""
    path = tmp_path / "page.md"
    monkeypatch.setattr(pages, "pages", lambda: [path])
    monkeypatch.setattr(pages, "WHOLE", {})
    return path


FIGURE = "Line one.\n\nIt runs at 732<!-- figure: training / *40 × 25* / DynamicConv, ours --> tokens/s.\n"
RATIO = (
    "2.2<!-- figure: training / *40 × 25* / DynamicConv, ours ÷\n training / *40 × 25* / fairseq DynamicConv --> times"
)


@pytest.mark.parametrize(
    ("text", "right", "wrong", "line"),
    [
        (FIGURE, "732", "733", 3),
        (RATIO, "2.2", "2.3", 1),
        ("40.34 ± 0.22<!-- figure: Multi30k / DynamicConv / test -->", "0.22", "0.23", 1),
        (
            "0.7<!-- figure: Multi30k / DynamicConv / test − Multi30k / self-attention* / test -->",
            "0.7",
            "0.8",
            1,
        ),
        ("1.9<!-- figure: least lengths / 32, * / fairseq, band #2 -->", "1.9", "2.7", 1),
    ],
    ids=["cell", "ratio", "deviation", "difference", "least"],
)
def test_a_stale_number_is_named_and_written(page, text, right, wrong, line):
    page.write_text(text, encoding="utf-8")
    assert not pages.renew(write=True)
    page.write_text(text.replace(right, wrong, 1), encoding="utf-8")
    (stale,) = pages.renew(write=False)
    assert (stale.page, stale.line) == (page, line) and wrong in stale.on_page and right in stale.in_file
    assert f"page.md:{line}: " in str(stale) and (".json" in str(stale) or "reproduction/" in str(stale))
    pages.renew(write=True)
    assert page.read_text(encoding="utf-8") == text


def test_a_stale_cell_of_a_table_is_named_and_written(page):
    text = "Before.\n\n<!-- table: host time -->\n" + pages.TABLES["host time"]().markdown() + "\nAfter.\n"
    row = next(line for line in text.splitlines() if line.startswith("| lightconv |"))
    right = row.split(" | ")[1]
    page.write_text(text.replace(row, row.replace(f" {right} ", " 99.9 ", 1)), encoding="utf-8")
    (stale,) = pages.renew(write=True)
    assert (stale.line, stale.on_page, stale.in_file, stale.source) == (7, "99.9", right, "cpu_host_time.json")
    assert page.read_text(encoding="utf-8") == text
    page.write_text(text.replace(row, row.replace(f" {right} |", "", 1)), encoding="utf-8")
    assert "columns" in str(pages.renew(write=True)[0]) and page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1<!-- figure: nothing / a / b -->", "there is no table 'nothing'"),
        ("1<!-- figure: training / a / b -->", "has no 'a' with a number in 'b'"),
        ("1<!-- figure: training / * / TaLK, ours -->", "is 4 cells: say least or most"),
        ("1<!-- figure: training / a -->", "a figure is NAME / ROW / COLUMN"),
        ("no number <!-- figure: training / a / b -->", "only 0 have one"),
    ],
)
def test_a_wrong_address_is_refused(page, text, said):
    page.write_text(text, encoding="utf-8")
    with pytest.raises(BenchmarkError, match=re.escape(said)):
        pages.main(["--check"])


def test_a_new_measurement_changes_the_page(page, tmp_path, monkeypatch):
    """The number comes from the file, not from a copy of it."""
    results = tmp_path / "results"
    shutil.copytree(tables.RESULTS, results, ignore=shutil.ignore_patterns("*.png"))
    content = json.loads((results / "cpu_training_iwslt.json").read_text(encoding="utf-8"))
    content["systems"]["DynamicConv (ours)"]["tokens_per_s"] = 2000.4
    (results / "cpu_training_iwslt.json").write_text(json.dumps(content), encoding="utf-8")
    page.write_text(FIGURE, encoding="utf-8")
    monkeypatch.setattr(tables, "RESULTS", results)
    for cached in (tables.load, pages._table):
        cached.cache_clear()
    try:
        (stale,) = pages.renew(write=False)
    finally:
        for cached in (tables.load, pages._table):
            cached.cache_clear()
    assert (stale.on_page, stale.in_file) == ("732", "2,000")


@pytest.mark.parametrize("page", [page for page in pages.pages() if page.name in MARKED], ids=names)
def test_what_was_measured_comes_from_a_file(page):
    text = page.read_text(encoding="utf-8")
    tables_gone = pages._TABLE.sub(lambda match: "\n" * match[0].count("\n"), text)
    rest = pages._FIGURE.sub("F", tables_gone)
    unmarked = [
        f"{page.name}:{number}: {line.strip()}"
        for number, line in enumerate(rest.splitlines(), 1)
        if MEASURED.search(line) and not line.startswith("|")
    ]
    assert not unmarked


def test_the_commands_beside_the_figures_are_commands():
    """Those of the README's table of speed: their programs and options exist."""
    table = pages.TABLES["like for like"]()
    lines = [re.fullmatch(r"`python -m (benchmarks\.\w+)(.*)`", str(row[-1])) for row in table.rows]
    assert all(lines) and len(lines) == 7
    for line in lines:
        importlib.import_module(line[1]).parser().parse_args(line[2].split())
