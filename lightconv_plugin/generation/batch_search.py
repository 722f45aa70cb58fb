"""Beam search with an ensemble on batches of sentences: natively if possible, otherwise step by step in torch."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightconv_plugin.cgroups import cpu_limit
from lightconv_plugin.errors import TranslationError, UnsupportedModelError
from lightconv_plugin.generation import AUTO
from lightconv_plugin.generation.beam_search import Search, SearchOptions
from lightconv_plugin.generation.dtypes import fastest_type, products, slow_type
from lightconv_plugin.generation.finished import Hypotheses
from lightconv_plugin.generation.graphs import CapturedSearch
from lightconv_plugin.generation.native import Description, NativeSearch, describe
from lightconv_plugin.generation.shortlist import Shortlist
from lightconv_plugin.generation.steps import StepModel
from lightconv_plugin.modules.recorder import CudaGraphs
from lightconv_plugin.modules.transformer import EncoderDecoder

_logger = logging.getLogger("lightconv_plugin")
_changing = threading.Lock()
_before: list[int] = []  # torch's number of threads, once for each block of `torch_threads`


class BatchSearch:
    """Searches with the models' current weights.

    Args:
        models: an ensemble of encoder-decoders on one device, in evaluation mode.
        options: options of the search.
        exported: the type in which the weights were exported, one of DTYPES. dtype "auto" is this type if it is not
            float32 and the native search runs the models.
        shortlist: the words that may be chosen for a batch, None for all. No steps are then captured in CUDA graphs,
            because the number of words differs between batches.

    Attributes:
        options: those given, with the chosen dtype instead of "auto".
        dtype_reason: why it was chosen; for float32 on a GPU also whether its products use TF32.
        dtype_warning: one line if this CPU has no instructions for the requested dtype, otherwise None.

    Raises:
        UnsupportedModelError: the search does not support a model, or dtype is "int8" and the native search does not.
        ValueError: dtype "int8" if the native search cannot be used; cuda_graphs if the models are not on a GPU, or
            with a shortlist.
    """

    def __init__(
        self,
        models: Sequence[EncoderDecoder],
        options: SearchOptions,
        *,
        exported: str = "float32",
        shortlist: Shortlist | None = None,
    ):
        device = next(models[0].parameters()).device
        if shortlist is not None and options.cuda_graphs:
            raise ValueError("`shortlist` and `cuda_graphs` exclude each other")
        if options.cuda_graphs and device.type != "cuda":
            raise ValueError(f"`cuda_graphs` needs a GPU, got a model on {device}")
        if shortlist is not None:
            options = replace(options, cuda_graphs=False)
        described = describe(models)
        self.dtype_reason, self.dtype_warning = "as requested", None
        if options.dtype != AUTO:
            self.dtype_warning = slow_type(options.dtype, device)
        elif exported != "float32" and isinstance(described, list):
            options, self.dtype_reason = replace(options, dtype=exported), "as the model was exported"
        else:
            without = described if isinstance(described, ValueError) else None
            dtype, self.dtype_reason = fastest_type(models, device, without)
            options = replace(options, dtype=dtype)
        if device.type == "cuda" and options.dtype == "float32":
            self.dtype_reason += f", {products()}"
        self.options = options
        self._longest = options.max_len or min(model.config.decoder.max_positions for model in models)
        self._vocabulary = models[0].config.decoder.vocab_size
        self._search, self._shortlist = _choose(models, described, options, device), shortlist

    @torch.no_grad()
    def search(
        self,
        source: Tensor,
        lengths: Tensor | None = None,
        *,
        prefix: Tensor | None = None,
        begin: int | None = None,
    ) -> Hypotheses:
        """The finished hypotheses of each sentence, best first, as `Search.find` returns them.

        Args:
            source: (S,T) words and the end symbol, pads on either side. lengths: (S,), used only for match_source_len;
                by default the numbers of words.
            prefix, begin: see `Search`.

        Raises:
            ValueError: options.min_len is above the maximum length in this batch; options.beam_size is not below the
                number of words that may be chosen; words out of range.
            NoHypothesisError: a sentence without a single possible hypothesis.
        """
        options = self.options
        if not len(source):
            return []
        if lengths is None:
            lengths = (source.ne(options.eos) & source.ne(options.pad)).sum(dim=1)
        max_len = int(min(options.max_len_a * source.shape[1] + options.max_len_b, self._longest - 1))
        if options.match_source_len:
            max_len = int(lengths.max())
        if options.min_len > max_len:
            raise ValueError(f"`min_len` must be at most the maximum length, here {max_len}, got {options.min_len}")
        if self._shortlist is None:
            self._check_beam(self._vocabulary, "vocabulary")
            return self._search.search(source, lengths, max_len, prefix=prefix, begin=begin)
        assert not isinstance(self._search, CapturedSearch)
        words = self._shortlist.words(source, prefix).to(source.device)
        self._check_beam(len(words), "shortlist")
        return self._search.search(source, lengths, max_len, prefix=prefix, begin=begin, words=words)

    def _check_beam(self, words: int, what: str) -> None:
        # The first step continues one row with all words but the pad: these must fill the beam.
        if (beam := self.options.beam_size) >= words:
            raise ValueError(f"beam_size must be below the {words} words of the {what}, got {beam}")


def _choose(
    models: Sequence[EncoderDecoder],
    described: list[Description] | ValueError,
    options: SearchOptions,
    device: torch.device,
) -> NativeSearch | CapturedSearch | TorchSearch:
    if isinstance(described, list):
        return NativeSearch(described, options)
    if options.dtype == "int8":
        if isinstance(described, UnsupportedModelError):
            raise described
        raise ValueError(
            f'dtype "int8" needs float32 models and the CPU kernels ({described}): use "float32" or "bfloat16"'
        )
    _logger.debug("the search runs in torch: %s", described)
    if device.type == "cuda" and options.cuda_graphs is not False:
        first = 1 if options.cuda_graphs else 2
        return CapturedSearch(models, options, recorder=CudaGraphs(device), from_batch=first)
    return TorchSearch(models, options)


class TorchSearch:
    """`Search` on batches: for GPUs, models in other types, and CPUs without the kernels. It is the definition of
    the native search. options.dtype: one that PackedLinear supports."""

    def __init__(self, models: Sequence[EncoderDecoder], options: SearchOptions):
        self._options, self._quota = options, cpu_limit()
        self._steps = [StepModel(model, options.dtype) for model in models]

    def search(
        self,
        source: Tensor,
        lengths: Tensor,
        max_len: int,
        *,
        prefix: Tensor | None = None,
        begin: int | None = None,
        words: Tensor | None = None,
    ) -> Hypotheses:
        """See `Search`."""
        options = self._options
        with torch_threads(options.threads, self._quota):
            states = [steps.start(source, options.beam_size, words=words) for steps in self._steps]
            search = Search(self._steps, states, lengths, options, max_len, prefix=prefix, begin=begin, words=words)
            return search.find()


@contextlib.contextmanager
def torch_threads(number: int | None, quota: int | None) -> Iterator[None]:
    """Let torch use `number` threads within the block; None: as many as it has, up to `quota`.

    The number belongs to the process: after blocks that overlap in several threads of Python, it is that before the
    first of them.
    """
    if number is None and quota is not None and quota < torch.get_num_threads():
        number = quota
    if number is None:
        yield
        return
    with _changing:
        _before.append(_before[0] if _before else torch.get_num_threads())
        torch.set_num_threads(number)
    try:
        yield
    finally:
        with _changing:
            torch.set_num_threads(_before.pop())


@contextlib.contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Running out of memory within the block raises TranslationError "out of memory {what}"."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has no type for this error on the CPU, nor for that of CUDA itself.
        messages = "DefaultCPUAllocator", "CUDA error: out of memory"
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and not any(message in str(error) for message in messages):
            raise
        raise TranslationError(f"out of memory {what}") from error
