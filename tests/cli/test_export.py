"""`lightconv export`: what becomes of checkpoints of fairseq, of every kind, and what is refused."""

import json
import os

import pytest
import torch

pytest.importorskip("fairseq")
pytest.importorskip("safetensors")

from fairseq.data import Dictionary
from omegaconf import OmegaConf

from lightconv_plugin.checkpoints.exported import load_model, open_exported
from lightconv_plugin.cli import main
from lightconv_plugin.errors import TranslationError
from lightconv_plugin.generation import Translator
from lightconv_plugin.scoring.bleu import BleuReport
from lightconv_plugin.text.recipe import Recipe
from tests.checkpoints.fairseq_files import state
from tests.generation import translation_toys as toys
from tests.models import language_model_toys
from tests.robustness.golden_files import GOLDEN, LANGUAGE_MODEL, PREVIOUS, SOURCE, data_of, unpack
from tests.robustness.test_golden import CASES, EXPECTED


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder as scripts/prepare.sh makes it; its data-bin."""
    return toys.make_corpus(tmp_path_factory.mktemp("a corpus") / "corpus")


@pytest.fixture(scope="module")
def checkpoint(corpus, tmp_path_factory):
    return toys.make_checkpoint(tmp_path_factory.mktemp("runs") / "a model.pt", corpus, seed=6)


def lightconv(*arguments) -> int:
    return main.main(["export", *map(str, arguments)])


def refused(capsys, *arguments) -> str:
    """The one line with which the command refuses; nothing is written."""
    directory = arguments[1]
    there = directory.exists()
    assert lightconv(*arguments) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("lightconv export: error: ")]
    assert out == "" and len(lines) == 1
    assert directory.exists() == there and not [*directory.parent.glob(f".{directory.name}*")]
    return lines[0]


def log_probabilities(directory) -> torch.Tensor:
    model = load_model(open_exported(directory))
    target = torch.tensor(PREVIOUS)
    with torch.no_grad():
        out = model(target) if model.config.encoder is None else model(torch.tensor(SOURCE), target)
    return out.logits.log_softmax(dim=-1)


@pytest.mark.parametrize(("name", "mixer"), CASES)
def test_trained_checkpoints_compute_the_same(name, mixer, tmp_path):
    """Of every mixer, trained by both distributions of fairseq, and with the numbers that fairseq's model gave then."""
    langs = [] if mixer == LANGUAGE_MODEL else ["-s", "de", "-t", "en", "--bpe-codes", "none", "--tokenizer", "none"]
    path, data = unpack(GOLDEN / name, mixer, tmp_path), data_of(mixer, tmp_path / "data")
    assert lightconv(path, tmp_path / "m", "--data", data, *langs) == 0
    want = torch.tensor(EXPECTED[name]["models"][mixer]["log_probabilities"])
    torch.testing.assert_close(log_probabilities(tmp_path / "m"), want, rtol=0, atol=2e-5)
    dictionary = "dict.txt" if mixer == LANGUAGE_MODEL else "dict.de.txt"
    assert (tmp_path / "m" / dictionary).read_bytes() == (data / dictionary).read_bytes()


def test_a_name_that_is_not_utf8(corpus, tmp_path):
    path = toys.make_checkpoint(tmp_path / os.fsdecode(b"\xfc.pt"), corpus)
    assert lightconv(path, tmp_path / "m") == 0
    assert r"| exported from | `\udcfc.pt` |" in (tmp_path / "m" / "README.md").read_text("utf-8")


def test_a_folder_is_no_checkpoint(checkpoint, tmp_path, capsys):
    """To export an exported model again, such as to another type, takes what the error says."""
    assert f"{tmp_path} is a folder: name a checkpoint in it" in refused(capsys, tmp_path, tmp_path / "n")
    assert "is a folder: name a checkpoint in it" in refused(capsys, ".", tmp_path / "n")
    assert lightconv(checkpoint, tmp_path / "m") == 0
    capsys.readouterr()
    said = refused(capsys, tmp_path / "m", tmp_path / "n")
    command = f"lightconv convert {tmp_path / 'm'} FILE.pt --to plugin"
    assert said.endswith(f"{tmp_path / 'm'} is an exported model: make a checkpoint of it by {command}")
    assert main.main(command.replace("FILE", str(tmp_path / "c")).split()[1:]) == 0
    assert lightconv(tmp_path / "c.pt", tmp_path / "n") == 0
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "mn")
    assert one == other


@pytest.mark.parametrize("architecture", ["dynamicconv", "transformer"])
def test_what_is_found_beside_the_data(architecture, corpus, tmp_path, capsys):
    path = toys.make_checkpoint(tmp_path / "m.pt", corpus, architecture, task={"truncate_source": True})
    assert lightconv(path, tmp_path / "m", "--lenpen", "0.6", "--beam", "4") == 0
    assert capsys.readouterr().out.startswith(f"written to {tmp_path / 'm'}: 0.")
    found = open_exported(tmp_path / "m")
    assert (found.settings.source_lang, found.settings.target_lang, found.settings.truncate_source) == (
        "de",
        "en",
        True,
    )
    assert (found.settings.max_source_positions, found.settings.max_target_positions) == (64, 64)
    assert (found.search.num_beams, found.search.length_penalty) == (4, 0.6)
    assert found.source_text.recipe == toys.RECIPE
    assert (tmp_path / "m" / "source.bpe").read_bytes() == (corpus.parent / "bpe/codes").read_bytes()
    encode = toys.bpe(corpus)
    for line in toys.SENTENCES["de"]:
        assert found.source_text.encode()(line) == encode(toys.RECIPE.tokenise()(line)).split()
    for dictionary, lang in ((found.source, "de"), (found.target, "en")):
        assert dictionary.indices == Dictionary.load(str(corpus / f"dict.{lang}.txt")).indices


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_types(dtype, corpus, tmp_path):
    sizes = {"encoder_embed_dim": 128, "decoder_embed_dim": 128, "encoder_ffn_embed_dim": 256}
    path = toys.make_checkpoint(tmp_path / "m.pt", corpus, **sizes)
    assert lightconv(path, tmp_path / "m", "--dtype", dtype) == 0
    found = open_exported(tmp_path / "m")
    model, weights = load_model(found, "float32"), torch.load(path, weights_only=False)["model"]
    assert found.settings.weights == dtype
    error = (model.encoder.layers[0].fc1.weight - weights["encoder.layers.0.fc1.weight"]).abs().max()
    assert error == 0 if dtype == "float32" else 0 < error < 2e-3


def test_an_averaged_checkpoint(corpus, checkpoint, tmp_path):
    other = toys.make_checkpoint(tmp_path / "other.pt", corpus, seed=7)
    average = tmp_path / "average.pt"
    assert main.main(["average", "--inputs", str(checkpoint), str(other), "--output", str(average)]) == 0
    assert lightconv(average, tmp_path / "m") == 0
    name = "encoder.layers.1.fc1.weight"
    one, two = (torch.load(path, weights_only=False)["model"][name] for path in (checkpoint, other))
    found = dict(load_model(open_exported(tmp_path / "m")).named_parameters())[name]
    torch.testing.assert_close(found.data, (one + two) / 2)


def test_a_checkpoint_of_fairseq_train(toy_data, toy_training, tmp_path):
    """Written by the trainer, with its whole configuration; shared decoder embeddings are stored once."""
    path = toy_training / "checkpoint_best.pt"
    assert lightconv(path, tmp_path / "m", "--tokenizer", "none") == 0
    found = open_exported(tmp_path / "m")
    assert found.config.decoder.share_input_output and "decoder.output_projection.weight" not in found.weights.kinds
    weights = torch.load(path, weights_only=False)["model"]
    for name, parameter in load_model(found).named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_the_options_say_what_is_not_found(corpus, checkpoint, tmp_path, capsys):
    """Dictionaries elsewhere, without what lies beside them."""
    data = tmp_path / "dictionaries"
    data.mkdir()
    for lang in ("de", "en"):
        (data / f"dict.{lang}.txt").write_bytes((corpus / f"dict.{lang}.txt").read_bytes())
    arguments = [checkpoint, tmp_path / "m", "--data", data]
    assert "there is no" in (line := refused(capsys, *arguments)) and "give --bpe-codes" in line
    codes = corpus.parent / "bpe/codes"
    assert lightconv(*arguments, "--bpe-codes", codes) == 0
    assert "note: no corpus.json" in (out := capsys.readouterr().out) and "--tokenizer to moses, moses-a or none" in out
    assert lightconv(*arguments, "--bpe-codes", codes, "--tokenizer", "none", "--lowercase", "--force") == 0
    found = open_exported(tmp_path / "m")
    for side, lang in ((found.source_text, "de"), (found.target_text, "en")):
        assert side.recipe.as_json() == {"tokeniser": "none", "lang": lang, "lowercase": "last"}
    assert capsys.readouterr().out.startswith("written to")
    assert lightconv(*arguments, "--bpe-codes", codes, "--tokenizer", "moses-a", "--force") == 0
    found = open_exported(tmp_path / "m")
    for side, lang in ((found.source_text, "de"), (found.target_text, "en")):
        assert side.recipe == Recipe("moses", lang, aggressive=True)
    capsys.readouterr()
    for options in (["--tokenizer", "none"], ["--lowercase"]):
        assert lightconv(*arguments, "--bpe-codes", "none", *options, "--force") == 0
        found = open_exported(tmp_path / "m")
        assert (found.source_text.subwords, found.source_text.file) == ("bpe", None)
        assert found.source_text.encode()("do@@ g &apos;") == ["do@@", "g", "&apos;"]
    assert found.source_text.encode()("DO@@ g") == ["do@@", "g"]
    assert found.target_text.decode()(["do@@", "g", "&apos;s", "."]) == "dog's."
    capsys.readouterr()
    (tmp_path / "others").write_text("#version: 0.2\nq q\n")
    assert lightconv(*arguments, "--bpe-codes", tmp_path / "others", "--force") == 0
    assert "note: no BPE merges and no sentencepiece model fit dict.en.txt" in capsys.readouterr().out
    with Translator(tmp_path / "m") as translator:
        assert translator.translate(["dog"])[0].text
        with pytest.raises(TranslationError, match="cannot split en into the pieces"):
            translator.score(["dog"], ["dog"])


def test_a_shortlist(corpus, checkpoint, tmp_path, capsys):
    """In either format, as it is; what is wrong with it is said before anything is written."""
    source, target = ((corpus / f"dict.{lang}.txt").read_text().split()[0] for lang in ("de", "en"))
    lists = tmp_path / "lists.txt"
    for number, content in enumerate((f"{target} {source} 0.5\n", f"{source} {source}\t{target}\n\t{target}\n")):
        lists.write_text(content)
        assert lightconv(checkpoint, tmp_path / f"m{number}", "--shortlist", lists) == 0
        assert open_exported(tmp_path / f"m{number}").shortlist.read_text() == content
    capsys.readouterr()
    lists.write_text(f"{target} unheard-of 0.5\n")
    line = refused(capsys, checkpoint, tmp_path / "n", "--shortlist", lists)
    assert "lists.txt has 1 words that are not in the model's dictionaries" in line
    for wrong in (tmp_path / "nowhere", tmp_path):
        line = refused(capsys, checkpoint, tmp_path / "n", "--shortlist", wrong)
        assert f"--shortlist: no such file: {wrong}" in line
    path, *_ = language_model(tmp_path)
    assert "--shortlist is not valid for a language model" in refused(
        capsys, path, tmp_path / "n", "--shortlist", lists
    )


def test_the_model_card(corpus, checkpoint, tmp_path):
    signature = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
    assert lightconv(checkpoint, tmp_path / "m", "--bleu", "34.567", "--bleu-signature", signature) == 0
    card = (tmp_path / "m/README.md").read_text(encoding="utf-8")
    assert f"BLEU 34.57, sacreBLEU's signature `{signature}`." in card
    assert "exported from | `a model.pt`" in card and "The corpus `corpus`" in card


SCORE = BleuReport(
    31.25, [60.0] * 4, 1.0, 1.0, 9, 9, 31.256, "nrefs:1|tok:13a", 55.0, "nrefs:1|c", 3, "en", "moses", False, False
)


@pytest.mark.parametrize("suffix, known, said", [
    ("test.score", SCORE.lines(), "BLEU 31.26 on test, sacreBLEU's signature `nrefs:1|tok:13a`"),
    ("test.score", {"sacrebleu": 31.25, "signature": "nrefs:1"}, "BLEU 31.25 on test, sacreBLEU's signature `nrefs:1`"),
    ("test.ppl", {"perplexity": 33.333}, "perplexity 33.33 on test."),
    ("test.ppl", {"perplexity": 33.333, "unit": "word"}, "perplexity 33.33 per word on test."),
    ("test.score", {"sacrebleu": "31", "signature": "nrefs:1"}, "To be written: no score was given."),
    ("test.score", [1], "To be written: no score was given."),
])  # fmt: skip
def test_scores_that_other_commands_left(suffix, known, said, corpus, tmp_path, capsys):
    path = toys.make_checkpoint(tmp_path / "m.pt", corpus)
    (tmp_path / f"m.{suffix}").write_text(known if isinstance(known, str) else json.dumps(known))
    assert lightconv(path, tmp_path / "m") == 0
    assert said in (tmp_path / "m/README.md").read_text(encoding="utf-8")
    noted = "note: m.test.score has no known score" in capsys.readouterr().out
    assert noted == said.startswith("To be written")


def test_a_score_that_is_older_than_the_checkpoint_is_left_out(corpus, tmp_path, capsys):
    path = toys.make_checkpoint(tmp_path / "m.pt", corpus)
    (tmp_path / "m.test.score").write_text(json.dumps({"sacrebleu": 31.25, "signature": "nrefs:1"}))
    os.utime(tmp_path / "m.test.score", (1, 1))
    assert lightconv(path, tmp_path / "m") == 0
    said = "is older than m.pt: the model card is without it; if it is of this checkpoint, as in a copied folder, touch"
    assert f"note: m.test.score {said} {tmp_path / 'm.test.score'}" in capsys.readouterr().out
    assert "To be written: no score was given." in (tmp_path / "m/README.md").read_text(encoding="utf-8")


def language_model(folder, architecture="dynamicconv_lm", task=None, entries=30, **options):
    """(a checkpoint with random weights, the folder of its dictionary, the model)."""
    data = folder / "lm-data"
    data.mkdir()
    size = (task or {}).get("output_dictionary_size")
    lm_task = language_model_toys.lm_task(entries, size)
    lm_task.source_dictionary.save(str(data / "dict.txt"))
    config = language_model_toys.configuration(architecture, **{**language_model_toys.SMALL, **options})
    model = language_model_toys.scramble(language_model_toys.build_lm(architecture, lm_task, **options))
    fields = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    settings = {"_name": "language_modeling", "data": str(data), "tokens_per_sample": 64, **(task or {})}
    history = [{"criterion_name": "C", "optimizer_name": "O", "num_updates": 1, "lr_scheduler_state": {}}]
    cfg = {"model": {**fields, "_name": architecture}, "task": settings}
    path = folder / "lm.pt"
    torch.save(state(model.state_dict(), optimizer_history=history, cfg=cfg), path)
    return path, data, model


@pytest.mark.parametrize("kind", ["encoder-decoder", "language model"])
def test_an_architecture_that_only_its_user_knows(kind, corpus, tmp_path):
    """Registered where the training was; the checkpoint has every option of the model."""
    path = toys.make_checkpoint(tmp_path / "m.pt", corpus) if kind == "encoder-decoder" else language_model(tmp_path)[0]
    assert lightconv(path, tmp_path / "plugins") == 0
    content = torch.load(path, weights_only=False)
    content["cfg"]["model"]["_name"] = "lightconv_of_a_user"
    torch.save(content, path)
    assert lightconv(path, tmp_path / "users") == 0
    assert torch.equal(log_probabilities(tmp_path / "users"), log_probabilities(tmp_path / "plugins"))
    assert main.main(["convert", str(path), str(tmp_path / "theirs.pt"), "--to", "fairseq"]) == 0


KINDS = [name for name in language_model_toys.EMBEDDINGS if not name.startswith("characters")]


@pytest.mark.parametrize("kind", KINDS)
def test_language_models(kind, tmp_path):
    options = dict(language_model_toys.EMBEDDINGS[kind])
    path, _, model = language_model(tmp_path, **options)
    assert lightconv(path, tmp_path / "m") == 0
    previous = language_model_toys.tokens(2, 9)
    with torch.no_grad():
        ours = load_model(open_exported(tmp_path / "m"))(previous).logits.log_softmax(dim=-1)
        torch.testing.assert_close(ours, language_model_toys.log_probabilities(model, previous), rtol=0, atol=2e-5)
    assert (tmp_path / "m/dict.txt").read_bytes() == (tmp_path / "lm-data/dict.txt").read_bytes()


def test_what_a_language_model_cannot_be_exported_with(tmp_path, capsys):
    for number, (options, task, said) in enumerate([
        (language_model_toys.EMBEDDINGS["characters"], {}, "exported: it has character_embeddings True: embeddings of"),
        ({}, {"add_bos_token": True}, "the training's add_bos_token True cannot be exported"),
        ({}, {"past_target": True}, "the training's past_target True cannot be exported"),
        ({}, {"output_dictionary_size": 20}, "the training's output_dictionary_size 20 cannot be exported"),
        ({}, {"_name": "masked_lm"}, "task is 'masked_lm': only language_modeling and translation can be exported"),
    ]):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        path, *_ = language_model(folder, task=task, **options)
        assert said in refused(capsys, path, folder / "m")
    path, data, _ = language_model(tmp_path)
    assert "--tokenizer is not valid for a language model" in refused(
        capsys, path, tmp_path / "m", "--tokenizer", "moses"
    )
    with (data / "dict.txt").open("a") as file:
        file.write("more 1\n")
    assert "has 30 embeddings, but" in (line := refused(capsys, path, tmp_path / "m")) and "check --data" in line
    (data / "dict.txt").write_text("no number\n")
    assert "cannot be read" in refused(capsys, path, tmp_path / "m")
    (data / "dict.txt").unlink()
    assert "no dictionaries (dict.txt) in" in refused(capsys, path, tmp_path / "m")


def test_what_a_translation_model_cannot_be_exported_with(corpus, tmp_path, capsys):
    path = toys.make_checkpoint(
        tmp_path / "m.pt", corpus, "transformer", quant_noise_pq=0.1, quant_noise_pq_block_size=8
    )
    assert "m.pt cannot be exported: it has quant_noise" in refused(capsys, path, tmp_path / "m")
    path = toys.make_checkpoint(tmp_path / "m.pt", corpus, "transformer", cross_self_attention=True)
    assert "cannot be exported: it has" in (line := refused(capsys, path, tmp_path / "m")) and "cross_self" in line


def test_what_is_wrong_before_anything_is_read(checkpoint, tmp_path, capsys):
    for arguments, said in [
        (["--bleu", "30"], "--bleu and --bleu-signature belong together"),
        (["--bleu", "130", "--bleu-signature", "x"], "--bleu must be in 0 … 100, got 130"),
        (["--bleu", "nan", "--bleu-signature", "x"], "--bleu must be in 0 … 100, got nan"),
        (["--lenpen", "inf"], "--lenpen must be a number, got inf"),
        (["-s", "../de"], "--source-lang must be a name as in dict.NAME.txt, got '../de'"),
        (["-s", "fr"], "has no dict.fr.txt"),
        (["--bpe-codes", "a", "--sentencepiece", "b"], "give --bpe-codes or --sentencepiece, not both"),
        (["--bpe-codes", "nowhere"], "--bpe-codes: no such file: nowhere"),
        (["--bpe-codes", checkpoint], "is not a file of merges"),
    ]:
        assert said in refused(capsys, checkpoint, tmp_path / "m", *arguments)
    assert "no such checkpoint: nowhere.pt" in refused(capsys, "nowhere.pt", tmp_path / "m")
    (tmp_path / "text").write_text("no checkpoint")
    assert "text" in refused(capsys, tmp_path / "text", tmp_path / "m")
    assert "there is no folder" in refused(capsys, checkpoint, tmp_path / "a" / "m")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    assert "mine is not empty, and not an exported model" in refused(capsys, checkpoint, tmp_path / "mine", "--force")
    assert lightconv(checkpoint, tmp_path / "m") == 0
    capsys.readouterr()
    assert "is an exported model already: give --force to replace it" in refused(capsys, checkpoint, tmp_path / "m")
