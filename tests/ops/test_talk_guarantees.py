"""What the contract promises of talkconv beside numbers: leaks, padding, determinism, batches, memory, gradcheck."""

import os
import random
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightconv_plugin import ops
from lightconv_plugin.ops import reference

from .talk_oracle import arguments, band, gradients

pytestmark = pytest.mark.usefixtures("backend")
# For what can be seen in the reference only: operations of torch inside an operator.
REFERENCE_ALONE = pytest.mark.parametrize("backend", ["reference"], indirect=True)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GARBAGE = {"nan": float("nan"), "inf": float("inf"), "large": 1e30}


def _everything(x, left, right, max_left, max_right, grad, **options):
    out = ops.talkconv(x, left, right, max_left, max_right, **options)
    return out, *gradients(out, (x, left, right), grad)


# ------------------------------------------------------------------------------------------------ leaks


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize(("max_left", "max_right"), [(0, 4), (3, 3), (4, 0), (20, 20)])
def test_right_padding_reaches_neither_outputs_nor_gradients(max_left, max_right, garbage):
    lengths = torch.tensor([19, 3, 0, 12])
    x, left, right = arguments(19, 4, 2, 2, max_left, max_right, most=1.5)
    pad = torch.arange(19)[:, None] >= lengths
    grad = torch.randn(19, 4, 4, dtype=torch.float64).masked_fill(pad[..., None], 0)
    results = []
    for fill in (0.0, garbage):
        filled = x.detach().masked_fill(pad[..., None], fill).requires_grad_()
        results.append(_everything(filled, left, right, max_left, max_right, grad, lengths=lengths))
        assert not results[-1][1][pad].any()
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize(("max_left", "max_right"), [(0, 4), (3, 3), (4, 0), (20, 20)])
def test_packed_sequences_do_not_see_each_other(max_left, max_right, garbage):
    edges = torch.tensor([0, 9, 9, 12, 23], dtype=torch.int32)
    x, left, right = arguments(23, 1, 2, 2, max_left, max_right, most=1.5)
    dirty = x.detach().clone()
    dirty[9:12] = garbage
    dirty.requires_grad_()
    others = [*range(9), *range(12, 23)]
    grad = torch.randn(23, 1, 4, dtype=torch.float64)
    clean = _everything(x, left, right, max_left, max_right, grad, cu_seqlens=edges)
    grad[9:12] = garbage  # nor do their gradients
    for ours, theirs in zip(
        clean, _everything(dirty, left, right, max_left, max_right, grad, cu_seqlens=edges), strict=True
    ):
        assert torch.equal(ours[others], theirs[others])


@pytest.mark.parametrize("wrong", ["inf", "-inf", "nan", "both"])
@pytest.mark.parametrize(("max_left", "max_right", "most"), [(3, 3, 1.0), (15, 0, 1.0), (2, 7, 3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_is_not_finite_stays_in_its_windows(dtype, max_left, max_right, most, wrong):
    x, left, right = arguments(80, 2, 2, 3, max_left, max_right, most=most, dtype=dtype)
    clean = ops.talkconv(x, left, right, max_left, max_right)
    bad = {40: float("inf" if wrong == "both" else wrong)} | ({44: float("-inf")} if wrong == "both" else {})
    dirty = x.detach().clone()
    for t, value in bad.items():
        dirty[t, 0] = value
    dirty.requires_grad_()
    out = ops.talkconv(dirty, left, right, max_left, max_right)
    eye = torch.eye(80, dtype=torch.float64).view(80, 1, 80).expand(80, 2, 80).repeat(1, 1, 2)
    offsets = [None if offset is None else offset.detach().double() for offset in (left, right)]
    part = band(eye, *offsets, max_left, max_right).unflatten(-1, (2, 80))  # (t, b, h, s)
    held = {t: (part[:, 0, :, t] > 0).repeat_interleave(3, -1) for t in bad}
    meets = torch.stack(list(held.values())).any(0)
    assert torch.equal(out[:, 1], clean[:, 1]) and torch.equal(out[:, 0][~meets], clean[:, 0][~meets])
    if wrong == "both":
        assert torch.equal(out[:, 0].isnan(), held[40] & held[44])
        assert (out[:, 0][held[40] & ~held[44]] == float("inf")).all()
    else:
        want = torch.full_like(out[:, 0][meets], bad[40])
        assert torch.equal(out[:, 0][meets].nan_to_num(nan=7), want.nan_to_num(nan=7))

    # The same of gradients: rows in the window of an output whose gradient is not finite, and no others.
    grad = torch.randn(80, 2, 6).to(dtype)
    want, *_ = gradients(ops.talkconv(x, left, right, max_left, max_right), (x,), grad)
    grad[40, 0] = bad[40]
    got, *_ = gradients(ops.talkconv(x, left, right, max_left, max_right), (x,), grad)
    meets = (part[40, 0] > 0).T.repeat_interleave(3, -1)
    assert not got[:, 0][meets].isfinite().any()
    assert torch.equal(got[:, 1], want[:, 1]) and torch.equal(got[:, 0][~meets], want[:, 0][~meets])


def test_an_offset_that_is_garbage_in_padding_does_not_reach_the_sentence():
    lengths = torch.tensor([9, 3])
    x, left, right = arguments(9, 2, 2, 2, 3, 3)
    pad = torch.arange(9)[:, None] >= lengths
    grad = torch.randn(9, 2, 4, dtype=torch.float64).masked_fill(pad[..., None], 0)
    clean = _everything(x, left, right, 3, 3, grad, lengths=lengths)
    for garbage in (float("nan"), float("inf"), 1e30, -5.0):
        dirty = [offset.detach().masked_fill(pad[..., None], garbage).requires_grad_() for offset in (left, right)]
        got = _everything(x, *dirty, 3, 3, grad, lengths=lengths)
        for ours, theirs in zip(got, clean, strict=True):
            assert torch.equal(ours[~pad], theirs[~pad])


def test_the_future_does_not_reach_a_causal_past():
    x, left, _ = arguments(30, 2, 2, 2, 7, 0)
    clean = ops.talkconv(x, left, None, 7, 0)
    dirty = x.detach().clone()
    dirty[17:] = float("nan")
    assert torch.equal(ops.talkconv(dirty, left, None, 7, 0)[:17], clean[:17])


# ------------------------------------------------------------------------------------------------ same bits


@pytest.mark.parametrize("seed", range(12))
def test_right_padding_changes_no_bit(seed, backend):
    rng = random.Random(seed)
    steps, more, per_head = rng.randint(1, 40), rng.choice((1, 3, 30, 150)), rng.choice((1, 8, 17))
    max_left, max_right = rng.choice((0, 1, 7, 15)), rng.choice((1, 7, 15, 31))
    most, dtype = rng.choice((1.0, 2.5)), rng.choice((torch.float32, torch.bfloat16))
    padded = arguments(steps + more, 2, 2, per_head, max_left, max_right, most=most, dtype=dtype, seed=seed)
    grad = torch.randn(steps + more, 2, 2 * per_head).to(dtype)
    grad[steps:] = 0
    padded[0].data[steps:] = 0
    alone = [tensor.detach()[:steps].requires_grad_() for tensor in padded]
    want = _everything(*alone, max_left, max_right, grad[:steps])
    with_lengths = {"lengths": torch.full((2,), steps)}
    for options in ({}, with_lengths):
        got = _everything(*padded, max_left, max_right, grad, **options)
        for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            if number == 1 and backend == "reference":  # whose order of additions is that of the blocks there are
                torch.testing.assert_close(ours[:steps], theirs)
            else:
                assert torch.equal(ours[:steps], theirs), number


def test_packed_sequences_equal_each_alone(backend):
    x, left, right = arguments(60, 1, 2, 5, 7, 7, most=1.5, dtype=torch.float32)
    grad = torch.randn(60, 1, 10)
    edges = torch.tensor([0, 13, 13, 20, 60], dtype=torch.int32)
    together = _everything(x, left, right, 7, 7, grad, cu_seqlens=edges)
    for rows in (slice(0, 13), slice(13, 20), slice(20, 60)):
        alone = [tensor.detach()[rows].requires_grad_() for tensor in (x, left, right)]
        for ours, theirs in zip(together, _everything(*alone, 7, 7, grad[rows]), strict=True):
            if backend == "reference":  # whose blocks are counted from the first row of all
                torch.testing.assert_close(ours[rows], theirs)
            else:
                assert torch.equal(ours[rows], theirs)


def test_the_same_bits_on_every_run_and_for_any_number_of_threads():
    x, left, right = arguments(300, 8, 4, 16, 15, 15, most=1.2, dtype=torch.float32)
    left.data[200, 3, 1] = 90.0
    grad = torch.randn(300, 8, 64)
    threads = torch.get_num_threads()
    first = _everything(x, left, right, 15, 15, grad)
    try:
        for number in (threads, 2, 1):
            torch.set_num_threads(number)
            again = _everything(x, left, right, 15, 15, grad)
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(16))
def test_a_sentence_does_not_depend_on_its_batch(seed):
    rng = random.Random(seed)
    steps, batch, heads, per_head = (
        rng.randint(1, 150),
        rng.randint(2, 6),
        rng.choice((1, 2, 3)),
        rng.choice((1, 3, 8, 17)),
    )
    max_left, max_right = rng.choice((0, 1, 7, 31)), rng.choice((1, 7, 31))
    inputs = arguments(
        steps, batch, heads, per_head, max_left, max_right, most=rng.choice((1.0, 2.5)),
        dtype=rng.choice((torch.float32, torch.bfloat16)), seed=seed,
    )  # fmt: skip
    lengths = torch.tensor([rng.randint(0, steps) for _ in range(batch)]) if rng.random() < 0.5 else None
    grad = torch.randn(steps, batch, heads * per_head).to(inputs[0].dtype)
    together = _everything(*inputs, max_left, max_right, grad, lengths=lengths)
    for b in range(batch):
        column = slice(b, b + 1)
        alone = _everything(
            *(tensor[:, column] for tensor in inputs), max_left, max_right, grad[:, column],
            lengths=None if lengths is None else lengths[column],
        )  # fmt: skip
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[:, column], other)


# ------------------------------------------------------------------------------------------------ memory


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation inside the operators makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lightconv":
            # The mode is off inside a handler; the reference runs under it again.
            with self:
                return getattr(reference, func._opname)(*args, **kwargs or {})
        result = func(*args, **kwargs or {})
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@REFERENCE_ALONE
@pytest.mark.parametrize("most", [1.0, 50.0])
@pytest.mark.parametrize("sequences", ["whole", "lengths", "packed"])
def test_nothing_much_larger_than_x_is_allocated(sequences, most):
    options = {}
    if sequences == "lengths":
        options["lengths"] = torch.tensor([200])
    elif sequences == "packed":
        options["cu_seqlens"] = torch.tensor([0, 100, 300], dtype=torch.int32)
    x, left, right = arguments(300, 1, 2, 40, 31, 31, most=most, dtype=torch.float32)
    with Largest() as largest:
        out = ops.talkconv(x, left, right, 31, 31, **options)
        gradients(out, (x, left, right), torch.ones_like(out))
    # Rows are filled up to 512, the next power of two: 40,960 elements. T×T would be 90,000, T×B×C×(L+R+1) 1,512,000.
    assert largest.elements <= 512 * 80


def test_long_sequences_take_little_memory(backend):
    # In a process of its own, whose highest memory ever is looked at. A float32 T×T matrix would be 3.6 GB.
    program = """
        import resource
        import torch
        from lightconv_plugin import ops

        x, offset = torch.randn(30_000, 1, 8, requires_grad=True), torch.rand(30_000, 1, 2, requires_grad=True)
        offset.data[7] = offset.data[20_000] = float("inf")
        ops.talkconv(x[:100], offset[:100], offset[:100], 15, 15).sum().backward()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ops.talkconv(x, offset, offset, 15, 15).sum().backward()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": ROOT, "LIGHTCONV_BACKEND": "cpu" if backend == "native" else backend},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 100  # MiB; x has one


def test_only_arguments_are_kept_for_the_backward_pass():
    inputs = arguments(20, 2, 2, 8, 5, 5, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ops.talkconv(*inputs, 5, 5)
    assert {tensor.data_ptr() for tensor in kept} == {tensor.data_ptr() for tensor in inputs}


# ------------------------------------------------------------------------------------------------ the rest


@pytest.mark.parametrize("options", [{}, {"lengths": torch.empty(0, dtype=torch.int64)}], ids=["whole", "lengths"])
@pytest.mark.parametrize(("max_left", "max_right"), [(0, 0), (3, 0), (3, 4)])
def test_empty_batch(options, max_left, max_right):
    inputs = arguments(5, 0, 2, 3, max_left, max_right)
    out = ops.talkconv(*inputs, max_left, max_right, **options)
    assert out.shape == (5, 0, 6)
    for got, given in zip(gradients(out, inputs, torch.ones_like(out)), inputs, strict=False):
        assert got.shape == given.shape


@pytest.mark.parametrize("sequences", ["whole", "lengths", "packed"])
@pytest.mark.parametrize(("max_left", "max_right", "most"), [(0, 0, 1.0), (3, 0, 1.0), (2, 3, 1.0), (3, 3, 4.0)])
def test_gradcheck(sequences, max_left, max_right, most):
    options = {}
    if sequences == "lengths":
        options["lengths"] = torch.tensor([7, 2])
    elif sequences == "packed":
        options["cu_seqlens"] = torch.tensor([0, 2, 7], dtype=torch.int32)
    batch = 1 if sequences == "packed" else 2
    x, left, right = arguments(7, batch, 2, 1, max_left, max_right, most=most)
    # Away from whole numbers of rows, where the sum has a kink.
    for offset, limit in ((left, max_left), (right, max_right)):
        if offset is not None and limit:
            reach = offset.data * limit
            offset.data = (reach.floor() + 0.1 + 0.8 * (reach - reach.floor())) / limit

    def run(*inputs):
        return ops.talkconv(*inputs, *([None] if right is None else []), max_left, max_right, **options)

    inputs = [tensor for tensor in (x, left, right) if tensor is not None]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("edges", [[0, 100, -7, 9], [5, 3, 2, 4], [-3, 50]], ids=str)
def test_boundaries_that_were_not_checked_read_nothing_outside(edges):
    # As from a traced program: the values are wrong, and only that no memory outside is read can be expected.
    x, left, right = (tensor.detach() for tensor in arguments(9, 1, 2, 3, 4, 4, most=3.0))
    operator = torch.ops.lightconv.talkconv
    packed = torch.tensor(edges, dtype=torch.int32)
    assert operator(x, left, right, None, packed, 4, 4).abs().max() < 100
    gradient = torch.ops.lightconv.talkconv_backward
    assert gradient(x, x, left, right, None, packed, 4, 4, True, True, True)[0].abs().max() < 100
    for length in (-4, 40):
        lengths = torch.tensor([length])
        want = operator(x, left, right, lengths.clamp(0, 9), None, 4, 4)
        assert torch.equal(operator(x, left, right, lengths, None, 4, 4), want)
