"""docs/newcomer.md: the wrong commands get the answers that the page shows."""

import shlex

import pytest

from lightconv_plugin.cli import main
from tests import ROOT
from tests.docs.test_faq import names, rows

WRONG = rows(ROOT / "docs" / "newcomer.md", "Ten wrong commands")


@pytest.mark.parametrize("row", WRONG, ids=lambda row: names(row[0])[0])
def test_a_wrong_command_gets_this_answer(row, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").write_text("of the first time")
    for name in ("a", "b"):
        (tmp_path / name).write_text("a sentence\n")
    command, *words = shlex.split(names(row[0])[0])
    assert command == "lightconv"
    try:
        status = main.main(words)
    except SystemExit as stopped:  # a parser's
        status = stopped.code
    assert status == 2
    *_, last = capsys.readouterr().err.splitlines()
    for part in row[1].split("…"):
        assert part in last


def test_there_are_ten():
    assert len(WRONG) == 10
