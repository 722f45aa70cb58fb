"""`generate`: greedy, beams, samples; the beams against this package's own search."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    SuppressTokensLogitsProcessor,
)

from lightconv_plugin.checkpoints.exported import SearchDefaults, open_exported
from lightconv_plugin.checkpoints.saving import Side, save_exported
from lightconv_plugin.generation.beam_search import Search, SearchOptions
from lightconv_plugin.generation.steps import StepModel
from lightconv_plugin.generation.translator import Translator
from lightconv_plugin.hf import LightConvCache
from lightconv_plugin.hf.cache import CACHE
from lightconv_plugin.modules import MIXERS
from lightconv_plugin.text.recipe import Recipe
from lightconv_plugin.text.sides import TextSide
from tests.checkpoints import exports
from tests.hf.models import (
    ENGLISH,
    EOS,
    GERMAN,
    ONE_OF_EACH,
    PAD,
    close,
    dictionary,
    export_seq2seq,
    language_model,
    padded,
    plain,
    seq2seq,
    words,
)

LONGEST = 12


def ending(model, share: float):
    """The model with the end of the sentence likelier than any word in that share of its steps."""
    with torch.no_grad():
        decoder, source = model.decoder, words(8, 6)
        target = torch.cat([torch.full((8, 1), EOS), words(8, 9)], dim=1)
        inputs = {"decoder_input_ids": target} if model.config.is_encoder_decoder else {}
        logits = model(source if inputs else target, **inputs).logits
        gaps = logits[..., 4:].amax(dim=-1) - logits[..., EOS]
        decoder.output_projection.bias[EOS] += gaps.flatten().quantile(share)
    return model


def biased(make, share: float = 0.15, **options):
    """A model whose output has a bias, and different words after different ones."""
    model = make(share_input_output=False, **options)
    old = model.decoder.output_projection
    new = torch.nn.Linear(old.in_features, old.out_features)
    new.weight.data.copy_(old.weight * 3)
    torch.nn.init.zeros_(new.bias)
    torch.nn.init.zeros_((model.decoder.layer_norm or model.decoder.layers[-1].final_layer_norm).bias)
    model.decoder.output_projection = new
    stack = dict(model.config.decoder_stack, output_bias=True)
    model.config.decoder_stack = stack
    model.generation_config.update(num_beams=1, min_length=0, forced_eos_token_id=None)  # unless a test says otherwise
    return ending(model, share)


def greedy(model, tokens, steps, **inputs):
    """The loop that `generate` is: all at once, without a cache."""
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    done = torch.zeros(len(tokens), dtype=torch.bool)
    for _ in range(steps):
        logits = model(**inputs, **{name: tokens}, use_cache=False).logits[:, -1]
        logits[:, PAD] = -torch.inf
        best = logits.argmax(dim=-1)
        tokens = torch.cat([tokens, best.masked_fill(done, PAD).unsqueeze(1)], dim=1)
        done |= best.eq(EOS)
        if done.all():
            break
    return tokens


@pytest.mark.parametrize("mixer", MIXERS)
def test_greedy_is_the_best_word_each_time(mixer):
    model, source = biased(seq2seq, mixer=mixer), words(4, 6)
    source[1, 3:] = PAD
    expected = greedy(model, torch.full((4, 1), EOS), LONGEST - 1, input_ids=source)
    assert torch.equal(model.generate(source, max_length=LONGEST, do_sample=False), expected)
    assert torch.equal(model.generate(source, max_length=LONGEST, use_cache=False), expected)
    assert len({tuple(row) for row in expected.tolist()}) > 1, "all translations are the same"
    model, prompt = biased(language_model, mixer=mixer), words(4, 3)
    expected = greedy(model, prompt, LONGEST - 3)
    assert torch.equal(model.generate(prompt, max_length=LONGEST), expected)


@pytest.mark.parametrize("mixer", ["dynamic", "attention", "talk"])
def test_prompts_of_different_lengths_with_pads_on_the_left(mixer):
    model, prompts = biased(language_model, mixer=mixer), [words(1, n) for n in (2, 5, 3)]
    batch = torch.cat([padded(prompt, 5 - prompt.shape[1], "left")[0] for prompt in prompts])
    found = model.generate(batch, attention_mask=batch.ne(PAD), max_new_tokens=6, num_beams=3)
    inferred = model.generate(batch, max_new_tokens=6, num_beams=3)
    assert torch.equal(found, inferred)
    for row, prompt in zip(found, prompts, strict=True):
        alone = model.generate(prompt, max_new_tokens=6, num_beams=3)[0]
        assert [i for i in row.tolist() if i != PAD] == [i for i in alone.tolist() if i != PAD]


@pytest.mark.parametrize("mixer", MIXERS)
def test_beams_are_those_of_the_search_of_this_package(mixer):
    lengths, longest, ties = set(), 13, 0
    for penalty, normalize_before in ((0.4, False), (1.0, True), (1.7, False)):
        model, source = biased(seq2seq, 0.07, mixer=mixer, normalize_before=normalize_before), words(8, 7)
        source[2, 4:] = PAD
        ours = StepModel(plain(model))
        options = SearchOptions(PAD, 3, EOS, beam_size=5, len_penalty=penalty)
        expected = Search([ours], [ours.start(source, 5)], source.ne(PAD).sum(1), options, longest).find()
        found = model.generate(
            source,
            num_beams=5,
            length_penalty=penalty,
            early_stopping=True,
            max_length=longest + 2,
            min_length=2,
            forced_eos_token_id=EOS,
            output_scores=True,
            return_dict_in_generate=True,
        )
        # The best alone: of those that end in the last step, fairseq keeps the first, transformers the best.
        best = [hypotheses[0] for hypotheses in expected]
        for row, score, hypothesis in zip(found.sequences[:, 1:].tolist(), found.sequences_scores, best, strict=True):
            same = [i for i in row if i != PAD] == hypothesis["tokens"].tolist()
            ties += not same
            if same:
                close(score, hypothesis["score"])
        lengths |= {len(hypothesis["tokens"]) for hypothesis in best}
    # Short kernels make exact ties, of words in another order, and what they decide about may be another translation.
    assert ties <= 1, f"{ties} of 24 translations differ"
    assert longest + 1 in lengths and len(lengths) > 2, "not enough kinds of translations"


@pytest.mark.parametrize(
    "lengths",
    [
        {"max_length": 5},
        {"min_length": 9},
        {"min_length": 6, "max_length": 7},
        {"max_new_tokens": 4, "max_length": 9},
        {"min_new_tokens": 8},
    ],
    ids=str,
)
def test_lengths_of_generation_config_are_those_of_the_search_of_this_package(lengths, tmp_path):
    torch.manual_seed(6)  # without limits, one translation has 4 pieces, and the other 39, as many as may be
    directory = export_seq2seq(tmp_path / "model")
    exports.change(directory / "generation_config.json", **{"min_length": 0, **lengths})
    lines, known = ["Ein Hund läuft durch das Gras .", "zwei Hunde"], open_exported(directory).target
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    unlimited, expected = (
        [model.generate(**tokenizer(line, return_tensors="pt"), **options)[0, 1:-1].tolist() for line in lines]
        for options in ({"min_new_tokens": 0, "max_new_tokens": 40}, {})
    )
    assert expected != unlimited
    with Translator(directory) as translator:
        found = translator.translate(lines)
    assert [[known.index(piece) for piece in line.tokens] for line in found] == expected
    with Translator(directory, min_len=3, max_len_b=3) as translator:  # what is given counts
        assert [len(line.tokens) for line in translator.translate(lines)] == [3, 3]


def test_samples_are_reproducible_and_follow_the_distribution():
    model, source = biased(seq2seq, mixer=ONE_OF_EACH[:4]), words(1, 5)
    rows = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        rows.append(model.generate(source, do_sample=True, max_length=LONGEST, top_k=0, num_return_sequences=4))
    assert torch.equal(rows[0], rows[1])
    assert rows[0].shape != rows[2].shape or not torch.equal(rows[0], rows[2])
    start = torch.tensor([[EOS]])
    logits = model(source, decoder_input_ids=start).logits[0, -1]
    logits[PAD] = -torch.inf  # suppressed, as in fairseq
    expected = logits.softmax(-1)
    samples = model.generate(source, do_sample=True, max_length=2, top_k=0, num_return_sequences=4000)[:, 1]
    counts = samples.bincount(minlength=29) / 4000
    assert (counts - expected).abs().max() < 5 * (0.25 / 4000) ** 0.5


def test_a_text_goes_on_from_a_cache_and_from_word_vectors():
    model, prompt = biased(language_model, mixer=ONE_OF_EACH[:2]), words(2, 4)
    expected = model.generate(prompt, max_new_tokens=5, eos_token_id=None)
    cache = model(prompt[:, :3]).past_key_values
    found = model.generate(prompt, max_new_tokens=5, past_key_values=cache, eos_token_id=None)
    assert torch.equal(found, expected) and cache.get_seq_length() == 4 + 4
    vectors = model.get_input_embeddings()(prompt)
    assert torch.equal(model.generate(inputs_embeds=vectors, max_new_tokens=5, eos_token_id=None), expected[:, 4:])
    first = model.generate(prompt, max_new_tokens=2, return_dict_in_generate=True, eos_token_id=None)
    assert isinstance(first.past_key_values, LightConvCache)
    more = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=3, eos_token_id=None)
    assert torch.equal(more, expected)


def test_a_translation_goes_on_from_its_first_words_and_from_an_encoded_source():
    model, source = biased(seq2seq, mixer=ONE_OF_EACH[:4]), words(2, 4)
    begin = torch.tensor([[EOS, 7], [EOS, 9]])
    found = model.generate(source, decoder_input_ids=begin, max_length=8)
    assert torch.equal(found, greedy(model, begin, 6, input_ids=source))
    encoded = model.get_encoder()(source)
    again = model.generate(encoder_outputs=encoded, decoder_input_ids=begin, max_length=8)
    assert torch.equal(again, found)
    expected = model.generate(source, num_beams=3, max_length=8)
    for _ in range(2):  # transformers repeats what it is given for each beam, in place
        assert torch.equal(model.generate(encoder_outputs=encoded, num_beams=3, max_length=8), expected)


def test_a_translation_goes_on_from_a_cache():
    model, source = biased(seq2seq, mixer=ONE_OF_EACH[:4]), words(2, 4)
    options = {"eos_token_id": None, "return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(source, max_length=9, **options)
    first = model.generate(source, max_length=5, **options)
    begin = {"decoder_input_ids": first.sequences, CACHE: first[CACHE]}
    more = model.generate(source, max_length=9, **begin, **options)
    assert torch.equal(more.sequences, expected.sequences)
    close(torch.stack(more.scores), torch.stack(expected.scores[4:]))


@pytest.mark.parametrize("make", [language_model, seq2seq])
def test_a_cache_that_has_all_tokens_is_refused(make):
    model, tokens = make(), words(2, 4)
    tokens[:, 0] = EOS
    name = "decoder_input_ids" if make is seq2seq else "input_ids"
    inputs, options = {"input_ids": words(2, 4), name: tokens}, {"num_beams": 1, "max_length": 9}
    for count in (4, 2):
        given = {**inputs, name: tokens[:, :count], CACHE: model(**inputs)[CACHE]}
        with pytest.raises(ValueError, match=f"{name} must be all tokens, more than the 4 in the cache, got {count}"):
            model.generate(**given, **options)
    with pytest.raises(ValueError, match="use_cache=False is not possible with a cache"):
        model.generate(**inputs, **{CACHE: LightConvCache()}, use_cache=False, **options)


@pytest.mark.parametrize("make", [language_model, seq2seq])
def test_the_pad_is_no_word_whatever_else_is_suppressed(make):
    model = biased(make)
    with torch.no_grad():
        model.decoder.output_projection.bias[[PAD, 7]] += 100
    options = {"num_beams": 2, "max_length": 8, "eos_token_id": None}
    own = [SuppressTokensLogitsProcessor([7])]
    for suppressing in ({"suppress_tokens": [7]}, {"suppress_tokens": None}, {"logits_processor": own}):
        found = model.generate(words(3, 4), **suppressing, **options)
        assert not found.eq(PAD).any() and bool(found[:, 4:].eq(7).any()) == (None in suppressing.values())


def test_pads_of_the_source_need_no_mask():
    model, source = biased(seq2seq, mixer="lightweight"), words(3, 5)
    tokens, mask = padded(source, 4, "left")
    expected = model.generate(source, num_beams=4, max_length=LONGEST)
    assert torch.equal(model.generate(tokens, num_beams=4, max_length=LONGEST), expected)
    assert torch.equal(model.generate(tokens, attention_mask=mask, num_beams=4, max_length=LONGEST), expected)


def test_scores_of_transitions_are_the_log_probabilities():
    model, source = biased(seq2seq), words(2, 5)
    found = model.generate(
        source, num_beams=3, max_length=9, return_dict_in_generate=True, output_scores=True, length_penalty=0.0
    )
    steps = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    target = found.sequences
    log_probabilities = model(source, decoder_input_ids=target[:, :-1]).logits.log_softmax(-1)
    expected = log_probabilities.gather(2, target[:, 1:].unsqueeze(2)).squeeze(2)
    after = target[:, 1:].eq(PAD)
    close(steps.masked_fill(after, 0), expected.masked_fill(after, 0), 1e-4)
    close(found.sequences_scores, expected.masked_fill(after, 0).sum(1), 1e-4)


def test_penalties_of_the_source_s_words_need_a_dictionary_for_both_languages():
    """transformers looks the source's ids up among the target's scores."""
    for name, value in (("encoder_repetition_penalty", 1.3), ("encoder_no_repeat_ngram_size", 2)):
        with pytest.raises(ValueError, match=f"{name} needs a dictionary for both languages, got {value} for a model"):
            seq2seq(source_vocab_size=50).generate(words(2, 4), **{name: value})
        seq2seq().generate(words(2, 4), max_length=4, **{name: value})


def test_what_is_not_supported_is_refused():
    model, prompt = language_model(), words(1, 4)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(prompt, assistant_model=language_model(), max_new_tokens=3)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(prompt, prompt_lookup_num_tokens=2, max_new_tokens=3)
    with pytest.raises(ValueError, match="cache_implementation='static' is not supported"):
        model.generate(prompt, cache_implementation="static", max_new_tokens=3)
    with pytest.raises(ValueError, match="continuous batching is not supported: call generate without paged caches"):
        model.generate(prompt, cache_implementation="paged", max_new_tokens=3)
    with pytest.raises(ValueError, match="must be a LightConvCache, got DynamicCache"):
        model.generate(prompt, past_key_values=DynamicCache(), max_new_tokens=3)
    with pytest.raises(ValueError, match=r"not used by the model.*num_beam"):
        model.generate(prompt, num_beam=3)
    with pytest.raises(ValueError, match="output_attentions=True is not supported"):
        model.generate(prompt, output_attentions=True, return_dict_in_generate=True, max_new_tokens=3)


@pytest.mark.parametrize(
    ("strings", "count"),
    [("dog", 3), (["o", "x"], 2), ("dog.", 4), (["dog. the", "never"], 5), ("the dog", 3), ("never", 7), ("a dog", 7)],
)
def test_texts_that_stop_the_generation(strings, count, tmp_path):
    (tmp_path / "merges").write_text("#version: 0.2\nd o\n", encoding="utf-8")
    text = TextSide(Recipe("moses", "en"), "bpe", tmp_path / "merges")
    symbols = ["the", "do@@", "g", ".", "a"]
    model = plain(language_model(vocab_size=4 + len(symbols)))
    side = Side(None, dictionary(symbols), text)
    save_exported(tmp_path / "model", model, target=side, max_target_positions=50)
    model, tokenizer = (kind.from_pretrained(tmp_path / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer(["a dog", "the dog . a dog"], padding=True, return_tensors="pt")
    length, words = prompt["input_ids"].shape[1], tokenizer.convert_tokens_to_ids("the do@@ g . the the g".split())
    options = {"prefix_allowed_tokens_fn": lambda _, ids: [words[len(ids) - length]], "max_new_tokens": len(words)}
    for beams in (1, 2):
        found = model.generate(**prompt, **options, num_beams=beams, stop_strings=strings, tokenizer=tokenizer)
        assert found[:, length:].tolist() == [words[:count]] * 2, beams


def test_translations_that_stop_at_a_text(exported):
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    batch = tokenizer("zwei Hunde", return_tensors="pt")
    assert torch.equal(model.generate(**batch, tokenizer=tokenizer), model.generate(**batch))
    options = {"num_beams": 1, "min_new_tokens": 9, "max_new_tokens": 12}
    found = model.generate(**batch, **options)[0].tolist()
    stop = tokenizer.decode(found[3:5])
    stopped = model.generate(**batch, **options, stop_strings=stop, tokenizer=tokenizer)[0].tolist()
    assert stopped == found[: len(stopped)] and 2 <= len(stopped) <= 5
    assert stop in tokenizer.decode(stopped) and stop not in tokenizer.decode(stopped[:-1])
    with pytest.raises(ValueError, match="stop strings"):
        model.generate(**batch, stop_strings=stop)


def test_hidden_states_of_each_step():
    model, source = biased(seq2seq), words(2, 5)
    found = model.generate(source, max_length=5, min_length=5, output_hidden_states=True, return_dict_in_generate=True)
    assert [tuple(step[-1].shape) for step in found.decoder_hidden_states] == [(2, 1, 16)] * 4
    assert len(found.encoder_hidden_states) == 3


def test_the_generation_config_of_a_new_model_has_the_symbols():
    for model, first in ((seq2seq(), 0), (language_model(), EOS)):
        known: GenerationConfig = model.generation_config
        assert (known.pad_token_id, known.bos_token_id, known.eos_token_id) == (PAD, first, EOS)
        assert known.suppress_tokens == [PAD]
    assert seq2seq().generation_config.decoder_start_token_id == EOS


def test_a_new_model_searches_as_lightconv_translate_does_when_it_is_saved(tmp_path, exported):
    known = {"vocab_size": 4 + len(ENGLISH), "source_vocab_size": 4 + len(GERMAN), "max_target_positions": 30}
    model, tokenizer = seq2seq(**known, source_lang="de", target_lang="en"), AutoTokenizer.from_pretrained(exported)
    model.save_pretrained(tmp_path / "new")
    tokenizer.save_pretrained(tmp_path / "new")
    assert open_exported(tmp_path / "new").search == SearchDefaults(5, 1.0, max_length=31, min_length=2)
    assert model.generation_config.early_stopping is True and model.generation_config.forced_eos_token_id == EOS
    lines = ["Ein Hund läuft durch das Gras .", "zwei Hunde"]
    expected = [tokenizer.decode(model.generate(**tokenizer(line, return_tensors="pt"))[0], True) for line in lines]
    with Translator(tmp_path / "new") as translator:
        assert [line.text for line in translator.translate(lines)] == expected
    own_start = seq2seq(decoder_start_token_id=5).generation_config
    assert (own_start.decoder_start_token_id, own_start.max_length) == (5, 202)
    assert language_model().generation_config.num_beams is None
