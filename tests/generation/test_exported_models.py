"""Translating with exported directories: as with the checkpoints that they came from, and without fairseq."""

import json
import os
import shutil
import sys

import pytest

pytest.importorskip("fairseq")

from lightconv_plugin.cli import main
from lightconv_plugin.errors import TranslationError
from lightconv_plugin.generation.translator import Translator
from lightconv_plugin.text.sides import TextSide
from tests import programs
from tests.checkpoints.exports import change
from tests.generation import translation_toys as toys

LINES = toys.lines(7, seed=4)
SHORT = {"max_len_b": 20}


@pytest.fixture(scope="module")
def made(checkpoints, tmp_path_factory):
    """name → (checkpoint, its exported directory): to be read only."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    for name in ("dynamicconv", "talkconv", "transformer"):
        assert main.main(["export", str(checkpoints[name]), str(folder / name), "--lenpen", "0.8"]) == 0
        found[name] = checkpoints[name], folder / name
    assert main.main(["export", str(found["dynamicconv"][0]), str(folder / "int8"), "--dtype", "int8"]) == 0
    return {**found, "int8": (found["dynamicconv"][0], folder / "int8")}


def results(translator):
    with translator:
        return [[(h.text, h.tokens, h.score) for h in found.hypotheses] for found in translator.translate(LINES, 3)]


def same(found, expected):
    assert [[h[:2] for h in ranked] for ranked in found] == [[h[:2] for h in ranked] for ranked in expected]
    for ranked, others in zip(found, expected, strict=True):
        assert [h[2] for h in ranked] == pytest.approx([h[2] for h in others], abs=1e-4)


@pytest.mark.parametrize("name", ["dynamicconv", "talkconv", "transformer"])
def test_translates_as_its_checkpoint(made, name):
    checkpoint, directory = made[name]
    same(results(Translator(directory, **SHORT)), results(Translator(checkpoint, lenpen=0.8, **SHORT)))
    same(
        results(Translator(directory, beam=4, lenpen=1.5, **SHORT)),
        results(Translator(checkpoint, beam=4, lenpen=1.5, **SHORT)),
    )


def test_eight_bits_are_searched_in_eight_bits(made):
    """The weights are rounded once: by the export as by the search."""
    checkpoint, directory = made["int8"]
    same(results(Translator(directory, **SHORT)), results(Translator(directory, dtype="int8", **SHORT)))
    float32 = results(Translator(checkpoint, **SHORT))
    assert results(Translator(directory, **SHORT)) != float32


def test_eight_bits_without_the_kernels_are_searched_in_float32(made, no_kernels):
    with Translator(made["int8"][1], **SHORT) as translator:
        assert (translator.dtype, len(translator.translate(LINES))) == ("float32", len(LINES))
        assert no_kernels in translator.dtype_reason
    with pytest.raises(TranslationError, match=f'{no_kernels}.*: use "float32" or "bfloat16"'):
        Translator(made["int8"][1], dtype="int8", **SHORT)


def test_an_ensemble(made):
    paths = [[made[name][kind] for name in ("dynamicconv", "transformer")] for kind in (0, 1)]
    same(results(Translator(paths[1], **SHORT)), results(Translator(paths[0], lenpen=0.8, **SHORT)))


def test_an_ensemble_takes_sources_that_all_of_its_models_take(made, tmp_path):
    short = shutil.copytree(made["dynamicconv"][1], tmp_path / "short")
    change(short / "config.json", max_source_positions=16)
    with Translator([made["dynamicconv"][1], short]) as translator:
        assert translator.translate(["haus " * 20])[0].problem.endswith("the model takes 15")


def test_without_fairseq(made):
    """A process in which fairseq cannot be imported, and its modules' neighbours neither."""
    program = (
        "import sys\nfor name in ('fairseq', 'hydra', 'omegaconf'): sys.modules[name] = None\n"
        "from lightconv_plugin.cli import main\nsys.exit(main.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "translate", made["dynamicconv"][1], "--max-len-b", 20]
    done = programs.run(*command, input="\n".join(LINES) + "\n", OMP_NUM_THREADS=1)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [ranked[0][0] for ranked in results(Translator(made["dynamicconv"][1], **SHORT))]


def test_what_does_not_go_together_is_said(made, tmp_path):
    checkpoint, directory = made["dynamicconv"]
    with pytest.raises(TranslationError, match=r"`path` must be directories or checkpoints, not both: got .* and "):
        Translator([directory, checkpoint])
    with pytest.raises(TranslationError, match=r"`bpe_codes` is for checkpoints only: .* is exported"):
        Translator(directory, bpe_codes="codes")
    with pytest.raises(TranslationError, match=r"`source_lang` is fr, but .* translates with source_lang de"):
        Translator(directory, source_lang="fr")
    with pytest.raises(TranslationError, match=r"no such checkpoint or exported directory: .*nothing"):
        Translator(tmp_path / "nothing")
    with pytest.raises(TranslationError, match=r"config\.json"):
        Translator(tmp_path)
    cut = shutil.copytree(directory, tmp_path / "cut") / "model.safetensors"
    os.truncate(cut, cut.stat().st_size // 2)
    with pytest.raises(TranslationError, match=r"model\.safetensors"):
        Translator(tmp_path / "cut")
    one = toys.make_corpus(tmp_path / "shared")  # one dictionary for both languages
    (one / "dict.en.txt").write_bytes((one / "dict.de.txt").read_bytes())
    back = {"source_lang": "en", "target_lang": "de"}
    ways = [toys.make_checkpoint(tmp_path / f"{n}.pt", one, task=task) for n, task in enumerate(({}, back))]
    for n, path in enumerate(ways):
        assert main.main(["export", str(path), str(tmp_path / f"{n}")]) == 0
    with pytest.raises(TranslationError, match=r"0 translates with source_lang de, .*1 with en: they cannot form an"):
        Translator([tmp_path / "0", tmp_path / "1"])
    with pytest.raises(TranslationError, match=r"0\.pt was trained with source_lang de, .*1\.pt with en: they cannot"):
        Translator(ways)
    other = toys.make_corpus(tmp_path / "other")
    dictionary = other / "dict.en.txt"
    dictionary.write_text("one 1\n" + dictionary.read_text(encoding="utf-8"), encoding="utf-8")
    path = toys.make_checkpoint(tmp_path / "other.pt", other)
    assert main.main(["export", str(path), str(tmp_path / "exported")]) == 0
    with pytest.raises(TranslationError, match="have different dictionaries: they cannot"):
        Translator([directory, tmp_path / "exported"])


def test_an_open_model_scores_without_its_directory(made, tmp_path, monkeypatch):
    """As its search, which has read everything. The target's merges are parsed once, and only where one scores."""
    parsed, encode = [], TextSide.encode
    monkeypatch.setattr(TextSide, "encode", lambda side, *content: parsed.append(side) or encode(side, *content))
    directory = shutil.copytree(made["dynamicconv"][1], tmp_path / "m")
    pairs = ["Zwei Hunde."], ["Two dogs."]
    with Translator(directory) as translator, Translator(directory) as other:
        assert len(parsed) == 2
        expected = other.score(*pairs)
        shutil.rmtree(directory)
        assert translator.score(*pairs) == translator.score(*pairs) == expected
        assert len(parsed) == 4


def test_merges_of_the_target_that_are_none_are_an_error_of_scoring(made, tmp_path):
    directory = shutil.copytree(made["dynamicconv"][1], tmp_path / "m")
    text = json.loads((directory / "text.json").read_text(encoding="utf-8"))
    text["target"]["file"] = "damaged.bpe"
    (directory / "text.json").write_text(json.dumps(text), encoding="utf-8")
    (directory / "damaged.bpe").write_bytes(b"a b c\n")
    with Translator(directory, **SHORT) as translator:
        assert translator.translate(LINES[:1])[0].text
        for _ in range(2):
            with pytest.raises(TranslationError, match=r"damaged\.bpe is not a file of merges"):
                translator.score(["Zwei Hunde."], ["Two dogs."])


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "give a model: an exported directory, a checkpoint, or a name of lightconv released"),
        (["{directory}", "{checkpoint}"], "MODEL must be directories or checkpoints, not both: got "),
    ],
)
def test_the_command_wants_one_kind_of_model(made, capsys, arguments, said):
    checkpoint, directory = made["dynamicconv"]
    assert (
        main.main(["translate", *(word.format(checkpoint=checkpoint, directory=directory) for word in arguments)]) == 2
    )
    assert said in capsys.readouterr().err
