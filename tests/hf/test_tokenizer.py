"""The tokeniser against the recipe, the subwords and the dictionaries that it is made of."""

import copy
import json
import os
import pickle
import shutil

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils import hub

from lightconv_plugin.checkpoints.exported import GENERATION, open_exported
from lightconv_plugin.checkpoints.saving import Side, save_exported
from lightconv_plugin.errors import InputError
from lightconv_plugin.hf import LightConvTokenizer
from lightconv_plugin.text.recipe import Recipe
from lightconv_plugin.text.sides import TextSide
from tests.checkpoints import export_damage, exports
from tests.hf.models import ENGLISH, GERMAN, dictionary, export_language_model, export_seq2seq, language_model, plain

PAD, EOS, UNK = 1, 2, 3
TEXT = "Ein Hund läuft durch das Gras, zwei Hunde stehen."
PIECES = "ein hund läuft durch das gras , zwei hunde s@@ t@@ eh@@ en .".split()


def ids(pieces, words):
    return [4 + words.index(piece) if piece in words else UNK for piece in pieces]


@pytest.fixture(scope="module")
def tokenizer(exported):
    return AutoTokenizer.from_pretrained(exported)


@pytest.fixture(scope="module")
def language_tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(export_language_model(tmp_path_factory.mktemp("lm") / "model"))


def test_text_becomes_ids_of_the_source(tokenizer):
    assert tokenizer.tokenize(TEXT) == PIECES
    found = tokenizer(TEXT)
    assert found["input_ids"] == [*ids(PIECES, GERMAN), EOS] and found["attention_mask"] == [1] * len(PIECES) + [1]
    assert set(found) == {"input_ids", "attention_mask"}
    assert tokenizer.encode("Ein Hund .", add_special_tokens=False) == ids(["ein", "hund", "."], GERMAN)
    assert tokenizer.convert_tokens_to_ids(["hund", "dog"]) == [ids(["hund"], GERMAN)[0], UNK]
    assert tokenizer("")["input_ids"] == [EOS]
    assert tokenizer("Ein Hund\n.\n")["input_ids"] == tokenizer("Ein Hund .")["input_ids"]


def test_the_ids_are_those_of_the_exported_text(tokenizer, exported):
    opened = open_exported(exported)
    encode = opened.source_text.encode()
    for line in (
        TEXT,
        "zwei Hunde.",
        "„Gras“ & Co.",
        "x_y z",
        "Hu\x1cnd Hun\x1dd \x1eHund",
        "Hund\x0bHund\x85Hund\u2028Hund",
    ):
        expected = [opened.source.index(piece) for piece in encode(line)]
        assert tokenizer(line)["input_ids"] == [*expected, EOS]


def test_text_target_becomes_ids_of_the_target(tokenizer):
    batch = tokenizer(["Ein Hund", TEXT], text_target=["A dog", "they run ."], padding=True, return_tensors="pt")
    assert batch["labels"].tolist() == [
        [UNK, *ids(["dog"], ENGLISH), EOS, PAD],
        [*ids(["they", "run", "."], ENGLISH), EOS],
    ]
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 15)
    assert batch["input_ids"][0].tolist() == [*ids(["ein", "hund"], GERMAN), EOS, *[PAD] * 12]
    assert batch["attention_mask"][0].tolist() == [1] * 3 + [0] * 12
    alone = tokenizer(text_target="they stand")
    assert alone["input_ids"] == [*ids(["they", "stand"], ENGLISH), EOS]
    assert tokenizer("hund")["input_ids"] == [*ids(["hund"], GERMAN), EOS], "it reads the source again"


def test_ids_become_text_of_the_target(tokenizer):
    words = ids("the dog runs , they stand .".split(), ENGLISH)
    assert tokenizer.decode([EOS, *words, EOS, PAD], skip_special_tokens=True) == "the dog runs, they stand."
    assert tokenizer.decode([EOS, *words, EOS, PAD]) == "</s> the dog runs, they stand. </s> <pad>"
    assert tokenizer.decode([*words[:2], UNK, EOS], skip_special_tokens=True) == "the dog <unk>", "as fairseq writes it"
    rows = torch.tensor([[*words[:2], EOS], [words[2], EOS, PAD]])
    assert tokenizer.batch_decode(rows, skip_special_tokens=True) == ["the dog", "runs"]
    assert tokenizer.convert_ids_to_tokens([words[0], EOS]) == ["the", "</s>"]
    assert tokenizer.convert_ids_to_tokens([words[0], EOS], skip_special_tokens=True) == ["the"]
    assert tokenizer.convert_ids_to_tokens(words[1]) == "dog"
    assert tokenizer.convert_tokens_to_string(["he", "&apos;", "runs", "."]) == "he 'runs."


def test_a_source_is_read_back(tokenizer):
    found = tokenizer(TEXT)["input_ids"]
    text = tokenizer.decode(found, skip_special_tokens=True, use_source_tokenizer=True)
    assert text == TEXT.lower()


def test_symbols_in_a_text_are_unknown_words(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(export_language_model(tmp_path / "model"))
    assert tokenizer("the </s> dog <pad> <s>")["input_ids"] == [EOS, *ids("the x dog x x".split(), ENGLISH)]


def test_special_symbols_are_fairseqs(tokenizer):
    named = tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id
    assert named == (0, 1, 2, 3)
    assert sorted(tokenizer.all_special_tokens) == ["</s>", "<pad>", "<s>", "<unk>"]
    assert len(tokenizer) == tokenizer.vocab_size == len(tokenizer.get_vocab()) == 4 + len(ENGLISH)
    assert tokenizer.get_special_tokens_mask([5, 6]) == [0, 0, 1]
    assert tokenizer.get_special_tokens_mask([5, EOS, PAD], already_has_special_tokens=True) == [0, 1, 1]
    assert tokenizer.num_special_tokens_to_add() == 1
    assert not tokenizer.is_fast


def test_no_token_can_be_added(tokenizer):
    assert tokenizer.add_tokens(["dog"]) == 0
    for add in (lambda: tokenizer.add_tokens(["cat"]), lambda: tokenizer.add_special_tokens({"sep_token": "<sep>"})):
        with pytest.raises(ValueError, match=r"dictionaries of a model are fixed: got (cat|<sep>)"):
            add()


def test_a_word_of_both_sides_that_is_added_keeps_its_id_in_the_source(exported, tmp_path):
    directory = shutil.copytree(exported, tmp_path / "model")
    known = (directory / "dict.en.txt").read_text(encoding="utf-8")
    (directory / "dict.en.txt").write_text(known.replace("they ", "hund ").replace("stand ", "gras "), encoding="utf-8")
    tokenizer, batch = AutoTokenizer.from_pretrained(directory), {"text": TEXT, "text_target": "the hund , gras"}
    expected = tokenizer(**batch)
    assert expected["input_ids"] == [*ids(PIECES, GERMAN), EOS]
    assert tokenizer.add_tokens(["hund"]) == tokenizer.add_special_tokens({"sep_token": "gras"}) == 0
    assert tokenizer(**batch) == expected
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(**batch) == expected


def test_long_texts_are_cut_off_before_the_end(tokenizer):
    assert tokenizer.model_max_length == 40
    found = tokenizer("hund " * 60, truncation=True)["input_ids"]
    assert len(found) == 40 and found[-1] == EOS
    assert len(tokenizer("hund " * 60, truncation=True, max_length=7)["input_ids"]) == 7


def test_each_side_has_its_own_maximum_length(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(export_seq2seq(tmp_path / "model", max_target_positions=9))
    tokenizer.save_pretrained(tmp_path / "alone")
    for known in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "alone")):
        for given, source, target in (
            ({"truncation": True}, 40, 9),
            ({"padding": "max_length", "truncation": "longest_first"}, 40, 9),
            ({"truncation": True, "max_length": 12}, 12, 12),
            ({"truncation": True, "max_target_length": 5}, 40, 5),
            ({}, 61, 61),
        ):
            found = known("hund " * 60, text_target="dog " * 60, **given)
            assert (len(found["input_ids"]), len(found["labels"])) == (source, target)
            alone = known(text_target="dog " * 60, **given)["input_ids"]
            assert alone == found["labels"] and alone[-1] == EOS
        assert len(known("hund", text_target="dog", padding="max_length")["labels"]) == 9
    with pytest.raises(ValueError, match="model_max_target_length must be a whole number of at least 1, got 'x'"):
        AutoTokenizer.from_pretrained(tmp_path / "alone", model_max_target_length="x")


def test_wrong_texts(tokenizer):
    for text in ("Hund\0", "Hund \ud800"):
        with pytest.raises(ValueError, match="text has a NUL or a half of a surrogate pair"):
            tokenizer(text)
    with pytest.raises(ValueError, match="text_pair is not supported"):
        tokenizer("Ein Hund", "zwei Hunde")
    with pytest.raises(ValueError, match="token_ids must be at least 0, got -100"):
        tokenizer.decode([5, -100])
    with pytest.raises(ValueError, match="Input must be a string"):
        tokenizer([3.5])
    assert tokenizer.decode([10_000]) == "<unk>"


def test_the_source_is_read_after_a_refused_target(tokenizer):
    expected = tokenizer.encode("Hund")
    for given in ({}, {"text": "Hund"}):
        with pytest.raises(ValueError, match="text has a NUL"):
            tokenizer(text_target="dog\0", **given)
        assert tokenizer.encode("Hund") == expected


def test_a_language_models_text_begins_with_the_end(language_tokenizer):
    batch = language_tokenizer(["the dog runs", "they"], padding=True, return_tensors="pt")
    expected = [EOS, *ids("the dog runs".split(), ENGLISH)]
    assert batch["input_ids"].tolist() == [expected, [PAD, PAD, EOS, *ids(["they"], ENGLISH)]]
    assert batch["attention_mask"].tolist() == [[1] * 4, [0, 0, 1, 1]]
    assert language_tokenizer.decode(expected, skip_special_tokens=True) == "the dog runs"
    assert language_tokenizer(text_target="the dog")["input_ids"] == expected[:3]
    assert language_tokenizer.get_special_tokens_mask([5]) == [1, 0]
    assert language_tokenizer.model_max_length == 50
    # The trainers give it to generation_config.json, and programs that score texts put it before them.
    assert language_tokenizer.bos_token_id == EOS


def test_ids_without_the_beginning_continue_a_text(language_tokenizer, tmp_path):
    words = ids("the dog runs".split(), ENGLISH)
    assert language_tokenizer.decode(words) == " the dog runs"
    assert language_tokenizer.decode(words[1]) == " dog"
    assert language_tokenizer.decode([*words, EOS, PAD], skip_special_tokens=True) == " the dog runs"
    rows = [[PAD, EOS, *words], [EOS, *words, PAD]]
    assert language_tokenizer.batch_decode(rows, skip_special_tokens=True) == ["the dog runs"] * 2
    for nothing in ([], [EOS], [EOS, PAD], [PAD]):
        assert language_tokenizer.decode(nothing, skip_special_tokens=True) == ""
    moses = AutoTokenizer.from_pretrained(export_language_model(tmp_path / "model", tokenizer="moses"))
    (punctuation,) = ids([","], ENGLISH)
    assert moses.decode([punctuation, *words]) == ", the dog runs"
    assert moses.decode([*words, punctuation]) == " the dog runs,"
    assert moses.decode([EOS, *words, punctuation], skip_special_tokens=True) == "the dog runs,"
    directory = export_language_model(tmp_path / "chinese", tokenizer="jieba")
    known = (directory / "dict.txt").read_text(encoding="utf-8")
    (directory / "dict.txt").write_text(known.replace("Straße", "世界"), encoding="utf-8")
    chinese = AutoTokenizer.from_pretrained(directory)
    assert chinese.decode([*ids(["Straße"], ENGLISH), words[0]]) == "世界 the"


def test_it_is_saved_byte_for_byte(tokenizer, exported, tmp_path):
    assert len(tokenizer.save_pretrained(tmp_path / "first")) >= 5
    again = LightConvTokenizer.from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "second")
    for name in ("text.json", "dict.de.txt", "dict.en.txt", "source.bpe"):
        expected = (exported / name).read_bytes()
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes() == expected
    first, second = ((tmp_path / part / "tokenizer_config.json").read_bytes() for part in ("first", "second"))
    assert first == second
    given = json.loads((exported / "tokenizer_config.json").read_text())
    assert {name: json.loads(first)[name] for name in given} == given
    assert again(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert again.model_max_length == 40 and (again.source_lang, again.target_lang) == ("de", "en")
    with pytest.raises(ValueError, match="filename_prefix is not supported"):
        again.save_pretrained(tmp_path / "third", filename_prefix="my")


def test_it_outlives_its_directory_and_travels(exported, tokenizer, tmp_path, monkeypatch):
    expected = tokenizer(TEXT)["input_ids"]
    shutil.copytree(exported, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    fresh, replaced = (LightConvTokenizer.from_pretrained("model") for _ in range(2))  # neither has read a text
    (tmp_path / "model" / "source.bpe").write_text("#version: 0.2\na b\n", encoding="utf-8")
    assert replaced(TEXT)["input_ids"] == expected
    shutil.rmtree(tmp_path / "model")
    for twin in (pickle.loads(pickle.dumps(fresh)), copy.deepcopy(fresh), fresh, pickle.loads(pickle.dumps(replaced))):
        assert twin(TEXT)["input_ids"] == expected
    fresh.save_pretrained(tmp_path / "saved")
    assert LightConvTokenizer.from_pretrained(tmp_path / "saved")(TEXT)["input_ids"] == expected


def test_bytes_of_sentencepiece_are_decoded(tmp_path):
    pieces = ["▁two", "▁", "<0xE6>", "<0x9C>", "<0x88>", "s", "<0xC3>"]
    model = plain(language_model(vocab_size=4 + len(pieces)))
    side = Side(None, dictionary(pieces), TextSide(Recipe("none", "en"), "sentencepiece"))
    save_exported(tmp_path / "model", model, target=side, max_target_positions=50)
    tokenizer = LightConvTokenizer.from_pretrained(tmp_path / "model")
    found = tokenizer(" ".join(pieces))["input_ids"]
    assert tokenizer.decode(found, skip_special_tokens=True) == "two 月s\ufffd"
    assert tokenizer.decode(found[2:]) == " 月s\ufffd" and tokenizer.decode(found[3:6]) == "月"


@pytest.mark.parametrize("folder", [None, "small/first"])
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_files_come_from_the_cache_of_the_hub(folder, weights, exported, tmp_path, monkeypatch):
    """As they lie there after a download; only the names that the files themselves name are asked for.

    What `generate` reads is still to be fetched.
    """
    if weights == "int8":
        exported = export_seq2seq(tmp_path / "int8", weights)
    repository = tmp_path / "models--me--demo"
    snapshot = repository / "snapshots" / "0123abcd" / (folder or "")
    snapshot.mkdir(parents=True)
    shutil.copytree(exported, repository / "blobs")
    for blob in (repository / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(os.path.relpath(blob, snapshot))
    (snapshot / GENERATION).unlink()
    download = hub.hf_hub_download

    def fetch(repo_id, filename, **given):
        if filename == GENERATION and not (snapshot / filename).exists():
            (snapshot / filename).symlink_to(repository / "blobs" / filename)
        return download(repo_id, filename, **given)

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # otherwise each file is asked for again and again
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    given = {"cache_dir": tmp_path, **({} if folder is None else {"subfolder": folder})}
    tokenizer = AutoTokenizer.from_pretrained("me/demo", **given)
    assert tokenizer(TEXT)["input_ids"] == [*ids(PIECES, GERMAN), EOS]
    model = AutoModelForSeq2SeqLM.from_pretrained("me/demo", **given)
    twin = AutoModelForSeq2SeqLM.from_pretrained(exported)
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    assert model.generation_config.max_length == twin.generation_config.max_length
    (snapshot / "source.bpe").unlink()
    with pytest.raises(OSError, match=r"source\.bpe"):
        LightConvTokenizer.from_pretrained("me/demo", **given)


def test_languages_that_only_the_tokenizer_knows_are_those_of_the_hubs_files(exported, tmp_path, monkeypatch):
    """A new model's configuration has them only if they were given."""
    made, repository = shutil.copytree(exported, tmp_path / "made"), tmp_path / "models--me--new"
    exports.change(made / "config.json", source_lang=None, target_lang=None)
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    download = hub.hf_hub_download

    def fetch(repo_id, filename, **given):
        if (made / filename).exists():
            shutil.copy(made / filename, snapshot)
        return download(repo_id, filename, **given)

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    tokenizer = AutoTokenizer.from_pretrained("me/new", cache_dir=tmp_path)
    assert tokenizer(TEXT)["input_ids"] == [*ids(PIECES, GERMAN), EOS]


DAMAGED = {
    r"there is no dict\.en\.txt": lambda path: (path / "dict.en.txt").unlink(),
    r"dict\.de\.txt, line 1: expected a symbol": export_damage.write("dict.de.txt", b"hund\n"),
    "is not the name of a file in this directory": export_damage.text(source__file="../../secret"),
    r"text\.json: unknown key": export_damage.text(run="rm"),
    "tokeniser must be one of": export_damage.text(target__recipe={"tokeniser": "x", "lang": "en"}),
    "is not the name of a file": lambda path: exports.change(path / "tokenizer_config.json", target_lang="../en"),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damaged_directories(exported, tmp_path, message):
    directory = shutil.copytree(exported, tmp_path / "model")
    DAMAGED[message](directory)
    with pytest.raises(InputError, match=message):
        LightConvTokenizer.from_pretrained(directory)
