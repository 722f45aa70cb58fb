"""The dropout mask: Philox's published answers, its definition in the docstring, its seed."""

import pytest
import torch

from lightconv_plugin import ops
from lightconv_plugin.ops.philox import dropout_scale, philox_4x32_10, words_at

from . import oracle

# Random123's known-answer file, the lines "philox4x32 10": counter, key, result.
KNOWN = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN.values(), ids=KNOWN)
def test_known_answers(counter, key, answer):
    words = philox_4x32_10(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, words)) == answer
    assert tuple(oracle.philox(counter, key)) == answer


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63 - 2])
@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 2, 5)], ids=str)
def test_factors_are_as_defined(shape, p, seed):
    factors = dropout_scale(torch.tensor([seed]), torch.Size(shape), p, torch.float64)
    assert torch.equal(factors, oracle.dropout_factors(seed, shape, p))


def test_a_weight_is_kept_from_its_threshold_on():
    word = oracle.philox((0, 0, 0, 0), (21, 0))[0]
    kept = [
        dropout_scale(torch.tensor([21]), torch.Size((1,)), (word + d) / 2**32, torch.float64).item() > 0
        for d in (-0.5, 0, 0.5)
    ]
    assert kept == [True, True, False]


@pytest.mark.parametrize("index", [0, 2**32 - 1, 2**32, 5 * 2**32 + 3, 2**62], ids=str)
def test_words_of_large_indices(index):
    seed = 77 * 2**32 + 5
    words = words_at(torch.tensor([index]), torch.tensor([seed]))
    assert [word.item() for word in words] == oracle.philox((index % 2**32, index // 2**32, 0, 0), (5, 77))


def test_positions_beyond_one_block_of_work(monkeypatch):
    whole = dropout_scale(torch.tensor([11]), torch.Size((1003,)), 0.3, torch.float32)
    monkeypatch.setattr("lightconv_plugin.ops.philox._BLOCK", 7)
    assert torch.equal(dropout_scale(torch.tensor([11]), torch.Size((1003,)), 0.3, torch.float32), whole)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
def test_rate_and_mean(p):
    factors = dropout_scale(torch.tensor([5]), torch.Size((400_000,)), p, torch.float32)
    dropped = (factors == 0).double().mean().item()
    assert abs(dropped - p) < 5 * (p * (1 - p) / 400_000) ** 0.5
    assert torch.equal(factors.unique(), torch.tensor([0, 1 / (1 - p)], dtype=torch.float32))


def test_neighbours_are_independent():
    kept = (dropout_scale(torch.tensor([9]), torch.Size((200_000,)), 0.5, torch.float32) > 0).double() - 0.5
    for lag in (1, 2, 3, 4, 5, 31):
        assert abs((kept[:-lag] * kept[lag:]).mean().item()) * 4 < 5 / 200_000**0.5


def test_a_probability_next_to_one_drops_everything():
    factors = dropout_scale(torch.tensor([1]), torch.Size((64,)), 1 - 2**-53, torch.float64)
    assert not factors.any()


def test_nothing_is_drawn_for_an_empty_weight():
    assert dropout_scale(torch.tensor([1]), torch.Size((4, 0, 2, 3)), 0.5, torch.float32).shape == (4, 0, 2, 3)


def _dropped(seed=None, dropout=0.5):
    if seed is not None:
        torch.manual_seed(seed)
    return ops.lightconv(torch.ones(1, 1, 64), torch.ones(64, 1), 0, normalize="none", dropout=dropout).flatten()


def test_manual_seed_governs_the_mask():
    assert torch.equal(_dropped(seed=1), _dropped(seed=1))
    assert not torch.equal(_dropped(seed=1), _dropped(seed=2))
    assert not torch.equal(_dropped(seed=1), _dropped())


def test_without_dropout_the_generator_is_not_touched():
    before = torch.get_rng_state()
    _dropped(dropout=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    _dropped()
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("grad_enabled", [True, False], ids=["grad", "no_grad"])
def test_dropout_drops_whenever_it_is_asked_for(grad_enabled):
    with torch.set_grad_enabled(grad_enabled):
        out = _dropped(seed=3)
    assert set(out.tolist()) == {0.0, 2.0}


def test_the_mask_does_not_depend_on_the_layout_of_the_weight():
    x, weight = torch.randn(5, 3, 4), torch.randn(5, 3, 2, 4)
    torch.manual_seed(4)
    plain = ops.dynamicconv(x, weight, 2, dropout=0.5)
    torch.manual_seed(4)
    strided = ops.dynamicconv(x, weight.transpose(0, 3).contiguous().transpose(0, 3), 2, dropout=0.5)
    assert torch.equal(plain, strided)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_mask_does_not_depend_on_the_type(dtype):
    x, weight = torch.ones(4, 2, 6), torch.ones(4, 2, 6, 1)
    torch.manual_seed(4)
    single = ops.dynamicconv(x, weight, 0, normalize="none", dropout=0.5)
    torch.manual_seed(4)
    assert torch.equal(ops.dynamicconv(x.to(dtype), weight.to(dtype), 0, normalize="none", dropout=0.5).float(), single)
