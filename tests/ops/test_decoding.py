"""ops.ring_step and ops.best_words: the formulas in float64, torch's machinery, wrong arguments."""

import itertools
import math

import pytest
import torch

from lightconv_plugin import ops
from lightconv_plugin.generation.beams import Beams

from . import oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def example(taps=5, heads=2, per_head=3, now=7, dtype=torch.float64, sentences=3, beams=2, spare=1, shared=False):
    """Arguments of ring_step at time `now`; what no step has written is NaN."""
    generator = torch.Generator().manual_seed(taps + now)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    count, channels = sentences * beams, heads * per_head
    ring = normal(taps + spare, sentences + spare, beams + spare, channels)
    ring[now:] = math.nan
    ancestors = torch.randint(beams + spare, (sentences, beams, now + 3), generator=generator)
    ancestors[:, :, now] = torch.arange(beams)
    weight = normal(heads, taps) if shared else normal(count, heads, taps)
    given = {"x": normal(count, channels), "ring": ring, "weight": weight, "ancestors": ancestors}
    return given | {"now": torch.tensor([now])}


def check(given, **options):
    want, kept = oracle.ring_step(**given | {"now": given["now"].item()}, **options)
    dtype = given["x"].dtype
    found = ops.ring_step(**given, **options)
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(given["ring"].double().nan_to_num(7), kept.nan_to_num(7))


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("now", [0, 1, 4, 23])
def test_ring_step(now, dtype, softmax):
    for taps, per_head, shared in itertools.product((1, 2, 9), (1, 5), (False, True)):
        check(example(taps, 3, per_head, now, dtype, shared=shared), softmax=softmax)


def test_a_bias_and_filters_in_float32():
    given = example(dtype=torch.bfloat16)
    given["weight"] = given["weight"].float()
    check(given, bias=torch.randn(6).to(torch.bfloat16), softmax=True)


def test_views():
    """Of tensors with other strides, and of a larger table of ancestors."""
    given = example(spare=0)
    given["x"] = torch.nn.functional.pad(given["x"], (3, 2))[:, 3:-2]
    given["weight"] = given["weight"].transpose(0, 2).contiguous().transpose(0, 2)
    given["ancestors"] = given["ancestors"].repeat(2, 1, 1)[:3]
    check(given, softmax=True)
    given["ancestors"] = given["ancestors"].transpose(0, 2).contiguous().transpose(0, 2)
    given["x"] = given["x"].t().contiguous().t()
    check(given, softmax=True)


@pytest.mark.parametrize("static", [False, True])
def test_it_is_incremental_decoding(static):
    """With a state that is copied whenever hypotheses are reordered, as fairseq's decoders do it."""
    taps, sentences, beams = 4, 3, 2
    table, ring = Beams(sentences, beams, torch.device("cpu")), torch.full((taps, sentences, beams, 6), math.nan)
    state, first = None, torch.arange(0, sentences * beams, beams).unsqueeze(1)
    for _ in range(11):
        table.advance(sentences * beams)
        table.begin()
        x = torch.randn(sentences * beams, 6)
        weight = torch.randn(*(() if static else (len(x),)), 3, taps)
        filters = weight.flip(-1) if static else weight.flip(-1).unsqueeze(0)
        if static:
            want, state = ops.lightconv_step(x.unsqueeze(0), state, filters)
        else:
            want, state = ops.dynamicconv_step(x.unsqueeze(0), state, filters)
        found = ops.ring_step(x, ring, weight, table.ancestors, table.now, softmax=True)
        torch.testing.assert_close(found, want[0], rtol=1e-5, atol=1e-5)
        parents = (torch.randint(beams, (sentences, beams)) + first).flatten()
        table.reorder(parents)
        state = state.index_select(1, parents)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize(("words", "count"), [(2, 2), (41, 8), (5000, 10)])
@pytest.mark.parametrize("penalties", [{}, {1: math.inf, 0: -3.0}], ids=["", "penalties"])
def test_best_words(words, count, dtype, penalties):
    generator = torch.Generator().manual_seed(words)
    # No two alike: which of equally good words is found may differ.
    order = torch.stack([torch.randperm(words, generator=generator) for _ in range(5)])
    logits = (order * 2.0**-6).to(torch.float64) if words < 200 else order.double() - words + 20
    logits = logits.to(dtype)
    count = min(count, 8) if dtype != torch.float32 else count
    given, scores = torch.rand(2, 5, generator=generator)
    for options in ({}, {"normalisers": given}, {"scores": scores}, {"scores": scores, "normalisers": given}):
        want, best = oracle.best_words(logits, count, penalties=penalties, **options)
        kept = logits.clone()
        found, words_found = ops.best_words(logits, count, penalties=penalties, **options)
        assert found.dtype == torch.float32 and torch.equal(words_found, best) and torch.equal(logits, kept)
        torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=1e-5)


def test_opcheck():
    for dtype in (torch.float32, torch.bfloat16):
        given = example(dtype=dtype, now=23)
        arguments = [given[name] for name in ("x", "ring", "weight")] + [None, given["ancestors"], given["now"]]
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.lightconv.ring_step.default, (*arguments, True), test_utils=tests)
        logits = torch.randn(4, 30).to(dtype)
        for rest in ((None, None, 5, [], []), (torch.rand(4), torch.rand(4), 3, [1, 2], [math.inf, 0.5])):
            torch.library.opcheck(torch.ops.lightconv.best_words.default, (logits, *rest), test_utils=tests)


def test_gradients_are_refused():
    given = example()
    given["x"].requires_grad_()
    with pytest.raises(RuntimeError, match="ring_step has no gradients"):
        ops.ring_step(**given)
    logits = torch.randn(2, 9, requires_grad=True)
    with pytest.raises(RuntimeError, match="best_words has no gradients"):
        ops.best_words(logits, 3)
    with torch.no_grad():
        assert not ops.ring_step(**given).requires_grad and not ops.best_words(logits, 3)[0].requires_grad


WRONG = {
    "x": (torch.randn(5, 6, dtype=torch.float64), ValueError, r"x and ancestors must have the shapes"),
    "ring": (
        torch.randn(4, 3, 2, 6, dtype=torch.float64),
        ValueError,
        r"ring must have the shape .*at least \(5, 3, 2",
    ),
    "weight": (torch.randn(6, 4, 5, dtype=torch.float64), ValueError, "number of heads H that divides C = 6"),
    "ancestors": (torch.zeros(3, 2, 9, dtype=torch.int32), TypeError, "ancestors must have one of the dtypes"),
    "now": (torch.tensor(3), ValueError, r"now must have the shape \(1,\)"),
    "bias": (torch.randn(7, dtype=torch.float64), ValueError, r"bias must have the shape \(C,\) = \(6,\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_of_ring_step(name):
    value, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        ops.ring_step(**example() | {name: value})


def test_other_wrong_rings():
    given = example()
    with pytest.raises(TypeError, match="ring must have x's dtype"):
        ops.ring_step(**given | {"ring": given["ring"].float()})
    with pytest.raises(ValueError, match="ring must be contiguous"):
        ops.ring_step(**given | {"ring": given["ring"][:, :3]})
    with pytest.raises(TypeError, match="weight must have one of the dtypes"):
        ops.ring_step(**given | {"weight": given["weight"].half()})
    with pytest.raises(ValueError, match=r"weight must have the shape \(H, K\) or"):
        ops.ring_step(**given | {"weight": given["weight"][:4]})


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"logits": torch.zeros(3, 9).double()}, TypeError, "logits must have one of the dtypes"),
        ({"logits": torch.zeros(9)}, ValueError, r"logits must have the shape \(N, V\)"),
        ({"count": 10}, ValueError, "count must satisfy 1 <= count <= V = 9, got 10"),
        ({"count": 2.0}, TypeError, "count must be an int"),
        ({"scores": torch.zeros(4)}, ValueError, r"scores must have the shape \(N,\) = \(3,\)"),
        ({"normalisers": torch.zeros(3).double()}, TypeError, "normalisers must have one of the dtypes"),
        ({"penalties": dict.fromkeys(range(5), 1.0)}, ValueError, "penalties must be for at most 4 words, got 5"),
        ({"penalties": {9: 1.0}}, ValueError, "penalties must be numbers above −∞ for words in 0 … V − 1 = 8"),
        ({"penalties": {1: math.nan}}, ValueError, "got 1: nan"),
    ],
    ids=str,
)
def test_wrong_arguments_of_best_words(wrong, error, message):
    with pytest.raises(error, match=message):
        ops.best_words(**{"logits": torch.randn(3, 9), "count": 3} | wrong)
