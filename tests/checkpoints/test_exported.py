"""Exported models: what is written is what is read, in every type and of every kind of model. Without fairseq."""

import json
import sys

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors import safe_open
from safetensors.torch import load_file

from lightconv_plugin.checkpoints.exported import SearchDefaults, load_model, load_tensors, open_exported, skeleton
from lightconv_plugin.checkpoints.weights import DTYPES, Int8, quantise, quantised_names
from lightconv_plugin.errors import InputError
from lightconv_plugin.generation import Translator
from lightconv_plugin.modules import MIXERS
from tests import programs
from tests.checkpoints import exports

SOURCE, TARGET = torch.tensor([[5, 9, 7, 2], [8, 2, 1, 1]]), torch.tensor([[2, 6, 11], [2, 4, 1]])
CONFIGS = {
    **{kind: exports.pair(kind) for kind in MIXERS},
    "norm before": exports.pair(normalize_before=True, final_norm=True),
    "learned positions": exports.pair(positions="learned", embedding_norm=True),
    "no positions": exports.pair("lightweight", positions="none", activation="gelu"),
    "language model": exports.language_model("talk", normalize_before=True),
    "adaptive": exports.language_model("lightweight", adaptive=True, normalize_before=True),
    "input and output projections": exports.language_model(
        input_dim=64, output_dim=64, share_input_output=True, output_bias=True
    ),
}


def logits(model):
    with torch.no_grad():
        return (model(TARGET) if model.config.encoder is None else model(SOURCE, TARGET)).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name, tmp_path):
    model = exports.build_model(CONFIGS[name])
    found = open_exported(exports.export(tmp_path / "m", model))
    assert found.config == model.config
    again = load_model(found)
    ours, theirs = (dict(one.named_parameters()) for one in (model, again))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in ours.items())
    assert torch.equal(logits(model), logits(again))
    assert not again.training and not [*again.named_buffers()]
    assert all(parameter.requires_grad and parameter.device.type == "cpu" for parameter in again.parameters())


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("wanted", [None, *DTYPES])
def test_types(weights, wanted, tmp_path):
    model = exports.build_model(exports.pair())
    found = open_exported(exports.export(tmp_path / "m", model, weights=weights))
    again = load_model(found, wanted)
    for (name, parameter), after in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter.to(DTYPES[weights]).to(after.dtype), after), name
        assert after.dtype == DTYPES[wanted or weights]
    assert load_model(found, torch.bfloat16).decoder.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", [*MIXERS, "learned positions", "adaptive", "language model"])
def test_8_bits(name, tmp_path):
    """Every matrix is within half a step of its row's scale; everything else is exact."""
    model = exports.build_model(CONFIGS[name])
    found = open_exported(exports.export(tmp_path / "m", model, weights="int8"))
    stored, again = load_tensors(found), dict(load_model(found).named_parameters())
    small = quantised_names(model)
    assert stored.keys() == again.keys() and small == {n for n, value in stored.items() if isinstance(value, Int8)}
    assert any(n.endswith("fc1.weight") for n in small) and not any("norm" in n or "conv." in n for n in small)
    for n, parameter in model.named_parameters():
        after = again[n]
        if n not in small:
            assert torch.equal(parameter, after), n
            continue
        scale = parameter.abs().amax(dim=1) / 127
        torch.testing.assert_close(stored[n].scale, scale)
        assert stored[n].weight.dtype == torch.int8 and int(stored[n].weight.abs().max()) == 127
        assert bool(((parameter - after).abs() <= scale.unsqueeze(1) * 0.5001).all()), n
    size, whole = (tmp_path / "m" / "model.safetensors").stat().st_size, sum(p.numel() for p in model.parameters()) * 4
    assert size < whole * (0.75 if name in ("adaptive", "conv") else 0.4)
    error = (logits(model) - logits(load_model(found))).norm() / logits(model).norm()
    assert 0 < float(error) < 0.03


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_parameters_are_written_alike_whatever_their_layout_in_memory(weights, tmp_path):
    model = exports.build_model(exports.pair())
    fc1, written = model.encoder.layers[0].fc1, []
    for weight in (fc1.weight.detach(), fc1.weight.detach().t().contiguous().t()):
        fc1.weight = torch.nn.Parameter(weight)
        directory = exports.export(tmp_path / "m", model, weights=weights, force=True)
        written.append((directory / "model.safetensors").read_bytes())
    assert written[0] == written[1]


def test_8_bits_of_rows_that_have_no_scale():
    matrix = torch.zeros(4, 5)
    matrix[1] = 1e-44  # smaller than any scale can be
    matrix[2, 0], matrix[3] = -3.0, 1e30
    found = quantise(matrix)
    assert found.scale.isfinite().all() and (found.scale > 0).all()
    assert found.weight.tolist() == [[0] * 5, [0] * 5, [-127, 0, 0, 0, 0], [127] * 5]
    torch.testing.assert_close(found.dequantise(), matrix)


def test_shared_embeddings_are_stored_once(tmp_path):
    config = exports.pair()
    config = exports.ModelConfig(config.decoder, config.encoder, share_embeddings=True)
    model = exports.build_model(config)
    exports.export(tmp_path / "m", model)
    names = load_file(tmp_path / "m/model.safetensors").keys()
    assert {"encoder.embed_tokens.weight"} == {name for name in names if "embed_tokens" in name}
    assert names == {name for name, _ in model.named_parameters()}
    again = load_model(open_exported(tmp_path / "m"))
    assert again.encoder.embed_tokens.weight is again.decoder.embed_tokens.weight
    assert torch.equal(logits(model), logits(again))


def test_the_files_are_those_of_the_format(tmp_path):
    exports.export(tmp_path / "m", search=SearchDefaults(num_beams=4, length_penalty=1.3), truncate_source=True)
    files = {path.name for path in (tmp_path / "m").iterdir()}
    assert files == {
        "README.md", "config.json", "dict.de.txt", "dict.en.txt", "generation_config.json", "model.safetensors",
        "source.bpe", "text.json", "tokenizer_config.json",
    }  # fmt: skip
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert config.pop("encoder_stack")["mixers"][0]["kind"] == "dynamic"
    assert config.pop("decoder_stack")["encoder_dim"] == exports.DIM
    assert config == {
        "model_type": "lightconv", "architectures": ["LightConvForConditionalGeneration"], "format_version": 1,
        "is_encoder_decoder": True, "decoder_start_token_id": 2, "vocab_size": exports.WORDS,
        "tie_word_embeddings": True, "dtype": "float32", "weights": "float32", "source_lang": "de",
        "target_lang": "en", "truncate_source": True, "max_source_positions": 64, "max_target_positions": 64,
        "share_embeddings": False, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "unk_token_id": 3,
    }  # fmt: skip
    assert json.loads((tmp_path / "m/generation_config.json").read_text()) == {
        "num_beams": 4, "length_penalty": 1.3, "early_stopping": True, "max_length": 65, "min_length": 2,
        "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2,
        "forced_eos_token_id": 2, "suppress_tokens": [1],
    }  # fmt: skip
    with safe_open(tmp_path / "m/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (tmp_path / "m/dict.de.txt").read_bytes() == exports.dictionary()
    assert (tmp_path / "m/source.bpe").read_text() == exports.MERGES
    assert json.loads((tmp_path / "m/tokenizer_config.json").read_text())["tokenizer_class"] == "LightConvTokenizer"
    assert (tmp_path / "m/model.safetensors").stat().st_mode == (tmp_path / "m/config.json").stat().st_mode


def test_a_shortlist_is_one_more_file(tmp_path):
    """And nothing else changes but config.json and the card, so that older versions read the rest."""
    model, file = exports.build_model(exports.pair()), exports.shortlist(tmp_path)
    without, listed = exports.export(tmp_path / "m", model), exports.export(tmp_path / "n", model, shortlist=file)
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (without, listed)]
    assert files[1].pop("shortlist.txt") == file.read_bytes()
    assert files[0].keys() == files[1].keys()
    assert {name for name in files[0] if files[0][name] != files[1][name]} == {"config.json", "README.md"}
    configs = [json.loads(some["config.json"]) for some in files]
    assert configs[1] == {**configs[0], "shortlist": True}
    assert (open_exported(without).shortlist, open_exported(listed).shortlist) == (None, listed / "shortlist.txt")
    (without / "shortlist.txt").write_bytes(file.read_bytes())
    assert open_exported(without).shortlist is None, "config.json says whether it has one"


def test_a_language_model_has_no_shortlist(tmp_path):
    exports.export(tmp_path / "m", exports.build_model(exports.language_model()))
    exports.change(tmp_path / "m/config.json", shortlist=True)
    with pytest.raises(InputError, match=r"config\.json: shortlist must be false for a model without an encoder_stack"):
        open_exported(tmp_path / "m")


def test_the_files_of_a_language_model(tmp_path):
    exports.export(tmp_path / "m", exports.build_model(exports.language_model()), weights="int8")
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert config["architectures"] == ["LightConvForCausalLM"] and config["is_encoder_decoder"] is False
    assert (config["dtype"], config["weights"], config["source_lang"]) == ("float32", "int8", None)
    generation = json.loads((tmp_path / "m/generation_config.json").read_text())
    assert generation["num_beams"] == 1 and "early_stopping" not in generation and "length_penalty" not in generation
    text = json.loads((tmp_path / "m/text.json").read_text())
    assert text["source"] is None and text["target"]["file"] is None
    found = open_exported(tmp_path / "m")
    assert found.source is None and found.source_text is None and len(found.target) == exports.WORDS


def test_what_is_read_beside_the_parameters(tmp_path):
    found = open_exported(exports.export(tmp_path / "m", search=SearchDefaults(7, 0.6, 3)))
    assert found.search == SearchDefaults(7, 0.6, 3, max_length=65, min_length=2)
    assert (found.settings.source_lang, found.settings.target_lang) == ("de", "en")
    assert found.source.index("w3") == found.target.index("v3") == 7
    assert found.source_text.encode()("The dog") == ["the", "dog"]
    assert found.source_text.encode()("other") == ["o@@", "th@@", "e@@", "r"]
    assert found.target_text.decode()(["do@@", "g", "&apos;s", "."]) == "dog's."
    (tmp_path / "m/generation_config.json").unlink()  # as models without one are in transformers
    assert open_exported(tmp_path / "m").search == SearchDefaults()


def test_settings_that_only_transformers_has_are_noted(tmp_path):
    assert open_exported(exports.export(tmp_path / "m")).notes == ()
    path = tmp_path / "m/generation_config.json"
    exports.change(path, do_sample=False, repetition_penalty=1.0, bad_words_ids=None, temperature=0.5, max_new_tokens=9)
    exports.change(path, eos_token_id=[2])
    found = open_exported(tmp_path / "m")
    assert (found.notes, found.search.max_length) == ((), 10)
    exports.change(path, do_sample=True, repetition_penalty=1.2, suppress_tokens=[1, 7], eos_token_id=[2, 9])
    exports.change(path, decoder_start_token_id=0, max_time=3.0)
    with Translator(tmp_path / "m") as translator:
        assert translator.notes == tuple(
            f"generation_config.json has {name}, which the search of `Translator` lacks"
            for name in (
                *("do_sample", "repetition_penalty", "max_time"),
                *("suppress_tokens", "eos_token_id", "decoder_start_token_id"),
            )
        )


@pytest.mark.parametrize(("beams", "value", "noted"), [(4, "never", 1), (4, False, 1), (4, None, 0), (1, False, 0)])
def test_another_end_of_the_search_is_noted(beams, value, noted, tmp_path):
    """With one beam, it changes nothing."""
    exports.export(tmp_path / "m")
    exports.change(tmp_path / "m/generation_config.json", num_beams=beams, early_stopping=value)
    note = "generation_config.json has early_stopping other than true, which the search of `Translator` lacks"
    assert open_exported(tmp_path / "m").notes == (note,) * noted


def test_training_on_changes_no_file(tmp_path):
    """The parameters are mapped: what is written to them stays in this process."""
    exports.export(tmp_path / "m")
    path = tmp_path / "m/model.safetensors"
    before = path.read_bytes()
    model = load_model(open_exported(tmp_path / "m"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(SOURCE, TARGET, labels=TARGET).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert path.read_bytes() == before
    assert torch.equal(load_model(open_exported(tmp_path / "m")).decoder.embed_tokens.weight.detach(),
                       load_file(path)["decoder.embed_tokens.weight"])  # fmt: skip


def test_a_skeleton_has_the_parameters_and_no_memory():
    model = exports.build_model(exports.pair("talk"))
    made = skeleton(model.config)
    shapes = {name: parameter.shape for name, parameter in made.named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in model.named_parameters()}
    assert all(parameter.is_meta for parameter in made.parameters())


def test_opening_and_loading_import_neither_fairseq_nor_what_is_slow(tmp_path):
    """torch takes most of the seconds that a start may take; torch 2.6's own torch.utils.checkpoint imports sympy."""
    exports.export(tmp_path / "m", weights="int8")
    code = (
        "import sys, torch.utils.checkpoint; before = {*sys.modules}\n"
        "from lightconv_plugin.checkpoints.exported import open_exported, load_model\n"
        f"load_model(open_exported({str(tmp_path / 'm')!r}))\n"
        "slow = {'fairseq', 'hydra', 'omegaconf', 'transformers', 'sympy', 'subword_nmt', 'torch._refs.special'}\n"
        "print(sorted(slow & ({*sys.modules} - before)))"
    )
    assert programs.run(sys.executable, "-c", code).stdout == "[]\n"


def test_another_type_is_refused(tmp_path):
    found = open_exported(exports.export(tmp_path / "m"))
    for dtype in ("int8", torch.int8, "float64", torch.float64):
        with pytest.raises(InputError, match="`dtype` must be one of float32, bfloat16, float16, got"):
            load_model(found, dtype)
