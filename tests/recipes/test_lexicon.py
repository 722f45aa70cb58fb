"""Lexical tables: Model 1 against its formulas, and the command that writes one."""

import itertools
from collections import defaultdict

import pytest
import torch

pytest.importorskip("fairseq")

from lightconv_plugin.cli import main
from lightconv_plugin.generation.shortlist import read_shortlist
from lightconv_plugin.recipes import lexicon
from lightconv_plugin.text.dictionary import Dictionary

SENTENCES = (
    ("the house", "das Haus"),
    ("the book", "das Buch"),
    ("a book", "ein Buch"),
    ("the the house , 12", "das das Haus , 12"),
    ("a", "ein"),
)


def text_of(sentences) -> lexicon.ParallelText:
    sides = []
    for side in zip(*sentences, strict=True):
        words = dict.fromkeys(" ".join(side).split())
        sides.append(Dictionary.of_bytes("".join(f"{word} 1\n" for word in words).encode(), "dict"))
    source, target = sides
    pairs = [
        (torch.tensor([*map(source.index, one.split())]), torch.tensor([*map(target.index, other.split())]))
        for one, other in sentences
    ]
    return lexicon.ParallelText(source, target, pairs)


def by_formula(sentences, iterations: int) -> dict[tuple[str, str], float]:
    """p(target | source) as Brown et al. define it, with dictionaries of words."""
    chances: dict[tuple[str, str], float] = defaultdict(lambda: 1.0)
    for _ in range(iterations):
        counts: dict[tuple[str, str], float] = defaultdict(float)
        for source, target in sentences:
            words = ["nothing", *source.split()]
            for t in target.split():
                total = sum(chances[s, t] for s in words)
                for s in words:
                    counts[s, t] += chances[s, t] / total
        totals: dict[str, float] = defaultdict(float)
        for (s, _), count in counts.items():
            totals[s] += count
        chances = {(s, t): count / totals[s] for (s, t), count in counts.items()}
    return chances


@pytest.mark.parametrize("memory", [lexicon._PAIRS, 20, 1])
@pytest.mark.parametrize("iterations", [1, 2, 6])
def test_model_1_is_its_formula(iterations, memory, monkeypatch):
    monkeypatch.setattr(lexicon, "_PAIRS", memory)
    text = text_of(SENTENCES)
    model = lexicon.Model1(text, iterations)
    names = [*text.source.symbols, "nothing"]
    found = {
        (names[s], text.target[t]): p
        for s, t, p in zip(model.sources.tolist(), model.targets.tolist(), model.probabilities.tolist(), strict=True)
    }
    assert found == pytest.approx(by_formula(SENTENCES, iterations), rel=1e-4)


def test_the_best_words_of_each():
    text = text_of(SENTENCES)
    model = lexicon.Model1(text, 5)
    lists = defaultdict(list)
    for s, t, p in zip(*(column.tolist() for column in model.best(2, 0.05)), strict=True):
        lists[text.source[s]].append((text.target[t], p))
    assert lists.keys() == {*"the house a book , 12".split()}
    assert (lists["book"][0][0], lists["the"][0][0]) == ("Buch", "das")
    for words in lists.values():
        assert 1 <= len(words) <= 2 and all(p >= 0.05 for _, p in words)
        assert [p for _, p in words] == sorted((p for _, p in words), reverse=True)


def test_words_that_are_always_allowed():
    text = text_of([*SENTENCES, ("a b", "&quot; x&#91; 3@@ é 中")])
    found = lexicon.always_allowed(text, 2)
    total = sum(len(target) for _, target in text.pairs)
    names = {text.target[word]: share for word, share in found}
    assert names.keys() == {"das", "Haus", ",", "12", "&quot;", "3@@"}
    assert names["das"] == 4 / total and names[","] == 1 / total


def test_words_that_the_format_cannot_hold(tmp_path):
    text = text_of([("a NULL b", "x y z")])
    lists = lexicon.Model1(text, 1).best(9, 0)
    text.source.symbols[text.source.index("b")] = "two words"
    lexicon.write_table(tmp_path / "table", text, lists, [(4, 0.25)])
    lines = (tmp_path / "table").read_text().splitlines()
    assert lines[0] == "x NULL 0.25" and {line.split(" ")[1] for line in lines[1:]} == {"a"}


# ------------------------------------------------------------------------------------------------ the command


def test_the_command(toy_data, tmp_path, capsys):
    out = tmp_path / "table.txt"
    words = ["shortlist", str(toy_data), "--output", str(out), "--frequent", "2", "--best", "3"]
    assert main.main(words) == 0
    assert capsys.readouterr().out.startswith(f"written to {out}: 39 target words for 13 source words, and 2 that are ")
    source, target = (Dictionary.load(toy_data / f"dict.{lang}.txt") for lang in ("de", "en"))
    read_shortlist(out, source, target, 5)
    rows = [line.split(" ") for line in out.read_text().splitlines()]
    assert sum(row[1] == "NULL" for row in rows) == 2
    assert max(len(list(group)) for name, group in itertools.groupby(row[1] for row in rows) if name != "NULL") <= 3
    first = out.read_text()
    assert main.main(words) == 2 and "exists already: give --force" in capsys.readouterr().err
    assert main.main([*words, "--force", "-s", "de", "-t", "en"]) == 0 and out.read_text() == first
    for path in toy_data.iterdir():  # the files of the opposite direction serve as well
        (tmp_path / path.name.replace("de-en", "en-de")).symlink_to(path)
    opposite = ["shortlist", str(tmp_path), *words[2:], "--force", "-s", "de", "-t", "en"]
    assert main.main(opposite) == 0 and out.read_text() == first


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-s fr -t en", "has no direction fr-en; train is there as de-en"),
        ("--min-probability 2", "--min-probability must be in 0 … 1, got 2.0"),
        ("--min-probability nan", "--min-probability must be in 0 … 1, got nan"),
    ],
)
def test_what_the_command_refuses(options, said, toy_data, tmp_path, refusal):
    assert said in refusal("shortlist", toy_data, "--output", tmp_path / "out", *options.split())
    assert not list(tmp_path.iterdir())


def test_data_without_languages(toy_data, tmp_path, refusal):
    words = ["shortlist", str(toy_data.parent / "english"), "--output", str(tmp_path / "out")]
    assert "has train as text of a language model, without pairs of sentences" in refusal(*words)


def test_of_several_languages_those_that_are_named(toy_data, tmp_path, capsys, refusal):
    for path in toy_data.iterdir():
        (tmp_path / path.name).hardlink_to(path)
        if path.name.endswith((".en.bin", ".en.idx")) or path.name == "dict.en.txt":
            (tmp_path / path.name.replace("-en.", "-fr.").replace(".en.", ".fr.")).hardlink_to(path)
        elif "-en." in path.name:
            (tmp_path / path.name.replace("-en.", "-fr.")).hardlink_to(path)
    (tmp_path / "dict.fr.txt").unlink()
    words = (toy_data / "dict.en.txt").read_text(encoding="utf-8").splitlines()
    (tmp_path / "dict.fr.txt").write_text("".join(f"fr{line}\n" for line in words), encoding="utf-8")
    out = tmp_path / "table"
    assert main.main(["shortlist", str(tmp_path), "--output", str(out), "-t", "fr"]) == 0
    assert all(line.startswith("fr") for line in out.read_text(encoding="utf-8").splitlines())
    capsys.readouterr()
    for options, said in (
        ([], "has several directions: name the languages; train is there as de-en, de-fr"),
        (["-s", "xx"], "has no direction xx-*"),
        (["-t", "de"], "has several directions: name the languages"),  # the opposite of either
    ):
        assert said in refusal("shortlist", tmp_path, "--output", tmp_path / "no", *options)
        assert not (tmp_path / "no").exists()


def test_fewer_sentences(toy_data):
    text = lexicon.read_text(toy_data, "de", "en", 10**9)
    some = lexicon.read_text(toy_data, "de", "en", 5)
    assert 3 <= len(some.pairs) <= 5 < len(text.pairs)
    assert torch.equal(some.pairs[0][0], text.pairs[0][0]) and not text.pairs[0][0].eq(text.source.eos()).any()
