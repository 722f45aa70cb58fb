"""How a call is recorded for the backward pass: in C++ where a native library is loaded, else in Python."""

import itertools

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from lightconv_plugin import ops

from .operators import CONVOLUTIONS, OPERATORS, random_call

pytestmark = pytest.mark.usefixtures("backend")
every_operator = pytest.mark.parametrize("operator", OPERATORS)


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


class Record(TorchDispatchMode):
    """Keeps the name and the arguments of every call to one of the operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lightconv":
            self.calls.append((func._opname, args))
        return func(*args, **kwargs or {})


@every_operator
@pytest.mark.parametrize("wanted", [{0}, {1}, {2}, {0, 1}, {0, 2}, set()], ids=str)
def test_only_the_gradients_that_are_needed_are_computed(operator, wanted):
    call = random_call(operator, 5, 2, 2, 3, 2, 2)
    needs = tuple(number in wanted for number in range(3))
    for need, tensor in zip(needs, call.tensors.values(), strict=True):
        tensor.requires_grad_(need)
    out = call()
    assert out.requires_grad == any(needs)
    with Record() as record:
        if wanted:
            out.sum().backward()
    asked = needs if operator == "talkconv" else needs[:2]  # the gradient of the bias is a sum in Python
    assert [(name, args[-len(asked) :]) for name, args in record.calls] == (
        [(operator + "_backward", asked)] if any(asked) else []
    )
    for need, tensor in zip(needs, call.tensors.values(), strict=True):
        assert (tensor.grad is not None) == need


@every_operator
def test_kernels_are_given_unit_channel_strides_and_no_gradient_of_an_unused_result(operator):
    call = random_call(operator, 5, 2, 2, 3, 3)
    state = torch.randn(3, 2, 6, dtype=torch.float64).transpose(0, 2).contiguous().transpose(0, 2)
    with Record() as record:
        apart = call.replace(x=call.x.transpose(0, 2).contiguous().transpose(0, 2))
        apart().sum().backward()  # the gradient is one number, expanded
        out, new_state = apart.step(state)
        out.sum().backward(retain_graph=True)
        new_state.sum().backward()
    backward = [args for name, args in record.calls if name == operator + "_step_backward"]
    assert [(grad is None, grad_state is None) for grad, grad_state, *_ in backward] == [(False, True), (True, False)]
    assert len(record.calls) == 5
    for _, args in record.calls:
        rows = [t for t in args if isinstance(t, torch.Tensor) and t.dim() == 3 and t.shape[-1] == 6]
        assert rows and all(t.stride(-1) == 1 for t in rows)


@every_operator
def test_second_order_gradients_are_refused(operator):
    call = random_call(operator, 5, 2, 2, 3, 2, 2)
    (dx,) = torch.autograd.grad(call().square().sum(), call.x, create_graph=True)
    with pytest.raises(RuntimeError, match="first-order gradients only"):
        torch.autograd.grad(dx.sum(), [*call.given.values()][1])


@every_operator
def test_no_graph_without_gradients(operator):
    call = random_call(operator, 5, 2, 2, 3, 2)
    with torch.no_grad():
        assert not call().requires_grad
    for tensor in call.given.values():
        tensor.requires_grad_(False)
    assert not call().requires_grad
    with torch.inference_mode():
        call.step()


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_activation_checkpointing_draws_the_same_mask_again(operator):
    call = random_call(operator, 5, 2, 2, 3, 2, 1, bias=False)

    def run(x, weight):
        return getattr(ops, operator)(x, weight, 2, dropout=0.5).square()

    torch.manual_seed(1)
    want = call.gradients(run(call.x, call.weight).sum(), None)
    torch.manual_seed(1)
    out = torch.utils.checkpoint.checkpoint(run, call.x, call.weight, use_reentrant=False)
    for name, ours in call.gradients(out.sum(), None).items():
        assert torch.equal(ours, want[name])
