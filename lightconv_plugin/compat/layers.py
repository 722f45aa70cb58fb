"""Patches for fairseq's own layers."""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from lightconv_plugin.compat.registry import patch
from lightconv_plugin.modules.attention import cudnn_is_chosen


def _encoder_layers_keep_copies() -> bool:
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

    return "_load_from_state_dict" in vars(TransformerEncoderLayerBase)


@patch(versions="fairseq 0.12.2", needed=_encoder_layers_keep_copies)
def encoder_layer_copies() -> None:
    """fairseq keeps a second copy of every encoder layer's weights for a fused kernel that fails with torch >= 2.

    Its TransformerEncoderLayerBase fills the copies when a checkpoint is loaded and then calls the kernel incorrectly
    (`Mask Type should be defined`). The copies get no gradient, which --ddp-backend pytorch_ddp does not accept. They
    double the layer's number of parameters, and they are made from `self_attn.q_proj`, which only the token mixers
    with attention have. Without them the layer is the same as in all other versions of fairseq. Checkpoints with the
    copies still load; to resume training from one, use --reset-optimizer.
    """
    from fairseq.modules.transformer_layer import TransformerEncoderLayerBase as Layer

    copies = [f"{part}_{kind}" for part in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")]
    # torch.jit.script compiles the call of the kernel, although it is never reached, and needs tensors of these names.
    empty = torch.empty(0)
    original = Layer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build = self.build_self_attention
        lent = []

        def build_and_lend_projections(*args: Any, **kwargs: Any) -> torch.nn.Module:
            mixer = build(*args, **kwargs)
            for name in ("q_proj", "out_proj"):
                if not hasattr(mixer, name):
                    mixer.__dict__[name] = types.SimpleNamespace(weight=torch.empty(0, 0), bias=torch.empty(0))
                    lent.append((mixer, name))
            return mixer

        self.__dict__["build_self_attention"] = build_and_lend_projections
        original(self, *args, **kwargs)
        del self.__dict__["build_self_attention"]
        for mixer, name in lent:
            del mixer.__dict__[name]
        for name in copies:
            delattr(self, name)
            setattr(self, name, empty)

    def _load_from_state_dict(self: torch.nn.Module, state_dict: dict, prefix: str, *args: Any) -> None:
        for name in copies:
            state_dict.pop(prefix + name, None)
        super(Layer, self)._load_from_state_dict(state_dict, prefix, *args)

    Layer.__init__ = __init__
    Layer._load_from_state_dict = _load_from_state_dict


def _swish_is_a_class() -> bool:
    from fairseq import utils

    return inspect.isclass(utils.get_activation_fn("swish"))


@patch(versions="all versions of fairseq", needed=_swish_is_a_class)
def swish_activation() -> None:
    """fairseq returns the class SiLU for --activation-fn swish, the TaLK models' activation, instead of a function.

    A Transformer layer then constructs a module from its input instead of computing the activation, and fails.
    """
    from fairseq import utils

    original = utils.get_activation_fn

    def get_activation_fn(activation: str) -> Callable[..., torch.Tensor]:
        return torch.nn.functional.silu if activation == "swish" else original(activation)

    utils.get_activation_fn = get_activation_fn


def _marked_modules() -> list[type]:
    """fairseq modules whose saved state contains a number that is never initialised and never read."""
    from fairseq.modules import AdaptiveInput, SinusoidalPositionalEmbedding
    from fairseq.modules.adaptive_softmax import TiedHeadModule

    examples = (
        AdaptiveInput(4, 0, 4, 1.0, 4, [2, 4]),
        TiedHeadModule((torch.zeros(2, 4), None), 4, 1, 0, 8),
        SinusoidalPositionalEmbedding(4, 0, 2),
    )
    return [type(module) for module in examples if hasattr(module, "_float_tensor")]


@patch(versions="all versions of fairseq", needed=lambda: bool(_marked_modules()))
def uninitialised_markers() -> None:
    """fairseq saves an uninitialised number with adaptive inputs and tied adaptive outputs: equal runs' files differ.

    The number, sometimes NaN, only marks a device and a type. fairseq 0.12.2 also saves one with sinusoidal positions.
    """
    for module in _marked_modules():
        _initialise_marker(module)


def _initialise_marker(module: Any) -> None:
    original = module.__init__

    def __init__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.register_load_state_dict_post_hook(_zero_marker)
        _zero_marker(self)

    module.__init__ = __init__


def _zero_marker(module: Any, keys: Any = None) -> None:
    """Also called after loading: fairseq puts an uninitialised number into a state that has none."""
    module._float_tensor.zero_()


@patch(versions="all versions of fairseq, with torch 2.5 and later", needed=cudnn_is_chosen)
def attention_without_cudnn() -> None:
    """torch chooses cuDNN's attention on some GPUs for fairseq's Transformer; with masks its gradients can be wrong.

    torch 2.11 to 2.13 prefer it on an H100 in half types: https://github.com/pytorch/pytorch/issues/196678, 193893,
    150700. The kernels of torch itself (flash, memory-efficient) take over. `dot_product_attention` says it for our own
    layers, which are used without fairseq too.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
