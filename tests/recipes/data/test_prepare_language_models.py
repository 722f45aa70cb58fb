"""`lightconv prepare wikitext103` and `gbw` on miniatures of their archives, and the sizes that are enforced."""

import functools
import re
from types import SimpleNamespace

import pytest

from lightconv_plugin.errors import CorpusError, InputError
from lightconv_plugin.recipes.data import gbw, language_model
from lightconv_plugin.recipes.data.options import SPLITS, Request
from lightconv_plugin.recipes.data.tasks import TASKS as PREPARED
from lightconv_plugin.recipes.data.tasks import parse
from tests.recipes.conftest import ROOT
from tests.recipes.data import miniatures
from tests.recipes.data.archive_server import serve, write_tar
from tests.recipes.data.miniatures import GBW, GBW_HELD_OUT, GBW_TRAIN, WIKITEXT103, write_zip
from tests.recipes.data.preparations import prepare

TASKS = ("wikitext103", "gbw")
OTHER = "`expect_entries` or `any_size` accepts another number"
TINY = (
    *("+model.decoder_embed_dim=16", "+model.decoder_ffn_embed_dim=16", "+model.decoder_input_dim=16"),
    *("+model.decoder_output_dim=16", "+model.decoder_layers=2", "+model.decoder_kernel_size_list=[3,7]"),
    *("+model.adaptive_input_cutoff=[4,8]", "+model.adaptive_softmax_cutoff=[4,8]", "task.tokens_per_sample=20"),
    *("dataset.max_tokens=160", "dataset.num_workers=0", "optimization.update_freq=[1]", "optimization.max_update=3"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def prepared(home):
    """Task → its folder, arguments, and fairseq's log and dictionary."""

    @functools.cache
    def of(task):
        mirror, out = home / f"{task} mirror", home / f"{task}, here"
        mirror.mkdir()
        miniatures.PUBLISHED[task](mirror)
        with serve(miniatures.files_of(mirror)) as server:
            arguments = (task, "--mirror", server.address, "--out", out, "--any-size", "--workers", "2")
            prepare(home, *arguments)
        log = (out / "preprocess.log").read_text()
        words = [line.split()[0] for line in (out / "data-bin/dict.txt").read_text().splitlines()]
        return SimpleNamespace(out=out, arguments=arguments, log=log, words=words)

    return of


def tokens(text):
    """The number of tokens, with the </s> of every line."""
    return len(text.split()) + text.count(b"\n")


@pytest.mark.parametrize("task", TASKS)
def test_the_second_run_does_no_work(task, prepared, home):
    assert miniatures.no_leftovers(prepared(task).out)
    said = prepare(home, *prepared(task).arguments)  # the server is gone, and not needed any more
    assert said.splitlines() == ["raw text: done before", "binarise: done before"]


def test_the_text_of_wikitext_is_as_it_came(prepared):
    made = prepared("wikitext103")
    for part, lines in miniatures.WIKITEXT_LINES.items():
        text = miniatures.wikitext(part)
        assert (made.out / f"raw/{part}.txt").read_bytes() == text
        assert f"raw/{part}.txt: {lines + 3} sents, {tokens(text)} tokens" in made.log
    seen = {*miniatures.wikitext("train").decode().split()} - {"<unk>"}
    assert seen == {word for word in made.words if not word.startswith("madeupword")}
    assert (len({*made.words}) + 4) % 8 == 0


@pytest.mark.parametrize("workers", ["1", "3"])
def test_lines_end_at_line_feeds_alone(workers, tmp_path, home):
    text = tmp_path / "text"
    text.mkdir()
    for part in ("train", "valid", "test"):
        (text / f"{part}.txt").write_bytes(b"\xef\xbb\xbf" + b"a b\rc d\n" * 20 + b"a c\r\n" * 20)
    options = ("--data", text, "--out", tmp_path / "out", "--any-size", "--workers", workers)
    said = prepare(home, "wikitext2", *options)
    assert "train: 40 lines" in said, said
    assert "train.txt: 40 sents, 160 tokens" in (tmp_path / "out/preprocess.log").read_text()
    words = {line.split()[0] for line in (tmp_path / "out/data-bin/dict.txt").read_text().splitlines()}
    assert {word for word in words if not word.startswith("madeupword")} == set("abcd")  # no byte order mark


def test_the_parts_are_those_of_the_one_billion_word_benchmark(prepared):
    made, files = prepared("gbw"), miniatures.gbw()
    train = b"".join(files[GBW_TRAIN.format(i)] for i in range(1, 100))
    assert (made.out / "raw/train.txt").read_bytes() == train.replace(b"\r", b" ")
    assert (made.out / "raw/valid.txt").read_bytes() == files[GBW_HELD_OUT.format(1)]
    assert (made.out / "raw/test.txt").read_bytes() == files[GBW_HELD_OUT.format(0)]
    lines = train.count(b"\n")
    assert f"raw/train.txt: {lines} sents, {tokens(train)} tokens" in made.log


def test_words_seen_less_than_three_times_are_unknown(prepared):
    made = prepared("gbw")
    text = (made.out / "raw/train.txt").read_text().split()
    assert {word for word in made.words if not word.startswith("madeupword")} == {w for w in text if text.count(w) >= 3}
    assert "only3" in made.words and "only2" not in made.words


@pytest.mark.parametrize("task, window", [("wikitext103", ("--context-window", "10")), ("gbw", ())], ids=TASKS)
def test_a_language_model_trains_on_it_and_is_scored(task, window, prepared, run_script, tmp_path):
    data = prepared(task).out / "data-bin"
    overrides = (f"task.data={data}", f"checkpoint.save_dir={tmp_path / 'run'}", *TINY)
    run_script("train.sh", ROOT / f"configs/{task}/dynamicconv.yaml", *overrides)
    done = run_script("perplexity.sh", data, tmp_path / "run/checkpoint_last.pt", "--cpu", *window)
    text = (prepared(task).out / "raw/test.txt").read_bytes()
    assert re.match(rf"test: perplexity \S+ over {tokens(text)} tokens", done.stdout)


def prepare_place(place, out, *arguments, entries=None):
    """The stages for one folder or archive, as wikitext2 has them for a folder."""
    request = Request("wikitext2", place.parent, out, parse("wikitext2", arguments))
    language_model.plan_files(request, place.name, {}, entries).run()


@pytest.mark.parametrize(
    "write, changes, message",
    [
        (write_zip, {"wikitext-103/wiki.test.tokens": None}, "has no file *test*"),
        (write_zip, {"b/train.txt": b"a\n"}, "found train.txt, wiki.train.tokens"),
        (write_zip, {"../wiki.train.tokens": b"a\n"}, "leads out of the folder"),
        (write_zip, {"wikitext-103/wiki.valid.tokens": b""}, "wiki.valid.tokens is empty"),
        (write_zip, {"wikitext-103/wiki.valid.tokens": b"a\ncaf\xe9\n"}, "wiki.valid.tokens is not UTF-8: line 2: "),
        (write_tar, {}, "train has 63 lines, "),
    ],
    ids=["no-test", "two", "outside", "empty", "latin-1", "other-size"],
)
def test_one_clear_line_for_an_archive_of_another_form(tmp_path, write, changes, message):
    files = {name: data for name, data in (miniatures.wikitext103() | changes).items() if data is not None}
    path = write(tmp_path / ("a.zip" if write is write_zip else "a.tgz"), files)
    out = tmp_path / "out"
    with pytest.raises(CorpusError) as caught:
        prepare_place(path, out, "--expect", "train:1801350:103227021")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (out / "unpacked.tmp").exists() and not list((out / "raw").glob("*.txt"))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda files: files.pop(GBW_TRAIN.format(7)),
            "lacks 1 of the 99 files of text, the first: training-monolingual",
        ),
        (lambda files: files.pop(GBW_HELD_OUT.format(0)), "news.en.heldout-00000-of-00050"),
        (lambda files: files.update({GBW_HELD_OUT.format(1): b""}), "news.en.heldout-00001-of-00050 is empty"),
        (lambda files: files.update({"x/" + GBW_TRAIN.format(9): b"a\n"}), "news.en-00009-of-00100 twice"),
    ],
    ids=["no-training-file", "no-test-file", "empty", "twice"],
)
def test_an_archive_of_another_form_is_refused(home, tmp_path, spoil, message):
    files = miniatures.gbw()
    spoil(files)
    data = write_tar(tmp_path / f"data/{GBW}.tar.gz", files).parent
    said = prepare(home, "gbw", "--data", data, "--out", tmp_path / "out", "--any-size", status=2)
    last = said.splitlines()[-1]
    assert last.startswith("lightconv prepare: error: ") and message in last
    assert not (tmp_path / "out/unpacked.tmp").exists() and not list((tmp_path / "out/raw").glob("*.txt"))


@pytest.fixture
def quick_binarise(monkeypatch):
    """Instead of fairseq-preprocess: a dictionary of twelve words."""

    def binarise(root, splits, prefix, options, workers, output):
        output.mkdir()
        (output / "dict.txt").write_text("a 1\n" * 12)

    monkeypatch.setattr(language_model, "binarise", binarise)


def test_text_of_any_size_is_counted_when_it_is_not_allowed_any_more(tmp_path, quick_binarise):
    place = write_zip(tmp_path / WIKITEXT103, miniatures.wikitext103())
    prepare_place(place, tmp_path / "out", "--expect", "test:14:1000", "--any-size")
    with pytest.raises(CorpusError, match=f"{WIKITEXT103}: test has 14 lines, "):
        prepare_place(place, tmp_path / "out", "--expect", "test:14:1000")


def test_a_dictionary_of_another_size_is_refused(tmp_path, quick_binarise):
    place = write_zip(tmp_path / WIKITEXT103, miniatures.wikitext103())
    with pytest.raises(CorpusError, match=f"{WIKITEXT103}: the dictionary has 16 entries, expected 24; {OTHER}$"):
        prepare_place(place, tmp_path / "out", "--expect-entries", "24")
    assert not (tmp_path / "out/data-bin").exists()
    prepare_place(place, tmp_path / "out", "--expect-entries", "16")


def test_symbols_of_fairseq_are_not_words_of_a_text(tmp_path, quick_binarise):
    files = miniatures.wikitext103() | {"wikitext-103/wiki.valid.tokens": b" a <unk>x <s> \n b <pad> \n"}
    place = write_zip(tmp_path / WIKITEXT103, files)
    with pytest.raises(CorpusError, match=r"valid\.txt, line 1: <s> in 'a <unk>x <s>' is fairseq's symbol, not a word"):
        prepare_place(place, tmp_path / "out")
    assert not (tmp_path / "out/data-bin").exists()


def test_the_published_number_of_entries_is_that_of_the_usual_threshold(tmp_path, quick_binarise):
    place = write_zip(tmp_path / WIKITEXT103, miniatures.wikitext103())
    with pytest.raises(CorpusError, match="the dictionary has 16 entries, expected 24"):
        prepare_place(place, tmp_path / "out", entries=24)
    prepare_place(place, tmp_path / "out", "--threshold", "5", entries=24)
    with pytest.raises(CorpusError, match="the dictionary has 16 entries, expected 24"):
        prepare_place(place, tmp_path / "out", "--threshold", "6", "--expect-entries", "24", entries=16)


def test_the_published_sizes(tmp_path):
    assert str(language_model.WIKITEXT103["train"]) == "1,801,350 lines, 103,227,021 tokens"
    assert [PREPARED[task].plan.keywords["entries"] for task in ("wikitext103", "wikitext2")] == [267_744, 33_280]
    assert str(gbw.EXPECTED["test"]) == "6,075 lines, 159,658 tokens"
    outputs = {part: tmp_path / part for part in SPLITS}
    archive = write_tar(tmp_path / f"{GBW}.tar.gz", miniatures.gbw())
    gbw.from_archive(archive, tmp_path, *outputs.values())
    with pytest.raises(CorpusError, match=r"train has 248 lines, .* tokens, expected 30,301,028 lines; `any_size`"):
        language_model.check_sizes(outputs, gbw.EXPECTED, archive)
    assert not (tmp_path / "unpacked.tmp").exists()


@pytest.mark.parametrize("size", ["train:1", "training:1:2", "train:1:2:3", "train:x:2"])
def test_a_size_of_the_wrong_form_is_refused(size):
    with pytest.raises(InputError) as caught:
        parse("wikitext103", ["--expect", size])
    assert f"expected PART:LINES:TOKENS with one of train, valid, test, got {size!r}" in str(caught.value)
