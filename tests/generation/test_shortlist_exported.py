"""Exported directories with a shortlist translate as their checkpoint does with the file, unless told otherwise."""

import shutil

import pytest

pytest.importorskip("fairseq")

from lightconv_plugin.cli import main
from lightconv_plugin.errors import TranslationError
from lightconv_plugin.generation.translator import Translator
from lightconv_plugin.text.dictionary import Dictionary
from tests.generation import translation_toys as toys
from tests.generation.recordings import searching

LINES = toys.lines(9, seed=21)
SHORT = {"max_len_b": 20}
BATCHES = {"batch_size": 2}  # so that the lists of different batches differ


@pytest.fixture(scope="module")
def made(data, checkpoints, tmp_path_factory):
    """name → a checkpoint, directories with a shortlist (with float32 and 8-bit weights), its file, another file."""
    folder, checkpoint = tmp_path_factory.mktemp("shortlists"), checkpoints["dynamicconv"]
    source, target = (Dictionary.load(data / f"dict.{lang}.txt").symbols[4:] for lang in ("de", "en"))
    table = [f"{target[-1]} NULL 0.1\n"]
    for i, word in enumerate(source):
        table += [f"{target[(3 * i + k) % len(target)]} {word} 0.5\n" for k in (0, 1)]
    (folder / "table.txt").write_text("".join(table), encoding="utf-8")
    (folder / "map.txt").write_text(f"\t{' '.join(target[:3])}\n", encoding="utf-8")
    for weights in ("float32", "int8"):
        words = ["export", checkpoint, folder / weights, "--dtype", weights, "--shortlist", folder / "table.txt"]
        assert main.main([*map(str, words)]) == 0
    return {path.name: path for path in folder.iterdir()} | {"checkpoint": checkpoint}


@pytest.fixture(autouse=True)
def few_are_frequent(monkeypatch):
    """The dictionary has no hundred words, so that all would be allowed."""
    monkeypatch.setattr("lightconv_plugin.generation.shortlist._FREQUENT", 0)


def hypotheses(path, **options):
    with Translator(path, **SHORT, **BATCHES, **options) as translator:
        return [translation.hypotheses for translation in translator.translate(LINES, 2)]


@pytest.mark.parametrize("beam", [2, 4])
@pytest.mark.parametrize(
    "kind, dtype",
    [("native", "float32"), ("native", "bfloat16"), ("native", "int8"), ("torch", "float32"), ("torch", "bfloat16")],
)
def test_it_is_used_as_the_file_with_the_checkpoint(kind, dtype, beam, made):
    options = {"beam": beam, "dtype": dtype}
    with searching(kind):
        found = hypotheses(made["float32"], **options)
        assert found == hypotheses(made["checkpoint"], shortlist=made["table.txt"], **options)
        assert found != hypotheses(made["checkpoint"], **options)


def test_it_is_used_with_8_bit_weights(made):
    found = hypotheses(made["int8"])
    assert found == hypotheses(made["checkpoint"], dtype="int8", shortlist=made["table.txt"])
    assert found != hypotheses(made["checkpoint"], dtype="int8")


def test_doing_without_it_and_using_another(made):
    assert hypotheses(made["float32"], shortlist="none") == hypotheses(made["checkpoint"])
    other = hypotheses(made["float32"], shortlist=made["map.txt"], beam=2)
    assert other == hypotheses(made["checkpoint"], shortlist=made["map.txt"], beam=2)
    assert other != hypotheses(made["float32"], beam=2)
    for options, used in (({}, made["float32"] / "shortlist.txt"), ({"shortlist": "none"}, None)):
        with Translator(made["float32"], **options) as translator:
            assert translator.shortlist == used


def test_an_ensemble_uses_that_of_its_first_model(made):
    with Translator([made["float32"], made["int8"]]) as translator:
        assert translator.shortlist == made["float32"] / "shortlist.txt"


def test_references_are_scored_with_all_words(made):
    def scores(path, **options):
        with Translator(path, **options) as translator:
            return [found.score for found in translator.score(LINES[:3], ["The small dog runs.", "Two men", "dog"])]

    assert scores(made["float32"]) == scores(made["checkpoint"])
    for given in (made["map.txt"], made["float32"] / "shortlist.txt"):
        with pytest.raises(TranslationError, match="with the whole vocabulary: `shortlist` is not valid"):
            scores(made["float32"], shortlist=given)


def test_graphs_exclude_it(made, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(TranslationError, match=r"excludes the shortlist .*shortlist\.txt: set `shortlist` to none"):
        Translator(made["float32"], device="cuda", cuda_graphs=True)


def test_the_command(made, tmp_path, capfd):
    (tmp_path / "in.txt").write_text("\n".join(LINES), encoding="utf-8")

    def translated(path, *options):
        words = ["translate", path, "--input", tmp_path / "in.txt", "--batch-size", 2, *options]
        assert main.main([*map(str, words)]) == 0
        return capfd.readouterr()

    listed, whole = translated(made["float32"]), translated(made["checkpoint"])
    assert listed.out == translated(made["checkpoint"], "--shortlist", made["table.txt"]).out != whole.out
    assert listed.err == ""
    assert translated(made["float32"], "--shortlist", "none").out == whole.out
    assert f"shortlist: {made['float32'] / 'shortlist.txt'}\n" in translated(made["float32"], "--verbose").err
    references = ("--score", tmp_path / "in.txt")
    assert translated(made["float32"], *references).out == translated(made["checkpoint"], *references).out
    assert translated(made["float32"], *references, "--shortlist", "none").out


DAMAGE = {
    "missing": (lambda content: None, "is incomplete: there is no shortlist.txt"),
    "empty": (lambda content: b"", "shortlist.txt is empty"),
    "cut short": (lambda content: content[: len(content) // 2 - 3], "expected a target word, a source word and a prob"),
    "not text": (lambda content: b"\x93NUMPY\x01", "shortlist.txt is not UTF-8"),
    "words of another model": (
        lambda content: content + b"evil word 0.5\n",
        "shortlist.txt has 2 words that are not in the model's dictionaries, the first in line",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_one_is_an_error(name, made, tmp_path, capfd):
    damage, said = DAMAGE[name]
    directory = shutil.copytree(made["float32"], tmp_path / "model")
    content = damage((directory / "shortlist.txt").read_bytes())
    (directory / "shortlist.txt").unlink()
    if content is not None:
        (directory / "shortlist.txt").write_bytes(content)
    (tmp_path / "in.txt").write_text("Der Hund\n", encoding="utf-8")
    assert main.main(["translate", str(directory), "--input", str(tmp_path / "in.txt")]) == 2
    out, error = capfd.readouterr()
    assert out == "" and error.count("\n") == 1 and str(directory) in error and said in error
    scored = ["--input", str(tmp_path / "in.txt"), "--score", str(tmp_path / "in.txt")]
    status = main.main(["translate", str(directory), *scored])
    assert status == (2 if name == "missing" else 0), "scores do not need what the file says"
