"""The operators inside PyTorch's own machinery, on a GPU: opcheck, compilers, graphs, autocast, errors."""

import pytest
import torch

from lightconv_plugin import ops
from lightconv_plugin.ops import backends

from .convolution_calls import DTYPES, OPERATORS, Arguments, Case


def test_the_native_kernels_serve_every_operator(cuda):
    if backends.backend("cuda") == "reference":
        pytest.skip("LIGHTCONV_BACKEND=reference")
    for name in backends.OPERATORS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lightconv::{name}", "CUDA")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["whole", "dropped"])
@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(operator, glu, dropout, dtype, device):
    a = Arguments(Case(operator, 7, 3, 2, 8, 4, 2, dtype, glu=glu, dropout=dropout, bias=True), device)
    flags = (False, glu) if a.case.dynamic else (glu,)
    options = (a.lengths, a.cu_seqlens, a.seed, 2, "softmax", dropout, *flags)
    call, step = (getattr(torch.ops.lightconv, operator + suffix).default for suffix in ("", "_step"))
    torch.library.opcheck(call, (a.x, a.weight, a.bias, *options))
    state = torch.randn(2, 3, 16, device=device, dtype=dtype).requires_grad_()
    torch.library.opcheck(step, (a.x, state, a.weight, a.bias, a.seed, "softmax", dropout, *flags))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_compile_fullgraph(operator, dynamic, device):
    # Inductor on the CPU is tests/ops/test_registration.py's; here it would compile C++ for minutes.
    backend = "inductor" if device.type == "cuda" else "aot_eager"

    def run(x, weight, bias):
        return getattr(ops, operator)(x * 2, weight, 3, bias=bias, glu=True).sin()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=backend)
    for steps, batch in ((9, 5), (11, 6)) if dynamic else ((9, 5),):
        a = Arguments(Case(operator, steps, batch, 2, 16, 7, 3, torch.float32, glu=True, bias=True), device)
        inputs = (a.x, a.weight, a.bias)
        got, want = compiled(*inputs), run(*inputs)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(
            torch.autograd.grad(got, inputs, a.grad), torch.autograd.grad(want, inputs, a.grad), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.2}, {"glu": True}], ids=["plain", "dropout", "glu"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_cuda_graph(operator, options, cuda):
    """A captured training step, replayed on other numbers, gives the bits of an ordinary call."""
    a = Arguments(Case(operator, 64, 8, 4, 64, 15, 7, torch.bfloat16, bias=True, **options), cuda)
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
            for tensor in (a.x, a.weight, a.grad):
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        for got, want in zip(captured, a.everything(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_captured_graph_draws_a_new_mask_at_each_replay(operator, cuda):
    x = torch.randn(16, 4, 32, device=cuda)
    weight = torch.randn(2, 7, device=cuda) if operator == "lightconv" else torch.randn(16, 4, 2, 7, device=cuda)
    call = getattr(ops, operator)
    call(x, weight, 3, dropout=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x, weight, 3, dropout=0.5)
    results = []
    for _ in range(3):
        graph.replay()
        results.append(out.clone())
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_autocast(operator, dtype, device):
    a = Arguments(Case(operator, 9, 2, 2, 16, 7, 3, torch.float32, bias=True), device)
    call = getattr(ops, operator)
    with torch.autocast(device.type, dtype=dtype):
        out = call(a.x, a.weight, 3, bias=a.bias)
    assert out.dtype == dtype
    assert torch.equal(out, call(*(t.to(dtype) for t in (a.x, a.weight)), 3, bias=a.bias.to(dtype)))
    gradients = torch.autograd.grad(out, (a.x, a.weight, a.bias), a.grad.to(dtype))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


@pytest.mark.parametrize("operator", OPERATORS)
def test_only_what_is_needed_is_computed(operator, device):
    """An operator hands back empty tensors for the gradients that nobody asked for."""
    a = Arguments(Case(operator, 9, 2, 2, 16, 7, 3, torch.float32), device)
    flags = (False, False) if a.case.dynamic else (False,)
    backward = getattr(torch.ops.lightconv, operator + "_backward")
    for need in ((True, False), (False, True)):
        gradients = backward(a.grad, a.x, a.weight, None, None, None, 3, "softmax", 0.0, *flags, *need)
        assert [gradient.numel() > 0 for gradient in gradients] == list(need)
        for gradient, want, needed in zip(gradients, a.everything()[1:3], need, strict=True):
            assert not needed or torch.equal(gradient, want)


@pytest.mark.parametrize("operator", OPERATORS)
def test_float64_is_refused(operator, cuda):
    if backends.backend("cuda") == "reference":
        pytest.skip("the reference computes float64 everywhere")
    a = Arguments(Case(operator, 9, 2, 2, 16, 7, 3, torch.float64), cuda)
    with pytest.raises(TypeError, match="x must be float32, float16 or bfloat16 on CUDA, got"):
        a.call()


@pytest.mark.parametrize("operator", OPERATORS)
def test_wrong_devices_are_refused(operator, cuda):
    a = Arguments(Case(operator, 9, 2, 2, 16, 7, 3, torch.float32), cuda)
    call = getattr(ops, operator)
    with pytest.raises(ValueError, match="weight must be on x's device cuda:0, got cpu"):
        call(a.x, a.weight.cpu(), 3)
    with pytest.raises(ValueError, match="lengths must be on x's device cuda:0, got cpu"):
        call(a.x, a.weight, 3, lengths=torch.tensor([9, 2]))


@pytest.mark.parametrize("operator", OPERATORS)
def test_lengths_and_boundaries_out_of_range_do_no_harm(operator, cuda):
    """On a GPU their values are not checked; nothing outside x may be read or written."""
    a = Arguments(Case(operator, 9, 2, 2, 16, 7, 3, torch.float32), cuda)
    for lengths in ([1000, -5], [2**31 - 1, 9]):
        a.lengths = torch.tensor(lengths, device=cuda)
        a.everything()
    a = Arguments(Case(operator, 9, 1, 2, 16, 7, 3, torch.float32), cuda)
    for edges in ([0, 100_000, 9], [-7, 3, 2**31 - 1], [5, 2, 1, 9]):
        a.cu_seqlens = torch.tensor(edges, dtype=torch.int32, device=cuda)
        a.everything()
    torch.cuda.synchronize()
