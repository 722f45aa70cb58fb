"""The self-check of `lightconv doctor`: are the results of the operators and of a small model correct on this machine?

The expected results are computed here independently, in float64 with a plain loop over time of the papers' equations
(Wu et al. 2019, 3 to 5; Lioutas & Guo 2020, section 3), which torch differentiates; they share no code with the
operators. Native kernels are also compared with the reference, with every option and the dropout mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from lightconv_plugin import ops
from lightconv_plugin.diagnostics import selfcheck_decoding
from lightconv_plugin.ops import reference

DIFFERENTIABLE = (
    "lightconv",
    "dynamicconv",
    "talkconv",
    "label_smoothed_nll_loss",
    "dropout_add_layer_norm",
    "relu_dropout",
)
OPERATORS = (*DIFFERENTIABLE, "ring_step", "best_words")

BATCH = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of a convolution: T, C, H, K. Windows of talkconv reach up to K // 2 rows to the left and to the right."""

    length: int
    channels: int
    heads: int
    kernel_size: int

    @property
    def reach(self) -> int:
        return self.kernel_size // 2

    @property
    def parts(self) -> list[slice]:
        """Of the sequence, for the step functions."""
        return [slice(0, 1), slice(1, 3), slice(3, self.length)]


# Every path of the kernels is taken by one of these (`lightconv doctor --explain` names them): heads narrower than any
# vector, of one vector, as wide as in published models, and of one channel; short and long filters; and dynamicconv's
# filters of 4 taps with several heads in one vector. In a sequence that is shorter than the filter, padding and
# normalisation are easiest to get wrong.
SHAPES = (Shape(6, 12, 4, 7), Shape(6, 32, 2, 7), Shape(6, 16, 8, 4), Shape(40, 128, 2, 31), Shape(6, 3, 3, 31))

ROWS, WORDS, EPSILON, IGNORED = 5, 21, 0.1, 1  # of the loss; the words are not a multiple of any vector

WIDTH, NORM_EPSILON, DROPPED = 12, 1e-5, 0.25  # of what follows a sublayer

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def convolution(x: Tensor, logits: Tensor, padding_l: int) -> Tensor:
    """x (T,B,C) and logits (T,B,H,K) of the filters → (T,B,C)."""
    length, batch, _ = x.shape
    heads, kernel_size = logits.shape[2:]
    weight = (logits.exp() / logits.exp().sum(dim=-1, keepdim=True)).permute(0, 3, 1, 2).unsqueeze(-1)
    around = (0, 0, 0, 0, 0, 0, padding_l, kernel_size - 1 - padding_l)
    padded = nn.functional.pad(x.reshape(length, batch, heads, -1), around)
    out = [(weight[t] * padded[t : t + kernel_size]).sum(dim=0) for t in range(length)]
    return torch.stack(out).reshape_as(x)


def talk(x: Tensor, left: Tensor, right: Tensor | None, reach: int) -> Tensor:
    """x (T,B,C), left and right (T,B,H) → (T,B,C), for max_left = reach, and max_right too unless `right` is None."""
    length, batch, heads = left.shape
    by_head, rows = x.reshape(length, batch, heads, -1), []
    for t in range(length):
        distance, total = torch.arange(length).view(-1, 1, 1) - t, by_head[t]  # distance: of each row (T,1,1)
        for offset, side in ((left, distance < 0), (right, distance > 0)):
            if offset is not None:
                # 1 for a row inside the window, 0 for one outside, a fraction for the row at its edge.
                part = offset[t] * reach - distance.abs() + 1
                share = torch.where((part > 0) & (part < 1), part, (part >= 1).to(part.dtype)) * side
                total = total + (share.unsqueeze(-1) * by_head).sum(dim=0)
        rows.append(total)
    return torch.stack(rows).reshape_as(x) / (reach + 1 if right is None else 2 * reach + 1)


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """The label-smoothed loss (N,) of logits (N,V)."""
    rows = []
    for row, word in enumerate(target.tolist()):
        probability = logits[row].exp() / logits[row].exp().sum()
        weight = torch.full_like(probability, EPSILON / (WORDS - 1))
        weight[word] = 1 - EPSILON
        rows.append(-(weight * probability.log()).sum() * (word != IGNORED))
    return torch.stack(rows)


def norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The norm of residual + x (N,C)."""
    total = x + residual
    centred = total - total.sum(dim=1, keepdim=True) / WIDTH
    return centred / ((centred * centred).sum(dim=1, keepdim=True) / WIDTH + NORM_EPSILON) ** 0.5 * weight + bias


def difference(got: Tensor, want: Tensor) -> float:
    """The largest error, relative for values above 1. NaN counts as an infinite error; max() would skip it."""
    error = (got.double() - want.double()).abs() / want.double().abs().clamp(min=1)
    return error.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()


def operator_error(name: str, device: torch.device, dtype: torch.dtype) -> float:
    """The largest `difference` of an operator's forward, backward and step, in all SHAPES.

    `name` is one of OPERATORS.
    """
    errors = []

    def compare(got: Tensor | None, want: Tensor) -> None:
        if got is None:
            raise ValueError(f"{name} gave no gradient")
        if got.shape != want.shape:
            raise ValueError(f"{name} gave shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        errors.append(difference(got.detach().cpu(), want))

    for comparison in _COMPARISONS[name]:
        comparison(compare, device, dtype)
    return max(errors)


_Compare = Callable[[Tensor | None, Tensor], None]


def _check(
    compare: _Compare,
    operator: Callable[..., Tensor],
    definition: Callable[..., Tensor],
    given: Sequence[Tensor],
    grad: Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Compare outputs and gradients for the same tensors, all in float64; returns the output of the definition."""
    leaves = [tensor.to(device, dtype).requires_grad_() for tensor in given]
    got = operator(*leaves)
    got.backward(grad.to(device, got.dtype))
    own = [tensor.clone().requires_grad_() for tensor in given]
    want = definition(*own)
    want.backward(grad)
    compare(got, want.detach())
    for leaf, expected in zip(leaves, own, strict=True):
        assert expected.grad is not None  # backward has filled it
        compare(leaf.grad, expected.grad)
    return want.detach()


def _compare_talk(shape: Shape, compare: _Compare, device: torch.device, dtype: torch.dtype) -> None:
    generator, by_head = torch.Generator().manual_seed(30), (shape.length, BATCH, shape.heads)
    x, grad = (
        torch.randn(shape.length, BATCH, shape.channels, generator=generator).to(dtype).double() for _ in range(2)
    )
    # Offsets above 1 exceed the reach.
    left, right = ((1.5 * torch.rand(by_head, generator=generator)).to(dtype).double() for _ in range(2))
    reach, causal = shape.reach, left.clamp(max=1)

    def check(right_reach: int, *given: Tensor) -> Tensor:
        def operator(x: Tensor, left: Tensor, right: Tensor | None = None) -> Tensor:
            return ops.talkconv(x, left, right, reach, right_reach)

        def definition(x: Tensor, left: Tensor, right: Tensor | None = None) -> Tensor:
            return talk(x, left, right, reach)

        return _check(compare, operator, definition, given, grad, device, dtype)

    check(reach, x, left, right)
    want, parts, state = check(0, x, causal), [], None
    for part in shape.parts:
        out, state = ops.talkconv_step(x[part].to(device, dtype), state, causal[part].to(device, dtype), reach)
        parts.append(out)
    compare(torch.cat(parts), want)


def _compare_loss(compare: _Compare, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(32)
    logits = torch.randn(ROWS, WORDS, generator=generator).to(dtype).double()
    grad = torch.rand(ROWS, generator=generator).double()
    target = torch.tensor([3, IGNORED, 0, WORDS - 1, 9])

    def operator(logits: Tensor) -> Tensor:
        return ops.label_smoothed_nll_loss(logits, target.to(device), EPSILON, IGNORED)[0]

    _check(compare, operator, partial(loss, target=target), [logits], grad, device, dtype)


def _compare_norm(compare: _Compare, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(33)
    x, residual, grad = (torch.randn(ROWS, WIDTH, generator=generator).to(dtype).double() for _ in range(3))
    weight = (0.5 + torch.rand(WIDTH, generator=generator)).to(dtype).double()
    operator = partial(ops.dropout_add_layer_norm, eps=NORM_EPSILON)
    given = (x, residual, weight, torch.zeros(WIDTH, dtype=torch.float64))
    _check(compare, operator, norm, given, grad, device, dtype)


def _compare_relu(compare: _Compare, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(34)
    x, grad = (torch.randn(ROWS, WIDTH, generator=generator).to(dtype).double() for _ in range(2))
    leaf = x.to(device, dtype).requires_grad_()
    got = ops.relu_dropout(leaf, DROPPED)
    got.backward(grad.to(device, dtype))
    kept = (got.detach().double().cpu() != 0) / (1 - DROPPED)  # what is dropped is random
    compare(got, x.clamp(min=0) * kept)
    compare(leaf.grad, grad * kept)


def _compare_convolution(name: str, shape: Shape, compare: _Compare, device: torch.device, dtype: torch.dtype) -> None:
    static = name == "lightconv"
    operator, step = getattr(ops, name), getattr(ops, f"{name}_step")
    generator = torch.Generator().manual_seed(29)
    like_x, filters = (shape.length, BATCH, shape.channels), (shape.heads, shape.kernel_size)
    by_position = (shape.length, BATCH, *filters)
    # Rounded to the type under test first, so that rounding the input does not count as an error.
    x, grad, weight = (
        torch.randn(size, generator=generator).to(dtype).double()
        for size in (like_x, like_x, filters if static else by_position)
    )

    def check(padding_l: int) -> Tensor:
        def definition(x: Tensor, weight: Tensor) -> Tensor:
            return convolution(x, weight.expand(by_position), padding_l)

        return _check(compare, partial(operator, padding_l=padding_l), definition, (x, weight), grad, device, dtype)

    check(shape.kernel_size // 2)
    want, parts, state = check(shape.kernel_size - 1), [], None
    for part in shape.parts:
        out, state = step(
            x[part].to(device, dtype), state, weight.to(device, dtype) if static else weight[part].to(device, dtype)
        )
        parts.append(out)
    compare(torch.cat(parts), want)


def reference_error(name: str, device: torch.device, dtype: torch.dtype) -> float:
    """The largest `difference` between the backend in use and the reference, with every option on, in all SHAPES."""
    generator = torch.Generator().manual_seed(31)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    errors = []
    for operator, arguments in (call for calls in _CALLS[name] for call in calls(normal, device).items()):
        got, want = getattr(torch.ops.lightconv, operator)(*arguments), getattr(reference, operator)(*arguments)
        for ours, theirs in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
            if ours.shape != theirs.shape:
                raise ValueError(f"{operator} gave shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}")
            errors.append(difference(ours, theirs))
    return max(errors)


def _convolution_calls(
    name: str, shape: Shape, normal: Callable[..., Tensor], device: torch.device
) -> dict[str, tuple]:
    static = name == "lightconv"
    size, filters = (shape.length, BATCH), (shape.heads, shape.kernel_size)
    x, grad, bias = normal(*size, 2 * shape.channels), normal(*size, shape.channels), normal(shape.channels)
    weight = normal(*(filters if static else (*size, *filters)))
    next_rows = min(2 + shape.length, shape.kernel_size - 1)
    state, grad_state = (normal(rows, BATCH, shape.channels) for rows in (2, next_rows))
    lengths, seed = torch.tensor([shape.length, 4], device=device), torch.tensor([1234567890123], device=device)
    options = ("softmax", 0.3, *(() if static else (True,)), True)  # normalize, dropout, renorm_padding, glu
    full, step = (lengths, None, seed, shape.kernel_size // 2, *options), (seed, *options)
    return {
        name: (x, weight, bias, *full),
        f"{name}_backward": (grad, x, weight, *full, True, True),
        f"{name}_step": (x, state, weight, bias, *step),
        f"{name}_step_backward": (grad, grad_state, x, state, weight, *step, True, True, True),
    }


def _talk_calls(shape: Shape, normal: Callable[..., Tensor], device: torch.device) -> dict[str, tuple]:
    size, reach = (shape.length, BATCH), shape.reach
    x, grad = normal(*size, shape.channels), normal(*size, shape.channels)
    left, right = (normal(*size, shape.heads).sigmoid() * factor for factor in (1, 1.5))
    state, grad_state = (normal(rows, BATCH, shape.channels) for rows in (2, min(2 + shape.length, reach)))
    full = (x, left, right, torch.tensor([shape.length, 4], device=device), None, reach, reach)
    return {
        "talkconv": full,
        "talkconv_backward": (grad, *full, True, True, True),
        "talkconv_step": (x, state, left, reach),
        "talkconv_step_backward": (grad, grad_state, x, state, left, reach, True, True, True),
    }


def _loss_calls(normal: Callable[..., Tensor], device: torch.device) -> dict[str, tuple]:
    logits, target = normal(ROWS, WORDS), torch.tensor([3, IGNORED, 0, WORDS - 1, 9], device=device)
    grads = normal(2, ROWS).float()
    normaliser = logits.float().logsumexp(dim=-1)
    return {
        "label_smoothed_nll": (logits, target, EPSILON, IGNORED),
        "label_smoothed_nll_backward": (grads[0], grads[1], logits, target, normaliser, EPSILON, IGNORED),
    }


def _norm_calls(normal: Callable[..., Tensor], device: torch.device) -> dict[str, tuple]:
    grad, x, residual = (normal(ROWS, WIDTH) for _ in range(3))
    seed = torch.tensor([1234567890123], device=device)
    norm = (x, residual, normal(WIDTH), normal(WIDTH), seed, 0.3, NORM_EPSILON)
    return {"dropout_add_norm": norm, "dropout_add_norm_backward": (grad, *norm, True, True, True, True)}


def _relu_calls(normal: Callable[..., Tensor], device: torch.device) -> dict[str, tuple]:
    grad, x, seed = normal(ROWS, WIDTH), normal(ROWS, WIDTH), torch.tensor([1234567890123], device=device)
    return {"relu_dropout": (x, seed, 0.3), "relu_dropout_backward": (grad, x.relu(), seed, 0.3)}


_COMPARISONS: dict[str, list[Callable[..., None]]] = {
    "lightconv": [partial(_compare_convolution, "lightconv", shape) for shape in SHAPES],
    "dynamicconv": [partial(_compare_convolution, "dynamicconv", shape) for shape in SHAPES],
    "talkconv": [partial(_compare_talk, shape) for shape in SHAPES],
    "label_smoothed_nll_loss": [_compare_loss],
    "dropout_add_layer_norm": [_compare_norm],
    "relu_dropout": [_compare_relu],
    "ring_step": [selfcheck_decoding.compare_ring],
    "best_words": [selfcheck_decoding.compare_best],
}
_CALLS: dict[str, list[Callable[..., dict[str, tuple]]]] = {
    "lightconv": [partial(_convolution_calls, "lightconv", shape) for shape in SHAPES],
    "dynamicconv": [partial(_convolution_calls, "dynamicconv", shape) for shape in SHAPES],
    "talkconv": [partial(_talk_calls, shape) for shape in SHAPES],
    "label_smoothed_nll_loss": [_loss_calls],
    "dropout_add_layer_norm": [_norm_calls],
    "relu_dropout": [_relu_calls],
    "ring_step": [selfcheck_decoding.ring_calls],
    "best_words": [selfcheck_decoding.best_calls],
}


def decoding_error(architecture: str = "dynamicconv", device: str = "cpu") -> float:
    """Build a tiny model; returns the largest difference between decoding step by step and all at once."""
    from fairseq import models
    from fairseq.data import Dictionary
    from omegaconf import OmegaConf

    dictionary = Dictionary()
    for i in range(20):
        dictionary.add_symbol(f"word{i}")
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, cfg=None)
    config = models.MODEL_DATACLASS_REGISTRY[architecture]()
    config._name = architecture
    for side in ("encoder", "decoder"):
        for option, value in (("embed_dim", 16), ("ffn_embed_dim", 16), ("attention_heads", 2), ("layers", 1)):
            setattr(config, f"{side}_{option}", value)
        setattr(config, f"{side}_kernel_size_list", [7])
    model = models.build_model(OmegaConf.structured(config), task).to(device).eval()

    length = 6
    tokens = torch.arange(4, 4 + length).repeat(BATCH, 1).to(device)
    with torch.no_grad():
        encoded = model.encoder(tokens, torch.full((BATCH,), length, device=device))
        whole, _ = model.decoder(tokens, encoder_out=encoded)
        state: dict = {}
        steps = [
            model.decoder(tokens[:, : t + 1], encoder_out=encoded, incremental_state=state)[0] for t in range(length)
        ]
    return difference(torch.cat(steps, dim=1), whole)
