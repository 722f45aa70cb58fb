"""One call of an operator with all its options, made from a seed, and the same call in float64 by the reference."""

import itertools
import math
import random
from dataclasses import dataclass, field, replace

import torch

from lightconv_plugin import ops
from lightconv_plugin.ops import reference

CONVOLUTIONS = ("lightconv", "dynamicconv")
OPERATORS = (*CONVOLUTIONS, "talkconv")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Root mean square of the error over that of the result: a few units of the type's last place (2⁻²⁴, 2⁻⁹, 2⁻¹²) for the
# result and for each rounded factor; gradients of filters and offsets are differences of sums.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
LAYOUTS = ("contiguous", "batch-first", "sliced", "shifted")


@dataclass
class Case:
    """A call. talkconv's windows reach as far as a filter of `kernel_size` taps, `padding_l` of them to the left.

    `top`: its offsets are drawn from 0 … top, as sigmoids after dropout may be.
    """

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
    top: float = 1.0
    seed: int = 0
    name: str = field(init=False)

    def __post_init__(self):
        words = [
            self.operator[:5],
            str(self.dtype).removeprefix("torch."),
            f"T{self.steps}-B{self.batch}-H{self.heads}-R{self.per_head}-K{self.kernel_size}-P{self.padding_l}",
            f"top{self.top:g}" * (self.top != 1),
            self.layout * (self.layout != "contiguous"),
            self.normalize * (self.normalize != "softmax"),
            self.sequences * (self.sequences != "whole"),
            *(name for name in ("dropout", "glu", "bias", "renorm_padding") if getattr(self, name)),
        ]
        self.name = "-".join(word for word in words if word)

    @property
    def talk(self):
        return self.operator == "talkconv"

    @property
    def dynamic(self):
        return self.operator == "dynamicconv"

    @property
    def channels(self):
        return self.heads * self.per_head

    @property
    def options(self):
        """The arguments of the public function beside tensors and sequences."""
        if self.talk:
            return {"max_left": self.padding_l, "max_right": self.kernel_size - 1 - self.padding_l}
        options = {"padding_l": self.padding_l, "normalize": self.normalize, "dropout": self.dropout, "glu": self.glu}
        return options | ({"renorm_padding": self.renorm_padding} if self.dynamic else {})


def talk(steps, batch, heads, per_head, left, right, dtype, **options):
    """A case of talkconv by the reach of its windows."""
    return Case("talkconv", steps, batch, heads, per_head, left + right + 1, left, dtype, **options)


def drawn(seed):
    """A convolution drawn at random: shapes around the edges of tiles and vectors, options in any combination."""
    rng = random.Random(seed)
    operator = rng.choice(CONVOLUTIONS)
    sequences = rng.choice(("whole", "whole", "lengths", "packed"))
    size = rng.choice((1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 63, 64, 100, 255))
    per_head = rng.choice((1, 2, 3, 4, 8, 16, 24, 32, 64, 65, 128))
    heads = rng.choice((1, 2, 3, 5)) if per_head > 16 else rng.choice((1, 3, 4, 8, 40))
    normalize = rng.choice(("softmax", "softmax", *ops.NORMALIZATIONS))
    case = Case(
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
    one_tap = size == 1 or (case.steps == 1 and case.renorm_padding)
    if one_tap and normalize in ("l1", "l2", "abs_l2"):
        case = replace(case, normalize="none")  # w / (|w| + ε): nothing but ε is left of the gradient, or of its error
    return case


def drawn_talk(seed):
    """A call of talkconv drawn at random."""
    rng = random.Random(seed)
    sequences = rng.choice(("whole", "whole", "lengths", "packed"))
    per_head = rng.choice((1, 2, 3, 4, 8, 16, 24, 32, 64, 65, 128))
    return talk(
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


class Arguments:
    """A case's tensors on a device, in its memory layout. `tensors`: leaves by name, None if not given."""

    def __init__(self, case, device):
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        rows = (case.steps, case.batch)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def leaf(tensor):
            return laid_out(tensor.to(case.dtype).to(device), case.layout).requires_grad_()

        def offset():
            # Of few bits, so that their products with the reach are exact in every type, and whole windows frequent.
            steps = torch.randint(0, 257, (*rows, case.heads), generator=generator)
            return leaf((steps / 256 * case.top).to(torch.bfloat16).double())

        self.tensors = {"x": leaf(normal(*rows, case.channels * (2 if case.glu else 1)))}
        self.grad = leaf(normal(*rows, case.channels)).detach()
        if case.talk:
            right = case.options["max_right"] > 0
            self.tensors |= {"offset_left": offset(), "offset_right": offset() if right else None}
        else:
            weight = leaf(normal(*rows * case.dynamic, case.heads, case.kernel_size))
            bias = normal(case.channels).to(case.dtype).to(device).requires_grad_() if case.bias else None
            self.tensors |= {"weight": weight, "bias": bias}
        self.lengths = self.cu_seqlens = None
        if case.sequences == "lengths":
            self.lengths = torch.randint(0, case.steps + 1, (case.batch,), generator=generator).to(device)
        elif case.sequences == "packed":
            inner = torch.randint(0, case.steps + 1, (3,), generator=generator).sort().values.tolist()
            self.cu_seqlens = torch.tensor([0, *inner, case.steps], dtype=torch.int32, device=device)
        self.seed = torch.tensor([case.seed + 2**40], device=device) if case.dropout else None

    @property
    def given(self):
        """The tensors that are not None."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor is not None}

    @property
    def by_row(self):
        """The results that have a row for each position of each sentence."""
        return ("out", *(name for name, tensor in self.given.items() if tensor.dim() > 2))

    def set(self, **tensors):
        """Replace tensors, as leaves of their own."""
        self.tensors |= {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}

    def part(self, *rows):
        """The tensors of some rows, and some sentences, alone."""
        return {name: tensor[rows] if name in self.by_row else tensor for name, tensor in self.tensors.items()}

    def public(self, tensors=None, **options):
        """The public function."""
        return getattr(ops, self.case.operator)(**tensors or self.tensors, **self.case.options | options)

    def step(self, state, tensors=None):
        """The public function for some more tokens."""
        left_out = ("padding_l", "offset_right", "max_right")
        given = {**(tensors or self.tensors), **self.case.options}
        step = getattr(ops, self.case.operator + "_step")
        return step(state=state, **{name: value for name, value in given.items() if name not in left_out})

    def registered(self, suffix="", **others):
        """The operator as torch's dispatcher has it, with this case's seed for dropout, and all its arguments."""
        sequences = {"lengths": self.lengths, "cu_seqlens": self.cu_seqlens, "seed": self.seed}
        values = {**self.tensors, **sequences, **self.case.options, **others}
        operator = getattr(torch.ops.lightconv, self.case.operator + suffix).default
        return operator, [values.get(argument.name, True) for argument in operator._schema.arguments]

    def reference(self, suffix="", **others):
        """What the reference answers, in float64 on the CPU, from the same (rounded) numbers."""
        operator, arguments = self.registered(suffix, **others)
        return getattr(reference, operator._opname)(*map(wide, arguments))

    def call(self):
        operator, arguments = self.registered()
        return operator(*arguments)

    def everything(self):
        """ "out" and, by the name of its tensor, every gradient."""
        out = self.call()
        gradients = torch.autograd.grad(out, [*self.given.values()], self.grad)
        return {"out": out.detach(), **dict(zip(self.given, gradients, strict=True))}

    def expected(self):
        """The same by the reference."""
        names = [name for name in self.tensors if name != "bias"]
        want = {"out": self.reference(), **dict(zip(names, self.reference("_backward", grad=self.grad), strict=True))}
        if self.case.bias:
            want["bias"] = wide(self.grad).sum((0, 1))
        return {name: tensor for name, tensor in want.items() if name == "out" or name in self.given}


def wide(value):
    """A tensor on the CPU, in float64 if it is floating."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value.double() if value.is_floating_point() else value


def laid_out(tensor, layout):
    """The same numbers in another memory layout; the last dimension stays contiguous."""
    if layout == "batch-first" and tensor.dim() > 2:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1).detach()
    if layout == "sliced":
        # Rows apart from each other, and beginning at an address that is not a multiple of 16 bytes.
        around = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 7), math.nan)
        around[..., 3:-4] = tensor
        return around[..., 3:-4].detach()
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


def same(one, other):
    """Equal bits in two results of `everything`."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check(case, device):
    """Holds out and every gradient of a case against float64."""
    arguments = Arguments(case, device)
    got, want = arguments.everything(), arguments.expected()
    assert got.keys() == want.keys()
    for name, ours in got.items():
        theirs = want[name]
        assert ours.shape == theirs.shape and ours.dtype == case.dtype and ours.device.type == device.type, name
        if case.talk and not theirs.any():
            assert not ours.any(), name
        elif theirs.norm() <= 1e-12 * math.sqrt(max(theirs.numel(), 1)):
            assert ours.norm() <= 1e-3, name  # nothing but rounding is left of it: a softmax over one tap has no slope
        else:
            exact = ("out", "x") if case.talk else ("out", "x", "bias")
            error, tolerance = relative_error(ours, theirs), TOLERANCE[case.dtype] * (1 if name in exact else 4)
            assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"


def grid():
    """Every paper's kernel and window, and every width of head, for all operators and types, plainly."""
    sizes = (1, 2, 3, 4, 5, 7, 15, 31, 63, 64, 127, 255)
    for operator, dtype, size in itertools.product(CONVOLUTIONS, DTYPES.values(), sizes):
        for per_head in (4, 64):
            yield Case(operator, 70, 2, 2, per_head, size, size - 1, dtype)
            yield Case(operator, 40, 3, 3, per_head, size, (size - 1) // 2, dtype)
    widths = (1, 2, 3, 8, 16, 32, 48, 128, 256)
    for operator, dtype, per_head in itertools.product(CONVOLUTIONS, DTYPES.values(), widths):
        yield Case(operator, 50, 2, 3, per_head, 4, 3, dtype, normalize="none")
        yield Case(operator, 50, 2, 3, per_head, 31, 15, dtype)
    for dtype, most, per_head in itertools.product(DTYPES.values(), (0, 1, 3, 7, 15, 31, 63), (4, 64)):
        yield talk(70, 2, 2, per_head, most, 0, dtype)
        yield talk(40, 3, 3, per_head, most, most, dtype, top=1.5)
    for dtype, per_head in itertools.product(DTYPES.values(), (1, 2, 3, 8, 16, 48, 128, 256)):
        yield talk(50, 2, 3, per_head, 15, 7, dtype)
