"""torch.func's transforms: gradients equal those of autograd, also under torch.vmap; forward-mode derivatives, which
torch would give as zeros, and second derivatives are refused."""

import pytest
import torch
from torch.autograd import forward_ad

from lightconv_plugin import ops

pytestmark = pytest.mark.usefixtures("backend")

X, STATIC, OFFSET = torch.randn(6, 2, 4), torch.randn(2, 3), torch.rand(6, 2, 2)
DYNAMIC = torch.randn(6, 2, 2, 3)
CALLS = {
    "lightconv": (lambda x: ops.lightconv(x, STATIC, 1), X),
    "lightconv-weight": (lambda weight: ops.lightconv(X, weight, 1), STATIC),
    "lightconv-bias": (lambda bias: ops.lightconv(X, STATIC, 1, bias=bias), torch.ones(4)),
    "dynamicconv": (lambda x: ops.dynamicconv(x, DYNAMIC, 1), X),
    "dynamicconv-weight": (lambda weight: ops.dynamicconv(X, weight, 1), DYNAMIC),
    "talkconv": (lambda x: ops.talkconv(x, OFFSET, OFFSET, 2, 2), X),
    "talkconv-offset": (lambda offset: ops.talkconv(X, OFFSET, offset, 2, 2), OFFSET),
    "lightconv_step": (lambda x: ops.lightconv_step(x, None, STATIC)[0], X),
    "lightconv_step-state": (lambda state: ops.lightconv_step(X, state, STATIC)[0], torch.ones(1, 2, 4)),
    "dynamicconv_step": (lambda x: ops.dynamicconv_step(x, None, DYNAMIC)[0], X),
    "talkconv_step": (lambda x: ops.talkconv_step(x, None, OFFSET, 2)[0], X),
    "dropout": (lambda x: ops.dropout(x, 0.3), X),
}
MESSAGE = "the lightconv operators have no forward-mode derivatives"


@pytest.mark.parametrize("name", CALLS)
def test_refused(name):
    function, x = CALLS[name]
    with pytest.raises(NotImplementedError, match=MESSAGE):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))
    with pytest.raises(NotImplementedError, match=MESSAGE):
        torch.func.jacfwd(function)(x)
    with pytest.raises(NotImplementedError, match=MESSAGE):
        torch.func.jvp(torch.func.grad(lambda x: function(x).square().sum()), (x,), (torch.ones_like(x),))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=MESSAGE):
            function(dual)
        assert function(x).shape == function(x.clone().requires_grad_()).shape, "no derivative was asked for"


# A vmap runs an operator without a batching rule once per element, and says so.
slow = pytest.mark.filterwarnings("ignore:There is a performance drop")


@slow
@pytest.mark.parametrize("name", CALLS)
def test_gradients(name):
    function, x = CALLS[name]

    def loss(x):
        torch.manual_seed(0)
        return function(x).square().sum()

    def by_autograd(x):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf), leaf)[0]

    several = torch.stack([x, -2 * x.abs(), x / 3] if x.min() < 0 else [x, x / 2, x / 3])
    one, each = by_autograd(x), torch.stack([by_autograd(x) for x in several])
    batched = torch.vmap(loss, randomness="same")
    torch.testing.assert_close(torch.func.grad(loss)(x), one)
    torch.testing.assert_close(torch.func.vjp(loss, x)[1](torch.tensor(1.0))[0], one)
    torch.testing.assert_close(torch.func.grad(lambda several: batched(several).sum())(several), each)
    gradient = torch.vmap(torch.func.grad(loss), in_dims=-1, out_dims=-1, randomness="same")
    torch.testing.assert_close(gradient(several.movedim(0, -1)), each.movedim(0, -1))
    torch.manual_seed(0)
    out, pullback = torch.func.vjp(function, x)
    torch.manual_seed(0)
    jacobian = torch.func.jacrev(function)(x)
    torch.testing.assert_close(jacobian.mul(2 * out[(...,) + (None,) * x.dim()]).flatten(0, 2).sum(0), one)
    torch.testing.assert_close(pullback(2 * out)[0], one)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives(name):
    function, x = CALLS[name]
    if name in ("lightconv-bias", "dropout"):  # these are linear, and their gradients have no operator of their own
        assert not torch.func.grad(lambda x: torch.func.grad(lambda x: function(x).sum())(x).sum())(x).any()
        return
    with pytest.raises(RuntimeError, match="the lightconv operators have first-order gradients only"):
        torch.func.grad(lambda x: torch.func.grad(lambda x: function(x).square().sum())(x).sum())(x)


@slow
@pytest.mark.parametrize("name", ["lengths", "cu_seqlens", "talkconv-lengths", "talkconv_step", "all"])
def test_vmap_over_any_argument(name):
    lengths = torch.tensor([[6, 4], [0, 1], [3, 6]])
    function, batch = {
        "lengths": (
            lambda x, lengths: ops.lightconv(x, STATIC, 1, lengths=lengths),
            (torch.randn(3, 6, 2, 4), lengths),
        ),
        "cu_seqlens": (
            lambda x, edges: ops.lightconv(x, STATIC, 1, cu_seqlens=edges),
            (torch.randn(3, 6, 1, 4), torch.tensor([[0, 2, 6], [0, 6, 6], [0, 5, 6]], dtype=torch.int32)),
        ),
        "talkconv-lengths": (lambda lengths: ops.talkconv(X, OFFSET, OFFSET, 2, 2, lengths=lengths), (lengths,)),
        "talkconv_step": (
            lambda x, offset: ops.talkconv_step(x, None, offset, 2)[0],
            (X.repeat(3, 1, 1, 1), torch.rand(3, 6, 2, 2)),
        ),
        "all": (
            lambda x, state, weight, bias: ops.dynamicconv_step(x, state, weight, bias=bias)[1],
            (torch.randn(3, 6, 2, 4), torch.randn(3, 2, 2, 4), torch.randn(3, 6, 2, 2, 3), torch.randn(3, 4)),
        ),
    }[name]
    expected = torch.stack([function(*one) for one in zip(*batch, strict=True)])
    torch.testing.assert_close(torch.vmap(function)(*batch), expected)
    last = [tensor.movedim(0, -1) for tensor in batch]
    torch.testing.assert_close(torch.vmap(function, in_dims=-1)(*last), expected)


def test_forward_mode_by_other_arguments_is_served():
    def scaled(factor):
        return ops.lightconv(X, STATIC, 1) * factor

    out, tangent = torch.func.jvp(scaled, (torch.tensor(2.0),), (torch.tensor(1.0),))
    torch.testing.assert_close(out, tangent * 2)
