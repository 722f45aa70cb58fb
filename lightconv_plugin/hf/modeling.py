"""The models as transformers models: the stacks of modules/, under the same names, with transformers' signatures."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, ModelOutput, Seq2SeqLMOutput

from lightconv_plugin.hf.base import (
    SHARED,
    LightConvEncoder,
    LightConvEncoderOutput,
    LightConvPreTrainedModel,
    as_encoded,
    batch_first,
    given_cache,
    refuse_attentions,
)
from lightconv_plugin.hf.cache import CACHE, LightConvCache
from lightconv_plugin.hf.config import LightConvConfig
from lightconv_plugin.hf.generation import LightConvGenerationMixin
from lightconv_plugin.modules.transformer import Decoder


class LightConvForConditionalGeneration(LightConvPreTrainedModel, LightConvGenerationMixin):
    """The encoder-decoder: translation and summarisation.

    Raises:
        ValueError: `config` describes a language model.
    """

    def __init__(self, config: LightConvConfig):
        super().__init__(config)
        known = config.model_config()
        if known.encoder is None:
            raise ValueError("config has no encoder: use LightConvForCausalLM")
        self._tied_weights_keys = dict(SHARED) if known.share_embeddings else None
        self.encoder = LightConvEncoder(known.encoder, known.pad)
        self.decoder = Decoder(known.decoder, known.pad, self.encoder.embed_tokens if known.share_embeddings else None)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value
        if self.config.share_embeddings:
            self.decoder.embed_tokens = value

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The decoder's input for predicting labels (B,T): the start symbol, then the words shifted by one.

        Pads and −100 may be on either side.
        """
        pad = self.decoder.pad
        words = labels.ne(-100) & labels.ne(pad)
        shifted = labels.masked_fill(~words, pad).roll(1, dims=1)
        shifted[:, 0] = pad
        return shifted.masked_fill(words & words.cumsum(dim=1).eq(1), self.config.decoder_start_token_id)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: LightConvCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        tokenizer: object = None,
        assistant_tokenizer: object = None,
        cache: LightConvCache | None = None,
    ) -> ModelOutput | tuple:
        """
        Args:
            input_ids: (B,S) words of the source, including `</s>`; pads on either side.
            attention_mask, decoder_attention_mask: (B,S), (B,T with those in the cache), 0 at pads; default: pads are
                recognised by their id.
            decoder_input_ids: (B,T) the start symbol, then words; by default derived from the labels.
            encoder_outputs: the encoder's output, instead of input_ids.
            past_key_values, cache: a cache to continue from; it is changed in place. The second name is that of
                transformers since 5.24.
            inputs_embeds, decoder_inputs_embeds: (B,S,d), (B,T,d) embeddings instead of ids.
            labels: (B,T) words, including `</s>`; pads and −100 are excluded from the loss. Where they are given
                in training, a model with an adaptive softmax returns no logits.
            use_cache: return a cache. Default: as in the configuration, but not in training or with labels.
            output_hidden_states: return the input of each layer and the output of the last.
            logits_to_keep: compute logits only for this many last positions, or for these positions; 0 for all.
            num_items_in_batch: the labels but −100 in all batches of an update, as the Trainer counts them: the loss is
                the mean over the predicted words, times this batch's share of these labels.
            tokenizer, assistant_tokenizer: ignored; `generate` passes on those that stop_strings need.

        Raises:
            ValueError: an argument is missing, inconsistent or not supported; the message names it.
        """
        refuse_attentions(self.config.output_attentions if output_attentions is None else output_attentions)
        kept, past = self._keeps(output_hidden_states), given_cache(past_key_values, cache)
        if encoder_outputs is not None and not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = _of_tuple(encoder_outputs)
        encoded = None
        if past is None or past.state is None:
            if encoder_outputs is None:
                encoder_outputs = self.encoder(
                    input_ids, attention_mask, inputs_embeds, output_hidden_states=kept is not None
                )
            encoded = as_encoded(encoder_outputs, attention_mask)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError("decoder_input_ids or labels must be given, got neither")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        x, past = self._decode(
            decoder_input_ids,
            decoder_inputs_embeds,
            decoder_attention_mask,
            encoded,
            past,
            self._uses_cache(use_cache, labels),
            kept,
            ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"),
        )
        logits, loss = self._predict(x, labels, 0, logits_to_keep, num_items_in_batch)
        output = Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            decoder_hidden_states=batch_first(kept, x.transpose(0, 1)),
            encoder_last_hidden_state=getattr(encoder_outputs, "last_hidden_state", None),
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            **{CACHE: past},
        )
        return self._given(output, return_dict)


class LightConvForCausalLM(LightConvPreTrainedModel, LightConvGenerationMixin):
    """The language model.

    Raises:
        ValueError: `config` has an encoder.
    """

    def __init__(self, config: LightConvConfig):
        super().__init__(config)
        known = config.model_config()
        if known.encoder is not None:
            raise ValueError("config has an encoder: use LightConvForConditionalGeneration")
        self.decoder = Decoder(known.decoder, known.pad)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: LightConvCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        tokenizer: object = None,
        assistant_tokenizer: object = None,
        cache: LightConvCache | None = None,
    ) -> ModelOutput | tuple:
        """
        Args:
            input_ids: (B,T) words, pads on either side; fairseq's models expect the end symbol first.
            attention_mask: (B,T with those in the cache), 0 at pads; default: pads are recognised by their id.
            labels: (B,T) the same words as input_ids; the logits at t are compared with labels at t + 1. Pads and −100
                are excluded, and so is a word after a pad: the first of a sentence, wherever the pads are. Where they
                are given in training, a model with an adaptive softmax returns no logits.
            The others are those of LightConvForConditionalGeneration.

        Raises:
            ValueError: an argument is missing, inconsistent or not supported; the message names it.
        """
        refuse_attentions(self.config.output_attentions if output_attentions is None else output_attentions)
        kept = self._keeps(output_hidden_states)
        x, past = self._decode(
            input_ids,
            inputs_embeds,
            attention_mask,
            None,
            given_cache(past_key_values, cache),
            self._uses_cache(use_cache, labels),
            kept,
            ("input_ids", "inputs_embeds", "attention_mask"),
        )
        firsts = None if labels is None else self._firsts(labels, input_ids, attention_mask)
        logits, loss = self._predict(x, labels, 1, logits_to_keep, num_items_in_batch, firsts)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=batch_first(kept, x.transpose(0, 1)), **{CACHE: past}
        )
        return self._given(output, return_dict)

    def _firsts(self, labels: Tensor, tokens: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Where labels (B,T) come after a pad, which pads on the left put before the first word of a sentence."""
        pads = tokens.eq(self.decoder.pad) if mask is None and tokens is not None else None
        if mask is not None:
            pads = mask[:, -labels.shape[1] :].eq(0)  # the mask begins with the words in the cache
        return None if pads is None else pads.roll(1, dims=1)


def _of_tuple(parts: tuple) -> LightConvEncoderOutput:
    """An encoder's output from its values. Those that are None are left out, so types tell the others apart."""
    x, *rest = parts
    hidden = next((part for part in rest if isinstance(part, (tuple, list))), None)
    mask = next((part for part in rest if isinstance(part, Tensor)), None)
    return LightConvEncoderOutput(x, hidden, attention_mask=mask)
