"""What must hold of a case: its numbers are those of float64; what is not finite stays in the windows that hold it.

The allowed difference follows from the sums: one rounding of the result to its type, and roundings of every term in the
type of the sums. `_sizes` says how large terms and their sum can be, roughly but never too small.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightconv_plugin.ops import EPSILON
from tests.ops import oracle
from tests.robustness.fuzz.case import DTYPES, Case, Convolution, Talk
from tests.robustness.fuzz.running import answer, computed, counted, inputs_of, on_device


def check(case: Case, device: str = "cpu", *, rounds_products: bool = False) -> None:
    """Outputs, states and all gradients equal those of float64.

    `rounds_products`: the backend multiplies half types (filters rounded to them) in matrix units.
    """
    inputs = inputs_of(case, device)
    grad = on_device(case.grad(), device)
    grad_state = None if case.pieces is None else case.grad_state().to(device)
    got = computed(case, inputs, grad, grad_state)
    want = answer(case, inputs, grad, grad_state)
    assert got.keys() == want.keys(), f"{got.keys()} and {want.keys()}"
    sizes = _sizes(case, inputs, grad, grad_state)
    for name, result in got.items():
        _compare(case, name, result.cpu(), want[name], sizes[name], rounds_products)
    if case.views is not None and device == "cpu":
        _check_layouts(case, inputs, grad, grad_state, got)


def _compare(case: Case, name: str, got: Tensor, want: Tensor, size: Tensor, rounds_products: bool) -> None:
    dtype = DTYPES[case.dtype]
    assert got.dtype == dtype and got.shape == want.shape, f"{name}: {got.dtype} {got.shape}, expected {want.shape}"
    sums = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    own = torch.finfo(dtype)
    half = dtype in (torch.bfloat16, torch.float16)
    # Gradients of early pieces are handed on from piece to piece, rounded each time, as autograd adds up.
    roundings = 2 * (half and (rounds_products or getattr(case, "glu", False))) + len(case.pieces or ())
    conditioned = 1.0
    if isinstance(case, Talk):
        conditioned += max(case.left, case.right) * min(case.most, 30)
    elif case.normalize == "softmax":
        conditioned += 100.0 if case.logits in ("large", "extreme") else 8.0
    size = size.double()
    allowed = own.eps * (want.abs() + roundings * size) + 8 * sums.eps * conditioned * size
    allowed = allowed + own.tiny * (own.eps if half else 1) + 1e-36 * size
    largest = own.max if half else float("inf")
    wrong = ~((got.double().clamp(-largest, largest) - want.clamp(-largest, largest)).abs() <= allowed)
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ from float64, first at {first}: "
            f"{got[first].item():.9g}, expected {want[first].item():.9g} ± {allowed.expand_as(want)[first].item():.2g}"
        )


def _check_layouts(
    case: Case, inputs: dict[str, Tensor], grad: Tensor, grad_state: Tensor | None, got: dict[str, Tensor]
) -> None:
    """Results lie in memory as torch.compile and torch.export are told, and outputs as torch.empty_like(x)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = {name: mode.from_tensor(tensor.detach()).requires_grad_() for name, tensor in inputs.items()}
    grads = [tensor if tensor is None else mode.from_tensor(tensor) for tensor in (grad, grad_state)]
    with mode:
        promised = computed(case, fakes, *grads)
    if case.pieces is None and inputs["x"].stride(-1) == 1:  # others are copied first
        promised["empty_like"] = torch.empty_like(inputs["x"][..., : case.channels])
        got = got | {"empty_like": got["out"]}
    for name, result in got.items():
        ours, theirs = (
            [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
            for tensor in (result, promised[name])
        )
        assert ours == theirs or not result.numel(), f"{name}: strides {result.stride()}, not {promised[name].stride()}"


def _sizes(case: Case, inputs: dict[str, Tensor], grad: Tensor, grad_state: Tensor | None) -> dict[str, Tensor]:
    """An upper bound of the sum of absolute terms of each result; a number, or something that broadcasts to it."""

    def largest(tensor: Tensor | None) -> Tensor:
        if tensor is None or tensor.numel() == 0:
            return torch.tensor(0.0, dtype=torch.float64)
        return tensor.detach().double().abs().amax().cpu()

    x, g, handed = largest(inputs["x"]), largest(grad), largest(grad_state)
    rows = max(x, largest(inputs.get("state")))
    length, copies = case.steps + case.seen, case.batch if case.reorder else 1
    if isinstance(case, Talk):
        scale = 1 / (case.left + case.right + 1)
        reach = max(case.left, case.right) * scale
        dx = copies * (length * scale * g + handed)
        doffset = reach * case.per_head * g * rows
        return {
            "out": length * scale * rows,
            "state": rows,
            "dx": dx,
            "dstate": dx,
            "dleft": doffset,
            "dright": doffset,
        }

    weight = inputs["weight"].detach().double().cpu()
    finite = weight.masked_fill(weight.isinf(), 0).abs()
    kept = 1 / (1 - case.dropout)
    taps = min(case.size, length)
    filters = {"none": finite, "abs": finite, "square": finite.square()}.get(case.normalize, torch.ones(1).double())
    filters = largest(filters) * kept
    dx = copies * (taps * filters * g + handed) * (1 + (rows if case.glu else 0))
    dtaps = case.per_head * g * rows * kept * (1 if case.dynamic else case.steps * case.batch)
    # torch sums rows that lie in one place one after the other, so that the roundings add up.
    one_by_one = 8 if case.grads == "still" or case.views is not None else 1
    return {
        "out": taps * filters * rows + largest(inputs.get("bias")),
        "state": rows,
        "dx": dx,
        "dstate": dx,
        "dweight": dtaps * _steepest(case, finite),
        "dbias": one_by_one * case.steps * case.batch * g,
    }


def _steepest(case: Convolution, weight: Tensor) -> Tensor:
    """By how much a normalisation multiplies gradients at most, (…, H, 1)."""
    if case.normalize == "square":
        return 2 * weight.amax(-1, keepdim=True)
    if case.normalize not in ("l2", "abs_l2", "l1"):
        return torch.full((1,), 2.0, dtype=torch.float64)
    # Of those taps alone that count there may be one only.
    norm = weight.amin(-1, keepdim=True) if case.renorm else weight.square().sum(-1, keepdim=True).sqrt()
    return (1 + case.size**0.5) / (norm + EPSILON)


# ------------------------------------------------------------------------------------------------ what is not finite


def check_spread(
    case: Case, where: str, value: float, place: int, device: str = "cpu", *, rounds_products: bool = False
) -> None:
    """One element of `where` (an input's name, or "grad") becomes NaN or infinite: nothing else is touched by it.

    All results but those whose windows hold the element are the same bits as before; those that hold it are not finite.
    `place` chooses the element. `rounds_products`: the same numbers instead of bits, for a backend that adds up a tile
    in another way when something in it is not finite.
    """
    given = inputs_of(case, device) | {"grad": on_device(case.grad(), device)}
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(place % given[where].numel()), given[where].shape))
    results = []
    for dirty in (False, True):
        # Copies with the same strides (where elements have a place each), as torch's own sums depend on them.
        copy = torch.empty_strided(given[where].shape, given[where].stride(), dtype=given[where].dtype, device=device)
        copy = copy.contiguous() if 0 in copy.stride() else copy
        copy.copy_(given[where].detach())
        if dirty:
            copy[at] = value
        inputs = given | {where: copy.requires_grad_(where != "grad")}
        grad = inputs.pop("grad")
        results.append(computed(case, inputs, grad))
    clean, got = results
    sizes = _sizes(case, given, given["grad"], None)
    may, must = _touched(case, where, at)
    for name, result in got.items():
        result, before = result.cpu(), clean[name].cpu()
        touched = may.get(name, torch.zeros((), dtype=torch.bool)).expand(result.shape)
        if rounds_products:
            clear = before.double().masked_fill(touched, 0)
            _compare(case, name, result.masked_fill(touched, 0), clear, sizes[name], True)
        elif not torch.equal(result[~touched], before[~touched]):
            changed = ~touched & (result != before)
            first = tuple(changed.nonzero()[0].tolist())
            raise AssertionError(f"{where}{list(at)} = {value} reached {name}{list(first)}: {result[first].item()}")
        if name in must:
            spared = must[name].expand(result.shape) & result.isfinite()
            assert not spared.any(), f"{where}{list(at)} = {value} did not reach {name}{spared.nonzero()[0].tolist()}"


def holds(case: Case) -> Tensor:
    """(T, B, H, S): whether the window of output t holds source row s; the first `seen` rows are the state's."""
    if isinstance(case, Convolution):
        k = torch.arange(case.size)
        first = 0 if case.pieces else -case.padding_l
        rows = torch.arange(case.steps).view(-1, 1) + first + k + (case.seen - case.history if case.pieces else 0)
        held = torch.zeros(case.steps, case.batch, case.seen + case.steps, dtype=torch.bool)
        for t, b, tap in counted(case).nonzero().tolist():
            held[t, b, rows[t, tap]] = True
        return held.unsqueeze(2).expand(-1, -1, case.heads, -1)
    total = case.seen + case.steps
    eye = torch.eye(total, dtype=torch.float64)
    eye = eye.view(total, 1, total).expand(total, case.batch, total).repeat(1, 1, case.heads)
    offsets = [None if o is None else o.double() for o in case.offsets()]
    offsets = [None if o is None else torch.cat([o.new_zeros(case.seen, *o.shape[1:]), o]) for o in offsets]
    part = oracle.talk(eye, *offsets, case.left, case.right, **case.sequences())
    return part.unflatten(-1, (case.heads, total))[case.seen :] > 0


def _touched(case: Case, where: str, at: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By result: the elements that may differ, and those that cannot be finite."""
    held, convolution = holds(case), isinstance(case, Convolution)
    steps, batch, heads, total = held.shape
    out = torch.zeros(steps, batch, case.channels, dtype=torch.bool)
    sources = torch.zeros(total, batch, case.channels, dtype=torch.bool)
    filters = torch.zeros(steps, batch, heads, dtype=torch.bool)
    bias = torch.zeros(case.channels, dtype=torch.bool)
    state, gates = sources.clone(), sources.clone()
    # A gate of ±∞ is one or nothing; a weight that is dropped, or not normalised, may be zero.
    certain = True
    if where in ("x", "state"):
        row, b, c = at[0] + (case.seen if where == "x" else 0), at[1], at[2] % case.channels
        h = c // case.per_head
        out[:, b, c] = held[:, b, h, row]
        filters[:, b, h] = held[:, b, h, row]
        state[row, b, c] = True
        gates[row, b, c] = getattr(case, "glu", False)
        certain = at[2] < case.channels
    elif where == "grad":
        t, b, c = at
        h = c // case.per_head
        sources[:, b, c] = held[t, b, h]
        filters[t, b, h] = bias[c] = True
    else:  # a filter, of one position or of all
        t, b, h = (slice(None), slice(None), at[0]) if len(at) == 2 else at[:3]
        channels = slice(h * case.per_head, (h + 1) * case.per_head)
        out[t, b, channels] = True
        reached = held[:, :, h].any(0) if len(at) == 2 else None
        sources[:, b, channels] = reached.T.unsqueeze(-1) if reached is not None else held[t, b, h].unsqueeze(-1)
        filters[t, b, h] = True
        certain = False
    may = {"out": out, "state": state[max(total - case.history, 0) :], "dbias": bias}
    must = {"out": out} if certain else {}
    dx = sources[case.seen :]
    may["dstate"] = sources[: case.seen]
    if convolution:
        glu = [dx | gates[case.seen :]] * 2 if case.glu else [dx]
        may["dx"] = torch.cat(glu, -1)
        every = filters if case.dynamic else filters.any(0).any(0)
        may["dweight"] = every.unsqueeze(-1)
    else:
        may["dx"], may["dleft"], may["dright"] = dx, filters, filters
    if where == "grad" and not getattr(case, "glu", False):
        must["dx"], must["dstate"] = dx, sources[: case.seen]
    return may, must
