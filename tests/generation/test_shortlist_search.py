"""Searches that choose among some words: if these are all, nothing changes; otherwise, the others are impossible."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightconv_plugin.generation import DTYPES, BatchSearch, SearchOptions
from lightconv_plugin.generation.batch_search import TorchSearch
from lightconv_plugin.generation.shortlist import Shortlist
from lightconv_plugin.mixers import MIXERS
from lightconv_plugin.ops import backends
from tests.generation import random_models as models

WITH_KERNELS = backends.decision("cpu").backend == "cpu"
needs_kernels = pytest.mark.skipif(not WITH_KERNELS, reason="no native kernels")
KINDS = [models.native_search, TorchSearch] if WITH_KERNELS else [TorchSearch]
SYMBOLS = range(4)


def _small(seed: int, mixer: str) -> models.Case:
    """A decoder of one layer of this mixer, for a few words."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    words = rng.randint(8, 40)
    model = models.random_model(rng, 12, words, (mixer,))
    options = SearchOptions(
        pad=models.PAD,
        unk=models.UNK,
        eos=models.EOS,
        beam_size=rng.randint(1, 3),
        unk_penalty=rng.choice((0.0, 1.0)),
        no_repeat_ngram_size=rng.choice((0, 1, 2)),
        suppress=tuple(rng.sample(range(4, words), rng.choice((0, 2)))),
    )
    return models.Case([model], options, models.random_batch(rng, 2, 4, 12), 3)


def _impossible(case: models.Case, words: torch.Tensor, dtype: torch.dtype = torch.float64) -> models.Case:
    """The case with models in which the logits of all other words are −∞, whatever the hypothesis."""
    bias = torch.full((models.vocabulary(case),), -torch.inf, dtype=dtype)
    bias[words] = 0
    changed = []
    for model in case.models:
        decoder = (model := copy.deepcopy(model).to(dtype)).decoder
        if decoder.output_projection is None:
            before = 0 if decoder.output_bias is None else decoder.output_bias.detach()
            decoder.output_bias = nn.Parameter(before + bias)
        else:
            before = 0 if decoder.output_projection.bias is None else decoder.output_projection.bias.detach()
            decoder.output_projection.bias = nn.Parameter(before + bias)
        changed.append(model)
    return replace(case, models=changed)


@pytest.mark.parametrize("mixer", MIXERS)
def test_all_words_change_no_bit(mixer):
    """More than 500 random models."""
    for seed in range(63):
        case = _small(seed, mixer)
        everything = models.with_words(case, torch.arange(models.vocabulary(case)))
        for kind in KINDS:
            models.assert_equal(case.search(kind, threads=1), everything.search(kind, threads=1), f"seed {seed}:")


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_words_change_no_bit_with_any_options(dtype):
    for seed in range(12):
        case = models.random_case(seed)
        everything = models.with_words(case, torch.arange(models.vocabulary(case)))
        for threads in (1, 3):
            expected = case.search(models.native_search, dtype=dtype, threads=threads)
            found = everything.search(models.native_search, dtype=dtype, threads=threads)
            models.assert_equal(expected, found, f"seed {seed}, {threads} threads:")


def test_other_words_are_impossible():
    """As in float64 with logits of −∞: probabilities are normalised over the list."""
    restricted = 0
    for seed in range(24):
        case = models.random_case(seed)
        words = models.some_words(case, seed)
        expected = _in_float32(_impossible(case, words).search(TorchSearch))
        for kind in KINDS:
            models.assert_same(expected, models.with_words(case, words).search(kind, threads=1), f"seed {seed}:")
        restricted += isinstance(expected, list) and len(words) < models.vocabulary(case)
    assert restricted > 12


def _in_float32(found):
    if isinstance(found, str):
        return found
    kinds = ("score", "positional_scores")
    return [[one | {name: one[name].float() for name in kinds} for one in ranked] for ranked in found]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_words_are_impossible_in_any_type(dtype):
    """Packed rows are the same rows: the models with logits of −∞ have the same products."""
    for seed in range(12):
        case = models.random_case(seed)
        words = models.some_words(case, seed)
        expected = _impossible(case, words, torch.float32).search(models.native_search, dtype=dtype, threads=1)
        found = [
            models.with_words(case, words).search(models.native_search, dtype=dtype, threads=threads)
            for threads in (1, 4)
        ]
        models.assert_same(expected, found[0], f"seed {seed}:", tolerance=1e-5)
        models.assert_equal(*found, f"seed {seed}:")


@needs_kernels
def test_a_greedy_search_is_the_formula():
    """Step by step: the likeliest word by a softmax over the listed words, from the model's own logits in float64."""
    for seed, mixer in enumerate(MIXERS):
        case = _small(seed, mixer)
        words = models.some_words(case, seed)
        options = replace(case.options, beam_size=1, min_len=0, no_repeat_ngram_size=0, suppress=(), unk_penalty=0.0)
        found = models.with_words(replace(case, options=options), words).search(models.native_search)
        model = copy.deepcopy(case.models[0]).double()
        for sentence, (hypothesis, *_) in zip(case.source, found, strict=True):
            sentence = sentence[sentence != models.PAD].unsqueeze(0)
            read = torch.tensor([[models.EOS]])
            scores = []
            for step in range(case.max_len + 1):
                with torch.no_grad():
                    rows = model.decoder(read, model.encode(sentence))  # (steps, 1, channels)
                    logits = model.decoder.logits(rows[-1:])[0, 0]
                chances = logits[words].log_softmax(0)
                chances[words == models.PAD] = -torch.inf
                best = words == models.EOS if step == case.max_len else chances == chances.max()
                scores.append(chances[best].item())
                read = torch.cat([read, words[best].unsqueeze(0)], dim=1)
                if read[0, -1] == models.EOS:
                    break
            assert hypothesis["tokens"].tolist() == read[0, 1:].tolist()
            torch.testing.assert_close(hypothesis["positional_scores"], torch.tensor(scores), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ lists of a batch


def test_the_words_of_a_batch():
    lists = {(): [0, 1, 2, 3], (7,): [20, 10], (8,): [10, 30], (7, 8): [40], (9,): [50]}
    shortlist = Shortlist(lists)
    batch = torch.tensor([[1, 7, 5, 2], [8, 7, 2, 1]])
    assert shortlist.words(batch).tolist() == [0, 1, 2, 3, 10, 20, 30]
    assert shortlist.words(torch.tensor([[7, 8, 2]])).tolist() == [0, 1, 2, 3, 10, 20, 30, 40]
    assert shortlist.words(torch.tensor([[6, 2]])).tolist() == [0, 1, 2, 3]
    assert shortlist.words(torch.tensor([[6, 2]]), torch.tensor([[60, 1], [2, 1]])).tolist() == [0, 1, 2, 3, 60]


@pytest.mark.parametrize("seed", range(20))
def test_the_words_of_a_batch_are_the_union_of_its_lists(seed):
    """Lists of single words and of phrases, empty ones, words without a list, pads, forced words."""
    rng = random.Random(seed)
    words = range(rng.choice([5, 40]))
    longest = rng.choice([1, 3])
    lists = {
        tuple(rng.choices(words, k=rng.randint(0, longest))): rng.choices(range(90), k=rng.randint(0, 6))
        for _ in range(rng.randint(0, 30))
    }
    batch = torch.tensor([rng.choices(range(50), k=7) for _ in range(3)])
    prefix = torch.tensor([rng.choices(range(120), k=2) for _ in range(3)]) if rng.random() < 0.5 else None
    expected = set(lists.get((), ())) | (set() if prefix is None else set(prefix.flatten().tolist()))
    for sentence in batch.tolist():
        for begin in range(7):
            for end in range(begin + 1, 8):
                expected.update(lists.get(tuple(sentence[begin:end]), ()))
    found = Shortlist(lists).words(batch, prefix)
    assert found.dtype == torch.int64 and found.tolist() == sorted(expected)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_search_of_batches(dtype):
    """It chooses among the words that the batch's own words list, and has forced words."""
    if dtype == "int8" and not WITH_KERNELS:
        pytest.skip("no native kernels")
    case = _small(3, "dynamic")
    words = models.vocabulary(case)
    options = replace(case.options, beam_size=2, dtype=dtype, no_repeat_ngram_size=0, suppress=(), max_len_b=3)
    some = [*SYMBOLS, *range(4, words, 2)]
    search = BatchSearch(case.models, options, shortlist=Shortlist({(): some, (5,): range(words)}))

    def found(source, **more):
        batch = search.search(torch.tensor(source), **more)
        return {word for ranked in batch for one in ranked for word in one["tokens"].tolist()}

    assert found([[4, 6, 2]]) <= set(some)
    forced = next(word for word in range(4, words) if word not in some)
    assert forced in found([[4, 6, 2]], prefix=torch.tensor([[forced]]))
    everything = BatchSearch(case.models, options)
    models.assert_equal(everything.search(torch.tensor([[5, 6, 2]])), search.search(torch.tensor([[5, 6, 2]])))


@needs_kernels
def test_wrong_words():
    case = _small(1, "talk")
    words, most = models.vocabulary(case), models.vocabulary(case) - 1

    def search(some, **changes):
        return models.with_words(replace(case, **changes), torch.tensor(some)).search(models.native_search)

    for wrong in (-1, words, 2**40):
        with pytest.raises(ValueError, match=f"^shortlist must be words in 0 … {most}, got {wrong}$"):
            search([*SYMBOLS, wrong])
    for wrong in ([2, 1, 3, 4, 5], [1, 2, 3, 4, 4]):
        with pytest.raises(ValueError, match=r"^the words of the shortlist must be in ascending order$"):
            search(wrong)
    with pytest.raises(ValueError, match=r"^eos 2 is not in the shortlist$"):
        search([1, 3, 4, 5])
    with pytest.raises(ValueError, match=r"^prefix 6 is not in the shortlist$"):
        search([*SYMBOLS, 5], extra={"prefix": torch.tensor([[5], [6]])})
    with pytest.raises(ValueError, match=r"^beam_size must be below the 4 words of the shortlist, got 4$"):
        search([*SYMBOLS], options=replace(case.options, beam_size=4))
    with pytest.raises(ValueError, match=r"^the shortlist must be \(W,\), got \[1, 2\]$"):
        search([[1, 2]])


def test_cuda_graphs_and_a_shortlist():
    case = _small(1, "talk")
    with pytest.raises(ValueError, match=r"^`shortlist` and `cuda_graphs` exclude each other$"):
        BatchSearch(case.models, replace(case.options, cuda_graphs=True), shortlist=Shortlist({(): [2]}))
