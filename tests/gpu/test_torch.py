"""The operators inside PyTorch's own machinery, on a GPU: opcheck, compilers, graphs, autocast, errors."""

import pytest
import torch

from lightconv_plugin.ops import backends
from tests.ops.operators import pairwise

from .calls import CONVOLUTIONS, DTYPES, OPERATORS, Arguments, Case, talk

every_operator = pytest.mark.parametrize("operator", OPERATORS)


def small(operator, device, steps=9, batch=2, per_head=16, dtype=torch.float32, **options):
    """A call with filters of 7 taps, or windows of 11 rows."""
    if operator == "talkconv":
        return Arguments(talk(steps, batch, 2, per_head, 7, 3, dtype, **options), device)
    return Arguments(Case(operator, steps, batch, 2, per_head, 7, 3, dtype, **options), device)


def test_the_native_kernels_serve_every_operator(cuda):
    if backends.backend("cuda") == "reference":
        pytest.skip("LIGHTCONV_BACKEND=reference")
    for name in backends.OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lightconv::{name}", "CUDA")


@pytest.mark.parametrize(
    ("operator", "dtype", "glu", "dropout"),
    [
        *pairwise(CONVOLUTIONS, DTYPES.values(), (False, True), (0.0, 0.3)),
        *(("talkconv", dtype, False, 0.0) for dtype in DTYPES.values()),
    ],
    ids=str,
)
def test_opcheck(operator, dtype, glu, dropout, device):
    case = Case(operator, 7, 3, 2, 8, 4, 2, dtype, glu=glu, dropout=dropout, bias=operator != "talkconv")
    arguments = Arguments(case, device)
    torch.library.opcheck(*arguments.registered())
    state = torch.randn(2, 3, 16, device=device, dtype=dtype).requires_grad_()
    torch.library.opcheck(*arguments.registered("_step", state=state))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_compile_fullgraph(operator, dynamic, device):
    # Inductor on the CPU is tests/ops/test_registration.py's; here it would compile C++ for minutes.
    backend = "inductor" if device.type == "cuda" else "aot_eager"

    def run(arguments, x, weight, bias):
        return arguments.public({"x": x * 2, "weight": weight, "bias": bias}).sin()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=backend)
    for steps, batch in ((9, 5), (11, 6)) if dynamic else ((9, 5),):
        a = small(operator, device, steps, batch, glu=True, bias=True)
        inputs = tuple(a.given.values())
        got, want = compiled(a, *inputs), run(a, *inputs)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(
            torch.autograd.grad(got, inputs, a.grad), torch.autograd.grad(want, inputs, a.grad), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        *((name, options) for name in CONVOLUTIONS for options in ({}, {"dropout": 0.2}, {"glu": True})),
        ("talkconv", {}),
    ],
    ids=str,
)
def test_cuda_graph(operator, options, cuda):
    """A captured training step, replayed on other numbers, gives the bits of an ordinary call."""
    size, padding_l = (23, 15) if operator == "talkconv" else (15, 7)
    bias = operator != "talkconv"
    a = Arguments(Case(operator, 64, 8, 4, 64, size, padding_l, torch.bfloat16, bias=bias, **options), cuda)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            a.everything()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = a.everything()
    for _ in range(2):
        with torch.no_grad():
            a.grad.copy_(torch.randn_like(a.grad))
            for name, tensor in a.given.items():
                if name != "bias":
                    tensor.copy_(torch.rand_like(tensor) * 2 if name.startswith("offset") else torch.randn_like(tensor))
        graph.replay()
        for name, want in a.everything().items():
            assert torch.equal(captured[name], want), name


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_a_captured_graph_draws_a_new_mask_at_each_replay(operator, cuda):
    a = small(operator, cuda, 16, 4)
    a.public(dropout=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = a.public(dropout=0.5)
    results = []
    for _ in range(3):
        graph.replay()
        results.append(out.clone())
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_operator
def test_autocast(operator, dtype, device):
    a = small(operator, device, bias=operator != "talkconv")
    with torch.autocast(device.type, dtype=dtype):
        out = a.public()
    assert out.dtype == dtype
    assert torch.equal(out, a.public({name: tensor.to(dtype) for name, tensor in a.given.items()}))
    gradients = torch.autograd.grad(out, [*a.given.values()], a.grad.to(dtype))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_only_what_is_needed_is_computed(operator, device):
    """An operator hands back empty tensors for the gradients that nobody asked for."""
    a = small(operator, device)
    every = a.everything()
    for need_x, need_weight in ((True, False), (False, True)):
        backward, given = a.registered("_backward", grad=a.grad, need_x=need_x, need_weight=need_weight)
        dx, dweight = backward(*given)
        assert (dx.numel() > 0, dweight.numel() > 0) == (need_x, need_weight)
        assert torch.equal(dx, every["x"]) if need_x else torch.equal(dweight, every["weight"])


@every_operator
def test_float64_is_refused(operator, cuda):
    if backends.backend("cuda") == "reference":
        pytest.skip("the reference computes float64 everywhere")
    with pytest.raises(TypeError, match="x must be float32, float16 or bfloat16 on CUDA, got"):
        small(operator, cuda, dtype=torch.float64).call()


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_wrong_devices_are_refused(operator, cuda):
    a = small(operator, cuda)
    with pytest.raises(ValueError, match="weight must be on x's device cuda:0, got cpu"):
        a.public(a.tensors | {"weight": a.tensors["weight"].cpu()})
    with pytest.raises(ValueError, match="lengths must be on x's device cuda:0, got cpu"):
        a.public(lengths=torch.tensor([9, 2]))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@every_operator
def test_lengths_and_boundaries_out_of_range_do_no_harm(operator, dtype, cuda):
    """On a GPU their values are not checked; nothing outside x may be read or written."""
    options = {"top": 3.0} if operator == "talkconv" else {}
    a = small(operator, cuda, 19, per_head=64, dtype=dtype, **options)
    for lengths in ([1000, -5], [2**31 - 1, 9]):
        a.lengths = torch.tensor(lengths, device=cuda)
        a.everything()
    a = small(operator, cuda, 19, 1, per_head=64, dtype=dtype, **options)
    for edges in ([0, 100_000, 19], [-7, 3, 2**31 - 1], [5, 2, 1, 9]):
        a.cu_seqlens = torch.tensor(edges, dtype=torch.int32, device=cuda)
        a.everything()
    torch.cuda.synchronize()
