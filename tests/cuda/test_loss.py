"""The loss of label smoothing on the host: both passes against float64."""

import dataclasses

import pytest
import torch

from .calls import check
from .loss_calls import IGNORED, TYPES, LossCase

SIZES = [(2, 2), (8, 8), (40, 48), (41, 41), (2048, 2048), (5003, 5003), (4104, 4104)]


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("words, pitch", SIZES)
@pytest.mark.parametrize("what", ["forward", "backward"])
def test_losses_and_gradients(on_host, what, words, pitch, dtype, epsilon):
    check(LossCase(words, pitch, dtype, epsilon), what, on_host)


def test_one_gradient_for_all_rows(on_host):
    """After a sum autograd's gradient has stride 0, and that of nll is absent."""
    check(LossCase(64, 64, summed=True), "backward", on_host)


def test_the_gradient_of_nll_alone(on_host):
    case = LossCase(64, 64)
    made = case.tensors()
    gradient = case.backward(on_host, {name: tensor for name, tensor in made.items() if name != "grad_loss"})
    want = case.expected("backward", made | {"grad_loss": torch.zeros(case.rows)})
    torch.testing.assert_close(gradient.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_rows_that_do_not_begin_at_16_bytes(on_host, what):
    case = LossCase(64, 73, torch.bfloat16)
    check(case, what, on_host)


def test_extreme_logits(on_host):
    """Large ones do not overflow, forbidden words add nothing, ignored rows are not read, wrong targets show."""
    rows = [[1e4, 0, -1e4, 5], [-torch.inf, 1, 2, 3], [torch.nan] * 4, [0, torch.nan, 0, 0], [1, 2, 3, 4], [1, 2, 3, 4]]
    logits, target = torch.tensor(rows), torch.tensor([0, 2, IGNORED, 2, 4, -1])
    case = LossCase(4, 4, epsilon=0.0)
    _, nll, normaliser = case.forward(on_host, {"logits": logits, "target": target})
    want = torch.nn.functional.cross_entropy(logits[:2], target[:2], reduction="none")
    torch.testing.assert_close(nll[:2], want)
    assert nll[2] == 0 and nll[3:].isnan().all()
    made = {"logits": logits, "target": target, "grad_loss": torch.ones(6), "normaliser": normaliser}
    gradient = case.backward(on_host, made)
    assert gradient[:3].isfinite().all() and gradient[1, 0] == 0 and not gradient[2].any()
    assert gradient[3:].isnan().any(dim=1).all()


def test_no_rows(on_host):
    case = dataclasses.replace(LossCase(8, 8), rows=0)
    assert all(len(numbers) == 0 for numbers in case.forward(on_host, case.tensors()))
