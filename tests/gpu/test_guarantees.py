"""What the contract promises beside the numbers: masks, leaks, the same bits, memory, sizes, streams."""

import random

import pytest
import torch

from benchmarks.timing import peak_bytes
from lightconv_plugin import ops
from lightconv_plugin.ops import backends
from lightconv_plugin.ops.philox import dropout_scale

from .convolution_calls import DTYPES, OPERATORS, Arguments, Case, drawn, laid_out


def same(one, other):
    """Equal bits in two results of `everything`."""
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def large(operator, dtype=torch.bfloat16, **options):
    """Enough work for every block of a GPU, and for several passes of one."""
    return Case(operator, 300, 24, 8, 64, 31, 15, dtype, bias=True, **options)


# ------------------------------------------------------------------------------------------------ dropout


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("seed", [0, 5, 2**40 + 3, 2**63 - 2])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_mask_is_that_of_the_definition(p, seed, dtype, device):
    """With x and the gradient all ones the filters' gradient is the mask, wherever a tap meets a row."""
    steps, batch, heads, size = 40, 3, 5, 7
    shapes = {"lightconv": (heads, size), "dynamicconv": (steps, batch, heads, size)}
    for operator, shape in shapes.items():
        x = torch.ones(steps, batch, heads, dtype=dtype, device=device)
        seeds = torch.tensor([seed], device=device)
        flags = (False, False) if operator == "dynamicconv" else (False,)
        options = (None, None, seeds, 3, "none", p, *flags, False, True)
        weight = torch.ones(shape, dtype=dtype, device=device)
        _, dweight = getattr(torch.ops.lightconv, operator + "_backward")(x, x, weight, *options)
        factors = dropout_scale(torch.tensor([seed]), torch.Size(shape), p, torch.float32)
        taps = torch.arange(steps)[:, None] + torch.arange(size) - 3
        meets = ((taps >= 0) & (taps < steps)).double()
        if operator == "lightconv":
            want = factors.double() * meets.sum(0) * batch
        else:
            want = factors.double() * meets[:, None, None]
        torch.testing.assert_close(dweight.cpu().double(), want, rtol=1e-2, atol=0)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_seed_comes_from_torchs_generator(operator, device):
    arguments = Arguments(Case(operator, 30, 3, 2, 16, 7, 3, torch.float32), device)
    call = getattr(ops, operator)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(call(arguments.x, arguments.weight, 3, dropout=0.3).detach())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


# ------------------------------------------------------------------------------------------------ leaks


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30], ids=["nan", "inf", "large"])
@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_padding_reaches_neither_outputs_nor_gradients(operator, dtype, glu, garbage, device):
    for size, padding_l, per_head in ((7, 6, 8), (31, 15, 64), (4, 0, 2)):
        case = Case(operator, 45, 4, 2, per_head, size, padding_l, dtype, glu=glu, bias=True)
        arguments = Arguments(case, device)
        arguments.lengths = torch.tensor([45, 17, 0, 32], device=device)
        pad = torch.arange(45, device=device)[:, None] >= arguments.lengths
        arguments.grad = arguments.grad.masked_fill(pad[..., None], 0)
        results = []
        for fill in (0.0, garbage):
            arguments.x = arguments.x.detach().masked_fill(pad[..., None], fill).requires_grad_()
            results.append(arguments.everything())
        assert same(*results) and not results[0][1][pad].any()


@pytest.mark.parametrize("garbage", [float("nan"), 1e30], ids=["nan", "large"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_packed_sequences_do_not_see_each_other(operator, garbage, device):
    for size, padding_l, per_head, dtype in ((7, 3, 8, torch.float32), (31, 30, 64, torch.bfloat16)):
        arguments = Arguments(Case(operator, 90, 1, 2, per_head, size, padding_l, dtype), device)
        arguments.cu_seqlens = torch.tensor([0, 33, 33, 50, 90], dtype=torch.int32, device=device)
        clean = arguments.everything()
        arguments.x = arguments.x.detach().clone()
        arguments.x[33:50] = garbage
        arguments.x.requires_grad_()
        arguments.grad = arguments.grad.clone()
        arguments.grad[33:50] = garbage
        dirty = arguments.everything()
        others = [*range(33), *range(50, 90)]
        assert torch.equal(clean[0][others], dirty[0][others]) and torch.equal(clean[1][others], dirty[1][others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_memory_around_the_arguments_is_not_read(operator, dtype, device):
    """NaN before, between and after the rows; a vector load that reads too far and multiplies by zero shows."""
    for per_head in (1, 3, 8, 64):
        arguments = Arguments(Case(operator, 21, 2, 3, per_head, 5, 2, dtype, layout="sliced"), device)
        assert all(tensor.isfinite().all() for tensor in arguments.everything()[:3])


# ------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_same_bits_on_every_run(operator, dtype, device):
    arguments = Arguments(large(operator, dtype, dropout=0.1, glu=True), device)
    first = arguments.everything()
    for _ in range(4):
        assert same(first, arguments.everything())


@pytest.mark.parametrize("seed", range(40))
def test_a_sentence_does_not_depend_on_its_batch(seed, device):
    """In the same memory layout: whether addresses are aligned decides on the kernels."""
    case = drawn(seed)
    case.batch, case.sequences, case.dropout = random.Random(seed).randint(2, 6), "whole", 0.0
    together = Arguments(case, device)
    whole = together.everything()
    x, weight, grad = together.x.detach(), together.weight.detach(), together.grad
    for b in range(case.batch):
        column = slice(b, b + 1)
        alone = Arguments(case, device)
        alone.x, alone.grad = (laid_out(tensor[:, column], case.layout) for tensor in (x, grad))
        alone.weight = laid_out(weight[:, column] if case.dynamic else weight, case.layout).requires_grad_()
        alone.x.requires_grad_()
        alone.bias = together.bias
        one = alone.everything()
        for name, index in (("out", 0), ("dx", 1), *[("dweight", 2)] * case.dynamic):
            assert torch.equal(one[index], whole[index][:, column]), name


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_padded_sentence_is_itself_alone(operator, device):
    for dtype, per_head in ((torch.float32, 24), (torch.bfloat16, 64)):
        arguments = Arguments(Case(operator, 60, 3, 2, per_head, 15, 7, dtype), device)
        arguments.lengths = torch.tensor([60, 31, 5], device=device)
        out = arguments.call()
        for b, length in enumerate((60, 31, 5)):
            rows = (slice(length), slice(b, b + 1))
            weight = arguments.weight[rows] if arguments.case.dynamic else arguments.weight
            assert torch.equal(out[rows], getattr(ops, operator)(arguments.x[rows], weight, 7))


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("operator", OPERATORS)
def test_memory_is_linear_in_time(operator, device):
    """A training step holds its result and its gradients, and little else, at every length."""
    peaks = []
    for steps in (512, 1024, 2048):
        arguments = Arguments(Case(operator, steps, 8, 8, 64, 31, 15, torch.bfloat16), device)
        arguments.everything()
        peaks.append(peak_bytes(arguments.everything, device))
    assert peaks[1] <= 2.1 * peaks[0] and peaks[2] <= 2.1 * peaks[1]
    if backends.backend(device.type) != "reference":
        needed = sum(tensor.nbytes for tensor in (arguments.x, arguments.x, arguments.weight))
        assert peaks[2] <= 1.25 * needed + 2**20


@pytest.mark.parametrize(
    ("operator", "heads", "size"),
    [("lightconv", 16, 31), ("dynamicconv", 16, 31), ("dynamicconv", 1024, 4)],
    ids=["lightconv", "dynamicconv", "dynamicconv-wide"],
)
def test_tensors_of_more_than_two_to_the_31_elements(operator, heads, size, roomy):
    """The last sentence of a batch, whose addresses need 64 bits, gets the bits it gets alone."""
    steps, batch, channels = (33_000, 64, 1024) if heads == 16 else (33_000, 18, 1024)
    x = torch.randn(steps, batch, channels, device=roomy, dtype=torch.bfloat16)
    shape = (heads, size) if operator == "lightconv" else (steps, batch, heads, size)
    weight = torch.randn(shape, device=roomy, dtype=torch.bfloat16)
    assert max(x.numel(), weight.numel()) > 2**31
    call = getattr(ops, operator)
    results = []
    for column in (slice(None), slice(batch - 1, batch)):
        mine = x[:, column].clone().requires_grad_()
        filters = (weight if operator == "lightconv" else weight[:, column].clone()).requires_grad_()
        out = call(mine, filters, size // 2)
        dx, dweight = torch.autograd.grad(out, (mine, filters), mine.detach())
        results.append([out[:, -1:].clone(), dx[:, -1:].clone()])
        if operator == "dynamicconv":
            results[-1].append(dweight[:, -1:].clone())
        del mine, filters, out, dx, dweight
        torch.cuda.empty_cache()
    assert same(*results)


# ------------------------------------------------------------------------------------------------ streams and devices


@pytest.mark.parametrize("operator", OPERATORS)
def test_work_is_queued_on_the_current_stream(operator, cuda):
    """The inputs become what they are on a side stream, late; a kernel on another stream would see what was before."""
    arguments = Arguments(large(operator), cuda)
    want = arguments.everything()
    x, late = arguments.x.detach().clone(), torch.full_like(arguments.x, 7)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        arguments.x = late.requires_grad_()
        got = arguments.everything()
    side.synchronize()
    assert same(got, want)


@pytest.mark.parametrize("renorm_padding", [False, True], ids=["", "renorm"])
@pytest.mark.parametrize("sequences", ["whole", "lengths", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_nothing_waits_for_the_device(operator, sequences, renorm_padding, cuda):
    batch, options = 1 if sequences == "packed" else 4, {"dropout": 0.1, "glu": True}
    renorm = {"renorm_padding": renorm_padding} if operator == "dynamicconv" else {}
    case = Case(operator, 33, batch, 2, 32, 7, 3, torch.float32, sequences=sequences, bias=True, **options, **renorm)
    arguments = Arguments(case, cuda)
    arguments.everything()
    call, given = getattr(ops, operator), {"lengths": arguments.lengths, "cu_seqlens": arguments.cu_seqlens}
    torch.cuda.set_sync_debug_mode("error")
    try:
        arguments.everything()
        call(arguments.x, arguments.weight, 3, **given, **options, **renorm)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_device_that_is_not_the_current_one(operator, cuda):
    here = Arguments(large(operator), torch.device("cuda:0")).everything()
    with torch.cuda.device(0):
        there = Arguments(large(operator), torch.device("cuda:1")).everything()
    assert all(tensor.device.index == 1 for tensor in there)
    assert same(here, [tensor.to("cuda:0") for tensor in there])
