"""What the contract promises beside the numbers: leaks, determinism, batches, memory, empty batches, gradcheck."""

import random
import sys
import textwrap

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightconv_plugin import ops
from lightconv_plugin.ops import reference
from tests import programs

from . import oracle
from .operators import (
    CONVOLUTIONS,
    GARBAGE,
    KINDS,
    OPERATORS,
    assert_same_bits,
    numbers_of_threads,
    pairwise,
    random_call,
    smooth,
)

pytestmark = pytest.mark.usefixtures("backend")
# For what can be seen in the reference only: operations of torch inside an operator.
REFERENCE_ALONE = pytest.mark.parametrize("backend", ["reference"], indirect=True)

every_kind = pytest.mark.parametrize("kind", KINDS)
every_operator = pytest.mark.parametrize("operator", OPERATORS)
every_garbage = pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
REACHES = ((0, 4), (2, 2), (4, 0), (20, 20))
every_leak = pytest.mark.parametrize("kind, reach, garbage", pairwise(KINDS, REACHES, GARBAGE.values()))
# The filters and windows of positions, not those of the whole call.
PREDICTED = [kind for kind in KINDS if not kind.startswith("lightconv")]

EDGES = torch.tensor([0, 9, 9, 12, 23], dtype=torch.int32)
OTHERS = [*range(9), *range(12, 23)]


def sequences_of(name, lengths, edges):
    """The option for padded or packed sequences, and the batch that it needs."""
    if name == "lengths":
        return {"lengths": torch.tensor(lengths)}, len(lengths)
    if name == "packed":
        return {"cu_seqlens": torch.tensor(edges, dtype=torch.int32)}, 1
    return {}, len(lengths)


# ------------------------------------------------------------------------------------------------ leaks


@every_leak
def test_right_padding_reaches_neither_outputs_nor_gradients(kind, reach, garbage):
    lengths = torch.tensor([19, 3, 0, 12])
    call = random_call(kind, 19, 4, 2, 2, *reach, lengths=lengths)
    pad = torch.arange(19)[:, None] >= lengths
    grad = call.randn_like_out().masked_fill(pad[..., None], 0)
    clean, dirty = (call.filled(pad, fill).everything(grad) for fill in (0.0, garbage))
    assert not clean["x"][pad].any()
    assert_same_bits(dirty, clean)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30, -5.0])
@pytest.mark.parametrize("kind", PREDICTED)
def test_the_filters_and_windows_of_padding_do_not_reach_the_sentence(kind, garbage):
    lengths = torch.tensor([9, 3])
    call = random_call(kind, 9, 2, 2, 2, 3, 3, lengths=lengths)
    pad = torch.arange(9)[:, None] >= lengths
    names = [name for name in call.by_row if name not in ("out", "x")]
    clean, dirty = call(), call.filled(pad, garbage, *names)()
    assert torch.equal(dirty[~pad], clean[~pad])
    if call.operator == "talkconv":  # a filter that is NaN makes the gradients of its rows NaN
        grad = call.randn_like_out().masked_fill(pad[..., None], 0)
        assert_same_bits(call.filled(pad, garbage, *names).everything(grad), call.everything(grad), ~pad)


@every_garbage
@pytest.mark.parametrize("per_head", [1, 3, 16])
@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_taps_that_meet_padding_alone_do_not_count(operator, per_head, garbage):
    options = {"normalize": "none", "bias": False, "lengths": torch.tensor([1, 1])}
    call = random_call(operator, 4, 2, 2, per_head, 0, 3, **options)
    grad = call.randn_like_out()
    grad[1:] = 0  # the only valid row meets the only valid source by tap 0
    clean, dirty = (call.filled((..., slice(1, None)), fill, "weight").everything(grad) for fill in (0.0, garbage))
    assert_same_bits(dirty, clean)


@every_leak
def test_packed_sequences_do_not_see_each_other(kind, reach, garbage):
    call = random_call(kind, 23, 1, 2, 2, *reach, bias=False, cu_seqlens=EDGES)
    grad = call.randn_like_out()
    clean = call.everything(grad)
    grad[9:12] = garbage  # a sequence whose gradient is not finite leaves the others' alone, too
    dirty = call.filled(slice(9, 12), garbage).everything(grad)
    clean, dirty = ({name: result[name] for name in call.by_row} for result in (clean, dirty))
    assert_same_bits(dirty, clean, OTHERS)


@pytest.mark.parametrize(
    "kind, reach, normalize",
    pairwise([kind for kind in PREDICTED if kind.startswith("dynamicconv")], REACHES, ("softmax", "none")),
)
def test_filters_of_a_packed_sequence_do_not_reach_the_others(kind, reach, normalize):
    call = random_call(kind, 23, 1, 2, 2, *reach, bias=False, normalize=normalize, cu_seqlens=EDGES)
    grad = call.randn_like_out()
    dirty = call.filled(slice(9, 12), torch.nan, "weight")
    assert_same_bits(dirty.everything(grad), call.everything(grad), OTHERS)


@every_kind
def test_packed_sequences_equal_each_alone(kind, backend):
    edges = torch.tensor([0, 13, 13, 20, 60], dtype=torch.int32)
    call = random_call(kind, 60, 1, 2, 5, 7, 7, dtype=torch.float32)
    grad = call.randn_like_out()
    together = call.everything(grad, cu_seqlens=edges)
    for rows in (slice(0, 13), slice(13, 20), slice(20, 60)):
        alone = call.part(rows).everything(grad[rows])
        for name in call.by_row:
            if call.operator == "talkconv" and backend == "reference":  # its blocks are counted from the first row
                torch.testing.assert_close(together[name][rows], alone[name])
            else:
                assert torch.equal(together[name][rows], alone[name])


@every_kind
def test_the_future_does_not_reach_a_causal_past(kind):
    call = random_call(kind, 30, 2, 2, 2, 7)
    assert torch.equal(call.filled(slice(17, None), torch.nan)()[:17], call()[:17])


@pytest.mark.parametrize("wrong", ["inf", "-inf", "nan", "both"])
@pytest.mark.parametrize(("max_left", "max_right", "most"), [(3, 3, 1.0), (15, 0, 1.0), (2, 7, 3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_is_not_finite_stays_in_talkconvs_windows(dtype, max_left, max_right, most, wrong):
    call = random_call("talkconv", 80, 2, 2, 3, max_left, max_right, top=most, dtype=dtype)
    clean = call()
    bad = {40: float("inf" if wrong == "both" else wrong)} | ({44: float("-inf")} if wrong == "both" else {})
    dirty = call.x.detach().clone()
    for t, value in bad.items():
        dirty[t, 0] = value
    out = call.replace(x=dirty)()
    eye = torch.eye(80, dtype=torch.float64).view(80, 1, 80).expand(80, 2, 80).repeat(1, 1, 2)
    offsets = [None if t is None else t.detach().double() for t in (call.offset_left, call.offset_right)]
    part = oracle.talk(eye, *offsets, max_left, max_right).unflatten(-1, (2, 80))  # (t, b, h, s)
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
    grad = call.randn_like_out()
    want = call.everything(grad)["x"]
    grad[40, 0] = bad[40]
    got = call.everything(grad)["x"]
    meets = (part[40, 0] > 0).T.repeat_interleave(3, -1)
    assert not got[:, 0][meets].isfinite().any()
    assert torch.equal(got[:, 1], want[:, 1]) and torch.equal(got[:, 0][~meets], want[:, 0][~meets])


# ------------------------------------------------------------------------------------------------ same bits


@every_operator
def test_the_same_bits_on_every_run_and_for_any_number_of_threads(operator):
    dropout = {} if operator == "talkconv" else {"dropout": 0.1}
    call = random_call(operator, 300, 8, 4, 32, 3, 3, dtype=torch.float32, **dropout)
    if operator == "talkconv":
        call.offset_left.data[200, 3, 1] = 450.0
    grad = call.randn_like_out()
    first = call.everything(grad)
    for _ in numbers_of_threads(torch.get_num_threads(), 2, 1):
        assert_same_bits(call.everything(grad), first)


@pytest.mark.parametrize("seed", range(24))
def test_a_sentence_does_not_depend_on_its_batch(seed):
    rng = random.Random(seed)
    steps, batch, heads = rng.randint(1, 150 if seed % 3 == 0 else 40), rng.randint(2, 6), rng.choice((1, 2, 3, 16))
    per_head, size = rng.choice((1, 3, 8, 17)), rng.choice((1, 3, 4, 7, 15, 31))
    dtype = rng.choice((torch.float32, torch.bfloat16))
    lengths = torch.tensor([rng.randint(0, steps) for _ in range(batch)]) if rng.random() < 0.5 else None
    for kind in KINDS:
        right = (size - 1) // 2
        options = {"bias": False, "normalize": ops.NORMALIZATIONS[seed % len(ops.NORMALIZATIONS)]}
        options = {} if kind.startswith("talkconv") else options
        call = random_call(
            kind, steps, batch, heads, per_head, size - 1 - right, right, dtype=dtype, seed=seed, **options
        )
        grad = call.randn_like_out()
        together = call.everything(grad, lengths=lengths)
        for b in range(batch):
            column = (slice(None), slice(b, b + 1))
            alone = call.part(*column).everything(grad[column], lengths=None if lengths is None else lengths[b : b + 1])
            for name in call.by_row:  # lightconv's weight gradient sums over the batch
                assert torch.equal(together[name][column], alone[name]), (kind, name)


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
@pytest.mark.parametrize("kernel_size", [3, 7, 15, 17, 31, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_a_row_does_not_depend_on_its_place_in_the_sequence(operator, dtype, kernel_size):
    """Rows go through the kernels in blocks, and not all of a block's rows in the same way."""
    right = (kernel_size - 1) // 2
    call = random_call(operator, 150, 2, 4, 32, kernel_size - 1 - right, right, bias=False, dtype=dtype)
    grad = call.randn_like_out()
    whole, later = call.everything(grad), call.part(slice(5, None)).everything(grad[5:])  # without the rows before
    for name in call.by_row:
        there = whole[name][5 + kernel_size : 150 - kernel_size]
        assert len(there) and torch.equal(there, later[name][kernel_size : 145 - kernel_size])


@every_kind
def test_a_padded_batch_equals_each_sentence_alone(kind):
    lengths = torch.tensor([9, 4, 1, 6])
    call = random_call(kind, 9, 4, 2, 3, 2, 2, dtype=torch.float32)
    out = call(lengths=lengths)
    for b, length in enumerate(lengths.tolist()):
        rows = (slice(length), slice(b, b + 1))
        assert torch.equal(out[rows], call.part(*rows)())


@pytest.mark.parametrize("seed", range(12))
def test_right_padding_changes_no_bit_of_talkconv(seed, backend):
    rng = random.Random(seed)
    steps, more, per_head = rng.randint(1, 40), rng.choice((1, 3, 30, 150)), rng.choice((1, 8, 17))
    reach = rng.choice((0, 1, 7, 15)), rng.choice((1, 7, 15, 31))
    kind, dtype = rng.choice(("talkconv", "talkconv-far")), rng.choice((torch.float32, torch.bfloat16))
    padded = random_call(kind, steps + more, 2, 2, per_head, *reach, dtype=dtype, seed=seed)
    grad = padded.randn_like_out()
    grad[steps:] = 0
    padded = padded.filled(slice(steps, None), 0)
    want = padded.part(slice(steps)).everything(grad[:steps])
    for options in ({}, {"lengths": torch.full((2,), steps)}):
        got = padded.everything(grad, **options)
        if backend == "reference":  # whose order of additions is that of the blocks there are
            torch.testing.assert_close(got.pop("x")[:steps], want["x"])
        for name, ours in got.items():
            assert torch.equal(ours[:steps], want[name]), name


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
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("-glu")])
def test_nothing_larger_than_the_arguments_is_allocated(kind, sequences, dropout):
    options, _ = sequences_of(sequences, [200], [0, 100, 300])
    call = random_call(kind, 300, 1, 2, 40, 15, 15, dtype=torch.float32, dropout=dropout, **options)
    with Largest() as largest:
        call.everything(call.randn_like_out())
    # x is 300·1·160 = 48,000 elements; T×T would be 90,000, T×B×C×K 744,000.
    assert largest.elements <= call.x.numel() == 48_000


@REFERENCE_ALONE
@pytest.mark.parametrize("most", [1.0, 50.0])
@pytest.mark.parametrize("sequences", ["whole", "lengths", "packed"])
def test_nothing_much_larger_than_x_is_allocated_by_talkconv(sequences, most):
    options, _ = sequences_of(sequences, [200], [0, 100, 300])
    call = random_call("talkconv", 300, 1, 2, 40, 31, 31, top=most, dtype=torch.float32, **options)
    with Largest() as largest:
        call.everything(call.randn_like_out())
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
    serves = "cpu" if backend == "native" else backend
    done = programs.run(sys.executable, "-c", textwrap.dedent(program), LIGHTCONV_BACKEND=serves)
    assert float(done.stdout) < 100  # MiB; x has one


@every_operator
def test_only_arguments_are_kept_for_the_backward_pass(operator):
    call = random_call(operator, 20, 2, 2, 8, 2, 2, dtype=torch.float32)
    dropout = {} if operator == "talkconv" else {"dropout": 0.1}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        call(**dropout)
    floating = [tensor.data_ptr() for name, tensor in call.given.items() if name != "bias"]
    assert {tensor.data_ptr() for tensor in kept if tensor.is_floating_point()} == set(floating)
    seeds = [tensor.shape for tensor in kept if not tensor.is_floating_point()]
    assert seeds == [(1,)] * len(dropout)


@REFERENCE_ALONE
@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_a_kernel_much_longer_than_the_sequence_costs_its_weights_only(operator):
    # 50,000 taps of which three meet the sequence: the loop must not visit the others.
    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += func._opname == "addcmul_"
            return func(*args, **kwargs or {})

    call = random_call(operator, 3, 1, 1, 2, 49_999, normalize="none", bias=False)
    with Count() as count:
        getattr(reference, operator)(*call.registered()[1])
    assert count.products == 3


# ------------------------------------------------------------------------------------------------ the rest


@pytest.mark.parametrize("kind, reach, option", pairwise(KINDS, ((0, 0), (3, 0), (3, 4)), ("", "lengths", "dropout")))
def test_empty_batch(kind, reach, option):
    options = {"lengths": torch.empty(0, dtype=torch.int64)} if option == "lengths" else {}
    if option == "dropout" and not kind.startswith("talkconv"):
        options["dropout"] = 0.5
    call = random_call(kind, 5, 0, 2, 3, *reach, **options)
    results = call.everything(call.randn_like_out())
    assert results.pop("out").shape == (5, 0, 6)
    for name, tensor in results.items():
        assert tensor.shape == call.tensors[name].shape and not tensor.any()


@pytest.mark.parametrize("sequences", ["whole", "lengths", "packed"])
@pytest.mark.parametrize(("left", "right"), [(2, 0), (1, 2)])
@every_kind
def test_gradcheck(kind, left, right, sequences):
    options, batch = sequences_of(sequences, [5, 2], [0, 2, 5])
    if not kind.startswith("talkconv"):
        options["dropout"] = 0.3
    call = smooth(random_call(kind, 5, batch, 2, 1, left, right, **options))

    def run(*tensors):
        torch.manual_seed(2)
        return type(call)(call.operator, call.tensors | dict(zip(call.given, tensors, strict=True)), call.options)()

    exact = {"atol": 1e-7, "rtol": 1e-6}  # of random sums of derivatives, an error of one is only a part
    assert torch.autograd.gradcheck(run, [*call.given.values()], fast_mode=call.operator != "talkconv", **exact)


@pytest.mark.parametrize("edges", [[0, 100, -7, 9], [5, 3, 2, 4], [-3, 50]], ids=str)
def test_boundaries_that_were_not_checked_read_nothing_outside(edges):
    # As from a traced program: the values are wrong, and only that no memory outside is read can be expected.
    packed = torch.tensor(edges, dtype=torch.int32)
    call = random_call("talkconv", 9, 1, 2, 3, 4, 4, top=3.0, cu_seqlens=packed)

    def run(suffix="", **options):
        operator, arguments = call.registered(suffix, grad=call.x, **options)
        return operator(*(t.detach() if isinstance(t, torch.Tensor) else t for t in arguments))

    assert run().abs().max() < 100
    assert run("_backward")[0].abs().max() < 100
    for length in (-4, 40):
        lengths = torch.tensor([length])
        want = run(cu_seqlens=None, lengths=lengths.clamp(0, 9))
        assert torch.equal(run(cu_seqlens=None, lengths=lengths), want)
