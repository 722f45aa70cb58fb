"""Checkpoint layouts of LightConv, DynamicConv and TaLK models: names and order of the parameters, options.

plugin           ours: fairseq's Transformer layers, with the block under `self_attn`
fairseq          fairseq's main branch since late 2022: the block in the layer itself, `layer_norm1`, `conv_bias`
fairseq-0.12.2   its releases, and the files released in 2019: `layer_norms.0`, `embed_out`, nothing for a tied output
talk             the TaLK paper's repository: like fairseq-0.12.2, but on fairseq 0.8, whose settings are one Namespace

This module recognises a layout and writes all of them. Reading one is the models' own `upgrade_state_dict`: what each
block renames is in models/token_mixers.py.
"""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

from lightconv_plugin.errors import InputError
from lightconv_plugin.mixers import OUR_DETAILS, OUR_OPTIONS

LAYOUTS = ("plugin", "fairseq", "fairseq-0.12.2", "talk")
# Options that name files to read when a model is built.
EMBEDDING_FILES = ("encoder_embed_path", "decoder_embed_path")
# The mixers and the activation of each layout's own code.
_OWN = {
    "fairseq": ({"lightweight", "dynamic"}, "relu"),
    "fairseq-0.12.2": ({"lightweight", "dynamic"}, "relu"),
    "talk": ({"talk"}, "swish"),
}
UPSTREAM_ARCHITECTURES = {
    "lightconv": ("", "_wmt_en_de", "_iwslt_de_en", "_wmt_en_de_big", "_wmt_en_fr_big", "_wmt_zh_en_big"),
    "lightconv_lm": ("", "_gbw"),
    "talkconv": ("", "_iwslt_de_en", "_wmt_en_de_big", "_wmt_en_fr_big", "_cnndm_std", "_cnndm_deep"),
    "talkconv_lm": ("", "_big", "_wiki103"),
}
# Options that upstream lacks. They change what a model computes; upstream only has these values.
FIXED = {
    "layernorm_embedding": False,
    "no_scale_embedding": False,
    "no_cross_attention": False,
    **OUR_OPTIONS,
}
# These only matter in training, and upstream works without them.
TRAINING_ONLY = {
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "checkpoint_activations": False,
    "offload_activations": False,
    "quant_noise_pq": 0.0,
    "quant_noise_scalar": 0.0,
}
NOT_UPSTREAM = {
    *FIXED,
    *OUR_DETAILS,
    *TRAINING_ONLY,
    *("activation_fn", "weight_normalization", "min_params_to_wrap", "quant_noise_pq_block_size"),
}
DYNAMIC_WEIGHT = ".conv.weight_linear.weight"


@dataclass(frozen=True)
class Model:
    """A checkpoint's model in our terms.

    architecture: one of ours. options: its whole configuration. resolved: the options as fairseq's TransformerConfig
    with our mixers. module: the model on torch's meta device, which has names, shapes and order but needs no memory.
    """

    architecture: str
    options: dict[str, Any]
    resolved: Any
    module: Any

    @property
    def is_language_model(self) -> bool:
        return "_lm" in self.architecture

    @property
    def sides(self) -> dict[str, Any]:
        """The configurations of the model's sides, by "encoder" and "decoder"."""
        names = ("decoder",) if self.is_language_model else ("encoder", "decoder")
        return {name: getattr(self.resolved, name) for name in names}

    @property
    def tied(self) -> bool:
        """Whether the output projection shares the decoder's embedding."""
        return bool(self.options["share_decoder_input_output_embed"] or self.options.get("share_all_embeddings"))


def our_architecture(name: str) -> str:
    """Our name for the architecture of a checkpoint; upstream's lightconv… is renamed after its default mixer.

    Raises InputError if the architecture is not one of these models.
    """
    from fairseq import models

    import lightconv_plugin.models  # noqa: F401 (registers the architectures)

    ours = re.sub(r"^lightconv(?=_|$)", "dynamicconv", name)
    if not re.match(r"(lightweight|dynamic|talk)conv(_|$)", ours) or ours not in models.MODEL_DATACLASS_REGISTRY:
        raise InputError(
            f"its architecture {name} is not LightConv, DynamicConv or TaLK: those begin with lightconv, "
            "lightweightconv, dynamicconv or talkconv"
        )
    return ours


def read_model(
    settings: Mapping[str, Any],
    architecture: str,
    state: Mapping[str, Any] | None = None,
    entries: tuple[int, int] | None = None,
) -> Model:
    """The model described by a checkpoint's settings.

    entries: sizes of the source and target dictionaries; by default inferred from the parameters, in any layout.

    Raises InputError for options from which no model can be built.
    """
    import torch
    from fairseq import models
    from omegaconf import OmegaConf

    from lightconv_plugin.models.config import transformer_config
    from lightconv_plugin.models.language_model_config import language_model_config

    name = our_architecture(architecture)
    config = models.MODEL_DATACLASS_REGISTRY[name]()
    for field in fields(config):
        if field.name in settings and not field.name.startswith("_"):
            setattr(config, field.name, settings[field.name])
    config._name = name
    try:
        if "_lm" not in name and isinstance(config.adaptive_softmax_cutoff, str):  # upstream's form
            config.adaptive_softmax_cutoff = [int(rank) for rank in config.adaptive_softmax_cutoff.split(",")]
        checked = OmegaConf.structured(config)  # names an option of the wrong type
        for option in EMBEDDING_FILES:
            if option in checked:
                checked[option] = None  # the parameters come from the checkpoint
        resolved = (language_model_config if "_lm" in name else transformer_config)(config)
        sizes = entries or _entries(state or {}, resolved, "_lm" in name)
        with torch.device("meta"):
            module = models.build_model(checked, _task(*sizes))
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        said = " ".join(str(error).split())  # omegaconf writes several lines
        raise InputError(f"no model can be built from its options: {said}") from error
    options = {f.name: _plain(getattr(config, f.name)) for f in fields(config) if not f.name.startswith("_")}
    model = Model(name, options, resolved, module)
    kinds = {mixer.kind for side in model.sides.values() for mixer in side.mixers}
    lightweight = re.sub("^dynamicconv", "lightweightconv", name)
    if kinds == {"lightweight"} and lightweight in models.MODEL_DATACLASS_REGISTRY:
        model = Model(lightweight, options, resolved, module)
    return model


def _plain(value: Any) -> Any:
    """An option as stored in checkpoints: enums as text, sequences as lists."""
    value = getattr(value, "value", value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _task(source: int | None, target: int | None):
    """A task with dictionaries of these sizes; both sides share one if the sizes are equal."""
    from fairseq.data import Dictionary

    def dictionary(entries: int | None) -> Dictionary:
        words = Dictionary()
        for number in range((entries or 0) - len(words)):
            words.add_symbol(f"{number}")
        return words

    source_dictionary = dictionary(source)
    target_dictionary = source_dictionary if target in (None, source) else dictionary(target)
    return SimpleNamespace(
        dictionary=source_dictionary,
        source_dictionary=source_dictionary,
        output_dictionary=target_dictionary,
        target_dictionary=target_dictionary,
        cfg=SimpleNamespace(left_pad_target=False),
    )


def _entries(state: Mapping[str, Any], resolved, language_model: bool) -> tuple[int | None, int | None]:
    """The numbers of input and output words. Input: None if unknown; output: None if it is the input's."""

    def rows(key: str) -> int:
        return _rows(state, key)

    if not language_model:
        return rows("encoder.embed_tokens.weight"), rows("decoder.embed_tokens.weight")
    target = _output_entries(state, resolved)
    if "decoder.embed_tokens.weight" in state:
        return rows("decoder.embed_tokens.weight"), target
    if resolved.adaptive_input:
        bands = len(resolved.adaptive_input_cutoff) + 1
        return sum(rows(f"decoder.embed_tokens.embeddings.{band}.0.weight") for band in range(bands)), target
    return target, target  # character input: no parameter has one row per word


def _output_entries(state: Mapping[str, Any], resolved) -> int | None:
    """The number of output words; None if it is the input's."""
    for key in ("decoder.output_projection.weight", "decoder.embed_out"):
        if key in state:
            return _rows(state, key)
    if resolved.adaptive_softmax_cutoff is None:
        return None
    last = len(resolved.adaptive_softmax_cutoff) - 1
    return resolved.adaptive_softmax_cutoff[-1] + _rows(state, f"decoder.adaptive_softmax.tail.{last}.2.weight")


def _rows(state: Mapping[str, Any], key: str) -> int:
    if key not in state:
        raise ValueError(f"there is no {key}")
    if state[key].dim() != 2:
        raise ValueError(f"{key} must be a matrix, got shape {tuple(state[key].shape)}")
    return state[key].shape[0]


def layout_of(model: Model, state: Mapping[str, Any]) -> str:
    """The layout of these parameters."""
    keys = state.keys()
    if any(".self_attn" in key for key in keys) or not any(".layers." in key for key in keys):
        return "plugin"
    if all(mixer.kind == "talk" for side in model.sides.values() for mixer in side.mixers):
        return "talk"
    new = any(".layer_norm1." in key or key.endswith(".conv.conv_bias") for key in keys)
    new = new or "decoder.output_projection.weight" in keys
    old = any(".layer_norms." in key or key.endswith(("embed_out", "embed_positions._float_tensor")) for key in keys)
    return "fairseq" if new and not old else "fairseq-0.12.2"


def our_state(model: Model, state: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters under our names and in our shapes, converted by the model's own upgrade rules.

    Raises InputError if a name is unknown or missing, or a shape differs.
    """
    parameters = dict(state)
    try:
        model.module.upgrade_state_dict(parameters)
    except (IndexError, RuntimeError, TypeError) as error:  # its rules expect tensors of the right shapes and types
        raise InputError(f"the parameters do not belong to {model.architecture}: {error}") from error
    expected = model.module.state_dict()
    for what, names in (
        ("unknown", parameters.keys() - expected.keys()),
        ("missing", expected.keys() - parameters.keys()),
    ):
        if names:
            listed = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise InputError(f"{what} parameters for {model.architecture}: {listed}")
    for key, value in parameters.items():
        if value.shape != expected[key].shape:
            raise InputError(
                f"{key} has shape {tuple(value.shape)}, but the options require {tuple(expected[key].shape)}"
            )
    # The layout's version number: a buffer of the model that the file does not have.
    versions = {key: expected[key].clone() for key in ("encoder.version", "decoder.version") if key in expected}
    return {key: versions.get(key, parameters[key]) for key in expected}


def name_in(layout: str, key: str) -> str:
    """Our name of a parameter → its name in a layout."""
    if layout == "plugin":
        return key
    old = layout != "fairseq"
    if old and key == "decoder.output_projection.weight":
        return "decoder.embed_out"
    match = re.fullmatch(r"((encoder|decoder)\.layers\.\d+\.)(.+)", key)
    if not match:
        return key
    rest = re.sub(r"^self_attn\.(?=(linear1|linear2|conv)\.)", "", match[3])
    norms = {"self_attn_layer_norm.": "conv_layer_norm."}
    if match[2] == "encoder":
        first, second = ("layer_norms.0.", "layer_norms.1.") if old else ("layer_norm1.", "layer_norm2.")
        norms = {"self_attn_layer_norm.": first, "final_layer_norm.": second}
    for ours, theirs in norms.items():
        rest = re.sub(f"^{re.escape(ours)}", theirs, rest)
    return match[1] + rest


def state_in(layout: str, model: Model, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Our parameters → those of a layout; tied ones stay one tensor.

    Raises InputError if an output projection that must be tied differs from the embedding.
    """
    import torch

    if layout == "plugin":
        return dict(ours)
    out: dict[str, Any] = {}
    for key, value in ours.items():
        if key in ("encoder.version", "decoder.version"):
            value = torch.tensor([2.0])
        elif key.endswith(".embed_positions._float_tensor"):
            continue
        elif key == "decoder.output_projection.weight" and model.tied and layout != "fairseq":
            if not torch.equal(value, ours["decoder.embed_tokens.weight"]):
                raise InputError("the options tie the output projection to the decoder's embedding, but they differ")
            continue
        if layout == "fairseq" and key.endswith(DYNAMIC_WEIGHT):
            # fairseq's layer has this parameter, but never uses or initialises it.
            out[name_in(layout, key).replace("weight_linear.weight", "conv_bias")] = value.new_zeros(
                1, 1, value.shape[1]
            )
        out[name_in(layout, key)] = value
    if layout != "fairseq" and not model.options["no_token_positional_embeddings"]:
        for side in model.sides:
            if not model.options[f"{side}_learned_pos"]:
                out[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
    return out


def architecture_in(layout: str, model: Model) -> str:
    """The name of the architecture in a layout: the same preset if there is one, otherwise the family's base."""
    if layout == "plugin":
        return model.architecture
    suffix = re.sub(r"^[a-z]+conv(_lm(?=_|$))?", "", model.architecture)
    family = ("talkconv" if layout == "talk" else "lightconv") + ("_lm" if model.is_language_model else "")
    return family + (suffix if suffix in UPSTREAM_ARCHITECTURES[family] else "")


def options_in(layout: str, model: Model) -> tuple[dict[str, Any], list[str]]:
    """(all options of the model for a layout's own code, those of ours that are left out).

    Raises InputError for an option that changes the results and that the code lacks.
    """
    if layout == "plugin":
        return model.options, []
    _check_expressible(layout, model)
    out = {name: value for name, value in model.options.items() if name not in NOT_UPSTREAM}
    for side, config in model.sides.items():
        mixers = config.mixers
        out |= {
            f"{side}_embed_dim": config.embed_dim,
            f"{side}_ffn_embed_dim": config.ffn_embed_dim,
            f"{side}_conv_dim": mixers[0].conv_dim,
            f"{side}_conv_type": mixers[0].kind,
            f"{side}_kernel_size_list": [mixer.kernel_size for mixer in mixers],
        }
    decoder = model.sides["decoder"]
    out |= {"decoder_input_dim": decoder.input_dim, "decoder_output_dim": decoder.output_dim}
    out |= {"weight_softmax": model.resolved.weight_normalization == "softmax"}
    out |= {"weight_dropout": decoder.mixers[0].weight_dropout}
    for name in ("adaptive_input_cutoff", "adaptive_softmax_cutoff"):
        if out.get(name) is not None:
            out[name] = ",".join(map(str, getattr(model.resolved, name)))
    if model.is_language_model:
        out |= {"decoder_normalize_before": True, "max_target_positions": model.resolved.max_target_positions}
    else:
        # Upstream's translation models also read these, but have no command-line option for them.
        out |= {"tie_adaptive_weights": False, "tie_adaptive_proj": False}
    left_out = [
        f"{name}={model.options[name]}"
        for name, without in TRAINING_ONLY.items()
        if model.options.get(name, without) != without
    ]
    return out, left_out


def _check_expressible(layout: str, model: Model) -> None:
    kinds, activation = _OWN[layout]

    def fail(option: str, value, allowed: str):
        raise InputError(f"the layout {layout} cannot express {option}={value}: it has {allowed}")

    for side, config in model.sides.items():
        found = [mixer.kind for mixer in config.mixers]
        if len(set(found)) > 1 or found[0] not in kinds:
            fail(f"{side}_conv_type", ",".join(found), f"one of {', '.join(sorted(kinds))} for all layers")
    if layout != "talk" and model.resolved.weight_normalization not in ("softmax", "none"):
        fail("weight_normalization", model.resolved.weight_normalization, "softmax and none")
    if str(model.resolved.activation_fn) != activation:
        fail("activation_fn", model.resolved.activation_fn, activation)
    for name, value in FIXED.items():
        if model.options.get(name, value) != value:
            fail(name, model.options[name], "no such option")
    if model.module.decoder.quant_noise is not None:
        fail("quant_noise_pq", model.options["quant_noise_pq"], "no linear layer after the embeddings")
    dims = [config.embed_dim for config in model.sides.values()]
    if dims[0] != dims[-1]:  # its attention over the encoder takes vectors of the decoder's size
        fail("decoder_embed_dim", dims[-1], f"encoder_embed_dim={dims[0]} on both sides")


def as_mapping(settings: Any) -> dict[str, Any]:
    """A checkpoint's settings, a dictionary or a Namespace, as a dictionary."""
    return dict(vars(settings)) if isinstance(settings, Namespace) else dict(settings or {})
