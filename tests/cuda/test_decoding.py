"""The kernels for a step of beam search on the host, against the oracle."""

import dataclasses
import functools
import itertools
import math
import random

import pytest
import torch

from lightconv_plugin.generation.batch_search import TorchSearch
from lightconv_plugin.mixers import MIXERS
from tests.generation import random_models

from . import decoding_calls
from .calls import check, compare
from .decoding_calls import TYPES, BestCase, RingCase

# Heads of a vector and of less, channels for more threads than a block has, filters longer than the loop's stride.
SIZES = [(1, 1, 4), (3, 2, 8), (4, 2, 8), (7, 5, 3), (3, 24, 1), (31, 4, 16), (5, 2, 600), (70, 1, 40)]


def rings():
    for number, (sizes, dtype, now) in enumerate(itertools.product(SIZES, TYPES, (0, 2, 40))):
        taps, heads, per_head = sizes
        yield RingCase(taps, heads, per_head, now, dtype=dtype, spare=number % 2, softmax=number % 3 > 0)


@pytest.mark.parametrize("case", list(rings()), ids=str)
def test_ring_steps(on_host, case):
    check(case, "forward", on_host)


@pytest.mark.parametrize(
    "options",
    [
        {"shared": True, "softmax": False},
        {"shared": True, "softmax": False, "float_weight": True, "filters": "taps_first"},
        {"float_weight": True},
        {"filters": "taps_first"},
        {"rows": "odd"},
        {"rows": "sliced"},
        {"bias": True},
        {"beams": 1, "now": 0, "spare": 3},
        {"beams": 5, "sentences": 7, "spare": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_filters_and_layouts(on_host, dtype, options):
    check(RingCase(dtype=dtype, **options), "forward", on_host)


def test_steps_in_a_row(on_host):
    """The ring that a step leaves is that of the next, which descends from it in a random way."""
    case = RingCase(taps=4, spare=1, beams=3)
    made, generator = case.tensors() | {"ring": torch.full((5, 4, 4, 16), math.nan)}, torch.Generator().manual_seed(1)
    for now in range(11):
        case = dataclasses.replace(case, now=now)
        made |= {"x": torch.randn(9, 16, generator=generator), "now": torch.tensor([now])}
        made["ancestors"] = torch.randint(3, (3, 3, 12), generator=generator)
        made["ancestors"][:, :, now] = torch.arange(3)
        check(case, "forward", on_host, made)
        _, made["ring"] = case.forward(on_host, made)


def test_a_hypothesis_does_not_depend_on_others(on_host):
    case = RingCase(taps=9, sentences=4, beams=3, now=20)
    made = case.tensors()
    out, _ = case.forward(on_host, made)
    alone = {name: made[name][1:2] for name in ("ancestors",)} | {"ring": made["ring"][:, 1:2].contiguous()}
    alone |= {name: made[name][3:6].clone() for name in ("x", "weight")}
    one, _ = dataclasses.replace(case, sentences=1).forward(on_host, made | alone)
    assert torch.equal(one, out[3:6])


WORDS = [(2, 1), (8, 8), (41, 8), (64, 40), (1000, 10), (5003, 8), (8200, 17)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("words, count", WORDS)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_best_words(on_host, words, count, dtype, ties):
    check(BestCase(words, count, dtype=dtype, ties=ties), "forward", on_host)


@pytest.mark.parametrize(
    "options",
    [
        {"normalisers": True},
        {"scores": True},
        {"penalties": ((1, math.inf),)},
        {"penalties": ((3, 2.5), (1, math.inf), (2, math.inf), (203, -30.0))},
        {"pitch": 209},
        {"pitch": 208, "scores": True, "normalisers": True, "penalties": ((0, -1.0),)},
        {"words": 203},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_added_and_subtracted(on_host, dtype, options):
    check(BestCase(**{"words": 204, "dtype": dtype} | options), "forward", on_host)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_best_words_all_belong_to_one_thread(on_host, dtype):
    """They are more than it keeps, so that the row is read again; a few others are found on the way."""
    check(BestCase(9000, 30, dtype=dtype, crowded=True), "forward", on_host)


def test_rows_without_probabilities(on_host):
    case = BestCase(40, 6, rows=5)
    made = case.tensors()
    logits = made["logits"]
    logits[1, 3], logits[2, 4], logits[3], logits[4, 7] = math.nan, math.inf, -math.inf, -math.inf
    found, words = case.forward(on_host, made)
    assert found[1:4].eq(-math.inf).all()
    assert all(len(set(row.tolist())) == 6 and row.min() >= 0 and row.max() < 40 for row in words)
    want, best = case.expected("forward", made)
    compare("log_probabilities", found[::4], want[::4])
    assert torch.equal(words[::4].double(), best[::4])


def test_forbidden_words_come_last_and_in_order(on_host):
    case = BestCase(50, 12)
    made = case.tensors()
    made["logits"][:, :45] = -math.inf
    found, words = case.forward(on_host, made)
    assert found[:, :5].isfinite().all() and found[:, 5:].eq(-math.inf).all()
    assert torch.equal(words[:, 5:], torch.arange(7.0).expand(3, 7))


def test_nothing_to_do(on_host):
    assert BestCase(9, rows=0).forward(on_host, BestCase(9, rows=0).tensors())[0].shape == (0, 8)
    assert RingCase(sentences=0).forward(on_host, RingCase(sentences=0).tensors())[0].shape == (0, 16)


@pytest.fixture
def searching_on_host(on_host):
    """Inside, the search in torch runs these kernels."""
    library = torch.library.Library("lightconv", "IMPL")
    for name in ("ring_step", "best_words"):
        library.impl(name, functools.partial(getattr(decoding_calls, name), on_host), "CPU")
    yield
    library._destroy()


def cases():
    yield from ((f"random {seed}", random_models.random_case(seed)) for seed in range(6))
    options = random_models.SearchOptions(pad=1, unk=3, eos=2, beam_size=3, min_len=3, max_len_b=12)
    source = random_models.random_batch(random.Random(3), 3, 9, 50)
    yield from ((mixer, random_models.Case([random_models.model_of(mixer)], options, source, 12)) for mixer in MIXERS)


def test_the_search_finds_what_it_finds_by_the_reference(request):
    """Random models with all options, and each mixer for a dozen steps."""
    expected = {name: case.search(TorchSearch) for name, case in cases()}
    request.getfixturevalue("searching_on_host")
    for name, case in cases():
        random_models.assert_same(expected[name], case.search(TorchSearch), f"{name}:")
