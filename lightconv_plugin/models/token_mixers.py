"""The token mixers of modules/ with the interface that fairseq's Transformer layers expect. They replace
MultiheadAttention and support fairseq's incremental state, dropout at inference (--retain-dropout) and quantisation
noise."""

from collections.abc import Callable
from typing import Any

import torch
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightconv_plugin.modules.attention import AttentionConv, EncoderAttention, SelfAttention, attend, split_heads
from lightconv_plugin.modules.block import ConvBlock
from lightconv_plugin.modules.dropout import Dropout
from lightconv_plugin.modules.mixers import MixerSpec
from lightconv_plugin.modules.mixers import build_mixer as build_plain_mixer
from lightconv_plugin.ops.backends import on_gpu

# Upstream's LightConv has the block's parameters directly in the layer, and other names for the norms.
_UPSTREAM_NAMES = {
    "linear1": "{block}.linear1",
    "linear2": "{block}.linear2",
    "conv": "{block}.conv",
    "layer_norm1": "{layer}.self_attn_layer_norm",
    "layer_norm2": "{layer}.final_layer_norm",
    "conv_layer_norm": "{layer}.self_attn_layer_norm",
}
# In PyTorch, of 0.12.2 and of later versions, and in CUDA.
_UPSTREAM_CONVOLUTIONS = {
    **dict.fromkeys(("LightweightConv1dTBC", "LightconvLayer"), "LightweightConv"),
    **dict.fromkeys(("DynamicConv1dTBC", "DynamicConv_scripatable", "DynamicconvLayer"), "DynamicConv"),
}
_PROJECTIONS = ("linear1", "linear2", "q_proj", "k_proj", "v_proj", "out_proj")


class _FairseqCall(nn.Module):
    """MultiheadAttention's interface, implemented by a mixer's `forward` and `step`."""

    _STATE = "mixer_state"
    # The mixer has the first two, with_incremental_state adds the others.
    step: Any
    reorder: Any
    get_incremental_state: Any
    set_incremental_state: Any

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """query (T,B,d) → ((T,B,d), None).

        fairseq's other arguments are ignored: `key` and `value` are the query again, and `attn_mask` is the causal
        mask, which the mixer implements itself.

        Args:
            query: with an incremental state, the next n ≥ 1 tokens; otherwise the whole sequence.
            key_padding_mask: (B,T) bool, true at pads, on either side.
            incremental_state: fairseq's dictionary of one generation; it holds the mixer's state.
        """
        if incremental_state is None:
            return super().forward(query, key_padding_mask), None
        state = self._get_input_buffer(incremental_state).get(self._STATE)
        x, state = self.step(query, state, key_padding_mask)
        self._set_input_buffer(incremental_state, {self._STATE: state})
        return x, None

    def reorder_incremental_state(self, incremental_state: dict, new_order: Tensor) -> dict:
        """For beam search: batch row n becomes the former row new_order[n]; new_order (B',) int64."""
        state = self._get_input_buffer(incremental_state).get(self._STATE)
        if state is not None:
            self._set_input_buffer(incremental_state, {self._STATE: self.reorder(state, new_order)})
        return incremental_state

    def _get_input_buffer(self, incremental_state: dict | None) -> dict:
        # fairseq's decoder layer calls this method by name, with and without an incremental state.
        return self.get_incremental_state(incremental_state, self._STATE) or {}

    def _set_input_buffer(self, incremental_state: dict, buffer: dict) -> None:
        self.set_incremental_state(incremental_state, self._STATE, buffer)


@with_incremental_state
class FairseqConvBlock(_FairseqCall, ConvBlock):  # type: ignore[misc]  # forward takes fairseq's arguments
    """ConvBlock in place of fairseq's self-attention."""

    def upgrade_state_dict_named(self, state_dict: dict, name: str) -> dict:
        """Rename the keys of fairseq's own LightConv layers (all versions) to this block's, in place.

        This also adds the middle dimension to (H,K) filters of models trained with the CUDA layer, and drops the unused
        and uninitialised `conv_bias` of newer dynamic layers.
        """
        layer = name.rpartition(".")[0]
        for old, new in _UPSTREAM_NAMES.items():
            prefix = f"{layer}.{old}."
            for key in [key for key in state_dict if key.startswith(prefix)]:
                target = new.format(block=name, layer=layer) + "." + key[len(prefix) :]
                state_dict[target] = state_dict.pop(key)
        if self.conv.conv_bias is None:
            state_dict.pop(f"{name}.conv.conv_bias", None)
        weight = f"{name}.conv.weight"
        if weight in state_dict and state_dict[weight].dim() == 2:
            state_dict[weight] = state_dict[weight].unsqueeze(1)
        return state_dict


@with_incremental_state
class WindowAttention(_FairseqCall, SelfAttention):  # type: ignore[misc]  # forward takes fairseq's arguments
    """Self-attention that fairseq does not implement: in a window of tokens (row 2 of the paper's ablation), or with
    convolutions of queries, keys and values."""


class FusedEncoderAttention(MultiheadAttention):
    """fairseq's attention over the encoder, which takes torch's fused kernels in training on a GPU.

    fairseq takes them for self-attention only. Everything else runs fairseq's code: where attention weights are read
    (fairseq asks for them in the last layer), evaluation and decoding, and a CPU, where dropout is faster without them.

    Attributes:
        weights_are_read: in training the weights that are asked for are returned.
    """

    weights_are_read = True

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.dropout_module.module_name = MultiheadAttention.__name__  # for --retain-dropout-modules

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query (T,B,d), key and value (S,B,e) the encoder's output, key_padding_mask (B,S) → ((T,B,d), weights)."""
        weights = self.weights_are_read and (need_weights or need_head_weights)
        special = weights or before_softmax or attn_mask is not None
        if special or incremental_state is not None or not self.training or not on_gpu(query):
            options = (need_weights, static_kv, attn_mask, before_softmax, need_head_weights)
            return super().forward(query, key, value, key_padding_mask, incremental_state, *options)
        return self.fused(query, key, value, key_padding_mask), None

    def fused(self, query: Tensor, key: Tensor | None, value: Tensor | None, key_padding_mask: Tensor | None) -> Tensor:
        """The output alone, with dropout, by torch's kernels; the arguments are those of `forward`."""
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        queries, keys, values = (split_heads(x, self.num_heads) for x in projected)
        mask = None if key_padding_mask is None else _additive(key_padding_mask, query)
        # Contiguous rows: the product then adds the bias too.
        return self.out_proj(attend(queries, keys, values, mask, self.dropout_module.p).contiguous())


# The masks of the batches that are under way: all layers have the same, which torch would make in each of them.
_masks = WeakTensorKeyDictionary()


def _additive(pads: Tensor, like: Tensor) -> Tensor:
    """pads (B,S) → (B,1,1,S) in the type of `like`: −∞ at pads, otherwise 0."""
    # A compiled or captured program would find the mask of another batch, and an inference tensor has no version.
    lasting = not torch.compiler.is_compiling() and not _capturing(pads) and not pads.is_inference()
    made, version = _masks.get(pads, (None, None)) if lasting else (None, None)
    if made is None or version != pads._version or made.dtype != like.dtype:
        made = like.new_zeros(pads.shape).masked_fill_(pads.bool(), -torch.inf)[:, None, None]
        if lasting:
            _masks[pads] = made, pads._version
    return made


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@with_incremental_state
class ConvolvedEncoderAttention(EncoderAttention):
    """EncoderAttention with a convolution of its queries, in place of fairseq's; it returns no attention weights."""

    _STATE = "attention_state"
    get_incremental_state: Any  # with_incremental_state adds both
    set_incremental_state: Any

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        static_kv: bool = False,
        need_weights: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """query (T,B,d), key (S,B,e) the encoder's output, key_padding_mask (B,S) → ((T,B,d), None).

        The queries' pads are not known here, so they must be on the right. With an incremental state, query holds the
        next tokens, and the keys are those of the first call.
        """
        if incremental_state is None:
            return super().forward(query, *self.project(key), key_padding_mask), None
        known = self.get_incremental_state(incremental_state, self._STATE) or {}
        if not known:
            known = dict(zip(("keys", "values"), self.project(key), strict=True))
        x, queries = self.step(query, known.get("queries"), known["keys"], known["values"], key_padding_mask)
        self.set_incremental_state(incremental_state, self._STATE, {**known, "queries": queries})
        return x, None

    def reorder_incremental_state(self, incremental_state: dict, new_order: Tensor) -> dict:
        """For beam search: batch row n becomes the former row new_order[n]; new_order (B',) int64."""
        known = self.get_incremental_state(incremental_state, self._STATE)
        if known is not None:
            known = {name: x.index_select(1 if name == "queries" else 0, new_order) for name, x in known.items()}
            self.set_incremental_state(incremental_state, self._STATE, known)
        return incremental_state


def build_mixer(
    spec: MixerSpec, embed_dim: int, build_attention: Callable[[], nn.Module], *, q_noise: float, qn_block_size: int
) -> nn.Module:
    """The module that a fairseq Transformer layer uses as its `self_attn`; `build_attention` builds fairseq's own."""
    if spec.is_plain_attention:
        return build_attention()
    mixer = build_plain_mixer(spec, embed_dim, block=FairseqConvBlock, attention=WindowAttention)
    return _with_noise(mixer, q_noise, qn_block_size)


def build_encoder_attention(
    cfg, embed_dim: int, convolved: AttentionConv | None, *, q_noise: float, qn_block_size: int
) -> nn.Module:
    """The module that a fairseq Transformer layer uses as its `encoder_attn`; `cfg` is its TransformerConfig."""
    if convolved is None:
        return FusedEncoderAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            dropout=cfg.attention_dropout,
            encoder_decoder_attention=True,
            q_noise=q_noise,
            qn_block_size=qn_block_size,
        )
    attention = ConvolvedEncoderAttention(
        embed_dim,
        cfg.decoder.attention_heads,
        encoder_dim=cfg.encoder.embed_dim,
        dropout=cfg.attention_dropout,
        convolved=convolved,
    )
    return _with_noise(attention, q_noise, qn_block_size)


def _with_noise(mixer: nn.Module, q_noise: float, qn_block_size: int) -> nn.Module:
    """Add quantisation noise to the projections, with a hook on each."""
    for name in _PROJECTIONS:
        projection = getattr(mixer, name, None)
        if isinstance(projection, nn.Linear):
            quant_noise(projection, q_noise, qn_block_size)
    return mixer


class RetainableDropout(Dropout, FairseqDropout):
    """Dropout that fairseq's --retain-dropout can keep on at inference."""

    def __init__(self, p: float, module_name: str | None = None):
        FairseqDropout.__init__(self, p, module_name)

    def make_generation_fast_(
        self, name: str, retain_dropout: bool = False, retain_dropout_modules: list[str] | str | None = None, **kwargs
    ) -> None:
        """Called by fairseq for the module `name` of a model; the classes to retain may have upstream's names."""
        if isinstance(retain_dropout_modules, str):  # as on the command line, whose option fairseq does not split
            retain_dropout_modules = [kind.strip() for kind in retain_dropout_modules.split(",")]
        if retain_dropout_modules is not None:
            side = "Encoder" if "encoder" in name.split(".") else "Decoder"
            ours = {f"LightConv{side}": f"Mixer{side}", **_UPSTREAM_CONVOLUTIONS}
            for part in side, f"{side}Layer":  # fairseq's, which the classes here extend
                ours |= dict.fromkeys((f"Transformer{part}", f"Transformer{part}Base"), f"Mixer{part}")
            # Upstream's layer includes what is a block of its own here.
            ours[f"LightConv{side}Layer"] = "ConvBlock" if self.module_name == "ConvBlock" else f"Mixer{side}Layer"
            retain_dropout_modules = [ours.get(kind, kind) for kind in retain_dropout_modules]
        super().make_generation_fast_(name, retain_dropout, retain_dropout_modules, **kwargs)


def replace_dropout(module: nn.Module) -> None:
    """Replace every dropout in `module` with a RetainableDropout of the same probability and name, in place."""
    for parent in list(module.modules()):
        children: dict[str, Any] = dict(parent.named_children())
        for name, child in children.items():
            if type(child) in (FairseqDropout, Dropout):
                setattr(parent, name, RetainableDropout(child.p, child.module_name))
