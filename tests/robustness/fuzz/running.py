"""A case computed by the public operators, with all its gradients, and the same in float64 by the oracles."""

from __future__ import annotations

from itertools import accumulate

import numpy
import torch
from torch import Tensor

from lightconv_plugin import ops
from tests.ops import oracle
from tests.robustness.fuzz.case import Case, Convolution, Talk

DRAW = 7  # torch's seed before each case, from which the operators draw their dropout's


def inputs_of(case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """All floating arguments of a case as leaves, by name."""
    made = {"x": case.x()}
    if isinstance(case, Convolution):
        made["weight"] = case.weight()
        if case.bias:
            made["bias"] = case.bias_tensor()
    else:
        made["left"], right = case.offsets()
        if right is not None:
            made["right"] = right
    if case.pieces is not None:
        made["state"] = case.state()
    return {name: on_device(tensor, device).requires_grad_() for name, tensor in made.items()}


def on_device(tensor: Tensor, device: str) -> Tensor:
    """The tensor on a device, with its strides; on the CPU itself."""
    if device == "cpu":
        return tensor.detach()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        return tensor.detach().to(device)
    return tensor.as_strided((span,), (1,)).to(device).as_strided(tensor.shape, tensor.stride())


def computed(
    case: Case, inputs: dict[str, Tensor], grad: Tensor, grad_state: Tensor | None = None
) -> dict[str, Tensor]:
    """What the operators answer: `out`, `state` of a case in pieces, and a gradient d… for each input."""
    torch.manual_seed(DRAW)
    if case.pieces is None:
        results = {"out": _full(case, inputs)}
    else:
        results = _in_pieces(case, inputs, inputs["state"] if case.seen else None, _step(case, inputs))
    return _with_gradients(results, inputs, grad, grad_state)


def answer(case: Case, inputs: dict[str, Tensor], grad: Tensor, grad_state: Tensor | None = None) -> dict[str, Tensor]:
    """As `computed`, by the oracles, from the same numbers in float64 on the CPU."""
    wide = {name: tensor.detach().double().cpu().requires_grad_() for name, tensor in inputs.items()}
    if isinstance(case, Convolution):
        weight = _shifted(case, wide["weight"])
        rows = wide["x"]
        if case.glu:
            rows = rows[..., : case.channels] * torch.sigmoid(rows[..., case.channels :])
        called = _oracle_of_convolution(case, weight, wide.get("bias"), inputs["x"].device)
    else:
        rows, called = wide["x"], _oracle_of_talk(case, wide["left"], wide.get("right"))
    if case.pieces is None:
        results = {"out": called(rows, 0)}
    else:
        results = _in_pieces(case, {"x": rows}, wide["state"], _stateless(case, called))
    grad_state = None if grad_state is None else grad_state.double().cpu()
    return _with_gradients(results, wide, grad.double().cpu(), grad_state)


def counted(case: Convolution) -> Tensor:
    """(T, B, K): whether tap k of row t reads a row of its sequence, or of the state."""
    span, first = case.spans(), case.seen - (case.size - 1) if case.pieces else -case.padding_l
    at = (torch.arange(case.steps).view(-1, 1) + first + torch.arange(case.size)).unsqueeze(1)
    return (at >= span[..., :1]) & (at < span[..., 1:] + (case.seen if case.pieces else 0))


# ------------------------------------------------------------------------------------------------ the operators


def _full(case: Case, inputs: dict[str, Tensor]) -> Tensor:
    sequences = {name: tensor.to(inputs["x"].device) for name, tensor in case.sequences().items()}
    if isinstance(case, Talk):
        return ops.talkconv(inputs["x"], inputs["left"], inputs.get("right"), case.left, case.right, **sequences)
    return getattr(ops, case.operator)(
        inputs["x"], inputs["weight"], case.padding_l, bias=inputs.get("bias"), **case.options(), **sequences
    )


def _step(case: Case, inputs: dict[str, Tensor]):
    """(x's rows, state, their first and last row) → (out, next state)."""

    def talk(x, state, begin, end):
        return ops.talkconv_step(x, state, inputs["left"][begin:end], case.left)

    def convolution(x, state, begin, end):
        weight = inputs["weight"][begin:end] if case.dynamic else inputs["weight"]
        return getattr(ops, case.operator + "_step")(x, state, weight, bias=inputs.get("bias"), **case.options())

    return talk if isinstance(case, Talk) else convolution


def _in_pieces(case: Case, inputs: dict[str, Tensor], state: Tensor | None, step) -> dict[str, Tensor]:
    orders, outs = iter(case.orders()), []
    for end, count in zip(accumulate(case.pieces), case.pieces, strict=True):
        if outs and case.batch:
            state = state.index_select(1, next(orders).to(state.device))
        out, state = step(inputs["x"][end - count : end], state, end - count, end)
        outs.append(out)
    return {"out": torch.cat(outs), "state": state}


def _with_gradients(
    results: dict[str, Tensor], inputs: dict[str, Tensor], grad: Tensor, grad_state: Tensor | None
) -> dict[str, Tensor]:
    outputs, grads = [results["out"]], [grad]
    if grad_state is not None and results["state"].requires_grad:
        outputs, grads = [*outputs, results["state"]], [*grads, grad_state]
    found = torch.autograd.grad(outputs, list(inputs.values()), grads, allow_unused=True, materialize_grads=True)
    gradients = {"d" + name: gradient for name, gradient in zip(inputs, found, strict=True)}
    return {name: tensor.detach() for name, tensor in (results | gradients).items()}


# ------------------------------------------------------------------------------------------------ the oracles


def _stateless(case: Case, called):
    """A step of an oracle whose state is the whole past, of which the last call hands back what a state holds."""

    def step(rows, past, begin, end):
        past = torch.cat([past, rows])
        out = called(past, begin)[past.shape[0] - rows.shape[0] :]
        return out, past[max(past.shape[0] - case.history, 0) :] if end == case.steps else past

    return step


def _oracle_of_talk(case: Talk, left: Tensor, right: Tensor | None):
    def called(rows, begin):
        past = rows.shape[0] - (case.steps if case.pieces is None else _piece(case, begin))
        offsets = torch.cat([left.new_zeros(past, *left.shape[1:]), left[begin : begin + rows.shape[0] - past]])
        return oracle.talk(rows, offsets, right, case.left, case.right, **case.sequences())

    return called


def _oracle_of_convolution(case: Convolution, weight: Tensor, bias: Tensor | None, device: torch.device):
    factors = iter(_factors(case, weight, device))

    def called(rows, begin):
        count = case.steps if case.pieces is None else _piece(case, begin)
        past, drawn, filters = rows.shape[0] - count, next(factors), weight
        if case.dynamic:
            filters = _after(past, weight[begin : begin + count])
            drawn = None if drawn is None else _after(past, drawn)
        return oracle.convolution(
            rows,
            filters,
            case.padding_l,
            normalize=case.normalize,
            factors=drawn,
            bias=bias,
            renorm_padding=case.renorm,
            **case.sequences(),
        )

    return called


def _piece(case: Case, begin: int) -> int:
    """How many tokens the piece has that begins at a row."""
    return case.pieces[[0, *accumulate(case.pieces)].index(begin)]


def _after(past: int, filters: Tensor) -> Tensor:
    """Filters of rows that come after others, whose outputs nobody looks at."""
    return torch.cat([filters.new_zeros(past, *filters.shape[1:]), filters])


def _shifted(case: Convolution, weight: Tensor) -> Tensor:
    """For softmax less each filter's largest weight, which changes nothing but that e^10000 is not computed."""
    if case.normalize != "softmax":
        return weight
    seen = weight.detach()
    if case.renorm:
        seen = seen.masked_fill(~counted(case).unsqueeze(2), float("-inf"))
    top = seen.amax(-1, keepdim=True)
    return weight - torch.where(top.isfinite(), top, 0)


def _factors(case: Convolution, weight: Tensor, device: torch.device) -> list[Tensor | None]:
    """The dropout factors of each call, by the definition of the mask; its seed is drawn on the operator's device."""
    counts = [case.steps] if case.pieces is None else case.pieces
    if case.dropout == 0:
        return [None] * len(counts)
    torch.manual_seed(DRAW)
    shapes = [(count, *weight.shape[1:]) if case.dynamic else tuple(weight.shape) for count in counts]
    return [drawn(int(torch.randint(2**63 - 1, (1,), device=device)), shape, case.dropout) for shape in shapes]


def drawn(seed: int, shape: tuple[int, ...], p: float, first: int = 0) -> Tensor:
    """0 or 1/(1−p) for the weights from flat index `first` on, in float64: the oracle's Philox on arrays."""
    count = int(numpy.prod(shape))
    flat = numpy.arange(first, first + count, dtype=numpy.uint64)
    counter = flat // 4
    words = oracle.philox((counter % 2**32, counter // 2**32, 0 * counter, 0 * counter), (seed % 2**32, seed // 2**32))
    kept = numpy.choose((flat % 4).astype(int), words) >= p * 2**32
    return torch.from_numpy(numpy.where(kept, 1 / (1 - p), 0.0)).view(shape)
