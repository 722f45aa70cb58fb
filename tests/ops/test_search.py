"""The operators of beam search, on both backends, against float64."""

import pytest
import torch

from lightconv_plugin import ops  # noqa: F401  (registers them)

pytestmark = pytest.mark.usefixtures("backend")
log_normalisers, best_of_rows = torch.ops.lightconv.log_normalisers, torch.ops.lightconv.best_of_rows
attend = torch.ops.lightconv.attend


@pytest.mark.parametrize("count", [1, 2, 10, 40])
@pytest.mark.parametrize("vocabulary", [40, 41, 63, 640, 641, 1000, 2560, 5003])
def test_best_of_rows(vocabulary, count):
    torch.manual_seed(vocabulary)
    logits = torch.randn(9, vocabulary)
    logits[2] = -torch.inf
    logits[3, 5:] = -torch.inf
    logits[4, -1] = 9
    logits[5], logits[6] = torch.arange(float(vocabulary)), -torch.arange(float(vocabulary))
    logits[7] = torch.randint(3, (vocabulary,)).float()  # many are equal
    values, indices = best_of_rows(logits, count)
    assert torch.equal(values, logits.topk(count).values)
    assert torch.equal(logits.gather(1, indices), values)
    assert all(len(set(row)) == count for row in indices.tolist())


def test_best_of_rows_that_are_not_contiguous():
    logits = torch.randn(5, 200)[:, 10:110]
    values, indices = best_of_rows(logits, 7)
    assert torch.equal(values, logits.topk(7).values) and torch.equal(logits.gather(1, indices), values)
    values, indices = best_of_rows(torch.empty(0, 12), 3)
    assert values.shape == indices.shape == (0, 3)


@pytest.mark.parametrize("scale", [1e-3, 1, 50, 1e4])
@pytest.mark.parametrize("vocabulary", [1, 15, 16, 17, 1000, 30_001])
def test_normalisers(vocabulary, scale):
    torch.manual_seed(vocabulary)
    logits = torch.randn(6, vocabulary) * scale
    logits[1] = logits[1, 0]  # all are equal
    if vocabulary > 1:
        logits[2, 1:] = -torch.inf
    expected = torch.logsumexp(logits.double(), 1)
    torch.testing.assert_close(log_normalisers(logits).double(), expected, rtol=1e-6, atol=2e-6)


def test_normalisers_of_broken_rows_are_not_finite():
    logits = torch.randn(5, 30)
    logits[1, 3], logits[2, 4], logits[3] = torch.nan, torch.inf, -torch.inf
    assert log_normalisers(logits).isfinite().tolist() == [True, False, False, False, True]


def oracle(query, keys, values, mask):
    heads = query.double().unflatten(2, (keys.shape[1], keys.shape[3])).transpose(1, 2)
    scores = heads @ keys.double().transpose(2, 3) / keys.shape[3] ** 0.5
    if mask is not None:
        scores = scores + mask
    return (torch.softmax(scores, 3) @ values.double()).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("masked", ["no", "pads", "ancestors"])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize(
    ("sentences", "heads", "steps", "channels"), [(1, 1, 1, 16), (3, 4, 7, 32), (2, 8, 33, 64), (5, 2, 130, 128)]
)
def test_attention(sentences, heads, steps, channels, queries, masked):
    torch.manual_seed(steps)
    query = torch.randn(sentences, queries, heads * channels)
    # As the search keeps them: the first of more sentences, the first steps of more.
    cells = torch.randn(2, sentences + 1, heads, steps + 3, channels)
    keys, values = cells[:, :sentences, :, :steps]
    mask = None
    if masked != "no":
        mask = torch.zeros(sentences, 1, 1 if masked == "pads" else queries, steps)
        mask.masked_fill_(torch.rand(mask.shape) < 0.5, -torch.inf)[..., 0] = 0
    found = attend(query, keys, values, mask)
    assert found.shape == query.shape and found.is_contiguous()
    torch.testing.assert_close(found.double(), oracle(query, keys, values, mask), rtol=0, atol=3e-6)


def test_one_query_one_step_of_any_stride():
    query = torch.randn(3, 96).as_strided((3, 1, 32), (96, 5, 1))
    cells = torch.randn(2, 3, 2, 7, 16)[:, :, :, :1].as_strided((2, 3, 2, 1, 16), (672, 224, 112, 3, 1))
    torch.testing.assert_close(attend(query, *cells, None).double(), oracle(query, *cells, None), rtol=0, atol=1e-6)


def test_large_scores():
    query, keys, values = torch.full((1, 2, 16), 100.0), torch.randn(1, 1, 5, 16) * 100, torch.randn(1, 1, 5, 16)
    torch.testing.assert_close(
        attend(query, keys, values, None).double(), oracle(query, keys, values, None), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_show(threads):
    torch.manual_seed(1)
    logits, query, cells = torch.randn(90, 5000), torch.randn(40, 5, 256), torch.randn(2, 40, 4, 50, 64)
    before = torch.get_num_threads()
    results = []
    try:
        for number in (1, threads):
            torch.set_num_threads(number)
            results.append((log_normalisers(logits), *best_of_rows(logits, 10), attend(query, *cells, None)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


def test_torch_knows_them():
    logits, query, cells = torch.randn(3, 50), torch.randn(2, 3, 32), torch.randn(2, 2, 2, 4, 16)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(log_normalisers.default, (logits,), test_utils=tests)
    torch.library.opcheck(best_of_rows.default, (logits, 4), test_utils=tests)
    torch.library.opcheck(attend.default, (query, *cells, None), test_utils=tests)


def test_no_gradient_is_taken_silently(backend):
    if backend == "reference":
        pytest.skip("torch differentiates the reference's own operations")
    logits = torch.randn(2, 9, requires_grad=True)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        log_normalisers(logits).sum().backward()
