"""Files of shortlists: both formats, what is wrong with them, and translating with them."""

import logging
from argparse import Namespace

import pytest
import torch

pytest.importorskip("fairseq")

from lightconv_plugin.cli import main
from lightconv_plugin.errors import InputError, TranslationError
from lightconv_plugin.generation import FastGenerator
from lightconv_plugin.generation.fairseq_generate import parse_options
from lightconv_plugin.generation.shortlist import Shortlist, read_shortlist
from lightconv_plugin.generation.task import TranslationFastConfig, TranslationFastTask
from lightconv_plugin.generation.translator import Translator
from lightconv_plugin.text.dictionary import Dictionary
from lightconv_plugin.text.shortlist import read_lists
from tests.generation import toys as models
from tests.generation import translation_toys as toys
from tests.models.toys import dictionary

LINES = toys.lines(9, seed=21)
SHORT = {"max_len_b": 20}
SYMBOLS = {0, 1, 2, 3}


def words_of(text: str) -> Dictionary:
    return Dictionary.of_bytes("".join(f"{word} 1\n" for word in text.split()).encode(), "dict")


SOURCE = words_of("der hund haus NULL")
TARGET = words_of(" ".join(f"w{i}" for i in range(250)) + " the dog house home , 7")


def read(tmp_path, content: str, beam: int = 5) -> Shortlist:
    path = tmp_path / "shortlist"
    path.write_text(content, encoding="utf-8")
    return read_shortlist(path, SOURCE, TARGET, beam)


def beyond_the_frequent(shortlist: Shortlist, *words: str) -> set[str]:
    """What a sentence allows besides the symbols and the first words of the dictionary."""
    batch = torch.tensor([[SOURCE.index(word) for word in words] + [SOURCE.eos()]])
    found = shortlist.words(batch).tolist()
    assert SYMBOLS | set(range(4, 104)) <= set(found)
    return {TARGET[word] for word in found if word >= 104}


def test_a_lexical_table(tmp_path):
    table = "the der 0.9\ndog hund 1\n, NULL 0.05\nhouse haus 0.5\nhome haus 2.5e-1\n7 NULL 0\n"
    for text in (
        table,
        table.replace(" ", "\t"),
        table.replace("\n", "\r\n"),
        "\ufeff" + table,
        f" {table}".replace("\n", " \n"),
    ):
        shortlist = read(tmp_path, text)
        assert beyond_the_frequent(shortlist, "der") == {"the", ",", "7"}
        assert beyond_the_frequent(shortlist, "haus", "hund") == {"house", "home", "dog", ",", "7"}
        assert beyond_the_frequent(shortlist, "NULL") == {",", "7"}


def test_a_table_of_an_aligner_has_source_words_without_a_translation(tmp_path):
    """Marian's extract_lex writes NULL on either side, and Marian reads neither."""
    shortlist = read(tmp_path, "the der 0.9\nNULL der 0.1\nNULL hund 1\nNULL NULL 0\n, NULL 0.05\n")
    assert beyond_the_frequent(shortlist, "der", "hund") == {"the", ","}
    words = words_of("the dog NULL")
    (tmp_path / "word").write_text("NULL der 0.1\n")
    assert read_lists(tmp_path / "word", SOURCE, words) == {(SOURCE.index("der"),): {words.index("NULL")}}


def test_a_vocabulary_map(tmp_path):
    shortlist = read(tmp_path, "der\tthe\n\t, 7\nder hund\tdog house\nhund\t\n")
    assert beyond_the_frequent(shortlist, "der") == {"the", ",", "7"}
    assert beyond_the_frequent(shortlist, "hund") == {",", "7"}
    assert beyond_the_frequent(shortlist, "der", "hund") == {"the", "dog", "house", ",", "7"}
    assert beyond_the_frequent(shortlist, "hund", "der") == {"the", ",", "7"}


def test_the_last_line_of_a_phrase_counts(tmp_path):
    """As CTranslate2 reads a vocabulary map: a later line replaces an earlier one, also that of the empty phrase."""
    shortlist = read(tmp_path, "\thome\nder\tthe\nder hund\thouse\nder\tdog unknown\nder\tdog\n\t,\nder  hund\t7\n")
    assert beyond_the_frequent(shortlist, "der") == {"dog", ","}
    assert beyond_the_frequent(shortlist, "der", "hund") == {"dog", "7", ","}


@pytest.mark.parametrize("line", ["a\u00a0b der 1", "der\ta\u00a0b"])
def test_other_spaces_are_of_a_word(line, tmp_path):
    words = Dictionary.of_bytes("a\u00a0b 1\n".encode(), "dict")
    (tmp_path / "word").write_text(f"{line}\n", encoding="utf-8")
    assert read_lists(tmp_path / "word", SOURCE, words) == {(SOURCE.index("der"),): {4}}


def test_there_are_always_enough_words_for_the_beam(tmp_path):
    found = read(tmp_path, "the der 1\n", beam=110).words(torch.tensor([[5, 2]])).tolist()
    assert found == [*range(4 + 220)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "shortlist is empty"),
        ("the der 0.9\nthe der\n", "shortlist, line 2: expected a target word, a source word and a probability"),
        ("the der x\n", "shortlist, line 1: expected a target word"),
        ("the der nan\n", "shortlist, line 1: expected a target word"),
        ("the der 1.5\n", "shortlist, line 1: expected a target word"),
        ("the der -0.1\n", "shortlist, line 1: expected a target word"),
        ("the der 1\n\n", "shortlist, line 2: expected a target word"),
        ("the der 1\nder\tthe\n", "shortlist, line 2: expected a target word"),
        ("der\tthe\nhund dog\n", "shortlist, line 2: expected a source phrase, a tab and target words, got 'hund dog'"),
        ("der\tthe\nhund\tdog\t7\n", "shortlist, line 2: expected a source phrase"),
        (
            "the der 1\nder the 1\nder the 1\n",
            "shortlist has 2 words that are not in the model's dictionaries, the first in line 2: source word 'the'",
        ),
        ("der\tthe\nder hund\tdog cat\n", "has 1 words that .* the first in line 2: target word 'cat'"),
    ],
)
def test_files_that_are_wrong(content, said, tmp_path):
    with pytest.raises(InputError, match=said):
        read(tmp_path, content)


def test_files_that_are_not_text(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xf5\x17\x34\x01")
    with pytest.raises(InputError, match="binary is not UTF-8"):
        read_shortlist(tmp_path / "binary", SOURCE, TARGET, 5)
    with pytest.raises(InputError, match="is a folder"):
        read_shortlist(tmp_path, SOURCE, TARGET, 5)


# ------------------------------------------------------------------------------------------------ translating


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(data, checkpoint, exported directory, file that allows everything, file that allows few words)."""
    folder = tmp_path_factory.mktemp("shortlists")
    data = toys.make_corpus(folder / "corpus")
    checkpoint = toys.make_checkpoint(folder / "model.pt", data, seed=6)
    assert main.main(["export", str(checkpoint), str(folder / "exported")]) == 0
    source, target = (Dictionary.load(data / f"dict.{lang}.txt") for lang in ("de", "en"))
    everything = "".join(f"{word} NULL 1\n" for word in target.symbols)
    (folder / "all.txt").write_text(everything + f"{target[4]} {source[4]} 1\n", encoding="utf-8")
    (folder / "few.txt").write_text(f"{source[4]}\t{target[4]}\n", encoding="utf-8")
    return data, checkpoint, folder / "exported", folder / "all.txt", folder / "few.txt"


@pytest.fixture
def few_are_frequent(monkeypatch):
    """The dictionary has no hundred words, so that all would be allowed."""
    monkeypatch.setattr("lightconv_plugin.generation.shortlist._FREQUENT", 0)


def hypotheses(path, **options):
    with Translator(path, **SHORT, **options) as translator:
        return [translation.hypotheses for translation in translator.translate(LINES, 2)]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_list_of_all_words_changes_nothing(dtype, made, few_are_frequent):
    _, checkpoint, exported, everything, _ = made
    for path in (checkpoint, exported):
        assert hypotheses(path, dtype=dtype, shortlist=everything) == hypotheses(path, dtype=dtype)


def test_only_listed_words_are_chosen(made, few_are_frequent):
    data, checkpoint, exported, _, few = made
    target = Dictionary.load(data / "dict.en.txt")
    listed = {target[i] for i in range(4 + 2 * 2)}  # twice the beam, and the word in the file
    for path in (checkpoint, exported):
        found = hypotheses(path, shortlist=few, beam=2)
        assert {token for ranked in found for one in ranked for token in one.tokens} <= listed
        assert found != hypotheses(path, beam=2)


def test_what_a_shortlist_is_not_valid_with(made, tmp_path):
    _, _, exported, everything, _ = made
    with (
        Translator(exported, shortlist=everything) as translator,
        pytest.raises(TranslationError, match="with the whole vocabulary: `shortlist` is not valid"),
    ):
        translator.score(LINES, LINES)
    with pytest.raises(TranslationError, match=r"`shortlist`: no such file: .*none\.txt"):
        Translator(exported, shortlist=tmp_path / "none.txt")
    (tmp_path / "wrong.txt").write_text("der the\n", encoding="utf-8")
    with pytest.raises(TranslationError, match=r"wrong\.txt, line 1: expected a target word"):
        Translator(exported, shortlist=str(tmp_path / "wrong.txt"))


def test_the_command(made, tmp_path, capfd):
    data, _, exported, everything, few = made
    (tmp_path / "in.txt").write_text("\n".join(LINES), encoding="utf-8")

    def run(*options):
        words = ["translate", str(exported), "--input", str(tmp_path / "in.txt"), "--max-len-b", "20"]
        status = main.main([*words, *map(str, options)])
        return status, *capfd.readouterr()

    assert run("--shortlist", everything)[:2] == run()[:2]
    for options, said in (
        (("--score", few), "--score takes the whole vocabulary into account: --shortlist is not valid"),
        (("--shortlist", data / "none"), f"--shortlist: no such file: {data / 'none'}"),
        (("--output", few), f"--output {few} is the --shortlist"),
    ):
        status, _, error = run("--shortlist", few, *options)
        assert status == 2 and error == f"lightconv translate: error: {said}\n"


# ------------------------------------------------------------------------------------------------ fairseq's commands


@pytest.fixture
def all_words(tmp_path):
    words = dictionary(models.VOCABULARY)
    path = tmp_path / "all.txt"
    path.write_text("".join(f"{word} NULL 1\n" for word in words.symbols), encoding="utf-8")
    return path


def task_with(path, **options) -> TranslationFastTask:
    words = dictionary(models.VOCABULARY)
    return TranslationFastTask(TranslationFastConfig(generation_shortlist=str(path), **options), words, words)


def test_the_generator_of_the_task(all_words, few_are_frequent, tmp_path):
    torch.manual_seed(1)
    ensemble, batch = [models.ours()], models.batch()
    (tmp_path / "few.txt").write_text(f"{ensemble[0].decoder.dictionary[20]} NULL 1\n", encoding="utf-8")

    def found(path):
        generator = task_with(path).build_generator(ensemble, Namespace(beam=3, max_len_b=8))
        assert isinstance(generator, FastGenerator)
        return [[h["tokens"].tolist() for h in ranked] for ranked in generator.generate([], batch)]

    assert found(all_words) == found("")
    chosen = {word for ranked in found(tmp_path / "few.txt") for tokens in ranked for word in tokens}
    assert chosen <= {*SYMBOLS, *range(4, 10), 20} and chosen - SYMBOLS


def test_the_option_of_fairseqs_commands():
    words = ["data-bin", "--path", "model.pt", "--task", "translation_fast"]
    assert parse_options(words).task.generation_shortlist == ""
    assert parse_options([*words, "--generation-shortlist", "list.txt"]).task.generation_shortlist == "list.txt"


def test_what_only_fairseqs_generator_can_do(all_words, caplog):
    torch.manual_seed(1)
    ensemble, batch = [models.ours()], models.batch()
    task = task_with(all_words)
    for option, value in {"print_alignment": "hard", "score_reference": True}.items():
        with pytest.raises(ValueError, match=f"--generation-shortlist and --{option.replace('_', '-')} exclude"):
            task.build_generator(ensemble, Namespace(**{option: value}))
    sampling = task.build_generator(ensemble, Namespace(beam=2, sampling=True))
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(ValueError, match="--generation-shortlist does not support search by Sampling"),
    ):
        sampling.generate([], batch)
    assert "falling back" not in caplog.text
    searching = task.build_generator(ensemble, Namespace(beam=2, max_len_b=5))
    assert isinstance(searching, FastGenerator)
    with pytest.raises(ValueError, match="--generation-shortlist does not support constraints"):
        searching.generate([], batch, constraints=torch.zeros(8, 1, dtype=torch.int64))
