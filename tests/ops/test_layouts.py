"""Arguments anywhere in memory: rows that overlap give the same numbers, and no layout costs much more than a copy.

tests/robustness/fuzz draws layouts at random; these are the ones that once were wrong or slow.
"""

import itertools
import time

import pytest
import torch

from lightconv_plugin import ops

BATCH, HEADS, PER_HEAD, REACH = 3, 2, 4, 4
CHANNELS = HEADS * PER_HEAD


def _unfolded(rows, channels, *, seed):
    """(rows, BATCH, channels) with rows < channels, where neighbouring rows share all channels but one."""
    memory = torch.randn(BATCH, rows + channels - 1, generator=torch.Generator().manual_seed(seed))
    return memory.unfold(1, channels, 1).transpose(0, 1)


def _calls():
    """By name: an operator as a function of its x, and of the state where it takes one."""
    generator = torch.Generator().manual_seed(0)
    fixed, predicted = (torch.randn(*shape, HEADS, 5, generator=generator) for shape in ((), (3, BATCH)))
    left, right = torch.rand(2, 3, BATCH, HEADS, generator=generator)
    return {
        "lightconv": lambda x: ops.lightconv(x, fixed, 2),
        "dynamicconv": lambda x: ops.dynamicconv(x, predicted, 2),
        "talkconv": lambda x: ops.talkconv(x, left, right, REACH, REACH),
        "lightconv-glu": lambda x: ops.lightconv(x, fixed[:1], 2, glu=True),
        "lightconv_step": lambda x, state: ops.lightconv_step(x, state, fixed),
        "dynamicconv_step": lambda x, state: ops.dynamicconv_step(x, state, predicted),
        "talkconv_step": lambda x, state: ops.talkconv_step(x, state, left, REACH),
    }


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", _calls())
def test_overlapping_rows(name):
    call = _calls()[name]
    rows = [_unfolded(3, CHANNELS, seed=1)] + [_unfolded(2, CHANNELS, seed=2)] * name.endswith("step")
    results = []
    for given in (rows, [tensor.contiguous() for tensor in rows]):
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        out = call(*leaves)
        outputs = [out] if isinstance(out, torch.Tensor) else list(out)
        grads = [torch.linspace(-1, 1, output.numel()).view(output.shape) for output in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


# ------------------------------------------------------------------------------------------------ time


def _timed(function):
    """Seconds of this thread."""
    began = time.thread_time()
    function()
    return time.thread_time() - began


def _permuted(dense, order):
    """The same values with the dimensions in another order in memory."""
    return dense.permute(order).contiguous().permute([order.index(d) for d in range(dense.dim())])


def _arguments(operator, per_head, size):
    generator = torch.Generator().manual_seed(0)
    steps, batch, heads = 96, 8, 16
    x = torch.randn(steps, batch, heads * per_head, generator=generator)
    if operator == "talkconv":
        return [x, torch.rand(steps, batch, heads, generator=generator)], (
            lambda x, left: ops.talkconv(x, left, left, size, size)
        )
    return [x, torch.randn(steps, batch, heads, size, generator=generator)], (
        lambda x, weight: ops.dynamicconv(x, weight, size // 2)
    )


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize(
    ("operator", "per_head", "size"),
    [("dynamicconv", 4, 31), ("dynamicconv", 16, 31), ("dynamicconv", 16, 7), ("talkconv", 16, 15)],
)
def test_no_layout_costs_much_more_than_a_copy(backend, operator, per_head, size):
    tensors, call = _arguments(operator, per_head, size)
    grad, threads = torch.randn_like(tensors[0]), torch.get_num_threads()

    def both(given):
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        torch.autograd.grad(call(*leaves), leaves, grad)

    torch.set_num_threads(1)
    try:
        for i, tensor in enumerate(tensors):
            for order in itertools.permutations(range(tensor.dim())):
                given = [*tensors[:i], _permuted(tensor, order), *tensors[i + 1 :]]
                ours, dense, copy = [], [], []
                for _ in range(20):
                    ours.append(_timed(lambda: both(given)))  # noqa: B023
                    dense.append(_timed(lambda: both(tensors)))
                    copy.append(_timed(lambda: given[i].clone(memory_format=torch.contiguous_format)))  # noqa: B023
                    # Two copies: of the argument, and of its gradient. Others use the caches and memory, too.
                    allowed = 3 * (min(dense) + 2 * min(copy)) + 1e-3
                    if len(ours) >= 3 and min(ours) < allowed:
                        break
                assert min(ours) < allowed, f"argument {i} as {order}: {min(ours):.4f} s, dense {min(dense):.4f} s"
    finally:
        torch.set_num_threads(threads)
