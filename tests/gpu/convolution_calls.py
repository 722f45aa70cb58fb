"""One call of an operator with all its options, made from a seed, and the same call in float64 by the reference."""

import itertools
import math
import random
from dataclasses import dataclass, field

import torch

from lightconv_plugin import ops
from lightconv_plugin.ops import reference

OPERATORS = ("lightconv", "dynamicconv")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Root mean square of the error over that of the result: a few units of the type's last place (2⁻²⁴, 2⁻⁹, 2⁻¹²) for the
# result and for each rounded factor; gradients of filters are differences of sums.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
LAYOUTS = ("contiguous", "batch-first", "sliced", "shifted")


@dataclass
class Case:
    operator: str
    steps: int
    batch: int
    heads: int
    per_head: int
    kernel_size: int
    padding_l: int
    dtype: torch.dtype
    layout: str = "contiguous"
    normalize: str = "softmax"
    dropout: float = 0.0
    glu: bool = False
    bias: bool = False
    renorm_padding: bool = False
    sequences: str = "whole"
    seed: int = 0
    name: str = field(init=False)

    def __post_init__(self):
        words = [
            self.operator[:5],
            str(self.dtype).removeprefix("torch."),
            f"T{self.steps}-B{self.batch}-H{self.heads}-R{self.per_head}-K{self.kernel_size}-P{self.padding_l}",
            self.layout * (self.layout != "contiguous"),
            self.normalize * (self.normalize != "softmax"),
            self.sequences * (self.sequences != "whole"),
            *(name for name in ("dropout", "glu", "bias", "renorm_padding") if getattr(self, name)),
        ]
        self.name = "-".join(word for word in words if word)

    @property
    def dynamic(self):
        return self.operator == "dynamicconv"


def drawn(seed):
    """A case drawn at random: shapes around the edges of tiles and vectors, options in any combination."""
    rng = random.Random(seed)
    operator = rng.choice(OPERATORS)
    sequences = rng.choice(("whole", "whole", "lengths", "packed"))
    size = rng.choice((1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 63, 64, 100, 255))
    per_head = rng.choice((1, 2, 3, 4, 8, 16, 24, 32, 64, 65, 128))
    heads = rng.choice((1, 2, 3, 5)) if per_head > 16 else rng.choice((1, 3, 4, 8, 40))
    normalize = rng.choice(("softmax", "softmax", *ops.NORMALIZATIONS))
    if size == 1 and normalize in ("l1", "l2", "abs_l2"):
        normalize = "none"  # w / (|w| + ε): nothing but ε is left of the gradient, and the error is as large
    return Case(
        operator,
        steps=rng.choice((1, 2, 5, 15, 16, 17, 33, 64, 129, 200)),
        batch=1 if sequences == "packed" else rng.choice((1, 2, 3, 9)),
        heads=heads,
        per_head=per_head,
        kernel_size=size,
        padding_l=rng.choice((0, (size - 1) // 2, size // 2, size - 1)),
        dtype=rng.choice(list(DTYPES.values())),
        layout=rng.choice(LAYOUTS),
        normalize=normalize,
        dropout=rng.choice((0.0, 0.0, 0.1, 0.5)),
        glu=rng.random() < 0.4,
        bias=rng.random() < 0.4,
        renorm_padding=operator == "dynamicconv" and rng.random() < 0.3,
        sequences=sequences,
        seed=seed,
    )


class Arguments:
    """A case's tensors on a device, in its memory layout; `x`, `weight` and `bias` are leaves."""

    def __init__(self, case, device):
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

        steps, batch, channels = case.steps, case.batch, case.heads * case.per_head
        x = normal(steps, batch, channels * (2 if case.glu else 1))
        weight = normal(*(steps, batch) * case.dynamic, case.heads, case.kernel_size)
        grad = normal(steps, batch, channels)
        self.x = laid_out(x.to(device), case.layout).requires_grad_()
        self.weight = laid_out(weight.to(device), case.layout).requires_grad_()
        self.grad = laid_out(grad.to(device), case.layout)
        self.bias = normal(channels).to(device).requires_grad_() if case.bias else None
        self.lengths = self.cu_seqlens = None
        if case.sequences == "lengths":
            self.lengths = torch.randint(0, steps + 1, (batch,), generator=generator).to(device)
        elif case.sequences == "packed":
            inner = torch.randint(0, steps + 1, (3,), generator=generator).sort().values.tolist()
            self.cu_seqlens = torch.tensor([0, *inner, steps], dtype=torch.int32, device=device)
        self.seed = torch.tensor([case.seed + 2**40], device=device) if case.dropout else None

    def call(self):
        """The operator as torch's dispatcher has it, with this case's seed for dropout; returns out."""
        case = self.case
        flags = (case.renorm_padding, case.glu) if case.dynamic else (case.glu,)
        options = (self.lengths, self.cu_seqlens, self.seed, case.padding_l, case.normalize, case.dropout, *flags)
        return getattr(torch.ops.lightconv, case.operator)(self.x, self.weight, self.bias, *options)

    def everything(self):
        """(out, dx, dweight, dbias or None)."""
        out = self.call()
        inputs = [tensor for tensor in (self.x, self.weight, self.bias) if tensor is not None]
        gradients = torch.autograd.grad(out, inputs, self.grad)
        return out.detach(), *gradients, *[None] * (3 - len(gradients))

    def expected(self):
        """The same in float64 on the CPU, by the reference, from the same (rounded) numbers."""

        def wide(tensor):
            return None if tensor is None else tensor.detach().cpu().double()

        def here(tensor):
            return None if tensor is None else tensor.cpu()

        case = self.case
        flags = (case.renorm_padding, case.glu) if case.dynamic else (case.glu,)
        x, weight, bias, grad = wide(self.x), wide(self.weight), wide(self.bias), wide(self.grad)
        sequences = (here(self.lengths), here(self.cu_seqlens), here(self.seed))
        options = (*sequences, case.padding_l, case.normalize, case.dropout, *flags)
        out = getattr(reference, case.operator)(x, weight, bias, *options)
        dx, dweight = getattr(reference, case.operator + "_backward")(grad, x, weight, *options, True, True)
        return out, dx, dweight, grad.sum((0, 1)) if case.bias else None


def laid_out(tensor, layout):
    """The same numbers in another memory layout; the last dimension stays contiguous."""
    if layout == "batch-first" and tensor.dim() > 2:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1).detach()
    if layout == "sliced":
        # Rows apart from each other, and beginning at an address that is not a multiple of 16 bytes.
        wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 7), math.nan)
        wide[..., 3:-4] = tensor
        return wide[..., 3:-4].detach()
    if layout == "shifted":
        flat = tensor.new_full((tensor.numel() + 1,), math.nan)
        flat[1:] = tensor.flatten()
        return flat[1:].view(tensor.shape).detach()
    return tensor.detach().clone()


def relative_error(got, want):
    """Root mean square of the difference over that of the expected numbers."""
    got = got.cpu().double()
    assert got.isfinite().all()
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item() if want.numel() else 0.0


def check(case, device):
    """Holds out and every gradient of a case against float64."""
    arguments = Arguments(case, device)
    got, want = arguments.everything(), arguments.expected()
    for name, ours, theirs in zip(("out", "dx", "dweight", "dbias"), got, want, strict=True):
        if theirs is None:
            continue
        assert ours.shape == theirs.shape and ours.dtype == case.dtype and ours.device.type == device.type, name
        tolerance = TOLERANCE[case.dtype] * (4 if name == "dweight" else 1)
        if theirs.norm() <= 1e-12 * math.sqrt(max(theirs.numel(), 1)):
            assert ours.norm() <= 1e-3, name  # nothing but rounding is left of it: a softmax over one tap has no slope
        else:
            error = relative_error(ours, theirs)
            assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"


def grid():
    """Every paper's kernel and every width of head, for both operators and all types, plainly."""
    sizes = (1, 2, 3, 4, 5, 7, 15, 31, 63, 64, 127, 255)
    for operator, dtype, size in itertools.product(OPERATORS, DTYPES.values(), sizes):
        for per_head in (4, 64):
            yield Case(operator, 70, 2, 2, per_head, size, size - 1, dtype)
            yield Case(operator, 40, 3, 3, per_head, size, (size - 1) // 2, dtype)
    for operator, dtype, per_head in itertools.product(OPERATORS, DTYPES.values(), (1, 2, 3, 8, 16, 32, 48, 128, 256)):
        yield Case(operator, 50, 2, 3, per_head, 4, 3, dtype, normalize="none")
        yield Case(operator, 50, 2, 3, per_head, 31, 15, dtype)
