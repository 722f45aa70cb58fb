"""An exported directory is a model directory of transformers, and what transformers saves is an exported directory."""

import json
import shutil

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from lightconv_plugin.checkpoints.exported import load_model, open_exported
from lightconv_plugin.generation.translator import Translator
from lightconv_plugin.hf import (
    LightConvConfig,
    LightConvForCausalLM,
    LightConvForConditionalGeneration,
    LightConvTokenizer,
)
from lightconv_plugin.modules import AdaptiveInputConfig, AdaptiveSoftmaxConfig, ModelConfig
from lightconv_plugin.modules.layer import Layer
from tests.checkpoints.export_damage import config as settings
from tests.checkpoints.export_damage import cut, drop, tensors
from tests.hf.models import (
    ENGLISH,
    EOS,
    GERMAN,
    ONE_OF_EACH,
    PAD,
    close,
    config,
    export_language_model,
    export_seq2seq,
    language_model,
    padded,
    plain,
    seq2seq,
    stirred,
    words,
)

WEIGHTS = ["float32", "bfloat16", "float16", "int8"]
VOCABULARY = 4 + len(ENGLISH)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_exported_translation_model(tmp_path, weights):
    # Wide enough for matrices that are worth 8 bits.
    directory = export_seq2seq(tmp_path / "model", weights, d_model=64, ffn_dim=256, mixer=ONE_OF_EACH[:4])
    model = AutoModelForSeq2SeqLM.from_pretrained(directory)
    assert type(model) is LightConvForConditionalGeneration and not model.training
    twin = load_model(open_exported(directory))
    kind = torch.float32 if weights == "int8" else getattr(torch, weights)
    assert {parameter.dtype for parameter in model.parameters()} == {kind}
    for (name, ours), (other, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert name == other and torch.equal(ours, theirs), name
    source, target = words(2, 5, VOCABULARY), words(2, 4, VOCABULARY)
    logits = model(source, decoder_input_ids=target, use_cache=False).logits
    assert torch.equal(logits, twin(source, target).logits)
    known = model.generation_config
    assert (known.num_beams, known.early_stopping, known.max_length, known.forced_eos_token_id) == (5, True, 41, 2)
    assert model.name_or_path == str(directory) and model.can_generate()
    assert model.generate(source, max_length=6).shape[0] == 2


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_exported_language_model(tmp_path, weights):
    directory = export_language_model(tmp_path / "model", weights, d_model=64, ffn_dim=256)
    model, twin = AutoModelForCausalLM.from_pretrained(directory), load_model(open_exported(directory))
    assert type(model) is LightConvForCausalLM
    tokens = words(2, 6, VOCABULARY)
    assert torch.equal(model(tokens, use_cache=False).logits, twin(tokens).logits)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_loading_in_another_type(tmp_path, weights):
    directory = export_seq2seq(tmp_path / "model", weights, d_model=64, ffn_dim=256)
    exact = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
    model = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype="bfloat16")
    assert model.dtype == torch.bfloat16 and exact.dtype == torch.float32
    stored = torch.float32 if weights == "int8" else getattr(torch, weights)
    for name in ("dtype", "torch_dtype"):
        assert LightConvForConditionalGeneration.from_pretrained(directory, **{name: "auto"}).dtype == stored
    source, target = words(2, 5, VOCABULARY), words(2, 4, VOCABULARY)
    found = model(source, decoder_input_ids=target).logits
    assert found.dtype == torch.bfloat16
    expected = exact(source, decoder_input_ids=target).logits
    assert (found.float() - expected).abs().max() < 0.05 * expected.abs().max()
    assert model.generate(source, num_beams=2, max_length=6).shape[0] == 2
    model(source, labels=target).loss.backward()


def test_the_dropout_of_a_loaded_model_is_saved(tmp_path, exported):
    model = AutoModelForSeq2SeqLM.from_pretrained(exported, dropout=0.3)
    assert {layer.dropout_module.p for layer in (*model.encoder.layers, *model.decoder.layers)} == {0.3}
    model.config.dropout = 0.4
    model.save_pretrained(tmp_path)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path).encoder.config.dropout == 0.4


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_arguments_reach_the_configuration(exported, tmp_path, weights):
    directory = export_seq2seq(tmp_path / "model", weights, d_model=64, ffn_dim=256)
    model, info = LightConvForConditionalGeneration.from_pretrained(
        directory, use_cache=False, generation_config=GenerationConfig(num_beams=2), output_loading_info=True
    )
    assert model.config.use_cache is False and model.generation_config.num_beams == 2
    assert not any(info.values())
    given = LightConvConfig.from_pretrained(directory)
    given.truncate_source = True
    assert LightConvForConditionalGeneration.from_pretrained(directory, config=given).config.truncate_source is True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"source_vocab_size": VOCABULARY, "share_embeddings": True}])
def test_what_is_saved_is_an_exported_directory(tmp_path, exported, dtype, options):
    model = seq2seq(
        vocab_size=VOCABULARY,
        **{"source_vocab_size": 4 + len(GERMAN), **options},
        mixer=ONE_OF_EACH[:4],
        source_lang="de",
        target_lang="en",
    ).to(getattr(torch, dtype))
    if options:  # one dictionary for both sides
        (tmp_path / "own").mkdir()
        for name in ("text.json", "source.bpe", "tokenizer_config.json"):
            shutil.copy(exported / name, tmp_path / "own")
        for lang in ("de", "en"):
            shutil.copy(exported / "dict.en.txt", tmp_path / "own" / f"dict.{lang}.txt")
        exported = tmp_path / "own"
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    LightConvTokenizer.from_pretrained(exported).save_pretrained(saved)
    opened = open_exported(saved)
    assert opened.settings.weights == dtype and opened.config == model.config.model_config()
    twin = load_model(opened)
    source, target = words(2, 5, VOCABULARY), words(2, 4, VOCABULARY)
    expected = model(source, decoder_input_ids=target, use_cache=False).logits
    assert torch.equal(twin(source, target).logits, expected)
    again = AutoModelForSeq2SeqLM.from_pretrained(saved)
    assert again.dtype == model.dtype
    assert torch.equal(again(source, decoder_input_ids=target, use_cache=False).logits, expected)
    assert again.config.to_dict() == {**model.config.to_dict(), "_name_or_path": str(saved)}
    if options:
        assert again.encoder.embed_tokens.weight is again.decoder.embed_tokens.weight


def test_an_exported_directory_that_is_saved_again_is_the_same(tmp_path, exported):
    model = AutoModelForSeq2SeqLM.from_pretrained(exported)
    model.save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(exported).save_pretrained(tmp_path / "again")
    before, after = open_exported(exported), open_exported(tmp_path / "again")
    for name in ("config", "settings", "search", "source", "target"):
        assert getattr(before, name) == getattr(after, name), name
    names = ("model.safetensors", "text.json", "dict.de.txt", "dict.en.txt", "source.bpe")
    assert all((exported / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


@pytest.mark.parametrize("make", [export_seq2seq, export_language_model])
def test_another_pad_changes_no_result(make, tmp_path):
    """It is common to use `</s>` as the pad, and trainers put the tokenizer's pad into the configuration."""
    directory = make(tmp_path / "model")
    auto = AutoModelForSeq2SeqLM if make is export_seq2seq else AutoModelForCausalLM
    model, other = auto.from_pretrained(directory), auto.from_pretrained(directory, pad_token_id=EOS)
    tokens, labels = padded(words(2, 5, VOCABULARY), 2, "left")[0], words(2, 7, VOCABULARY)
    labels[0, 3], labels[1, 5:] = EOS, PAD
    expected = model(tokens, labels=labels)
    model.config.pad_token_id = EOS
    for i, each in enumerate((model, other)):
        found, saved = each(tokens, labels=labels), tmp_path / str(i)
        assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
        each.save_pretrained(saved)
        AutoTokenizer.from_pretrained(directory).save_pretrained(saved)
        assert open_exported(saved).config == open_exported(directory).config
        assert torch.equal(auto.from_pretrained(saved)(tokens, labels=labels).logits, expected.logits)


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_shortlist_is_ignored_and_not_saved(weights, tmp_path, monkeypatch):
    monkeypatch.setattr("lightconv_plugin.generation.shortlist._FREQUENT", 0)  # the dictionary has fewer words
    lists = tmp_path / "lists.txt"
    lists.write_text("dog hund 1\n")
    found = []
    for name, shortlist in (("without", None), ("listed", lists)):
        torch.manual_seed(4)
        directory = export_seq2seq(tmp_path / name, weights, d_model=64, ffn_dim=256, shortlist=shortlist)
        model = AutoModelForSeq2SeqLM.from_pretrained(directory)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        batch = tokenizer(["ein hund läuft", "zwei hunde"], return_tensors="pt", padding=True)
        found.append(model.generate(**batch, max_length=9))
    assert torch.equal(*found)
    listed, whole = (Translator(directory, beam=1, shortlist=each) for each in (None, "none"))
    assert listed.translate(["ein hund läuft"]) != whole.translate(["ein hund läuft"]), "it matters where it is used"
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert open_exported(directory).shortlist is not None and open_exported(tmp_path / "saved").shortlist is None
    shutil.copy(directory / "shortlist.txt", tmp_path / "saved")  # what the documentation says to keep it
    settings(shortlist=True)(tmp_path / "saved")
    assert open_exported(tmp_path / "saved").shortlist == tmp_path / "saved/shortlist.txt"


def test_an_8_bit_model_is_saved_with_the_numbers_that_it_computes_with(tmp_path):
    directory = export_seq2seq(tmp_path / "model", "int8", d_model=64, ffn_dim=256)
    model = AutoModelForSeq2SeqLM.from_pretrained(directory)
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["weights"] == "float32"
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


def test_what_no_exported_directory_can_hold_is_not_saved(tmp_path, exported):
    """Nothing is written, so that the older model in the directory is not taken for this one."""
    directory = shutil.copytree(exported, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    model = AutoModelForSeq2SeqLM.from_pretrained(directory)
    with pytest.raises(ValueError, match=r"max_shard_size must be at least [\d,]+ bytes, .* got '20KB'"):
        model.save_pretrained(directory, max_shard_size="20KB")
    with pytest.raises(ValueError, match=r"variant is not supported: .* got 'fp16'"):
        model.save_pretrained(directory, variant="fp16")
    with pytest.raises(ValueError, match=r"weights must be all .* got float64: convert them first"):
        model.double().save_pretrained(directory)
    model.float().encoder.layers[0].fc1.half()
    with pytest.raises(ValueError, match=r"weights must be all .* got float16, float32: convert them first"):
        model.save_pretrained(directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_weights_of_another_type_than_the_models_are_saved(tmp_path, exported):
    directory = shutil.copytree(exported, tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(directory)
    half = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    model.save_pretrained(directory, state_dict=half)
    assert open_exported(directory).settings.weights == "bfloat16"
    assert AutoModelForSeq2SeqLM.from_pretrained(directory).config.weights == "bfloat16"
    model.save_pretrained(tmp_path / "nothing", state_dict={})
    assert model.config.weights == "float32", "DeepSpeed's placeholder"
    assert torch.equal(
        load_model(open_exported(directory)).encoder.layers[0].fc1.weight, half["encoder.layers.0.fc1.weight"]
    )


def test_every_architecture_is_saved_and_loaded(tmp_path):
    """What fairseq's models may have: adaptive input and softmax, learned positions, a norm of the embeddings."""
    stack = config(is_encoder_decoder=False).model_config().as_json()
    stack["decoder_stack"] |= {
        "share_input_output": False,
        "positions": "learned",
        "max_positions": 20,
        "embedding_norm": True,
        "adaptive_input": {"cutoff": [8, 16], "factor": 2.0},
        "adaptive_softmax": {"cutoff": [8, 16], "factor": 2.0, "tie_weights": True, "tie_proj": True, "dropout": 0.0},
    }
    assert isinstance(ModelConfig.of_json(stack).decoder.adaptive_input, AdaptiveInputConfig)
    assert isinstance(ModelConfig.of_json(stack).decoder.adaptive_softmax, AdaptiveSoftmaxConfig)
    model = stirred(LightConvForCausalLM(LightConvConfig(**stack)))
    tokens = words(2, 6)
    close(model(tokens).logits, plain(model)(tokens).logits, 1e-6)
    close(model(tokens).logits.exp().sum(-1), torch.ones(2, 6))
    model.save_pretrained(tmp_path)
    again = LightConvForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert torch.equal(again.generate(tokens, max_new_tokens=4), model.generate(tokens, max_new_tokens=4))
    assert model.get_output_embeddings() is None


def test_the_embeddings_of_both_sides_are_one_parameter():
    model = seq2seq(share_embeddings=True)
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight
    assert "decoder.embed_tokens.weight" not in dict(model.named_parameters())
    labels = words(2, 4)
    model(words(2, 5), labels=labels).loss.backward()
    model.set_input_embeddings(torch.nn.Embedding(29, 16))
    assert model.decoder.embed_tokens is model.get_input_embeddings()
    model.tie_weights()
    assert model.decoder.embed_tokens.weight is model.encoder.embed_tokens.weight


def test_a_new_model_has_the_weights_of_its_constructors():
    torch.manual_seed(5)
    found = LightConvForConditionalGeneration(config(mixer=ONE_OF_EACH[:4]))
    torch.manual_seed(5)
    again = LightConvForConditionalGeneration(config(mixer=ONE_OF_EACH[:4]))
    assert all(torch.equal(*pair) for pair in zip(found.parameters(), again.parameters(), strict=True))
    bound = (6 / (16 + 24)) ** 0.5  # Glorot's
    weight = found.encoder.layers[0].fc1.weight
    assert 0.8 * bound < weight.abs().max() <= bound
    assert not found.decoder.embed_tokens.weight[1].any() and found.decoder.embed_tokens.weight[4:].std() > 0.2


CUT_OFF = cut("model.safetensors", 0.9)
DAMAGED = {
    r"lacks tensors .*: encoder\.layers\.0\.fc1\.bias": drop("encoder.layers.0.fc1.bias"),
    r"has unknown tensors .*: encoder\.extra": lambda d: tensors(d, lambda k: {**k, "encoder.extra": torch.zeros(2)}),
    "is not a safetensors file, or is damaged": CUT_OFF,
    # A vocabulary for which no machine has the memory.
    r"embed_tokens\.weight has shape .* requires \[2147483647, 16\]": settings(encoder_stack__vocab_size=2**31 - 1),
    "format_version must be 1, got 2": settings(format_version=2),
    "vocab_size must be 21 as in the stacks, got 23": settings(vocab_size=23),
    "share_embeddings must be true or false, got 1": settings(share_embeddings=1),
    "is_encoder_decoder must be True as in the stacks": settings(is_encoder_decoder=False),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damaged_directories_are_refused(tmp_path, exported, message):
    directory = shutil.copytree(exported, tmp_path / "model")
    DAMAGED[message](directory)
    with pytest.raises(ValueError, match=message):
        AutoModelForSeq2SeqLM.from_pretrained(directory)


def test_a_damaged_8_bit_directory_is_refused(tmp_path):
    directory = export_seq2seq(tmp_path / "model", "int8", d_model=64, ffn_dim=256)
    CUT_OFF(directory)
    for weights in ("int8", "float32"):
        settings(weights=weights)(directory)
        with pytest.raises(ValueError, match="is not a safetensors file, or is damaged"):
            AutoModelForSeq2SeqLM.from_pretrained(directory)


def test_weights_of_another_size_are_refused(tmp_path, exported):
    directory = shutil.copytree(exported, tmp_path / "model")
    settings(encoder_stack__ffn_dim=32)(directory)
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(ValueError, match=r"encoder\.layers\.0\.fc1\.\w+ has shape"):
            AutoModelForSeq2SeqLM.from_pretrained(directory, **options)


def test_the_auto_classes_know_the_configuration(exported):
    known = AutoConfig.from_pretrained(exported)
    assert type(known) is LightConvConfig
    assert (known.source_lang, known.target_lang, known.max_source_positions) == ("de", "en", 40)
    assert type(AutoModelForSeq2SeqLM.from_config(known)) is LightConvForConditionalGeneration
    assert type(AutoModelForCausalLM.from_config(language_model().config)) is LightConvForCausalLM
    assert type(AutoTokenizer.from_pretrained(exported)) is LightConvTokenizer
    (exported_without := exported.parent / "bare").mkdir()
    for name in ("config.json", "text.json", "dict.de.txt", "dict.en.txt", "source.bpe"):
        shutil.copy(exported / name, exported_without)
    assert type(AutoTokenizer.from_pretrained(exported_without)) is LightConvTokenizer, "by config.json alone"


MIXED = ["attention", "conv", "lightweight", "conv"]  # of the encoder's and the decoder's layers


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_only_an_encoder_can_be_offloaded(shared, tmp_path):
    pytest.importorskip("accelerate")
    model = seq2seq(mixer=MIXED, share_embeddings=shared)
    model.save_pretrained(tmp_path / "model")
    source, target = words(2, 4), words(2, 3)

    def load(**places):
        return LightConvForConditionalGeneration.from_pretrained(
            tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
        )

    parts = {"encoder.embed_tokens": "cpu", "encoder.layers": "disk", "decoder": "cpu"}
    offloaded = load(**parts)
    assert next(offloaded.encoder.layers.parameters()).is_meta
    close(offloaded(source, decoder_input_ids=target).logits, model(source, decoder_input_ids=target).logits)
    assert torch.equal(offloaded.generate(source, max_length=6), model.generate(source, max_length=6))
    layers = {"decoder.embed_tokens": "cpu", "decoder.layers.0": "cpu", "decoder.layers.1": "disk"}
    for decoder in ({"decoder": "disk"}, layers):
        with pytest.raises(ValueError, match=r"device_map must keep the decoder in memory, got a map that offloads"):
            load(encoder="cpu", **decoder)
    assert load(**{"": "meta"}).device.type == "meta"


def test_a_model_on_several_gpus_is_refused(exported, monkeypatch):
    model = LightConvForConditionalGeneration.from_pretrained(exported)
    with FakeTensorMode():
        model.decoder.layers[1].final_layer_norm.weight = torch.nn.Parameter(torch.empty(16, device="cuda:1"))
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *args, **options: (model, {}))
    with pytest.raises(ValueError, match=r"got a map with cpu and cuda:1: give device_map=\{'': 'cpu'\}"):
        LightConvForConditionalGeneration.from_pretrained(exported, device_map="auto")


@pytest.mark.parametrize("make", [seq2seq, language_model])
def test_fsdp_shards_each_layer(make):
    accelerate = pytest.importorskip("accelerate")
    shards = accelerate.FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    shards.set_auto_wrap_policy(make(mixer="lightweight"))
    assert shards.auto_wrap_policy.keywords["transformer_layer_cls"] == {Layer}
