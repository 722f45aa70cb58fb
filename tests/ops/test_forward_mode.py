"""Forward-mode derivatives are refused, which torch would give as zeros."""

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
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=MESSAGE):
            function(dual)
        assert function(x).shape == function(x.clone().requires_grad_()).shape, "no derivative was asked for"


def test_the_other_transforms_and_other_arguments_are_served():
    def scaled(factor):
        return ops.lightconv(X, STATIC, 1) * factor

    out, tangent = torch.func.jvp(scaled, (torch.tensor(2.0),), (torch.tensor(1.0),))
    torch.testing.assert_close(out, tangent * 2)
    batched = torch.vmap(lambda x: ops.lightconv(x, STATIC, 1))(torch.stack([X, 2 * X]))
    torch.testing.assert_close(batched, torch.stack([out / 2, out]))
