"""Turns an exported model into a fairseq checkpoint for further training: the inverse of exporting.py.

The options of the plugin's architectures are read from the exported architecture, some of them from the first layer
that has them. fairseq's model is then built from these options on the meta device, and its architecture is compared
with the exported one. This detects anything that the options cannot express, and the error names it.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from fairseq import models
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor

from lightconv_plugin.checkpoints.exported import CONFIG, Exported, load_model, open_exported
from lightconv_plugin.checkpoints.layouts import Model, our_state, read_model
from lightconv_plugin.errors import InputError, UnsupportedModelError
from lightconv_plugin.mixers import LAYER_OPTIONS, MIXERS, LayerOption, readers
from lightconv_plugin.models.attention_options import attention_options
from lightconv_plugin.models.config import VALUED_BOOLEANS
from lightconv_plugin.models.plain import plain_config
from lightconv_plugin.modules import MixerSpec, ModelConfig, StackConfig
from lightconv_plugin.modules.config import OF_ENCODER_ATTENTION
from lightconv_plugin.quiet import quietly

_OF_OUTPUTS = ("output_dim", "share_input_output", "output_bias", "adaptive_input", "adaptive_softmax")


def fairseq_checkpoint(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """The content of a checkpoint in the plugin's layout, with float32 parameters, and notes for the user.

    Its task is translation or language modelling, with the exported directory as the folder of the dictionaries.

    Raises:
        InputError: the directory is not an exported model, or the plugin's options cannot express its architecture.
    """
    exported = open_exported(directory)
    model, parameters = fairseq_model(exported)
    weights = exported.settings.weights
    notes = []
    if weights != "float32":
        notes.append(f"the weights are float32 again, but keep the rounding of the export to {weights}")
    if exported.shortlist is not None:
        notes.append(f"the shortlist is dropped: to translate with it, give {exported.shortlist} as --shortlist")
    content: dict[str, Any] = {
        "args": None,
        "cfg": _settings(exported, model),
        "model": parameters,
        "criterion": None,
        "optimizer_history": [
            {"criterion_name": None, "optimizer_name": None, "lr_scheduler_state": {}, "num_updates": 0}
        ],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, "val_loss": None},
        "last_optimizer_state": None,
    }
    return content, notes


def command_line(cfg: Mapping[str, Any]) -> str:
    """The options of fairseq-train for the model in `fairseq_checkpoint`'s cfg that differ from the defaults."""
    options, task = cfg["model"], cfg["task"]
    defaults = models.MODEL_DATACLASS_REGISTRY[options["_name"]]()
    words = ["--task", task["_name"], "--arch", options["_name"]]
    if task.get("source_lang") is not None:
        words += ["--source-lang", task["source_lang"], "--target-lang", task["target_lang"]]
    if task.get("truncate_source"):
        words.append("--truncate-source")
    for name, value in options.items():
        default = getattr(defaults, name, None)
        if name == "_name" or value is None or value == getattr(default, "value", default):
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, list):
            words.append(",".join(map(str, value)))
        elif not isinstance(value, bool) or name in VALUED_BOOLEANS:
            words.append(str(value))
    return shlex.join(words)


def fairseq_model(exported: Exported) -> tuple[Model, dict[str, Tensor]]:
    """fairseq's model of the same architecture, and its parameters in float32.

    Raises:
        InputError: the plugin's options cannot express the architecture.
    """
    model = _same_model(exported)
    return model, our_state(model, _parameters(load_model(exported, "float32").state_dict(), model))


def _same_model(exported: Exported) -> Model:
    config, path = exported.config, exported.directory / CONFIG
    if config.share_embeddings and exported.source != exported.target:
        raise InputError(
            f"{exported.directory} has one table of embeddings for two dictionaries: in fairseq they must be the same"
        )
    name = _family(config) + ("" if config.encoder else "_lm")
    sizes = (config.encoder or config.decoder).vocab_size, config.decoder.vocab_size
    try:
        model = read_model(_options(config), name, entries=sizes)
        found = _essence(plain_config(model.module))
    except UnsupportedModelError as error:
        raise InputError(f"{path} cannot be expressed in fairseq: it would have {error}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    for name, wanted in _essence(config).items():
        if found[name] != wanted:
            raise InputError(
                f"{path}: {name} {_shown(wanted)} cannot be expressed by the options of fairseq's models, in which it "
                f"would be {_shown(found[name])}"
            )
    return model


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _mixers(config: ModelConfig) -> list[MixerSpec]:
    return [mixer for stack in (config.encoder, config.decoder) if stack is not None for mixer in stack.mixers]


def _family(config: ModelConfig) -> str:
    """The name of the architecture family; `read_model` finds a more specific one for lightweight convolutions."""
    return "talkconv" if all(mixer.kind == "talk" for mixer in _mixers(config)) else "dynamicconv"


def _first(mixers: Iterable[MixerSpec], name: str, otherwise: Any) -> Any:
    """The value in the first mixer that uses it."""
    return next((getattr(mixer, name) for mixer in mixers if name in MIXERS[mixer.kind].reads), otherwise)


def _of_each(mixers: Iterable[MixerSpec], option: LayerOption) -> list[Any]:
    """An option's entry for each layer, or one if they are all the usual one."""
    having = readers(option.field)
    values = [getattr(mixer, option.field) if mixer.kind in having else option.usual for mixer in mixers]
    return values if any(value != option.usual for value in values) else [option.usual]


def _options(config: ModelConfig) -> dict[str, Any]:
    """The options of the plugin's architecture, without those whose default has no effect."""
    decoder, mixers = config.decoder, _mixers(config)
    normalize = _first(mixers, "normalize", "softmax")
    attends = decoder.encoder_dim is not None
    options = {
        "dropout": decoder.dropout,
        "attention_dropout": (
            decoder.attention_dropout if attends else _first(mixers, "attention_dropout", mixers[0].attention_dropout)
        ),
        "relu_dropout": decoder.activation_dropout,
        "input_dropout": _first(mixers, "input_dropout", 0.0),
        "weight_dropout": _first(mixers, "weight_dropout", 0.0),
        "activation_fn": decoder.activation,
        "weight_normalization": normalize,
        "weight_softmax": normalize == "softmax",
        **{each.field: _first(mixers, each.field, each.usual) for each in LAYER_OPTIONS if not each.per_layer},
        "layernorm_embedding": decoder.embedding_norm,
        "no_scale_embedding": decoder.embed_scale == 1.0,
        "no_token_positional_embeddings": decoder.positions == "none",
        "decoder_output_dim": decoder.last_dim,
        "share_decoder_input_output_embed": decoder.share_input_output and not config.share_embeddings,
        "max_target_positions": decoder.max_positions,
        **_side_options("decoder", decoder),
        **attention_options(config),
    }
    if (softmax := decoder.adaptive_softmax) is not None:
        options |= {
            "adaptive_softmax_cutoff": list(softmax.cutoff),
            "adaptive_softmax_factor": softmax.factor,
            "adaptive_softmax_dropout": softmax.dropout,
        }
    if config.encoder is not None:
        options |= {
            **_side_options("encoder", config.encoder),
            "share_all_embeddings": config.share_embeddings,
            "no_cross_attention": not attends,
            "max_source_positions": config.encoder.max_positions,
        }
        return options
    options |= {"decoder_input_dim": decoder.word_dim, "tokens_per_sample": decoder.max_positions}
    if softmax is not None:
        options |= {"tie_adaptive_weights": softmax.tie_weights, "tie_adaptive_proj": softmax.tie_proj}
    if (words := decoder.adaptive_input) is not None:
        options |= {
            "adaptive_input": True,
            "adaptive_input_cutoff": list(words.cutoff),
            "adaptive_input_factor": words.factor,
        }
    return options


def _side_options(side: str, stack: StackConfig) -> dict[str, Any]:
    mixers = stack.mixers
    kinds = [mixer.kind for mixer in mixers]
    heads = stack.num_heads if stack.encoder_dim is not None else _first(mixers, "num_heads", stack.num_heads)
    options = {
        "embed_dim": stack.embed_dim,
        "conv_dim": _first(mixers, "conv_dim", stack.embed_dim),
        "ffn_embed_dim": stack.ffn_dim,
        "layers": len(mixers),
        "attention_heads": heads,
        "normalize_before": stack.normalize_before,
        "learned_pos": stack.positions == "learned",
        "kernel_size_list": [mixer.kernel_size for mixer in mixers],
        "glu": _first(mixers, "glu", False),
        "conv_type": kinds[0] if len(set(kinds)) == 1 else ",".join(kinds),
        **{each.field: _of_each(mixers, each) for each in LAYER_OPTIONS if each.per_layer},
        "layerdrop": stack.layerdrop,
    }
    return {f"{side}_{name}": value for name, value in options.items()}


def _essence(config: ModelConfig) -> dict[str, Any]:
    """Everything about an architecture that affects its results, by its name in config.json."""
    essence: dict[str, Any] = {}
    for side, stack in (("encoder_stack", config.encoder), ("decoder_stack", config.decoder)):
        if stack is None:
            continue
        values = {field.name: getattr(stack, field.name) for field in fields(stack)}
        values |= {"input_dim": stack.word_dim, "output_dim": stack.last_dim, "layers": len(values.pop("mixers"))}
        for name in (*OF_ENCODER_ATTENTION, *_OF_OUTPUTS):
            if side == "encoder_stack" or (name in OF_ENCODER_ATTENTION and stack.encoder_dim is None):
                del values[name]
        essence |= {f"{side}.{name}": value for name, value in values.items()}
        for i, mixer in enumerate(stack.mixers):
            essence |= {
                f"{side}.mixers[{i}].{name}": getattr(mixer, name) for name in ("kind", *MIXERS[mixer.kind].reads)
            }
    essence["share_embeddings"] = config.share_embeddings
    return essence


def _parameters(plain: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """The parameters under fairseq's names; a parameter that is tied in fairseq's model appears under all its names."""
    names: dict[int, list[str]] = {}
    state = {}
    parameters = dict(model.module.named_parameters(remove_duplicate=False))
    for name, buffer in model.module.state_dict().items():
        if name in parameters:
            names.setdefault(id(parameters[name]), []).append(name)
        # Without a version, the file would be read as one of an old fairseq. The other buffers' values are never read.
        elif name.endswith("version"):
            state[name] = buffer
        else:
            state[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    for tied in names.values():
        if found := [plain[name] for name in tied if name in plain]:
            state |= dict.fromkeys(tied, found[0])
    return state


def _settings(exported: Exported, model: Model) -> dict[str, Any]:
    """The cfg that fairseq's trainer would save."""
    settings = exported.settings
    task: dict[str, Any] = {"task": "language_modeling", "criterion": "cross_entropy"}
    if exported.config.encoder is not None:
        task = {
            "task": "translation",
            "criterion": "label_smoothed_cross_entropy",
            "label_smoothing": 0.1,
            "source_lang": settings.source_lang,
            "target_lang": settings.target_lang,
            "truncate_source": settings.truncate_source,
        }
    if exported.config.decoder.adaptive_softmax is not None:
        task["criterion"] = "adaptive_loss"
    training = {"optimizer": "adam", "lr_scheduler": "inverse_sqrt"}
    with quietly(user_warnings=False):
        cfg = convert_namespace_to_omegaconf(Namespace(arch=model.architecture, **model.options, **task, **training))
    content = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    assert isinstance(content, dict)
    # Set here because hydra would interpret some characters of a path.
    content["task"] |= {
        "data": str(exported.directory.resolve()),
        "max_target_positions": settings.max_target_positions,
    }
    if exported.config.encoder is not None:
        content["task"]["max_source_positions"] = settings.max_source_positions
    content["model"] = {"_name": model.architecture, **model.options}
    return content
