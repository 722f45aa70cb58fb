"""The architectures by name, as a table: what each changes of the base model (config.py), and their registration.

Numbers: Wu et al. 2019, section 5 and fairseq's LightConv (the paper's own code).
"""

import dataclasses
import logging
import os

from fairseq import models as fairseq_models
from fairseq.models import register_model

from lightconv_plugin.models.config import ConvTransformerConfig
from lightconv_plugin.models.encoder_decoder import ConvTransformerModel

logger = logging.getLogger(__name__)


def _sides(**options) -> dict:
    """The same option for the encoder and the decoder."""
    return {f"{side}_{name}": value for name, value in options.items() for side in ("encoder", "decoder")}


_BIG = _sides(embed_dim=1024, ffn_embed_dim=4096, attention_heads=16)

SUFFIXES = {
    "": {},
    "_wmt_en_de": {},
    "_iwslt_de_en": {
        **_sides(embed_dim=512, ffn_embed_dim=1024, attention_heads=4, glu=False),
        "attention_dropout": 0.1,
        "weight_dropout": 0.1,
        "input_dropout": 0.0,
    },
    "_wmt_en_de_big": {**_BIG, "dropout": 0.3, "attention_dropout": 0.1},
    "_wmt_en_fr_big": {**_BIG, "dropout": 0.1, "attention_dropout": 0.1},
    "_wmt_zh_en_big": {**_BIG, "dropout": 0.2, "attention_dropout": 0.2, "weight_dropout": 0.2},
}

# Name of the family → its token mixer. `lightconv` is upstream's name for both; there --{encoder,decoder}-conv-type
# chooses, and means dynamic when not given.
FAMILIES = {"lightweightconv": "lightweight", "dynamicconv": "dynamic"}
UPSTREAM_FAMILY = {"lightconv": "dynamic"}

ARCHITECTURES = {
    family + suffix: {**_sides(conv_type=mixer), **options}
    for family, mixer in {**FAMILIES, **UPSTREAM_FAMILY}.items()
    for suffix, options in SUFFIXES.items()
}


def _config_class(name: str, options: dict) -> type:
    """A dataclass of its own for each architecture: the one form of preset that both fairseq-train and hydra read."""
    by_name = {f.name: f for f in dataclasses.fields(ConvTransformerConfig)}
    changed = [
        (key, by_name[key].type, dataclasses.field(default=value, metadata=by_name[key].metadata))
        for key, value in options.items()
    ]
    return dataclasses.make_dataclass(name, changed, bases=(ConvTransformerConfig,), namespace={"__module__": __name__})


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _forget_upstream() -> type:
    """Removes fairseq's own `lightconv` and its architectures from the registries; returns its model class."""
    upstream = fairseq_models.MODEL_REGISTRY.pop("lightconv")
    for architecture in fairseq_models.ARCH_MODEL_INV_REGISTRY.pop("lightconv"):
        for registry in ("ARCH_MODEL_REGISTRY", "ARCH_MODEL_NAME_REGISTRY", "ARCH_CONFIG_REGISTRY"):
            getattr(fairseq_models, registry).pop(architecture)
    return upstream


def _register() -> None:
    families = dict(FAMILIES)
    upstream_members = {}
    if os.environ.get("LIGHTCONV_KEEP_UPSTREAM", "") in ("", "0"):
        families |= UPSTREAM_FAMILY
        # The addresses of the released models, for from_pretrained("dynamicconv.glu.wmt16.en-de").
        upstream_members["hub_models"] = _forget_upstream().hub_models
        logger.info("the lightconv architectures are lightconv_plugin's; LIGHTCONV_KEEP_UPSTREAM=1 leaves fairseq's")
    for name, options in ARCHITECTURES.items():
        family = name.split("_")[0]
        if family not in families:
            continue
        config = _config_class(_camel(name) + "Config", options)
        members = upstream_members if family in UPSTREAM_FAMILY else {}
        model = type(_camel(name) + "Model", (ConvTransformerModel,), {"__module__": __name__, **members})
        # As module attributes they can be imported (architectures.DynamicconvModel), so also pickled for workers.
        globals().update({config.__name__: config, model.__name__: model})
        register_model(name, dataclass=config)(model)


_register()
