"""The operators inside torch: opcheck, torch.compile, torch.export, autocast, what is imported."""

import os
import shutil
import sys
import textwrap

import pytest
import torch

from lightconv_plugin import ops
from tests import programs
from tests.warm_python import warm_python

from .conftest import BACKENDS
from .operators import CONVOLUTIONS, KINDS, OPERATORS, STEP_KINDS, pairwise, random_call

pytestmark = pytest.mark.usefixtures("backend")
# For what does not depend on the backend: processes of their own, and graphs of the operators' names.
ONCE = pytest.mark.parametrize("backend", ["reference"], indirect=True)

every_operator = pytest.mark.parametrize("operator", OPERATORS)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------------ opcheck


def detached(values):
    return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in values)


OPCHECKED = ("lightconv", "lightconv-glu", "dynamicconv", "dynamicconv-renorm-glu", "talkconv")
OPCHECK = {
    "plain": {},
    "causal": {"right": 0},
    "lengths": {"lengths": torch.tensor([6, 2])},
    "packed": {"cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32)},
}


@pytest.mark.parametrize("backend, kind, options", pairwise(BACKENDS, OPCHECKED, OPCHECK), indirect=["backend"])
def test_opcheck(kind, options):
    options = OPCHECK[options]
    call = random_call(
        kind, 6, 1 if "cu_seqlens" in options else 2, 2, 3, 2, **{"right": 1} | options, dtype=torch.float32
    )
    call = call.replace(x=call.x.transpose(0, 1).contiguous().transpose(0, 1))
    dropped = {"dropout": 0.3, "seed": torch.tensor([5])} if kind.endswith("-glu") else {}
    torch.library.opcheck(*call.registered(**dropped))
    names = [f"need_{name}" for name in (("x", "left", "right") if kind == "talkconv" else ("x", "weight"))]
    for needed in (names, *([name] for name in names)):
        needs = {name: name in needed for name in names}
        operator, arguments = call.registered("_backward", grad=call.randn_like_out(), **dropped, **needs)
        torch.library.opcheck(operator, detached(arguments), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    "backend, kind, rows, tokens", pairwise(BACKENDS, OPCHECKED, (0, 1, 3), (2, 6)), indirect=["backend"]
)
def test_opcheck_of_steps(kind, rows, tokens):
    call = random_call(kind, tokens, 2, 2, 3, 3, dtype=torch.float32)
    others = {"state": torch.randn(rows, 2, 6, requires_grad=True)}
    if kind != "talkconv":
        others |= {"dropout": 0.3, "seed": torch.tensor([5])}
    torch.library.opcheck(*call.registered("_step", **others))
    for grad, grad_state in ((torch.randn(tokens, 2, 6), None), (None, torch.randn(min(rows + tokens, 3), 2, 6))):
        operator, arguments = call.registered("_step_backward", grad=grad, grad_state=grad_state, **others)
        torch.library.opcheck(operator, detached(arguments), test_utils=("test_schema", "test_faketensor"))


def test_registered_below_autograd_for_every_device():
    for operator in OPERATORS:
        for name in (operator, operator + "_backward", operator + "_step", operator + "_step_backward"):
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


@ONCE
@pytest.mark.parametrize("operator", CONVOLUTIONS)
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
    programs.run(warm_python("torch"), "-c", textwrap.dedent(program))


# ------------------------------------------------------------------------------------------------ compile, export


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def assert_same_gradients(call, got, want, atol=1e-12):
    grad = torch.randn_like(want)
    wanted = call.gradients(want, grad)
    for name, ours in call.gradients(got, grad).items():
        torch.testing.assert_close(ours, wanted[name], rtol=0, atol=atol)


@pytest.mark.parametrize(
    "backend, kind, sequences, dynamic",
    pairwise(
        BACKENDS,
        ("lightconv", "lightconv-glu", "dynamicconv", "dynamicconv-glu", "talkconv"),
        ("whole", "lengths", "causal"),
        (False, True),
    ),
    indirect=["backend"],
)
def test_compile_fullgraph(kind, sequences, dynamic):
    operator, _ = KINDS[kind]
    reach = (3, 0) if sequences == "causal" else (2, 1)
    options = random_call(kind, 1, 1, 1, 1, *reach).options | ({"dropout": 0.2} if kind.endswith("-glu") else {})

    def run(x, others, lengths):
        return getattr(ops, operator)(x * 2, **others, lengths=lengths, **options).sin()

    faster = compiled(run, dynamic=dynamic)
    # Sizes unlike every other, which dynamo would tie them to.
    for number, (steps, batch) in enumerate(((7, 3), (9, 5), (11, 8)) if dynamic else ((7, 3),)):
        call = random_call(kind, steps, batch, 2, 3, *reach)
        others = {name: tensor for name, tensor in call.tensors.items() if name != "x"}
        lengths = torch.arange(1, batch + 1) if sequences == "lengths" else None
        torch.manual_seed(3)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            got = faster(call.x, others, lengths)
        torch.manual_seed(3)
        want = run(call.x, others, lengths)
        assert torch.equal(got, want)
        assert_same_gradients(call, got, want)


@every_operator
def test_compile_packed(operator):
    call, edges = random_call(operator, 9, 1, 2, 3, 2, 1), torch.tensor([0, 4, 9], dtype=torch.int32)
    call.options["cu_seqlens"] = edges

    def run(tensors, options):
        return getattr(ops, operator)(**tensors, **options)

    assert torch.equal(compiled(run)(call.tensors, call.options), call())


@pytest.mark.parametrize(
    "backend, operator, dropout",
    [("reference", "lightconv", 0.0), ("native", "dynamicconv", 0.3), ("native", "talkconv", 0.0)],
    indirect=["backend"],
)
def test_compile_steps_of_a_growing_state(operator, dropout):
    call = random_call(operator, 8, 2, 2, 3, 3)
    options = {"max_left": 3} if operator == "talkconv" else {"dropout": dropout}

    def step(x, state, others):
        return getattr(ops, operator + "_step")(x, state, **others, **options)

    faster = compiled(step, dynamic=True)
    state = want_state = None
    for rows in (slice(0, 1), slice(1, 3), slice(3, 6), slice(6, 8)):
        others = {name: t[rows] if t.dim() > 2 else t for name, t in call.given.items() if name != "x"}
        torch.manual_seed(6)
        out, state = faster(call.x[rows], state, others)
        torch.manual_seed(6)
        want, want_state = step(call.x[rows], want_state, others)
        assert torch.equal(out, want) and torch.equal(state, want_state)
    torch.autograd.grad(out.sum() + state.sum(), call.x)


@pytest.mark.parametrize(
    "operator, wrong, message",
    [
        ("lightconv", {"padding_l": 9}, "padding_l must satisfy 0 <= padding_l < K = 4"),
        ("talkconv", {"max_right": 0}, "offset_right must be None with max_right = 0"),
    ],
)
def test_a_compiled_call_refuses_wrong_arguments(operator, wrong, message):
    call = random_call(operator, 6, 2, 2, 3, 2, 1)
    with pytest.raises(Exception, match=message):
        torch.compile(lambda: call(**wrong), backend="aot_eager")()


def mixed_program(x, light, dynamic, bias, left, right):
    """All full passes, and a step of two."""
    y = ops.lightconv(x.transpose(0, 1), light, 1, bias=bias, glu=True)
    y = ops.dynamicconv(y.relu(), dynamic, 3, dropout=0.2)
    y = ops.talkconv(y, left.sigmoid(), right.sigmoid(), 3, 3)
    y = ops.talkconv_step(y.relu(), None, left.sigmoid(), 3)[0]
    return ops.lightconv_step(y, None, light)[0]


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
@ONCE
@pytest.mark.skipif(" " in torch.__file__, reason="inductor does not compile where torch's path has a space")
def test_compile_with_inductor():
    light = random_call("lightconv-glu", 3, 6, 2, 3, 2, 1, dtype=torch.float32)
    dynamic = random_call("dynamicconv", 6, 3, 2, 3, 2, 1, dtype=torch.float32)
    talk = random_call("talkconv", 6, 3, 2, 3, 3, 3, dtype=torch.float32)
    inputs = (light.x, light.weight, dynamic.weight, dynamic.bias, talk.offset_left, talk.offset_right)
    with torch._inductor.config.patch(fallback_random=True):
        faster = torch.compile(mixed_program, fullgraph=True)
        torch.manual_seed(1)
        got = faster(*inputs)
    torch.manual_seed(1)
    want = mixed_program(*inputs)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    for ours, theirs in zip(*(torch.autograd.grad(out, inputs, grad) for out in (got, want)), strict=True):
        torch.testing.assert_close(ours, theirs)


class Everything(torch.nn.Module):
    """Every operator in one module, to be exported."""

    def forward(self, x, light, dynamic, left, right, lengths):
        y = ops.lightconv(x, light, 3, lengths=lengths)
        y = ops.dynamicconv(y, dynamic, 2, lengths=lengths, renorm_padding=True, normalize="l2")
        y = ops.talkconv(y, left, right, 3, 2, lengths=lengths)
        y = ops.talkconv(y, left, None, 5, 0)
        y, state = ops.talkconv_step(y, None, left, 3)
        y, _ = ops.talkconv_step(y, state, left, 3)
        y, state = ops.lightconv_step(y, None, light)
        return ops.dynamicconv_step(y, state, dynamic)


@ONCE
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_export(strict):
    def inputs(steps, batch):
        light, dynamic = (random_call(name, steps, batch, 2, 3, 2, 1) for name in CONVOLUTIONS)
        talk = random_call("talkconv", steps, batch, 2, 3, 3, 2)
        tensors = (light.x, light.weight, dynamic.weight, talk.offset_left, talk.offset_right)
        return *detached(tensors), torch.arange(1, batch + 1)

    steps, batch = torch.export.Dim("steps", min=4), torch.export.Dim("batch", min=2)
    rows = {0: steps, 1: batch}
    program = torch.export.export(
        Everything(), inputs(7, 3), dynamic_shapes=(rows, None, rows, rows, rows, {0: batch}), strict=strict
    )
    names = {str(node.target) for node in program.graph.nodes if "lightconv" in str(node.target)}
    assert names == {f"lightconv.{operator}{suffix}.default" for operator in OPERATORS for suffix in ("", "_step")}
    for sizes in ((7, 3), (12, 2)):
        for got, want in zip(program.module()(*inputs(*sizes)), Everything()(*inputs(*sizes)), strict=True):
            assert torch.equal(got, want)


@every_operator
def test_tracing_does_not_look_at_values(operator):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    call, lengths = random_call(operator, 6, 2, 2, 3, 3), torch.tensor([6, 2])
    tensors = (*detached(call.given.values()), lengths)

    def run(*tensors):
        *tensors, lengths = tensors
        given = type(call)(operator, call.tensors | dict(zip(call.given, tensors, strict=True)), call.options)
        return given(lengths=lengths), given.step()[0]

    want = run(*tensors)
    assert all(map(torch.equal, make_fx(run)(*tensors)(*tensors), want))
    mode = FakeTensorMode()
    fake = [mode.from_tensor(tensor) for tensor in tensors]
    with mode:
        assert [out.shape for out in run(*fake)] == [out.shape for out in want]


@pytest.mark.parametrize("kind", STEP_KINDS)
def test_meta_tensors_have_the_shapes_of_real_ones(kind):
    real = random_call(kind, 6, 2, 2, 3, 3)
    meta = real.replace(**{name: tensor.to("meta") for name, tensor in real.given.items()})
    for one, other in zip((real(), *real.step()), (meta(), *meta.step()), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and other.is_meta


# ------------------------------------------------------------------------------------------------ autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_operator
def test_autocast(operator, dtype):
    call = random_call(operator, 6, 2, 2, 3, 2, 1, dtype=torch.float32)
    mixed = next(name for name in call.given if name != "x")
    call = call.replace(**{mixed: call.tensors[mixed].to(dtype)})
    with torch.autocast("cpu", dtype=dtype):
        out = call()
        step, state = call.step()
        step, state = call.step(state.float())
    assert out.dtype == step.dtype == state.dtype == dtype
    assert torch.equal(out, call.replace(**{name: tensor.to(dtype) for name, tensor in call.given.items()})())
    grads = call.gradients(out, torch.ones_like(out))
    assert {name: grad.dtype for name, grad in grads.items()} == {name: t.dtype for name, t in call.given.items()}


@every_operator
def test_autocast_leaves_float64_alone(operator):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert random_call(operator, 6, 2, 2, 3, 2, 1)().dtype == torch.float64


@every_operator
def test_compile_under_autocast(operator):
    call = random_call(operator, 6, 2, 2, 3, 2, 1, dtype=torch.float32)

    def run(tensors):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return getattr(ops, operator)(**tensors, **call.options)

    got = compiled(run)(call.tensors)
    assert got.dtype == torch.bfloat16 and torch.equal(got, run(call.tensors))


# ------------------------------------------------------------------------------------------------ imports


@ONCE
def test_operators_work_where_torch_is_alone():
    program = """
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
    """
    programs.run(sys.executable, "-c", textwrap.dedent(program))


@ONCE
def test_importing_the_operators_does_not_import_fairseq():
    program = "import sys, lightconv_plugin.ops; assert not {'fairseq', 'omegaconf'} & set(sys.modules)"
    programs.run(sys.executable, "-c", program)
