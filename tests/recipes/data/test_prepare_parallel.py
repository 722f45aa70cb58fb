"""Anyone's parallel text: held-out parts, merges, text recipes, and one clear line for what is wrong."""

import json
import shutil

import pytest

from lightconv_plugin.recipes.data.data_bin import count_sentences
from tests.recipes.conftest import check_recipes, write_parts
from tests.recipes.data.preparations import SMALL, lines, prepare


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with train, valid and test of the grammar."""
    return write_parts(tmp_path_factory.mktemp("text"), ("train", "valid", "test"), (300, 10, 12))


@pytest.fixture(scope="module")
def default(text, tmp_path_factory):
    """`text`, prepared German to English by the defaults, below LIGHTCONV_HOME."""
    home = tmp_path_factory.mktemp("home")
    prepare(home, "parallel", "--data", text, "--src", "de", "--tgt", "en", "--name", "mine", *SMALL)
    return home / "data/mine"


def test_files_of_all_parts(text, default):
    for split in ("train", "valid", "test"):
        for lang in ("de", "en"):
            assert (default / f"raw/{split}.{lang}").read_bytes() == (text / f"{split}.{lang}").read_bytes()
            assert (default / f"data-bin/{split}.de-en.{lang}.bin").stat().st_size > 0
    tok = (default / "tok/train.de").read_text(encoding="utf-8")
    assert tok != tok.lower() and " ." in tok
    assert (default / "data-bin/dict.de.txt").read_bytes() == (default / "data-bin/dict.en.txt").read_bytes()
    check_recipes(default)
    about = json.loads((default / "corpus.json").read_text(encoding="utf-8"))
    assert (about["src"], about["tgt"], about["lowercase"], about["bpe"]) == ("de", "en", False, 60)
    assert about["text"]["de"] == {"tokeniser": "moses", "lang": "de", "normalise": True}


def test_lower_case_and_one_set_of_merges_for_each_language(text, tmp_path):
    out = tmp_path / "out"
    options = ("--src", "en", "--tgt", "de", "--lowercase", "--separate-bpe", *SMALL)
    prepare(tmp_path, "parallel", "--data", text, "--out", out, *options)
    assert sorted(path.name for path in (out / "bpe").glob("codes*")) == ["codes.de", "codes.en"]
    assert (out / "bpe/codes.de").read_text() != (out / "bpe/codes.en").read_text()
    for lang in ("de", "en"):
        tok = (out / f"tok/train.{lang}").read_text(encoding="utf-8")
        assert tok == tok.lower()
        assert (out / f"bpe/train.{lang}").read_text(encoding="utf-8").replace("@@ ", "") == tok
    assert (out / "data-bin/dict.de.txt").read_bytes() != (out / "data-bin/dict.en.txt").read_bytes()
    check_recipes(out)
    # The other kind of merges leaves nothing of the first behind, which translating would find.
    prepare(tmp_path, "parallel", "--data", text, "--out", out, *options[:4], "--lowercase", *SMALL)
    assert [path.name for path in (out / "bpe").glob("codes*")] == ["codes"]


def test_bpe_dropout_encodes_the_training_text_several_times(text, default, tmp_path):
    """The first copy is that of the merges; all are the same text, and the same in any number of processes."""
    options = ("--src", "de", "--tgt", "en", "--bpe", "60", "--bpe-dropout", "0.3", "--bpe-copies", "3")
    for workers in ("1", "2"):
        out = tmp_path / workers
        prepare(tmp_path, "parallel", "--data", text, "--out", out, *options, "--workers", workers)
    for lang in ("de", "en"):
        once, tok = lines(default / f"bpe/train.{lang}"), lines(default / f"tok/train.{lang}")
        copies = lines(out / f"bpe/train.{lang}")
        assert len(copies) == 3 * len(once) and copies[: len(once)] == once
        second, third = copies[len(once) : 2 * len(once)], copies[2 * len(once) :]
        for copy in (second, third):
            assert [line.replace("@@ ", "") for line in copy] == tok
            assert sum(map(len, copy)) > sum(map(len, once)), "with merges left out there are more pieces"
        assert second != third
        assert lines(out / f"bpe/valid.{lang}") == lines(default / f"bpe/valid.{lang}")
        assert lines(tmp_path / f"1/bpe/train.{lang}") == copies
    assert sorted(path.name for path in (out / "bpe").iterdir()) == sorted(p.name for p in (default / "bpe").iterdir())
    pieces = {piece for path in (out / "bpe").glob("train.*") for piece in path.read_text(encoding="utf-8").split()}
    known = {line.split(" ")[0] for line in lines(out / "data-bin/dict.de.txt")}
    assert pieces - known == set(), "pieces that only dropout makes are in the dictionary"


@pytest.mark.parametrize("options", [(), ("--bpe-dropout", "0.3", "--bpe-copies", "2")], ids=["once", "dropout"])
def test_training_text_in_both_directions(text, default, tmp_path, options):
    """The other parts, the merges and the order of the dictionary are those of one direction."""
    both, one = tmp_path / "both", default
    base = ("parallel", "--data", text, "--src", "de", "--tgt", "en", *SMALL, *options)
    if options:
        one = tmp_path / "one"
        prepare(tmp_path, *base, "--out", one)
    prepare(tmp_path, *base, "--bidirectional", "--out", both)
    de, en = (lines(one / f"bpe/train.{lang}") for lang in ("de", "en"))
    assert (lines(both / "bpe/train.de"), lines(both / "bpe/train.en")) == (de + en, en + de)
    same = ("tok/train.de", "tok/train.en", "bpe/codes", "bpe/valid.de", "bpe/valid.en", "bpe/test.de", "bpe/test.en")
    for name in same:
        assert (both / name).read_bytes() == (one / name).read_bytes(), name
    assert {path.name for path in (both / "bpe").iterdir()} == {path.name for path in (one / "bpe").iterdir()}
    for lang in ("de", "en"):
        assert count_sentences(both / f"data-bin/train.de-en.{lang}.idx") == 2 * len(de)
        assert count_sentences(both / f"data-bin/test.de-en.{lang}.idx") == 12
    words, ours = ([line.split(" ") for line in lines(folder / "data-bin/dict.de.txt")] for folder in (one, both))
    assert ours == [[word, str(2 * int(count))] for word, count in words], "parameters can be loaded"
    about, plain = (json.loads((folder / "corpus.json").read_text(encoding="utf-8")) for folder in (both, one))
    assert about == {**plain, "bidirectional": True} and "bidirectional" not in plain
    check_recipes(both)


@pytest.mark.parametrize("option", ["--separate-bpe", "--separate-dictionaries"])
def test_both_directions_need_one_dictionary(text, tmp_path, option):
    options = ("--src", "de", "--tgt", "en", "--bidirectional", option)
    said = prepare(tmp_path, "parallel", "--data", text, *options, status=2)
    assert not (tmp_path / "data").exists()
    assert f"--bidirectional needs one dictionary for both languages: it is not valid with {option}" in said


def test_the_option_changes_a_folder_that_is_there(text, tmp_path):
    """The text is encoded again, in both directions or in one."""
    base = ("parallel", "--data", text, "--src", "de", "--tgt", "en", "--out", tmp_path / "out", *SMALL)
    sizes = []
    for more in ((), ("--bidirectional",), ()):
        prepare(tmp_path, *base, *more)
        sizes.append(count_sentences(tmp_path / "out/data-bin/train.de-en.de.idx"))
        assert ("bidirectional" in (tmp_path / "out/corpus.json").read_text(encoding="utf-8")) == bool(more)
    assert sizes == [sizes[0], 2 * sizes[0], sizes[0]]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--bpe-copies", "4"), "--bpe-copies 4 needs --bpe-dropout"),
        (("--bpe-dropout", "0.1", "--bpe-copies", "1"), "--bpe-copies must be at least 2 with --bpe-dropout, got 1"),
    ],
)
def test_wrong_options_of_bpe_dropout(text, tmp_path, options, message):
    said = prepare(tmp_path, "parallel", "--data", text, "--src", "de", "--tgt", "en", *options, status=2)
    assert message in said
    assert not (tmp_path / "data").exists()


def test_held_out_pairs_are_not_trained_on(text, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for lang in ("de", "en"):
        shutil.copy(text / f"train.{lang}", folder / f"corpus.{lang}")
    options = ("--src", "de", "--tgt", "en", "--train-prefix", "corpus", "--valid-lines", "20", "--test-lines", "30")
    options += ("--split-seed", "3")
    prepare(tmp_path, "parallel", "--data", folder, "--out", tmp_path / "a", *options, *SMALL)
    parts = {
        split: list(zip(lines(tmp_path / f"a/raw/{split}.de"), lines(tmp_path / f"a/raw/{split}.en"), strict=True))
        for split in ("train", "valid", "test")
    }
    known = set(zip(lines(folder / "corpus.de"), lines(folder / "corpus.en"), strict=True))
    assert (len(parts["valid"]), len(parts["test"])) == (20, 30)
    assert all(set(pairs) <= known for pairs in parts.values())
    held_out = parts["valid"] + parts["test"]
    assert len({source for source, _ in held_out}) == 50
    for side in (0, 1):
        assert not {pair[side] for pair in parts["train"]} & {pair[side] for pair in held_out}
    assert len(parts["train"]) > 100
    about = json.loads((tmp_path / "a/corpus.json").read_text(encoding="utf-8"))
    assert about["splits"]["test"] == "30 pairs of corpus, seed 3"


@pytest.mark.parametrize("options", [(), ("--lowercase",)], ids=["case-kept", "lower-case"])
def test_no_sentence_is_in_two_parts_after_tokenising(options, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    twins = {"en": [], "de": []}
    for i in range(100):
        twins["en"] += [f"The house number {i} is big .", f"the house number {i} is  big.", f"Mouse {i}."]
        twins["de"] += [f"Das Haus „{i}“ ist groß .", f"das Haus „{i}“ ist groß.", f"Maus {i}."]
    for lang, sentences in twins.items():
        (folder / f"train.{lang}").write_text("".join(f"{line}\n" for line in sentences), encoding="utf-8")
    options = ("--src", "en", "--tgt", "de", "--valid-lines", "20", "--test-lines", "20", *options, *SMALL)
    prepare(tmp_path, "parallel", "--data", folder, "--out", tmp_path / "out", *options)
    for lang in ("en", "de"):
        train, valid, test = (set(lines(tmp_path / f"out/tok/{part}.{lang}")) for part in ("train", "valid", "test"))
        assert len(test) == len(valid) == 20  # no sentence twice in a part, either
        assert not train & test and not train & valid and not valid & test


def test_pairs_are_held_out_again_where_other_sentences_have_the_same_tokens(tmp_path):
    folder, out = tmp_path / "text", tmp_path / "out"
    folder.mkdir()
    for lang, word in (("en", "House"), ("de", "Haus")):
        sentences = [f"{first} {i}.\n" for i in range(60) for first in (word, word.lower())]
        (folder / f"train.{lang}").write_text("".join(sentences), encoding="utf-8")
    options = ("--out", out, "--src", "en", "--tgt", "de", "--valid-lines", "10", "--test-lines", "10", *SMALL)
    for case in ((), ("--lowercase",)):
        prepare(tmp_path, "parallel", "--data", folder, *options, *case)
    assert not set(lines(out / "tok/train.en")) & set(lines(out / "tok/test.en"))


@pytest.mark.parametrize(
    "langs, texts, encoded",
    [
        (("gr", "ph"), ("c a t\nd o g\nc a r\n", "k @ t\nd O g\nk A r\n"), "k @ t\nd O g\nk A r\n"),
        (("en", "de"), ("house\n", "Baum\n"), "B@@ a@@ u@@ m\n"),
    ],
    ids=["letters-to-phonemes", "no-pair-twice"],
)
def test_text_without_anything_to_merge(langs, texts, encoded, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        for lang, text in zip(langs, texts, strict=True):
            (folder / f"{split}.{lang}").write_text(text)
    source, target = langs
    options = ("--src", source, "--tgt", target, "--tokenizer", "none", "--workers", "1")
    prepare(tmp_path, "parallel", "--data", folder, "--out", tmp_path / "out", *options)
    assert (tmp_path / f"out/bpe/train.{target}").read_text() == encoded
    assert (tmp_path / f"out/data-bin/test.{source}-{target}.{target}.bin").is_file()


@pytest.mark.parametrize(
    "changes, options, message",
    [
        ({}, ("--data", "nowhere"), "--data: there is no folder"),
        ({}, (), "--data is missing: it names the folder of your text"),
        ({"test.de": None}, (), "has no test text for de-en: expected train.XX"),
        ({"train.de": None}, (), "has no train text for de-en: expected train.XX"),
        ({}, ("--train-prefix", "corpus"), "has neither corpus.de nor corpus.de.gz"),
        ({"valid.de": "Eins.\n"}, (), "valid.de has 1 lines but"),
        ({"train.en": ""}, (), "train.en has no text: 0 bytes"),
        ({"test.en": "\n" * 12}, (), "test.en has no text: 12 empty lines"),
        ({"train.en": "\n" * 300}, (), "train.en has no text: 300 empty lines"),
        ({"train.de": b"\xff\n" * 300}, (), "is not UTF-8: line 1"),
        ({}, ("--mirror", "x"), "unrecognized arguments: --mirror x"),
        ({}, ("--test-lines", "5", "--test-prefix", "test"), "--test-prefix test is not valid with --test-lines 5"),
        ({}, ("--split-seed", "3"), "--split-seed 3 needs --valid-lines or --test-lines"),
        ({}, ("--test-lines", "300"), "cannot hold out 300 pairs: the training text has 300"),
        ({}, ("--tgt", "de"), "source and target language are both 'de'"),
        ({}, ("--max-len", "1"), "no training pair is left with --max-len 1"),
        ({"train.de": "Ja </s> nein .\n" * 300}, ("--tokenizer", "none"), "train.de, line 1: </s> in 'Ja"),
    ],
)
def test_one_clear_line_for_what_is_wrong(text, tmp_path, monkeypatch, changes, options, message):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(text, tmp_path / "text")
    for name, content in changes.items():
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    data = () if not changes and not options else ("--data", folder)
    options = ("--src", "de", "--tgt", "en", "--out", "out", *SMALL, *options)
    said = prepare(tmp_path, "parallel", *data, *options, status=2)
    last = said.splitlines()[-1]
    assert last.startswith("lightconv prepare: error: ") and message in last
    assert not list(tmp_path.glob("out/data-bin")) and not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob("*.clean"))


@pytest.mark.parametrize("linked", [False, True], ids=["the-folder", "a-link-to-it"])
def test_text_in_the_folder_to_fill_is_not_replaced(text, tmp_path, linked):
    """With pairs to hold out, each run would take some away from it."""
    raw = shutil.copytree(text, tmp_path / "mine/raw")
    before = {path.name: path.read_bytes() for path in raw.iterdir()}
    if linked:
        (tmp_path / "mine/raw").rename(tmp_path / "text")
        (tmp_path / "mine/raw").symlink_to(tmp_path / "text")
        raw = tmp_path / "text"
    options = ("--src", "de", "--tgt", "en", "--out", tmp_path / "mine", "--valid-lines", "5", *SMALL)
    said = prepare(tmp_path, "parallel", "--data", raw, *options, status=2)
    assert f"--data: {raw}/train.de would be replaced by what is made of it" in said.splitlines()[-1]
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == before


@pytest.mark.parametrize(
    "task, name",
    [
        *(("parallel", name) for name in ("raw/train.en", "bpe/codes", "data-bin/dict.en.txt", "corpus.json")),
        ("smoke", "text/test.de"),
        ("multi30k_en_de", "data-bin/dict.en.txt"),  # before anything is downloaded
    ],
)
def test_files_that_were_made_otherwise_are_not_replaced(text, task, name, tmp_path):
    """Those of a folder that someone filled by hand or by other programs."""
    theirs = tmp_path / "out" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs\n", encoding="utf-8")
    data = ("--data", text) if task == "parallel" else ()
    said = prepare(tmp_path, task, *data, "--src", "en", "--tgt", "de", "--out", tmp_path / "out", *SMALL, status=2)
    found = "data-bin" if name.startswith("data-bin") else name.removeprefix("text/")
    assert f" has a {found} that lightconv did not make, and that would be replaced" in said.splitlines()[-1]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [theirs]
    assert theirs.read_text(encoding="utf-8") == "theirs\n"


def test_other_files_of_the_folder_to_fill_stay(text, tmp_path):
    theirs = [tmp_path / "out" / name for name in ("raw/train.fr", "bpe/codes.bak")]
    for path in theirs:
        path.parent.mkdir(parents=True)
        path.write_text("theirs\n", encoding="utf-8")
    options = ("--src", "en", "--tgt", "de", "--out", tmp_path / "out", *SMALL)
    for _ in range(2):
        prepare(tmp_path, "parallel", "--data", text, *options)
    assert [path.read_text(encoding="utf-8") for path in theirs] == ["theirs\n", "theirs\n"]


def test_a_language_that_moses_does_not_know(text, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        for lang, name in (("de", "qq"), ("en", "en")):
            shutil.copy(text / f"{split}.{lang}", folder / f"{split}.{name}")
    said = prepare(tmp_path, "parallel", "--data", folder, "--out", tmp_path / "out", *SMALL, status=2)
    assert "Moses has no rules for the language 'qq'; it has as, " in said
    assert said.endswith("zh: give tokenised text to lightconv prepare parallel --tokenizer none\n")
    assert not (tmp_path / "out").exists()
    prepare(tmp_path, "parallel", "--data", folder, "--out", tmp_path / "out", "--tokenizer", "none", *SMALL)
    assert (tmp_path / "out/data-bin/train.en-qq.qq.bin").is_file()


@pytest.mark.parametrize("options", [(), ("--lowercase", "--separate-bpe")], ids=["joint", "separate"])
def test_a_model_of_the_data_knows_the_text_steps(text, tmp_path, options):
    """A checkpoint and its exported directory split and join text as the preparation did, without being told how."""
    pytest.importorskip("fairseq")
    from lightconv_plugin.cli.main import main
    from lightconv_plugin.generation import Translator
    from tests.generation import translation_toys

    out = tmp_path / "out"
    given = ("--data", text, "--src", "de", "--tgt", "en", "--out", out)
    prepare(tmp_path, "parallel", *given, *options, *SMALL)
    shared = {} if options else {"share_all_embeddings": True}
    checkpoint = translation_toys.make_checkpoint(tmp_path / "model.pt", out / "data-bin", **shared)
    assert main(["export", str(checkpoint), str(tmp_path / "exported")]) == 0
    with Translator(checkpoint, bpe_codes="none", tokenizer="none", max_len_b=10) as translator:
        expected = [found.hypotheses[0].tokens for found in translator.translate(lines(out / "bpe/test.de")[:3])]
    assert len({tuple(tokens) for tokens in expected}) == 3
    for path in (checkpoint, tmp_path / "exported"):
        with Translator(path, max_len_b=10) as translator:
            found = translator.translate(lines(text / "test.de")[:3])
            assert (translator.notes, [one.hypotheses[0].tokens for one in found]) == ((), expected)
