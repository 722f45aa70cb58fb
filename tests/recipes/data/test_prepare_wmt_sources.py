"""What the steps of the WMT tasks do with single texts: sources, test sets, splitting, words, Google's archive."""

import importlib.util
import json
import random
import tarfile

import pytest

from lightconv_plugin.errors import CorpusError, InputError
from lightconv_plugin.recipes.data import tasks
from lightconv_plugin.recipes.data.options import Options, Request
from lightconv_plugin.recipes.data.stages import Plan
from lightconv_plugin.recipes.data.wmt import Preparation, keep_raw, recipe, training_tokeniser
from lightconv_plugin.recipes.data.wmt16 import extract
from lightconv_plugin.recipes.data.wmt_sources import Source, WmtTask, append_source, expect, extract_sgm, read_sgm
from lightconv_plugin.text.segmenters import SEGMENTERS
from tests.recipes.data import wmt_archives
from tests.recipes.data.archive_server import write_tar
from tests.recipes.data.wmt_archives import as_bytes, sgm

PAIR = ("x/a.en", "x/a.de")


def archive(folder, english, german, name="one"):
    """A source in an archive of its own."""
    write_tar(folder / f"{name}.tgz", {PAIR[0]: english, PAIR[1]: german})
    return Source(name, f"{name}.tgz", PAIR, 1)


def appended(source, folder):
    outputs = [folder / "out.en", folder / "out.de"]
    count = append_source(source, folder, folder / "scratch", outputs, any_size=False)
    assert not (folder / "scratch").exists()
    return count, [path.read_bytes() for path in outputs]


def test_sources_are_appended_in_order_each_line_ended(tmp_path):
    first = archive(tmp_path, b"\xef\xbb\xbfone\ntwo", b"eins\nzwei\n", "first")
    second = archive(tmp_path, b"three\r\n", b"drei", "second")
    assert appended(first, tmp_path)[0] == 2
    assert appended(second, tmp_path) == (1, [b"one\ntwo\nthree\r\n", b"eins\nzwei\ndrei\n"])


@pytest.mark.parametrize(
    "english, german, message",
    [
        (b"a\nb\n", b"c\n", "one in one.tgz: the sides do not belong together: a.en has 2 lines but a.de has 1"),
        (b"", b"", "one in one.tgz: a.en is empty"),
    ],
    ids=["lengths", "empty"],
)
def test_sides_that_do_not_belong_together(tmp_path, english, german, message):
    with pytest.raises(CorpusError, match=message):
        appended(archive(tmp_path, english, german), tmp_path)
    assert not (tmp_path / "out.en").exists()


def test_a_missing_member_is_named(tmp_path):
    write_tar(tmp_path / "one.tgz", {PAIR[0]: b"a\n", "x/b.de": b"b\n"})
    with pytest.raises(CorpusError, match=r"one.tgz has no file x/a.de"):
        appended(Source("one", "one.tgz", PAIR, 1), tmp_path)


def test_each_book_needs_its_other_side_and_equal_length(tmp_path):
    books = Source("books", "books.tgz", ("b/*_cn.txt", "b/*_en.txt"), 1)
    content = {"b/1_cn.txt": b"a\n", "b/1_en.txt": b"a\n", "b/2_cn.txt": b"b\n"}
    write_tar(tmp_path / "books.tgz", content)
    with pytest.raises(CorpusError, match=r"has 2 files b/\*_cn.txt and 1 files b/\*_en.txt"):
        appended(books, tmp_path)
    # as many lines in all, but not in each
    write_tar(tmp_path / "books.tgz", content | {"b/1_en.txt": b"a\nb\n", "b/2_en.txt": b"", "b/3_cn.txt": b""})
    with pytest.raises(CorpusError):
        appended(books, tmp_path)


def test_books_go_in_numeric_order(tmp_path):
    sides = {side: {f"b/Book{i}_{side}.txt": f"{side}{i}\n".encode() for i in (10, 9, 1)} for side in ("cn", "en")}
    write_tar(tmp_path / "books.tgz", sides["cn"] | dict(reversed(sides["en"].items())))
    books = Source("books", "books.tgz", ("b/*_cn.txt", "b/*_en.txt"), 1)
    assert appended(books, tmp_path) == (3, [b"cn1\ncn9\ncn10\n", b"en1\nen9\nen10\n"])


def test_the_published_number_of_pairs_is_wanted(tmp_path):
    source = archive(tmp_path, b"a\n", b"b\n")
    exact = Source(source.name, source.archive, PAIR, 1, pairs=2)
    with pytest.raises(CorpusError, match=r"one in one.tgz has 1 pairs, expected 2 as published .`any_size`"):
        appended(exact, tmp_path)
    expect(1, 2, "it", any_size=True)
    expect(2, 2, "it", any_size=False)


SET = Source("set", "set.tgz", ("s-src.en.sgm", "s-ref.de.sgm"), 1)


def sgm_set(folder, english, german):
    write_tar(folder / "set.tgz", {SET.members[0]: sgm(english, "src", "en"), SET.members[1]: sgm(german, "ref", "de")})


def test_a_test_set_is_every_segment_of_both_files(tmp_path):
    sgm_set(tmp_path, ["A \u2028 b  c", "d &amp; it’s", "e"], ["f", "g", "h"])
    outputs = [tmp_path / "test.en", tmp_path / "test.de"]
    assert extract_sgm(SET, tmp_path, tmp_path / "scratch", outputs, any_size=False) == 3
    assert [path.read_bytes() for path in outputs] == [as_bytes(["A b c", "d &amp; it’s", "e"]), b"f\ng\nh\n"]


def test_segments_must_be_as_many_on_both_sides(tmp_path):
    sgm_set(tmp_path, ["a", "b", "c"], ["a", "b"])
    with pytest.raises(CorpusError, match=r"s-src.en.sgm has 3 segments but s-ref.de.sgm has 2"):
        extract_sgm(SET, tmp_path, tmp_path / "scratch", [tmp_path / "a", tmp_path / "b"], any_size=True)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ('<seg id="1">not\nended</seg>', "line 1 is not one"),
        ('<seg id="1">one</seg><seg id="2">two</seg>', "line 1 is not one"),
        ('\n<seg id="1">one</seg>\nleft over</seg>', "line 3 is not one"),
        ("<doc>\n</doc>", "has no segments"),
    ],
    ids=["broken", "two", "end-only", "none"],
)
def test_sgm_is_read_strictly(tmp_path, text, message):
    path = tmp_path / "x.sgm"
    path.write_text(text + "\n")
    with pytest.raises(CorpusError, match=message):
        read_sgm(path)


def write_texts(task, data):
    """The stages that fill data/out/text."""
    out = data / "out"
    Plan(out, Preparation(task, Request("", data, out, Options(data=data, workers=1))).text_stages()).run()


@pytest.mark.parametrize("seed", range(6))
def test_no_line_is_lost_and_the_order_kept(tmp_path, seed):
    """Any texts: validation is every N-th line of all sources together, training the rest, nothing is changed."""
    draw = random.Random(seed)
    alphabet = "ab é中\u2028\u0085\x0b\x0c\x1c\t\u00a0 <>&’"
    sources, whole = [], [[], []]
    for number in range(draw.randint(1, 4)):
        size = draw.randint(1, 40)
        texts = [["".join(draw.choices(alphabet, k=draw.randint(0, 12))) for _ in range(size)] for _ in PAIR]
        sources.append(archive(tmp_path, *map(as_bytes, texts), f"source{number}"))
        for side, text in zip(whole, texts, strict=True):
            side += text
    every = draw.randint(1, 9)
    sgm_set(tmp_path, ["a", "b"], ["c", "d"])
    write_texts(WmtTask("en", "de", tuple(sources), every, SET, True), tmp_path)
    for text, lang in zip(whole, ("en", "de"), strict=True):
        train, valid = [], []
        for i, line in enumerate(text, 1):
            (train if i % every else valid).append(line)
        found = [(tmp_path / f"out/text/{split}.{lang}").read_bytes() for split in ("train", "valid")]
        assert found == [as_bytes(train), as_bytes(valid)]


def test_a_changed_archive_is_taken_up_and_an_unchanged_one_is_not(tmp_path, capsys):
    source = archive(tmp_path, b"a\nb\n", b"c\nd\n")
    sgm_set(tmp_path, ["a", "b"], ["c", "d"])
    task = WmtTask("en", "de", (source,), 2, SET, True)
    for text, said in (
        (b"a\nb\n", "training text ..."),
        (b"a\nb\n", "done before"),
        (b"a\ne\n", "training text again, changed: inputs ..."),
    ):
        archive(tmp_path, text, b"c\nd\n")
        write_texts(task, tmp_path)
        assert said in capsys.readouterr().err
        assert (tmp_path / "out/text/valid.en").read_bytes() == text[2:]


def test_a_failing_source_leaves_no_text(tmp_path):
    """The first source is whole, the second is not: nothing of it may look done."""
    sources = archive(tmp_path, b"a\n", b"b\n", "first"), archive(tmp_path, b"a\n", b"b\nc\n", "second")
    sgm_set(tmp_path, ["a", "b"], ["c", "d"])
    with pytest.raises(CorpusError, match=r"second in second.tgz"):
        write_texts(WmtTask("en", "de", sources, 2, SET, True), tmp_path)
    assert not list((tmp_path / "out/text").glob("*"))


def test_the_raw_lines_of_what_cleaning_keeps(tmp_path):
    paths = {name: [tmp_path / f"{name}.{lang}" for lang in ("en", "de")] for name in ("encoded", "text", "out")}
    encoded = [["a b", "a b c d", "a@@ b c", "x"], ["c d", "e", "f@@ g", ""]]
    for name, sides in (("encoded", encoded), ("text", [["1", "2", "3", "4"], ["5", "6", "7", "8"]])):
        for path, side in zip(paths[name], sides, strict=True):
            path.write_bytes(as_bytes(side))
    keep_raw(paths["encoded"], paths["text"], *paths["out"])
    assert [path.read_text() for path in paths["out"]] == ["1\n3\n", "5\n7\n"]


def test_test_sets_are_not_normalised_but_for_the_apostrophe():
    line = "It’s “well-known” « naïve »"
    assert recipe("en").tokenise()(line) == "It &apos;s “ well @-@ known ” « naïve »"
    assert training_tokeniser("en")(line + "\u200b") == "It &apos;s &quot; well @-@ known &quot; &quot; naïve &quot;"


def test_chinese_is_divided_again_whatever_divided_it_before():
    pytest.importorskip("jieba")
    segment = SEGMENTERS["jieba"].segment()
    whole = segment("联合国大会今天讨论了机器翻译。")
    assert whole.split() == ["联合国大会", "今天", "讨论", "了", "机器翻译", "。"]
    assert segment("联合 国 大 会 今天 讨 论 了 机 器 翻译 。") == whole
    assert segment("使用 GPU 3.5\u200b%\u3000的 New York") == "使用 GPU 3.5 % 的 New York"
    assert segment("") == "" and "\n" not in segment("a\u2028b")


def test_chinese_without_jieba_is_one_clear_line(monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "jieba" else find_spec(name))
    with pytest.raises(InputError, match=r"wmt17_zh_en needs the package jieba, .* not installed: pip install jieba$"):
        tasks.prepare("wmt17_zh_en", ["--data", str(tmp_path)])


def test_raw_text_that_google_s_archive_lacks_is_made_and_told(tmp_path):
    wmt_archives.google_en_de(tmp_path, raw=False)
    extract(tmp_path / "wmt16_en_de.tar.gz", tmp_path / "bpe", tmp_path / "raw", any_size=True)
    made = json.loads((tmp_path / "raw/origin.json").read_text())["detokenised"]
    assert made == ["valid.en", "valid.de", "test.en", "test.de"]
    encoded = (tmp_path / "bpe/test.de").read_text().splitlines()
    raw = (tmp_path / "raw/test.de").read_text().splitlines()
    assert raw == [line.replace("@@ ", "").replace(" .", ".") for line in encoded]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"newstest2014.de": b"a\n"}, "newstest2014.de in wmt16_en_de.tar.gz has 1 lines, test.de 14"),
        ({"train.tok.clean.bpe.32000.de": b"a\n"}, "train in .*train.tok.clean.bpe.32000.de has 1"),
        ({"newstest2013.tok.bpe.32000.en": None}, "has no file newstest2013.tok.bpe.32000.en"),
    ],
    ids=["raw", "sides", "missing"],
)
def test_google_s_archive_is_checked(tmp_path, change, message):
    wmt_archives.google_en_de(tmp_path / "whole")
    with tarfile.open(tmp_path / "whole/wmt16_en_de.tar.gz") as file:
        content = {member.name: file.extractfile(member).read() for member in file} | change
    path = tmp_path / "wmt16_en_de.tar.gz"
    write_tar(path, {name: data for name, data in content.items() if data is not None})
    with pytest.raises(CorpusError, match=message):
        extract(path, tmp_path / "bpe", tmp_path / "raw", any_size=True)


def test_google_s_archive_must_have_the_published_number_of_pairs(tmp_path):
    wmt_archives.google_en_de(tmp_path)
    with pytest.raises(
        CorpusError, match=r"train in wmt16_en_de.tar.gz has 120 pairs, expected 4,500,966 as published"
    ):
        extract(tmp_path / "wmt16_en_de.tar.gz", tmp_path / "bpe", tmp_path / "raw", any_size=False)
