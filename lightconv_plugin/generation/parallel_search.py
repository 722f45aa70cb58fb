"""Beam search with an ensemble on batches of sentences, shared among processes on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightconv_plugin.generation.beam_search import SearchOptions, beam_search
from lightconv_plugin.generation.forks import Forks, can_fork
from lightconv_plugin.generation.linear import check_dtype
from lightconv_plugin.generation.steps import StepModel
from lightconv_plugin.modules.transformer import EncoderDecoder

Hypotheses = list[list[dict[str, Tensor]]]
# Fewest sentences per process: with fewer, all threads together finish sooner.
_FEWEST = 2


class ParallelSearch:
    """Searches with the weights that the models have now.

    Args:
        models: an ensemble of encoder-decoders, in evaluation mode.
        options: of the search.
        dtype: arithmetic of the linear layers, one of linear.DTYPES.
        processes: that share the sentences of a batch on a CPU; None for as many as torch has threads. They are forked
            from this one (on Linux; elsewhere threads share each operation) at the first batch of at least two
            sentences for each of two, and hold the weights of that moment.

    Raises:
        UnsupportedModelError: a model that the search does not cover.
        ValueError: dtype or processes out of range; "int8" for models on a GPU.
    """

    def __init__(
        self,
        models: Sequence[EncoderDecoder],
        options: SearchOptions,
        *,
        dtype: str = "float32",
        processes: int | None = None,
    ):
        if not models:
            raise ValueError("models must be at least one model, got none")
        if processes is not None and processes < 1:
            raise ValueError(f"processes must be at least 1, got {processes}")
        self.options, self.dtype, self.processes = options, check_dtype(dtype), processes
        self._steps = [StepModel(model, dtype) for model in models]
        self._forks: Forks | None = None

    def search(
        self, source: Tensor, lengths: Tensor, max_len: int, *, prefix: Tensor | None = None, begin: int | None = None
    ) -> Hypotheses:
        """The finished hypotheses of each sentence, best first, as `beam_search` returns them.

        Args:
            source: (S,T) words with their end, pads on either side. lengths: (S,) how many words, read for
                match_source_len only.
            max_len, prefix, begin: see `beam_search`.

        Raises:
            ValueError: max_len is below options.min_len. ForkError: a process has ended.
        """
        if self.options.min_len > max_len:
            raise ValueError(f"min_len must be at most max_len = {max_len}, got {self.options.min_len}")
        number = min(self._processes(), len(source) // _FEWEST) if source.device.type == "cpu" else 1
        if number < 2:
            return self._search(source, lengths, max_len, prefix, begin)
        return self._share(number, source, lengths, max_len, prefix, begin)

    def close(self) -> None:
        """Ends the processes, if there are any; the next batch would begin others."""
        if self._forks is not None:
            self._forks.close()
            self._forks = None

    def _search(
        self, source: Tensor, lengths: Tensor, max_len: int, prefix: Tensor | None, begin: int | None
    ) -> Hypotheses:
        states = [steps.start(source, self.options.beam_size) for steps in self._steps]
        return beam_search(self._steps, states, lengths, self.options, max_len, prefix=prefix, begin=begin)

    def _processes(self) -> int:
        """Among how many processes batches are shared."""
        if not can_fork():
            return 1
        return torch.get_num_threads() if self.processes is None else self.processes

    def _share(
        self, number: int, source: Tensor, lengths: Tensor, max_len: int, prefix: Tensor | None, begin: int | None
    ) -> Hypotheses:
        """`_search` in several processes. Sentences are dealt out in turn, as neighbours often have similar lengths."""
        if self._forks is None:
            self._forks = Forks(self._processes(), self._search_part)
        parts = [
            (
                source[first::number].numpy(),
                lengths[first::number].numpy(),
                max_len,
                None if prefix is None else prefix[first::number].numpy(),
                begin,
            )
            for first in range(number)
        ]
        try:
            answers = self._forks.map(parts)
        except BaseException:
            self._forks = None
            raise
        found: Hypotheses = [[] for _ in range(len(source))]
        for first, answer in enumerate(answers):
            found[first::number] = [[_tensors(hypothesis) for hypothesis in hypotheses] for hypotheses in answer]
        return found

    def _search_part(self, part: tuple) -> list[list[dict[str, np.ndarray]]]:
        """Runs in a worker process. Arrays are sent between processes by value; tensors would be shared memory."""
        source, lengths, max_len, prefix, begin = part
        given = None if prefix is None else torch.from_numpy(prefix)
        found = self._search(torch.from_numpy(source), torch.from_numpy(lengths), max_len, given, begin)
        return [[{name: x.numpy() for name, x in hypothesis.items()} for hypothesis in ranked] for ranked in found]


def _tensors(hypothesis: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.asarray(array)) for name, array in hypothesis.items()}
