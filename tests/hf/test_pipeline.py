"""Raw text to raw text: pipelines, and `generate` with the tokeniser."""

import json

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

from lightconv_plugin.checkpoints.exported import open_exported
from tests.hf.models import export_language_model

LINES = ["Ein Hund läuft durch das Gras .", "zwei Hunde", "hunde laufen , ein Hund ."]


def by_hand(exported, **options):
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    decode, known = open_exported(exported).target_text.decode(), open_exported(exported).target
    found = []
    for line in LINES:
        tokens = model.generate(**tokenizer(line, return_tensors="pt"), **options)[0].tolist()
        found.append(decode([known[index] for index in tokens if index not in (0, 1, 2)]))
    return found


def test_translation(exported):
    translate = pipeline("translation", model=str(exported))
    expected = by_hand(exported)
    assert [found["translation_text"] for found in translate(LINES)] == expected
    assert [found["translation_text"] for found in translate(LINES, batch_size=2)] == expected
    assert translate(LINES[1])[0]["translation_text"] == expected[1]
    options = {"num_beams": 2, "max_length": 9}
    expected = by_hand(exported, **options)
    assert [found["translation_text"] for found in translate(LINES, **options)] == expected
    always = pipeline("translation", model=str(exported), **options)
    assert [found["translation_text"] for found in always(LINES)] == expected
    assert [each["translation_text"] for each in translate(LINES, return_dict_in_generate=True, **options)] == expected
    assert translate([]) == always([], batch_size=2) == []
    found = translate(LINES[0], num_return_sequences=3)
    assert len(found) == 3 and found[0]["translation_text"] == by_hand(exported)[0]


def test_a_saved_pipeline_holds_no_code_and_translates(exported, tmp_path):
    translate = pipeline("translation", model=str(exported))
    translate.save_pretrained(tmp_path)
    assert not [*tmp_path.glob("*.py")]
    config = json.loads((tmp_path / "config.json").read_text())
    assert "custom_pipelines" not in config
    custom = {"translation": {"impl": "pipeline.TranslationPipeline", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}}
    for each in (config, config | {"custom_pipelines": custom}):  # the second is what was once written
        (tmp_path / "config.json").write_text(json.dumps(each))
        assert pipeline("translation", model=str(tmp_path))(LINES) == translate(LINES)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_several_translations_of_each_text_of_a_batch(exported, batch_size):
    translate = pipeline("translation", model=str(exported), num_return_sequences=2)
    expected = [translate(line) for line in LINES]
    assert [len(found) for found in expected] == [2, 2, 2]
    assert translate(LINES, batch_size=batch_size) == expected


def test_long_texts_are_cut_off_where_that_is_asked_for(exported):
    translate = pipeline("translation", model=str(exported))
    long, cut = "hund " * 60, "hund " * 39
    assert translate(long, truncation=True) == translate(cut)
    with pytest.raises(ValueError, match="a text must be a str, got int"):
        translate(3)


@pytest.mark.parametrize("option", ["src_lang", "tgt_lang", "clean_up_tokenization_spaces", "return_tensors"])
def test_options_of_version_4_are_refused(exported, option):
    with pytest.raises(ValueError, match=option):
        pipeline("translation", model=str(exported))(LINES[0], **{option: True})


def test_text_generation(tmp_path):
    directory = export_language_model(tmp_path / "model")
    go_on = pipeline("text-generation", model=str(directory))
    for found in go_on(["the dog", "they"], do_sample=False, max_new_tokens=5, batch_size=2):
        text = found[0]["generated_text"]
        assert text.startswith(("the dog", "they")) and len(text.split()) > 2
        known = AutoTokenizer.from_pretrained(directory)
        assert set(text.split()) <= set(known.get_vocab()), "a space separates the prompt from what follows"
