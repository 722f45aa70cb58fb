"""talkconv inside torch: opcheck, torch.compile, torch.export, autocast, what is computed when."""

import os
import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightconv_plugin import ops

from .talk_oracle import arguments, gradients

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------ opcheck

OPCHECK = {
    "plain": {},
    "causal": {"max_right": 0},
    "lengths": {"lengths": torch.tensor([6, 2])},
    "packed": {"cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32)},
}


@pytest.mark.parametrize("options", OPCHECK.values(), ids=OPCHECK)
def test_opcheck(options):
    right = options.get("max_right", 3)
    tensors = arguments(6, 1 if "cu_seqlens" in options else 2, 2, 3, 4, right, dtype=torch.float32)
    tensors = [
        tensor if tensor is None else tensor.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        for tensor in tensors
    ]
    rest = (options.get("lengths"), options.get("cu_seqlens"), 4, right)
    torch.library.opcheck(torch.ops.lightconv.talkconv, (*tensors, *rest))
    tensors = [tensor if tensor is None else tensor.detach() for tensor in tensors]
    for needs in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        torch.library.opcheck(
            torch.ops.lightconv.talkconv_backward,
            (torch.randn(tensors[0].shape), *tensors, *rest, *needs),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("tokens", [2, 6])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_opcheck_of_steps(rows, tokens):
    x, offset, _ = arguments(tokens, 2, 2, 3, 3, 0, dtype=torch.float32)
    state = torch.randn(rows, 2, 6, requires_grad=True)
    torch.library.opcheck(torch.ops.lightconv.talkconv_step, (x, state, offset, 3))
    x, state, offset = (tensor.detach() for tensor in (x, state, offset))
    for grad, grad_state in ((torch.randn(tokens, 2, 6), None), (None, torch.randn(min(rows + tokens, 3), 2, 6))):
        torch.library.opcheck(
            torch.ops.lightconv.talkconv_step_backward,
            (grad, grad_state, x, state, offset, 3, True, True, True),
            test_utils=("test_schema", "test_faketensor"),
        )


# ------------------------------------------------------------------------------------------------ autograd


class Record(TorchDispatchMode):
    """Keeps the name and the arguments of every call to one of the operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lightconv":
            self.calls.append((func._opname, args))
        return func(*args, **kwargs or {})


NAMES = ("x", "offset_left", "offset_right")


@pytest.mark.parametrize("wanted", [*NAMES, "x-offset_right", ""])
def test_only_the_gradients_that_are_needed_are_computed(wanted):
    inputs = arguments(5, 2, 2, 3, 4, 4)
    for name, tensor in zip(NAMES, inputs, strict=True):
        tensor.requires_grad_(name in wanted.split("-"))
    out = ops.talkconv(*inputs, 4, 4)
    with Record() as record:
        if wanted:
            out.sum().backward()
    needs = tuple(name in wanted.split("-") for name in NAMES)
    assert out.requires_grad == any(needs)
    assert [(name, args[-3:]) for name, args in record.calls] == ([("talkconv_backward", needs)] if wanted else [])
    for need, tensor in zip(needs, inputs, strict=True):
        assert (tensor.grad is not None) == need


def test_kernels_are_given_unit_channel_strides_and_no_gradient_of_an_unused_result():
    x, offset, _ = arguments(5, 2, 2, 3, 3, 0)
    state = torch.randn(3, 2, 6, dtype=torch.float64).transpose(0, 2).contiguous().transpose(0, 2)
    with Record() as record:
        apart = x.transpose(0, 2).contiguous().transpose(0, 2)
        ops.talkconv(apart, offset, None, 3, 0).sum().backward()  # the gradient is one number, expanded
        out, new_state = ops.talkconv_step(apart, state, offset, 3)
        out.sum().backward(retain_graph=True)
        new_state.sum().backward()
    backward = [args for name, args in record.calls if name == "talkconv_step_backward"]
    assert [(grad is None, grad_state is None) for grad, grad_state, *_ in backward] == [(False, True), (True, False)]
    assert len(record.calls) == 5
    for _, args in record.calls:
        rows = [t for t in args if isinstance(t, torch.Tensor) and t.shape[-1] == 6]
        assert rows and all(t.stride(-1) == 1 for t in rows)


def test_second_order_gradients_are_refused():
    x, left, right = arguments(5, 2, 2, 3, 4, 4)
    (dx,) = torch.autograd.grad(ops.talkconv(x, left, right, 4, 4).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first-order gradients only"):
        torch.autograd.grad(dx.sum(), left)


def test_no_graph_without_gradients():
    x, left, right = arguments(5, 2, 2, 3, 4, 4)
    with torch.no_grad():
        assert not ops.talkconv(x, left, right, 4, 4).requires_grad
    with torch.inference_mode():
        ops.talkconv_step(x, None, left, 4)


def test_registered_below_autograd_for_every_device():
    for name in ("talkconv", "talkconv_backward", "talkconv_step", "talkconv_step_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lightconv::{name}", "CompositeExplicitAutograd")
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"lightconv::{name}", "CompositeImplicitAutograd")


# ------------------------------------------------------------------------------------------------ compile, export


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", ["plain", "lengths", "causal"])
def test_compile_fullgraph(kind, dynamic):
    max_right = 0 if kind == "causal" else 4

    def run(x, left, right, lengths):
        return ops.talkconv(x * 2, left, right, 4, max_right, lengths=lengths).sin()

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for number, (steps, batch) in enumerate(((7, 3), (9, 5), (11, 8)) if dynamic else ((7, 3),)):
        inputs = arguments(steps, batch, 2, 3, 4, max_right)
        lengths = torch.arange(1, batch + 1) if kind == "lengths" else None
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            got = compiled(*inputs, lengths)
        want = run(*inputs, lengths)
        assert torch.equal(got, want)
        grad = torch.randn_like(want)
        for ours, theirs in zip(gradients(got, inputs, grad), gradients(want, inputs, grad), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_compile_packed():
    inputs, edges = arguments(9, 1, 2, 3, 4, 4), torch.tensor([0, 4, 9], dtype=torch.int32)

    def run(x, left, right, edges):
        return ops.talkconv(x, left, right, 4, 4, cu_seqlens=edges)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs, edges), run(*inputs, edges))


def test_compile_steps_of_a_growing_state():
    x, offset, _ = arguments(8, 2, 2, 3, 3, 0)

    def step(x, state, offset):
        return ops.talkconv_step(x, state, offset, 3)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    state = want_state = None
    for rows in (slice(0, 1), slice(1, 3), slice(3, 6), slice(6, 8)):
        out, state = compiled(x[rows], state, offset[rows])
        want, want_state = step(x[rows], want_state, offset[rows])
        assert torch.equal(out, want) and torch.equal(state, want_state)
    torch.autograd.grad(out.sum() + state.sum(), x)


def test_a_compiled_call_refuses_wrong_arguments():
    x, left, right = arguments(6, 2, 2, 3, 4, 4)
    compiled = torch.compile(lambda *inputs: ops.talkconv(*inputs, 4, 0), backend="aot_eager")
    with pytest.raises(Exception, match="offset_right must be None with max_right = 0"):
        compiled(x, left, right)


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__file__, reason="inductor does not compile where torch's path has a space")
def test_compile_with_inductor():
    def run(x, left, right):
        y = ops.talkconv(x.transpose(0, 1), left.sigmoid(), right.sigmoid(), 3, 3)
        return ops.talkconv_step(y.relu(), None, left.sigmoid(), 3)[0]

    x, _, _ = arguments(3, 6, 2, 3, 3, 3, dtype=torch.float32)
    _, left, right = arguments(6, 3, 2, 3, 3, 3, dtype=torch.float32)
    got, want = torch.compile(run, fullgraph=True)(x, left, right), run(x, left, right)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    for ours, theirs in zip(
        gradients(got, (x, left, right), grad), gradients(want, (x, left, right), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


class Talk(torch.nn.Module):
    """Both operators in one module, to be exported."""

    def forward(self, x, left, right, lengths):
        y = ops.talkconv(x, left, right, 3, 2, lengths=lengths)
        y = ops.talkconv(y, left, None, 5, 0)
        y, state = ops.talkconv_step(y, None, left, 3)
        return ops.talkconv_step(y, state, left, 3)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_export(strict):
    def inputs(steps, batch):
        tensors = arguments(steps, batch, 2, 3, 3, 2)
        return *(tensor.detach() for tensor in tensors), torch.arange(1, batch + 1)

    steps, batch = torch.export.Dim("steps", min=4), torch.export.Dim("batch", min=2)
    shape = {0: steps, 1: batch}
    program = torch.export.export(Talk(), inputs(7, 3), dynamic_shapes=(shape, shape, shape, {0: batch}), strict=strict)
    names = {str(node.target) for node in program.graph.nodes if "lightconv" in str(node.target)}
    assert names == {"lightconv.talkconv.default", "lightconv.talkconv_step.default"}
    for sizes in ((7, 3), (12, 2)):
        for got, want in zip(program.module()(*inputs(*sizes)), Talk()(*inputs(*sizes)), strict=True):
            assert torch.equal(got, want)


def test_tracing_does_not_look_at_values():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    x, offset, lengths = torch.randn(6, 2, 6), torch.rand(6, 2, 2), torch.tensor([6, 2])

    def run(x, offset, lengths):
        return ops.talkconv_step(ops.talkconv(x, offset, None, 3, 0, lengths=lengths), None, offset, 3)[0]

    assert torch.equal(make_fx(run)(x, offset, lengths)(x, offset, lengths), run(x, offset, lengths))
    mode = FakeTensorMode()
    fake = [mode.from_tensor(tensor) for tensor in (x, offset, lengths)]
    with mode:
        assert run(*fake).shape == x.shape


def test_meta_tensors_have_the_shapes_of_real_ones():
    x, left, right = (tensor.to("meta") for tensor in arguments(6, 2, 2, 3, 4, 4))
    assert ops.talkconv(x, left, right, 4, 4).shape == x.shape
    out, state = ops.talkconv_step(x, None, left, 4)
    assert out.shape == x.shape and state.shape == (4, 2, 6)


# ------------------------------------------------------------------------------------------------ autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    x, left, right = arguments(6, 2, 2, 3, 4, 4, dtype=torch.float32)
    mixed = left.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        out = ops.talkconv(x, mixed, right, 4, 4)
        step, state = ops.talkconv_step(x, None, mixed, 4)
        step, state = ops.talkconv_step(x, state.float(), mixed, 4)
    assert out.dtype == step.dtype == state.dtype == dtype
    assert torch.equal(out, ops.talkconv(x.to(dtype), mixed, right.to(dtype), 4, 4))
    grads = gradients(out, (x, mixed, right), torch.ones_like(out))
    assert [grad.dtype for grad in grads] == [torch.float32, dtype, torch.float32]


def test_autocast_leaves_float64_alone():
    x, left, right = arguments(6, 2, 2, 3, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.talkconv(x, left, right, 4, 4).dtype == torch.float64


def test_compile_under_autocast():
    inputs = arguments(6, 2, 2, 3, 4, 4, dtype=torch.float32)

    def run(x, left, right):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ops.talkconv(x, left, right, 4, 4)

    got = torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)
    assert got.dtype == torch.bfloat16 and torch.equal(got, run(*inputs))
