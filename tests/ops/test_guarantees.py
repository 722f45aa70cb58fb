"""What the contract promises beside the numbers: leaks, determinism, batches, memory, empty batches, gradcheck."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightconv_plugin import ops
from lightconv_plugin.ops import reference

from .convolution_arguments import OPERATORS, arguments, gradients

pytestmark = pytest.mark.usefixtures("backend")
# For what can be seen in the reference only: operations of torch inside an operator.
REFERENCE_ALONE = pytest.mark.parametrize("backend", ["reference"], indirect=True)

KINDS = ("lightconv", "dynamicconv", "dynamicconv-renorm")
GARBAGE = {"nan": float("nan"), "inf": float("inf"), "large": 1e30}


def options_of(kind):
    operator, _, renorm = kind.partition("-")
    return operator, {"renorm_padding": True} if renorm else {}


# ------------------------------------------------------------------------------------------------ leaks


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("padding_l", [0, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_right_padding_reaches_neither_outputs_nor_gradients(kind, padding_l, glu, garbage):
    operator, options = options_of(kind)
    lengths = torch.tensor([7, 3, 0, 5])
    x, weight, bias = arguments(operator, 7, 4, 2, 2, 5, glu=glu, bias=True)
    pad = torch.arange(7)[:, None] >= lengths
    grad = torch.randn(7, 4, 4, dtype=torch.float64).masked_fill(pad[..., None], 0)
    results = []
    for fill in (0.0, garbage):
        filled = x.detach().masked_fill(pad[..., None], fill).requires_grad_()
        out = getattr(ops, operator)(filled, weight, padding_l, bias=bias, lengths=lengths, glu=glu, **options)
        dx, dweight, dbias = gradients(out, (filled, weight, bias), grad)
        assert not dx[pad].any()
        results.append((out, dx, dweight, dbias))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_filters_of_padding_do_not_reach_valid_outputs(kind):
    operator, options = options_of(kind)
    lengths = torch.tensor([7, 3])
    x, weight, _ = arguments(operator, 7, 2, 2, 2, 5)
    pad = torch.arange(7)[:, None] >= lengths
    clean = getattr(ops, operator)(x, weight, 2, lengths=lengths, **options)
    dirty = weight.detach().masked_fill(pad[..., None, None], float("nan"))
    out = getattr(ops, operator)(x, dirty, 2, lengths=lengths, **options)
    assert torch.equal(out[~pad], clean[~pad])


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("per_head", [1, 3, 16])
@pytest.mark.parametrize("operator", OPERATORS)
def test_taps_that_meet_padding_alone_do_not_count(operator, per_head, garbage):
    x, weight, _ = arguments(operator, 4, 2, 2, per_head, 4)
    grad = torch.randn(4, 2, 2 * per_head, dtype=torch.float64)
    grad[1:] = 0  # the only valid row meets the only valid source by tap 0
    results = []
    for fill in (0.0, garbage):
        filled = weight.detach().clone()
        filled[..., 1:] = fill
        filled.requires_grad_()
        out = getattr(ops, operator)(x, filled, 0, normalize="none", lengths=torch.tensor([1, 1]))
        results.append((out, *gradients(out, (x, filled), grad)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("padding_l", [0, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_do_not_see_each_other(kind, padding_l, garbage):
    operator, options = options_of(kind)
    edges = torch.tensor([0, 4, 4, 6, 11], dtype=torch.int32)
    x, weight, _ = arguments(operator, 11, 1, 2, 2, 5)
    dirty = x.detach().clone()
    dirty[4:6] = garbage
    dirty.requires_grad_()
    clean = getattr(ops, operator)(x, weight, padding_l, cu_seqlens=edges, **options)
    out = getattr(ops, operator)(dirty, weight, padding_l, cu_seqlens=edges, **options)
    others = [0, 1, 2, 3, 6, 7, 8, 9, 10]
    assert torch.equal(out[others], clean[others])
    # A sequence whose gradient is not finite leaves the others' alone, too.
    grad = torch.randn(11, 1, 4, dtype=torch.float64)
    (want,) = torch.autograd.grad(clean, x, grad)
    grad[4:6] = garbage
    (dx,) = torch.autograd.grad(out, dirty, grad)
    assert torch.equal(dx[others], want[others])


@pytest.mark.parametrize("normalize", ["softmax", "none"])
@pytest.mark.parametrize("padding_l", [0, 2, 4])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_filters_of_a_packed_sequence_do_not_reach_the_others(kind, padding_l, normalize):
    operator, options = options_of(kind)
    edges = torch.tensor([0, 4, 4, 6, 11], dtype=torch.int32)
    x, weight, _ = arguments(operator, 11, 1, 2, 2, 5)
    grad = torch.randn(11, 1, 4, dtype=torch.float64)
    others = [0, 1, 2, 3, 6, 7, 8, 9, 10]
    results = []
    for dirty in (weight, weight.detach().clone().index_fill_(0, torch.tensor([4, 5]), torch.nan).requires_grad_()):
        out = getattr(ops, operator)(x, dirty, padding_l, normalize=normalize, cu_seqlens=edges, **options)
        results.append((out, *gradients(out, (x, dirty), grad)))
    for clean, got in zip(*results, strict=True):
        assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("operator", OPERATORS)
def test_packed_sequences_equal_each_alone(operator):
    x, weight, bias = arguments(operator, 11, 1, 2, 2, 5, bias=True)
    edges = torch.tensor([0, 4, 4, 6, 11], dtype=torch.int32)
    out = getattr(ops, operator)(x, weight, 2, bias=bias, cu_seqlens=edges)
    for rows in (slice(0, 4), slice(4, 6), slice(6, 11)):
        part = weight if operator == "lightconv" else weight[rows]
        assert torch.equal(out[rows], getattr(ops, operator)(x[rows], part, 2, bias=bias))


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_future_does_not_reach_a_causal_past(operator):
    x, weight, _ = arguments(operator, 9, 2, 2, 2, 4)
    clean = getattr(ops, operator)(x, weight, 3)
    dirty = x.detach().clone()
    dirty[5:] = float("nan")
    assert torch.equal(getattr(ops, operator)(dirty, weight, 3)[:5], clean[:5])


# ------------------------------------------------------------------------------------------------ same bits


def _everything(operator, x, weight, bias, grad, seed=5, **options):
    torch.manual_seed(seed)
    out = getattr(ops, operator)(x, weight, weight.shape[-1] // 2, bias=bias, **options)
    return out, *gradients(out, (x, weight, bias), grad)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_same_bits_on_every_run_and_for_any_number_of_threads(operator):
    x, weight, bias = arguments(operator, 64, 16, 4, 32, 7, bias=True, dtype=torch.float32)
    grad = torch.randn(64, 16, 128)
    threads = torch.get_num_threads()
    first = _everything(operator, x, weight, bias, grad, dropout=0.1)
    try:
        for number in (threads, 2, 1):
            torch.set_num_threads(number)
            again = _everything(operator, x, weight, bias, grad, dropout=0.1)
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(24))
def test_a_sentence_does_not_depend_on_its_batch(seed):
    rng = random.Random(seed)
    steps, batch, heads, per_head = (
        rng.randint(1, 40),
        rng.randint(2, 6),
        rng.choice((1, 2, 3, 16)),
        rng.choice((1, 3, 8, 17)),
    )
    size, glu = rng.choice((1, 3, 4, 7, 15, 31)), rng.random() < 0.5
    dtype = rng.choice((torch.float32, torch.bfloat16))
    options = {"normalize": ops.NORMALIZATIONS[seed % len(ops.NORMALIZATIONS)], "glu": glu}
    for kind in KINDS:
        operator, extra = options_of(kind)
        x, weight, _ = arguments(operator, steps, batch, heads, per_head, size, glu=glu, dtype=dtype, seed=seed)
        grad = torch.randn(steps, batch, heads * per_head).to(dtype)
        together = _everything(operator, x, weight, None, grad, **options, **extra)
        for b in range(batch):
            column = slice(b, b + 1)
            part = weight if operator == "lightconv" else weight[:, column]
            alone = _everything(operator, x[:, column], part, None, grad[:, column], **options, **extra)
            per_sentence = 2 if operator == "lightconv" else 3  # lightconv's weight gradient sums over the batch
            for one, other in zip(together[:per_sentence], alone[:per_sentence], strict=True):
                assert torch.equal(one[:, column], other)


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
@pytest.mark.parametrize("kernel_size", [3, 7, 15, 17, 31, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_row_does_not_depend_on_its_place_in_the_sequence(operator, dtype, kernel_size):
    """Rows go through the kernels in blocks, and not all of a block's rows in the same way."""
    x, weight, _ = arguments(operator, 150, 2, 4, 32, kernel_size, dtype=dtype)
    grad = torch.randn(150, 2, 128, dtype=dtype)
    results = []
    for first in (0, 5):  # without the rows before
        tensors = [x.detach()[first:].requires_grad_(), weight.detach()]
        if operator == "dynamicconv":
            tensors[1] = tensors[1][first:]
        tensors[1].requires_grad_()
        out = getattr(ops, operator)(*tensors, kernel_size // 2)
        dx, dweight = gradients(out, tensors, grad[first:])
        rows = [out, dx, dweight] if operator == "dynamicconv" else [out, dx]
        results.append([row[5 + kernel_size - first : 150 - kernel_size - first] for row in rows])
    for whole, later in zip(*results, strict=True):
        assert len(whole) and torch.equal(whole, later)


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_equals_each_sentence_alone(kind):
    operator, options = options_of(kind)
    lengths = torch.tensor([9, 4, 1, 6])
    x, weight, _ = arguments(operator, 9, 4, 2, 3, 5, dtype=torch.float32)
    out = getattr(ops, operator)(x, weight, 2, lengths=lengths, **options)
    for b, length in enumerate(lengths.tolist()):
        part = weight if operator == "lightconv" else weight[:length, b : b + 1]
        alone = getattr(ops, operator)(x[:length, b : b + 1], part, 2, **options)
        assert torch.equal(out[:length, b : b + 1], alone)


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
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["whole", "dropped"])
@pytest.mark.parametrize("sequences", ["whole", "lengths", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_larger_than_the_arguments_is_allocated(kind, sequences, dropout):
    operator, options = options_of(kind)
    steps, batch, heads, per_head, size = 300, 1, 2, 40, 31
    if sequences == "lengths":
        options["lengths"] = torch.tensor([200])
    elif sequences == "packed":
        options["cu_seqlens"] = torch.tensor([0, 100, 300], dtype=torch.int32)
    x, weight, bias = arguments(operator, steps, batch, heads, per_head, size, glu=True, bias=True, dtype=torch.float32)
    with Largest() as largest:
        out = getattr(ops, operator)(x, weight, 15, bias=bias, dropout=dropout, glu=True, **options)
        gradients(out, (x, weight, bias), torch.ones_like(out))
    # x is 300·1·160 = 48,000 elements; T×T would be 90,000, T×B×C×K 744,000.
    assert largest.elements <= x.numel() < min(steps * steps, steps * batch * heads * per_head * size)


@pytest.mark.parametrize("operator", OPERATORS)
def test_only_arguments_are_kept_for_the_backward_pass(operator):
    x, weight, bias = arguments(operator, 20, 2, 2, 8, 5, bias=True, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        getattr(ops, operator)(x, weight, 2, bias=bias, dropout=0.1)
    assert {tensor.data_ptr() for tensor in kept if tensor.is_floating_point()} == {x.data_ptr(), weight.data_ptr()}
    assert [tensor.shape for tensor in kept if not tensor.is_floating_point()] == [(1,)]  # the seed


@REFERENCE_ALONE
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_kernel_much_longer_than_the_sequence_costs_its_weights_only(operator):
    # 50,000 taps of which three meet the sequence: the loop must not visit the others.
    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += func._opname == "addcmul_"
            return func(*args, **kwargs or {})

    weight = torch.zeros((1, 50_000) if operator == "lightconv" else (3, 1, 1, 50_000))
    extra = (False,) if operator == "dynamicconv" else ()
    with Count() as count:
        out = getattr(reference, operator)(
            torch.ones(3, 1, 2), weight, None, None, None, None, 49_999, "none", 0.0, *extra, False
        )
    assert count.products == 3 and not out.any()


# ------------------------------------------------------------------------------------------------ the rest


@pytest.mark.parametrize(
    "options", [{}, {"lengths": torch.empty(0, dtype=torch.int64)}, {"dropout": 0.5}, {"glu": True}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_empty_batch(kind, options):
    operator, extra = options_of(kind)
    x, weight, bias = arguments(operator, 5, 0, 2, 3, 4, glu="glu" in options, bias=True)
    out = getattr(ops, operator)(x, weight, 2, bias=bias, **options, **extra)
    dx, dweight, dbias = gradients(out, (x, weight, bias), torch.ones_like(out))
    assert out.shape == (5, 0, 6) and dx.shape == x.shape and dweight.shape == weight.shape
    assert not dweight.any() and not dbias.any()


@pytest.mark.parametrize("glu", [False, True], ids=["plain", "glu"])
@pytest.mark.parametrize("sequences", ["whole", "lengths", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, sequences, glu):
    operator, options = options_of(kind)
    if sequences == "lengths":
        options["lengths"] = torch.tensor([5, 2])
    elif sequences == "packed":
        options["cu_seqlens"] = torch.tensor([0, 2, 5], dtype=torch.int32)
    x, weight, bias = arguments(operator, 5, 1 if sequences == "packed" else 2, 2, 1, 3, glu=glu, bias=True)

    def run(x, weight, bias):
        torch.manual_seed(2)
        return getattr(ops, operator)(x, weight, 1, bias=bias, dropout=0.3, glu=glu, **options)

    assert torch.autograd.gradcheck(run, (x, weight, bias))
