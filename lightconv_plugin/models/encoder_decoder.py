"""The encoder-decoder: fairseq's Transformer, with a separate token mixer for every layer."""

import torch
from fairseq import utils
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase, TransformerModelBase
from torch import Tensor

from lightconv_plugin.models.checks import check_cutoff
from lightconv_plugin.models.config import Configured, transformer_config
from lightconv_plugin.models.layers import MixerDecoderLayer, MixerEncoderLayer, move_to_end, wrap_layer
from lightconv_plugin.models.pruning import Prunable
from lightconv_plugin.models.token_mixers import replace_dropout
from lightconv_plugin.modules.linear import replace_linear


class ConvTransformerModel(Configured, Prunable, TransformerModelBase):
    """LightConv and DynamicConv (Wu et al. 2019) and TaLK (Lioutas & Guo 2020) encoder-decoders. Layers may use
    different mixers, including self-attention and the paper's earlier convolutions.

    Architectures by name: architectures.py. Options: config.py. Checkpoints of fairseq's own LightConv models (all
    versions) and of the published TaLK models load into it (FairseqConvBlock.upgrade_state_dict_named).
    """

    @classmethod
    def build_model(cls, cfg, task):
        """Build the model for the task's dictionaries; raises ValueError naming an invalid option."""
        resolved = transformer_config(cfg, defaults=cls.defaults(), left_pad_target=_left_pad_target(task))
        if resolved.adaptive_softmax_cutoff is not None:
            check_cutoff(resolved, "adaptive_softmax_cutoff", len(task.target_dictionary))
        model = super().build_model(resolved, task)
        replace_dropout(model)
        replace_linear(model)
        return model

    @classmethod
    def build_encoder(cls, cfg, src_dict, embed_tokens):
        return MixerEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens):
        return MixerDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


def _left_pad_target(task) -> bool:
    # The options of fairseq's older tasks are in `args`, as text in some of them; their `cfg` is None.
    options = getattr(task, "cfg", None) or getattr(task, "args", None)
    return utils.eval_bool(str(getattr(options, "left_pad_target", False)))


class _NotScripted:
    """Says that TorchScript, which fairseq's own LightConv supports, is not supported here, and what is."""

    def __prepare_scriptable__(self):
        """Called by torch.jit.script, for a module that contains this one too (fairseq's SequenceGenerator)."""
        raise NotImplementedError(
            "TorchScript is not supported by lightconv_plugin's models: lightconv_plugin.deployment compiles exported "
            "models for libtorch; LIGHTCONV_KEEP_UPSTREAM=1 in the environment gives fairseq's own lightconv models"
        )


class MixerEncoder(_NotScripted, TransformerEncoderBase):
    """fairseq's encoder over MixerEncoderLayers, one for each of cfg.encoder.mixers."""

    def __init__(self, cfg, dictionary, embed_tokens):
        self._specs = iter(cfg.encoder.mixers)  # build_encoder_layer is called once per layer, without its index
        super().__init__(cfg, dictionary, embed_tokens)
        del self._specs

    def build_encoder_layer(self, cfg):
        return wrap_layer(MixerEncoderLayer(cfg, next(self._specs)), cfg)

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """src_tokens (B,T) → fairseq's encoder output, {"encoder_out": [(T,B,d)], "encoder_padding_mask": [(B,T)], …}.

        The base class checks whether the batch has pads, which makes the host wait for the device in every forward pass
        and breaks a compiled graph in two. Always zeroing the pads gives the same results.
        """
        padding_mask = src_tokens.eq(self.padding_idx)
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        x = x.masked_fill(padding_mask.unsqueeze(-1), 0).transpose(0, 1)
        states = [x] if return_all_hiddens else []
        for layer in self.layers:
            x = layer(x, encoder_padding_mask=padding_mask)
            if return_all_hiddens:
                states.append(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        lengths = padding_mask.logical_not().sum(dim=1, dtype=torch.int32)
        return {
            "encoder_out": [x],
            "encoder_padding_mask": [padding_mask],
            "encoder_embedding": [embedding],
            "encoder_states": states,
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [lengths.reshape(-1, 1)],
        }

    def upgrade_state_dict_named(self, state_dict, name):
        return _fit_position_buffer(self, super().upgrade_state_dict_named(state_dict, name), name)


class MixerDecoder(_NotScripted, TransformerDecoderBase):
    """fairseq's decoder over MixerDecoderLayers, one for each of cfg.decoder.mixers."""

    _future_mask: Tensor  # the base class makes it

    def __init__(self, cfg, dictionary, embed_tokens, no_encoder_attn=False):
        self._specs = iter(cfg.decoder.mixers)
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn=no_encoder_attn)
        del self._specs
        # The base class uses this flag only to decide whether to make the target's padding mask without first asking
        # the device if there are pads. Always making the mask means that the forward pass never waits.
        self.cross_self_attention = True
        if self.layer_norm is not None:
            move_to_end(self, "layer_norm")

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        return wrap_layer(MixerDecoderLayer(cfg, next(self._specs), no_encoder_attn=no_encoder_attn), cfg)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """tensor (T,…) → (T,T): −∞ for later positions, otherwise 0.

        The base class makes the mask on the host and copies it to the device whenever a batch is longer than before.
        """
        steps = tensor.shape[0]
        if self._future_mask.device != tensor.device or self._future_mask.shape[0] < steps:
            self._future_mask = torch.full((steps, steps), -torch.inf, device=tensor.device).triu_(1)
        self._future_mask = self._future_mask.to(tensor.dtype)
        return self._future_mask[:steps, :steps]

    def upgrade_state_dict_named(self, state_dict, name):
        version = f"{name}.version"
        if any(key.startswith(f"{name}.layers.") and ".linear1." in key for key in state_dict):
            # Upstream's LightConv counts versions differently: its 2 has a final norm, the Transformer's 2 does not.
            state_dict[version] = self.version.clone()
        state_dict = super().upgrade_state_dict_named(state_dict, name)
        if self.output_projection is None:
            # The base class adds a tied output projection even if an adaptive softmax replaces it.
            state_dict.pop(f"{name}.output_projection.weight", None)
        return _fit_position_buffer(self, state_dict, name)


def _fit_position_buffer(module, state_dict: dict, name: str) -> dict:
    """fairseq ≤ 0.12.2 saves an uninitialised device marker with sinusoidal positions; other versions do not."""
    key = f"{name}.embed_positions._float_tensor"
    marker = getattr(module.embed_positions, "_float_tensor", None)
    if marker is None:
        state_dict.pop(key, None)
    else:
        state_dict[key] = marker.clone()
    return state_dict
