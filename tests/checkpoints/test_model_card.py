"""The model card of an exported model: YAML that the hub reads, and nothing that nobody knows."""

from dataclasses import replace

import pytest

pytest.importorskip("safetensors")

from lightconv_plugin.checkpoints.exported import SearchDefaults
from lightconv_plugin.checkpoints.model_card import ModelCard, Score
from lightconv_plugin.modules import AdaptiveSoftmaxConfig
from tests.checkpoints import exports

HARD = 'a "model": of\t#1 | `x`\\ $(touch executed) – läuft'


def card(directory, config=None, **options):
    model = exports.build_model(config or exports.pair())
    exports.export(directory, model, **options)
    return (directory / "README.md").read_text(encoding="utf-8")


def front_matter(text):
    yaml = pytest.importorskip("yaml")
    begin, matter, rest = text.split("---\n", 2)
    assert begin == ""
    return yaml.safe_load(matter), rest


@pytest.mark.parametrize("name", ["model", HARD, "no: yes", "123", "a\nb", "-rf"])
def test_the_front_matter_is_yaml_under_any_name(name, tmp_path):
    score = Score("BLEU", 31.25, "nrefs:1|case:lc|tok:13a", "test")
    known, rest = front_matter(card(tmp_path / name, card=ModelCard("A corpus: of #1", "a|b.pt", score)))
    shown = name.replace("\n", "\\n").replace("\t", "\\t")
    assert {key: known[key] for key in known if key != "model-index"} == {
        "language": ["de", "en"], "license": "other", "license_name": "not-chosen-yet",
        "library_name": "lightconv-plugin", "pipeline_tag": "translation",
        "tags": ["translation", "lightconv", "dynamic"],
    }  # fmt: skip
    (index,) = known["model-index"]
    assert index["name"] == shown
    (result,) = index["results"]
    assert result["task"] == {"type": "translation"}
    assert result["dataset"] == {"name": "A corpus: of #1", "type": "unknown", "split": "test"}
    assert result["metrics"] == [{"type": "bleu", "value": 31.25, "name": "nrefs:1|case:lc|tok:13a"}]
    assert rest.startswith(f"\n# {shown}\n") and "| exported from | `a\\|b.pt` |" in rest


@pytest.mark.parametrize("name", ["model", HARD])
def test_the_library_of_the_hub_reads_it(name, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    score = Score("BLEU", 31.25, "nrefs:1|case:lc|tok:13a", "test")
    card(tmp_path / name, card=ModelCard("A corpus", "a.pt", score))
    read = hub.ModelCard.load(tmp_path / name / "README.md")
    assert read.data.language == ["de", "en"] and read.data.license == "other"
    (result,) = read.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("bleu", 31.25, "test")


def test_what_it_says(tmp_path):
    text = card(tmp_path / "a model", weights="int8", search=SearchDefaults(4, 0.6))
    for said in (
        "A translation model from de to en with ",
        "| encoder | 2 layers of dynamic, d = 128, FFN 144, 160 entries |",
        "| weights | int8 |",
        "`pip install '.[text]'` in a checkout, or `pip install 'FILE.whl[text]'`",
        "lightconv translate 'a model' < in.de",
        "With beam 4 and length penalty 0.6.",
        'Translator("a model")',
        "To be written: what the model was trained on.",
        "To be written: no score was given.",
        "To be written: the owner of the model chooses a licence",
        "arxiv.org/abs/1901.10430",
    ):
        assert said in text, said
    assert "model-index" not in text and "shortlist" not in text


@pytest.mark.parametrize(
    ("weights", "subset", "said"),
    [
        ("int8", "test", "BLEU 31.25 on test of the checkpoint, not of these int8 weights, sacreBLEU's signature `x`."),
        ("float32", "test", "BLEU 31.25 on test, sacreBLEU's"),
        ("int8", None, "BLEU 31.25, sacreBLEU's"),  # given by the user
    ],
)
def test_the_score_of_a_checkpoint_is_not_that_of_rounded_weights(weights, subset, said, tmp_path):
    assert said in card(tmp_path / "m", weights=weights, card=ModelCard(score=Score("BLEU", 31.25, "x", subset)))


def test_a_model_that_only_transformers_translates_with(tmp_path):
    """`lightconv translate` refuses an adaptive softmax."""
    adaptive = {"adaptive_softmax": AdaptiveSoftmaxConfig((40, 100), 2.0), "share_input_output": False}
    config = replace(exports.pair(), decoder=replace(exports.pair().decoder, **adaptive))
    text = card(tmp_path / "m", config)
    assert "lightconv translate" not in text and "Translator" not in text
    assert "AutoModelForSeq2SeqLM" in text and "pip install '.[hf]'" in text


def test_a_shortlist(tmp_path):
    text = card(tmp_path / "m", shortlist=exports.shortlist(tmp_path))
    for said in (
        "| shortlist | `shortlist.txt` |",
        "length penalty 1, among the words that `shortlist.txt` lists (`--shortlist none`: all words). From Python:",
        "transformers (`[hf]` instead of `[text]`), which does not use the shortlist:",
    ):
        assert said in text, said


def test_mixtures_and_language_models(tmp_path):
    mixers = tuple(exports.mixer(kind, causal=True) for kind in ("talk", "attention"))
    config = exports.ModelConfig(exports.stack(mixers=mixers))
    known, rest = front_matter(card(tmp_path / "m", config, card=ModelCard(score=Score("perplexity", 12.5))))
    assert known["pipeline_tag"] == "text-generation" and "language" not in known
    assert known["tags"] == ["text-generation", "lightconv", "talk", "attention"]
    assert "2 layers of talk, attention, d = 128" in rest and "AutoModelForCausalLM" in rest
    assert "perplexity 12.50." in rest and "2002.03184" in rest and "1901.10430" not in rest
    assert "lightconv translate" not in rest
