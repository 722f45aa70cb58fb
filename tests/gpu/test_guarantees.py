"""What the contract promises beside the numbers: masks, leaks, the same bits, memory, sizes, streams."""

import math
import random

import pytest
import torch

from benchmarks.timing import peak_bytes
from lightconv_plugin import ops
from lightconv_plugin.ops import backends
from lightconv_plugin.ops.philox import dropout_scale

from .calls import CONVOLUTIONS, DTYPES, OPERATORS, Arguments, Case, drawn, drawn_talk, laid_out, same, talk

every_operator = pytest.mark.parametrize("operator", OPERATORS)


def large(operator, dtype=torch.bfloat16, **options):
    """Enough work for every block of a GPU, and for several passes of one."""
    if operator == "talkconv":
        return talk(300, 24, 8, 64, 31, 15, dtype, top=1.25)
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


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_the_seed_comes_from_torchs_generator(operator, device):
    arguments = Arguments(Case(operator, 30, 3, 2, 16, 7, 3, torch.float32), device)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(arguments.public(dropout=0.3).detach())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


# ------------------------------------------------------------------------------------------------ leaks


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30], ids=["nan", "inf", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("operator", "options"),
    [
        *((name, {"bias": True, "glu": glu}) for name in CONVOLUTIONS for glu in (False, True)),
        ("talkconv", {"top": 1.5}),
    ],
    ids=str,
)
def test_padding_reaches_neither_outputs_nor_gradients(operator, options, dtype, garbage, device):
    for left, right, per_head in ((6, 0, 8), (7, 6, 8), (15, 15, 64), (31, 15, 64), (0, 3, 2), (4, 0, 2)):
        arguments = Arguments(Case(operator, 45, 4, 2, per_head, left + right + 1, left, dtype, **options), device)
        arguments.lengths = torch.tensor([45, 17, 0, 32], device=device)
        pad = torch.arange(45, device=device)[:, None] >= arguments.lengths
        if operator != "talkconv":
            arguments.grad = arguments.grad.masked_fill(pad[..., None], 0)
        results = []
        for fill in (0.0, garbage):
            arguments.set(x=arguments.tensors["x"].detach().masked_fill(pad[..., None], fill))
            results.append(arguments.everything())
        assert same(*results) and not results[0]["x"][pad].any()


@pytest.mark.parametrize("garbage", [float("nan"), 1e30], ids=["nan", "large"])
@every_operator
def test_packed_sequences_do_not_see_each_other(operator, garbage, device):
    options = {"top": 3.0} if operator == "talkconv" else {}
    for size, padding_l, per_head, dtype in (
        (7, 3, 8, torch.float32),
        (11, 7, 8, torch.float32),
        (31, 30, 64, torch.bfloat16),
        (62, 31, 64, torch.bfloat16),
    ):
        arguments = Arguments(Case(operator, 90, 1, 2, per_head, size, padding_l, dtype, **options), device)
        arguments.cu_seqlens = torch.tensor([0, 33, 33, 50, 90], dtype=torch.int32, device=device)
        clean = arguments.everything()
        with torch.no_grad():
            arguments.tensors["x"][33:50] = garbage
        arguments.grad[33:50] = garbage
        dirty, others = arguments.everything(), [*range(33), *range(50, 90)]
        for name in arguments.by_row if operator == "talkconv" else ("out", "x"):
            assert torch.equal(clean[name][others], dirty[name][others]), name


@pytest.mark.parametrize("per_head", [1, 4, 64])  # one channel a head, vectors of four, the matrix units' in half types
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_is_not_finite_goes_no_further_than_windows(dtype, per_head, device):
    case = talk(90, 3, 2, per_head, 9, 5, dtype)
    clean, dirty = Arguments(case, device), Arguments(case, device)
    with torch.no_grad():
        dirty.tensors["x"][40, 0] = math.nan
        dirty.tensors["offset_left"][70, 1, 0] = math.nan
    dirty.grad[40, 2] = math.inf
    before, wanted, want_before = clean.everything(), dirty.expected(), clean.expected()
    for name, ours in dirty.everything().items():
        finite = wanted[name].isfinite()
        assert torch.equal(ours.cpu().isfinite(), finite) and not finite.all() and finite.any(), name
        unchanged = finite & (wanted[name] == want_before[name])
        torch.testing.assert_close(ours.cpu()[unchanged], before[name].cpu()[unchanged], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_memory_around_the_arguments_is_not_read(operator, dtype, device):
    """NaN before, between and after the rows; a vector load that reads too far and multiplies by zero shows."""
    for per_head in (1, 3, 8, 64):
        arguments = Arguments(Case(operator, 21, 2, 3, per_head, 5, 2, dtype, layout="sliced"), device)
        assert all(tensor.isfinite().all() for tensor in arguments.everything().values())


# ------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@every_operator
def test_the_same_bits_on_every_run(operator, dtype, device):
    options = {} if operator == "talkconv" else {"dropout": 0.1, "glu": True}
    arguments = Arguments(large(operator, dtype, **options), device)
    first = arguments.everything()
    for _ in range(4):
        assert same(first, arguments.everything())


@pytest.mark.parametrize("case", [*map(drawn, range(40)), *map(drawn_talk, range(20))], ids=lambda case: case.name)
def test_a_sentence_does_not_depend_on_its_batch(case, device):
    """In the same memory layout: whether addresses are aligned decides on the kernels."""
    case.batch, case.sequences, case.dropout = random.Random(case.seed).randint(2, 6), "whole", 0.0
    together = Arguments(case, device)
    whole = together.everything()
    for b in range(case.batch):
        column = slice(b, b + 1)
        alone = Arguments(case, device)
        alone.grad = laid_out(together.grad[:, column], case.layout)
        alone.set(
            **{
                name: laid_out(tensor.detach()[:, column] if name in together.by_row else tensor, case.layout)
                for name, tensor in together.given.items()
                if name != "bias"
            }
        )
        one = alone.everything()
        for name in together.by_row:
            assert torch.equal(one[name], whole[name][:, column]), name


@every_operator
def test_a_padded_sentence_is_itself_alone(operator, device):
    for dtype, per_head in ((torch.float32, 24), (torch.bfloat16, 64)):
        size, padding_l = (23, 15) if operator == "talkconv" else (15, 7)
        arguments = Arguments(Case(operator, 60, 3, 2, per_head, size, padding_l, dtype), device)
        arguments.lengths = torch.tensor([60, 31, 5], device=device)
        out = arguments.call()
        for b, length in enumerate((60, 31, 5)):
            rows = (slice(length), slice(b, b + 1))
            assert torch.equal(out[rows], arguments.public(arguments.part(*rows)))


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_memory_is_linear_in_time(operator, device):
    """A training step holds its result and its gradients, and little else, at every length."""
    peaks = []
    for steps in (512, 1024, 2048):
        arguments = Arguments(Case(operator, steps, 8, 8, 64, 31, 15, torch.bfloat16), device)
        arguments.everything()
        peaks.append(peak_bytes(arguments.everything, device))
    assert peaks[1] <= 2.1 * peaks[0] and peaks[2] <= 2.1 * peaks[1]
    if backends.backend(device.type) != "reference":
        x, weight = arguments.tensors["x"], arguments.tensors["weight"]
        assert peaks[2] <= 1.25 * (2 * x.nbytes + weight.nbytes) + 2**20


@pytest.mark.parametrize(
    ("operator", "batch", "heads", "size"),
    [("lightconv", 64, 16, 31), ("dynamicconv", 64, 16, 31), ("dynamicconv", 18, 1024, 4), ("talkconv", 64, 16, 63)],
    ids=["lightconv", "dynamicconv", "dynamicconv-wide", "talkconv"],
)
def test_tensors_of_more_than_two_to_the_31_elements(operator, batch, heads, size, roomy):
    """The last sentence of a batch, whose addresses need 64 bits, gets the bits it gets alone."""
    steps, half = 33_000, {"device": roomy, "dtype": torch.bfloat16}
    tensors = [torch.randn(steps, batch, 1024, **half)]
    if operator == "talkconv":
        tensors += [torch.rand(steps, batch, heads, **half) for _ in range(2)]
        options = {"max_left": 31, "max_right": 31}
    else:
        tensors.append(torch.randn(*(steps, batch) * (operator == "dynamicconv"), heads, size, **half))
        options = {"padding_l": size // 2}
    assert max(tensor.numel() for tensor in tensors) > 2**31
    results = []
    for column in (slice(None), slice(batch - 1, batch)):
        mine = [(tensor[:, column].clone() if tensor.dim() > 2 else tensor).requires_grad_() for tensor in tensors]
        out = getattr(ops, operator)(*mine, **options)
        gradients = torch.autograd.grad(out, mine, mine[0].detach())
        results.append([tensor[:, -1:].clone() for tensor in (out, *gradients) if tensor.dim() > 2])
        del mine, out, gradients
        torch.cuda.empty_cache()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# ------------------------------------------------------------------------------------------------ streams and devices


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_work_is_queued_on_the_current_stream(operator, cuda):
    """The inputs become what they are on a side stream, late; a kernel on another stream would see what was before."""
    arguments = Arguments(large(operator), cuda)
    want = arguments.everything()
    x = arguments.tensors["x"].detach().clone()
    late = torch.full_like(x, 7)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        arguments.set(x=late)
        got = arguments.everything()
    side.synchronize()
    assert same(got, want)


@pytest.mark.parametrize("sequences", ["whole", "lengths", "packed"])
@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("lightconv", {"bias": True, "dropout": 0.1, "glu": True}),
        ("dynamicconv", {"bias": True, "dropout": 0.1, "glu": True}),
        ("dynamicconv", {"bias": True, "dropout": 0.1, "glu": True, "renorm_padding": True}),
        ("talkconv", {}),
    ],
    ids=["lightconv", "dynamicconv", "dynamicconv-renorm", "talkconv"],
)
def test_nothing_waits_for_the_device(operator, options, sequences, cuda):
    batch = 1 if sequences == "packed" else 4
    size, padding_l = (11, 7) if operator == "talkconv" else (7, 3)
    case = Case(operator, 33, batch, 2, 32, size, padding_l, torch.float32, sequences=sequences, **options)
    arguments = Arguments(case, cuda)
    arguments.everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        arguments.everything()
        arguments.public(lengths=arguments.lengths, cu_seqlens=arguments.cu_seqlens)
        if operator == "talkconv":
            arguments.step(None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_a_device_that_is_not_the_current_one(operator, cuda):
    here = Arguments(large(operator), torch.device("cuda:0")).everything()
    with torch.cuda.device(0):
        there = Arguments(large(operator), torch.device("cuda:1")).everything()
    assert all(tensor.device.index == 1 for tensor in there.values())
    assert same(here, {name: tensor.to("cuda:0") for name, tensor in there.items()})
