"""The classes of transformers against the plain models, in every architecture."""

import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F

from lightconv_plugin.hf import LightConvForCausalLM, LightConvForConditionalGeneration
from lightconv_plugin.modules import MIXERS
from tests.hf.models import EOS, ONE_OF_EACH, PAD, close, language_model, padded, plain, seq2seq, words

NORMS = pytest.mark.parametrize("normalize_before", [False, True])
EACH_MIXER = pytest.mark.parametrize("mixer", MIXERS)


@EACH_MIXER
@NORMS
def test_logits_are_those_of_the_plain_model(mixer, normalize_before):
    options = {"mixer": mixer, "normalize_before": normalize_before}
    model, source, target = seq2seq(**options), words(3, 7), words(3, 5)
    source[1, 5:] = PAD
    found = model(source, decoder_input_ids=target)
    torch.testing.assert_close(found.logits, plain(model)(source, target).logits, rtol=1e-6, atol=1e-6)
    model = language_model(**options)
    torch.testing.assert_close(model(target).logits, plain(model)(target).logits, rtol=1e-6, atol=1e-6)


def test_parameters_have_the_names_of_the_plain_model():
    for model in (seq2seq(share_embeddings=True), seq2seq(mixer=ONE_OF_EACH[:4]), language_model()):
        assert model.state_dict().keys() == plain(model).state_dict().keys()
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain(model).named_parameters()]


@pytest.mark.parametrize("side", ["left", "right"])
@EACH_MIXER
def test_pads_of_the_source_change_nothing(mixer, side):
    model, source, target = seq2seq(mixer=mixer), words(2, 5), words(2, 4)
    expected = model(source, decoder_input_ids=target).logits
    tokens, mask = padded(source, 3, side)
    by_id = model(tokens, decoder_input_ids=target).logits
    by_mask = model(tokens.masked_fill(mask.eq(0), 7), attention_mask=mask, decoder_input_ids=target).logits
    close(by_id, expected)
    close(by_mask, expected)
    encoded = model.get_encoder()(tokens)
    close(model(encoder_outputs=encoded, decoder_input_ids=target).logits, expected)
    seen = model(encoder_outputs=(encoded.last_hidden_state,), attention_mask=mask, decoder_input_ids=target).logits
    close(seen, expected)
    unmasked = model(encoder_outputs=(encoded.last_hidden_state,), decoder_input_ids=target).logits
    assert (unmasked - expected).abs().max() > 1e-3, "the test would not see a mask that is not read"


@pytest.mark.parametrize("side", ["left", "right"])
@EACH_MIXER
def test_pads_of_the_target_change_nothing(mixer, side):
    source, target = words(2, 5), words(2, 4)
    tokens, mask = padded(target, 3, side)
    kept = slice(3, None) if side == "left" else slice(0, 4)
    otherwise = tokens.masked_fill(mask.eq(0), 7)
    model = seq2seq(mixer=mixer)
    expected = model(source, decoder_input_ids=target).logits
    close(model(source, decoder_input_ids=tokens).logits[:, kept], expected)
    close(model(source, decoder_input_ids=otherwise, decoder_attention_mask=mask).logits[:, kept], expected)
    model = language_model(mixer=mixer)
    expected = model(target).logits
    close(model(tokens).logits[:, kept], expected)
    close(model(otherwise, attention_mask=mask.bool()).logits[:, kept], expected)


def test_word_vectors_in_the_place_of_ids():
    model, source, target = seq2seq(), words(2, 5), words(2, 4)
    expected = model(source, decoder_input_ids=target).logits
    vectors = model.get_input_embeddings()(source)
    close(model(inputs_embeds=vectors, decoder_input_ids=target).logits, expected)
    theirs = model.decoder.embed_tokens(target)
    close(model(inputs_embeds=vectors, decoder_inputs_embeds=theirs).logits, expected)
    tokens, mask = padded(source, 2, "left")
    vectors = model.get_input_embeddings()(tokens)
    close(model(inputs_embeds=vectors, attention_mask=mask, decoder_input_ids=target).logits, expected)
    model = language_model()
    close(model(inputs_embeds=model.get_input_embeddings()(target)).logits, model(target).logits)


def test_hidden_states_are_what_layers_read_and_the_last_output():
    model, source, target = seq2seq(normalize_before=True), words(2, 5), words(2, 4)
    found = model(source, decoder_input_ids=target, output_hidden_states=True)
    assert [x.shape for x in found.encoder_hidden_states] == [(2, 5, 16)] * 3
    assert [x.shape for x in found.decoder_hidden_states] == [(2, 4, 16)] * 3
    assert torch.equal(found.encoder_hidden_states[-1], found.encoder_last_hidden_state)
    by_hand = model.encoder.layers[0](found.encoder_hidden_states[0].transpose(0, 1), source.eq(PAD))
    close(by_hand.transpose(0, 1), found.encoder_hidden_states[1])
    last = model.decoder.logits(found.decoder_hidden_states[-1].transpose(0, 1))
    close(last, found.logits)
    step = model(source, decoder_input_ids=target, output_hidden_states=True, use_cache=False)
    for one, other in zip(found.decoder_hidden_states, step.decoder_hidden_states, strict=True):
        close(one, other)


def test_logits_of_some_positions():
    model, tokens = language_model(), words(2, 6)
    logits = model(tokens).logits
    close(model(tokens, logits_to_keep=2).logits, logits[:, -2:])
    close(model(tokens, logits_to_keep=torch.tensor([1, 4])).logits, logits[:, [1, 4]])
    model, source = seq2seq(), words(2, 3)
    expected = model(source, decoder_input_ids=tokens).logits[:, -1:]
    close(model(source, decoder_input_ids=tokens, logits_to_keep=1).logits, expected)


def test_a_tuple_in_the_place_of_an_output():
    model, source, target = seq2seq(), words(2, 5), words(2, 4)
    named = model(source, decoder_input_ids=target, labels=target)
    loss, logits, *_ = model(source, decoder_input_ids=target, labels=target, return_dict=False)
    assert torch.equal(loss, named.loss) and torch.equal(logits, named.logits)
    model_of_words = language_model()
    assert torch.equal(model_of_words(target, return_dict=False)[0], model_of_words(target).logits)
    assert isinstance(model.get_encoder()(source, return_dict=False), tuple)


def test_an_encoders_output_as_a_tuple():
    model, target = seq2seq(), words(2, 4)
    source, mask = padded(words(2, 5), 2, "right")
    expected = model(source, mask, target).logits
    x, hidden, seen = model.get_encoder()(source, mask, output_hidden_states=True, return_dict=False)
    for parts in ((x, seen), (x, hidden, seen), [x, seen]):
        output = model(decoder_input_ids=target, encoder_outputs=parts)
        close(output.logits, expected)
        assert output.encoder_hidden_states is (hidden if len(parts) == 3 else None)
    close(model(attention_mask=mask, decoder_input_ids=target, encoder_outputs=(x,)).logits, expected)
    close(model(attention_mask=mask, decoder_input_ids=target, encoder_outputs=(x, hidden)).logits, expected)


@pytest.mark.parametrize("make", [seq2seq, language_model])
def test_models_can_be_pickled(make):
    model, tokens = make(), words(2, 4)
    given = {"decoder_input_ids": tokens} if make is seq2seq else {}
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens, **given).logits, model(tokens, **given).logits)
    twin = pickle.loads(pickle.dumps(plain(model)))
    assert twin.state_dict().keys() == plain(model).state_dict().keys()


def test_signatures_are_those_that_transformers_expects():
    translation = [*inspect.signature(LightConvForConditionalGeneration.forward).parameters]
    assert translation[1:4] == ["input_ids", "attention_mask", "decoder_input_ids"]
    language = [*inspect.signature(LightConvForCausalLM.forward).parameters]
    assert language[1:3] == ["input_ids", "attention_mask"]
    # `Trainer` takes every argument that has "label" in its name for one.
    assert [name for name in translation if "label" in name] == ["labels"]


def test_the_labels_are_shifted_to_the_right():
    model = seq2seq()
    labels = torch.tensor([[5, 6, EOS, -100], [PAD, -100, 7, EOS], [5, -100, 6, EOS], [-100, -100, PAD, PAD]])
    # Where there is no label it does not matter what is read, but after a gap the word before is not known.
    expected = [[EOS, 5, 6, EOS], [PAD, PAD, EOS, 7], [EOS, 5, PAD, 6], [PAD] * 4]
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == expected
    # On either side of the labels, pads change nothing.
    source = words(1, 5)
    close(model(source, labels=labels[1:2]).loss, model(source, labels=labels[1:2, 2:]).loss)
    close(model(source, labels=labels[:1]).loss, model(source, labels=labels[:1, :3]).loss)


def test_the_loss_is_the_cross_entropy_of_the_labels():
    model, source = seq2seq(), words(2, 5)
    labels = torch.tensor([[5, 6, 7, EOS], [8, EOS, -100, PAD]])
    found = model(source, labels=labels)
    logits = model(source, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels)).logits
    chosen = [(0, 0, 5), (0, 1, 6), (0, 2, 7), (0, 3, EOS), (1, 0, 8), (1, 1, EOS)]
    losses = [-logits.log_softmax(-1)[b, t, word] for b, t, word in chosen]
    close(found.loss, sum(losses) / 6)
    # The Trainer counts the pad, but not -100.
    close(model(source, labels=labels, num_items_in_batch=10).loss, sum(losses) / 6 * 7 / 10)
    close(model(source, labels=labels[:1].expand(2, -1), num_items_in_batch=torch.tensor(10)).loss * 10,
          model(source, labels=labels[:1].expand(2, -1)).loss * 8)  # fmt: skip
    assert model(source, labels=torch.full_like(labels, -100), num_items_in_batch=10).loss == 0
    assert found.past_key_values is None
    model, tokens = language_model(), torch.tensor([[EOS, 5, 6], [EOS, 7, PAD]])
    logits = model(tokens).logits.log_softmax(-1)
    close(model(tokens, labels=tokens).loss, -(logits[0, 0, 5] + logits[0, 1, 6] + logits[1, 0, 7]) / 3)


@pytest.mark.parametrize("masked", [False, True], ids=["ids", "mask"])
def test_the_loss_of_a_left_padded_batch_is_that_of_its_sentences(masked):
    model = language_model()
    texts = [torch.cat([torch.tensor([[EOS]]), words(1, length)], dim=1) for length in (6, 3)]
    sums = [model(text, labels=text, num_items_in_batch=1).loss for text in texts]
    short, mask = padded(texts[1], 3, "left")
    batch, masks = torch.cat([texts[0], short]), torch.cat([torch.ones(1, 7, dtype=mask.dtype), mask])
    given = {"attention_mask": masks} if masked else {}
    close(model(batch, labels=batch, **given).loss, sum(sums) / 9)
    # The Trainer counts the first label of the shorter sentence, too.
    labels = batch.masked_fill(batch.eq(PAD), -100)
    close(model(batch, labels=labels, num_items_in_batch=40, **given).loss, sum(sums) / 9 * 10 / 40)


WRONG = {
    "input_ids or inputs_embeds must be given, got neither": {"decoder_input_ids": words(2, 3)},
    "decoder_input_ids or labels must be given": {"input_ids": words(2, 3)},
    "got both": {"input_ids": words(2, 3), "inputs_embeds": torch.zeros(2, 3, 16), "labels": words(2, 2)},
    "input_ids must be in 0 … 28, got 29": {"input_ids": torch.tensor([[4, 29]]), "labels": words(1, 2)},
    "decoder_input_ids must be in 0 … 28, got -100": {
        "input_ids": words(1, 2),
        "decoder_input_ids": torch.tensor([[-100]]),
    },
    r"input_ids must be of shape \(batch, length\)": {"input_ids": words(2, 3)[0], "labels": words(1, 2)},
    r"attention_mask must be of shape \(2, 3\), got \(2, 4\)": {
        "input_ids": words(2, 3),
        "attention_mask": torch.ones(2, 4),
        "labels": words(2, 2),
    },
    r"decoder_attention_mask must be of shape \(2, 2\)": {
        "input_ids": words(2, 3),
        "decoder_input_ids": words(2, 2),
        "decoder_attention_mask": torch.ones(2, 3),
    },
    "decoder_input_ids is of 3 sequences, the encoder's output of 2": {
        "input_ids": words(2, 3),
        "decoder_input_ids": words(3, 2),
    },
    r"labels must be of shape \(2, 3\)": {
        "input_ids": words(2, 3),
        "decoder_input_ids": words(2, 3),
        "labels": words(2, 2),
    },
    "logits_to_keep is not allowed with labels": {"input_ids": words(2, 3), "labels": words(2, 2), "logits_to_keep": 1},
    "output_attentions=True is not supported": {
        "input_ids": words(2, 3),
        "labels": words(2, 2),
        "output_attentions": True,
    },
    "past_key_values must be a LightConvCache, got tuple": {
        "input_ids": words(2, 3),
        "decoder_input_ids": words(2, 2),
        "past_key_values": ((),),
    },
    r"inputs_embeds must be of shape \(batch, length, channels\)": {
        "inputs_embeds": torch.zeros(2, 3),
        "labels": words(2, 2),
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    with pytest.raises(ValueError, match=message):
        seq2seq()(**WRONG[message])


@pytest.mark.parametrize("make", [seq2seq, language_model])
def test_attentions_that_the_configuration_asks_for_are_refused(make):
    model, tokens = make(output_attentions=True), words(2, 3)
    with pytest.raises(ValueError, match="output_attentions=True is not supported"):
        model(tokens, labels=tokens)
    assert model(tokens, labels=tokens, output_attentions=False).loss is not None
    with pytest.raises(ValueError, match="output_attentions=True is not supported"):
        model.generate(tokens, max_new_tokens=2)


def test_learned_positions_have_an_end():
    model = language_model(positions="learned")
    most = model.decoder.config.max_positions
    assert model(words(1, most), use_cache=False).logits.shape[1] == most
    with pytest.raises(
        ValueError, match=f"a sequence of {most + 1} tokens is longer than the {most} learned positions"
    ):
        model(words(1, 1), past_key_values=model(words(1, most)).past_key_values)


@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_pads_take_no_learned_positions(use_cache):
    model = language_model(positions="learned", max_target_positions=6, mixer="talk")
    tokens, mask = padded(words(2, 5), 3, "left")
    found = model(tokens, attention_mask=mask, use_cache=use_cache)
    close(found.logits[:, 3:], model(tokens[:, 3:]).logits)
    if use_cache:
        last, cache = words(2, 1), found.past_key_values
        model(last, attention_mask=F.pad(mask, (0, 1), value=1), past_key_values=cache)
        with pytest.raises(ValueError, match="a sequence of 7 tokens is longer than the 6 learned positions"):
            model(last, attention_mask=F.pad(mask, (0, 2), value=1), past_key_values=cache)


def test_embeddings_keep_their_size():
    model = seq2seq()
    assert model.resize_token_embeddings() is model.resize_token_embeddings(29) is model.get_input_embeddings()
    with pytest.raises(ValueError, match="new_num_tokens must be 29, got 30"):
        model.resize_token_embeddings(30)
    assert model.resize_token_embeddings(29, pad_to_multiple_of=29) is model.get_input_embeddings()
    with pytest.raises(ValueError, match="pad_to_multiple_of must divide 29, got 8"):
        model.resize_token_embeddings(29, pad_to_multiple_of=8)


def test_the_wrong_class_for_a_configuration():
    with pytest.raises(ValueError, match="config has no encoder: use LightConvForCausalLM"):
        LightConvForConditionalGeneration(language_model().config)
    with pytest.raises(ValueError, match="config has an encoder: use LightConvForConditionalGeneration"):
        LightConvForCausalLM(seq2seq().config)
