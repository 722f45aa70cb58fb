"""What `generate` does in other ways than transformers' own: its cache, the last step, what ends a text."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)
from transformers.modeling_outputs import ModelOutput

from lightconv_plugin.hf.base import given_cache
from lightconv_plugin.hf.cache import CACHE, NAMES, LightConvCache
from lightconv_plugin.hf.config import LightConvConfig
from lightconv_plugin.modules.transformer import Decoder


class EndKeepsItsScore(ForcedEOSTokenLogitsProcessor):
    """At the maximum length, only `</s>` is possible, with its own score, as in fairseq.

    transformers gives it the best possible score, so that truncated sentences would be preferred.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[-1] != self.max_length - 1:
            return scores
        kept = torch.full_like(scores, -torch.inf)
        end = scores[:, self.eos_token_id]
        kept[:, self.eos_token_id] = end.masked_fill(end.eq(-torch.inf), 0)
        return kept


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


class LightConvGenerationMixin(GenerationMixin):
    """transformers' `generate`, with hooks for both models."""

    config: LightConvConfig
    decoder: Decoder

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: ValueError, also from all that begins with it."""
        raise ValueError(
            "continuous batching is not supported: call generate without paged caches, since a convolution's state "
            "has no pages"
        )

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Start `generate` with an empty cache, unless one is given or caching is disabled."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r} is not supported: leave it out")
        past = given_cache(*(model_kwargs.pop(name, None) for name in NAMES))
        if past is not None:
            if generation_config.use_cache is False:
                raise ValueError("use_cache=False is not possible with a cache: leave out one of them")
            past._is_user_defined = True
        elif generation_config.use_cache is not False:
            past = LightConvCache()
        if past is not None:
            model_kwargs[CACHE] = past

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """A caller's encoder_outputs stay as they are: transformers would repeat them in place for each beam."""
        if kwargs.get("encoder_outputs") is not None:
            kwargs["encoder_outputs"] = copy.copy(kwargs["encoder_outputs"])
        return super()._expand_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> ModelOutput:
        """The first step: of the tokens that a given cache does not have. ValueError if it has all."""
        past = model_kwargs.get(CACHE)
        if past is not None and past.length:
            name, mask_name, tokens = "input_ids", "attention_mask", input_ids
            if self.config.is_encoder_decoder:
                name, mask_name = "decoder_input_ids", "decoder_attention_mask"
                if model_kwargs.get(mask_name) is None:
                    # Without a mask, transformers would not know that the ids include those in the cache.
                    model_kwargs[mask_name] = input_ids.ne(self.decoder.pad).long()
            elif model_kwargs.get("inputs_embeds") is not None:
                name, tokens = "inputs_embeds", model_kwargs["inputs_embeds"]
            count, mask = tokens.shape[1], model_kwargs.get(mask_name)
            # A mask longer than the tokens says that they are only the new ones; one without pads may be gone by now.
            whole = getattr(generation_config, "_mask_length", count) if mask is None else mask.shape[1]
            if whole == count <= past.length:
                raise ValueError(f"{name} must be all tokens, more than the {past.length} in the cache, got {count}")
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        self._check_source_words(generation_config)
        found = super()._get_logits_processor(generation_config, *args, **kwargs)  # type: ignore[misc]
        for i, processor in enumerate(found):
            if type(processor) is ForcedEOSTokenLogitsProcessor:
                end = processor.eos_token_id
                found[i] = EndKeepsItsScore(processor.max_length, end, str(end.device))
        # Before all others, and beside any of its class that the caller gives: the pad is no word.
        found.insert(0, SuppressTokensLogitsProcessor([self.decoder.pad], device=kwargs.get("device", self.device)))
        return found

    def _check_source_words(self, generation_config: Any) -> None:
        """ValueError for options that look up the source's ids among the target's words, if these are others."""
        source, target = self.config.encoder_stack, self.config.decoder_stack
        if source is None or source["vocab_size"] == target["vocab_size"]:
            return
        for name, usual in (("encoder_repetition_penalty", 1), ("encoder_no_repeat_ngram_size", 0)):
            if (given := getattr(generation_config, name, None)) not in (None, usual):
                raise ValueError(
                    f"{name} needs a dictionary for both languages, got {given} for a model with "
                    f"{source['vocab_size']} source and {target['vocab_size']} target words"
                )

    def _get_stopping_criteria(
        self, generation_config: Any, stopping_criteria: Any, tokenizer: Any = None, **kwargs: Any
    ) -> StoppingCriteriaList:
        strings = generation_config.stop_strings
        if strings is not None and tokenizer is not None:
            generation_config = copy.copy(generation_config)
            generation_config.stop_strings = None
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or ()), StopTexts(strings, tokenizer)])
        return super()._get_stopping_criteria(generation_config, stopping_criteria, tokenizer, **kwargs)  # type: ignore[misc]
