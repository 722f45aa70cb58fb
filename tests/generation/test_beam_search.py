"""Every option of the search means what it means in fairseq's SequenceGenerator."""

import logging
from functools import cache

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq import search as strategies

from lightconv_plugin.generation import FastGenerator
from tests.generation import toys
from tests.generation.recordings import SEARCHES
from tests.models.toys import dictionary


@cache
def models() -> list:
    torch.manual_seed(11)
    return [toys.ours("dynamic,attention,talk"), toys.fairseqs()]


OPTIONS = {
    "beam-1": {"beam_size": 1},
    "beam-2": {"beam_size": 2},
    "beam-4": {"beam_size": 4},
    "beam-7": {"beam_size": 7},
    "beam-20": {"beam_size": 20},
    "lenpen-0": {"len_penalty": 0.0},
    "lenpen-2": {"len_penalty": 2.0},
    "unnormalised": {"normalize_scores": False},
    "min-len-9": {"min_len": 9},
    "min-len-0": {"min_len": 0},
    "max-len-a": {"max_len_a": 1.5, "max_len_b": 2},
    "max-len": {"max_len": 6},
    "max-len-1": {"max_len_b": 1},
    "forced-length": {"max_len_b": 7, "min_len": 7},
    "unkpen": {"unk_penalty": 3.0},
    "unk-welcome": {"unk_penalty": -6.0},
    "temperature": {"temperature": 1.7},
    "cold": {"temperature": 0.4},
    "no-repeat-1": {"no_repeat_ngram_size": 1},
    "no-repeat-2": {"no_repeat_ngram_size": 2},
    "no-repeat-3": {"no_repeat_ngram_size": 3, "min_len": 8},
    "match-source-len": {"match_source_len": True},
    "suppress": {"tokens_to_suppress": ("w3", "w5", "w60")},
    "other-end": {"eos": 9},
    "all-at-once": {"beam_size": 6, "temperature": 1.3, "unk_penalty": 1.0, "no_repeat_ngram_size": 2, "min_len": 3},
}


RECORDED = ("beam-20", "max-len-1", "suppress", "other-end", "all-at-once")  # the rest of them: test_graphs.py


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    """One model and pads on the right, an ensemble and pads on the left."""
    searches = SEARCHES if name in RECORDED else SEARCHES[:2]
    for seed, chosen in (1, models()[:1]), (2, models()):
        torch.manual_seed(seed)
        sample = toys.batch(sentences=1 + 3 * seed, left_pad=seed == 2)
        toys.check(chosen, sample, searches=searches, **OPTIONS[name])


@pytest.mark.parametrize("vocabulary", [6, 7, 40, 321, 700])
def test_vocabularies(vocabulary):
    """Fewer words than candidates; and more than are looked through block by block."""
    torch.manual_seed(vocabulary)
    model = toys.ours(vocabulary=vocabulary)
    for beam in (1, 3, 5, 12):
        toys.check([model], toys.batch(vocabulary=vocabulary), vocabulary=vocabulary, beam_size=beam)


PREFIXES = {
    "one-word": [[7], [8], [30]],
    "two": [[7, 9], [40, 40], [5, 6]],
    "different-lengths": [[7, 9, 20], [40, 1, 1], [1, 1, 1]],
    "with-the-end": [[7, 2, 1], [40, 12, 2], [8, 9, 10]],
    "unknown": [[3, 3], [3, 7], [7, 3]],
    "longer-than-max-len": [[7] * 9, [8] * 9, [9] * 9],
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_prefixes(prefix):
    torch.manual_seed(5)
    options = {"max_len_b": 8, "min_len": 2, "tokens_to_suppress": ("w9",), "searches": SEARCHES}
    generate = {"prefix_tokens": torch.tensor(prefix)}
    for beam, chosen in (1, models()), (2, models()[:1]), (5, models()):
        toys.check(chosen, toys.batch(sentences=3), generate=generate, beam_size=beam, **options)


def test_prefix_with_blocked_ngrams():
    torch.manual_seed(6)
    generate = {"prefix_tokens": torch.tensor([[7, 8, 7], [9, 9, 1]])}
    toys.check(models()[:1], toys.batch(2), searches=SEARCHES, generate=generate, no_repeat_ngram_size=2)


def test_other_beginning():
    torch.manual_seed(7)
    toys.check(models(), toys.batch(), generate={"bos_token": 12})


def test_without_lengths_and_without_pads():
    torch.manual_seed(8)
    sample = toys.batch()
    del sample["net_input"]["src_lengths"], sample["id"]
    toys.check(models()[:1], sample, match_source_len=True)
    tokens = torch.randint(4, toys.VOCABULARY, (4, 6))
    toys.check(models(), {"net_input": {"src_tokens": tokens, "src_lengths": torch.full((4,), 6)}})


@pytest.mark.usefixtures("search")
def test_a_sentence_does_not_depend_on_its_batch():
    torch.manual_seed(9)
    generator = FastGenerator(models(), dictionary(toys.VOCABULARY), max_len_b=20, min_len=4)
    sample = toys.batch(sentences=6)
    together = generator.generate(None, sample)
    net_input = sample["net_input"]
    for i, length in enumerate(net_input["src_lengths"].tolist()):
        tokens = net_input["src_tokens"][i : i + 1, -length:]
        alone = generator.generate(None, {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor([length])}})
        toys.assert_same([together[i]], alone)


@pytest.mark.usefixtures("search")
def test_nan_is_an_error_and_not_a_hang():
    torch.manual_seed(1)
    model = toys.ours()
    with torch.no_grad():
        model.decoder.output_projection.weight[5] = torch.nan
    with pytest.raises(RuntimeError, match="no hypothesis"):
        FastGenerator([model], dictionary(toys.VOCABULARY), max_len_b=5).generate([model], toys.batch())


def test_a_hypothesis_that_is_nan_in_one_model_of_an_ensemble_ends():
    torch.manual_seed(1)
    chosen = [toys.ours(), toys.ours("talk")]
    with torch.no_grad():
        chosen[1].decoder.embed_tokens.weight[20:50] = torch.nan
    toys.check(chosen, toys.batch(), searches=SEARCHES)


def test_new_weights_after_refresh():
    torch.manual_seed(1)
    model, other = toys.ours(), toys.ours()
    words, sample = dictionary(toys.VOCABULARY), toys.batch()
    generator = FastGenerator([model], words, max_len_b=12)
    generator.generate([model], sample)
    model.load_state_dict(other.state_dict())
    generator.refresh()
    toys.assert_same(
        FastGenerator([other], words, max_len_b=12).generate([other], sample), generator.generate([model], sample)
    )


FALLBACKS = {
    "search by DiverseBeamSearch": {"search_strategy": lambda words: strategies.DiverseBeamSearch(words, 2, 0.5)},
    "search by DiverseSiblingsSearch": {"search_strategy": lambda words: strategies.DiverseSiblingsSearch(words, 0.5)},
    "search by LengthConstrainedBeamSearch": {
        "search_strategy": lambda words: strategies.LengthConstrainedBeamSearch(words, 1, 0, 1, 0)
    },
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_falls_back_to_fairseq(reason, caplog):
    from fairseq.sequence_generator import SequenceGenerator

    torch.manual_seed(1)
    words, sample = dictionary(toys.VOCABULARY), toys.batch()
    options = {"beam_size": 4, "max_len_b": 20}
    options |= {name: make(words) for name, make in FALLBACKS[reason].items()}
    generator = FastGenerator(models()[:1], words, **options)
    with caplog.at_level(logging.INFO):
        found = generator.generate(models()[:1], sample)
        generator.generate(models()[:1], sample)
    assert sum(reason in record.getMessage() for record in caplog.records) == 1
    toys.assert_same(SequenceGenerator(models()[:1], words, **options).generate(models()[:1], sample), found)


def test_plain_beam_search_as_a_strategy_is_fast():
    words = dictionary(toys.VOCABULARY)
    generator = FastGenerator(models(), words, max_len_b=4, search_strategy=strategies.BeamSearch(words))
    generator.generate(None, toys.batch())
    assert generator._said == {"the plugin's own search translates"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size must be at least 1, got 0"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be at least 0, got -1"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"dtype": "float8"}, "dtype must be one of auto, float32, bfloat16, float16, int8, got 'float8'"),
        ({"tokens_to_suppress": ("w1", "nowhere")}, "got 'nowhere'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        FastGenerator(models(), dictionary(toys.VOCABULARY), **options)


def test_wrong_lengths():
    with pytest.raises(ValueError, match="`min_len` must be at most the maximum length, here 4, got 5"):
        FastGenerator(models(), dictionary(toys.VOCABULARY), min_len=5, max_len_b=4).generate(None, toys.batch())
    with pytest.raises(ValueError, match="at least one model"):
        FastGenerator([], dictionary(toys.VOCABULARY))
