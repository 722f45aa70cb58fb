"""PEFT adapters of models with 8-bit weights."""

import json
import re
import shutil

import pytest
from transformers import AutoModelForSeq2SeqLM

from lightconv_plugin.hf import LightConvForConditionalGeneration, weights
from tests.hf.models import ENGLISH, close, export_seq2seq, words

VOCABULARY = 4 + len(ENGLISH)


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """A directory that names the 8-bit model that it adapts; peft need not be installed."""
    monkeypatch.setattr(weights, "is_peft_available", lambda: True)
    directory, model = tmp_path / "adapter", export_seq2seq(tmp_path / "model", "int8", d_model=64, ffn_dim=256)
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
    return directory


def test_an_adapter_of_an_8_bit_model_is_refused(tmp_path, adapter):
    """transformers would take the 8-bit numbers for weights, or leave the adapter out, and say nothing."""
    model = tmp_path / "model"
    inside = shutil.copytree(model, tmp_path / "inside")
    shutil.copy(adapter / "adapter_config.json", inside)
    of_auto_class = {"adapter_kwargs": {"_adapter_model_path": str(adapter)}}
    for path, options, base in ((adapter, {}, model), (inside, {}, inside), (model, of_auto_class, model)):
        added = adapter if path == model else path
        said = f"{base} has 8-bit weights: load it first, and then its adapter, model.load_adapter('{added}')"
        with pytest.raises(ValueError, match=re.escape(said)):
            LightConvForConditionalGeneration.from_pretrained(path, **options)
    LightConvForConditionalGeneration.from_pretrained(model)  # which has none


def test_revision_and_folder_of_an_adapter_are_not_those_of_its_model(tmp_path, adapter, monkeypatch):
    asked = []

    def find(path, **places):
        asked.append((path, places))
        return str(adapter / "adapter_config.json")

    monkeypatch.setattr(weights, "find_adapter_config_file", find)
    places = {"revision": "v2", "subfolder": "adapters", "cache_dir": "here"}
    found = weights._adapted("someone/adapter", {**places, "config": None})
    assert asked == [("someone/adapter", places)]
    assert found == ("someone/adapter", str(tmp_path / "model"), {"cache_dir": "here", "config": None})


def test_an_adapter_of_an_8_bit_model_is_loaded_after_it(tmp_path):
    peft = pytest.importorskip("peft")
    model, adapter = export_seq2seq(tmp_path / "model", "int8", d_model=160), tmp_path / "adapter"
    adapted = AutoModelForSeq2SeqLM.from_pretrained(model)
    adapted.add_adapter(peft.LoraConfig(target_modules=["fc1"], init_lora_weights=False))
    adapted.save_pretrained(adapter)
    for kind in (AutoModelForSeq2SeqLM, LightConvForConditionalGeneration):
        with pytest.raises(ValueError, match=r"model\.load_adapter\('.*adapter'\)"):
            kind.from_pretrained(adapter)
    inside = shutil.copytree(model, tmp_path / "inside")
    shutil.copytree(adapter, inside, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"model\.load_adapter\('.*inside'\)"):
        LightConvForConditionalGeneration.from_pretrained(inside)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(model)
    loaded.load_adapter(str(adapter))
    source, target = words(2, 4, VOCABULARY), words(2, 3, VOCABULARY)
    close(loaded(source, decoder_input_ids=target).logits, adapted(source, decoder_input_ids=target).logits)
