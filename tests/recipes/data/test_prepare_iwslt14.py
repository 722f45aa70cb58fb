"""IWSLT 2014 from an archive of the real one's structure, over the network, damaged, of the wrong size."""

import io
import itertools
import json
import re
import tarfile

import pytest

from lightconv_plugin.errors import CorpusError
from lightconv_plugin.recipes.data import stages
from lightconv_plugin.recipes.data.iwslt14 import LINES, WORDS, expect, plan, segments_of, training_lines
from lightconv_plugin.recipes.data.options import Options, Request
from lightconv_plugin.recipes.data.pairs import keep_pair
from tests.recipes.conftest import check_recipes
from tests.recipes.data.archive_server import iwslt_archive, serve
from tests.recipes.data.preparations import lines, prepare

STEPS = ("raw text", "tokenise", "learn 120 BPE merges", "apply BPE", "binarise")
TALK = 20
PAIRS = 120


@pytest.fixture(scope="module")
def sentences():
    """20 sentences for the test sets and PAIRS for training, some of them hard."""
    from lightconv_plugin.recipes.grammar.corpus import pairs

    rows = list(itertools.islice(pairs(3), 20 + PAIRS))
    rows[1] = ("It’s the U.S.", "Er sagt’s, z.B. <i>so</i>.")
    rows[20 + 5] = ("one two three four", "eins")  # a ratio of more than 1.5
    rows[20 + 7] = ("", "ohne Gegenstück")
    rows[20 + 9] = ("and " * 180, "und " * 180)
    rows[20 + 11] = ("It’s AT&T's <title>", "Der Titel, „so“!")
    return rows


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, sentences):
    """The folder made by the command, where one that was killed as it tokenised has left half a text."""
    base = tmp_path_factory.mktemp("iwslt, here")
    out = base / "out"
    (out / ".scratch").mkdir(parents=True)
    (out / ".scratch/whole.de").write_text("ein halber Te")
    with serve({"de-en.tgz": iwslt_archive(sentences)}) as server:
        places = ("--mirror", server.address, "--out", out)
        for _ in range(2):
            said = prepare(base, "iwslt14_de_en", *places, "--any-size", "--bpe", "120", "--workers", "2")
        assert server.requests == [("de-en.tgz", 0)]
    assert said.splitlines() == [f"{step}: done before" for step in STEPS]
    return out


def test_everything_is_there_and_nothing_else(prepared):
    assert sorted(path.name for path in prepared.iterdir()) == sorted(
        [".steps", "bpe", "corpus.json", "data-bin", "download", "preprocess.log", "raw", "tok"]
    )
    assert not list(prepared.rglob("*.tmp")) and not list(prepared.rglob("*.part"))
    about = json.loads((prepared / "corpus.json").read_text())
    assert (about["src"], about["tgt"], about["lowercase"], about["bpe"]) == ("de", "en", True, 120)
    check_recipes(prepared)
    assert {path.name for path in (prepared / "data-bin").glob("*.bin")} == {
        f"{split}.de-en.{lang}.bin" for split in about["splits"] for lang in ("de", "en")
    }
    assert lines(prepared / "data-bin/dict.de.txt") != lines(prepared / "data-bin/dict.en.txt")


def test_titles_are_text_and_addresses_are_not(prepared):
    for lang in ("de", "en"):
        raw = lines(prepared / f"raw/train.{lang}")
        assert len(raw) == PAIRS + 2 * PAIRS // TALK
        assert raw[:2] == ["Talk 0", "TED Talk Subtitles: 0."]
        assert not re.search("<url>|<talkid>|<keywords>|description", "".join(raw))


def test_pairs_are_cleaned_and_every_23rd_is_for_validation(prepared):
    """From the raw text by the definition, with a tokenising that is tested elsewhere."""
    from lightconv_plugin.text.recipe import Recipe

    sides = []
    for lang in ("de", "en"):
        tokenise = Recipe("moses", lang, lowercase="last").tokenise()
        sides.append([tokenise(line) for line in lines(prepared / f"raw/train.{lang}")])
    rows = [row for row in zip(*sides, strict=True) if keep_pair(*row, 175, 1.5)]
    assert len(sides[0]) - 12 < len(rows) < len(sides[0]) - 2
    for side, lang in enumerate(("de", "en")):
        assert lines(prepared / f"tok/valid.{lang}") == [row[side] for row in rows[22::23]]
        rest = [row[side] for number, row in enumerate(rows, 1) if number % 23]
        assert lines(prepared / f"tok/train.{lang}") == rest


def test_the_test_set_is_the_five_sets_in_their_order(prepared, sentences):
    for side, lang in ((1, "de"), (0, "en")):
        assert lines(prepared / f"raw/test.{lang}") == [row[side] for row in sentences[:20]]  # untouched
        assert len(lines(prepared / f"tok/test.{lang}")) == 20
    assert lines(prepared / "tok/test.en")[1] == "it &apos;s the u.s ."
    assert lines(prepared / "tok/test.de")[1] == "er sagt &apos; s , z.b. &lt; i &gt; so &lt; / i &gt; ."


def test_bpe_is_joint(prepared):
    assert len(lines(prepared / "bpe/codes")) == 121  # its first line is the version
    for split, lang in itertools.product(("train", "valid", "test"), ("de", "en")):
        encoded = (prepared / f"bpe/{split}.{lang}").read_text()
        assert encoded.replace("@@ ", "") == (prepared / f"tok/{split}.{lang}").read_text()


def test_mark_up(tmp_path):
    text = (
        "<url>x</url>\n<title>A <b> title</title>\n a line \n<keywords>k</keywords>\n<description>D</description>\r\n"
    )
    (tmp_path / "tags").write_text(text)
    assert list(training_lines(tmp_path / "tags")) == ["A <b> title", " a line ", "D"]
    (tmp_path / "xml").write_text('<doc>\n<seg id="12">  It’s  </seg>\n<title>no</title>\n  <seg id="13">x</seg> \n')
    assert [line.strip() for line in segments_of(tmp_path / "xml")] == ["It’s", "x"]


def run_python(archive, out, any_size=False):
    """The steps; they stop before fairseq where something is wrong."""
    plan(Request("iwslt14_de_en", archive.parent, out, Options(bpe=50, workers=1, any_size=any_size))).run()


def test_another_size_is_an_error_that_names_both(tmp_path, sentences):
    (tmp_path / "de-en.tgz").write_bytes(iwslt_archive(sentences))
    message = (
        r"pairs of lines: train \d+, valid \d, test 20; expected train 160,239, valid 7,283, test 6,750 .*`any_size`"
    )
    with pytest.raises(CorpusError, match=message):
        run_python(tmp_path / "de-en.tgz", tmp_path / "out")
    assert not list((tmp_path / "out/tok").iterdir()) and not (tmp_path / "out/.scratch").exists()


def test_dictionaries_of_another_size_are_an_error_that_names_both():
    expect("words", dict(WORDS), WORDS)
    with pytest.raises(CorpusError, match="words: de 8,843, en 6,628; expected de 8,844, en 6,628"):
        expect("words", {"de": 8843, "en": 6628}, WORDS)
    assert sum(LINES.values()) == 160239 + 7283 + 6750


@pytest.mark.parametrize("what", ["cut", "no-file", "unequal", "no-archive"])
def test_a_bad_archive_is_named_and_leaves_nothing(tmp_path, sentences, what):
    archive = tmp_path / "de-en.tgz"
    data = iwslt_archive(sentences)
    if what == "cut":
        data, message = data[: len(data) // 2], "de-en.tgz is cut short or damaged"
    elif what in ("no-file", "unequal"):
        data = changed(data, None if what == "no-file" else b"<seg id='1'>one more</seg>\n")
        message = "has no file de-en/IWSLT14.TED.tst2011.de-en.en.xml" if what == "no-file" else r"lines are \("
    else:
        message = "no archive .*de-en.tgz"
    if what != "no-archive":
        archive.write_bytes(data)
    with pytest.raises(CorpusError, match=message):
        run_python(archive, tmp_path / "out", any_size=True)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file() and ".steps" not in str(path)]


def changed(data, more):
    """The archive without one of its test sets, or with `more` at the end of it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as old, tarfile.open(fileobj=buffer, mode="w:gz") as new:
        for member in old:
            content = old.extractfile(member).read()
            if "tst2011.de-en.en" in member.name:
                if more is None:
                    continue
                content += more
                member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_a_changed_archive_is_taken_up(tmp_path, sentences, capsys, monkeypatch):
    """Other test sets: the merges, learned on the training text, stay."""
    monkeypatch.setattr(stages, "binarise", lambda *arguments: arguments[-1].mkdir())
    archive = tmp_path / "de-en.tgz"
    archive.write_bytes(iwslt_archive(sentences))
    run_python(archive, tmp_path / "out", any_size=True)
    other = list(sentences)
    other[0] = ("Entirely new.", "Ganz neu.")
    archive.write_bytes(iwslt_archive(other))
    capsys.readouterr()
    run_python(archive, tmp_path / "out", any_size=True)
    done = [line for line in capsys.readouterr().err.splitlines() if "done before" in line]
    assert done == ["learn 50 BPE merges: done before"]
    assert lines(tmp_path / "out/tok/test.de")[0] == "ganz neu ."
