"""FastGenerator: what stands where fairseq's SequenceGenerator stood."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from fairseq import search as strategies
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from lightconv_plugin.generation.forks import Forks, can_fork
from lightconv_plugin.generation.linear import check_dtype
from lightconv_plugin.generation.search import SearchOptions, beam_search
from lightconv_plugin.generation.steps import StepModel
from lightconv_plugin.generation.sublayers import UnsupportedModelError

logger = logging.getLogger(__name__)

Hypotheses = list[list[dict[str, Tensor]]]
# Sentences of a process at the least: fewer are done sooner by all threads together.
_FEWEST = 2


class FastGenerator:
    """Translates batches as fairseq's SequenceGenerator does, with the same results, in less time.

    Whatever it does not cover goes to a SequenceGenerator of the same options, and one line in the log says why: models
    without a StepModel, other search strategies than beam search, constraints, language model fusion.

    Weights are read at the first batch; call `refresh` when they have changed since. The attention of a hypothesis is
    not kept: it is an empty tensor.

    Args:
        models: an ensemble of encoder-decoders.
        tgt_dict: their target dictionary.
        beam_size, max_len_a, max_len_b, max_len, min_len, normalize_scores, len_penalty, unk_penalty, temperature,
        match_source_len, no_repeat_ngram_size, search_strategy, eos, symbols_to_strip_from_output, lm_model, lm_weight,
        tokens_to_suppress: SequenceGenerator's, with its meaning, but beam_size is 5 unless given.
        dtype: arithmetic of the linear layers, one of linear.DTYPES. Where fairseq's generator steps in, the
            models run in their own.
        processes: that share the sentences of a batch on a CPU; None for as many as torch has threads. They are forked
            from this one (on Linux; elsewhere threads share each operation) at the first batch of at least two
            sentences for each of two, and hold the weights of that moment.

    Raises:
        ValueError: an option out of range, naming it; or "int8" for models on a GPU (at the first batch).
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        tgt_dict: Any,
        *,
        beam_size: int = 5,
        max_len_a: float = 0,
        max_len_b: int = 200,
        max_len: int = 0,
        min_len: int = 1,
        normalize_scores: bool = True,
        len_penalty: float = 1.0,
        unk_penalty: float = 0.0,
        temperature: float = 1.0,
        match_source_len: bool = False,
        no_repeat_ngram_size: int = 0,
        search_strategy: strategies.Search | None = None,
        eos: int | None = None,
        symbols_to_strip_from_output: set[int] | None = None,
        lm_model: nn.Module | None = None,
        lm_weight: float = 1.0,
        tokens_to_suppress: Iterable[str] = (),
        dtype: str = "float32",
        processes: int | None = None,
    ):
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
        self.dtype, self.processes = check_dtype(dtype), processes
        self.models = list(models)
        self.pad, self.unk = tgt_dict.pad(), tgt_dict.unk()
        self.eos = tgt_dict.eos() if eos is None else eos
        self.symbols_to_strip_from_output = {*(symbols_to_strip_from_output or ()), self.eos}
        tokens_to_suppress = tuple(tokens_to_suppress)
        suppress = tuple(tgt_dict.index(token) for token in tokens_to_suppress)
        if self.unk in suppress:
            unknown = tokens_to_suppress[suppress.index(self.unk)]
            raise ValueError(f"tokens_to_suppress must be words of the target dictionary, got {unknown!r}")
        # The pad is never chosen, so there cannot be more hypotheses.
        self.beam_size = min(beam_size, len(tgt_dict) - 1)
        self.max_len_a, self.max_len_b = max_len_a, max_len_b
        limits = [model.max_decoder_positions() for model in models if hasattr(model, "max_decoder_positions")]
        self.max_len = max_len or min([*limits, sys.maxsize])
        self.options = SearchOptions(
            pad=self.pad,
            unk=self.unk,
            eos=self.eos,
            beam_size=self.beam_size,
            min_len=min_len,
            normalize_scores=normalize_scores,
            len_penalty=len_penalty,
            unk_penalty=unk_penalty,
            temperature=temperature,
            match_source_len=match_source_len,
            no_repeat_ngram_size=no_repeat_ngram_size,
            suppress=suppress,
        )
        self._fairseq = {
            "tgt_dict": tgt_dict,
            "beam_size": beam_size,
            "max_len_a": max_len_a,
            "max_len_b": max_len_b,
            "max_len": max_len,
            "min_len": min_len,
            "normalize_scores": normalize_scores,
            "len_penalty": len_penalty,
            "unk_penalty": unk_penalty,
            "temperature": temperature,
            "match_source_len": match_source_len,
            "no_repeat_ngram_size": no_repeat_ngram_size,
            "search_strategy": search_strategy,
            "eos": eos,
            "symbols_to_strip_from_output": symbols_to_strip_from_output,
            "lm_model": lm_model,
            "lm_weight": lm_weight,
            "tokens_to_suppress": tokens_to_suppress,
        }
        self._steps: list[StepModel] | None = None
        self._forks: Forks | None = None
        self._fallback: SequenceGenerator | None = None
        self._reasons: set[str] = set()
        for model in self.models:
            model.eval()

    def refresh(self) -> None:
        """The next batch reads the weights anew."""
        self._steps = None
        self.close()

    def close(self) -> None:
        """Ends the processes, if there are any; the next batch would begin others."""
        if self._forks is not None:
            self._forks.close()
            self._forks = None

    @torch.no_grad()
    def generate(self, models: Sequence[nn.Module] | None, sample: dict[str, Any], **kwargs: Any) -> Hypotheses:
        """Translates a batch.

        Args:
            models: not read, as in fairseq: the models are those of the constructor.
            sample: fairseq's batch; net_input holds src_tokens (S,T), with pads on either side, and src_lengths.
            prefix_tokens, constraints, bos_token: SequenceGenerator.generate's.

        Returns:
            For each sentence a list of hypotheses, the best first, each a dict of tokens (n,) int64 with the end of the
            sentence, score, positional_scores (n,) float32, and attention and alignment, which are empty.
        """
        return self._generate(sample, **kwargs)

    def _generate(
        self,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
        bos_token: int | None = None,
    ) -> Hypotheses:
        net_input = sample["net_input"]
        reason = self._why_not(net_input, constraints)
        if reason is not None:
            return self._by_fairseq(reason, sample, prefix_tokens, constraints, bos_token)
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
        strategy = self._fairseq["search_strategy"]
        if strategy is not None and type(strategy) is not strategies.BeamSearch:
            return f"search by {type(strategy).__name__}"
        if self._fairseq["lm_model"] is not None:
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

    def _by_fairseq(self, reason: str, sample: dict[str, Any], prefix_tokens, constraints, bos_token) -> Hypotheses:
        if reason not in self._reasons:
            self._reasons.add(reason)
            asked = "" if self.dtype == "float32" else f", not in {self.dtype}"
            logger.info("fairseq's own generator translates%s: %s is not covered by the fast one", asked, reason)
        if self._fallback is None:
            self._fallback = SequenceGenerator(self.models, **self._fairseq)
        return self._fallback.generate(
            self.models, sample, prefix_tokens=prefix_tokens, constraints=constraints, bos_token=bos_token
        )


def _tensors(hypothesis: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.asarray(array)) for name, array in hypothesis.items()}
