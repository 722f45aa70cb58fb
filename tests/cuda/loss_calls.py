"""The calls of the loss of label smoothing in the tests, and their answers, written out in float64."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from tests.ops import oracle

from .operators import Operators

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
IGNORED = 1


@dataclasses.dataclass(frozen=True)
class LossCase:
    """One call. pitch: elements from one row of the logits and their gradient to the next. summed: the gradient of the
    loss is one number for all rows, and nll has none."""

    words: int
    pitch: int
    dtype: torch.dtype = torch.float32
    epsilon: float = 0.1
    rows: int = 6
    summed: bool = False
    compute_capability: int = 80

    RESULTS: ClassVar = {"forward": ("loss", "nll", "normaliser"), "backward": ("gradient",)}

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.words)
        wide = torch.randn(self.rows, self.pitch, generator=generator, dtype=torch.float64)
        target = torch.randint(self.words, (self.rows,), generator=generator)
        target[::3] = IGNORED
        logits = wide.to(self.dtype)[:, : self.words]
        normaliser = logits.double().logsumexp(-1).masked_fill(target == IGNORED, 0).float()
        made = {"logits": logits, "target": target, "normaliser": normaliser}
        if self.summed:
            return made | {"grad_loss": torch.full((1,), 2.5).expand(self.rows)}
        grads = torch.rand(2, self.rows, generator=generator)
        return made | {"grad_loss": grads[0], "grad_nll": grads[1]}

    def forward(self, on_host: Operators, made: dict[str, Tensor]) -> tuple[Tensor, ...]:
        found = {name: torch.full((self.rows,), torch.nan) for name in self.RESULTS["forward"]}
        self._call(on_host, 0, {name: made[name] for name in ("logits", "target")}, found)
        return tuple(found.values())

    def backward(self, on_host: Operators, made: dict[str, Tensor]) -> Tensor:
        gradient = torch.full((self.rows, self.pitch), torch.nan, dtype=self.dtype)[:, : self.words]
        self._call(on_host, 1, made, {"gradient": gradient})
        return gradient

    def _call(self, on_host: Operators, backward: int, inputs: dict, outputs: dict) -> None:
        numbers = {"type": TYPES[self.dtype], "rows": self.rows, "words": self.words, "ignore": IGNORED}
        numbers |= {"backward": backward, **on_host.device}
        on_host.runner.call(numbers, {"epsilon": self.epsilon}, inputs, outputs)

    def expected(self, what: str, made: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        logits, target = made["logits"].double().requires_grad_(), made["target"]
        loss, nll = oracle.label_smoothed(logits, target, self.epsilon, IGNORED)
        if what == "forward":
            return tuple(x.detach() for x in (loss, nll, logits.logsumexp(-1) * (target != IGNORED)))
        total = (loss * made["grad_loss"]).sum() + (nll * made.get("grad_nll", 0)).sum()
        return torch.autograd.grad(total, logits)[0]
