"""Text that nobody expects, through the preparation, the tokeniser and `lightconv translate`."""

import io
import sys

import pytest

pytest.importorskip("fairseq")

from lightconv_plugin.cli import main
from lightconv_plugin.recipes.data.text_pool import iter_lines
from lightconv_plugin.recipes.grammar.corpus import pairs
from lightconv_plugin.recipes.steps import Steps
from lightconv_plugin.text import moses
from lightconv_plugin.text.recipe import Recipe
from tests.generation import translation_toys as toys
from tests.robustness.text_lines import EMPTY, LONG_WORD, LONG_WORDS, NOT_UTF8, ODD
from tests.warm_python import warm_python


def write(folder, part, lines):
    """Both sides of a part, equal but for the case; lines are str or bytes. Every other ends with CR LF."""
    for lang in ("de", "en"):
        with (folder / f"{part}.{lang}").open("wb") as file:
            for number, line in enumerate(lines):
                file.write(line if isinstance(line, bytes) else line.encode())
                file.write(b"\r\n" if number % 2 else b"\n")


def plain(number, seed=3):
    stream = pairs(seed)
    return [next(stream)[1] for _ in range(number)]


def prepare(raw, out):
    options = ["--src", "de", "--tgt", "en", "--bpe", "60", "--workers", "1"]
    return main.main(["prepare", "smoke", "--data", str(raw), "--out", str(out), *options])


def test_odd_lines_stay_lines_from_raw_text_to_binarised(tmp_path, monkeypatch):
    """Whatever is in it, a line is one line in each step, the last of them fairseq's; test text is never dropped."""
    from fairseq.data import Dictionary
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    monkeypatch.setattr(sys, "executable", warm_python())  # by which fairseq's preprocessing is run
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    odd = [*ODD.values(), *EMPTY]
    write(raw, "train", [*plain(40), *odd, LONG_WORD[:5000]])
    write(raw, "valid", [*odd, "ende"])
    write(raw, "test", [*odd, LONG_WORDS[:30_000], "ende"])
    assert prepare(raw, out) == 0
    for part, number in (("valid", len(odd) + 1), ("test", len(odd) + 2)):
        for folder in ("raw", "tok", "bpe"):
            lines = list(iter_lines(out / folder / f"{part}.de"))
            assert len(lines) == number and lines[-1].replace("@@ ", "") == "ende", folder
            if folder != "raw":
                # What would be a line's end or a word's for one reader and not for the next is in none of them.
                assert all(line.split() == line.split(" ") for line in lines if line)
                assert [bool(line) for line in lines[:-1]][: len(ODD)] == [True] * len(ODD)
        data = MMapIndexedDataset(str(out / f"data-bin/{part}.de-en.de"))
        dictionary = Dictionary.load(str(out / "data-bin/dict.de.txt"))
        assert len(data) == number
        for index, line in enumerate(iter_lines(out / f"bpe/{part}.de")):
            assert len(data[index]) == len(line.split()) + 1
            known = [word if word in dictionary else "<unk>" for word in line.split()]
            assert dictionary.string(data[index]).split() == known or "<" in line
    kept = list(iter_lines(out / "bpe/train.de"))
    assert len(kept) == 40 + len(ODD), "empty lines and the overlong one go from the training text"


@pytest.mark.parametrize("bad", NOT_UTF8.values(), ids=NOT_UTF8)
@pytest.mark.parametrize("part", ["train", "test"])
def test_what_is_not_utf8_is_named_and_nothing_is_left(part, bad, tmp_path, capsys):
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    for name in ("train", "valid", "test"):
        write(raw, name, [*plain(4), *([bad] if name == part else []), "ende"])
    assert prepare(raw, out) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("lightconv prepare: error: ") and f"{part}.de is not UTF-8: line 5: " in said
    assert [path for path in out.rglob("*") if path.is_file() and ".steps" not in path.parts] == []
    with Steps(out):
        pass  # nobody holds the folder


@pytest.mark.parametrize("recipe", [Recipe("moses", "de"), Recipe("none", "de"), Recipe("sacremoses", "en")], ids=str)
@pytest.mark.parametrize("line", [*ODD.values(), *EMPTY, "e" * 50_000], ids=[*ODD, *map(ascii, EMPTY), "long"])
def test_every_tokeniser_leaves_tokens_between_single_spaces(recipe, line):
    tokens = recipe.tokenise()(line)
    assert tokens == " ".join(tokens.split(" ")).strip(" ") and "  " not in tokens
    assert not set(tokens) & set("\n\r\t\x0b\x0c\x1c\x1d\x1e\x1f\x85\u2028\u2029")


def test_a_line_of_a_million_characters_is_tokenised():
    tokenise = moses.tokeniser("de")
    assert tokenise(LONG_WORD) == LONG_WORD
    assert tokenise(LONG_WORDS).count(" ") == LONG_WORDS.count(" ") - 1
    assert tokenise("a." * 500_000).endswith(".")


def test_translate_answers_every_line(tmp_path, monkeypatch, capfd):
    """A line in, a line out; what cannot be translated is named by its number and its reason."""
    data = toys.make_corpus(tmp_path / "corpus")
    room = {"max_source_positions": 1024}
    path = toys.make_checkpoint(tmp_path / "m.pt", data, task=room, **room)
    lines = [*ODD.values(), *EMPTY, *NOT_UTF8.values(), LONG_WORDS, LONG_WORD, "der kleine Hund"]
    content = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert main.main(["translate", str(path), "--max-len-b", "5", "--beam", "1"]) == 1
    out, err = capfd.readouterr()
    answers = out.split("\n")
    assert len(answers) == len(lines) + 1 and answers[-1] == "" and answers[-2]
    left = [line for line in err.splitlines() if " left empty: " in line]
    known = dict(line.removeprefix("lightconv translate: line ").split(" left empty: ") for line in left)
    first = len(ODD) + len(EMPTY) + 1
    assert "NUL" in known.pop("1")
    for number in range(first, first + len(NOT_UTF8)):
        assert known.pop(str(number)).startswith("not UTF-8: ")
    for number in (first + len(NOT_UTF8), first + len(NOT_UTF8) + 1):
        assert known.pop(str(number)).startswith("too long: ")
    assert known == {}, "whatever else is there is translated"
