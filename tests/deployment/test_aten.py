"""The convolutions of exported graphs against the operators, and what they refuse."""

import pytest
import torch

from lightconv_plugin import ops
from lightconv_plugin.deployment.aten import decompositions
from lightconv_plugin.ops import NORMALIZATIONS

T, B, H, C = 6, 3, 4, 12


def call(name, *arguments):
    return decompositions()[getattr(torch.ops.lightconv, name).default](*arguments)


def close(found, expected, dtype):
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("kernel_size, padding_l", [(1, 0), (4, 1), (9, 8)])
def test_convolutions(kernel_size, padding_l, normalize, dtype):
    x = torch.randn(T, B, C).to(dtype)
    for name, shape in (("lightconv", (H, kernel_size)), ("dynamicconv", (T, B, H, kernel_size))):
        weight = torch.randn(shape).to(dtype)
        found = call(name, x, weight, None, None, None, None, padding_l, normalize, 0.0, *[False] * (len(shape) // 2))
        close(found, getattr(ops, name)(x, weight, padding_l, normalize=normalize), dtype)


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("kernel_size", [1, 3, 9])
def test_steps_from_zeros_are_the_beginning(kernel_size, new):
    for name, shape in (("lightconv_step", (H, kernel_size)), ("dynamicconv_step", (new, B, H, kernel_size))):
        state, expected = torch.zeros(kernel_size - 1, B, C), None
        for _ in range(3):
            x, weight = torch.randn(new, B, C), torch.randn(shape)
            out, state = call(name, x, state, weight, None, None, "softmax", 0.0, *[False] * (len(shape) // 2))
            wanted, expected = getattr(ops, name)(x, expected, weight)
            close(out, wanted, torch.float32)
            assert torch.equal(state[len(state) - len(expected) :], expected)


@pytest.mark.parametrize("reach", [(1, 0), (4, 0), (3, 3), (9, 9)])
def test_talk(reach):
    x, left = torch.randn(T, B, C), torch.rand(T, B, H)
    left[0], left[1] = 0, 1
    right = torch.rand(T, B, H) if reach[1] else None
    close(call("talkconv", x, left, right, None, None, *reach), ops.talkconv(x, left, right, *reach), torch.float32)
    if right is None:
        state, expected = torch.zeros(reach[0], B, C), None
        for piece in ([0], [1, 2, 3], [4], [5]):
            out, state = call("talkconv_step", x[piece], state, left[piece], reach[0])
            wanted, expected = ops.talkconv_step(x[piece], expected, left[piece], reach[0])
            close(out, wanted, torch.float32)


def test_what_inference_never_asks_for():
    x, weight = torch.randn(T, B, C), torch.randn(H, 3)
    with pytest.raises(ValueError, match="bias, glu"):
        call("lightconv", x, weight, torch.zeros(C), None, None, None, 1, "softmax", 0.0, True)
