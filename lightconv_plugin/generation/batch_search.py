"""Beam search with an ensemble on batches of sentences: natively if possible, otherwise step by step in torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.generation.beam_search import Hypotheses, SearchOptions, beam_search
from lightconv_plugin.generation.graphs import CapturedSearch, CudaGraphs
from lightconv_plugin.generation.linear import check_dtype
from lightconv_plugin.generation.native import NativeSearch, why_not
from lightconv_plugin.generation.steps import StepModel
from lightconv_plugin.generation.threads import torch_threads
from lightconv_plugin.modules.transformer import EncoderDecoder

_logger = logging.getLogger("lightconv_plugin")


class _Search(Protocol):
    def search(
        self, source: Tensor, lengths: Tensor, max_len: int, *, prefix: Tensor | None, begin: int | None
    ) -> Hypotheses: ...


class BatchSearch:
    """Searches with the models' current weights.

    Args:
        models: an ensemble of encoder-decoders, in evaluation mode.
        options: options of the search.
        dtype: arithmetic of the linear layers, one of DTYPES.
        threads: number of threads that share the work on a CPU; None for as many as torch has.
        cuda_graphs: capture the steps of the search in CUDA graphs.

    Raises:
        UnsupportedModelError: the search does not support a model, or dtype is "int8" and the native search does not.
        ValueError: dtype or threads out of range; "int8" if the native search cannot be used; cuda_graphs if the models
            are not on a GPU.
    """

    def __init__(
        self,
        models: Sequence[EncoderDecoder],
        options: SearchOptions,
        *,
        dtype: str = "float32",
        threads: int | None = None,
        cuda_graphs: bool = False,
    ):
        if not models:
            raise ValueError("models must be at least one model, got none")
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        self.options, self.dtype, self._threads = options, check_dtype(dtype), None
        device = next(models[0].parameters()).device
        if cuda_graphs and device.type != "cuda":
            raise ValueError(f"--cuda-graphs (--generation-cuda-graphs) needs a GPU, got a model on {device}")
        reason = why_not(models)
        if reason is None:
            try:
                self._search: _Search = NativeSearch(models, options, dtype=dtype, threads=threads)
                return
            except UnsupportedModelError as error:  # such as a custom mixer
                if dtype == "int8":
                    raise
                reason = str(error)
        if dtype == "int8":
            raise ValueError(
                f'dtype "int8" needs float32 models and the CPU kernels ({reason}): use "float32" or "bfloat16"'
            )
        _logger.debug("the search runs in torch: %s", reason)
        self._threads = threads
        if cuda_graphs:
            self._search = CapturedSearch(models, options, dtype=dtype, recorder=CudaGraphs(device))
        else:
            self._search = TorchSearch(models, options, dtype=dtype)

    @torch.no_grad()
    def search(
        self, source: Tensor, lengths: Tensor, max_len: int, *, prefix: Tensor | None = None, begin: int | None = None
    ) -> Hypotheses:
        """The finished hypotheses of each sentence, best first, as `beam_search` returns them.

        Args:
            source: (S,T) words and the end symbol, pads on either side. lengths: (S,) numbers of words, used only for
                match_source_len.
            max_len, prefix, begin: see `beam_search`.

        Raises:
            ValueError: max_len is below options.min_len; words out of range.
        """
        if self.options.min_len > max_len:
            raise ValueError(f"min_len must be at most max_len = {max_len}, got {self.options.min_len}")
        if not len(source):
            return []
        with torch_threads(self._threads):
            return self._search.search(source, lengths, max_len, prefix=prefix, begin=begin)


class TorchSearch:
    """`beam_search` on batches: for GPUs, models in other types, and CPUs without the kernels. It is the definition of
    the native search. dtype: one that PackedLinear supports."""

    def __init__(self, models: Sequence[EncoderDecoder], options: SearchOptions, *, dtype: str = "float32"):
        self._options = options
        self._steps = [StepModel(model, dtype) for model in models]

    def search(
        self, source: Tensor, lengths: Tensor, max_len: int, *, prefix: Tensor | None = None, begin: int | None = None
    ) -> Hypotheses:
        """See BatchSearch.search."""
        states = [steps.start(source, self._options.beam_size) for steps in self._steps]
        return beam_search(self._steps, states, lengths, self._options, max_len, prefix=prefix, begin=begin)
