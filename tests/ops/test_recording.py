"""How a call is recorded for the backward pass: in C++ where a native library is loaded, else in Python."""

import itertools

import pytest
import torch
import torch._dynamo.compiled_autograd

from lightconv_plugin import ops

pytestmark = pytest.mark.usefixtures("backend")


def _calls():
    """Operator and options: a function of its floating tensors, and those tensors."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, state, bias = normal(6, 2, 8), normal(3, 2, 4), normal(4)
    lengths, packed = torch.tensor([6, 4]), torch.tensor([0, 4, 6], dtype=torch.int32)
    left, right = normal(6, 2, 2).sigmoid(), normal(6, 2, 2).sigmoid()
    static, dynamic = normal(2, 4), normal(6, 2, 2, 4)

    def conv(operator, **options):
        return lambda x, w, b=None: operator(x, w, 2, bias=b, **options)

    def step(operator, **options):
        return lambda x, s, w, b=None: torch.cat(operator(x, s, w, bias=b, **options))

    return {
        "lightconv": (conv(ops.lightconv), (x, static)),
        "lightconv-all": (conv(ops.lightconv, glu=True, lengths=lengths), (x, static, bias)),
        "dynamicconv": (conv(ops.dynamicconv), (x, dynamic)),
        "dynamicconv-all": (conv(ops.dynamicconv, glu=True, renorm_padding=True), (x, dynamic, bias)),
        "dynamicconv-packed": (conv(ops.dynamicconv, cu_seqlens=packed), (x[:, :1], dynamic[:, :1])),
        "lightconv_step": (step(ops.lightconv_step, glu=True), (x, state, static, bias)),
        "dynamicconv_step": (step(ops.dynamicconv_step, glu=True), (x, state, dynamic)),
        "talkconv": (lambda x, l, r: ops.talkconv(x, l, r, 3, 2), (x, left, right)),
        "talkconv-causal": (lambda x, l: ops.talkconv(x, l, None, 3, 0, lengths=lengths), (x, left)),
        "talkconv_step": (lambda x, s, l: torch.cat(ops.talkconv_step(x, s, l, 3)), (x[..., :4], state, left)),
    }


CALLS = _calls()


@pytest.mark.parametrize("call", CALLS)
def test_where_a_call_is_recorded(call, backend):
    function, tensors = CALLS[call]
    out = function(*(tensor.clone().requires_grad_() for tensor in tensors))
    nodes, names = [out.grad_fn], ""
    while nodes:
        node = nodes.pop()
        names += node.name()
        nodes += [following for following, _ in node.next_functions if following is not None]
    assert ("Recorded" in names) == (backend == "native")


@pytest.mark.parametrize("call", CALLS)
def test_any_of_the_tensors_may_require_a_gradient(call):
    function, tensors = CALLS[call]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    every = torch.autograd.grad(out, leaves, grad)
    for wanted in itertools.product((False, True), repeat=len(tensors)):
        leaves = [tensor.clone().requires_grad_(want) for tensor, want in zip(tensors, wanted, strict=True)]
        got = function(*leaves)
        assert torch.equal(got, out)
        assert got.requires_grad == any(wanted)
        if any(wanted):
            got.backward(grad)
        for leaf, want, expected in zip(leaves, wanted, every, strict=True):
            assert torch.equal(leaf.grad, expected) if want else leaf.grad is None


@pytest.mark.parametrize("call", CALLS)
def test_a_tensor_changed_before_the_backward_pass_is_noticed(call):
    function, tensors = CALLS[call]
    copies = [tensor.clone() for tensor in tensors]
    first = copies[0].requires_grad_()
    out = function(first, *copies[1:])
    copies[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("call", CALLS)
def test_saved_tensors_are_given_back_with_the_graph(call):
    function, tensors = CALLS[call]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves).sum()
    out.backward(retain_graph=True)
    once = [leaf.grad.clone() for leaf in leaves]
    out.backward()
    assert all(torch.equal(leaf.grad, 2 * grad) for leaf, grad in zip(leaves, once, strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        out.backward()


@pytest.mark.parametrize("call", CALLS)
def test_saved_tensors_pass_hooks(call):
    # Checkpointing and offloading of activations work by these.
    function, tensors = CALLS[call]
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        out = function(*leaves)
    assert len(packed) >= len([t for t in tensors if t.dim() > 1])
    got = torch.autograd.grad(out.sum(), leaves)
    expected = torch.autograd.grad(function(*leaves).sum(), leaves)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


# One of each pattern: tensors that are None or not, a bias or none, one result or two.
@pytest.mark.parametrize("call", ["lightconv", "dynamicconv-all", "lightconv_step", "talkconv-causal", "talkconv_step"])
def test_compiled_autograd(call):
    function, tensors = CALLS[call]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = torch.autograd.grad(function(*leaves).sum(), leaves)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        function(*leaves).sum().backward()
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, expected, strict=True))


def test_dropout_is_recorded_with_its_own_mask():
    x = torch.randn(5, 7, requires_grad=True)
    out = ops.dropout(x, 0.5)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.where(out == 0, 0.0, 2.0))
