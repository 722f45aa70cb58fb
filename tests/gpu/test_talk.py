"""talkconv on a GPU: its numbers, what its contract promises, PyTorch's own machinery."""

import math
import random

import pytest
import torch

from lightconv_plugin import ops
from lightconv_plugin.ops import backends, reference

from .convolution_calls import DTYPES, LAYOUTS, TOLERANCE, laid_out, relative_error
from .talk_calls import TalkArguments, TalkCase, check, drawn, grid
from .test_guarantees import same

# One channel a head, vectors of four, the matrix units' in half types.
WIDTHS = (1, 4, 64)


def large(dtype=torch.bfloat16, **options):
    """Enough work for every block of a GPU, and for several passes of one."""
    return TalkCase(300, 24, 8, 64, 31, 15, dtype, **options)


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("case", list(grid()), ids=lambda case: case.name)
def test_windows_and_heads(case, device):
    check(case, device)


@pytest.mark.parametrize("case", [drawn(seed) for seed in range(80)], ids=lambda case: case.name)
def test_any_combination(case, device):
    check(case, device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_layouts(dtype, layout, device):
    check(TalkCase(35, 3, 2, 64, 15, 14, dtype, layout=layout), device)


@pytest.mark.parametrize(
    ("steps", "batch", "heads", "per_head"),
    [(2, 70_000, 1, 4), (70_000, 2, 1, 4), (3, 2, 70_000, 1), (300_000, 1, 1, 2)],
    ids=["many sentences", "many steps", "many heads", "more steps"],
)
def test_sizes_beyond_the_limits_of_a_grid(steps, batch, heads, per_head, device):
    """A CUDA grid has 65,535 blocks at most in its second and third dimension."""
    check(TalkCase(steps, batch, heads, per_head, 3, 1, torch.float32), device)


def test_empty_batch(device):
    out, dx, dleft, dright = TalkArguments(TalkCase(5, 0, 2, 8, 3, 2, torch.bfloat16), device).everything()
    assert out.shape == (5, 0, 16) and dx.shape[1] == dleft.shape[1] == dright.shape[1] == 0


@pytest.mark.parametrize("per_head", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_windows_reach_as_far_as_they_like(dtype, per_head, device):
    a = TalkArguments(TalkCase(3000, 2, 2, per_head, 4, 4, dtype), device)
    with torch.no_grad():
        a.left[2990, 0, 0] = math.inf
        a.left[2000, 1, 1] = 300.25
        a.right[3, 1, 0] = 500.5
        a.right[700, 0, 1] = 6e4
        a.left[1500, 0, 0] = -math.inf
    for name, ours, theirs in zip(("out", "dx", "dleft", "dright"), a.everything(), a.expected(), strict=True):
        assert relative_error(ours, theirs) <= 4 * TOLERANCE[dtype], name


@pytest.mark.parametrize("per_head", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_is_not_finite_goes_no_further_than_windows(dtype, per_head, device):
    a = TalkArguments(TalkCase(90, 3, 2, per_head, 9, 5, dtype), device)
    clean, dirty = a.everything(), TalkArguments(a.case, device)
    with torch.no_grad():
        dirty.x[40, 0] = math.nan
        dirty.left[70, 1, 0] = math.nan
    dirty.grad[40, 2] = math.inf
    wanted = dirty.expected()
    for number, (name, ours) in enumerate(zip(("out", "dx", "dleft", "dright"), dirty.everything(), strict=True)):
        want, before = wanted[number], clean[number]
        finite = want.isfinite()
        assert torch.equal(ours.cpu().isfinite(), finite) and not finite.all() and finite.any(), name
        unchanged = finite & (want == TalkArguments.expected(a)[number])
        torch.testing.assert_close(ours.cpu()[unchanged], before.cpu()[unchanged], rtol=1e-2, atol=1e-2)


# ------------------------------------------------------------------------------------------------ guarantees


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30], ids=["nan", "inf", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_reaches_neither_outputs_nor_gradients(dtype, garbage, device):
    for left, right, per_head in ((7, 6, 8), (31, 15, 64), (4, 0, 2)):
        arguments = TalkArguments(TalkCase(45, 4, 2, per_head, left, right, dtype, top=1.5), device)
        arguments.lengths = torch.tensor([45, 17, 0, 32], device=device)
        pad = torch.arange(45, device=device)[:, None] >= arguments.lengths
        results = []
        for fill in (0.0, garbage):
            arguments.x = arguments.x.detach().masked_fill(pad[..., None], fill).requires_grad_()
            results.append(arguments.everything())
        assert same(*results) and not results[0][1][pad].any()


@pytest.mark.parametrize("garbage", [float("nan"), 1e30], ids=["nan", "large"])
def test_packed_sequences_do_not_see_each_other(garbage, device):
    for left, right, per_head, dtype in ((7, 3, 8, torch.float32), (31, 30, 64, torch.bfloat16)):
        arguments = TalkArguments(TalkCase(90, 1, 2, per_head, left, right, dtype, top=3), device)
        arguments.cu_seqlens = torch.tensor([0, 33, 33, 50, 90], dtype=torch.int32, device=device)
        clean = arguments.everything()
        with torch.no_grad():
            arguments.x[33:50] = garbage
        arguments.grad[33:50] = garbage
        others = [*range(33), *range(50, 90)]
        for one, other in zip(clean, arguments.everything(), strict=True):
            assert torch.equal(one[others], other[others])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_same_bits_on_every_run(dtype, device):
    arguments = TalkArguments(large(dtype, top=1.25), device)
    first = arguments.everything()
    for _ in range(4):
        assert same(first, arguments.everything())


@pytest.mark.parametrize("seed", range(20))
def test_a_sentence_does_not_depend_on_its_batch(seed, device):
    """In the same memory layout: whether addresses are aligned decides on the kernels."""
    case = drawn(seed)
    case.batch, case.sequences = random.Random(seed).randint(2, 6), "whole"
    together = TalkArguments(case, device)
    whole = together.everything()
    for b in range(case.batch):
        column = slice(b, b + 1)
        alone = TalkArguments(case, device)
        alone.grad = laid_out(together.grad[:, column], case.layout)
        alone.x, alone.left, alone.right = (
            None if tensor is None else laid_out(tensor.detach()[:, column], case.layout).requires_grad_()
            for tensor in (together.x, together.left, together.right)
        )
        for one, all_of_them in zip(alone.everything(), whole, strict=True):
            assert one is all_of_them is None or torch.equal(one, all_of_them[:, column])


def test_a_padded_sentence_is_itself_alone(device):
    for dtype, per_head in ((torch.float32, 24), (torch.bfloat16, 64)):
        arguments = TalkArguments(TalkCase(60, 3, 2, per_head, 15, 7, dtype), device)
        arguments.lengths = torch.tensor([60, 31, 5], device=device)
        out = arguments.call()
        for b, length in enumerate((60, 31, 5)):
            rows = (slice(length), slice(b, b + 1))
            alone = ops.talkconv(arguments.x[rows], arguments.left[rows], arguments.right[rows], 15, 7)
            assert torch.equal(out[rows], alone)


def test_tensors_of_more_than_two_to_the_31_elements(roomy):
    """The last sentence of a batch, whose addresses need 64 bits, gets the bits it gets alone."""
    steps, batch, channels, heads = 33_000, 64, 1024, 16
    x = torch.randn(steps, batch, channels, device=roomy, dtype=torch.bfloat16)
    offsets = [torch.rand(steps, batch, heads, device=roomy, dtype=torch.bfloat16) for _ in range(2)]
    assert x.numel() > 2**31
    results = []
    for column in (slice(None), slice(batch - 1, batch)):
        mine = [tensor[:, column].clone().requires_grad_() for tensor in (x, *offsets)]
        out = ops.talkconv(*mine, 31, 31)
        gradients = torch.autograd.grad(out, mine, mine[0].detach())
        results.append([tensor[:, -1:].clone() for tensor in (out.detach(), *gradients)])
        del mine, out, gradients
        torch.cuda.empty_cache()
    assert same(*results)


@pytest.mark.parametrize("sequences", ["whole", "lengths", "packed"])
def test_nothing_waits_for_the_device(sequences, cuda):
    case = TalkCase(33, 1 if sequences == "packed" else 4, 2, 32, 7, 3, torch.float32, sequences=sequences)
    arguments = TalkArguments(case, cuda)
    arguments.everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        arguments.everything()
        given = {"lengths": arguments.lengths, "cu_seqlens": arguments.cu_seqlens}
        ops.talkconv(arguments.x, arguments.left, arguments.right, 7, 3, **given)
        ops.talkconv_step(arguments.x, None, arguments.left, 7)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_lengths_and_boundaries_out_of_range_do_no_harm(cuda):
    """On a GPU their values are not checked; nothing outside x may be read or written."""
    for dtype in DTYPES.values():
        a = TalkArguments(TalkCase(19, 2, 2, 64, 7, 3, dtype, top=3), cuda)
        for lengths in ([1000, -5], [2**31 - 1, 9]):
            a.lengths = torch.tensor(lengths, device=cuda)
            a.everything()
        a = TalkArguments(TalkCase(19, 1, 2, 64, 7, 3, dtype, top=3), cuda)
        for edges in ([0, 100_000, 19], [-7, 3, 2**31 - 1], [5, 2, 1, 9]):
            a.cu_seqlens = torch.tensor(edges, dtype=torch.int32, device=cuda)
            a.everything()
    torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("left", [0, 1, 3, 7, 31])
def test_any_chunking_is_the_full_pass(left, dtype, device):
    arguments = TalkArguments(TalkCase(23, 3, 2, 32, left, 0, dtype), device)
    x, offset = arguments.x.detach(), arguments.left.detach()
    whole = arguments.call().detach()
    for chunks in ([1] * 23, [5, 1, 17], [23], [2, 20, 1]):
        state, outputs, first = None, [], 0
        for new in chunks:
            out, state = ops.talkconv_step(x[first : first + new], state, offset[first : first + new], left)
            outputs.append(out)
            first += new
        assert torch.equal(state, x[23 - min(23, left) :])
        assert relative_error(torch.cat(outputs), whole.cpu().double()) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("seen", [0, 2, 6])
@pytest.mark.parametrize("new", [1, 4, 9])
def test_gradients_of_a_step(new, seen, device):
    arguments = TalkArguments(TalkCase(new, 3, 2, 16, 6, 0, torch.float32), device)
    state = torch.randn(seen, 3, 32, device=device).requires_grad_()
    inputs = (arguments.x, state, arguments.left)
    out, following = torch.ops.lightconv.talkconv_step(*inputs, 6)
    grads = [torch.randn_like(out), torch.randn_like(following)]
    got = (out, following, *torch.autograd.grad((out, following), inputs, grads))
    wide = [tensor.detach().cpu().double() for tensor in (*grads, *inputs)]
    want = (
        *reference.talkconv_step(*wide[2:], 6),
        *reference.talkconv_step_backward(*wide, 6, True, True, True),
    )
    for name, ours, theirs in zip(("out", "next", "dx", "dstate", "dleft"), got, want, strict=True):
        assert ours.shape == theirs.shape, name
        assert relative_error(ours.detach(), theirs) < 4 * TOLERANCE[torch.float32], name


# ------------------------------------------------------------------------------------------------ PyTorch's machinery


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_opcheck(dtype, device):
    a = TalkArguments(TalkCase(7, 3, 2, 16, 4, 2, dtype), device)
    torch.library.opcheck(torch.ops.lightconv.talkconv.default, (a.x, a.left, a.right, None, None, 4, 2))
    state = torch.randn(2, 3, 32, device=device, dtype=dtype).requires_grad_()
    torch.library.opcheck(torch.ops.lightconv.talkconv_step.default, (a.x, state, a.left, 4))


def test_cuda_graph(cuda):
    """A captured training step, replayed on other numbers, gives the bits of an ordinary call."""
    a = TalkArguments(TalkCase(64, 8, 4, 64, 15, 7, torch.bfloat16), cuda)
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
            for tensor in (a.x, a.grad):
                tensor.copy_(torch.randn_like(tensor))
            for tensor in (a.left, a.right):
                tensor.copy_(torch.rand_like(tensor) * 2)
        graph.replay()
        for got, want in zip(captured, a.everything(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    a = TalkArguments(TalkCase(9, 2, 2, 16, 7, 3, torch.float32), device)
    with torch.autocast(device.type, dtype=dtype):
        out = ops.talkconv(*a.tensors, 7, 3)
    assert out.dtype == dtype
    assert torch.equal(out, ops.talkconv(*(tensor.to(dtype) for tensor in a.tensors), 7, 3))
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out, a.tensors, a.grad.to(dtype)))


def test_float64_is_refused(cuda):
    if backends.backend("cuda") == "reference":
        pytest.skip("the reference computes float64 everywhere")
    a = TalkArguments(TalkCase(9, 2, 2, 16, 7, 3, torch.float64), cuda)
    with pytest.raises(TypeError, match="x must be float32, float16 or bfloat16 on CUDA, got"):
        a.call()
