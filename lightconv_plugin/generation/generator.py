"""FastGenerator: what stands where fairseq's SequenceGenerator stood."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from fairseq import search as strategies
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from lightconv_plugin.generation.beam_search import SearchOptions, beam_search
from lightconv_plugin.generation.forks import Forks, can_fork
from lightconv_plugin.generation.linear import check_dtype
from lightconv_plugin.generation.steps import StepModel
from lightconv_plugin.generation.sublayers import UnsupportedModelError

logger = logging.getLogger(__name__)

Hypotheses = list[list[dict[str, Tensor]]]
# Sentences of a process at the least: fewer are done sooner by all threads together.
_FEWEST = 2


class FastGenerator(SequenceGenerator):
    """fairseq's SequenceGenerator with the same results, in less time.

    Whatever it does not cover is left to the class above, and one line in the log says why: models without a StepModel,
    other search strategies than beam search, constraints, language model fusion.

    Weights are read at the first batch; call `refresh` when they have changed since. The attention of a hypothesis is
    not kept: it is an empty tensor.

    Args:
        models: an ensemble of encoder-decoders.
        tgt_dict: their target dictionary.
        dtype: arithmetic of the linear layers, one of linear.DTYPES. Where fairseq's generator steps in, the
            models run in their own.
        processes: that share the sentences of a batch on a CPU; None for as many as torch has threads. They are forked
            from this one (on Linux; elsewhere threads share each operation) at the first batch of at least two
            sentences for each of two, and hold the weights of that moment.
        options: SequenceGenerator's.

    Raises:
        ValueError: an option out of range, naming it; or "int8" for models on a GPU (at the first batch).
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        tgt_dict: Any,
        *,
        dtype: str = "float32",
        processes: int | None = None,
        **options: Any,
    ):
        _check(models, tgt_dict, processes=processes, **options)
        super().__init__(models, tgt_dict, **options)
        self.dtype, self.processes = check_dtype(dtype), processes
        self.models = list(models)
        suppress = () if self.token_indices_to_suppress is None else self.token_indices_to_suppress.tolist()
        self.options = SearchOptions(
            pad=self.pad,
            unk=self.unk,
            eos=self.eos,
            beam_size=self.beam_size,
            min_len=self.min_len,
            normalize_scores=self.normalize_scores,
            len_penalty=self.len_penalty,
            unk_penalty=self.unk_penalty,
            temperature=self.temperature,
            match_source_len=self.match_source_len,
            no_repeat_ngram_size=options.get("no_repeat_ngram_size", 0),
            suppress=tuple(suppress),
        )
        self._steps: list[StepModel] | None = None
        self._forks: Forks | None = None
        self._reasons: set[str] = set()

    def refresh(self) -> None:
        """The next batch reads the weights anew."""
        self._steps = None
        self.close()

    def close(self) -> None:
        """Ends the processes, if there are any; the next batch would begin others."""
        if self._forks is not None:
            self._forks.close()
            self._forks = None

    def _generate(
        self,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
        bos_token: int | None = None,
    ) -> Hypotheses:
        """What `generate` and `forward` of the class above call, which take its arguments and give its results.

        sample: fairseq's batch; net_input holds src_tokens (S,T), with pads on either side, and src_lengths.
        """
        net_input = sample["net_input"]
        reason = self._why_not(net_input, constraints)
        if reason is not None:
            self._say(reason)
            return super()._generate(sample, prefix_tokens, constraints, bos_token)
        source = net_input["src_tokens"]
        lengths = net_input.get("src_lengths")
        if lengths is None:
            lengths = (source.ne(self.eos) & source.ne(self.pad)).long().sum(dim=1)
        if self.options.match_source_len:
            max_len = int(lengths.max())
        else:
            max_len = min(int(self.max_len_a * source.shape[1] + self.max_len_b), self.max_len - 1)
        if self.options.min_len > max_len:
            raise ValueError(f"min_len must be at most max_len = {max_len}, got {self.options.min_len}")
        inputs = {name: tensor for name, tensor in net_input.items() if name != "prev_output_tokens"}
        inputs["src_lengths"] = lengths
        number = min(self._processes(), len(source) // _FEWEST) if source.device.type == "cpu" else 1
        if number < 2:
            return self._search(inputs, max_len, prefix_tokens, bos_token)
        return self._share(number, inputs, max_len, prefix_tokens, bos_token)

    def _search(self, inputs: dict[str, Tensor], max_len: int, prefix: Tensor | None, begin: int | None) -> Hypotheses:
        states = [steps.start(**inputs, beam=self.beam_size) for steps in self._steps]
        lengths = inputs["src_lengths"]
        return beam_search(self._steps, states, lengths, self.options, max_len, prefix=prefix, begin=begin)

    def _processes(self) -> int:
        """Among how many processes batches are shared."""
        if not can_fork():
            return 1
        return torch.get_num_threads() if self.processes is None else self.processes

    def _share(self, number: int, inputs: dict[str, Tensor], max_len: int, prefix: Tensor | None, begin: int | None):
        """`_search` by several processes, every so-manieth sentence each: neighbours are often of like lengths."""
        if self._forks is None:
            self._forks = Forks(self._processes(), self._search_part)
        parts = [
            (
                {name: tensor[first::number].numpy() for name, tensor in inputs.items()},
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
        found: Hypotheses = [[] for _ in range(len(inputs["src_lengths"]))]
        for first, answer in enumerate(answers):
            found[first::number] = [[_tensors(hypothesis) for hypothesis in hypotheses] for hypotheses in answer]
        return found

    def _search_part(self, part: tuple) -> list[list[dict[str, np.ndarray]]]:
        """In a process of its own: arrays travel between processes, tensors would be shared."""
        inputs, max_len, prefix, begin = part
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        found = self._search(tensors, max_len, None if prefix is None else torch.from_numpy(prefix), begin)
        return [[{name: x.numpy() for name, x in hypothesis.items()} for hypothesis in ranked] for ranked in found]

    def _why_not(self, net_input: dict[str, Any], constraints: Tensor | None) -> str | None:
        """Why this batch is fairseq's to translate; None if it is not, and then the StepModels are there."""
        if type(self.search) is not strategies.BeamSearch:
            return f"search by {type(self.search).__name__}"
        if self.lm_model is not None:
            return "fusion with a language model"
        if constraints is not None:
            return "constraints"
        if "src_tokens" not in net_input:
            return "a source that is not text"
        if self._steps is None:
            try:
                self._steps = [StepModel(model, self.dtype) for model in self.models]
            except UnsupportedModelError as error:
                return str(error)
        return None

    def _say(self, reason: str) -> None:
        """Once for each reason."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            asked = "" if self.dtype == "float32" else f", not in {self.dtype}"
            logger.info("falling back to fairseq's generator%s: %s is not supported", asked, reason)


def _check(
    models: Sequence[nn.Module],
    tgt_dict: Any,
    *,
    processes: int | None,
    beam_size: int = 1,
    temperature: float = 1.0,
    no_repeat_ngram_size: int = 0,
    tokens_to_suppress: Iterable[str] = (),
    **others: Any,
) -> None:
    """ValueError for what fairseq asserts without a name, or takes without a word."""
    if not models:
        raise ValueError("models must be at least one model, got none")
    if beam_size < 1:
        raise ValueError(f"beam_size must be at least 1, got {beam_size}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    if no_repeat_ngram_size < 0:
        raise ValueError(f"no_repeat_ngram_size must be at least 0, got {no_repeat_ngram_size}")
    for token in tokens_to_suppress:
        if tgt_dict.index(token) == tgt_dict.unk():
            raise ValueError(f"tokens_to_suppress must be words of the target dictionary, got {token!r}")


def _tensors(hypothesis: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.asarray(array)) for name, array in hypothesis.items()}
