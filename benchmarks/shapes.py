"""The shapes to measure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from benchmarks.report import BenchmarkError

_TOKENS = 65_536  # times 1024 channels: 64M elements


@dataclass(frozen=True)
class Case:
    """One call of an operator: T, B, C, H, K and its options. talkconv's windows reach as far as K taps.

    batch_first: x is stored as (B, T, C) and passed as transpose(0, 1), as in code with that layout.
    """

    steps: int
    batch: int
    channels: int
    heads: int
    kernel_size: int
    causal: bool = False
    normalize: str = "softmax"
    dropout: float = 0.0
    glu: bool = False
    batch_first: bool = False

    @property
    def padding_l(self) -> int:
        return self.kernel_size - 1 if self.causal else (self.kernel_size - 1) // 2

    @property
    def reach(self) -> tuple[int, int]:
        """max_left and max_right of talkconv."""
        return self.padding_l, self.kernel_size - 1 - self.padding_l

    @property
    def name(self) -> str:
        text = f"T{self.steps} B{self.batch} C{self.channels} H{self.heads} K{self.kernel_size}"
        text += " causal" * self.causal + f" {self.normalize}" * (self.normalize != "softmax")
        return text + " glu" * self.glu + f" dropout {self.dropout}" * (self.dropout > 0)


def _short(per_head: int) -> Case:
    """Dynamic short convolutions as language models use them: K = 4 on queries, keys and values."""
    return Case(4096, 4, 2048, 2048 // per_head, 4, causal=True, normalize="none", batch_first=True)


SETS: dict[str, tuple[Case, ...]] = {
    # Five shapes of translation models, 4096 tokens each; the first two have the number of heads of the IWSLT models.
    "cpu": tuple(
        Case(*numbers)
        for numbers in (
            (32, 128, 512, 4, 31),
            (128, 32, 512, 4, 31),
            (512, 8, 512, 16, 31),
            (128, 32, 1024, 16, 31),
            (128, 32, 1024, 16, 7),
        )
    ),
    # Sizes of translation models with kernels of every length: short ones show the cost of the memory order.
    "lengths": tuple(
        Case(*numbers, k)
        for numbers in ((32, 128, 512, 4), (128, 32, 512, 4), (512, 8, 512, 16), (128, 32, 1024, 16))
        for k in (3, 7, 15, 31)
    ),
    # 64M elements with the big models' 64 channels per head, for each kernel size of the paper and a larger one.
    "gpu": tuple(Case(256, _TOKENS // 256, 1024, 16, k) for k in (3, 7, 15, 31, 63)),
    "short": tuple(map(_short, (1, 4, 16, 32))),
    # Growth with T at a constant number of tokens.
    "sweep": tuple(Case(t, _TOKENS // t, 1024, 16, 31) for t in (64, 256, 1024, 4096, 8192, 16_384, 65_536)),
    "quick": (Case(16, 2, 32, 4, 7), Case(8, 3, 32, 8, 4, causal=True, normalize="none", batch_first=True)),
}


def parse(text: str) -> tuple[Case, ...]:
    """A set's name, or T,B,C,H,K with `c` after it for a causal one."""
    if text in SETS:
        return SETS[text]
    match = re.fullmatch(r"(\d+),(\d+),(\d+),(\d+),(\d+)(c?)", text)
    if match is None:
        raise BenchmarkError(
            f"--shapes: {text!r} is neither one of {', '.join(SETS)} nor T,B,C,H,K (T,B,C,H,Kc: causal)"
        )
    steps, batch, channels, heads, kernel_size = map(int, match.groups()[:5])
    if min(steps, batch, channels, heads, kernel_size) < 1 or channels % heads:
        raise BenchmarkError(f"--shapes: {text!r}: numbers must be at least 1, and H must divide C")
    return (Case(steps, batch, channels, heads, kernel_size, causal=bool(match.group(6))),)


VARIANTS = {
    "plain": lambda case: case,
    "glu": lambda case: replace(case, glu=True),
    "dropout": lambda case: replace(case, dropout=0.1),
    "causal": lambda case: replace(case, causal=True),
}
