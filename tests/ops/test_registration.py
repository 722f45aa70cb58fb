"""The operators inside torch: opcheck, torch.compile, torch.export, autocast, what is imported."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightconv_plugin import ops
from tests.warm_python import warm_python

from .convolution_arguments import OPERATORS, arguments, gradients

pytestmark = pytest.mark.usefixtures("backend")
# Processes of their own, to which it is all one which backend is in use here.
ONCE = pytest.mark.parametrize("backend", ["reference"], indirect=True)

STEPS = tuple(operator + "_step" for operator in OPERATORS)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------ opcheck


def _full(operator, x, weight, bias, *, lengths=None, cu_seqlens=None, dropout=0.0, glu=False):
    seed = torch.tensor([5]) if dropout else None
    renorm = (True,) if operator == "dynamicconv" else ()
    return x, weight, bias, lengths, cu_seqlens, seed, 2, "softmax", dropout, *renorm, glu


def _plain(tensors):
    return [tensor if tensor is None else tensor.detach() for tensor in tensors]


OPCHECK = {
    "plain": {},
    "glu-dropped": {"glu": True, "dropout": 0.3},
    "lengths": {"lengths": torch.tensor([6, 2])},
    "packed": {"cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32)},
}


@pytest.mark.parametrize("options", OPCHECK.values(), ids=OPCHECK)
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(operator, options):
    batch = 1 if "cu_seqlens" in options else 2
    x, weight, bias = arguments(operator, 6, batch, 2, 3, 4, glu="glu" in options, bias=True, dtype=torch.float32)
    x = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    torch.library.opcheck(getattr(torch.ops.lightconv, operator), _full(operator, x, weight, bias, **options))
    x, weight, _ = _plain((x, weight, bias))
    x, weight, _, *rest = _full(operator, x, weight, None, **options)
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(
            getattr(torch.ops.lightconv, operator + "_backward"),
            (torch.randn(6, batch, 6), x, weight, *rest, *needs),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck_of_steps(operator, rows, glu):
    x, weight, bias = arguments(operator, 2, 2, 2, 3, 4, glu=glu, bias=True, dtype=torch.float32)
    state = torch.randn(rows, 2, 6, requires_grad=True)
    options = ("softmax", 0.3, *((True,) if operator == "dynamicconv" else ()), glu)
    seed = torch.tensor([5])
    torch.library.opcheck(getattr(torch.ops.lightconv, operator + "_step"), (x, state, weight, bias, seed, *options))
    x, state, weight = _plain((x, state, weight))
    for grad, grad_state in ((torch.randn(2, 2, 6), None), (None, torch.randn(min(rows + 2, 3), 2, 6))):
        torch.library.opcheck(
            getattr(torch.ops.lightconv, operator + "_step_backward"),
            (grad, grad_state, x, state, weight, seed, *options, True, True, True),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_registered_below_autograd_for_every_device():
    for operator in (*OPERATORS, *STEPS):
        for name in (operator, operator + "_backward"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lightconv::{name}", "CompositeExplicitAutograd")
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"lightconv::{name}", "CompositeImplicitAutograd")


@ONCE
@pytest.mark.parametrize("layout", ["mkldnn", "sparse"])
def test_tensors_that_are_not_dense_are_refused(layout):
    x, weight = torch.randn(6, 2, 4), torch.randn(2, 3)
    given = getattr(x, f"to_{layout}")()
    with pytest.raises(TypeError, match=rf"x must be a dense tensor, got one of layout torch\._?{layout}"):
        ops.dropout(given, 0.3)
    with pytest.raises(TypeError, match=rf"x must be a dense tensor, got one of layout torch\._?{layout}"):
        torch.ops.lightconv.lightconv(given, weight, None, None, None, None, 1, "softmax", 0.0, False)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_kernel_for_a_device_takes_precedence(operator):
    # What a native backend does. In a process of its own: the registration cannot be undone for other tests' graphs.
    program = f"""
        import os
        import torch
        from lightconv_plugin import ops

        os.environ["LIGHTCONV_BACKEND"] = "reference"
        calls = []
        def kernel(x, weight, bias, *options):
            calls.append(tuple(weight.shape))
            return torch.full_like(x, 7)

        native = torch.library.Library("lightconv", "IMPL")
        native.impl("{operator}", kernel, "CPU")
        x = torch.ones(3, 2, 4, requires_grad=True)
        weight = torch.zeros((2, 3) if "{operator}" == "lightconv" else (3, 2, 2, 3), requires_grad=True)
        out = ops.{operator}(x, weight, 1, normalize="none")
        assert calls == [tuple(weight.shape)] and (out == 7).all()
        out.sum().backward()
        assert weight.grad.any() and not x.grad.any()  # the reference's backward pass: weights are zero
    """
    _run(program, warm_python("torch"))


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


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x-weight"])
def test_only_the_gradients_that_are_needed_are_computed(operator, wanted):
    names = ("x", "weight", "bias")
    inputs = dict(zip(names, arguments(operator, 5, 2, 2, 3, 4, bias=True), strict=True))
    for name in names:
        inputs[name].requires_grad_(name in wanted.split("-"))
    out = getattr(ops, operator)(inputs["x"], inputs["weight"], 2, bias=inputs["bias"])
    with Record() as record:
        out.sum().backward()
    needs = ("x" in wanted.split("-"), "weight" in wanted)
    assert [(name, args[-2:]) for name, args in record.calls] == (
        [(operator + "_backward", needs)] if any(needs) else []
    )
    for name in names:
        assert (inputs[name].grad is not None) == (name in wanted.split("-"))


@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_are_given_unit_channel_strides_and_no_gradient_of_an_unused_result(operator):
    x, weight, _ = arguments(operator, 5, 2, 2, 3, 4)
    state = torch.randn(3, 2, 6, dtype=torch.float64).transpose(0, 2).contiguous().transpose(0, 2)
    with Record() as record:
        apart = x.transpose(0, 2).contiguous().transpose(0, 2)
        getattr(ops, operator)(apart, weight, 2).sum().backward()  # the gradient is one number, expanded
        out, new_state = getattr(ops, operator + "_step")(apart, state, weight)
        out.sum().backward(retain_graph=True)
        new_state.sum().backward()
    backward = [args for name, args in record.calls if name == operator + "_step_backward"]
    assert [(grad is None, grad_state is None) for grad, grad_state, *_ in backward] == [(False, True), (True, False)]
    assert len(record.calls) == 5
    for _, args in record.calls:
        assert all(t.stride(-1) == 1 for t in args if isinstance(t, torch.Tensor) and t.dim() == 3)


@pytest.mark.parametrize("operator", OPERATORS)
def test_second_order_gradients_are_refused(operator):
    x, weight, _ = arguments(operator, 5, 2, 2, 3, 4)
    out = getattr(ops, operator)(x, weight, 2)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first-order gradients only"):
        torch.autograd.grad(dx.sum(), weight)


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_graph_without_gradients(operator):
    x, weight, _ = arguments(operator, 5, 2, 2, 3, 4)
    with torch.no_grad():
        assert not getattr(ops, operator)(x, weight, 2).requires_grad
    assert not getattr(ops, operator)(x.detach(), weight.detach(), 2).requires_grad
    with torch.inference_mode():
        getattr(ops, operator + "_step")(x, None, weight)


@pytest.mark.parametrize("operator", OPERATORS)
def test_activation_checkpointing_draws_the_same_mask_again(operator):
    x, weight, _ = arguments(operator, 5, 2, 2, 3, 4)

    def run(x, weight):
        return getattr(ops, operator)(x, weight, 2, dropout=0.5).square()

    torch.manual_seed(1)
    want = gradients(run(x, weight).sum(), (x, weight), None)
    torch.manual_seed(1)
    out = torch.utils.checkpoint.checkpoint(run, x, weight, use_reentrant=False)
    for ours, theirs in zip(gradients(out.sum(), (x, weight), None), want, strict=True):
        assert torch.equal(ours, theirs)


# ------------------------------------------------------------------------------------------------ compile, export


def _full_calls(operator):
    """Programs to compile, with arguments of three different sizes."""
    cases = {"plain": {}, "glu-dropped": {"glu": True, "dropout": 0.2}, "lengths": {"lengths": True}}
    for name, options in cases.items():
        sizes = []
        for steps, batch in ((7, 3), (9, 5), (11, 8)):  # unlike every other size, which dynamo would tie them to
            x, weight, bias = arguments(operator, steps, batch, 2, 3, 4, glu="glu" in options, bias=True)
            lengths = torch.arange(1, batch + 1) if "lengths" in options else None
            sizes.append((x, weight, bias, lengths))
        yield name, {k: v for k, v in options.items() if k != "lengths"}, sizes


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_compile_fullgraph(operator, dynamic):
    for name, options, sizes in _full_calls(operator):

        def run(x, weight, bias, lengths, options=options):
            return getattr(ops, operator)(x * 2, weight, 2, bias=bias, lengths=lengths, **options).sin()

        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for number, inputs in enumerate(sizes if dynamic else sizes[:1]):
            torch.manual_seed(3)
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                got = compiled(*inputs)
            torch.manual_seed(3)
            want = run(*inputs)
            assert torch.equal(got, want), name
            grad = torch.randn_like(want)
            for ours, theirs in zip(gradients(got, inputs[:3], grad), gradients(want, inputs[:3], grad), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("operator", OPERATORS)
def test_compile_packed(operator):
    x, weight, _ = arguments(operator, 9, 1, 2, 3, 4)
    edges = torch.tensor([0, 4, 9], dtype=torch.int32)

    def run(x, weight, edges):
        return getattr(ops, operator)(x, weight, 2, cu_seqlens=edges)

    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x, weight, edges), run(x, weight, edges))


@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["whole", "dropped"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_compile_steps_of_a_growing_state(operator, dropout):
    x, weight, bias = arguments(operator, 8, 2, 2, 3, 4, bias=True)

    def step(x, state, weight, bias):
        return getattr(ops, operator + "_step")(x, state, weight, bias=bias, dropout=dropout)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    state = want_state = None
    for rows in (slice(0, 1), slice(1, 3), slice(3, 6), slice(6, 8)):
        part = weight if operator == "lightconv" else weight[rows]
        torch.manual_seed(6)
        out, state = compiled(x[rows], state, part, bias)
        torch.manual_seed(6)
        want, want_state = step(x[rows], want_state, part, bias)
        assert torch.equal(out, want) and torch.equal(state, want_state)
    torch.autograd.grad(out.sum() + state.sum(), x)


def test_a_compiled_call_refuses_wrong_arguments():
    x, weight, _ = arguments("lightconv", 6, 2, 2, 3, 4)
    compiled = torch.compile(lambda x, weight: ops.lightconv(x, weight, 9), backend="aot_eager")
    with pytest.raises(Exception, match="padding_l must satisfy 0 <= padding_l < K = 4"):
        compiled(x, weight)


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__file__, reason="inductor does not compile where torch's path has a space")
def test_compile_with_inductor():
    def run(x, light, dynamic, bias):
        y = ops.lightconv(x.transpose(0, 1), light, 1, bias=bias, glu=True)
        y = ops.dynamicconv(y.relu(), dynamic, 3, dropout=0.2)
        return ops.lightconv_step(y, None, light)[0]

    x, light, _ = arguments("lightconv", 3, 6, 2, 3, 4, glu=True, dtype=torch.float32)
    _, dynamic, bias = arguments("dynamicconv", 6, 3, 2, 3, 4, bias=True, dtype=torch.float32)
    with torch._inductor.config.patch(fallback_random=True):
        compiled = torch.compile(run, fullgraph=True)
        torch.manual_seed(1)
        got = compiled(x, light, dynamic, bias)
    torch.manual_seed(1)
    want = run(x, light, dynamic, bias)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    inputs = (x, light, dynamic, bias)
    for ours, theirs in zip(gradients(got, inputs, grad), gradients(want, inputs, grad), strict=True):
        torch.testing.assert_close(ours, theirs)


class Convolution(torch.nn.Module):
    """Every operator in one module, to be exported."""

    def forward(self, x, light, dynamic, lengths):
        y = ops.lightconv(x, light, 3, lengths=lengths)
        y = ops.dynamicconv(y, dynamic, 2, lengths=lengths, renorm_padding=True, normalize="l2")
        y, state = ops.lightconv_step(y, None, light)
        return ops.dynamicconv_step(y, state, dynamic)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_export(strict):
    def inputs(steps, batch):
        x, light, _ = arguments("lightconv", steps, batch, 2, 3, 4)
        _, dynamic, _ = arguments("dynamicconv", steps, batch, 2, 3, 4)
        return x.detach(), light.detach(), dynamic.detach(), torch.arange(1, batch + 1)

    steps, batch = torch.export.Dim("steps", min=4), torch.export.Dim("batch", min=2)
    program = torch.export.export(
        Convolution(),
        inputs(7, 3),
        dynamic_shapes=({0: steps, 1: batch}, None, {0: steps, 1: batch}, {0: batch}),
        strict=strict,
    )
    names = {str(node.target) for node in program.graph.nodes if "lightconv" in str(node.target)}
    assert names == {f"lightconv.{operator}.default" for operator in (*OPERATORS, *STEPS)}
    for sizes in ((7, 3), (12, 2)):
        for got, want in zip(program.module()(*inputs(*sizes)), Convolution()(*inputs(*sizes)), strict=True):
            assert torch.equal(got, want)


def test_tracing_does_not_look_at_values():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    x, weight, _ = arguments("lightconv", 6, 2, 2, 3, 4)
    lengths = torch.tensor([6, 2])
    graph = make_fx(lambda x, lengths: ops.lightconv(x, weight.detach(), 2, lengths=lengths))(x.detach(), lengths)
    assert torch.equal(graph(x.detach(), lengths), ops.lightconv(x, weight, 2, lengths=lengths))
    mode = FakeTensorMode()
    fake = [mode.from_tensor(tensor) for tensor in (x, weight, lengths)]
    with mode:
        assert ops.lightconv(fake[0], fake[1], 2, lengths=fake[2]).shape == x.shape


@pytest.mark.parametrize("operator", (*OPERATORS, *STEPS))
def test_meta_tensors_have_the_shapes_of_real_ones(operator):
    x, weight, _ = arguments(operator, 6, 2, 2, 3, 4, glu=True)
    last = (None, weight) if operator in STEPS else (weight, 2)
    real = getattr(ops, operator)(x, *last, glu=True)
    meta = getattr(ops, operator)(x.to("meta"), *(v.to("meta") if v is weight else v for v in last), glu=True)
    pairs = zip(real, meta, strict=True) if operator in STEPS else [(real, meta)]
    assert all(one.shape == other.shape and one.dtype == other.dtype for one, other in pairs)


# ------------------------------------------------------------------------------------------------ autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_autocast(operator, dtype):
    x, weight, bias = arguments(operator, 6, 2, 2, 3, 4, bias=True, dtype=torch.float32)
    mixed = weight.detach().to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        out = getattr(ops, operator)(x, mixed, 2, bias=bias)
        step, state = getattr(ops, operator + "_step")(x, None, mixed, bias=bias)
        step, state = getattr(ops, operator + "_step")(x, state.float(), mixed, bias=bias)
    assert out.dtype == step.dtype == state.dtype == dtype
    assert torch.equal(out, getattr(ops, operator)(x.to(dtype), mixed, 2, bias=bias.to(dtype)))
    grads = gradients(out, (x, mixed, bias), torch.ones_like(out))
    assert [grad.dtype for grad in grads] == [torch.float32, dtype, torch.float32]


@pytest.mark.parametrize("operator", OPERATORS)
def test_autocast_leaves_float64_alone(operator):
    x, weight, _ = arguments(operator, 6, 2, 2, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert getattr(ops, operator)(x, weight, 2).dtype == torch.float64


@pytest.mark.parametrize("operator", OPERATORS)
def test_compile_under_autocast(operator):
    x, weight, _ = arguments(operator, 6, 2, 2, 3, 4, dtype=torch.float32)

    def run(x, weight):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return getattr(ops, operator)(x, weight, 2)

    got = torch.compile(run, fullgraph=True, backend="aot_eager")(x, weight)
    assert got.dtype == torch.bfloat16 and torch.equal(got, run(x, weight))


# ------------------------------------------------------------------------------------------------ imports


def _run(program, python=sys.executable):
    """Run a program in an interpreter, by default a fresh one, at the checkout's root."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(
        [python, "-c", textwrap.dedent(program)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@ONCE
def test_operators_work_where_torch_is_alone():
    _run("""
        import sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("fairseq", "numpy", "hydra", "omegaconf", "sacrebleu"):
                    raise ModuleNotFoundError(f"{name} is not here")

        sys.meta_path.insert(0, Refuse())
        import torch
        from lightconv_plugin import ops

        x = torch.randn(4, 2, 6, requires_grad=True)
        ops.dynamicconv(x, torch.randn(4, 2, 3, 5), 2, dropout=0.1).sum().backward()
        ops.lightconv_step(x, None, torch.randn(3, 5))
        assert x.grad.any()
        assert not {"fairseq", "numpy", "omegaconf"} & set(sys.modules)
    """)


@ONCE
def test_importing_the_operators_does_not_import_fairseq():
    _run("import sys, lightconv_plugin.ops; assert 'fairseq' not in sys.modules and 'omegaconf' not in sys.modules")
