"""The named encoder-decoders, as a table of their differences from the base model (config.py), and the registration of
all architectures. The language models' tables are in language_model_config.py.

Numbers: Wu et al. 2019, section 5, and fairseq's LightConv (the paper's own code); Lioutas & Guo 2020 and its code.
"""

import contextlib
import dataclasses
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from fairseq import models as fairseq_models
from fairseq.models import register_model, register_model_architecture
from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf

from lightconv_plugin.errors import InputError
from lightconv_plugin.mixers import UPSTREAM_FAMILY, WU_FAMILIES
from lightconv_plugin.models.config import ConvTransformerConfig
from lightconv_plugin.models.encoder_decoder import ConvTransformerModel
from lightconv_plugin.models.language_model import ConvLanguageModel
from lightconv_plugin.models.language_model_config import ConvLanguageModelConfig, language_model_architectures
from lightconv_plugin.models.options import option

logger = logging.getLogger(__name__)


def _sides(**options) -> dict:
    """The same option for the encoder and the decoder."""
    return {f"{side}_{name}": value for name, value in options.items() for side in ("encoder", "decoder")}


_IWSLT = {
    **_sides(embed_dim=512, ffn_embed_dim=1024, attention_heads=4, glu=False),
    "attention_dropout": 0.1,
    "weight_dropout": 0.1,
    "input_dropout": 0.0,
}
_BIG = _sides(embed_dim=1024, ffn_embed_dim=4096, attention_heads=16)

SUFFIXES = {
    "": {},
    "_wmt_en_de": {},
    "_iwslt_de_en": _IWSLT,
    "_wmt_en_de_big": {**_BIG, "dropout": 0.3, "attention_dropout": 0.1},
    "_wmt_en_fr_big": {**_BIG, "dropout": 0.1, "attention_dropout": 0.1},
    "_wmt_zh_en_big": {**_BIG, "dropout": 0.2, "attention_dropout": 0.2, "weight_dropout": 0.2},
    # Upstream has no name for the paper's summarisation model: base size, regularised as its recipe says.
    "_cnndm": {"dropout": 0.3, "attention_dropout": 0.1, "weight_dropout": 0.1},
}


def _reach(encoder: list[int], decoder: list[int]) -> dict:
    return {"encoder_kernel_size_list": encoder, "decoder_kernel_size_list": decoder}


_TALK = {**_sides(conv_type="talk"), "activation_fn": "swish"}
_TALK_BASE = _reach([1, 3, 7, 15, 15, 15, 15], [1, 3, 7, 15, 15, 15])
_TALK_LONG = _reach([3, 7, 15, 31, 31, 31, 31], [3, 7, 15, 31, 31, 31])
# The published summarisation models have 6 decoder heads, which does not divide their 512 channels, so they cannot be
# built. Here they have 8, as in the encoder. Their dropout of the offsets was meant for attention, too.
_TALK_CNNDM = {"dropout": 0.3, "attention_dropout": 0.1, "weight_dropout": 0.1}

TALK_SUFFIXES = {
    "": _TALK_BASE,
    "_wmt_en_de": _TALK_BASE,
    "_iwslt_de_en": {**_TALK_BASE, **_IWSLT},
    "_wmt_en_de_big": {**_TALK_LONG, **_BIG, "dropout": 0.3, "attention_dropout": 0.1},
    "_wmt_en_fr_big": {**_TALK_LONG, **_BIG, "dropout": 0.1, "attention_dropout": 0.1},
    "_cnndm_std": {**_TALK_LONG, **_TALK_CNNDM},
    "_cnndm_deep": {
        **_TALK_CNNDM,
        "encoder_layers": 10,
        "decoder_layers": 10,
        **_reach([3, 7, 15, *[31] * 7], [3, 7, *[31] * 8]),
    },
}

# Upstream's parsers set the defaults of these, so an architecture that somebody registers on its models may read them,
# and cannot change them: it is the same model here.
_PARSED = ("encoder_conv_type", "decoder_conv_type", "weight_softmax")
_PARSED_LM = (
    *("dropout", "attention_dropout", "relu_dropout", "decoder_conv_type", "weight_softmax"),
    *("character_filters", "character_embedding_dim", "char_embedder_highway_layers"),
)

ARCHITECTURES = {
    family + suffix: {**_sides(conv_type=mixer), **options}
    for family, mixer in WU_FAMILIES.items()
    for suffix, options in SUFFIXES.items()
    if not (family in UPSTREAM_FAMILY and suffix == "_cnndm")
} | {"talkconv" + suffix: {**_TALK, **options} for suffix, options in TALK_SUFFIXES.items()}

LANGUAGE_MODELS = language_model_architectures()


def _unregistered(state: Mapping) -> Iterator[tuple[str, MutableMapping]]:
    """The name of the architecture in a checkpoint's settings, and the settings, unless it is registered."""
    known = fairseq_models.ARCH_MODEL_REGISTRY.keys() | fairseq_models.MODEL_DATACLASS_REGISTRY.keys()
    for settings, *keys in (
        ((state.get("cfg") or {}).get("model"), "_name", "arch"),
        (state.get("args"), "arch", "_name"),
    ):
        options = vars(settings) if isinstance(settings, Namespace) else settings
        if not isinstance(options, MutableMapping):
            continue
        name = next(filter(None, map(options.get, keys)), None)
        if isinstance(name, str) and name not in known:
            yield name, options


def use_registered_architecture(state: Mapping) -> None:
    """Rename the architecture in a checkpoint's settings, in place, if nobody has registered it in this process.

    A user's own is registered only where their code is imported. The file has all options of its model, so any
    architecture with the same options builds it. Settings of other models are left alone.
    """
    encoder = any(str(name).startswith("encoder.") for name in state.get("model") or ())
    for _, options in _unregistered(state):
        if "decoder_kernel_size_list" in options:
            ours = "dynamicconv" if encoder else "dynamicconv_lm"
            options.update({key: ours for key in ("_name", "arch") if key in options})


def check_architecture(state: Mapping) -> None:
    """Raise InputError if nobody has registered the architecture in a checkpoint's settings in this process."""
    for name, _ in _unregistered(state):
        raise InputError(
            f"its architecture {name} is not registered: the code that registers it must be imported, in fairseq's "
            "commands by --user-dir, in Python before lightconv_plugin opens the checkpoint"
        )


def _config_class(name: str, options: Mapping, base: type) -> type:
    """A separate dataclass for each architecture: the only form of preset that both fairseq-train and hydra read."""
    by_name = {f.name: f for f in dataclasses.fields(base)}
    changed = [(key, by_name[key].type, option(value, **by_name[key].metadata)) for key, value in options.items()]
    return dataclasses.make_dataclass(name, changed, bases=(base,), namespace={"__module__": __name__})


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _forget_upstream(model: str) -> tuple[Any, dict[str, Callable]]:
    """Remove one of fairseq's own models and its architectures from the registries.

    Returns its class, and the architectures that others registered on it earlier.
    """
    upstream = fairseq_models.MODEL_REGISTRY.pop(model)
    others = {}
    for architecture in fairseq_models.ARCH_MODEL_INV_REGISTRY.pop(model):
        for registry in ("ARCH_MODEL_REGISTRY", "ARCH_MODEL_NAME_REGISTRY"):
            getattr(fairseq_models, registry).pop(architecture)
        function = fairseq_models.ARCH_CONFIG_REGISTRY.pop(architecture)
        if getattr(function, "__module__", None) != upstream.__module__:
            others[architecture] = function
    return upstream, others


class _Unbuilt(ConfigNode):
    """A configuration that is built when hydra asks for it. To build those of all architectures takes half a second."""

    @property  # type: ignore[override]
    def node(self) -> Any:
        return OmegaConf.structured(self._content) if dataclasses.is_dataclass(self._content) else self._content

    @node.setter
    def node(self, content: Any) -> None:  # hydra's loader sets a copy
        self._content = content


@contextlib.contextmanager
def _built_later() -> Iterator[None]:
    """What is stored for hydra within the block is built when it is asked for."""
    store = ConfigStore.instance()

    def put(name: str, node: Any, group: str, provider: str) -> None:
        store.repo[group][f"{name}.yaml"] = _Unbuilt(f"{name}.yaml", node, group, None, provider)

    store.store = put
    try:
        yield
    finally:
        del store.store


def _register(
    architectures: Mapping[str, Mapping], config_base: type, model_base: type, upstream_members: dict | None
) -> None:
    """Register a dataclass and a model class for each architecture, under the architecture's name.

    `upstream_members` are added to the classes with upstream's names; None: those names are not registered.
    """
    for name, options in architectures.items():
        members = upstream_members if name.split("_")[0] in UPSTREAM_FAMILY else {}
        if members is None:
            continue
        config = _config_class(_camel(name) + "Config", options, config_base)
        model = type(_camel(name) + "Model", (model_base,), {"__module__": __name__, **members})
        # As module attributes they can be imported (architectures.DynamicconvModel) and therefore pickled for workers.
        globals().update({config.__name__: config, model.__name__: model})
        register_model(name, dataclass=config)(model)


def _take_over() -> bool:
    """Whether these models replace fairseq's own under upstream's names."""
    if os.environ.get("LIGHTCONV_KEEP_UPSTREAM", "") not in ("", "0"):
        return False
    logger.info("the lightconv architectures are lightconv_plugin's; LIGHTCONV_KEEP_UPSTREAM=1 keeps fairseq's")
    return True


_theirs: dict[str, dict[str, Callable]] = {}
_encoder_decoder: dict[str, Any] | None = None
_language_model: dict[str, Any] | None = None
if _take_over():
    _upstream, _theirs["lightconv"] = _forget_upstream("lightconv")
    # Keep the URLs of the released models, for from_pretrained("dynamicconv.glu.wmt16.en-de").
    _encoder_decoder = {"hub_models": _upstream.hub_models, "parsed_defaults": _PARSED}
    _, _theirs["lightconv_lm"] = _forget_upstream("lightconv_lm")
    _language_model = {"parsed_defaults": _PARSED_LM}
with _built_later():
    _register(ARCHITECTURES, ConvTransformerConfig, ConvTransformerModel, _encoder_decoder)
    _register(LANGUAGE_MODELS, ConvLanguageModelConfig, ConvLanguageModel, _language_model)
for _model, _functions in _theirs.items():
    for _name, _function in _functions.items():
        register_model_architecture(_model, _name)(_function)
