"""`lightconv prepare parallel` on text of any language: regions, tokens that are there already, segmenters."""

import json
import sys

import pytest

from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.data import tasks
from lightconv_plugin.scoring.measuring import Measuring
from lightconv_plugin.text.recipe import Recipe
from tests.recipes.conftest import check_recipes, write_parts
from tests.recipes.data.preparations import SMALL, lines, prepare


def text_in(folder, code, test=""):
    """Parallel text of the grammar whose German goes by this code; `test`: its five lines for tests instead."""
    write_parts(folder, ("train", "valid", "test"), (50, 5, 5))
    for path in folder.glob("*.de"):
        path.rename(path.with_suffix(f".{code}"))
    if test:
        (folder / f"test.{code}").write_text(f"{test}\n" * 5, encoding="utf-8")
    return folder


def test_languages_of_a_region(tmp_path):
    """The tokeniser has rules for the language; fairseq's file names have the whole code."""
    folder = text_in(tmp_path / "text", "pt_BR")
    prepare(tmp_path, "parallel", "--data", folder, "--out", tmp_path / "out", "--tgt", "pt_BR", *SMALL)
    assert (tmp_path / "out/data-bin/test.en-pt_BR.pt_BR.bin").is_file()
    about = json.loads((tmp_path / "out/corpus.json").read_text(encoding="utf-8"))
    assert about["tgt"] == "pt_BR" and about["text"]["pt_BR"]["lang"] == "pt"
    check_recipes(tmp_path / "out")


def test_tokens_that_are_lower_cased_later(tmp_path):
    """What is repeated on raw text tokenises first: a full stop before a small letter would stay at its word."""
    folder = text_in(tmp_path / "text", "el", "Ο δρόμος . Η ΟΔΟΣ .")
    (folder / "test.en").write_text("Mr. Smith saw him . He left .\n" * 5, encoding="utf-8")
    options = ("--src", "el", "--tgt", "en", "--tokenizer", "done", "--lowercase", *SMALL)
    prepare(tmp_path, "parallel", "--data", folder, "--out", tmp_path / "out", *options)
    about = json.loads((tmp_path / "out/corpus.json").read_text(encoding="utf-8"))
    for lang, raw in (("en", "Mr. Smith saw him. He left."), ("el", "Ο δρόμος. Η ΟΔΟΣ.")):
        assert Recipe.of_json(about["text"][lang]).tokenise()(raw) == lines(tmp_path / f"out/tok/test.{lang}")[0]


@pytest.mark.parametrize("tokenizer", ["moses", "done"])
@pytest.mark.parametrize("code", ["ca", "tdt", "ca_ES"])
def test_languages_whose_rules_are_not_here(code, tokenizer, tmp_path):
    folder = text_in(tmp_path / "text", code)
    options = ("--tgt", "en", "--tokenizer", tokenizer, *SMALL)
    said = prepare(tmp_path, "parallel", "--data", folder, "--out", tmp_path / "out", *options, status=2)
    assert not (tmp_path / "out").exists()
    assert f"no tokenising of {code[:3].rstrip('_')!r}" in said and "--tokenizer none" in said


def test_text_that_is_in_tokens_already(tmp_path):
    folder = text_in(tmp_path / "text", "de", "Das   ist &amp; bleibt so.")
    options = ("--src", "de", "--tgt", "en", "--tokenizer", "none", *SMALL)
    prepare(tmp_path, "parallel", "--data", folder, "--out", tmp_path / "out", *options)
    assert lines(tmp_path / "out/tok/test.de")[0] == "Das ist &amp; bleibt so."
    check_recipes(tmp_path / "out")


def test_text_that_moses_has_tokenised_already(tmp_path):
    """Its tokens stay, in a language without rules of its own too; other text is tokenised and joined alike later."""
    folder = text_in(tmp_path / "text", "vi", "Đây   là &quot; &apos;một &quot; .")
    options = ("--src", "en", "--tgt", "vi", "--tokenizer", "done", "--no-lowercase", *SMALL)
    prepare(tmp_path, "parallel", "--data", folder, "--out", tmp_path / "out", *options)
    assert lines(tmp_path / "out/tok/test.vi")[0] == "Đây là &quot; &apos;một &quot; ."
    recipes = json.loads((tmp_path / "out/corpus.json").read_text(encoding="utf-8"))["text"]
    assert recipes == {lang: {"tokeniser": "moses", "lang": "en"} for lang in ("en", "vi")}
    assert Recipe.of_json(recipes["vi"]).detokenise()("Đây là &quot; &apos;một &quot; .") == 'Đây là "\'một".'
    assert Recipe.of_json(recipes["en"]).tokenise()("It isn't.") == "It isn &apos;t ."
    scored = Measuring().with_data(tmp_path / "out/data-bin", "test")
    assert scored.measures(["x"] * 5, ["x"] * 5)["chrf"].references == ['Đây là "\'một".'] * 5


def test_japanese_is_segmented(tmp_path):
    pytest.importorskip("sudachipy")
    folder = text_in(tmp_path / "text", "ja", "雪舟は水墨画家で、1420年に生まれる。")
    options = ("--src", "ja", "--tgt", "en", "--out", tmp_path / "out", *SMALL)
    prepare(tmp_path, "parallel", "--data", folder, *options)
    tokens = "雪舟 は 水墨 画家 で 、 1420 年 に 生まれる 。"
    assert lines(tmp_path / "out/tok/test.ja")[0] == tokens
    check_recipes(tmp_path / "out")
    recipe = json.loads((tmp_path / "out/corpus.json").read_text(encoding="utf-8"))["text"]["ja"]
    assert recipe == {"tokeniser": "sudachi", "lang": "ja"}
    prepare(tmp_path, "parallel", "--data", folder, *options, "--tokenizer", "none")
    assert lines(tmp_path / "out/tok/test.ja")[0] == "雪舟は水墨画家で、1420年に生まれる。"


def test_japanese_without_its_segmenter_is_one_clear_line(monkeypatch, tmp_path):
    folder = text_in(tmp_path / "text", "ja")
    monkeypatch.setitem(sys.modules, "sudachipy", None)
    with pytest.raises(InputError, match=r"^Japanese is segmented by sudachipy, .* parallel --tokenizer none\)$"):
        tasks.prepare("parallel", ["--data", str(folder), "--src", "ja", "--tgt", "en", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
