"""The loss of label smoothing on the host: both passes against float64."""

import pytest
import torch

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
IGNORED = 1


def case(words, dtype, rows=6, pitch=None, scale=3.0):
    generator = torch.Generator().manual_seed(words)
    wide = scale * torch.randn(rows, pitch or words, generator=generator, dtype=torch.float64)
    target = torch.randint(words, (rows,), generator=generator)
    target[::3] = IGNORED
    return wide.to(dtype)[:, :words], target


def answer(logits, target, epsilon, of_loss=None, of_nll=None):
    """The losses, log Σ exp and the gradient in float64, written out."""
    logits = logits.double().requires_grad_()
    losses = -torch.log_softmax(logits, dim=-1)
    share = epsilon / (logits.shape[1] - 1)
    inside = target != IGNORED
    nll = losses.gather(1, target[:, None])[:, 0] * inside
    loss = ((1 - epsilon - share) * nll + share * losses.sum(-1)) * inside
    total = sum((one * grad).sum() for one, grad in ((loss, of_loss), (nll, of_nll)) if grad is not None)
    gradient = torch.autograd.grad(total, logits)[0] if of_loss is not None or of_nll is not None else None
    return loss.detach(), nll.detach(), (logits.logsumexp(-1) * inside).detach(), gradient


def call(on_host, logits, target, epsilon, *, backward, **tensors):
    numbers = {"type": TYPES[logits.dtype], "rows": len(logits), "words": logits.shape[1], "ignore": IGNORED}
    outputs = ("gradient",) if backward else ("loss", "nll", "normaliser")
    inputs = {"logits": logits, "target": target}
    inputs |= {name: tensor for name, tensor in tensors.items() if name not in outputs}
    written = {name: tensors[name] for name in outputs}
    numbers |= {"backward": backward, **on_host.device}
    on_host.runner.call(numbers, {"epsilon": epsilon}, inputs, written)


def forward(on_host, logits, target, epsilon):
    found = {name: torch.full((len(logits),), torch.nan) for name in ("loss", "nll", "normaliser")}
    call(on_host, logits, target, epsilon, backward=False, **found)
    return found


def tolerance(dtype):
    return {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("words, pitch", [(2, 2), (8, 8), (40, 48), (41, 41), (2048, 2048), (5003, 5003), (4104, 4104)])
def test_losses_and_gradients(on_host, words, pitch, dtype, epsilon):
    logits, target = case(words, dtype, pitch=pitch)
    of_loss, of_nll = torch.rand(2, len(target))
    want = answer(logits, target, epsilon, of_loss, of_nll)
    found = forward(on_host, logits, target, epsilon)
    for one, other in zip(found.values(), want, strict=False):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    gradient = torch.full((len(target), pitch), torch.nan, dtype=dtype)[:, :words]
    grads = {"grad_loss": of_loss, "grad_nll": of_nll, "normaliser": found["normaliser"], "gradient": gradient}
    call(on_host, logits, target, epsilon, backward=True, **grads)
    limit = tolerance(dtype)
    torch.testing.assert_close(gradient.double(), want[3], rtol=limit, atol=limit * 0.1)


@pytest.mark.parametrize("name", ["grad_loss", "grad_nll"])
def test_one_gradient_for_all_rows(on_host, name):
    """After a sum autograd's gradient has stride 0, and that of nll is absent."""
    logits, target = case(64, torch.float32)
    of_one = torch.full((1,), 2.5).expand(len(target))
    want = answer(logits, target, 0.1, *((of_one, None) if name == "grad_loss" else (None, of_one)))
    gradient = torch.full_like(logits, torch.nan)
    normaliser = forward(on_host, logits, target, 0.1)["normaliser"]
    call(on_host, logits, target, 0.1, backward=True, normaliser=normaliser, gradient=gradient, **{name: of_one})
    torch.testing.assert_close(gradient.double(), want[3], rtol=1e-5, atol=1e-6)


def test_rows_that_do_not_begin_at_16_bytes(on_host):
    logits, target = case(64, torch.bfloat16, pitch=72)
    shifted = torch.zeros(len(target), 73, dtype=torch.bfloat16)[:, 1:65]
    shifted.copy_(logits)
    for name, one in forward(on_host, shifted, target, 0.1).items():
        torch.testing.assert_close(one, forward(on_host, logits.contiguous(), target, 0.1)[name], rtol=1e-6, atol=1e-6)


def test_extreme_logits(on_host):
    """Large ones do not overflow, forbidden words add nothing, ignored rows are not read, wrong targets show."""
    rows = [[1e4, 0, -1e4, 5], [-torch.inf, 1, 2, 3], [torch.nan] * 4, [0, torch.nan, 0, 0], [1, 2, 3, 4], [1, 2, 3, 4]]
    logits, target = torch.tensor(rows), torch.tensor([0, 2, IGNORED, 2, 4, -1])
    found = forward(on_host, logits, target, 0.0)
    want = torch.nn.functional.cross_entropy(logits[:2], target[:2], reduction="none")
    torch.testing.assert_close(found["nll"][:2], want)
    assert found["nll"][2] == 0 and found["nll"][3:].isnan().all()
    gradient = torch.full_like(logits, 7)
    grads = {"grad_loss": torch.ones(6), "normaliser": found["normaliser"], "gradient": gradient}
    call(on_host, logits, target, 0.0, backward=True, **grads)
    assert gradient[:3].isfinite().all() and gradient[1, 0] == 0 and not gradient[2].any()
    assert gradient[3:].isnan().any(dim=1).all()


def test_no_rows(on_host):
    logits, target = case(8, torch.float32, rows=0)
    assert all(len(numbers) == 0 for numbers in forward(on_host, logits, target, 0.1).values())
