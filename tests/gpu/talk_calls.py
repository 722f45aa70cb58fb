"""Calls of talkconv made from a seed, and the same calls in float64 by the reference."""

import random
from dataclasses import dataclass, field

import torch

from lightconv_plugin.ops import reference

from .convolution_calls import DTYPES, LAYOUTS, TOLERANCE, laid_out, relative_error


@dataclass
class TalkCase:
    """`top`: offsets are drawn from 0 … top, as sigmoids after dropout may be."""

    steps: int
    batch: int
    heads: int
    per_head: int
    left: int
    right: int
    dtype: torch.dtype
    top: float = 1.0
    layout: str = "contiguous"
    sequences: str = "whole"
    seed: int = 0
    name: str = field(init=False)

    def __post_init__(self):
        words = [
            str(self.dtype).removeprefix("torch."),
            f"T{self.steps}-B{self.batch}-H{self.heads}-R{self.per_head}-L{self.left}-R{self.right}",
            f"top{self.top:g}" * (self.top != 1),
            self.layout * (self.layout != "contiguous"),
            self.sequences * (self.sequences != "whole"),
        ]
        self.name = "-".join(word for word in words if word)


def drawn(seed):
    """A case drawn at random: shapes around the edges of tiles and vectors."""
    rng = random.Random(seed)
    sequences = rng.choice(("whole", "whole", "lengths", "packed"))
    per_head = rng.choice((1, 2, 3, 4, 8, 16, 24, 32, 64, 65, 128))
    return TalkCase(
        steps=rng.choice((1, 2, 5, 15, 16, 17, 33, 64, 129, 200, 1030)),
        batch=1 if sequences == "packed" else rng.choice((1, 2, 3, 5)),
        heads=rng.choice((1, 2, 3, 5)) if per_head > 16 else rng.choice((1, 3, 4, 8, 40)),
        per_head=per_head,
        left=rng.choice((0, 1, 3, 7, 15, 31, 63, 300)),
        right=rng.choice((0, 0, 1, 3, 7, 15, 31, 63)),
        dtype=rng.choice(list(DTYPES.values())),
        top=rng.choice((1.0, 1.0, 1.25, 2.5, 20.0)),
        layout=rng.choice(LAYOUTS),
        sequences=sequences,
        seed=seed,
    )


class TalkArguments:
    """A case's tensors on a device, in its memory layout; `x` and the offsets are leaves."""

    def __init__(self, case, device):
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        shape = (case.steps, case.batch)

        def leaf(tensor, layout):
            return laid_out(tensor.to(case.dtype).to(device), layout).requires_grad_()

        def normal():
            return torch.randn((*shape, case.heads * case.per_head), generator=generator, dtype=torch.float64)

        def offset():
            # Of few bits, so that their products with the reach are exact in every type, and whole windows frequent.
            steps = torch.randint(0, 257, (*shape, case.heads), generator=generator)
            return (steps / 256 * case.top).to(torch.bfloat16).double()

        self.x, self.grad = leaf(normal(), case.layout), leaf(normal(), case.layout).detach()
        self.left, self.right = leaf(offset(), case.layout), leaf(offset(), case.layout) if case.right else None
        self.lengths = self.cu_seqlens = None
        if case.sequences == "lengths":
            self.lengths = torch.randint(0, case.steps + 1, (case.batch,), generator=generator).to(device)
        elif case.sequences == "packed":
            inner = torch.randint(0, case.steps + 1, (3,), generator=generator).sort().values.tolist()
            self.cu_seqlens = torch.tensor([0, *inner, case.steps], dtype=torch.int32, device=device)

    @property
    def tensors(self):
        return tuple(tensor for tensor in (self.x, self.left, self.right) if tensor is not None)

    def call(self):
        """The operator as torch's dispatcher has it."""
        options = (self.lengths, self.cu_seqlens, self.case.left, self.case.right)
        return torch.ops.lightconv.talkconv(self.x, self.left, self.right, *options)

    def everything(self):
        """(out, dx, dleft, dright or None)."""
        out = self.call()
        gradients = torch.autograd.grad(out, self.tensors, self.grad)
        return out.detach(), *gradients, *[None] * (3 - len(gradients))

    def expected(self):
        """The same in float64 on the CPU, by the reference, from the same (rounded) numbers."""

        def wide(tensor):
            return None if tensor is None else tensor.detach().cpu().double()

        def here(tensor):
            return None if tensor is None else tensor.cpu()

        options = (here(self.lengths), here(self.cu_seqlens), self.case.left, self.case.right)
        inputs = (wide(self.x), wide(self.left), wide(self.right), *options)
        out = reference.talkconv(*inputs)
        dx, dleft, dright = reference.talkconv_backward(wide(self.grad), *inputs, True, True, True)
        return out, dx, dleft, None if self.right is None else dright


def check(case, device):
    """Holds out and every gradient of a case against float64."""
    arguments = TalkArguments(case, device)
    got, want = arguments.everything(), arguments.expected()
    for name, ours, theirs in zip(("out", "dx", "dleft", "dright"), got, want, strict=True):
        if theirs is None:
            assert ours is None
            continue
        assert ours.shape == theirs.shape and ours.dtype == case.dtype and ours.device.type == device.type, name
        if not theirs.any():
            assert not ours.any(), name
            continue
        error, tolerance = relative_error(ours, theirs), TOLERANCE[case.dtype] * (1 if name in ("out", "dx") else 4)
        assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"


def grid():
    """The papers' windows and every width of head, in all types."""
    for dtype in DTYPES.values():
        for most in (0, 1, 3, 7, 15, 31, 63):
            for per_head in (4, 64):
                yield TalkCase(70, 2, 2, per_head, most, 0, dtype)
                yield TalkCase(40, 3, 3, per_head, most, most, dtype, top=1.5)
        for per_head in (1, 2, 3, 8, 16, 48, 128, 256):
            yield TalkCase(50, 2, 3, per_head, 15, 7, dtype)
