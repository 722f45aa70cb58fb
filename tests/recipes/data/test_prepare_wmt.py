"""`lightconv prepare wmt…` from end to end, on miniature archives of the published form."""

import itertools
import json
import shutil
from types import SimpleNamespace

import pytest

from lightconv_plugin.cli.main import main as lightconv
from lightconv_plugin.recipes.data.bpe import learn_codes
from lightconv_plugin.recipes.data.tasks import TASKS as PREPARED
from lightconv_plugin.recipes.data.wmt import recipe, training_tokeniser
from lightconv_plugin.recipes.data.wmt_sources import TASKS
from lightconv_plugin.text.segmenters import SEGMENTERS
from tests.recipes.conftest import check_recipes
from tests.recipes.data import wmt_archives
from tests.recipes.data.archive_server import serve, write_tar
from tests.recipes.data.miniatures import files_of, no_leftovers
from tests.recipes.data.preparations import prepare

MINIATURE = ("--any-size", "--workers", "2")


def lines(path):
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def both(out, kind, split, langs):
    return [lines(out / kind / f"{split}.{lang}") for lang in langs]


def joined(sources):
    """Both sides of several sources one after the other."""
    return [list(itertools.chain.from_iterable(source[side] for source in sources)) for side in (0, 1)]


def unbroken(text):
    return [(line + " ").replace("@@ ", "").strip() for line in text]


def check_parts(out, langs, splits=("train", "valid", "test")):
    """What holds for every prepared folder."""
    source, target = langs
    for split in splits:
        for lang in langs:
            assert (out / f"data-bin/{split}.{source}-{target}.{lang}.bin").stat().st_size > 0
    for split in ("valid", "test"):
        assert [len(side) for side in both(out, "raw", split, langs)] == [
            len(side) for side in both(out, "bpe", split, langs)
        ]
    about = json.loads((out / "corpus.json").read_text())
    assert (about["src"], about["tgt"], about["lowercase"]) == (source, target, False)
    if (out / "tok").is_dir():  # the archive of wmt16_en_de is tokenised already
        check_recipes(out)
    assert no_leftovers(out)
    assert not list(out.glob(".unpacked*")) and not list(out.glob(".whole*"))
    return about


@pytest.fixture(scope="module")
def en_de(tmp_path_factory):
    """(home, mirror, the folder prepared, (training sources, test set))."""
    home = tmp_path_factory.mktemp("check, out")
    mirror = tmp_path_factory.mktemp("mirror")
    texts = wmt_archives.en_de(mirror)
    prepare(home, "wmt14_en_de", "--mirror", mirror, "--bpe", "300", *MINIATURE)
    return home, mirror, home / "data/wmt14_en_de", texts


def test_en_de_divides_the_training_text_and_keeps_its_order(en_de):
    _, _, out, (train, test) = en_de
    for side, lang in enumerate(("en", "de")):
        text = joined(train)[side]
        assert len(text) == 220
        assert lines(out / f"text/valid.{lang}") == [text[99], text[199]]
        assert lines(out / f"text/train.{lang}") == [line for i, line in enumerate(text, 1) if i % 100]
        assert lines(out / f"raw/test.{lang}") == [" ".join(line.split()) for line in test[side]]
    about = check_parts(out, ("en", "de"))
    assert about["splits"]["train"] == ["europarl-v7", "commoncrawl", "news-commentary-v12"]
    assert about["bpe"] == 300 and about["joined_dictionary"] is True


def test_en_de_is_tokenised_and_encoded_as_fairseq_does(en_de, tmp_path):
    _, _, out, _ = en_de
    for lang in ("en", "de"):
        training = training_tokeniser(lang)
        for split, tokenise in (("train", training), ("valid", training), ("test", recipe(lang).tokenise())):
            assert lines(out / f"tok/{split}.{lang}") == [
                tokenise(line) for line in lines(out / f"text/{split}.{lang}")
            ]
        # raw/ goes with bpe/, line by line, whatever cleaning has dropped
        raw = lines(out / f"raw/valid.{lang}")
        assert [training(line) for line in raw] == unbroken(lines(out / f"bpe/valid.{lang}"))
        assert lines(out / f"tok/test.{lang}") == unbroken(lines(out / f"bpe/test.{lang}"))
    learn_codes([out / "tok/train.en", out / "tok/train.de"], 300, tmp_path / "codes")
    assert (out / "bpe/codes").read_bytes() == (tmp_path / "codes").read_bytes()
    assert (out / "data-bin/dict.en.txt").read_bytes() == (out / "data-bin/dict.de.txt").read_bytes()


def test_scores_find_the_raw_references(en_de, tmp_path, capsys):
    _, _, out, (_, test) = en_de
    tok = lines(out / "tok/test.de")
    log = "".join(f"S-{i}\tx\nT-{i}\t{line}\nH-{i}\t-0.1\t{line}\n" for i, line in enumerate(tok))
    (tmp_path / "gen").write_text(
        log + "Generate test with beam=5: BLEU4 = 100.00, 100.0/100.0/100.0/100.0 (BP=1.000)\n"
    )
    arguments = ["score", "--gen", str(tmp_path / "gen"), "--data", str(out / "data-bin"), "--subset", "test", "--json"]
    assert lightconv(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sacrebleu"] > 90 and len(test[1]) == len(tok)


def test_en_fr_from_a_server(tmp_path):
    home = tmp_path / "home"
    train, test = wmt_archives.en_fr(tmp_path / "site")
    with serve(files_of(tmp_path / "site")) as server:
        prepare(home, "wmt14_en_fr", "--mirror", server.address, "--bpe", "400", *MINIATURE)
    out = home / "data/wmt14_en_fr"
    check_parts(out, ("en", "fr"))
    for side, lang in enumerate(("en", "fr")):
        text = joined(train)[side]
        assert lines(out / f"text/valid.{lang}") == text[1332::1333]
        assert lines(out / f"text/train.{lang}") == [line for i, line in enumerate(text, 1) if i % 1333]
        assert lines(out / f"raw/test.{lang}") == test[side]
    source, target = both(out, "bpe", "train", ("en", "fr"))
    assert 0 < len(source) < 2738
    for pair in zip(source, target, strict=True):
        lengths = [len(side.split()) for side in pair]
        assert min(lengths) >= 1 and max(lengths) <= 1.5 * min(lengths)
        assert pair[0].split()[0] == pair[1].split()[0] or "@@" in pair[0]


def test_zh_en_with_cwmt_from_a_folder(tmp_path):
    pytest.importorskip("jieba")
    data, out = tmp_path / "data", tmp_path / "out"
    train, valid, test = wmt_archives.zh_en(data)
    places = ("--data", data, "--out", out)
    prepare(tmp_path, "wmt17_zh_en", *places, "--bpe", "60", *MINIATURE)
    about = check_parts(out, ("zh", "en"))
    assert about["splits"]["train"][1:] == ["UNv1.0", *wmt_archives.CWMT]
    assert (about["splits"]["valid"], about["joined_dictionary"]) == ("newsdev2017", False)
    for side, lang in enumerate(("zh", "en")):
        assert lines(out / f"text/train.{lang}") == joined(train)[side]
        assert lines(out / f"raw/valid.{lang}") == valid[side] and lines(out / f"raw/test.{lang}") == test[side]
        assert len(lines(out / f"bpe/valid.{lang}")) == len(valid[side])  # sets of their own are not cleaned
        learn_codes([out / f"tok/train.{lang}"], 60, tmp_path / lang)
        assert (out / f"bpe/codes.{lang}").read_bytes() == (tmp_path / lang).read_bytes()
    segment = SEGMENTERS["jieba"].segment()
    assert lines(out / "tok/train.zh") == [segment(line) for line in joined(train)[0]]
    assert (out / "data-bin/dict.en.txt").read_bytes() != (out / "data-bin/dict.zh.txt").read_bytes()


def test_google_s_archive_is_binarised_as_it_is(tmp_path):
    home, mirror = tmp_path / "home", tmp_path / "mirror"
    encoded = wmt_archives.google_en_de(mirror)
    prepare(home, "wmt16_en_de", "--mirror", mirror, *MINIATURE)
    out = home / "data/wmt16_en_de"
    about = check_parts(out, ("en", "de"))
    assert about["raw_by_detokenising"] == []
    for split, part in (("train", "train"), ("valid", "newstest2013"), ("test", "newstest2014")):
        assert both(out, "bpe", split, ("en", "de")) == encoded[part]
    assert (out / "bpe/codes").read_text().startswith("#version")
    assert (out / "data-bin/dict.en.txt").read_bytes() == (out / "data-bin/dict.de.txt").read_bytes()
    log = (out / "preprocess.log").read_text()
    assert "nwordssrc=32768" in log and "nwordstgt=32768" in log and "joined_dictionary=True" in log
    said = prepare(home, "wmt16_en_de", "--mirror", mirror, *MINIATURE)
    assert said.count("done before") == 2


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


def refused(*arguments):
    """The last line of what `prepare` says, which refuses these arguments."""
    said = prepare(*arguments, status=2)
    assert "Traceback" not in said
    return said.splitlines()[-1]


@pytest.mark.parametrize(
    "task, arguments, missing",
    [
        ("wmt14_en_de", [], "training-parallel-nc-v12.tgz"),
        ("wmt14_en_de", ["--icml17"], "training-parallel-nc-v9.tgz"),
        ("wmt14_en_fr", [], "training-parallel-un.tgz"),
        ("wmt16_en_de", [], "wmt16_en_de.tar.gz"),
        ("wmt17_zh_en", [], "casia2015.zip"),
        ("wmt17_zh_en", ["--without-cwmt"], "UNv1.0.en-zh.tar.gz"),
    ],
)
@pytest.mark.parametrize("option", ["--data", "--mirror"])
def test_a_single_missing_archive_is_named(home, tmp_path, task, arguments, missing, option):
    for name in ("europarl-v7", "commoncrawl", "nc-v12"):
        if f"training-parallel-{name}.tgz" != missing:
            write_tar(tmp_path / f"training-parallel-{name}.tgz", {"a": b"b\n"})
    line = refused(home, task, option, tmp_path, "--out", tmp_path / "out", "--any-size", *arguments)
    assert line.startswith("lightconv prepare: error: no file ") and missing in line
    assert not [path for path in tmp_path.glob("out/*") if path.name != "download"]


def test_cwmt_has_to_be_supplied(home):
    line = refused(home, "wmt17_zh_en", "--any-size")
    assert "data/wmt17_zh_en/download/casia2015.zip: CWMT's corpora have no lasting address" in line
    assert "--without-cwmt" in line


@pytest.mark.parametrize("task, gib", [("wmt14_en_de", 11), ("wmt14_en_fr", 80), ("wmt16_en_de", 4)])
def test_the_disk_is_looked_at_first(home, tmp_path, task, gib, monkeypatch):
    disk_of(monkeypatch, gib=1)
    line = refused(home, task, "--data", tmp_path, "--out", tmp_path / "out")
    assert f"{tmp_path}/out needs {gib} GiB of free disk space, 1.0 GiB are free" in line


def disk_of(monkeypatch, gib):
    """A disk with so much free space."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=gib << 30))


def test_the_table_of_tasks():
    names = {task: [source.name for source in TASKS[task].train] for task in TASKS}
    assert names["wmt14_en_de_icml17"] == ["europarl-v7", "commoncrawl", "news-commentary-v9"]
    assert len(names["wmt17_zh_en"]) == 8 and names["wmt17_zh_en_without_cwmt"] == names["wmt17_zh_en"][:2]
    assert [TASKS[task].joint for task in TASKS] == [True] * 3 + [False] * 2
    merges = {name: task.defaults.bpe for name, task in PREPARED.items() if name.startswith(("wmt14", "wmt17"))}
    assert merges == {"wmt14_en_de": 40_000, "wmt14_en_fr": 40_000, "wmt17_zh_en": 32_000}


def test_a_prepared_folder_can_be_moved(en_de, tmp_path):
    home, _, out, _ = en_de
    moved = shutil.copytree(out, tmp_path / "moved")
    places = ("--data", moved / "download", "--out", moved)
    said = prepare(home, "wmt14_en_de", *places, "--bpe", "300", *MINIATURE)
    assert all(line.endswith(": done before") for line in said.splitlines())
