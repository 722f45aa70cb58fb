"""Ends texts at `generate`'s stop_strings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria


class StopTexts(StoppingCriteria):
    """True for each row of ids whose last one completes one of these strings in the decoded text.

    transformers' own criterion joins the texts of single tokens. Here a piece such as `do@@` or a full stop decides
    about the space after or before it, so only whole texts can be compared.
    """

    def __init__(self, strings: str | list[str], tokenizer: Any):
        self._strings = [strings] if isinstance(strings, str) else list(strings)
        self._tokenizer = tokenizer

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **kwargs: Any) -> Tensor:
        return torch.tensor([self._ends(ids) for ids in input_ids.tolist()], device=input_ids.device)

    def _ends(self, ids: list[int]) -> bool:
        text, before = (self._tokenizer.decode(some, skip_special_tokens=True) for some in (ids, ids[:-1]))
        # A string that was in the text before, such as in the prompt, ends nothing.
        return any((at := text.rfind(stop)) >= 0 and at + len(stop) > len(before) for stop in self._strings)
