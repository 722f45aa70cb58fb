"""Every released model, from its archive to a translation; the ways in which its name is used."""

import sys
from argparse import Namespace

import pytest
import torch

pytest.importorskip("fairseq", reason="fairseq is not installed")

from fairseq.data import encoders
from fairseq.models.lightconv import LightConvModel

from lightconv_plugin.checkpoints.exported import load_model, open_exported
from lightconv_plugin.generation.translator import Translator
from lightconv_plugin.paths import cache_dir
from lightconv_plugin.released.cache import resolve
from lightconv_plugin.released.models import MODELS
from tests.packaging.installing import copy_of_the_source, install, python
from tests.recipes.data.archive_server import LOCAL

DOWNLOADED = [name for name, model in MODELS.items() if model.archive]


@pytest.mark.parametrize("name", DOWNLOADED)
@torch.no_grad()
def test_every_name_from_its_archive_to_a_translation(name, world, server, home, lightconv, tmp_path):
    model = MODELS[name]
    out, _ = lightconv("released", name, "--url", server.address)
    assert out == f"{home / model.folder}\n"
    exported = open_exported(home / model.folder / "exported")
    assert (exported.settings.source_lang, exported.settings.target_lang) == model.task.pair
    assert (exported.search.num_beams, exported.search.length_penalty) == (model.beam, model.lenpen)
    for side in (exported.source_text, exported.target_text):
        assert side.recipe.lowercase == ("last" if model.task.lowercase else "")
    if model.task.name == "WMT14 En-Fr":  # prepare-wmt14en2fr.sh splits at dashes, like fairseq's own tokeniser
        line = "An old-fashioned house."
        theirs = encoders.build_tokenizer(Namespace(tokenizer="moses", source_lang="en", target_lang="fr"))
        assert exported.source_text.recipe.tokenise()(line) == theirs.encode(line) == "An old @-@ fashioned house ."
    theirs, ours = world.models[model.folder], load_model(exported, "float32")
    source = torch.randint(4, len(exported.source), (2, 9))
    target = torch.randint(4, len(exported.target), (2, 8))
    expected = theirs(source, torch.tensor([9, 9]), target)[0]
    torch.testing.assert_close(ours(source, target).logits, expected, atol=2e-5, rtol=2e-5)
    lines = [line.capitalize() for line in world.texts[model.task.name][model.task.pair[0]][:3]]
    (tmp_path / "in").write_text("\n".join([*lines, ""]), encoding="utf-8")
    lightconv("translate", name, "--input", tmp_path / "in", "--output", tmp_path / "out", "--dtype", "float32")
    with Translator(name, dtype="float32") as translator:
        texts = [one.text for one in translator.translate(lines)]
        assert translator.beam == model.beam
    assert (tmp_path / "out").read_text(encoding="utf-8").splitlines() == texts and all(texts)


HERE = "lightconv.no_glu.iwslt14.de-en"


@pytest.fixture
def cached(server, home, lightconv):
    """`HERE` in the cache, and a server that has nothing any more."""
    lightconv("released", HERE, "--url", server.address)
    server.files.clear()
    return home / MODELS[HERE].folder


def test_fairseqs_from_pretrained_takes_the_name(cached, world):
    """The patch released_models; without it, fairseq would ask upstream's server."""
    sentence = world.texts["IWSLT14 De-En"]["de"][0]
    hub = LightConvModel.from_pretrained(HERE)
    assert type(hub.models[0]).__module__.startswith("lightconv_plugin.")
    with Translator(HERE, dtype="float32") as translator:
        expected = translator.translate([sentence])[0].text
    assert hub.translate(sentence, beam=4) == expected


def test_hugging_face_takes_the_name(cached, world):
    pytest.importorskip("transformers")
    from lightconv_plugin.hf import LightConvForConditionalGeneration, LightConvTokenizer

    tokenizer, model = LightConvTokenizer.from_pretrained(HERE), LightConvForConditionalGeneration.from_pretrained(HERE)
    sentence = world.texts["IWSLT14 De-En"]["de"][0]
    found = model.generate(**tokenizer([sentence], return_tensors="pt"))
    with Translator(cached / "exported", dtype="float32") as translator:
        expected = translator.translate([sentence])[0].text
    assert tokenizer.batch_decode(found, skip_special_tokens=True) == [expected]


def test_a_file_of_that_name_comes_first(cached, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve(HERE) == cached / "exported"
    (tmp_path / HERE).mkdir()
    assert resolve(HERE) == HERE and resolve("owner/name") == "owner/name"


def test_the_cache_without_a_setting_is_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv("LIGHTCONV_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "lightconv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache/lightconv"


@pytest.mark.long
def test_from_a_wheel_in_an_empty_folder(world, server, tmp_path):
    """released → translate → reproduce, as installed, without the checkout."""
    (tmp_path / "source").mkdir()
    installed = install(copy_of_the_source(tmp_path / "source"), tmp_path / "site")
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "empty").mkdir()

    def lightconv(*arguments):
        options = {"path": tmp_path / "site", "cwd": tmp_path / "empty", "python": sys.executable}
        return python("-m", "lightconv_plugin", *arguments, LIGHTCONV_HOME=str(tmp_path / "home"), **LOCAL, **options)

    lightconv("released", HERE, "--url", server.address)
    lines = world.texts["IWSLT14 De-En"]["de"]
    (tmp_path / "in").write_text("\n".join([*lines, ""]), encoding="utf-8")
    lightconv("translate", HERE, "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert len((tmp_path / "out").read_text(encoding="utf-8").splitlines()) == len(lines)
    assert "## Released weights" in lightconv(
        "reproduce", f"released/{HERE}", "--url", server.address, "--results", "results"
    )
    assert (tmp_path / f"empty/results/released/{HERE}.json").is_file()
