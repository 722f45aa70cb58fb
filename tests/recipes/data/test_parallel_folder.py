"""Finding a corpus by its file names."""

import gzip

import pytest

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.recipes.data.parallel_folder import Corpus, find_corpus, locate


@pytest.fixture
def folder(tmp_path):
    """Makes files of one line each, by name."""

    def make(*names):
        for name in names:
            data = f"line of {name}\n".encode()
            (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return tmp_path

    return make


PLAIN = ("train.en", "train.de", "valid.en", "valid.de", "test.en", "test.de")


@pytest.mark.parametrize(
    "names, found",
    [
        (PLAIN, ("en", "de", "train", "valid", ("test",))),
        (
            (
                "train.de.gz",
                "train.fr.gz",
                "dev.de",
                "dev.fr",
                "test-2014.de",
                "test-2014.fr",
                "test-2015.de",
                "test-2015.fr",
            ),
            ("de", "fr", "train", "dev", ("test-2014", "test-2015")),
        ),
        (
            (
                "train.lc.de",
                "train.lc.en",
                "val.de.gz",
                "val.en",
                "test_2016.en",
                "test_2016.de",
                "README.md",
                "train.log",
                "train.py",
                "train.tsv",
            ),
            ("en", "de", "train.lc", "val", ("test_2016",)),
        ),
        (
            [name.replace(".de", ".pt_BR") for name in PLAIN],
            ("en", "pt_BR", "train", "valid", ("test",)),
        ),
        ((*PLAIN, "test_extra.en"), ("en", "de", "train", "valid", ("test",))),
    ],
    ids=["plain", "gz-dev-two-tests", "val-other-files", "region", "half-a-test-set"],
)
def test_finds_languages_and_parts(folder, names, found):
    src, tgt, train, valid, tests = found
    corpus = find_corpus(folder(*names))
    assert corpus == Corpus(corpus.folder, src, tgt, train, valid, tests)


def test_languages_that_are_given_have_any_code(folder):
    names = [name.replace(".en", ".graph.gz").replace(".de", ".Phon") for name in PLAIN]
    corpus = find_corpus(folder(*names, "train.log"), "graph", "Phon")
    assert (corpus.train, corpus.valid, corpus.tests) == ("train", "valid", ("test",))


def test_further_test_sets_take_fairseqs_names(folder):
    corpus = find_corpus(folder(*PLAIN, "test2.en", "test2.de", "test.b.en", "test.b.de"), "de", "en")
    assert corpus.splits() == {"train": "train", "valid": "valid", "test": "test", "test1": "test.b"}
    assert (corpus.src, corpus.tgt) == ("de", "en")


@pytest.mark.parametrize(
    "names, arguments, message",
    [
        ((), {}, "cannot tell the language pair.*expected train.XX.*it is empty"),
        (("text.en", "text.de"), {}, "cannot tell the language pair.*found: text.de, text.en"),
        (("train.en", "train.de", "train.fr"), {}, r"\['de', 'en', 'fr'\]: choose with `src` and `tgt`"),
        (
            ("train.en.txt", "train.de.txt", "train.en.xz"),
            {},
            r"expected train\.XX.*, not \.txt or \.xz; found: train\.de",
        ),
        (("train.en", "train.de.txt"), {}, r"\['en'\]; expected train\.XX"),
        (("train.en", "train.zh-Hans"), {}, r"\['en'\]; expected .*such as de or pt_BR, without -, .*train\.zh-Hans"),
        (PLAIN, {"train": "trian"}, "`train_prefix` trian: .* has no text trian.XX; found: test.de"),
        (PLAIN, {"src": "fr"}, r"are \['de', 'en'\], not fr: choose with `src` and `tgt`"),
        (("train.en", "train.de", "test.en", "test.de"), {}, "no valid text for en-de.*expected.*found: test.de"),
        (("train.en", "train.de", "dev.en", "dev.de"), {}, "no test text for en-de.* prepare parallel --test-lines N"),
        (("train.en", "train.de", "dev.en", "dev.de", "test1.en", "test1.de"), {}, r"and test\.XX or test_\*\.XX,"),
        ((*PLAIN, "val.en", "val.de"), {}, r"several valid texts, \['val', 'valid'\]: keep one, or .* --valid-prefix$"),
        (PLAIN, {"src": "en", "tgt": "fr"}, "no train text for en-fr"),
        (PLAIN, {"src": "de", "tgt": "de"}, "both 'de'"),
    ],
    ids=(
        "empty no-train three-languages extensions one-language region wrong-prefix wrong-source "
        "no-valid no-test test1 two-valid wrong-language same-language"
    ).split(),
)
def test_says_what_was_found_and_what_is_expected(folder, names, arguments, message):
    with pytest.raises(CorpusError, match=message):
        find_corpus(folder(*names), **arguments)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"no folder .*nowhere"):
        find_corpus(tmp_path / "nowhere")


def test_a_missing_part_is_named(folder):
    with pytest.raises(CorpusError, match=r"has neither train.fr nor train.fr.gz"):
        locate(folder("train.en"), "train", "fr")


def test_plain_text_comes_before_packed(folder):
    assert locate(folder("train.en", "train.en.gz"), "train", "en").name == "train.en"
