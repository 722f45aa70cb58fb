"""`lightconv score --data`: what a folder of binarised data and the folder above it say about the text."""

import json

import pytest

from lightconv_plugin.checkpoints.training_text import read_corpus
from lightconv_plugin.scoring import bleu
from lightconv_plugin.scoring.measuring import Measuring
from lightconv_plugin.text.recipe import Recipe, lower
from tests.scoring.corpora import PLAIN, TOKENISED, as_json, refused, write
from tests.scoring.test_gen_log import log_of


@pytest.fixture
def corpus(tmp_path):
    """Makes a corpus of these directions, with raw test sets and this corpus.json; returns its data-bin."""

    def make(*directions, about=None):
        data = tmp_path / "corpus/data-bin"
        data.mkdir(parents=True)
        (tmp_path / "corpus/raw").mkdir()
        for pair in directions:
            for lang in pair.split("-"):
                (data / f"test.{pair}.{lang}.idx").touch()
        write(tmp_path / "corpus/raw/test.de", PLAIN)
        write(tmp_path / "corpus/raw/test.en", ["one", "two", "three"])
        if about is not None:
            (tmp_path / "corpus/corpus.json").write_text(json.dumps(about))
        return data

    return make


def test_text_that_was_not_tokenised_is_not_detokenised(corpus, files, capsys):
    data = corpus("en-de", about={"text": {"de": {"tokeniser": "none", "lang": "de"}}})
    write(data.parent / "raw/test.de", TOKENISED)
    (data.parent / "tok").mkdir()
    write(data.parent / "tok/test.de", TOKENISED)  # as `lightconv prepare` copies it
    got = as_json(capsys, *files(TOKENISED, TOKENISED), "--data", data)
    assert (got["detok"], got["sacrebleu"], got["chrf"]) == ("none", pytest.approx(100), pytest.approx(100))
    assert as_json(capsys, *files(TOKENISED, TOKENISED), "--data", data, "--detok", "moses")["sacrebleu"] < 90


def test_a_link_to_data_keeps_what_lies_beside_it(corpus, tmp_path):
    """Beside the link itself, or else beside what it links to."""
    data = corpus("en-de", about={"lowercase": True})
    (tmp_path / "links").mkdir()
    (link := tmp_path / "links/data-bin").symlink_to(data)
    assert Measuring().with_data(link, "test") == Measuring().with_data(data, "test")
    data.rename(tmp_path / "store")
    data.symlink_to(tmp_path / "store")
    found = Measuring().with_data(data, "test")
    assert (found.lowercase, found.raw_ref) == (True, data.parent / "raw/test.de")
    assert read_corpus(data) == {"lowercase": True}


def test_what_is_given_counts(corpus, tmp_path):
    """And not what the folder says, whose raw text is tokens here."""
    data = corpus("en-de", about={"text": {"de": {"tokeniser": "moses", "lang": "en"}}})
    (data.parent / "tok").symlink_to(data.parent / "raw")
    given = Measuring(lang="de_AT", detok="none", raw_ref=tmp_path / "given", lowercase=True)
    assert given.with_data(data, "test") == given
    found = Measuring(lang="en", raw_ref=data.parent / "raw/test.de", raw_rules="en")
    assert Measuring().with_data(data, "test") == found


def test_what_the_folder_says_of_a_log_need_not_be_given(corpus, tmp_path, capsys):
    """Without it, --detok would be missing."""
    data = corpus("en-de", about={"text": {"de": {"tokeniser": "none", "lang": "de"}}})
    log = write(tmp_path / "gen.out", log_of(TOKENISED, PLAIN, detokenised=PLAIN))
    assert as_json(capsys, "--gen", log, "--data", data)["sacrebleu"] == pytest.approx(100)


@pytest.mark.parametrize("tokeniser", ["jieba", "sudachi"])
def test_text_of_another_tokeniser_is_detokenised_by_its_rules(tokeniser, corpus, files, capsys):
    """As `lightconv translate` does: Moses' rules leave spaces at brackets and digits."""
    tokens = ["北京 （ 2019 年 ） 的 人 ， 3 个 。"] * 3
    data = corpus("en-zh", about={"text": {"zh": {"tokeniser": tokeniser, "lang": "zh"}}})
    got = as_json(capsys, *files(tokens, tokens), "--data", data)
    plain = bleu.measures(tokens, tokens, lang=got["lang"], detok=got["detok"])["chrf"]
    assert plain.hypotheses == plain.references == list(map(Recipe(tokeniser, "zh").detokenise(), tokens))
    assert "京（" in plain.hypotheses[0] and "的人，" in plain.hypotheses[0]


@pytest.mark.parametrize(
    "text", [None, [], {"de": None}, {"en": {"tokeniser": "none"}}, {"de": {"tokeniser": "moses"}}]
)
def test_other_text_is_detokenised(text, corpus, files, capsys):
    got = as_json(capsys, *files(TOKENISED, TOKENISED), "--data", corpus("en-de", about={"text": text}))
    assert (got["detok"], got["sacrebleu"]) == ("moses", pytest.approx(100))


def test_a_language_without_rules_is_scored_by_those_of_its_tokens(corpus, files, capsys):
    """Moses has none for Vietnamese; corpus.json says that its text has the English ones."""
    data = corpus("en-vi", about={"text": {"vi": {"tokeniser": "moses", "lang": "en"}}})
    write(data.parent / "raw/test.vi", PLAIN)
    got = as_json(capsys, *files(TOKENISED, TOKENISED), "--data", data)
    assert got["lang"] == "en" and got["bleu_tok"] == pytest.approx(100)
    (data.parent / "corpus.json").unlink()
    said = refused(capsys, *files(TOKENISED, TOKENISED), "--data", data)
    assert "Moses has no rules for the language 'vi'" in said


@pytest.mark.parametrize("subset", ["/x", "**", "[", "t*"])
def test_a_subset_is_a_name_and_no_pattern(subset, corpus, files, capsys):
    data = corpus("en-de")
    said = refused(capsys, *files(TOKENISED, TOKENISED), "--data", data, "--subset", subset)
    assert f"{data} has no subset {subset}; it has test" in said


def test_raw_training_text_is_no_reference(corpus):
    """Pairs of it were left out, or encoded several times."""
    data = corpus("en-de")
    (data / "train.en-de.de.idx").touch()
    raw = write(data.parent / "raw/train.de", PLAIN)
    assert raw.is_file() and Measuring().with_data(data, "train").raw_ref is None
    assert Measuring().with_data(data, "test").raw_ref == data.parent / "raw/test.de"


def test_of_two_directions_the_language_chooses(corpus, files, capsys):
    data = corpus("de-en", "en-de")
    said = refused(capsys, *files(TOKENISED, TOKENISED), "--data", data)
    assert f"{data} has several directions: name the languages; test is there as de-en, en-de" in said
    assert "several directions" in refused(capsys, *files(TOKENISED, TOKENISED), "--data", data, "--lang", "fr")
    got = as_json(capsys, *files(TOKENISED, TOKENISED), "--data", data, "--lang", "de")
    assert (got["lang"], got["sacrebleu"]) == ("de", pytest.approx(100))
    english = ["one", "two", "three"]
    got = as_json(capsys, *files(english, english), "--data", data, "--lang", "en")
    assert (got["lang"], got["chrf"]) == ("en", pytest.approx(100))


@pytest.mark.parametrize("change", [str, lower])
def test_tokens_in_the_place_of_raw_text_are_detokenised(change, corpus, files, capsys):
    """As `lightconv prepare --tokenizer done` leaves them, with or without --lowercase."""
    tokens = ["It &apos;s a dog , isn &apos;t it ?", "Ο ΔΡΟΜΟΣ &amp; a cat .", "3 &lt; 4"]
    data = corpus("de-en", about={"text": {"en": {"tokeniser": "moses", "lang": "en"}}, "lowercase": change is lower})
    write(data.parent / "raw/test.en", tokens)
    (data.parent / "tok").mkdir()
    write(data.parent / "tok/test.en", list(map(change, tokens)))
    got = as_json(capsys, *files(tokens, tokens), "--data", data)
    assert (got["sacrebleu"], got["chrf"]) == (pytest.approx(100), pytest.approx(100))
    plain = ["It's a dog, isn't it?", "Ο ΔΡΟΜΟΣ & a cat.", "3 < 4"]  # as of fairseq-generate's --tokenizer moses
    got = as_json(capsys, *files(plain, plain), "--data", data, "--detok", "none")
    assert (got["sacrebleu"], got["chrf"]) == (pytest.approx(100), pytest.approx(100))
    write(data.parent / "raw/test.en", plain)
    assert as_json(capsys, *files(tokens, tokens), "--data", data)["chrf"] == pytest.approx(100)


@pytest.mark.parametrize("target, options, lang", [("de_DE", (), "de_DE"), ("deu", ("--lang", "de"), "de")])
def test_the_rules_may_be_of_another_name_than_the_files(target, options, lang, corpus, files, capsys):
    data = corpus(f"en-{target}")
    write(data.parent / f"raw/test.{target}", PLAIN)
    got = as_json(capsys, *files(TOKENISED, TOKENISED), "--data", data, *options)
    assert (got["lang"], got["sacrebleu"]) == (lang, pytest.approx(100))
