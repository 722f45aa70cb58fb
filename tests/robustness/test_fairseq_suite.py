"""The comparison of fairseq's own tests without and with the plugin, on a checkout of two small files."""

import pytest

from tests.robustness import fairseq_suite

TESTS = """
import sys, unittest

class Test(unittest.TestCase):
    def test_of_both(self):
        pass
    def test_of_neither(self):
        assert False
    def test_on_stock(self):
        assert {stock}
    def test_with_the_plugin(self):
        assert "lightconv_plugin" in sys.modules
    @unittest.skip("needs a GPU")
    def test_of_a_gpu(self):
        pass
"""
ALONE = '"lightconv_plugin" not in sys.modules'


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A function that makes a checkout whose test_on_stock is this condition; its tests run below tmp_path."""
    monkeypatch.setattr(fairseq_suite.tempfile, "mkdtemp", lambda prefix: str(work))
    work = tmp_path / "work"
    work.mkdir()

    def make(condition):
        tests = tmp_path / "checkout" / "tests"
        tests.mkdir(parents=True)
        (tests / "test_train.py").write_text(TESTS.format(stock=condition))
        (tests / "test_export.py").write_text(TESTS.format(stock="True"))
        return str(tests.parent)

    return make


def test_a_test_that_only_stock_passes_is_named(checkout, tmp_path, capsys):
    assert fairseq_suite.main([checkout(ALONE), "train", "export"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "stock fairseq: 4 passed, 2 skipped, 4 failed",
        "with the plugin: 5 passed, 2 skipped, 3 failed",
        "pass only with the plugin: 2",
        "pass only on stock fairseq: 1",
        "    tests.test_train.Test.test_on_stock (failed with the plugin)",
    ]
    assert "test_on_stock" in (tmp_path / "work/plugin.log").read_text()


def test_tests_that_fail_anyway_are_none_of_the_plugins(checkout, tmp_path, capsys):
    assert fairseq_suite.main([checkout("True"), "train"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "pass only on stock fairseq: 0"
    assert not (tmp_path / "work").exists()


def test_a_test_that_is_not_run_does_not_pass():
    text, lost = fairseq_suite.compare({"a": "passed", "b": "failed"}, {"b": "passed"})
    assert lost == ["a"]
    assert "a (not run with the plugin)" in text


def test_a_test_of_several_entries_has_the_worst_outcome(tmp_path):
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase classname="t" name="a"/><testcase classname="t" name="a"><failure/>'
        '</testcase><testcase classname="t" name="a"><skipped/></testcase></testsuite></testsuites>'
    )
    assert fairseq_suite.outcomes(tmp_path / "report.xml") == {"t.a": "failed"}


def test_a_folder_without_fairseqs_tests_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        fairseq_suite.main([str(tmp_path)])
    assert f"{tmp_path} has no tests/test_train.py: is it a checkout of fairseq?" in capsys.readouterr().err
