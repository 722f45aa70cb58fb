"""Step by step with a cache is the same as all at once; its rows follow the beams."""

import copy

import pytest
import torch
from transformers import DynamicCache

from lightconv_plugin.hf import LightConvCache
from lightconv_plugin.hf.cache import CACHE
from lightconv_plugin.modules import MIXERS
from tests.hf.models import ONE_OF_EACH, close, language_model, padded, seq2seq, words

NORMS = pytest.mark.parametrize("normalize_before", [False, True])
EACH_MIXER = pytest.mark.parametrize("mixer", MIXERS)
CHUNKS = [(1,) * 7, (3, 1, 1, 2), (5, 2)]


def in_steps(model, tokens, chunks, **inputs):
    """Logits of `tokens`, some at a time, each call with the cache of the one before."""
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    cache, found = None, []
    for part in tokens.split(chunks, dim=1):
        output = model(**inputs, **{name: part}, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    assert cache.get_seq_length() == tokens.shape[1] and len(cache) == 2
    return torch.cat(found, dim=1)


@EACH_MIXER
@NORMS
def test_steps_are_the_whole_translation(mixer, normalize_before):
    model = seq2seq(mixer=mixer, normalize_before=normalize_before)
    source, target = words(3, 6), words(3, 7)
    source[0, 4:] = 1
    expected = model(source, decoder_input_ids=target, use_cache=False)
    assert expected.past_key_values is None
    for chunks in CHUNKS:
        close(in_steps(model, target, chunks, input_ids=source), expected.logits)


@EACH_MIXER
@NORMS
def test_steps_are_the_whole_text(mixer, normalize_before):
    model, tokens = language_model(mixer=mixer, normalize_before=normalize_before), words(3, 7)
    expected = model(tokens, use_cache=False).logits
    for chunks in CHUNKS:
        close(in_steps(model, tokens, chunks), expected)


ALL = {"projections": ["q", "k", "v"], "kind": "dynamic"}
OPTIONS = {
    "low rank": {"dynamic_rank": 3, "dynamic_residual": True},
    "convolved": {"mixer": "attention", "attention_conv": ALL},
    "convolved queries": {"cross_attention_conv": {"projections": ["q"], "kernel_size": 3}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_of_mixers_with_options(options, tmp_path):
    """And reordered: each row goes on as the one that it was."""
    model, order = seq2seq(**options), torch.tensor([2, 0, 1])
    source, target = words(3, 6), words(3, 7)
    for chunks in CHUNKS:
        expected = model(source, decoder_input_ids=target, use_cache=False).logits
        close(in_steps(model, target, chunks, input_ids=source), expected)
    cache = model(source, decoder_input_ids=target[:, :6], use_cache=True).past_key_values
    cache.reorder_cache(order)
    last = model(source[order], decoder_input_ids=target[order, 6:], past_key_values=cache).logits
    close(last, model(source[order], decoder_input_ids=target[order], use_cache=False).logits[:, 6:])
    model.config.save_pretrained(tmp_path)
    assert type(model.config).from_pretrained(tmp_path).model_config() == model.config.model_config()


@EACH_MIXER
def test_steps_after_pads_on_the_left(mixer):
    model, tokens = language_model(mixer=mixer), words(2, 6)
    expected = model(tokens, use_cache=False).logits
    with_pads, mask = padded(tokens, 4, "left")
    with_pads = with_pads.masked_fill(mask.eq(0), 7)  # known by the mask alone
    first = model(with_pads[:, :7], attention_mask=mask[:, :7], use_cache=True)
    close(first.logits[:, 4:], expected[:, :3])
    rest = model(with_pads[:, 7:], attention_mask=mask, past_key_values=first.past_key_values)
    close(rest.logits, expected[:, 3:])
    with pytest.raises(ValueError, match=r"attention_mask must be of shape \(2, 11\), got \(2, 1\)"):
        model(tokens[:, :1], attention_mask=mask[:, :1], past_key_values=rest.past_key_values)


@torch.no_grad()
@EACH_MIXER
def test_rows_of_the_cache_follow_the_beams(mixer):
    order = torch.tensor([2, 0, 0, 1, 2])
    model, source, target = seq2seq(mixer=mixer), words(3, 5), words(3, 6)
    cache = model(source, decoder_input_ids=target[:, :5]).past_key_values
    kept = copy.deepcopy(cache)
    expected = model(decoder_input_ids=target[:, 5:], past_key_values=cache).logits[order]
    kept.reorder_cache(order)
    assert kept.batch_size == 5 and repr(kept) == "LightConvCache(length=5, batch_size=5)"
    close(model(decoder_input_ids=target[order, 5:], past_key_values=kept).logits, expected)
    model = language_model(mixer=mixer)
    cache = model(target[:, :5]).past_key_values
    expected = model(target[:, 5:], past_key_values=copy.deepcopy(cache)).logits
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    cache.batch_select_indices(torch.tensor([True, False, True]))
    close(model(target[[0, 2], 5:], past_key_values=cache).logits, expected[[0, 2]])


def test_a_cache_is_filled_by_its_model_and_emptied():
    model, tokens, cache = language_model(), words(2, 4), LightConvCache()
    assert (len(cache), cache.batch_size, cache.is_initialized) == (0, -1, False)
    cache.reorder_cache(torch.tensor([1, 0]))  # of nothing
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0]))
    expected = model(tokens, past_key_values=cache).logits
    assert cache.is_initialized and cache.has_previous_state() and cache.get_mask_sizes(2) == (6, 0)
    assert (len(cache), cache.get_max_length(), cache.is_compileable) == (2, -1, False)
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.is_initialized
    assert torch.equal(model(tokens, past_key_values=cache).logits, expected)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@torch.no_grad()
def test_it_has_the_name_of_transformers_before_and_since_5_24(name):
    model, tokens = language_model(mixer=ONE_OF_EACH[:2]), words(2, 7)
    first = model(tokens[:, :5])
    assert isinstance(first[CACHE], LightConvCache)
    close(model(tokens[:, 5:], **{name: copy.deepcopy(first[CACHE])}).logits, model(tokens).logits[:, 5:])
    options = {"max_new_tokens": 3, "eos_token_id": None}
    expected = model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, **{name: first[CACHE]}, **options), expected)
    translating, source, target = seq2seq(), words(2, 4), words(2, 5)
    cache = translating(source, decoder_input_ids=target[:, :3])[CACHE]
    rest = translating(source, decoder_input_ids=target[:, 3:], **{name: cache}).logits
    close(rest, translating(source, decoder_input_ids=target).logits[:, 3:])


def test_two_caches_are_refused():
    model, tokens = language_model(), words(1, 3)
    with pytest.raises(ValueError, match="past_key_values and cache are two names of one argument, got both"):
        model(tokens, past_key_values=LightConvCache(), cache=LightConvCache())


def test_what_a_cache_cannot_do_is_said():
    model, source, target = seq2seq(mixer=ONE_OF_EACH[:4]), words(2, 4), words(2, 3)
    cache = model(source, decoder_input_ids=target).past_key_values
    cache.crop(0)
    with pytest.raises(RuntimeError, match="cannot remove 2 tokens"):
        cache.crop(-2)
    with pytest.raises(RuntimeError, match=r"works only with the models of lightconv_plugin\.hf"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(ValueError, match="the cache is of 2 sequences, decoder_input_ids of 1"):
        model(decoder_input_ids=target[:1], past_key_values=cache)
    with pytest.raises(ValueError, match="must be a LightConvCache, got DynamicCache"):
        model(source, decoder_input_ids=target, past_key_values=DynamicCache())


def test_no_cache_unless_it_is_of_use():
    model, source, target = seq2seq(), words(2, 4), words(2, 3)
    assert model(source, decoder_input_ids=target).past_key_values is not None
    assert model(source, labels=target).past_key_values is None
    assert model(source, labels=target, use_cache=True).past_key_values is not None
    model.config.use_cache = False
    assert model(source, decoder_input_ids=target).past_key_values is None
    model.config.use_cache = True
    assert model.train()(source, decoder_input_ids=target).past_key_values is None
