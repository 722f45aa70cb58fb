"""`lightconv prepare gbw` on a miniature of the very form of the One Billion Word benchmark's archive."""

import random
import re
import signal

import pytest

from tests.recipes.conftest import ROOT
from tests.recipes.data.archive_server import serve
from tests.recipes.data.language_archives import files_of, no_leftovers, sentences, write_tar
from tests.recipes.data.preparations import prepare, stop_at

NAME = "1-billion-word-language-modeling-benchmark-r13output"
TRAIN = NAME + "/training-monolingual.tokenized.shuffled/news.en-{:05}-of-00100"
HELD_OUT = NAME + "/heldout-monolingual.tokenized.shuffled/news.en.heldout-{:05}-of-00050"
TINY = (
    *("+model.decoder_embed_dim=16", "+model.decoder_ffn_embed_dim=16", "+model.decoder_input_dim=16"),
    *("+model.decoder_output_dim=16", "+model.decoder_layers=2", "+model.decoder_kernel_size_list=[3,7]"),
    *("+model.adaptive_input_cutoff=[4,16]", "+model.adaptive_softmax_cutoff=[4,16]", "task.tokens_per_sample=64"),
    *("dataset.max_tokens=160", "dataset.num_workers=0", "optimization.update_freq=[1]", "optimization.max_update=3"),
)


def content():
    """Name → bytes: 99 files of training text in another order than their names', and 50 of held-out text."""
    numbers = list(range(1, 100))
    random.Random(1).shuffle(numbers)
    files = {f"{NAME}/README": b"about the corpus\n"}
    files |= {TRAIN.format(i): sentences(i, 2 + i % 2) for i in numbers}
    files[TRAIN.format(50)] = files[TRAIN.format(50)].replace(b" ", b"\r", 1)  # only fairseq would end a line there
    return files | {HELD_OUT.format(i): sentences(1000 + i, 3 + i) for i in range(50)}


def archive(folder, files):
    return write_tar(folder / f"{NAME}.tar.gz", files).parent


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("gbw home")


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    return archive(tmp_path_factory.mktemp("gbw mirror"), content())


@pytest.fixture(scope="module")
def prepared(home, mirror):
    """(the prepared folder, what the second run said): the first, by HTTP, is ended by Ctrl-C as it binarises."""
    out = home / "prepared, here"
    with serve(files_of(mirror)) as server:
        arguments = ("gbw", "--mirror", server.address, "--out", out, "--any-size", "--workers", "2")
        status, said = stop_at("binarise ...", signal.SIGINT, home, *arguments)
        assert status == 130 and "interrupted: run the same command again to resume" in said
        assert not (out / "data-bin").exists()
    done = prepare(home, *arguments)  # the server is gone, and not needed any more
    assert done.returncode == 0, done.stderr
    return out, done.stderr


def test_an_interrupted_preparation_goes_on(prepared):
    out, said = prepared
    assert "downloading" not in said and "raw text: done before" in said and "binarise: done before" not in said
    assert no_leftovers(out)


def test_the_parts_are_those_of_the_benchmark(prepared):
    out, _ = prepared
    files = content()
    train = b"".join(files[TRAIN.format(i)] for i in range(1, 100))
    assert (out / "raw/train.txt").read_bytes() == train.replace(b"\r", b" ")
    assert (out / "raw/valid.txt").read_bytes() == files[HELD_OUT.format(1)]
    assert (out / "raw/test.txt").read_bytes() == files[HELD_OUT.format(0)]
    log = (out / "preprocess.log").read_text()
    words, lines = len(train.split()), train.count(b"\n")
    assert f"raw/train.txt: {lines} sents, {words + lines} tokens" in log


def test_words_seen_less_than_three_times_are_unknown(prepared):
    out, _ = prepared
    text = (out / "raw/train.txt").read_text().split()
    entries = [line.split()[0] for line in (out / "data-bin/dict.txt").read_text().splitlines()]
    assert {word for word in entries if not word.startswith("madeupword")} == {w for w in text if text.count(w) >= 3}
    assert "only3" in entries and "only2" not in entries


def test_the_second_run_does_no_work(prepared, home, mirror):
    done = prepare(home, "gbw", "--mirror", mirror, "--out", prepared[0], "--any-size", "--workers", "2")
    assert (done.returncode, done.stderr.splitlines()) == (0, ["raw text: done before", "binarise: done before"])


def test_a_language_model_trains_on_it_and_is_scored(prepared, run_script, tmp_path):
    data = prepared[0] / "data-bin"
    overrides = (f"task.data={data}", f"checkpoint.save_dir={tmp_path / 'run'}", *TINY)
    done = run_script("train.sh", ROOT / "configs/gbw/dynamicconv.yaml", *overrides)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    done = run_script("perplexity.sh", data, tmp_path / "run/checkpoint_last.pt", "--cpu")
    assert done.returncode == 0, done.stderr
    text = content()[HELD_OUT.format(0)]
    tokens = len(text.split()) + len(text.splitlines())
    assert re.match(rf"test: perplexity \S+ over {tokens} tokens", done.stdout)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda files: files.pop(TRAIN.format(7)), "lacks 1 of the 99 files of text, the first: training-monolingual"),
        (lambda files: files.pop(HELD_OUT.format(0)), "news.en.heldout-00000-of-00050"),
        (lambda files: files.update({HELD_OUT.format(1): b""}), "news.en.heldout-00001-of-00050 is empty"),
        (lambda files: files.update({"x/" + TRAIN.format(9): b"a\n"}), "news.en-00009-of-00100 twice"),
    ],
    ids=["no-training-file", "no-test-file", "empty", "twice"],
)
def test_an_archive_of_another_form_is_refused(home, tmp_path, spoil, message):
    files = content()
    spoil(files)
    data = archive(tmp_path / "data", files)
    done = prepare(home, "gbw", "--data", data, "--out", tmp_path / "out", "--any-size")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("lightconv prepare: error: ") and message in last
    assert not (tmp_path / "out/unpacked.tmp").exists() and not list((tmp_path / "out/raw").glob("*.txt"))


def test_an_archive_cut_short_is_refused(home, mirror, tmp_path):
    whole = (mirror / f"{NAME}.tar.gz").read_bytes()
    (tmp_path / f"{NAME}.tar.gz").write_bytes(whole[:-100])
    done = prepare(home, "gbw", "--data", tmp_path, "--out", tmp_path / "out", "--any-size")
    assert done.returncode == 2 and "cut short" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_only_the_published_archive_is_taken_without_any_size(home, mirror, tmp_path):
    done = prepare(home, "gbw", "--data", mirror, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "expected 01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e" in done.stderr.splitlines()[-1]


def test_the_published_sizes_are_enforced(mirror, tmp_path, capsys):
    from lightconv_plugin.recipes.data.gbw import EXPECTED, from_archive
    from lightconv_plugin.recipes.data.language_model import PARTS, check_sizes

    outputs = {part: tmp_path / part for part in PARTS}
    from_archive(mirror / f"{NAME}.tar.gz", tmp_path / "unpacked", *outputs.values())
    from lightconv_plugin.recipes.data.parallel_folder import CorpusError

    with pytest.raises(CorpusError, match=r"train has 248 lines, .* tokens, expected 30,301,028 lines; --any-size"):
        check_sizes(outputs, EXPECTED, mirror)
    assert str(EXPECTED["test"]) == "6,075 lines, 159,658 tokens"
    assert not (tmp_path / "unpacked").exists()
