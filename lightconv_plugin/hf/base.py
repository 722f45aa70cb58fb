"""What the transformers models share: loading, saving, steps of the decoder, argument checks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, ModelOutput

from lightconv_plugin.checkpoints.exported import SearchDefaults
from lightconv_plugin.checkpoints.saving import generation
from lightconv_plugin.errors import InputError
from lightconv_plugin.hf.cache import NAMES, LightConvCache
from lightconv_plugin.hf.config import LightConvConfig
from lightconv_plugin.hf.weights import check_saved, checked_arguments
from lightconv_plugin.modules.config import StackConfig
from lightconv_plugin.modules.eager import eager
from lightconv_plugin.modules.embeddings import positions_of
from lightconv_plugin.modules.transformer import Decoder, Encoded, Encoder, pads_in
from lightconv_plugin.released.cache import resolve

SHARED = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}


@dataclass
class LightConvEncoderOutput(BaseModelOutput):
    """An encoder's output: last_hidden_state (B,S,d), hidden_states if requested, attention_mask (B,S) bool."""

    attention_mask: Tensor | None = None


class LightConvEncoder(Encoder):
    """The encoder with transformers' call signature."""

    main_input_name = "input_ids"

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> LightConvEncoderOutput | tuple:
        """input_ids (B,S), or embeddings (B,S,d); without attention_mask (B,S), pads are recognised by their id."""
        refuse_attentions(output_attentions)
        shape = shape_of("input_ids", input_ids, "inputs_embeds", inputs_embeds, self.config)
        kept: list[Tensor] | None = [] if output_hidden_states else None
        x, pads = super().forward(input_ids, pads_of("attention_mask", attention_mask, shape), inputs_embeds, kept)
        x = x.transpose(0, 1)
        output = LightConvEncoderOutput(x, batch_first(kept, x), attention_mask=~pads)
        return output.to_tuple() if return_dict is False else output


class LightConvPreTrainedModel(PreTrainedModel):
    """What both models share: loading, saving, and steps of the decoder."""

    config_class = LightConvConfig
    config: LightConvConfig
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _supports_sdpa = True
    _no_split_modules = ["Layer"]  # noqa: RUF012  (required by transformers)
    # The state of a convolution cannot be rolled back, so assisted generation is not supported.
    _is_stateful = True

    decoder: Decoder

    def __init__(self, config: LightConvConfig):
        super().__init__(config)
        model = config.model_config()
        self.generation_config.suppress_tokens = [model.pad]  # as in fairseq; the pad is not a word
        if model.encoder is None:  # a text begins with the </s> of the preceding one
            self.generation_config.bos_token_id = model.eos
        else:  # what `lightconv translate` does with the model when it is saved
            known = generation(model, config.max_target_positions, SearchDefaults())
            self.generation_config.update(defaults_only=True, **known)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike | None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The model of an exported directory with weights of any type; 8-bit weights become floating-point numbers.

        Args:
            As in transformers.

        Raises:
            ValueError: a weight is missing, unknown or of another shape, or the directory is damaged. Nothing is
                allocated before this is known. Or device_map offloads a part of the decoder, or names several GPUs.
        """
        with_info = kwargs.pop("output_loading_info", False)
        # Any mismatch raises an error below.
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        weights: dict[str, Any] | None = None
        if pretrained_model_name_or_path is not None:
            try:
                pretrained_model_name_or_path = resolve(pretrained_model_name_or_path)
                weights = checked_arguments(cls.config_class, pretrained_model_name_or_path, kwargs)
            except InputError as error:
                raise ValueError(str(error)) from error
        if weights is None:
            model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        else:
            model, info = super().from_pretrained(None, *args, **weights)
            model.name_or_path = model.config.name_or_path = str(pretrained_model_name_or_path)
        problems = [f"{kind}: {', '.join(map(str, sorted(keys)))}" for kind, keys in info.items() if keys]
        if problems:
            raise ValueError(
                f"{pretrained_model_name_or_path} does not hold this model's weights: {'; '.join(problems)}"
            )
        _check_places(model)
        return (model, info) if with_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write the model as an exported directory; the tokenizer's save_pretrained adds dictionaries and text.

        Args:
            As in transformers.

        Raises:
            ValueError: the weights are not all of one type that a directory may have, or would not be in one file.
        """
        if not getattr(self, "_hf_peft_config_loaded", False):  # PEFT's adapters are saved without the model
            if variant is not None:
                raise ValueError(f"variant is not supported: the weights have a fixed name, got {variant!r}")
            # With DeepSpeed, `Trainer` saves an empty dictionary, and then removes the file.
            self.config.weights = check_saved(state_dict or self.state_dict(), max_shard_size)
        super().save_pretrained(
            save_directory, is_main_process, state_dict, push_to_hub, max_shard_size, variant, *args, **kwargs
        )

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: the classes of modules/ initialise their own parameters."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        return dict(SHARED) if self.config.share_embeddings else {}

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """Not supported: ValueError for any size but the current one."""
        size, fixed = self.config.vocab_size, "the dictionaries of a model are fixed when its training begins"
        if new_num_tokens not in (None, size):
            raise ValueError(f"new_num_tokens must be {size}, got {new_num_tokens}: {fixed}")
        if pad_to_multiple_of and size % pad_to_multiple_of:
            raise ValueError(f"pad_to_multiple_of must divide {size}, got {pad_to_multiple_of}: {fixed}")
        return self.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        """The output projection; None if it shares the embeddings' weight."""
        return self.decoder.output_projection

    def _decode(
        self,
        tokens: Tensor | None,
        vectors: Tensor | None,
        mask: Tensor | None,
        encoded: Encoded | None,
        past: LightConvCache | None,
        use_cache: bool,
        kept: list[Tensor] | None,
        names: tuple[str, str, str],
    ) -> tuple[Tensor, LightConvCache | None]:
        """(the decoder's output (T,B,d), the updated cache)."""
        shape = shape_of(names[0], tokens, names[1], vectors, self.decoder.config)
        batch, new = shape
        before = 0 if past is None else past.length
        if past is not None and past.batch_size not in (-1, batch):
            raise ValueError(f"the cache is of {past.batch_size} sequences, {names[0]} of {batch}")
        if encoded is not None and encoded.output.shape[1] != batch:
            raise ValueError(f"{names[0]} is of {batch} sequences, the encoder's output of {encoded.output.shape[1]}")
        pads = pads_of(names[2], mask, (batch, before + new))
        if pads is not None:
            pads = pads[:, before:]
        if past is None and not use_cache:
            return self.decoder(tokens, encoded, pads, vectors, kept), None
        cache = LightConvCache() if past is None else past
        state = self.decoder.start(batch, encoded) if cache.state is None else cache.state
        beyond = before + new > self.decoder.config.max_positions
        if beyond and self.decoder.config.positions == "learned" and not torch.compiler.is_compiling():
            # On a GPU, `step` does not look.
            now = pads_in(tokens, pads, vectors, self.decoder.pad)
            self.decoder.check_positions(positions_of(now, state.seen))
        x, state = self.decoder.step(tokens, state, pads, vectors, kept)
        cache.update_state(state, new)
        return x, cache

    def _uses_cache(self, asked: bool | None, labels: Tensor | None) -> bool:
        """Whether to use a cache: in training or with labels only on request; never with gradient checkpointing."""
        if self.training and self.decoder.gradient_checkpointing:
            return False
        return self.config.use_cache and not self.training and labels is None if asked is None else asked

    def _keeps(self, asked: bool | None) -> list[Tensor] | None:
        """A list for hidden states; None if they are not requested."""
        return [] if (self.config.output_hidden_states if asked is None else asked) else None

    def _given(self, output: ModelOutput, asked: bool | None) -> ModelOutput | tuple:
        """The output, or its values as a tuple."""
        return output if (self.config.return_dict if asked is None else asked) else output.to_tuple()

    def _predict(
        self,
        x: Tensor,
        labels: Tensor | None,
        shift: int,
        keep: int | Tensor,
        items: int | Tensor | None,
        excluded: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """(T,B,d) → logits (B,T or fewer,V) and, with labels (B,T), the loss; logits at t predict label t + `shift`.

        Labels at `excluded` (B,T), pads and −100 are not predicted. The logits may be None (`Decoder.score`).
        """
        if labels is None:
            if isinstance(keep, int):
                return self.decoder.logits(x[-keep:] if keep else x), None
            return self.decoder.logits(x[keep]), None
        if not isinstance(keep, int) or keep:
            raise ValueError("logits_to_keep is not allowed with labels, which need all logits")
        if labels.shape != (x.shape[1], x.shape[0]):
            raise ValueError(f"labels must be of shape {(x.shape[1], x.shape[0])}, got {tuple(labels.shape)}")
        wanted = labels if excluded is None else labels.masked_fill(excluded, -100)
        # The labels are shifted, because the shifted logits would be copied.
        logits, loss, predicted = self.decoder.score(x, F.pad(wanted[:, shift:], (0, shift), value=-100))
        if items is None:
            return logits, loss / predicted
        # `items` counts excluded labels and pads too: the mean over the others has the weight of all these labels.
        counted = labels[:, shift:].ne(-100).sum()
        return logits, loss * (counted / predicted.clamp(min=1)) / items


def _check_places(model: LightConvPreTrainedModel) -> None:
    """ValueError if weights of the decoder are offloaded, or weights are on several devices: accelerate loads weights
    and moves inputs only for calls of the modules that own them, but the output layer and the steps of convolutions
    read them outside of such calls.
    """
    offloaded = [name for name, weight in model.decoder.named_parameters() if weight.is_meta]
    places = getattr(model, "hf_device_map", {}).values()
    if offloaded and any(place != "meta" for place in places):
        raise ValueError(
            f"device_map must keep the decoder in memory, got a map that offloads decoder.{offloaded[0]} and "
            f"{len(offloaded) - 1} other weights of it"
        )
    devices = sorted({str(weight.device) for weight in model.parameters() if not weight.is_meta})
    if len(devices) > 1:
        raise ValueError(
            f"device_map must put the model on one device, got a map with {' and '.join(devices)}: give "
            f"device_map={{'': '{devices[0]}'}}"
        )


def refuse_attentions(asked: bool | None) -> None:
    if asked:
        raise ValueError("output_attentions=True is not supported: convolutions have no attention weights")


def given_cache(past_key_values: object, cache: object) -> LightConvCache | None:
    """The cache that was given by either of its names; ValueError unless it is one that the models know."""
    if past_key_values is not None and cache is not None:
        raise ValueError("past_key_values and cache are two names of one argument, got both")
    for name, past in zip(NAMES, (past_key_values, cache), strict=True):
        if past is not None and not isinstance(past, LightConvCache):
            raise ValueError(f"{name} must be a LightConvCache, got {type(past).__name__}")
    past = cache if past_key_values is None else past_key_values
    assert past is None or isinstance(past, LightConvCache)
    return past


def shape_of(
    name: str, tokens: Tensor | None, vectors_name: str, vectors: Tensor | None, stack: StackConfig
) -> tuple[int, int]:
    """(B,T) of the given tokens or vectors."""
    if (tokens is None) == (vectors is None):
        raise ValueError(f"{name} or {vectors_name} must be given, got {'neither' if tokens is None else 'both'}")
    if vectors is not None:
        if vectors.dim() != 3:
            raise ValueError(f"{vectors_name} must be of shape (batch, length, channels), got {tuple(vectors.shape)}")
        return vectors.shape[0], vectors.shape[1]
    assert tokens is not None
    if tokens.dim() != 2:
        raise ValueError(f"{name} must be of shape (batch, length), got {tuple(tokens.shape)}")
    # On a GPU, the check would wait for the device, and out-of-range indices raise an error there anyway.
    if tokens.device.type == "cpu" and tokens.numel() and eager(tokens):
        least, most = (int(n) for n in tokens.aminmax())
        if least < 0 or most >= stack.vocab_size:
            wrong = least if least < 0 else most
            raise ValueError(f"{name} must be in 0 … {stack.vocab_size - 1}, got {wrong}")
    return tokens.shape[0], tokens.shape[1]


def pads_of(name: str, mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Where a mask (B,T) is 0; None without one."""
    if mask is None:
        return None
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} must be of shape {shape}, got {tuple(mask.shape)}")
    return mask.eq(0)


def as_encoded(output: BaseModelOutput, mask: Tensor | None) -> Encoded:
    """The encoder's output for the decoder; pads come from the mask, or else from the encoder's output."""
    x = output.last_hidden_state
    pads = pads_of("attention_mask", mask, (x.shape[0], x.shape[1]))
    if pads is None:
        seen = getattr(output, "attention_mask", None)
        pads = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if seen is None else ~seen
    return Encoded(x.transpose(0, 1), pads)


def batch_first(kept: list[Tensor] | None, last: Tensor) -> tuple[Tensor, ...] | None:
    """The layers' inputs, (T,B,d) each, as (B,T,d), and the last output, which already is (B,T,d)."""
    return None if kept is None else (*(x.transpose(0, 1) for x in kept), last)
