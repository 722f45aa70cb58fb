"""`lightconv prepare wikitext103` on a miniature of wikitext-103-v1.zip, and the sizes that are enforced."""

import re

import pytest

from lightconv_plugin.errors import InputError
from lightconv_plugin.recipes.data import language_model, wikitext2, wikitext103
from lightconv_plugin.recipes.data.parallel_folder import CorpusError
from lightconv_plugin.recipes.data.request import Request
from lightconv_plugin.recipes.data.tasks import parser_of
from tests.recipes.conftest import ROOT
from tests.recipes.data.archive_server import serve
from tests.recipes.data.language_archives import files_of, no_leftovers, sentences, write_tar, write_zip
from tests.recipes.data.preparations import prepare

NAME = "wikitext-103-v1.zip"
PARTS = {"train": 60, "valid": 9, "test": 11}
TINY = (
    *("+model.decoder_embed_dim=16", "+model.decoder_ffn_embed_dim=16", "+model.decoder_input_dim=16"),
    *("+model.decoder_output_dim=16", "+model.decoder_layers=2", "+model.decoder_kernel_size_list=[3,7]"),
    *("+model.adaptive_input_cutoff=[4,8]", "+model.adaptive_softmax_cutoff=[4,8]", "task.tokens_per_sample=20"),
    *("dataset.max_tokens=160", "dataset.num_workers=0", "optimization.update_freq=[1]", "optimization.max_update=3"),
)


def part(name):
    """As in the corpus: a title between empty lines, a space at both ends of each line, <unk> in the text."""
    lines = sentences(PARTS[name], PARTS[name]).decode().splitlines()
    text = [" ", f" = {name} = ", " ", *(f" {line} <unk> . " for line in lines)]
    return "".join(line + "\n" for line in text).encode()


def content():
    return {f"wikitext-103/wiki.{name}.tokens": part(name) for name in ("test", "valid", "train")}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("wikitext home")


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    return write_zip(tmp_path_factory.mktemp("wikitext mirror") / NAME, content()).parent


@pytest.fixture(scope="module")
def prepared(home, mirror):
    with serve(files_of(mirror)) as server:
        server.cuts[NAME] = [400]  # the first answer breaks off
        arguments = ("--mirror", server.address, "--out", home / "prepared, here", "--any-size", "--workers", "2")
        done = prepare(home, "wikitext103", *arguments)
    assert done.returncode == 0, done.stderr
    assert server.requests == [(NAME, 0), (NAME, 400)]
    return home / "prepared, here"


def test_the_text_is_as_it_came(prepared):
    for name in PARTS:
        assert (prepared / f"raw/{name}.txt").read_bytes() == part(name)
        tokens = len(part(name).split()) + PARTS[name] + 3
        assert f"raw/{name}.txt: {PARTS[name] + 3} sents, {tokens} tokens" in (prepared / "preprocess.log").read_text()
    words = {line.split()[0] for line in (prepared / "data-bin/dict.txt").read_text().splitlines()}
    seen = {*part("train").decode().split()} - {"<unk>"}
    assert seen == {word for word in words if not word.startswith("madeupword")}
    assert (len(words) + 4) % 8 == 0 and no_leftovers(prepared)


def test_the_second_run_does_no_work(prepared, home, mirror):
    done = prepare(home, "wikitext103", "--mirror", mirror, "--out", prepared, "--any-size")
    assert (done.returncode, done.stderr.splitlines()) == (0, ["raw text: done before", "binarise: done before"])


def test_a_language_model_trains_on_it_and_is_scored(prepared, run_script, tmp_path):
    data = prepared / "data-bin"
    overrides = (f"task.data={data}", f"checkpoint.save_dir={tmp_path / 'run'}", *TINY)
    done = run_script("train.sh", ROOT / "configs/wikitext103/dynamicconv.yaml", *overrides)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    done = run_script("perplexity.sh", data, tmp_path / "run/checkpoint_last.pt", "--cpu", "--context-window", "10")
    assert done.returncode == 0, done.stderr
    tokens = len(part("test").split()) + PARTS["test"] + 3
    assert re.match(rf"test: perplexity \S+ over {tokens} tokens", done.stdout)


def test_an_archive_cut_short_is_refused_and_leaves_nothing(home, mirror, tmp_path):
    (tmp_path / NAME).write_bytes((mirror / NAME).read_bytes()[:-30])
    done = prepare(home, "wikitext103", "--data", tmp_path, "--out", tmp_path / "out", "--any-size")
    assert done.returncode == 2 and f"{NAME} is not the expected file" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_only_the_published_archive_is_taken_without_any_size(home, mirror, tmp_path):
    done = prepare(home, "wikitext103", "--data", mirror, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "expected 242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590" in done.stderr.splitlines()[-1]


def prepare_place(place, out, *arguments):
    """The steps for one folder or archive, as wikitext2 has them for a folder; parsed and run."""
    args = parser_of("wikitext2").parse_args(list(arguments))
    request = Request("wikitext2", place.parent, True, out, "", 1, args.any_size, args)
    language_model.run(request, place.name, {}, None)


@pytest.mark.parametrize(
    "write, files, message",
    [
        (write_zip, {"a/wiki.train.tokens": b"a\n", "a/wiki.valid.tokens": b"a\n"}, "has no file *test*"),
        (write_zip, content() | {"b/train.txt": b"a\n"}, "found train.txt, wiki.train.tokens"),
        (write_zip, content() | {"../wiki.train.tokens": b"a\n"}, "leads out of the folder"),
        (write_zip, content() | {"wikitext-103/wiki.valid.tokens": b""}, "wiki.valid.tokens is empty"),
        (write_tar, content(), "train has 63 lines, "),
    ],
    ids=["no-test", "two", "outside", "empty", "other-size"],
)
def test_one_clear_line_for_an_archive_of_another_form(tmp_path, write, files, message):
    path = write(tmp_path / ("a.zip" if write is write_zip else "a.tgz"), files)
    out = tmp_path / "out"
    with pytest.raises(CorpusError) as caught:
        prepare_place(path, out, "--expect", "train:1801350:103227021")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (out / "unpacked.tmp").exists() and not list((out / "raw").glob("*.txt"))


@pytest.fixture
def quick_binarise(monkeypatch):
    """Instead of fairseq-preprocess: a dictionary of twelve words."""

    def binarise(root, splits, prefix, threshold, workers, output):
        output.mkdir()
        (output / "dict.txt").write_text("a 1\n" * 12)

    monkeypatch.setattr(language_model, "binarise_text", binarise)


def test_text_of_any_size_is_counted_when_it_is_not_allowed_any_more(tmp_path, quick_binarise):
    place = write_zip(tmp_path / NAME, content())
    prepare_place(place, tmp_path / "out", "--expect", "test:14:1000", "--any-size")
    with pytest.raises(CorpusError, match=f"{NAME}: test has 14 lines, "):
        prepare_place(place, tmp_path / "out", "--expect", "test:14:1000")


def test_a_dictionary_of_another_size_is_refused(tmp_path, quick_binarise):
    place = write_zip(tmp_path / NAME, content())
    with pytest.raises(CorpusError, match=f"{NAME}: the dictionary has 16 entries, expected 24$"):
        prepare_place(place, tmp_path / "out", "--expect-entries", "24")
    assert not (tmp_path / "out/data-bin").exists()
    prepare_place(place, tmp_path / "out", "--expect-entries", "16")


def test_the_published_sizes():
    assert str(wikitext103.EXPECTED["train"]) == "1,801,350 lines, 103,227,021 tokens"
    assert (wikitext103.ENTRIES, wikitext2.ENTRIES) == (267_744, 33_280)


@pytest.mark.parametrize("size", ["train:1", "training:1:2", "train:1:2:3", "train:x:2"])
def test_a_size_of_the_wrong_form_is_refused(size):
    with pytest.raises(InputError) as caught:
        parser_of("wikitext103").parse_args(["--expect", size])
    assert f"expected PART:LINES:TOKENS with one of train, valid, test, got {size!r}" in str(caught.value)
