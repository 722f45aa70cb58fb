"""FastGenerator, which replaces fairseq's SequenceGenerator."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from fairseq import search as strategies
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from lightconv_plugin.errors import UnsupportedModelError
from lightconv_plugin.generation import AUTO, CHOICES
from lightconv_plugin.generation.batch_search import BatchSearch
from lightconv_plugin.generation.beam_search import SearchOptions
from lightconv_plugin.generation.finished import Hypotheses
from lightconv_plugin.generation.shortlist import Shortlist
from lightconv_plugin.models.plain import plain_encoder_decoder

logger = logging.getLogger(__name__)

# What the search supports in a batch's net_input.
_INPUTS = {"src_tokens", "src_lengths", "prev_output_tokens"}
# Whether fairseq takes the lengths of the sources from the batch; fairseq 0.12.2 counts their words, without the ends.
_LENGTHS_ARE_GIVEN = '"src_lengths" in net_input' in inspect.getsource(SequenceGenerator._generate)


class FastGenerator(SequenceGenerator):
    """A faster SequenceGenerator with the same results as fairseq's.

    It falls back to fairseq's, with one line in the log that says why, for everything it does not support: language
    models and others that plain_model does not support, search strategies other than beam search, constraints, language
    model fusion.

    Weights are read at the first batch; call `refresh` if they have changed since. The attention of a hypothesis is not
    stored: it is an empty tensor.

    Args:
        models: an ensemble of encoder-decoders.
        tgt_dict: their target dictionary.
        dtype: arithmetic of the linear layers (StepModel), one of CHOICES. "auto" is the fastest on this machine and
            chosen at the first batch. If it falls back to fairseq's generator, the models keep their type.
        threads, cuda_graphs: see SearchOptions; fairseq's generator does not use them.
        shortlist: see BatchSearch. What fairseq's generator would have to translate is then an error.
        options: SequenceGenerator's options.

    Raises:
        ValueError: an option is out of range; the message names it. At the first batch: "int8" if the native search
            cannot be used, cuda_graphs without a GPU or with a shortlist, or a shortlist with anything that is not
            supported.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        tgt_dict: Any,
        *,
        dtype: str = "float32",
        threads: int | None = None,
        cuda_graphs: bool | None = None,
        shortlist: Shortlist | None = None,
        **options: Any,
    ):
        _check(models, tgt_dict, dtype=dtype, threads=threads, **options)
        super().__init__(models, tgt_dict, **options)
        self.models = list(models)
        suppress = () if self.token_indices_to_suppress is None else self.token_indices_to_suppress.tolist()
        self.options = SearchOptions(
            pad=self.pad,
            unk=self.unk,
            eos=self.eos,
            beam_size=self.beam_size,
            min_len=self.min_len,
            max_len_a=self.max_len_a,
            max_len_b=self.max_len_b,
            max_len=self.max_len,
            normalize_scores=self.normalize_scores,
            len_penalty=self.len_penalty,
            unk_penalty=self.unk_penalty,
            temperature=self.temperature,
            match_source_len=self.match_source_len,
            no_repeat_ngram_size=options.get("no_repeat_ngram_size", 0),
            suppress=tuple(suppress),
            dtype=dtype,
            threads=threads,
            cuda_graphs=cuda_graphs,
        )
        self._shortlist = shortlist
        self._search: BatchSearch | None = None
        self._unsupported: str | None = None  # what of the models is
        self._said: set[str] = set()

    def refresh(self) -> None:
        """Make the next batch reread the weights."""
        self._search = self._unsupported = None

    def check(self) -> None:
        """Raise the ValueErrors of the first batch now."""
        reason = self._why_not({"src_tokens": None}, None)
        if reason is not None and self._shortlist is not None:
            raise ValueError(f"--generation-shortlist does not support {reason}")
        self.refresh()

    def _generate(
        self,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
        bos_token: int | None = None,
    ) -> Hypotheses:
        """Called by `generate` and `forward` of the base class, with the same arguments and results.

        sample: fairseq's batch; net_input holds src_tokens (S,T), with pads on either side, and src_lengths.
        """
        net_input = sample["net_input"]
        reason = self._why_not(net_input, constraints)
        if reason is not None:
            if self._shortlist is not None:
                raise ValueError(f"--generation-shortlist does not support {reason}")
            self._say(falling_back(reason, self.options.dtype))
            return super()._generate(sample, prefix_tokens, constraints, bos_token)
        source = net_input["src_tokens"]
        lengths = net_input.get("src_lengths") if _LENGTHS_ARE_GIVEN else None
        assert self._search is not None
        return self._search.search(source, lengths, prefix=prefix_tokens, begin=bos_token)

    def _why_not(self, net_input: dict[str, Any], constraints: Tensor | None) -> str | None:
        """Why fairseq has to translate this batch; None if it does not, and then `_search` is set."""
        if type(self.search) is not strategies.BeamSearch:
            return f"search by {type(self.search).__name__}"
        if self.lm_model is not None:
            return "fusion with a language model"
        if constraints is not None:
            return "constraints"
        if "src_tokens" not in net_input:
            return "a source that is not text"
        if others := net_input.keys() - _INPUTS:
            return f"a batch with {', '.join(sorted(others))}"
        if self._search is None and self._unsupported is None:
            try:
                models = [plain_encoder_decoder(model) for model in self.models]
                search = BatchSearch(models, self.options, shortlist=self._shortlist)
            except UnsupportedModelError as error:
                # For later batches too: fairseq-generate adds words to the dictionary, which then no model fits.
                self._unsupported = str(error)
                return self._unsupported
            if self.options.dtype == AUTO:
                logger.info("generation in %s: %s", search.options.dtype, search.dtype_reason)
            elif search.dtype_warning is not None:
                logger.warning(search.dtype_warning)
            self._search, self.options = search, search.options
            self._say("the plugin's own search translates")
        return self._unsupported

    def _say(self, message: str) -> None:
        """Log each message once. scoring/generate_log.py reads them: they say which search made the output."""
        if message not in self._said:
            self._said.add(message)
            logger.info("%s", message)


def falling_back(reason: str, dtype: str) -> str:
    """The line of the log for what fairseq's generator has to translate, in the models' own type."""
    asked = "" if dtype in ("float32", AUTO) else f", not in {dtype}"
    return f"falling back to fairseq's generator{asked}: {reason} is not supported"


def _check(
    models: Sequence[nn.Module],
    tgt_dict: Any,
    *,
    dtype: str,
    threads: int | None,
    beam_size: int = 1,
    temperature: float = 1.0,
    no_repeat_ngram_size: int = 0,
    tokens_to_suppress: Iterable[str] = (),
    **others: Any,
) -> None:
    """Raise ValueError for values that fairseq rejects without naming the option, or accepts silently."""
    if not models:
        raise ValueError("models must be at least one model, got none")
    if dtype not in CHOICES:
        raise ValueError(f"dtype must be one of {', '.join(CHOICES)}, got {dtype!r}")
    if beam_size < 1:
        raise ValueError(f"beam_size must be at least 1, got {beam_size}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if no_repeat_ngram_size < 0:
        raise ValueError(f"no_repeat_ngram_size must be at least 0, got {no_repeat_ngram_size}")
    for token in tokens_to_suppress:
        if tgt_dict.index(token) == tgt_dict.unk():
            raise ValueError(f"tokens_to_suppress must be words of the target dictionary, got {token!r}")
