"""ops.label_smoothed_nll_loss: the formula in float64, fairseq's own function, what it does to torch's machinery."""

import pytest
import torch

from lightconv_plugin import ops
from tests.fastest import fastest

from . import oracle
from .operators import numbers_of_threads, pairwise

pytestmark = pytest.mark.usefixtures("backend")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PAD = 1


def example(words, dtype=torch.float64, rows=(5, 3), scale=3.0):
    generator = torch.Generator().manual_seed(words)
    logits = (scale * torch.randn(*rows, words, generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.randint(words, rows, generator=generator)
    target.view(-1)[::4] = PAD
    return logits.requires_grad_(), target


def formula(logits, target, epsilon):
    return oracle.label_smoothed(logits, target, epsilon, PAD)


def tolerance(dtype):
    return {torch.float64: 1e-10, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize(
    "dtype, words, epsilon", pairwise(DTYPES, (2, 7, 16, 17, 64, 1000, 32769), (0.0, 0.1, 0.9)), ids=str
)
def test_losses_and_gradients_are_those_of_the_formula(dtype, words, epsilon):
    logits, target = example(words, dtype)
    weights = torch.rand(2, *target.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = ops.label_smoothed_nll_loss(logits, target, epsilon, PAD)
    (gradient,) = torch.autograd.grad(sum((weights * torch.stack(found)).double()).sum(), logits)
    exact = logits.detach().double().requires_grad_()
    want = formula(exact, target, epsilon)
    (exact_gradient,) = torch.autograd.grad((weights * torch.stack(want)).sum(), exact)
    for one, other in zip(found, want, strict=True):
        assert one.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(one.double(), other, rtol=1e-10 if dtype == torch.float64 else 2e-6, atol=1e-6)
    assert gradient.dtype == dtype and not gradient[target == PAD].any()
    limit = tolerance(dtype)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=limit, atol=limit * 0.1)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_the_losses_can_be_changed_in_place(epsilon):
    logits, target = example(7, torch.float32)
    loss, nll = ops.label_smoothed_nll_loss(logits.detach(), target, epsilon, PAD)
    before = nll.clone()
    loss.mul_(2)
    assert torch.equal(nll, before)


def test_it_is_fairseqs_function():
    fairseq = pytest.importorskip("fairseq.criterions.label_smoothed_cross_entropy", reason="fairseq is not installed")
    logits, target = example(1000, torch.float32)
    lprobs = torch.log_softmax(logits, dim=-1).view(-1, 1000)
    want = fairseq.label_smoothed_nll_loss(lprobs, target.view(-1), 0.1, ignore_index=PAD)
    found = ops.label_smoothed_nll_loss(logits, target, 0.1, PAD)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one.sum(), other)


def test_any_strides_and_a_gradient_for_each_loss_alone():
    logits, target = example(40)
    exact = formula(logits, target, 0.1)
    turned = logits.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    gapped = torch.nn.functional.pad(logits.detach(), (3, 2))[..., 3:-2].requires_grad_()
    for other in (turned, gapped):
        for number, loss in enumerate(ops.label_smoothed_nll_loss(other, target.t().contiguous().t(), 0.1, PAD)):
            torch.testing.assert_close(loss, exact[number].detach())
            (gradient,) = torch.autograd.grad(loss.sum(), other, retain_graph=True)
            (want,) = torch.autograd.grad(exact[number].sum(), logits, retain_graph=True)
            torch.testing.assert_close(gradient, want)


def test_threads_do_not_show():
    logits, target = example(500, torch.float32, rows=(64,))
    results = []
    for _ in numbers_of_threads(1, 2, 3):
        loss, _ = ops.label_smoothed_nll_loss(logits, target, 0.1, PAD)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), logits)))
    assert all(torch.equal(one, other) for result in results for one, other in zip(results[0], result, strict=True))


def test_the_gradient_takes_no_longer_than_the_loss(backend):
    """The loss reads the logits twice. Masked stores of AVX2 made the gradient twice as long on AMD processors."""
    if backend == "reference":
        pytest.skip("the reference is for correctness, not for speed")
    logits, target = (tensor.detach() for tensor in example(4000, torch.float32, rows=(16,)))
    target = target.clamp(min=PAD + 1)
    ones = torch.ones(16)
    of_loss, of_gradient = torch.ops.lightconv.label_smoothed_nll, torch.ops.lightconv.label_smoothed_nll_backward
    _, _, normaliser = of_loss(logits, target, 0.1, PAD)
    forward, backward = fastest(
        200,
        lambda: of_loss(logits, target, 0.1, PAD),
        lambda: of_gradient(ones, None, logits, target, normaliser, 0.1, PAD),
    )
    assert backward < 1.4 * forward, f"loss: {forward:.2e} s, gradient: {backward:.2e} s"


def test_extreme_logits():
    """Large ones do not overflow, a forbidden word has no gradient, ignored rows are not read, NaN is seen."""
    logits = torch.tensor([[1e4, 0, -1e4, 5], [1, -torch.inf, 2, 3], [torch.nan] * 4, [0, torch.nan, 0, 0]])
    logits.requires_grad_()
    target = torch.tensor([0, 2, PAD, 2])
    loss, nll = ops.label_smoothed_nll_loss(logits, target, 0.0, PAD)
    assert torch.equal(loss.nan_to_num(7), nll.nan_to_num(7))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    want = torch.nn.functional.cross_entropy(logits[:2].detach(), target[:2], reduction="none")
    torch.testing.assert_close(nll[:2].detach(), want)
    assert nll[2] == 0 and not gradient[2].any() and nll[3].isnan()
    assert gradient[:2].isfinite().all() and gradient[1, 1] == 0
    smoothed, _ = ops.label_smoothed_nll_loss(logits.detach(), target, 0.1, PAD)
    assert smoothed[0].isfinite() and smoothed[1] == torch.inf


def test_empty():
    loss, nll = ops.label_smoothed_nll_loss(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 0.1)
    assert loss.shape == nll.shape == (0,)


LOGITS, TARGET = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((LOGITS, TARGET[0], 0.1), ValueError, r"target must have the shape \(2, 3\), got \(3,\)"),
        ((LOGITS[..., :1], TARGET, 0.1), ValueError, "V >= 2"),
        ((LOGITS, TARGET.int(), 0.1), TypeError, "target must"),
        ((LOGITS.long(), TARGET, 0.1), TypeError, "logits must"),
        ((LOGITS, TARGET, 1.0), ValueError, "epsilon"),
        ((LOGITS, TARGET, 0.1, None), TypeError, "ignore_index must be an int"),
        ((LOGITS, TARGET + 5, 0.1), (IndexError, RuntimeError), "target must be in|index 5 is out of bounds"),
        ((LOGITS, TARGET - 1, 0.1, -2), (IndexError, RuntimeError), "target must be in|index -1 is out of bounds"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        ops.label_smoothed_nll_loss(*arguments)


def test_torchs_machinery():
    logits, target = example(9, torch.float32)
    rows = logits.detach().view(-1, 9).requires_grad_()
    torch.library.opcheck(torch.ops.lightconv.label_smoothed_nll.default, (rows, target.view(-1), 0.1, PAD))
    compiled = torch.compile(ops.label_smoothed_nll_loss, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(logits, target, 0.1, PAD), formula(logits, target, 0.1), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    gradient = torch.func.grad(lambda x: ops.label_smoothed_nll_loss(x, target, 0.1, PAD)[0].sum())(logits.detach())
    (want,) = torch.autograd.grad(formula(logits, target, 0.1)[0].sum(), logits)
    torch.testing.assert_close(gradient, want)
