"""The three operators in one table: how each is called, with random arguments, and what the answer must be in float64.

Every test of what all operators promise takes a kind of call from `KINDS`.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightconv_plugin import ops
from tests.cuda.covering import covering

from . import oracle

CONVOLUTIONS = ("lightconv", "dynamicconv")
OPERATORS = (*CONVOLUTIONS, "talkconv")
# The operator and the options of `random_call`.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lightconv": ("lightconv", {"bias": True}),
    "lightconv-glu": ("lightconv", {"bias": True, "glu": True}),
    "dynamicconv": ("dynamicconv", {"bias": True}),
    "dynamicconv-glu": ("dynamicconv", {"bias": True, "glu": True}),
    "dynamicconv-renorm": ("dynamicconv", {"bias": True, "renorm_padding": True}),
    "dynamicconv-renorm-glu": ("dynamicconv", {"bias": True, "renorm_padding": True, "glu": True}),
    "talkconv": ("talkconv", {}),
    "talkconv-far": ("talkconv", {"top": 2.5}),  # offsets as dropout makes them
}
STEP_KINDS = [kind for kind in KINDS if kind != "talkconv-far"]  # a state has no rows for offsets beyond 1
GARBAGE = {"nan": float("nan"), "inf": float("inf"), "large": 1e30}

# Arguments that the registered operators take, and these functions have defaults for.
_DEFAULTS = {
    "bias": None,
    "lengths": None,
    "cu_seqlens": None,
    "seed": None,
    "normalize": "softmax",
    "dropout": 0.0,
    "renorm_padding": False,
    "glu": False,
    "need_x": True,
    "need_state": True,
    "need_weight": True,
    "need_left": True,
    "need_right": True,
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an operator. `tensors`: its floating arguments by name, in order, None if not given; leaves."""

    operator: str
    tensors: dict[str, Tensor | None]
    options: dict[str, Any]

    def __call__(self, **options) -> Tensor:
        """The full pass."""
        return getattr(ops, self.operator)(**self.tensors, **self.options | options)

    def __getattr__(self, name: str) -> Tensor | None:
        try:
            return self.tensors[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def given(self) -> dict[str, Tensor]:
        """The tensors that are not None."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor is not None}

    @property
    def by_row(self) -> tuple[str, ...]:
        """The results and tensors that have a row for each position of each sentence."""
        return ("out", *(name for name, tensor in self.given.items() if tensor.dim() > 2))

    @property
    def history(self) -> int:
        """Rows of a full state."""
        return self.options["max_left"] if self.operator == "talkconv" else self.weight.shape[-1] - 1

    @property
    def channels(self) -> int:
        return self.x.shape[-1] // (2 if self.options.get("glu") else 1)

    def randn_like_out(self, seed: int = 1) -> Tensor:
        shape = (*self.x.shape[:2], self.channels)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.x.dtype)

    def replace(self, options: dict[str, Any] | None = None, **tensors: Tensor | None) -> Call:
        """The same call with other tensors, as leaves of their own, and other options."""
        tensors = {name: None if t is None else t.detach().requires_grad_() for name, t in tensors.items()}
        return Call(self.operator, self.tensors | tensors, self.options | (options or {}))

    def filled(self, rows: Any, value: float, *names: str) -> Call:
        """The same call with other values in some rows of some tensors (of x, if none is named)."""
        copies = {name: self.tensors[name].detach().clone() for name in names or ("x",)}
        for tensor in copies.values():
            tensor[rows] = value
        return self.replace(**copies)

    def part(self, *rows: slice) -> Call:
        """The call of some rows, and some sentences, alone."""
        return self.replace(**{name: t[rows] if t.dim() > 2 else t for name, t in self.given.items()})

    def gradients(self, out: Tensor | tuple[Tensor, ...], grad: Any) -> dict[str, Tensor]:
        return dict(zip(self.given, torch.autograd.grad(out, [*self.given.values()], grad), strict=True))

    def everything(self, grad: Tensor, **options) -> dict[str, Tensor]:
        """ "out" and, by the name of its tensor, every gradient."""
        torch.manual_seed(5)
        out = self(**options)
        return {"out": out.detach(), **self.gradients(out, grad)}

    def expected(self, grad: Tensor, **options) -> dict[str, Tensor]:
        """The same by the oracle, in float64 from the same numbers."""
        wide = self.replace(**{name: tensor.double() for name, tensor in self.given.items()})
        options = self.options | options
        dropout = options.pop("dropout", 0.0)
        if self.operator == "talkconv":
            out = oracle.talk(**wide.tensors, **options)
        else:
            factors = drawn(5, self.weight.shape, dropout)
            out = oracle.convolution(**wide.tensors, factors=factors, **options)
        return {"out": out.detach(), **wide.gradients(out, grad.double())}

    def check(self, *, atol: float = 1e-11, **options) -> None:
        """Hold the output and all gradients against the oracle's."""
        grad = self.randn_like_out()
        got, want = self.everything(grad, **options), self.expected(grad, **options)
        for name, ours in got.items():
            allowed = atol if name == "out" else 10 * atol
            message = lambda text: f"{name}: {text}"  # noqa: B023, E731
            torch.testing.assert_close(ours.double(), want[name], rtol=0, atol=allowed, msg=message)

    # -------------------------------------------------------------------------------------------- steps

    def step(self, state: Tensor | None = None, **options) -> tuple[Tensor, Tensor]:
        """All rows as one step after `state`."""
        left_out = ("padding_l", "offset_right", "max_right")
        arguments = {**self.tensors, **self.options, **options, "state": state}
        step = getattr(ops, self.operator + "_step")
        return step(**{name: value for name, value in arguments.items() if name not in left_out})

    def stepwise(self, chunks: list[int], state: Tensor | None = None, **options) -> tuple[Tensor, Tensor]:
        """Feed the rows in chunks of the given numbers of tokens; return all outputs and the last state.

        Gradients reach this call's own tensors."""
        outs, at = [], 0
        for tokens in chunks:
            rows = slice(at, at + tokens)
            tensors = {name: t[rows] if t is not None and t.dim() > 2 else t for name, t in self.tensors.items()}
            out, state = Call(self.operator, tensors, self.options).step(state, **options)
            outs.append(out)
            at += tokens
        assert at == self.x.shape[0]
        return torch.cat(outs), state

    # -------------------------------------------------------------------------------------------- the registered ones

    def registered(self, suffix: str = "", **others: Any) -> tuple[Any, tuple[Any, ...]]:
        """The operator of torch's dispatcher, and all its arguments in order."""
        operator = getattr(torch.ops.lightconv, self.operator + suffix).default
        values = _DEFAULTS | self.tensors | self.options | others
        return operator, tuple(values[argument.name] for argument in operator._schema.arguments)


def random_call(
    kind: str,
    steps: int,
    batch: int,
    heads: int,
    per_head: int,
    left: int,
    right: int = 0,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options,
) -> Call:
    """A call with random tensors, which require gradients.

    Args:
        kind: one of `KINDS`, whose options `options` replace: `bias`, `glu`, `top` (offsets are drawn from 0 … top)
            and any of the operator's own.
        left, right: rows that a filter or a window reaches to both sides.
    """
    operator, defaults = KINDS[kind]
    options = defaults | options
    bias, top = options.pop("bias", False), options.pop("top", 1.0)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    channels = heads * per_head
    tensors = {"x": normal(steps, batch, 2 * channels if options.get("glu") else channels)}
    if operator == "talkconv":
        offsets = torch.rand(2, steps, batch, heads, generator=generator, dtype=torch.float64) * top
        both = [offset.to(dtype).requires_grad_() for offset in offsets]
        tensors |= {"offset_left": both[0], "offset_right": both[1] if right else None}
        return Call(operator, tensors, options | {"max_left": left, "max_right": right})
    size = left + right + 1
    tensors["weight"] = normal(heads, size) if operator == "lightconv" else normal(steps, batch, heads, size)
    tensors["bias"] = normal(channels) if bias else None
    return Call(operator, tensors, options | {"padding_l": left})


def drawn(seed: int, shape: torch.Size, p: float) -> Tensor | None:
    """The oracle's dropout factors for a call made right after torch.manual_seed(seed); None without dropout."""
    if p == 0:
        return None
    torch.manual_seed(seed)
    return oracle.dropout_factors(int(torch.randint(2**63 - 1, (1,))), shape, p)


def smooth(call: Call) -> Call:
    """The same call with no window that ends near a whole number of rows, where talkconv has a kink."""
    offsets = {}
    for side in ("left", "right"):
        limit, offset = call.options.get(f"max_{side}"), call.tensors.get(f"offset_{side}")
        if limit and offset is not None:
            reach = offset.detach() * limit
            offsets[f"offset_{side}"] = (reach.floor() + 0.1 + 0.8 * reach.frac()) / limit
    return call.replace(**offsets)


def pairwise(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As few combinations of the values as hold every pair of values of two arguments, chosen at random."""
    every, rng = list(itertools.product(*values)), random.Random(0)
    kept = covering(every, lambda case: dict(zip("abcdefgh", case, strict=False)), lambda case: rng.random())
    return [case for number, case in enumerate(every) if number in kept]


def chunking(steps: int, seed: int) -> list[int]:
    """A random way of cutting a sequence, from many single tokens to few long pieces."""
    rng, chunks = random.Random(seed), []
    while sum(chunks) < steps:
        chunks.append(rng.randint(1, min(rng.choice((1, 2, 5, steps)), steps - sum(chunks))))
    return chunks


def assert_same_bits(got: dict[str, Tensor], want: dict[str, Tensor], rows: Any = ...) -> None:
    """All results that both have are equal, in these rows."""
    for name in got.keys() & want.keys():
        assert torch.equal(got[name][rows], want[name][rows]), name


def relative_error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of the expected values."""
    return ((got.double() - want).norm() / want.norm()).item()


def numbers_of_threads(*numbers: int) -> Iterator[int]:
    """Each of them in turn, while torch computes with as many threads."""
    before = torch.get_num_threads()
    try:
        for number in numbers:
            torch.set_num_threads(number)
            yield number
    finally:
        torch.set_num_threads(before)
