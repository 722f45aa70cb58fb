"""What Translator finds by itself, and what it says about what it does not find or what does not fit."""

import gc
import json
import shutil
import weakref
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.data import Dictionary

from lightconv_plugin.checkpoints.training_text import find_text
from lightconv_plugin.errors import InputError, TranslationError
from lightconv_plugin.generation import Translator
from tests.checkpoints.fairseq_files import state
from tests.generation import translation_toys as toys
from tests.models import toys as models

LINES = toys.lines(3, seed=5)
SHORT = {"max_len_b": 20}


@pytest.fixture(scope="module")
def made(data, checkpoints):
    return data, checkpoints["dynamicconv"]


@pytest.fixture(scope="module")
def expected(made):
    return [t.text for t in Translator(made[1], **SHORT).translate(LINES)]


def texts(translator) -> list[str]:
    return [t.text for t in translator.translate(LINES)]


def refused(match: str, path, *args, **options) -> None:
    with pytest.raises(TranslationError, match=match):
        Translator(path, *args, **options)


def test_everything_is_found(made):
    translator = Translator(made[1], **SHORT)
    assert (translator.source_lang, translator.target_lang, translator.notes) == ("de", "en", ())


@pytest.mark.parametrize("architecture", ["dynamicconv", "transformer"])
def test_files_of_pretrained_embeddings_are_not_needed(architecture, made, tmp_path):
    """fairseq would read them before it loads the checkpoint's own embeddings; the training's machine had them."""
    path = toys.make_checkpoint(tmp_path / "m.pt", made[0], architecture)
    expected = texts(Translator(path, **SHORT))
    assert texts(Translator(toys.with_embedding_files(path), **SHORT)) == expected


@pytest.mark.parametrize("merges", ["bpecodes", "code"])
def test_a_folder_with_all_beside_the_checkpoint(merges, made, expected, tmp_path):
    """As fairseq's released models are packed; the folder of the training is gone."""
    data, _ = made
    for name in ("dict.de.txt", "dict.en.txt"):
        shutil.copy(data / name, tmp_path)
    shutil.copy(data.parent / "bpe" / "codes", tmp_path / merges)
    path = toys.make_checkpoint(tmp_path / "m.pt", data, task={"data": "/no/such/data-bin"})
    translator = Translator(path, lowercase=True, **SHORT)
    assert texts(translator) == expected
    assert len(translator.notes) == 1 and "tokenised: assuming Moses" in translator.notes[0]
    scored, as_well = (translator.score(LINES, [line] * len(LINES)) for line in ("the dog", "The Dog"))
    assert [t.score for t in as_well] == [t.score for t in scored]  # references are in the training's case, too
    assert Translator(path, lowercase=True, tokenizer="moses", **SHORT).notes == ()
    # Like a folder in a home that others may not enter, this one cannot be looked into.
    unreadable = toys.make_checkpoint(tmp_path / "u.pt", data, task={"data": str(tmp_path / ("x" * 300))})
    assert texts(Translator(unreadable, lowercase=True, **SHORT)) == expected
    assert len(Translator([made[1], unreadable], **SHORT).translate(LINES)) == len(LINES)


def test_data_that_is_named_goes_first(made, expected, tmp_path):
    path = toys.make_checkpoint(tmp_path / "m.pt", made[0], task={"data": "/no/such/data-bin"})
    refused(f"no dictionaries .* in /no/such/data-bin nor in {tmp_path}: .* `data`", path)
    assert texts(Translator(path, made[0], **SHORT)) == expected
    refused(f"no dictionaries .* in {tmp_path}: give their folder", made[1], tmp_path)
    refused(f"no dictionaries .* in {made[0].parent}: give {made[0]} as `data`", made[1], made[0].parent)


def test_codes_and_tokenisers_that_are_named(made, expected):
    data, path = made
    codes = data.parent / "bpe" / "codes"
    assert texts(Translator(path, bpe_codes=codes, tokenizer="moses", **SHORT)) == expected
    prepared = [toys.bpe(data)(toys.RECIPE.tokenise()(line)) for line in LINES]
    plain = Translator(path, bpe_codes="none", tokenizer="none", **SHORT).translate(prepared)
    moses = Translator(path, **SHORT).translate(LINES)
    assert [t.tokens for t in plain] == [t.tokens for t in moses]


def test_text_that_is_already_split_is_not_tokenised(made):
    """Neither sources nor references; translations are still detokenised."""
    data, path = made
    split = [toys.bpe(data)(toys.RECIPE.tokenise()(line)) for line in LINES]
    assert any("@@" in line for line in split)
    pieces, raw = Translator(path, bpe_codes="none", **SHORT), Translator(path, **SHORT)
    assert [(t.tokens, t.text) for t in pieces.translate(split)] == [(t.tokens, t.text) for t in raw.translate(LINES)]
    reference = "We don't see the big house!"
    english = toys.bpe(data)(replace(toys.RECIPE, lang="en").tokenise()(reference))
    expected = [t.score for t in raw.score(LINES, [reference] * len(LINES))]
    assert [t.score for t in pieces.score(split, [english] * len(LINES))] == pytest.approx(expected)


def test_corpora_without_a_recipe(made, expected, tmp_path):
    """As they were before recipes were written down: what is known of the case is used, and one note says the rest."""
    data = tmp_path / "corpus" / "data-bin"
    shutil.copytree(made[0].parent, data.parent)
    (data.parent / "corpus.json").write_text('{"src": "de", "tgt": "en", "lowercase": true}')
    translator = Translator(made[1], data, **SHORT)
    assert texts(translator) == expected
    assert "and lower case" in translator.notes[0]


@pytest.mark.parametrize(
    "text, said",
    [
        ("no JSON", "corpus.json is not the JSON"),
        ({"text": {"de": {"tokeniser": "perl", "lang": "de"}}}, "text, de: tokeniser must be one of moses"),
        ({"text": {"de": {"tokeniser": "moses"}}}, "text, de: lang is missing: a text"),
        ({"text": {"de": 3}}, "text, de: the whole must be a mapping, got 3"),
        ({"text": {"de": {"tokeniser": "moses", "lang": "xx"}}}, "no rules for the language 'xx'.*`tokenizer` to none"),
    ],
)
def test_a_damaged_corpus_json_is_named(text, said, made, tmp_path):
    data = tmp_path / "data-bin"
    shutil.copytree(made[0], data)
    shutil.copytree(made[0].parent / "bpe", tmp_path / "bpe")
    (tmp_path / "corpus.json").write_text(text if isinstance(text, str) else json.dumps(text))
    refused(said, made[1], data)


def test_merges_that_are_named_go_first_and_are_for_the_target_if_they_fit(made, tmp_path):
    data, _ = made
    dictionaries = [Dictionary.load(str(data / f"dict.{lang}.txt")) for lang in ("de", "en")]
    task = models.task(*dictionaries)
    task.cfg = SimpleNamespace(source_lang="de", target_lang="en")
    found, own, other = data.parent / "bpe/codes", tmp_path / "own", tmp_path / "other"
    shutil.copy(found, own)
    other.write_text("#version: 0.2\nq q\n")
    for given, expected in (None, (found, found)), (own, (own, own)), (other, (other, found)):
        text = find_text(task, data, bpe_codes=given)
        assert (text.source.file, text.target.file) == expected


def test_missing_merges(made, tmp_path):
    data = tmp_path / "data-bin"
    shutil.copytree(made[0], data)
    refused(r"byte-pair encoding, but there is no .*bpe/codes: give `bpe_codes`", made[1], data)
    refused("`bpe_codes`: no such file: nowhere", made[1], data, bpe_codes="nowhere")
    refused("`sentencepiece`: no such file: nowhere", made[1], data, sentencepiece="nowhere")
    refused("not both", made[1], bpe_codes="a", sentencepiece="b")
    (tmp_path / "text").write_text("this is a text, not merges\n")
    refused("text is not a file of merges", made[1], data, bpe_codes=tmp_path / "text")
    refused("text is not a model of sentencepiece", made[1], data, sentencepiece=tmp_path / "text")


def test_a_dictionary_of_another_size_is_named_before_anything_is_built(made, tmp_path):
    data = tmp_path / "data-bin"
    shutil.copytree(made[0], data)
    with (data / "dict.en.txt").open("a", encoding="utf-8") as file:
        file.write("another 1\n")
    refused(r"dynamicconv.pt has \d+ embeddings in its decoder, but .*dict.en.txt has \d+ entries", made[1], data)
    with (data / "dict.de.txt").open("a", encoding="utf-8") as file:
        file.write("another 1\n")
    refused("in its encoder, but .*dict.de.txt", made[1], data)
    for content, why in ((b"no number\n", ""), (b"a 1\na 1\n", ".*Duplicate word"), (b"\xe4 1\n", ".*encoding")):
        (data / "dict.de.txt").write_bytes(content)
        refused(f"dictionaries of .* cannot be read{why}", made[1], data)


def test_a_second_checkpoint_with_other_dictionaries(made, tmp_path):
    other = toys.make_corpus(tmp_path / "corpus")
    with (other / "dict.de.txt").open("a", encoding="utf-8") as file:
        file.write("another 1\n")
    path = toys.make_checkpoint(tmp_path / "other.pt", other)
    refused("other.pt has .* in its encoder", [made[1], path])
    refused("`path` must name a model", [])


def test_languages(made, tmp_path):
    nameless = {"source_lang": None, "target_lang": None}
    path = toys.make_checkpoint(tmp_path / "m.pt", made[0], task=nameless)
    refused("`source_lang` and `target_lang`, each one of de, en", path)
    assert Translator(path, source_lang="de", target_lang="en").source_lang == "de"
    refused("`source_lang` fr: .* has no dict.fr.txt; it has de, en", made[1], source_lang="fr")


def test_what_is_no_checkpoint_of_a_translation_model(made, tmp_path):
    data, _ = made
    refused("no such checkpoint or exported directory: nowhere.pt", "nowhere.pt")
    (tmp_path / "text.pt").write_text("a text")
    refused("no such checkpoint or exported directory: nowhere.pt", [tmp_path / "text.pt", "nowhere.pt"])
    with pytest.raises(InputError, match=r"text\.pt"):
        Translator(tmp_path / "text.pt")
    torch.save({"weight": torch.ones(3)}, tmp_path / "tensors.pt")
    refused("tensors.pt is not a checkpoint of fairseq", tmp_path / "tensors.pt")
    history = [{"optimizer_name": "O", "num_updates": 1, "lr_scheduler_state": {}}]
    cfg = {"task": {"_name": "language_modeling", "data": str(data)}, "model": {"_name": "dynamicconv_lm"}}
    parameters = {"decoder.embed_tokens.weight": torch.ones(3, 3)}
    torch.save(state(parameters, cfg=cfg, optimizer_history=history), tmp_path / "lm.pt")
    refused("lm.pt has no encoder: it is a checkpoint of a language model", tmp_path / "lm.pt")
    path = toys.make_checkpoint(tmp_path / "other.pt", data, task={"_name": "translation_fast"})
    assert Translator(path).beam == 5
    path = toys.make_checkpoint(tmp_path / "other.pt", data, task={"_name": "translation_lev"})
    refused("'translation_lev' uses its own search", path)
    content = torch.load(path, weights_only=False)
    without_dataclass = {**content["cfg"]["task"], "_name": None, "task": "translation_from_pretrained_bart"}
    torch.save({**content, "cfg": {**content["cfg"], "task": Namespace(**without_dataclass)}}, path)
    refused("'translation_from_pretrained_bart' uses its own search", path)
    path = toys.make_checkpoint(tmp_path / "other.pt", data, task={"_name": "denoising"})
    refused("task is 'denoising'", path)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"beam": 0}, "`beam` must be a whole number of at least 1, got 0"),
        ({"batch_tokens": 2.5}, "`batch_tokens` must be a whole number"),
        ({"threads": 0}, "`threads` must be"),
        ({"threads": -1}, "`threads` must be"),
        ({"threads": 100000}, "`threads` must be at most 1,024, got 100000"),
        ({"lenpen": "1"}, "`lenpen` must be a number, got '1'"),
        ({"temperature": None, "unkpen": "a"}, "`unkpen` must be a number, got 'a'"),
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"max_len_b": -1}, "`max_len_b` must be a whole number of at least 0"),
        ({"max_len_a": -0.5}, "`max_len_a` must be a number of at least 0"),
        ({"min_len": 9, "max_len_b": 8}, "`min_len` must be at most `max_len_b` = 8, got 9"),
        ({"lenpen": float("nan")}, "`lenpen` must be a number, got nan"),
        ({"temperature": 0}, "`temperature` must be positive"),
        ({"dtype": "float8"}, "`dtype` must be one of auto, float32, bfloat16, float16, int8, got 'float8'"),
        (
            {"dtype": "float16"},
            "`dtype` 'float16' runs on a GPU only: on a CPU use one of auto, float32, bfloat16, int8",
        ),
        ({"device": "tpu7"}, "`device` must be cpu, cuda or cuda:N, got 'tpu7'"),
        ({"device": "cuda:99"}, "`device` 'cuda:99' is not available"),
        ({"cuda_graphs": True}, "`cuda_graphs` needs a GPU, such as `device` 'cuda': got `device` 'cpu'"),
        ({"tokenizer": "perl"}, "`tokenizer` must be one of moses, moses-a, none, got 'perl'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_options_name_themselves(options, said, made):
    refused(said, made[1], **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_smaller_types_translate(dtype, made):
    """How near they come is tested where they are computed."""
    for translation in Translator(made[1], dtype=dtype, **SHORT).translate(LINES):
        assert translation.text and translation.score < 0


def test_a_type_of_the_cpu_on_a_gpu(made, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    said = "`dtype` 'int8' runs on a CPU only: on a GPU use one of auto, float32, bfloat16, float16"
    refused(said, made[1], device="cuda", dtype="int8")


def test_a_closed_translator_says_so_and_holds_no_models(made):
    with Translator(made[1], batch_size=1) as translator:
        model = weakref.ref(translator._opened.models[0])
        stream = translator.translate_stream(LINES)
        next(stream)
    with pytest.raises(TranslationError, match="is closed"):
        list(stream)
    for use in (translator.translate, translator.translate_stream, lambda lines: translator.score(lines, lines)):
        with pytest.raises(TranslationError, match="is closed"):
            use([""])
    del stream
    gc.collect()
    assert model() is None


def test_sentencepiece(made, tmp_path):
    import sentencepiece

    data = tmp_path / "data-bin"
    data.mkdir()
    (tmp_path / "text").write_text("\n".join([*toys.SENTENCES["de"], *toys.SENTENCES["en"]] * 3))
    sentencepiece.SentencePieceTrainer.Train(
        f"--input={tmp_path / 'text'} --model_prefix={data / 'spm'} --vocab_size=60 --hard_vocab_limit=false "
        "--minloglevel=2"
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(data / "spm.model"))
    dictionary = Dictionary()
    for i in range(3, processor.GetPieceSize()):
        dictionary.add_symbol(processor.IdToPiece(i))
    for lang in ("de", "en"):
        dictionary.save(str(data / f"dict.{lang}.txt"))
    path = toys.make_checkpoint(tmp_path / "m.pt", data)
    translator = Translator(path, **SHORT)
    line = toys.SENTENCES["de"][0]
    pieces = processor.EncodeAsPieces(line)
    assert translator._opened.encode(line)[0] == [dictionary.index(piece) for piece in pieces] + [dictionary.eos()]
    assert translator.notes == ()
    for found in translator.translate(LINES):
        assert found.text == "".join(found.tokens).replace("▁", " ").strip()
    assert translator.score([line], ["We see the small dog."])[0].score < 0
    (data / "spm.model").rename(tmp_path / "spm.de.model")
    (data / "dict.en.txt").write_text("".join(f"▁{word} 1\n" for word in " ".join(toys.SENTENCES["en"]).split()))
    path = toys.make_checkpoint(tmp_path / "m.pt", data)
    with Translator(path, sentencepiece=tmp_path / "spm.de.model", **SHORT) as translator:
        assert translator.translate(LINES)[0].text
        with pytest.raises(TranslationError, match=r"cannot split en into .* no sentencepiece model that fit"):
            translator.score([line], ["We see the small dog."])
    refused("uses sentencepiece, but there is no .*: give `sentencepiece`", path)
